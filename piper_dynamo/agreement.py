"""What ranks tell one another before they run: program, inputs, and the parameters they start from.

They speak through a key-value store and not by collectives, so that a rank that runs something
else, or nothing, can be named.
"""

import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from piper_dynamo.differences import account, first_difference
from piper_dynamo.errors import PiperRuntimeError, PiperTimeoutError, format_error
from piper_dynamo.ir.alike import replicas_of
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.pending import InitFn, fill, identity, source_of
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.comm import Communicator
from piper_dynamo.runtime.waiting import At, expecting
from piper_dynamo.sharding import digest


def announcement(plan: Plan, options: str = "") -> str:
    """What other ranks read of a program; made once, since it hashes the whole strategy.

    `options` are those by which ranks meet after a step, as text.
    """
    known = hashlib.sha256(options.encode()).hexdigest()[:4] if options else ""
    return f"{plan.fingerprint()}{known} {describe(plan)}{options}"


def leave_account(plan: Plan, comm: Communicator) -> None:
    """Before a program's first run: leave what it is made of, once for all ranks that run it.

    A rank that is about to run another one says by it what differs.
    """
    key = _account_key(plan.fingerprint())
    if comm.world_size > 1 and comm.lookup(key, "", 0.0) is None:
        comm.publish(key, account(plan))


def _account_key(fingerprint: str) -> str:
    return f"program/{fingerprint}"


def agree(plan: Plan, mine: str, comm: Communicator, values: Sequence[Any], *, known: bool) -> int:
    """Before a program's first run: every rank must be about to run the same one in this step.

    Each rank leaves the fingerprint of every step it starts; only a rank with a new program
    reads the others', so steps that all ranks know cost one unanswered message. With a new program
    it also leaves what it was given: the ranks of a replica share a batch. They may differ in what
    they do not use, so a difference is a warning.

    Args:
        plan: What this rank is about to run.
        mine: Its announcement.
        comm: The way to the others.
        values: The arguments of the call.
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
    given = "-" if known else _digests(plan, values)
    comm.publish(step_key(number, comm.rank), f"{number} {given} {mine}")
    if known:
        return number
    deadline = time.monotonic() + min(comm.timeout_s, 1e9)
    silent = compare(plan, mine, comm, number, deadline)
    if silent:
        waited = f" within {comm.timeout_s:g} s" if comm.timeout_s < float("inf") else ""
        text = f"waits for all ranks to start step {number + 1}"
        report = comm.ask(At(text=text, peers=tuple(silent), seconds=comm.timeout_s))
        told = {
            "missing": "\n".join(f"rank {r} did not start this step" for r in silent),
            "hint": "every rank must call the step; look for the first failed rank",
            **report.rows,
        }
        title = f"not all ranks started the step{waited}"
        raise report.marks(PiperTimeoutError(format_error(title, told)))
    return number


def step_key(number: int, rank: int) -> str:
    """Where a rank says what it runs in its n-th step."""
    return _key("step", number, rank)


def _key(what: str, number: int, rank: int) -> str:
    """Where a rank says something for the n-th time; few keys, since ranks are hardly one apart."""
    return f"{what}/{number % 16}/{rank}"


def compare(plan: Plan, mine: str, comm: Communicator, number: int, deadline: float) -> list[int]:
    """Compare this rank's program of a step with the others'.

    Args:
        plan: What this rank runs.
        mine: Its announcement.
        comm: The way to the others.
        number: The step's.
        deadline: Until when to wait for them, in seconds of the monotonic clock.

    Returns:
        The ranks that have not started the step by the deadline.

    Raises:
        PiperRuntimeError: A rank runs another program in this step.
    """
    own, _ = mine.split(" ", 1)
    differing: dict[int, tuple[str, str]] = {}
    silent = []
    given: dict[int, str] = {}
    for rank in range(comm.world_size):
        remaining = max(deadline - time.monotonic(), 0.0)
        with expecting(f"waits for rank {rank} to start step {number + 1}", rank):
            text = comm.lookup(step_key(number, rank), f"{number} ", remaining)
        if text is None:
            silent.append(rank)
            continue
        _, given[rank], theirs, what = text.split(" ", 3)
        if theirs != own:
            differing[rank] = theirs, what
    if differing:
        raise _different_programs(plan, comm, mine, differing)
    _warn_of_other_inputs(plan, comm.rank, given)
    return silent


def _inputs(plan: Plan) -> list[Arg]:
    return [arg for arg in plan.args if arg.kind is ArgKind.DATA and arg.spec is not None]


def _digests(plan: Plan, values: Sequence[Any]) -> str:
    return ",".join(digest([values[arg.position] for arg in _inputs(plan)])) or "-"


def _warn_of_other_inputs(plan: Plan, mine: int, given: Mapping[int, str]) -> None:
    """The first rank of a replica tells which of its ranks were given something else."""
    replica_of = replicas_of(plan.groups)
    first, *others = (r for r in sorted(given) if replica_of[r] == replica_of[mine])
    if mine != first:
        return
    known = [(rank, given[rank].split(",")) for rank in others if given[rank] != "-"]
    here = given[first].split(",")
    unlike = {
        arg.name: ranks
        for at, arg in enumerate(_inputs(plan))
        if (ranks := [rank for rank, theirs in known if theirs[at] != here[at]])
    }
    if unlike and given[first] != "-":
        shown = [f"{name}: rank {', '.join(map(str, ranks))}" for name, ranks in unlike.items()]
        warnings.warn(
            format_error(
                f"ranks of one replica were given different inputs, compared with rank {first}",
                {"they differ in": "\n".join(shown)},
                hint="give all ranks of a pipeline the same batch: each uses its part of it, so "
                "unlike ones would be mixed (seed the data by piper.data_rank(step), not by "
                "piper.rank()); where a rank is meant to get nothing of an input, ignore this",
            ),
            stacklevel=2,
        )


def check_copies(
    plan: Plan,
    comm: Communicator,
    params: Mapping[str, tuple[Tensor, tuple[int, ...]]],
    start: str,
    init: InitFn | None = None,
) -> None:
    """The ranks that hold a parameter must start from equal values of it.

    Every rank calls this alike, whatever it holds itself.

    Args:
        plan: Of the step.
        comm: This rank's.
        params: By name, the parameters that it shares: the whole value, and the ranks that hold it.
        start: "equal" refuses others; "broadcast" overwrites those that differ with the values of
            the first rank that holds them.
        init: Makes the values of parameters on the meta device.

    Raises:
        PiperRuntimeError: They differ; names the parameters. Or ranks ask for different things.
        PiperTimeoutError: A rank that holds one of them does not come here.
    """
    number = comm.adoptions
    comm.adoptions = number + 1
    names = sorted(params)
    mine = {name: identity(params[name][0], init) for name in names}
    text = json.dumps([plan.fingerprint(), start, mine, describe(plan)])
    comm.publish(_key("copies", number, comm.rank), f"{number} {text}")
    ranks = sorted({rank for _, holders in params.values() for rank in holders})
    others: dict[int, tuple[str, str]] = {}
    found: dict[int, dict[str, str]] = {}
    for rank in ranks:
        text = f"waits for rank {rank} to prepare the step"
        with expecting(text, rank):
            other = comm.lookup(_key("copies", number, rank), f"{number} ", comm.timeout_s)
        if other is None:
            report = comm.ask(At(text=text, peers=(rank,), seconds=comm.timeout_s))
            told = {
                "this rank": comm.rank,
                "ranks that share parameters with it": ranks,
                "hint": "every rank must call the same step; look for the first failed rank",
                **report.rows,
            }
            title = f"rank {rank} did not prepare the step within {comm.timeout_s:g} s"
            raise report.marks(PiperTimeoutError(format_error(title, told)))
        program, theirs, values, what = json.loads(other.partition(" ")[2])
        if program != plan.fingerprint():
            others[rank] = program, what
        elif theirs != start:
            others[rank] = program, f"option 'start' is {theirs!r}, here {start!r}"
        found[rank] = values
    if others:
        raise _different_programs(plan, comm, announcement(plan), others)
    unequal = {
        name: differing
        for name in names
        if (differing := [r for r in params[name][1] if found[r].get(name) != mine[name]])
    }
    if unequal and start == "broadcast":
        for name in unequal:
            if source_of(params[name][0]) is not None:
                fill(params[name][0], init)
            _copy_first(*params[name], comm)
    elif unequal:
        raise _different_parameters(unequal, comm.rank)


def _copy_first(value: Tensor, holders: tuple[int, ...], comm: Communicator) -> None:
    """Give every holder the first one's value; no step is running, so channels are empty."""
    first, *others = holders
    local = value.detach()
    given = local.contiguous()
    if comm.rank != first:
        local.copy_(comm.wait(comm.post(first, 0, TensorSpec.of(given))))
        return
    for rank in others:
        comm.send(given, rank, 0)
    for rank in others:
        comm.drain(rank, 0)


