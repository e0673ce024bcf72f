"""What becomes of a step whose values are not finite: all ranks raise, or skip it, together.

Terms: a *finding* is where a rank's step first made a value that is not finite: an instruction of
its program, and which of its outputs. The loss of a microbatch that weighs nothing is none: a mean
over no label is NaN, and counts nothing. With `nan_check` the emitted program looks at what every
task makes; the looks stay on the device until the step has run. With a dynamic loss scale only the
finished gradients are looked at. Where both are off nothing is done.

Signature: a step's results -> whether its gradients are handed over, the same on every rank.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from piper_dynamo.errors import PiperCaptureError, PiperRuntimeError, format_error
from piper_dynamo.ir.graph import producer, task_of
from piper_dynamo.ir.program import Instr, Op, RankProgram
from piper_dynamo.ir.task import Kind, TaskName
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.comm import Communicator
from piper_dynamo.runtime.executor import Executor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """Where a rank's step made a value that is not finite.

    Attributes:
        rank: Which rank.
        index: Of the instruction, in its program.
        slot: Which of its outputs.
    """

    rank: int
    index: int
    slot: int


def refuse_without_loss(plan: Plan, *, scales: bool, looks: bool) -> None:
    """Options about the loss need one, and a scaled one more range than float16 has (65504).

    Args:
        plan: What is to be run.
        scales: Whether there is a loss scale.
        looks: Whether there is a `nan_check`.

    Raises:
        PiperCaptureError: The plan has none such.
    """
    if not plan.dag.training or not (scales or looks):
        return
    index = plan.dag.loss
    spec = plan.dag.outputs[index].spec if index is not None else None
    if spec is None:
        raise PiperCaptureError(
            format_error(
                "loss_scale= and nan_check= need a loss that is made inside the step",
                hint="return a scalar loss from forward, or watch the gradients in the loop",
            )
        )
    if scales and spec.dtype == torch.float16:
        raise PiperCaptureError(
            format_error(
                "loss_scale= needs a loss of more range than float16",
                hint="make it in float32, e.g. cross_entropy(logits.float(), targets)",
            )
        )


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers in these are; waits for the device."""
    looks = [torch.isfinite(t).all() for t in tensors if t.numel()]
    return not looks or bool(torch.stack(looks).all())


def agree_on_gradients(grads: Sequence[Tensor], comm: Communicator) -> bool:
    """Whether the gradients of all ranks are finite; every rank comes here."""
    bad = torch.tensor([0.0 if are_finite(grads) else 1.0], dtype=torch.float64)
    return bool(comm.reduce_now(bad) == 0)


def check_step(
    plan: Plan,
    executor: Executor,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    comm: Communicator,
    action: str,
) -> bool:
    """Whether all values of a step are finite; every rank comes here.

    Args:
        plan: What has run.
        executor: What ran this rank's program, with its looks.
        weights: Of the losses, in the program's order.
        grads: The finished gradients, in the program's order.
        comm: The way to the others.
        action: "raise" or "skip".

    Returns:
        Whether the step's gradients are to be handed over.

    Raises:
        PiperRuntimeError: They are not finite, and the action is "raise": on all ranks, naming the
            first task and the first parameter.
    """
    mine = list(_findings(plan, executor, weights, grads))
    told = torch.zeros(comm.world_size, 4, dtype=torch.float64)
    of_gradients = (f for f in mine if _parameter(plan, f) is not None)
    for column, found in enumerate((next(iter(mine), None), next(of_gradients, None))):
        if found is not None:  # 0 says nothing
            told[comm.rank, 2 * column] = found.index + 1
            told[comm.rank, 2 * column + 1] = found.slot
    told = comm.reduce_now(told)
    if not told.any():
        return True
    text = _message(plan, _first(plan, told[:, :2]), _first(plan, told[:, 2:]), action)
    if action == "raise":
        raise PiperRuntimeError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return False


def _findings(
    plan: Plan, executor: Executor, weights: Sequence[Tensor], grads: Sequence[Tensor]
) -> Iterator[_Finding]:
    """Of this rank, in the order of its program."""
    program = executor.program
    idle = _idle(plan, program, weights)
    last = {reg: i for i, instr in enumerate(program.instrs) for reg in _made(instr)}
    looks = [
        (at, slot, look)
        for at, slot, look in executor.looks
        if program.instrs[at].outputs[slot] not in idle
    ]
    for (_, reg), grad in zip(program.grads, grads, strict=True):  # a reduction may overflow, too
        at = last[reg]
        slot = program.instrs[at].outputs.index(reg)
        looks.append((at, slot, torch.isfinite(grad).all()))
    if not looks:
        return
    good = torch.stack([look for _, _, look in looks]).tolist()
    bad = [(at, slot) for (at, slot, _), one in zip(looks, good, strict=True) if not one]
    for at, slot in sorted(bad):
        yield _Finding(rank=program.rank, index=at, slot=slot)


