"""Simulate: run the lowered programs event by event with given costs, without computing anything.

A rank issues its instructions in order. A chunk takes its cost, or longer while others compute on
the same machine. A message, or a collective once all its ranks have issued it, takes its link when
that is free, and arrives after it; a wait lasts until then; everything else takes its rank's host
what the costs say, by default nothing. A transfer lasts from when all its ranks are ready for it to
its arrival; what of that a rank waits is *exposed*. Before, it waited for another rank.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from piper_dynamo.costs import Costs, durations, sent_bytes, tasks_run
from piper_dynamo.errors import PiperError, PiperSyntaxError, format_error
from piper_dynamo.ir.program import Group, Instr, Op, RankProgram
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind, TaskName
from piper_dynamo.timeline import COLLECTIVE_LOOKS, Event, Message, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One rank's messages and collectives, in the simulation's unit of time.

    Attributes:
        total: How long those took that it waited for: received messages, and all its collectives.
        exposed: How long of that it waited; the rest was hidden under its own work.
    """

    total: float = 0.0
    exposed: float = 0.0

    @property
    def hidden_share(self) -> float:
        """The share that was hidden; 1 where nothing took time."""
        return 1.0 - self.exposed / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The outcome of a simulated step.

    Attributes:
        timeline: Every task, message and collective on every rank.
        starts: When each of `ranks` came to each of its instructions; see `starts_of`.
        makespan: Time from the call to the last event, on the slowest rank.
        peaks: Predicted peak bytes of their steps; see `peak_bytes`.
        traffic: Their transfers by stream, messages under "recv"; see `communication`.
        ranks: The ranks that these are of.
        stands_for: For each rank, the simulated one that does the same at the same time.
    """

    timeline: Timeline
    starts: tuple[tuple[float, ...], ...]
    makespan: float
    peaks: tuple[int, ...]
    traffic: tuple[Mapping[str, Traffic], ...]
    ranks: tuple[int, ...]
    stands_for: Mapping[int, int]

    def busy(self, rank: int) -> float:
        """Time a rank computes."""
        shown = self.stands_for[rank]
        return sum(
            e.end_s - e.start_s
            for e in self.timeline.events
            if e.rank == shown and e.stream == "compute"
        )

    def _at(self, rank: int) -> int:
        return self.ranks.index(self.stands_for[rank])

    def starts_of(self, rank: int) -> tuple[float, ...]:
        """When a rank came to each of its instructions."""
        return self.starts[self._at(rank)]

    def peak_bytes(self, rank: int) -> int:
        """Predicted peak of what a rank's step holds beside parameters and gradients."""
        return self.peaks[self._at(rank)]

    def communication(self, rank: int, stream: str | None = None) -> Traffic:
        """How long a rank's transfers took, and how much of it the rank had to wait.

        Args:
            rank: Which rank.
            stream: Only those of this stream ("recv" for messages); None: all.
        """
        mine = self.traffic[self._at(rank)]
        found = [t for s, t in mine.items() if stream in (None, s)]
        return Traffic(total=sum(t.total for t in found), exposed=sum(t.exposed for t in found))

    def __str__(self) -> str:
        """Makespan; per rank busy and idle time, and transfers by stream: time, share hidden."""
        lines = [f"simulated step: {self.makespan:.4g}"]
        spent = dict.fromkeys(self.ranks, 0.0)
        for event in self.timeline.events:
            spent[event.rank] += event.duration_s * (event.stream == "compute")
        for streams, (rank, busy) in zip(self.traffic, spent.items(), strict=True):
            parts = [f"rank {rank}", f"busy {busy:.4g}", f"idle {self.makespan - busy:.4g}"]
            parts += [
                f"{stream} {one.total:.4g}, {one.hidden_share:.0%} hidden"
                for stream, one in sorted(streams.items())
                if one.total
            ]
            lines.append("  ".join(parts))
        return "\n".join(lines)


