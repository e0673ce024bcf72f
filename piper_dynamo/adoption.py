"""What a rank holds of a model's parameters and buffers once a program is made for them.

Before its first step every rank has the whole model, or a recipe for it. Then a rank keeps of each
parameter all, its shard, or nothing, as the plan says, and the rest of the memory is freed.

Signature: plan, values of the graph's arguments -> the same, with their state attached.
"""

import functools
from collections.abc import Sequence
from typing import Any

from piper_dynamo.agreement import check_copies
from piper_dynamo.garbage import keep_large_apart
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.options import Options
from piper_dynamo.pending import filling, spec_of
from piper_dynamo.planning import Plan
from piper_dynamo.sharding import take_block
from piper_dynamo.state import StepState, record_of
from piper_dynamo.strategy import Replicate


def adopt(
    plan: Plan, state: StepState, args: Sequence[Arg], values: Sequence[Any], options: Options
) -> None:
    """Leave of parameters and buffers what this rank holds by the plan.

    Raises:
        PiperError: Copies of a parameter differ between ranks, or one has no values and nothing
            makes them.
    """
    if any(directive.zero >= 2 for directive in plan.strategy.of(Replicate)):
        keep_large_apart()
    holders = plan.holders()
    of_kind = {kind: [arg for arg in args if arg.kind is kind] for kind in ArgKind}
    _compare_copies(plan, state, of_kind[ArgKind.PARAMETER], values, options, holders)
    _adopt_parameters(plan, state, of_kind[ArgKind.PARAMETER], values, options, holders)
    for arg in of_kind[ArgKind.BUFFER]:
        if arg.position in holders:
            state.adopt_buffer(
                values[arg.position],
                arg.name,
                holders[arg.position],
                changes=arg.position in plan.changed,
                fill=filling(values[arg.position], options.init_fn),
            )


def _compare_copies(
    plan: Plan,
    state: StepState,
    parameters: Sequence[Arg],
    values: Sequence[Any],
    options: Options,
    holders: dict[int, tuple[int, ...]],
) -> None:
    """Of parameters that several ranks hold, and that no step has taken yet."""
    shared = {
        arg.name: (values[arg.position], ranks)
        for arg in parameters
        if len(ranks := holders.get(arg.position, ())) > 1 and not record_of(values[arg.position])
    }
    if shared:
        comm = state.comm
        mine = {name: given for name, given in shared.items() if comm.rank in given[1]}
        check_copies(plan, comm, mine, options.start, options.init_fn)


def _adopt_parameters(
    plan: Plan,
    state: StepState,
    parameters: Sequence[Arg],
    values: Sequence[Any],
    options: Options,
    holders: dict[int, tuple[int, ...]],
) -> None:
    comm = state.comm
    layouts, group = plan.layouts(comm.rank), plan.group(comm.rank)
    distributed = any(layout.groups for layout in layouts.values())
    for arg in parameters:
        ranks, value = holders.get(arg.position, (0,)), values[arg.position]
        layout = layouts.get(arg.position)
        block = None
        if distributed:
            groups = (layout.groups if layout is not None else ()) or (group,)
            mesh = comm.mesh(groups, value.device.type)
            block = functools.partial(take_block, value, layout, mesh, comm.rank)
        state.adopt(
            value,
            arg.name,
            ranks,
            counts=comm.rank in plan.counting(arg.position, ranks[0]),
            spec=spec_of(value),
            fill=filling(value, options.init_fn),
            groups=layout.reduced_over(group, comm.rank) if layout is not None else {},
            block=block,
        )
