"""Calls that every rank must make, such as a save: a rank that does not come is named.

A *meeting* is one such call. It has *rounds*: every rank does its part, rank 0 joins the parts, and
all get what it made of them, or the same error. Ranks speak through the key-value store and not by
collectives: a collective that one rank does not call hangs, and two threads cannot share one. What
they say is JSON (`wire.py`): no rank runs what another sends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from piper_dynamo import wire
from piper_dynamo.agreement import step_key
from piper_dynamo.errors import PiperError, PiperRuntimeError, PiperTimeoutError, format_error
from piper_dynamo.runtime.alarm import Report
from piper_dynamo.runtime.comm import Communicator, ended
from piper_dynamo.runtime.waiting import At, expecting

T = TypeVar("T")
R = TypeVar("R")

FOREGROUND, BACKGROUND = "meeting", "saving"
LATE = "did not call it"
SHORT_S = 1.0  # what others may take once one rank is known to be missing
# How often a rank looks for what another says; beside steps it must cost them nothing.
POLL_S = {FOREGROUND: 0.002, BACKGROUND: 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """What a rank says in a round: its value, or why it has none."""

    what: str
    value: Any = None
    fault: str | None = None

    def pack(self) -> str:
        return wire.dump([self.what, self.value, self.fault])

    @classmethod
    def unpack(cls, text: str) -> "_Message":
        what, value, fault = wire.load(text)
        return cls(what=what, value=value, fault=fault)


class Meeting:
    """One call that every rank makes; every rank must make the same ones in the same order."""

    def __init__(self, comm: Communicator, what: str) -> None:
        """`what` names the call and what must be alike on all ranks; messages show it."""
        self.comm = comm
        self.what = what
        self._round = 0
        self._slot = FOREGROUND
        # Counted from the last step on: ranks are in step again after a call that some left out.
        steps, count = comm.meetings
        comm.meetings = (comm.steps, count + 1 if steps == comm.steps else 0)
        self._number = f"{comm.job}.{comm.meetings[0]}.{comm.meetings[1]}"

    def go_to_background(self) -> None:
        """Later rounds run in a thread, beside meetings of the main one."""
        self._slot = BACKGROUND

    def together(self, part: Callable[[], T], join: Callable[[list[T]], R]) -> R:
        """A round.

        Args:
            part: This rank's; called on every rank.
            join: Called on rank 0 with every rank's.

        Returns:
            What `join` returned, on every rank.

        Raises:
            PiperRuntimeError: A part or the join failed; the same on every rank.
            PiperTimeoutError: A rank does not come.
        """
        comm = self.comm
        self._round += 1
        cause: Exception | None = None
        try:
            mine = _Message(what=self.what, value=part())
            text = mine.pack() if comm.rank > 0 else ""
        except Exception as error:  # told to all ranks, and raised below
            cause = error
            mine = _Message(what=self.what, fault=self._text(error))
            text = mine.pack()
        if comm.world_size > 1:
            comm.publish(f"{self._slot}/{comm.rank}", self._tag + text)
        if comm.rank == 0:
            result: R = self._join(mine, join, cause)
            return result
        answer = self._read(0, f"{self._slot}/result")
        if isinstance(answer, str):
            raise self._missing({0: answer})
        if answer.fault is not None:
            raise PiperRuntimeError(answer.fault) from cause
        comm.publish(f"{self._slot}/{comm.rank}", "")  # plans of large models are large
        return answer.value  # type: ignore[no-any-return]

    @property
    def _tag(self) -> str:
        return f"{self._number}.{self._round} "

    def _join(self, mine: _Message, join: Callable[[list[T]], R], cause: Exception | None) -> R:
        """Rank 0's side of a round."""
        comm = self.comm
        found: dict[int, _Message] = {0: mine}
        missing: dict[int, str] = {}
        for rank in range(1, comm.world_size):
            limit = min(comm.timeout_s, SHORT_S) if missing else comm.timeout_s
            message = self._read(rank, f"{self._slot}/{rank}", limit)
            if isinstance(message, str):
                missing[rank] = message
            else:
                found[rank] = message
        text = ""
        error: Exception | None = self._fault(found, missing)
        if error is None:
            try:
                result = join([found[rank].value for rank in range(comm.world_size)])
                text = _Message(what=self.what, value=result).pack() if comm.world_size > 1 else ""
            except Exception as failure:  # told to all ranks, and raised below
                cause, error = failure, PiperRuntimeError(self._text(failure))
        if comm.world_size > 1:
            text = _Message(what=self.what, fault=str(error)).pack() if error is not None else text
            comm.publish(f"{self._slot}/result", self._tag + text)
        if error is not None:
            raise error from cause
        return result

    def _read(self, rank: int, key: str, timeout_s: float | None = None) -> "_Message | str":
        """What a rank says in this round, or why it says nothing."""
        comm = self.comm
        wanted = [(key, self._tag)]
        if self._slot == FOREGROUND:
            # A rank that starts a step which this one has not started has left the call out.
            wanted.append((step_key(comm.steps, rank), f"{comm.steps} "))
        wanted.append(ended(rank, comm.job))
        limit = comm.timeout_s if timeout_s is None else timeout_s
        with expecting(f"waits for rank {rank} in {self.what}", rank):
            found = comm.lookup_any(wanted, limit, POLL_S[self._slot])
        # It may have spoken, and gone on, between two looks.
        text = comm.lookup(key, self._tag, 0.0)
        if text is not None:
            return _Message.unpack(text.removeprefix(self._tag))
        if found is None:
            waited = f" within {limit:g} s" if limit < float("inf") else ""
            return f"{LATE}{waited}"
        is_over = found[0] == len(wanted) - 1
        return "has ended without calling it" if is_over else "went on to its next step"

    def _fault(
        self, found: Mapping[int, _Message], missing: Mapping[int, str]
    ) -> PiperError | None:
        if missing:
            return self._missing(missing)
        if len({message.what for message in found.values()}) > 1:
            said = {f"rank {rank}": message.what for rank, message in found.items()}
            hint = "every rank must make the same calls in the same order, with equal arguments"
            return PiperRuntimeError(format_error("ranks call different things", said, hint=hint))
        faults = {rank: m.fault for rank, m in found.items() if m.fault is not None}
        if not faults:
            return None
        if len(faults) == len(found) and len(set(faults.values())) == 1:
            return PiperRuntimeError(faults[0])
        told = {f"rank {rank}": text for rank, text in faults.items()}
        return PiperRuntimeError(format_error(f"{self.what} failed", told))

    def _missing(self, missing: Mapping[int, str]) -> PiperTimeoutError:
        ranks = ", ".join(map(str, missing))
        told = {f"rank {rank}": why for rank, why in missing.items()}
        told["hint"] = (
            "call it on every rank, not inside `if rank == 0`; every rank writes its part"
        )
        late = tuple(rank for rank, why in missing.items() if why.startswith(LATE))
        report = Report()
        if late:
            place = At(text=f"waits in {self.what}", peers=late, seconds=self.comm.timeout_s)
            report = self.comm.ask(place)
            told["now"] = "\n".join(f"{who}: {what}" for who, what in report.rows.items())
        title = f"{self.what} is a call of all ranks together, and rank {ranks} did not make it"
        return report.marks(PiperTimeoutError(format_error(title, told)))

    def _text(self, error: Exception) -> str:
        """What is told of a failure; an error of Python's does not say in which call it was."""
        is_ours = isinstance(error, PiperError)
        return str(error) if is_ours else f"{self.what}: {type(error).__name__}: {error}"


def gathered(comm: Communicator, what: str, value: T) -> list[T] | None:
    """Every rank's value on rank 0, None on the others; every rank calls it.

    Args:
        comm: The way to the others.
        what: Names the call.
        value: Of what `wire.py` writes.

    Raises:
        PiperRuntimeError: A rank does not come, or has something else to say.
    """
    found: list[T] = []
    Meeting(comm, what).together(lambda: value, found.extend)
    return found if comm.rank == 0 else None


def spread(comm: Communicator, what: str, value: T) -> T:
    """Rank 0's value on every rank; every rank calls it, with what `wire.py` writes.

    Raises:
        PiperRuntimeError: A rank does not come.
    """
    mine = value if comm.rank == 0 else None
    return Meeting(comm, what).together(lambda: mine, lambda parts: parts[0])  # type: ignore[return-value]
