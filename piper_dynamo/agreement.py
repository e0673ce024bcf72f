"""What ranks tell one another before they run: their program, and the parameters they start from.

They speak through a key-value store and not by collectives, so that a rank that runs something
else, or nothing, can be named.
"""

import hashlib
import time
from collections.abc import Sequence

from torch import Tensor

from piper_dynamo.errors import PiperRuntimeError, PiperTimeoutError, format_error
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.comm import STATE, Communicator
from piper_dynamo.sharding import digest


def announcement(plan: Plan) -> str:
    """What other ranks read of a program; made once, since it hashes the whole strategy."""
    return f"{plan.fingerprint()} {describe(plan)}"


def agree(plan: Plan, mine: str, comm: Communicator, *, known: bool) -> int:
    """Before a program's first run: every rank must be about to run the same one in this step.

    Each rank leaves the fingerprint of every step it starts; only a rank with a new program
    reads the others', so steps that all ranks know cost one unanswered message.

    Args:
        plan: What this rank is about to run.
        mine: Its announcement.
        comm: The way to the others.
        known: Whether all ranks have run it together before.

    Returns:
        The step's number on this communicator.

    Raises:
        PiperRuntimeError: A rank runs another program in this step.
        PiperTimeoutError: A rank does not start it in time.
    """
    number = comm.steps
    comm.steps = number + 1
    if comm.world_size == 1:
        return number
    comm.publish(_key("step", number, comm.rank), f"{number} {mine}")
    if known:
        return number
    deadline = time.monotonic() + min(comm.timeout_s, 1e9)
    silent = compare(plan, comm, number, deadline)
    if silent:
        waited = f" within {comm.timeout_s:g} s" if comm.timeout_s < float("inf") else ""
        raise PiperTimeoutError(
            format_error(
                f"not all ranks started the step{waited}",
                {"missing": "\n".join(f"rank {r} did not start this step" for r in silent)},
                hint="every rank must call the step; look for the first failed rank",
            )
        )
    return number


def _key(what: str, number: int, rank: int) -> str:
    """Where a rank says something for the n-th time; few keys, since ranks are hardly one apart."""
    return f"{what}/{number % 16}/{rank}"


def compare(plan: Plan, comm: Communicator, number: int, deadline: float) -> list[int]:
    """Compare this rank's program of a step with the others'.

    Returns:
        The ranks that have not started the step by the deadline.

    Raises:
        PiperRuntimeError: A rank runs another program in this step.
    """
    mine = plan.fingerprint()
    differing, silent = [], []
    for rank in range(comm.world_size):
        remaining = max(deadline - time.monotonic(), 0.0)
        text = comm.lookup(_key("step", number, rank), f"{number} ", remaining)
        if text is None:
            silent.append(rank)
            continue
        _, theirs, what = text.split(" ", 2)
        if theirs != mine:
            differing.append(f"rank {rank}: {what}")
    if differing:
        raise _different_programs(plan, comm, differing)
    return silent


def check_replicas(
    plan: Plan, comm: Communicator, params: Sequence[tuple[str, Tensor]], start: str
) -> None:
    """Replicas must start from equal parameters.

    Args:
        plan: Of the step.
        comm: This rank's.
        params: Name and value of each replicated parameter, whole.
        start: "equal" refuses others; "broadcast" overwrites those that differ with the values of
            the first replica.

    Raises:
        PiperRuntimeError: They differ; names the parameters. Or ranks ask for different things.
        PiperTimeoutError: A replica does not come here.
    """
    number = comm.adoptions
    comm.adoptions = number + 1
    text = f"{number} {plan.fingerprint()} {start} {','.join(digest([v for _, v in params]))}"
    comm.publish(_key("replicas", number, comm.rank), f"{text} {describe(plan)}")
    group = plan.group(comm.rank)
    others: list[str] = []
    found: dict[int, list[str]] = {}
    for rank in group:
        other = comm.lookup(_key("replicas", number, rank), f"{number} ", comm.timeout_s)
        if other is None:
            raise PiperTimeoutError(
                format_error(
                    f"rank {rank} did not prepare the step within {comm.timeout_s:g} s",
                    {"this rank": comm.rank, "replicas": group},
                    hint="every rank must call the same step; look for the first failed rank",
                )
            )
        _, program, theirs, values, what = other.split(" ", 4)
        if program != plan.fingerprint():
            others.append(f"rank {rank}: {what}")
        elif theirs != start:
            others.append(f"rank {rank}: option 'start' is {theirs!r}, here {start!r}")
        found[rank] = values.split(",")
    if others:
        raise _different_programs(plan, comm, others)
    unequal = [i for i in range(len(params)) if len({values[i] for values in found.values()}) > 1]
    if unequal and start == "broadcast":
        _copy_first([params[i][1] for i in unequal], group, comm)
    elif unequal:
        raise _different_parameters(params, unequal, found, comm.rank)


def _copy_first(values: Sequence[Tensor], group: tuple[int, ...], comm: Communicator) -> None:
    """Give every rank of the group its first rank's values: the sum with zeros of all others."""
    for value in values:
        local = value.detach()
        if comm.rank != group[0]:
            local.zero_()
        given = local.contiguous()
        handle = comm.start_collective(
            "all_reduce", [given], (STATE, group), [TensorSpec.of(given)]
        )
        (total,) = comm.wait_all(handle)
        local.copy_(total)


def _different_parameters(
    params: Sequence[tuple[str, Tensor]],
    unequal: Sequence[int],
    found: dict[int, list[str]],
    mine: int,
) -> PiperRuntimeError:
    shown = []
    for i in unequal:
        ranks = [rank for rank, values in found.items() if values[i] != found[mine][i]]
        shown.append(f"{params[i][0]} on rank {', '.join(map(str, ranks))}")
    more = [f"and {len(shown) - 8} more"] if len(shown) > 8 else []
    return PiperRuntimeError(
        format_error(
            f"rank {mine} starts from other parameters than its replicas",
            {"they differ in": "\n".join([*shown[:8], *more])},
            hint="seed every rank alike before the model is built (torch.manual_seed), load the "
            'same state dict, or ask for the first replica\'s values: start="broadcast"',
        )
    )


def _different_programs(plan: Plan, comm: Communicator, others: list[str]) -> PiperRuntimeError:
    return PiperRuntimeError(
        format_error(
            "ranks would run different programs in one step",
            {f"rank {comm.rank}": describe(plan), "others": "\n".join(others)},
            hint="give every rank the same model, strategy, input shapes and grad mode",
        )
    )


def describe(plan: Plan) -> str:
    """What a difference between ranks' programs is likely to be: mode and input shapes."""
    shapes = ", ".join(
        f"{a.name} {tuple(a.spec.shape)}" for a in plan.args if a.kind is ArgKind.DATA and a.spec
    )
    mode = "training" if plan.dag.training else "forward only"
    strategy = hashlib.sha256(repr(plan.strategy).encode()).hexdigest()[:8]
    return f"{mode}, {plan.dag.num_microbatches} microbatches, strategy {strategy}, inputs {shapes}"