@dataclass(slots=True, kw_only=True)
class _Rank:
    """Where a rank is.

    Attributes:
        now: Its time.
        issue: What issuing each of its instructions takes.
        at: The instruction it comes to next.
        issued: How many collectives it has issued on each communicator.
        handles: The collective that each of its handles is.
        total: Time of its transfers, by stream.
        exposed: What of it the rank waited for.
        starts: When it came to each instruction that it has run, or begun.
        left: What the chunk that it runs takes yet, alone on its machine; None: it runs none.
    """

    now: float
    issue: list[float]
    at: int = 0
    issued: dict[Group, int] = field(default_factory=dict)
    handles: dict[str, tuple[Group, int]] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    left: float | None = None

    def wait(self, stream: str, ready: float, end: float) -> None:
        """Wait for a transfer that lasts from `ready` to `end`."""
        self.total[stream] = self.total.get(stream, 0.0) + end - ready
        exposed = max(end - max(self.now, ready), 0.0)
        self.exposed[stream] = self.exposed.get(stream, 0.0) + exposed
        self.now = max(self.now, end)

    def traffic(self) -> dict[str, Traffic]:
        return {s: Traffic(total=t, exposed=self.exposed[s]) for s, t in self.total.items()}


def simulate(
    programs: Sequence[RankProgram],
    costs: Costs,
    halves: Mapping[str, tuple[bool, bool]],
    stands_for: Mapping[int, int] | None = None,
) -> Simulation:
    """Run the programs on an ideal machine.

    Args:
        programs: All ranks' programs, or those of one of replicas that are alike.
        costs: What things cost.
        halves: For each region: whether it has input-gradient work, and weight-gradient work.
        stands_for: For each rank, the one of `programs` that does the same; None: itself.

    Raises:
        PiperError: The programs deadlock.
    """
    run = _Simulator(programs, costs, halves)
    run.share() if costs.slowdown else run.settle()
    stuck = {
        f"rank {program.rank}": f"waits in {program.instrs[one.at].task}"
        for program, one in zip(programs, run.ranks, strict=True)
        if one.at < len(program.instrs)
    }
    if stuck:
        hint = "the proof shows the cycle: plan.verify()"
        raise PiperError(format_error("the plan deadlocks in simulation", stuck, hint=hint))
    return Simulation(
        timeline=Timeline(events=run.events, messages=run.messages),
        starts=tuple(tuple(rank.starts) for rank in run.ranks),
        makespan=max((rank.now for rank in run.ranks), default=0.0),
        peaks=tuple(p.peak_bytes for p in programs),
        traffic=tuple(rank.traffic() for rank in run.ranks),
        ranks=tuple(p.rank for p in programs),
        stands_for=stands_for or {p.rank: p.rank for p in programs},
    )