def _different_parameters(unequal: Mapping[str, list[int]], mine: int) -> PiperRuntimeError:
    shown = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in unequal.items()]
    more = [f"and {len(shown) - 8} more"] if len(shown) > 8 else []
    return PiperRuntimeError(
        format_error(
            f"rank {mine} starts from other parameters than ranks that hold them, too",
            {"they differ in": "\n".join([*shown[:8], *more])},
            hint="build the model alike on every rank (piper.deferred_init on all or none) after "
            "the same seed (torch.manual_seed), load the same state dict, or ask for the first "
            'rank\'s values: start="broadcast"',
        )
    )


def _different_programs(
    plan: Plan, comm: Communicator, mine: str, others: Mapping[int, tuple[str, str]]
) -> PiperRuntimeError:
    """`others` are the fingerprints of the other ranks' programs, and what these are."""
    _, what = mine.split(" ", 1)
    shown = "\n".join(f"rank {rank}: {theirs}" for rank, (_, theirs) in others.items())
    return PiperRuntimeError(
        format_error(
            "ranks would run different programs in one step",
            {f"rank {comm.rank}": what, "others": shown, **_first_difference(plan, comm, others)},
            hint="give every rank the same model, with the same values of what forward looks at, "
            "strategy, options (costs= decides orders), input shapes and grad mode",
        )
    )


def _first_difference(
    plan: Plan, comm: Communicator, others: Mapping[int, tuple[str, str]]
) -> dict[str, str]:
    """Where this rank's program parts from that of the first other one of which that is known."""
    for rank, (program, _) in others.items():
        theirs = comm.lookup(_account_key(program[: len(plan.fingerprint())]), "", 0.0)
        found = first_difference(account(plan), theirs) if theirs is not None else None
        if found is not None:
            mine = {f"rank {comm.rank} has there": found.mine}
            return {"they part in": found.place, **mine, f"rank {rank} has there": found.theirs}
    return {}


def describe(plan: Plan) -> str:
    """What a difference between ranks' programs is likely to be: mode and input shapes."""
    shapes = ", ".join(
        f"{a.name} {tuple(a.spec.shape)}" for a in plan.args if a.kind is ArgKind.DATA and a.spec
    )
    mode = "training" if plan.dag.training else "forward only"
    strategy = hashlib.sha256(repr(plan.strategy).encode()).hexdigest()[:8]
    return f"{mode}, {plan.dag.num_microbatches} microbatches, strategy {strategy}, inputs {shapes}"
