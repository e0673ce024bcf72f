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
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.comm import Communicator
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


def check_replicas(plan: Plan, comm: Communicator, params: Sequence[tuple[str, Tensor]]) -> None:
    """Replicas must start from equal parameters.

    Raises:
        PiperRuntimeError: They differ; names the parameters.
        PiperTimeoutError: A replica does not come here.
    """
    number = comm.adoptions
    comm.adoptions = number + 1
    mine = digest([value for _, value in params])
    text = f"{number} {plan.fingerprint()} {','.join(mine)} {describe(plan)}"
    comm.publish(_key("replicas", number, comm.rank), text)
    programs: list[str] = []
    differing: dict[str, list[int]] = {}
    for rank in plan.group(comm.rank):
        other = comm.lookup(_key("replicas", number, rank), f"{number} ", comm.timeout_s)
        if other is None:
            raise PiperTimeoutError(
                format_error(
                    f"rank {rank} did not prepare the step within {comm.timeout_s:g} s",
                    {"this rank": comm.rank, "replicas": plan.group(comm.rank)},
                    hint="every rank must call the same step; look for the first failed rank",
                )
            )
        _, program, theirs, what = other.split(" ", 3)
        if program != plan.fingerprint():
            programs.append(f"rank {rank}: {what}")
            continue
        for (name, _), one, two in zip(params, mine, theirs.split(","), strict=True):
            if one != two:
                differing.setdefault(name, []).append(rank)
    if programs:
        raise _different_programs(plan, comm, programs)
    if differing:
        shown = [f"{name} on rank {', '.join(map(str, r))}" for name, r in differing.items()]
        more = [f"and {len(shown) - 8} more"] if len(shown) > 8 else []
        raise PiperRuntimeError(
            format_error(
                f"rank {comm.rank} starts from other parameters than its replicas",
                {"they differ in": "\n".join([*shown[:8], *more])},
                hint="seed every rank alike before the model is built (torch.manual_seed), "
                "or load the same state dict",
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