def _idle(plan: Plan, program: RankProgram, weights: Sequence[Tensor]) -> frozenset[str]:
    """The losses that count nothing, by the registers of the tasks that make them.

    The ranks that make them need not be those that sum them, to which they are sent then; they have
    the weights for the backward.
    """
    nothing = {reg for reg, one in zip(program.weights, weights, strict=True) if one.item() == 0}
    if not nothing:
        return frozenset()
    found: set[str] = set()
    for node in plan.dag.graph.nodes:
        task = node.meta.get("task")
        if task is not None and task.kind is Kind.LOSS:
            pairs = zip(*node.args, strict=True)
            found.update(_sent(loss).name for loss, weight in pairs if weight.name in nothing)
    return frozenset(found)


def _sent(value: Node) -> Node:
    """What a value was where it was made."""
    while value.meta.get("task") is not None and task_of(value).kind in (Kind.SEND, Kind.RECV):
        (value,) = value.all_input_nodes
    return value


def _made(instr: Instr) -> tuple[str, ...]:
    return instr.outputs if instr.op is not Op.FREE else ()


def _first(plan: Plan, told: Tensor) -> _Finding | None:
    """Of all ranks' first ones: that which comes first in the simulated step."""
    found = [
        _Finding(rank=rank, index=int(index) - 1, slot=int(slot))
        for rank, (index, slot) in enumerate(told.tolist())
        if index
    ]
    if len(found) < 2:
        return next(iter(found), None)
    simulated = plan.simulate()
    return min(found, key=lambda one: (simulated.starts_of(one.rank)[one.index], one.rank))


def _parameter(plan: Plan, found: _Finding) -> str | None:
    """The parameter that a value is the gradient of, or a part of that."""
    program = plan.programs[found.rank]
    reg = program.instrs[found.index].outputs[found.slot]
    names = {arg.position: arg.name for arg in plan.args}
    for position, result in program.grads:
        if result == reg:
            return names[position]
    nodes = {node.name: node for node in plan.dag.graph.nodes}
    node = nodes.get(reg)
    while node is not None:
        task = producer(node).meta.get("task")
        if task is not None and task.kind is Kind.ACCUMULATE:
            return str(task.label)
        node = next((user for user in node.users if _sums(user.meta.get("task"))), None)
    return None


def _sums(task: object) -> bool:
    """Whether a node is on a gradient's way from its task to its sum; a pick has no task."""
    kind = getattr(task, "kind", None)
    return kind in (None, Kind.ACCUMULATE, Kind.CAST, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


def _message(plan: Plan, first: _Finding | None, gradient: _Finding | None, action: str) -> str:
    assert first is not None
    program = plan.programs[first.rank]
    instr = program.instrs[first.index]
    rows = {
        "first": f"{_told_task(instr)} on rank {first.rank}",
        "at": instr.where or "no source line",
        "value": f"{instr.outputs[first.slot]!r}, result {first.slot} of {instr.op} {instr.task}",
        "parameter": "none has such a gradient",
    }
    if gradient is not None:
        by = plan.programs[gradient.rank].instrs[gradient.index]
        rows["parameter"] = f"the gradient of {_parameter(plan, gradient)!r}, {_told_task(by)}"
    replica, count = plan.replica(first.rank)
    if count > 1:
        rows["replica"] = f"{replica} of {count}"
    title = "a value of the step is not finite (NaN or infinity)"
    if action == "skip":
        return format_error(f"{title}: its gradients are not handed over", rows)
    return format_error(
        f"{title}; nothing was updated",
        rows,
        hint="look at this task's inputs; lower the learning rate, clip, or use "
        'nan_check="skip" to go on without such steps',
    )


def _told_task(instr: Instr) -> str:
    """A task in words: its name, stage and microbatch."""
    if instr.op is not Op.RUN:
        return f"{instr.op} {instr.task}"
    name = TaskName.parse(instr.task)
    tags = [f"{tag}={index}" for tag, index in name.region.tags]
    return f"{instr.task} (stage {' '.join(tags) or 'all'}, microbatch {name.mb or 0})"
