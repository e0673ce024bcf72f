"""The weight of each microbatch in the loss, which is also what its backward starts from.

Signature: plan, the call's arguments -> a number per microbatch of this rank's replica.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperRuntimeError, format_error
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.program import Op
from piper_dynamo.planning import Plan, split_of
from piper_dynamo.runtime.comm import STATE, Communicator


def loss_weights(
    plan: Plan, values: Sequence[Any], comm: Communicator, *, needed: bool
) -> list[float]:
    """1 / (microbatches x replicas) for a mean, 1 for a sum, else as the user weighs them.

    Args:
        plan: What is run.
        values: The arguments of the call.
        comm: The way to the other replicas.
        needed: Whether this rank needs them; it may have to weigh for others.

    Raises:
        PiperRuntimeError: The user's function asks for what the model does not take.
    """
    loss, count = split_of(plan.strategy).loss, plan.dag.num_microbatches
    replica, replicas = plan.replica(comm.rank)
    if loss == "mean":
        return [1.0 / (count * replicas)] * count
    if loss == "sum":
        return [1.0] * count
    if plan.weighers:
        table = torch.zeros(replicas, count, dtype=torch.float64)
        if comm.rank == plan.weighers[replica]:
            table[replica] = torch.tensor(_weigh(plan, loss, values), dtype=torch.float64)
        table = comm.reduce_now(table)
        return _shares(table[replica].tolist(), table.sum().item())
    return _own_weights(plan, loss, values, comm) if needed else []


def _own_weights(
    plan: Plan, weigh: Callable[..., Any], values: Sequence[Any], comm: Communicator
) -> list[float]:
    """Of a rank whose group can weigh its microbatches: as shares of their sum over replicas."""
    weights = _weigh(plan, weigh, values)
    total = sum(weights)
    group = plan.group(comm.rank)
    if len(group) > 1:
        mine = torch.tensor([total], dtype=torch.float64)
        handle = comm.start_collective(Op.ALL_REDUCE, [mine], (STATE, group), [mine])
        total = comm.wait_all(handle)[0].item()
    return _shares(weights, total)


def _shares(weights: list[float], total: float) -> list[float]:
    """Where nothing counts at all, nothing has a gradient."""
    return [weight / total if total else 0.0 for weight in weights]


def _weigh(plan: Plan, weigh: Callable[..., Any], values: Sequence[Any]) -> list[float]:
    """The user's weight of each microbatch of this replica."""
    count = plan.dag.num_microbatches
    parts: dict[str, list[Any]] = {}
    for arg in plan.args:
        if arg.kind is ArgKind.DATA:
            value = values[arg.position]
            dim = plan.dims.get(arg.position)
            parts[arg.name] = list(value.chunk(count, dim)) if dim is not None else [value] * count
    wanted = compat.parameter_names(weigh)
    unknown = [name for name in wanted if name not in parts]
    if unknown:
        raise PiperRuntimeError(
            format_error(
                f"the loss weight function asks for {', '.join(unknown)}",
                {"arguments the model uses": ", ".join(parts)},
                hint="name its parameters like the model's tensor arguments",
            )
        )
    return [float(weigh(**{n: parts[n][mb] for n in wanted})) for mb in range(count)]
