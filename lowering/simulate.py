"""Simulate: run the lowered programs event by event with given costs, without computing anything.

A rank issues its instructions in order. A chunk takes its cost. A message, or a collective once all
its ranks have issued it, takes its link when that is free, and arrives after it; a wait lasts until
then; everything else takes no time. A transfer lasts from when all its ranks are ready for it to
its arrival; what of that a rank waits is *exposed*. Before, it waited for another rank.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from piper_dynamo.costs import Costs, durations, sent_bytes, tasks_run
from piper_dynamo.errors import PiperError, PiperSyntaxError
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
        starts: When each rank came to each of its instructions.
        makespan: Time from the first to the last event.
        peaks: Predicted peak bytes of each rank's step; see `peak_bytes`.
        traffic: Each rank's transfers by stream, messages under "recv"; see `communication`.
    """

    timeline: Timeline
    starts: tuple[tuple[float, ...], ...]
    makespan: float
    peaks: tuple[int, ...]
    traffic: tuple[Mapping[str, Traffic], ...]

    def busy(self, rank: int) -> float:
        """Time a rank computes."""
        return sum(
            e.end_s - e.start_s
            for e in self.timeline.events
            if e.rank == rank and e.stream == "compute"
        )

    def peak_bytes(self, rank: int) -> int:
        """Predicted peak of what a rank's step holds beside parameters and gradients."""
        return self.peaks[rank]

    def communication(self, rank: int, stream: str | None = None) -> Traffic:
        """How long a rank's transfers took, and how much of it the rank had to wait.

        Args:
            rank: Which rank.
            stream: Only those of this stream ("recv" for messages); None: all.
        """
        found = [t for s, t in self.traffic[rank].items() if stream in (None, s)]
        return Traffic(total=sum(t.total for t in found), exposed=sum(t.exposed for t in found))

    def __str__(self) -> str:
        """Makespan; per rank busy and idle time, and transfers by stream: time, share hidden."""
        lines = [f"simulated step: {self.makespan:.4g}"]
        spent = [0.0] * len(self.traffic)
        for event in self.timeline.events:
            spent[event.rank] += event.duration_s * (event.stream == "compute")
        for rank, (streams, busy) in enumerate(zip(self.traffic, spent, strict=True)):
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
        at: The instruction it comes to next.
        issued: How many collectives it has issued on each communicator.
        handles: The collective that each of its handles is.
        total: Time of its transfers, by stream.
        exposed: What of it the rank waited for.
        starts: When it came to each instruction that it has run.
    """

    now: float = 0.0
    at: int = 0
    issued: dict[Group, int] = field(default_factory=dict)
    handles: dict[str, tuple[Group, int]] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)

    def wait(self, stream: str, ready: float, end: float) -> None:
        """Wait for a transfer that lasts from `ready` to `end`."""
        self.total[stream] = self.total.get(stream, 0.0) + end - ready
        exposed = max(end - max(self.now, ready), 0.0)
        self.exposed[stream] = self.exposed.get(stream, 0.0) + exposed
        self.now = max(self.now, end)

    def traffic(self) -> dict[str, Traffic]:
        return {s: Traffic(total=t, exposed=self.exposed[s]) for s, t in self.total.items()}


def simulate(
    programs: Sequence[RankProgram], costs: Costs, halves: Mapping[str, tuple[bool, bool]]
) -> Simulation:
    """Run the programs on an ideal machine.

    Args:
        programs: All ranks' programs.
        costs: What things cost.
        halves: For each region: whether it has input-gradient work, and weight-gradient work.

    Raises:
        PiperError: The programs deadlock.
    """
    run = _Simulator(programs, costs, halves)
    runnable = list(range(len(programs)))
    while runnable:
        progressed = False
        for rank in list(runnable):
            progressed |= run.advance(rank)
            if run.ranks[rank].at == len(programs[rank].instrs):
                runnable.remove(rank)
        if runnable and not progressed:
            stuck = "; ".join(
                f"rank {r} waits in {programs[r].instrs[run.ranks[r].at].task}" for r in runnable
            )
            raise PiperError(f"the plan deadlocks in simulation: {stuck}")
    return Simulation(
        timeline=Timeline(events=run.events, messages=run.messages),
        starts=tuple(tuple(rank.starts) for rank in run.ranks),
        makespan=max((rank.now for rank in run.ranks), default=0.0),
        peaks=tuple(p.peak_bytes for p in programs),
        traffic=tuple(rank.traffic() for rank in run.ranks),
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
        self.ranks = [_Rank() for _ in programs]
        self.events: list[Event] = []
        self.messages: list[Message] = []
        self.free: dict[object, float] = {}  # when a link has carried what it was given
        self.arrivals: dict[tuple[int, int, int], tuple[float, float, int]] = {}
        self.issues: dict[tuple[Group, int], list[tuple[int, float, Instr]]] = {}
        self.meetings: dict[tuple[Group, int], tuple[float, float]] = {}

    def advance(self, rank: int) -> bool:
        """Let a rank run until it must wait for another; whether it did anything."""
        instrs, one = self.programs[rank].instrs, self.ranks[rank]
        begin = one.at
        while one.at < len(instrs):
            start = one.now
            if not self.step(rank, one, instrs[one.at]):
                break
            one.starts.append(start)
            one.at += 1
        return one.at > begin

    def step(self, rank: int, one: _Rank, instr: Instr) -> bool:
        """Run one instruction; False if it waits for what another rank has not done yet."""
        if instr.op is Op.RUN:
            name, spent = TaskName.parse(instr.task), self.took[instr.task]
            self.event(rank, "compute", instr, name.which.value, one.now, one.now + spent)
            one.now += spent
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

    def issue(self, rank: int, one: _Rank, instr: Instr) -> None:
        """A collective; the last of its ranks sets it off."""
        group = instr.communicator
        number = one.issued[group] = one.issued.get(group, -1) + 1
        one.handles[instr.outputs[0]] = group, number
        issued = self.issues.setdefault((group, number), [])
        issued.append((rank, one.now, instr))
        if len(issued) < len(instr.group):
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
        self.free[link] = start + self.costs.on_link(sent_bytes(kind, specs, size))
        return start, self.free[link] + self.costs.comm

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
