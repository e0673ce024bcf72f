"""Timelines: what each rank did when, simulated or measured; `pictures` draws and exports them.

Terms: an *event* is one instruction's stretch of time on one rank's stream; *busy* is the time in
events that compute, *idle* the rest of the makespan. A *message* goes from one rank to another: a
recording of one rank knows one end of it, and merging joins the two.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from piper_dynamo.errors import PiperError
from piper_dynamo.ir.program import COLLECTIVES, EXCHANGES, REDUCTIONS

COMPUTE = ("F", "B", "BI", "BW")
# What a rank holds: what is there before its step, and what that makes.
BEFORE = ("parameters", "buffers", "optimizer state")
STEP = ("gradients", "activations", "gathered parameters", "communication")
CATEGORIES = BEFORE + STEP
INSIDE = "inside tasks"  # temporaries: no curve has them, a peak does
Held = tuple[int, ...]  # bytes by category
COLLECTIVE_LOOKS = {
    op: "reduce" if op in REDUCTIONS else "exchange" if op in EXCHANGES else "gather"
    for op in COLLECTIVES
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One stretch of time.

    Attributes:
        rank: Whose.
        stream: The logical stream, `compute` for chunks.
        name: The task's name.
        kind: F, B, BI, BW, send, recv, wait, reduce, gather, exchange or other.
        tags: Region tags such as PP, and MB.
        start_s: Begin, in seconds (or in the simulation's unit).
        end_s: End.
    """

    rank: int
    stream: str
    name: str
    kind: str
    tags: Mapping[str, Any] = field(default_factory=dict)
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it lasts."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A value on its way from one rank to another.

    Attributes:
        source: Who sends it.
        target: Who takes it.
        number: Its position among the messages from `source` to `target`.
        name: The task that makes the value.
        nbytes: Its size.
        sent_s: When it was handed over; None in the target's own recording.
        taken_s: When the wait for it ended; None in the source's own recording.
    """

    source: int
    target: int
    number: int
    name: str
    nbytes: int = 0
    sent_s: float | None = None
    taken_s: float | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """When it was handed over and when it was taken, where both are known."""
        if self.sent_s is None or self.taken_s is None:
            return None
        return self.sent_s, self.taken_s


@dataclass(slots=True)
class Timeline:
    """Events of one or several ranks; a recording adds to them when its step ends.

    Attributes:
        events: What ranks did.
        messages: What they sent each other.
        memory: Of each rank: from when on it holds how many bytes of each category, in order of
            time. Empty where that is not known.
    """

    events: list[Event] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    memory: dict[int, list[tuple[float, Held]]] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have events, or of which it is known what they hold."""
        return sorted({e.rank for e in self.events} | set(self.memory))

    @property
    def makespan(self) -> float:
        """From the first begin to the last end."""
        if not self.events:
            return 0.0
        return max(e.end_s for e in self.events) - min(e.start_s for e in self.events)

    def busy(self, rank: int) -> float:
        """Time a rank spends in F, B, BI and BW."""
        return sum(e.duration_s for e in self.events if e.rank == rank and e.kind in COMPUTE)

    def idle_share(self, rank: int) -> float:
        """The share of the makespan, of all ranks together, in which a rank does not compute."""
        return 1.0 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def shifted(self, offset_s: float) -> "Timeline":
        """The same, later by an offset."""
        return Timeline(
            [
                replace(e, start_s=e.start_s + offset_s, end_s=e.end_s + offset_s)
                for e in self.events
            ],
            [
                replace(m, sent_s=_later(m.sent_s, offset_s), taken_s=_later(m.taken_s, offset_s))
                for m in self.messages
            ],
            {r: [(at + offset_s, held) for at, held in c] for r, c in self.memory.items()},
        )

    def shifted_to_zero(self) -> "Timeline":
        """The same, beginning at 0."""
        return self.shifted(-min((e.start_s for e in self.events), default=0.0))

    @staticmethod
    def merge(
        timelines: Iterable["Timeline"], offsets_s: Sequence[float] | None = None
    ) -> "Timeline":
        """Several ranks' timelines as one.

        Args:
            timelines: One per rank, or any number.
            offsets_s: What to add to each one's times, so that all follow one clock. Left out: the
                clocks agree already, as `time.perf_counter` does between processes of one Linux
                machine.

        Raises:
            PiperError: There are not as many offsets as timelines.
        """
        given = list(timelines)
        offsets = [0.0] * len(given) if offsets_s is None else list(offsets_s)
        if len(offsets) != len(given):
            raise PiperError(
                f"Timeline.merge got {len(given)} timelines and {len(offsets)} offsets; "
                "give one offset per timeline"
            )
        moved = [t.shifted(o) if o else t for t, o in zip(given, offsets, strict=True)]
        return Timeline(
            [e for t in moved for e in t.events],
            _joined([m for t in moved for m in t.messages]),
            {rank: curve for t in moved for rank, curve in t.memory.items()},
        )


def _later(at: float | None, offset_s: float) -> float | None:
    return None if at is None else at + offset_s


def _joined(messages: Sequence[Message]) -> list[Message]:
    """One message of the two halves that its ends know."""
    found: dict[tuple[int, int, int], Message] = {}
    for one in messages:
        key = (one.source, one.target, one.number)
        half = found.setdefault(key, one)
        found[key] = replace(
            half,
            nbytes=max(half.nbytes, one.nbytes),
            sent_s=one.sent_s if half.sent_s is None else half.sent_s,
            taken_s=one.taken_s if half.taken_s is None else half.taken_s,
        )
    return list(found.values())
