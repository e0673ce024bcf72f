"""Gradients over several steps before one update, with their reductions put off (`no_sync`).

At ZeRO 0 and 1 a step inside `no_sync` reduces no gradient: each rank keeps its own whole sums, and
the first step outside adds their reduction, one per parameter, to its own. At ZeRO 2 and 3 a rank
has no room for whole gradients by design: they are reduced per microbatch, in `no_sync` too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from piper_dynamo.access import state_of
from piper_dynamo.ir.ops import block_spec
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.runtime.comm import STATE
from piper_dynamo.state import Record, StepState


@contextmanager
def no_sync(step: Any) -> Iterator[None]:
    """Steps in here add to the gradients without reducing them, where the ZeRO level allows.

    with piper.no_sync(step):
        for batch in batches[:-1]:
            step(*batch).backward()
    step(*batches[-1]).backward()  # reduces all
    optimizer.step()

    Inside, no `.grad` changes at ZeRO 0 and 1; the next step outside must come before the
    optimizer's. Every rank must enter alike. Memory: one more set of whole gradients.
    Communication of k steps before an update: two reductions per bucket instead of k at ZeRO 0
    and 1; k times the microbatches, as without, at 2 and 3.

    Args:
        step: A compiled step that was prepared or run before.
    """
    state = state_of(step)
    before, state.sync = state.sync, False
    try:
        yield
    finally:
        state.sync = before


def put_off(record: Record, gradient: Tensor) -> None:
    """Add to what is to be reduced later."""
    if record.pending is None:
        record.pending = gradient.clone()
    else:
        record.pending.add_(gradient)


def settle(state: StepState, records: Sequence[Record]) -> dict[str, Tensor]:
    """Reduce what was put off; every replica comes here with the same records.

    Returns:
        By parameter name, the sum over the replicas: a block of it where the parameter is held as
        one.
    """
    waiting = [r for r in records if r.pending is not None]
    for op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):
        for group in sorted({r.groups[op] for r in waiting if op in r.groups}):
            mine = [r for r in waiting if r.groups.get(op) == group]
            values = [r.pending for r in mine if r.pending is not None]
            likes = [TensorSpec.of(value) for value in values]
            if op is Op.REDUCE_SCATTER:
                likes = [block_spec(like, len(group)) for like in likes]
            handle = state.comm.start_collective(op, values, (STATE, group), likes)
            for record, result in zip(mine, state.comm.wait_all(handle), strict=True):
                record.pending = result
    found = {r.name: r.pending for r in waiting if r.pending is not None}
    for record in waiting:
        record.pending = None
    return found
