"""`PIPER_FAULT`: failures on purpose, to see what a job does then.

    PIPER_FAULT="kill:rank=1,step=3,task=B"
    PIPER_FAULT="sleep:rank=0,step=2,seconds=5; nan:rank=2,step=4,task=F.PP1.MB0"

Terms: a *fault* happens once, on one rank, in one of its steps (counted from 1, calls without
gradients included), at the first task that begins with `task`, or without one before all of them.
`attempt` is for jobs that are started again: 0, the default, is the first start.

Steps cost nothing for it: the program of the one step that a fault is for is emitted with a line
that makes it happen.
"""

import functools
import math
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, assert_never

import torch
from torch import Tensor

from piper_dynamo.errors import PiperError, join_faults
from piper_dynamo.ir.program import Op, RankProgram

VARIABLE = "PIPER_FAULT"
ATTEMPTS = ("PIPER_RESTARTS", "TORCHELASTIC_RESTART_COUNT")  # how often a job was started again
FOREVER_S = 3600.0
KEYS = {"rank": int, "step": int, "task": str, "seconds": float, "attempt": int}
_NUMBERS = {int: "whole number", float: "number"}
EXAMPLE = 'PIPER_FAULT="kill:rank=1,step=3,task=B"'


class Kind(StrEnum):
    """What happens."""

    KILL = "kill"  # the process is gone at once, as if the system had ended it
    RAISE = "raise"  # an error, as a user's operator may raise it
    SLEEP = "sleep"  # nothing for `seconds`, which are an hour unless said otherwise
    NAN = "nan"  # the task's outputs are no numbers
    CORRUPT = "corrupt"  # a bit of the next message of the task is another


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure on purpose; see the module."""

    kind: Kind
    rank: int
    step: int
    task: str = ""
    seconds: float = FOREVER_S
    attempt: int = 0

    def __str__(self) -> str:
        task = f",task={self.task}" if self.task else ""
        return f"{self.kind}:rank={self.rank},step={self.step}{task}"

    def matches(self, task: str) -> bool:
        """Whether it is meant to happen at this task."""
        return not self.task or task == self.task or task.startswith(f"{self.task}.")


def faults_of(rank: int, world_size: int) -> tuple[Fault, ...]:
    """The faults that the environment asks of a rank in this start of the job.

    Raises:
        PiperError: It asks for something that there is not; lists every fault of the text.
    """
    attempt = int(next(filter(None, map(os.environ.get, ATTEMPTS)), "0"))
    found = [fault for fault in _in_environment() if fault.attempt == attempt]
    _refuse_outside(found, world_size)
    return tuple(fault for fault in found if fault.rank == rank)


def check_variable(ranks: Sequence[int]) -> None:
    """Read what the environment asks for before any rank is started.

    Args:
        ranks: The numbers of ranks that the job may have, the first start's first.

    Raises:
        PiperError: It cannot be read, or is of a rank that no start can have: the first one has
            the first number, later ones may have any.
    """
    found = _in_environment()
    _refuse_outside([fault for fault in found if fault.attempt == 0], ranks[0])
    _refuse_outside(found, max(ranks))


def kill_of(rank: int, attempt: int) -> Fault | None:
    """The kill that the environment asks of a rank in this start of the job; else None."""
    asked = (f for f in _in_environment() if f.kind is Kind.KILL)
    return next((f for f in asked if f.rank == rank and f.attempt == attempt), None)


def _in_environment() -> tuple[Fault, ...]:
    text = os.environ.get(VARIABLE, "")
    return parse(text) if text else ()


def _refuse_outside(found: Sequence[Fault], world_size: int) -> None:
    outside = sorted({fault.rank for fault in found if fault.rank >= world_size})
    if outside:
        ranks = ", ".join(map(str, outside))
        raise PiperError(
            f"PIPER_FAULT names rank {ranks}, and the job has ranks 0 to {world_size - 1}"
        )


@functools.lru_cache(maxsize=8)
def parse(text: str) -> tuple[Fault, ...]:
    """The faults that a text asks for.

    Raises:
        PiperError: It is no such text; lists what is wrong, and what is legal.
    """
    found, wrong = [], []
    for one in filter(None, (part.strip() for part in text.split(";"))):
        try:
            found.append(_parse_one(one))
        except ValueError as error:
            wrong.append(f"{one!r}: {error}")
    if wrong or not found:
        kinds, keys = ", ".join(Kind), ", ".join(KEYS)
        hint = f"kinds: {kinds}; keys: {keys}, of which rank and step must be there; e.g. {EXAMPLE}"
        faults = wrong or ["there is nothing in it"]
        raise PiperError(join_faults("PIPER_FAULT is not understood", faults, hint=hint))
    return tuple(found)


def _parse_one(text: str) -> Fault:
    name, _, rest = text.partition(":")
    if name not in list(Kind):
        near = get_close_matches(name, list(Kind), n=1)
        raise ValueError(f"{name!r} is no kind" + (f"; did you mean {near[0]}?" if near else ""))
    given: dict[str, Any] = {}
    for pair in rest.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in KEYS or not equals:
            raise ValueError(f"{pair!r} is no key=value")
        if key in given:
            raise ValueError(f"{key} stands twice")
        try:
            given[key] = KEYS[key](value)
        except ValueError as error:
            raise ValueError(f"{pair!r}: {value!r} is no {_NUMBERS[KEYS[key]]}") from error
    missing = [key for key in ("rank", "step") if key not in given]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    if "seconds" in given and (name != Kind.SLEEP or not 0 < given["seconds"] < math.inf):
        raise ValueError("seconds are of a sleep, and above 0")
    if given["rank"] < 0 or given["step"] < 1 or given.get("attempt", 0) < 0:
        raise ValueError("ranks and attempts count from 0, steps from 1")
    if "task" in given and not re.fullmatch(r"[A-Za-z]+(\.\w+)*", given["task"]):
        raise ValueError(f"{given['task']!r} is no task, such as B, F.PP1 or F.PP1.MB0")
    return Fault(kind=Kind(name), **given)


def place_of(fault: Fault, program: RankProgram) -> int:
    """The index of the instruction at which a fault happens; -1: before all of them.

    Raises:
        PiperError: The rank's program has no such task, or sends no such message.
    """
    wanted = Op.SEND if fault.kind is Kind.CORRUPT else Op.RUN
    if not fault.task and fault.kind not in (Kind.CORRUPT, Kind.NAN):
        return -1
    tasks = [(i, instr.task) for i, instr in enumerate(program.instrs) if instr.op is wanted]
    found = next((i for i, task in tasks if fault.matches(task)), None)
    if found is None:
        what = "sends no message of" if wanted is Op.SEND else "does not run"
        have = ", ".join(dict.fromkeys(task for _, task in tasks)) or "none"
        task = fault.task or "any task"
        raise PiperError(
            f"PIPER_FAULT asks for {fault}, but rank {program.rank} {what} {task}; it has {have}"
        )
    return found


def happen(fault: Fault, comm: Any) -> None:
    """Let a fault happen, if it is one that happens before its task.

    Raises:
        RuntimeError: That is the fault.
        PiperError: It cannot happen here.
    """
    match fault.kind:
        case Kind.KILL:
            if comm.is_inside:
                raise PiperError(
                    f"PIPER_FAULT: {fault} would end all ranks, which are threads here"
                )
            os.kill(os.getpid(), signal.SIGKILL)
        case Kind.RAISE:
            raise RuntimeError(f"PIPER_FAULT: {fault}")
        case Kind.SLEEP:
            time.sleep(fault.seconds)
        case Kind.CORRUPT:
            comm.damage_next()
        case Kind.NAN:
            pass  # happens after its task, by `spoiled`
        case _:
            assert_never(fault.kind)


def spoiled(fault: Fault, values: Sequence[Any]) -> list[Any]:
    """What a task's outputs are once its fault has happened."""
    if fault.kind is not Kind.NAN:
        return list(values)
    return [
        torch.full_like(value, float("nan"))
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        else value
        for value in values
    ]


def damaged(value: Tensor) -> Tensor:
    """A copy of which one bit is another; of floats it is one of the exponent."""
    copy = value.detach().clone()
    if copy.numel():
        copy.reshape(-1).view(torch.uint8)[-1] ^= 0x40
    return copy
