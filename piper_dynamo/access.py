"""Functions on a compiled step: parameters, data rank, plan, gradient norm, timeline."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperError
from piper_dynamo.measure import recorder
from piper_dynamo.pending import fill, source_of
from piper_dynamo.planning import Plan
from piper_dynamo.state import ANCHOR, Record, StepState, record_of


def module_of(step: Any) -> nn.Module:
    """The user's module behind a compiled step.

    Raises:
        PiperError: `step` is not a module compiled with the piper backend.
    """
    module = getattr(step, "_orig_mod", step)
    if not isinstance(module, nn.Module):
        raise PiperError(
            "expected what torch.compile(model, backend='piper', ...) or piper.compile returned, "
            f"got {type(step).__name__}"
        )
    return module


def known_state(step: Any) -> StepState | None:
    """The state of a step; None before it is prepared or run."""
    records = (record_of(param) for param in module_of(step).parameters())
    return next((r.owner for r in records if r is not None), None)


def state_of(step: Any) -> StepState:
    """The state of a step that has been prepared or run.

    Raises:
        PiperError: It has not.
    """
    state = known_state(step)
    if state is None:
        raise PiperError(
            "this step has no state yet: call piper.prepare(step, *example_inputs) or run it once"
        )
    return state


def named_parameters(step: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters this rank holds, by the user's names; an empty anchor where it holds none."""
    state = state_of(step)
    found = False
    for name, param, _ in held(step, state):
        found = True
        yield name, param
    if not found:
        yield ANCHOR, state.anchor


def held(step: Any, state: StepState) -> Iterator[tuple[str, nn.Parameter, Record | None]]:
    """What the optimizer steps on this rank, with what is known of it."""
    for name, param in module_of(step).named_parameters():
        record = record_of(param)
        # What no program uses (yet) is rank 0's to train; the others keep it as it is.
        if state.rank == 0 if record is None else record.held:
            if source_of(param) is not None and not fill(param, state.init):
                state.lacks(name, param)
            yield name, param if record is None else record.stepped(param), record


def parameters(step: Any) -> list[nn.Parameter]:
    """The parameters this rank holds, for an optimizer."""
    return [param for _, param in named_parameters(step)]


def data_rank(step: Any) -> int:
    """Which shard of the data this rank loads: ranks of one replica load the same."""
    return state_of(step).data_rank


def data_world(step: Any) -> int:
    """How many shards of the data there are."""
    return state_of(step).data_world


def loss_scale(step: Any) -> float:
    """What the next step's loss is multiplied by where its backward starts; 1 without an option."""
    return state_of(step).scaler.factor


def explain(step: Any) -> Plan:
    """The plan of the program that this step ran or prepared last."""
    plan = state_of(step).last
    if not isinstance(plan, Plan):
        raise PiperError("this step has not been prepared or run yet")
    return plan


def clip_grad_norm_(step: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`.

    Every rank must call it. Each parameter counts once, however many ranks hold it.

    Args:
        step: A compiled step whose gradients are there.
        max_norm: Gradients are multiplied by max_norm / (norm + 1e-6) where that is below 1.
        norm_type: The p of the p-norm; may be infinity.

    Returns:
        The norm before scaling: 0-dim, float64, the same on every rank.
    """
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float) or norm_type <= 0:
        raise PiperError(f"clip_grad_norm_(norm_type={norm_type!r}): give a number > 0 or infinity")
    state = state_of(step)
    grads, counted = [], []
    for _, param, record in held(step, state):
        local = compat.local_tensor(param.grad) if param.grad is not None else None
        if local is not None and local.numel():
            grads.append(local)
            if record is None or record.counts:
                counted.append(local)
    total = _global_norm(state, counted, norm_type)
    if grads and max_norm != float("inf"):
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.device, grad.dtype if grad.dtype.is_floating_point else None))
    return total


def _global_norm(state: StepState, grads: list[Tensor], norm_type: float) -> Tensor:
    wide = [torch.promote_types(g.dtype, torch.float32) for g in grads]
    dtype = torch.float64
    local = torch.zeros((), dtype=dtype)
    if grads:
        norms = torch.stack(
            [
                torch.linalg.vector_norm(g.to(w), norm_type).to(dtype)
                for g, w in zip(grads, wide, strict=True)
            ]
        ).cpu()
        local = norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()
    if norm_type == float("inf"):
        slots = torch.zeros(state.world_size, dtype=dtype)
        slots[state.rank] = local
        return state.comm.reduce_now(slots).max()  # type: ignore[no-any-return]
    total = state.comm.reduce_now(local.reshape(1))[0]
    return total.pow(1.0 / norm_type)  # type: ignore[no-any-return]


@contextmanager
def record(step: Any) -> Iterator[Any]:
    """Record when this rank runs what: `with piper.record(step) as timeline: step(...)`."""
    state = state_of(step)
    timeline, take = recorder(state.rank)
    state.recorder = take
    try:
        yield timeline
    finally:
        state.recorder = None