class _Simulator:
    """All ranks, and what is under way between them."""

    def __init__(
        self,
        programs: Sequence[RankProgram],
        costs: Costs,
        halves: Mapping[str, tuple[bool, bool]],
    ) -> None:
        self.programs, self.costs = programs, costs
        self.took = durations(tasks_run(programs), costs, halves)
        self.ranks = [_Rank(now=costs.of_call(p), issue=costs.to_issue(p)) for p in programs]
        self.events: list[Event] = []
        self.messages: list[Message] = []
        self.free: dict[object, float] = {}  # when a link has carried what it was given
        self.arrivals: dict[tuple[int, int, int], tuple[float, float, int]] = {}
        self.issues: dict[tuple[Group, int], list[tuple[int, float, Instr]]] = {}
        self.meetings: dict[tuple[Group, int], tuple[float, float]] = {}
        self.here = {program.rank for program in programs}
        self.sizes: dict[tuple[int, ...], int] = {}

    def settle(self, until: float = math.inf) -> None:
        """Let every rank run as far as it gets by a time."""
        pairs = list(zip(self.programs, self.ranks, strict=True))
        progressed = True
        while progressed:
            pairs = [(program, one) for program, one in pairs if one.at < len(program.instrs)]
            progressed = False
            for program, one in pairs:
                progressed |= self.advance(program, one, until)

    def share(self) -> None:
        """Run all ranks in step with one clock: how fast each computes depends on who does."""
        now = 0.0
        while True:
            self.settle(now)
            computing = [one for one in self.ranks if one.left is not None]
            factors = self.costs.slowdown[: len(computing)]
            factor = factors[-1] if factors else 1.0
            ends = [now + (one.left or 0.0) * factor for one in computing]
            nexts = [*ends, *(one.now for one in self.ranks if one.now > now)]
            if not nexts:
                return
            passed, now = min(nexts) - now, min(nexts)
            for one, end in zip(computing, ends, strict=True):
                assert one.left is not None
                one.left = 0.0 if end <= now else one.left - passed / factor
                one.now = now

    def advance(self, program: RankProgram, one: _Rank, until: float) -> bool:
        """Let a rank run until it must wait for another, or a time; whether it did anything."""
        instrs, begin = program.instrs, one.at
        while one.at < len(instrs) and one.now <= until:
            if len(one.starts) == one.at:
                one.starts.append(one.now)
            if not self.step(program.rank, one, instrs[one.at]):
                break
            one.now += one.issue[one.at]
            one.at += 1
        return one.at > begin

    def step(self, rank: int, one: _Rank, instr: Instr) -> bool:
        """Run one instruction; False if it waits for what another rank has not done yet."""
        if instr.op is Op.RUN:
            return self.compute(rank, one, instr)
        elif instr.op is Op.SEND:
            specs = [instr.spec] if instr.spec is not None else []
            start, end = self.transfer((rank, instr.peer), one.now, Kind.SEND, specs, 2)
            nbytes = sum(spec.nbytes for spec in specs)
            self.arrivals[rank, instr.peer, instr.message] = one.now, end, nbytes
            if end > start:
                self.event(rank, "send", instr, "send", start, end)
        elif instr.op is Op.WAIT and instr.peer >= 0:
            key = (instr.peer, rank, instr.message)
            if key not in self.arrivals:
                return False
            sent, end, nbytes = self.arrivals[key]
            one.wait("recv", sent, end)
            self.messages.append(
                Message(
                    source=instr.peer,
                    target=rank,
                    number=instr.message,
                    name=instr.task,
                    nbytes=nbytes,
                    sent_s=sent,
                    taken_s=one.now,
                )
            )
        elif instr.group:
            self.issue(rank, one, instr)
        elif instr.op is Op.WAIT:
            meeting = one.handles[instr.inputs[0]]
            if meeting not in self.meetings:
                return False
            one.wait(meeting[0][0], *self.meetings[meeting])
        return True

    def compute(self, rank: int, one: _Rank, instr: Instr) -> bool:
        """A chunk; False if the clock that ranks share has to move on first."""
        start = one.starts[-1]
        if not self.costs.slowdown:
            one.now += self.took[instr.task]
        elif one.left is None:
            one.left = self.took[instr.task]
        if one.left:
            return False
        one.left = None
        kind = TaskName.parse(instr.task).which.value
        self.event(rank, "compute", instr, kind, start, one.now)
        return True

    def issue(self, rank: int, one: _Rank, instr: Instr) -> None:
        """A collective; the last of its ranks sets it off."""
        group = instr.communicator
        number = one.issued[group] = one.issued.get(group, -1) + 1
        one.handles[instr.outputs[0]] = group, number
        issued = self.issues.setdefault((group, number), [])
        issued.append((rank, one.now, instr))
        if instr.group not in self.sizes:
            self.sizes[instr.group] = sum(member in self.here for member in instr.group)
        if len(issued) < self.sizes[instr.group]:
            return
        del self.issues[group, number]
        kind, ready = Kind(instr.op.value), max(now for _, now, _ in issued)
        start, end = self.transfer(group, ready, kind, instr.specs, len(instr.group))
        self.meetings[group, number] = ready, end
        if end > start:
            for member, _, its in issued:
                self.event(member, its.stream, its, COLLECTIVE_LOOKS[its.op], start, end)

    def transfer(
        self, link: object, ready: float, kind: Kind, specs: Sequence[TensorSpec], size: int
    ) -> tuple[float, float]:
        """Take a link from `ready` on: begin and arrival."""
        start = max(ready, self.free.get(link, 0.0))
        values = 0 if kind is Kind.SEND else len(specs)
        self.free[link] = start + self.costs.on_link(sent_bytes(kind, specs, size), values)
        return start, self.free[link] + self.costs.after_link(kind)

    def event(
        self, rank: int, stream: str, instr: Instr, kind: str, start: float, end: float
    ) -> None:
        tags: dict[str, int | str] = {}
        with suppress(PiperSyntaxError):  # what is no task's has a label: the loss, a gradient
            tags.update(TaskName.parse(instr.task).tags)
        self.events.append(
            Event(
                rank=rank,
                stream=stream,
                name=instr.task,
                kind=kind,
                tags=tags,
                start_s=start,
                end_s=end,
            )
        )
