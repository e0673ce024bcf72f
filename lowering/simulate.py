"""Simulate: run the lowered programs event by event with given costs, without computing anything.

A rank issues its instructions in order. A chunk takes its cost; a message arrives `comm` after its
send; a wait lasts until then; everything else takes no time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from piper_dynamo.errors import PiperError
from piper_dynamo.ir.program import Group, Op, RankProgram
from piper_dynamo.ir.task import Pass, TaskName
from piper_dynamo.timeline import Event, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a task costs, in any unit of time.

    Attributes:
        F: Forward of one region for one microbatch.
        BI: Input gradient. An unsplit B costs what its non-empty halves cost.
        BW: Weight gradient.
        comm: A message, from its send to its arrival.
        of: Instead of F, BI and BW: the cost of a task, as a function of its name and what of
            it is there.
    """

    F: float = 1.0
    BI: float = 1.0
    BW: float = 1.0
    comm: float = 0.0
    of: Callable[[TaskName], float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The outcome of a simulated step.

    Attributes:
        timeline: Every task and message on every rank.
        makespan: Time from the first to the last event.
    """

    timeline: Timeline
    makespan: float
    peaks: tuple[int, ...]

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
    shares = _shares(programs)
    now = [0.0] * len(programs)
    at = [0] * len(programs)
    arrival: dict[tuple[int, int, int], float] = {}
    collected: dict[tuple[Group, int], dict[int, float]] = {}
    issued: list[dict[Group, int]] = [{} for _ in programs]
    handles: list[dict[str, tuple[Group, int]]] = [{} for _ in programs]
    events: list[Event] = []
    runnable = list(range(len(programs)))
    while runnable:
        progressed = False
        for rank in list(runnable):
            program = programs[rank]
            while at[rank] < len(program.instrs):
                instr = program.instrs[at[rank]]
                if instr.op is Op.RUN:
                    name = TaskName.parse(instr.task)
                    spent = _cost(name, costs, halves) / shares[_task_key(name)]
                    events.append(
                        Event(
                            rank=rank,
                            stream="compute",
                            name=instr.task,
                            kind=name.which.value,
                            tags=dict(name.tags),
                            start_s=now[rank],
                            end_s=now[rank] + spent,
                        )
                    )
                    now[rank] += spent
                elif instr.op is Op.SEND:
                    arrival[rank, instr.peer, instr.message] = now[rank] + costs.comm
                    if costs.comm:
                        events.append(_message(rank, instr.task, now[rank], now[rank] + costs.comm))
                elif instr.op is Op.WAIT and instr.peer >= 0:
                    key = (instr.peer, rank, instr.message)
                    if key not in arrival:
                        break
                    now[rank] = max(now[rank], arrival[key])
                elif instr.group:
                    group = instr.communicator
                    number = issued[rank].get(group, 0)
                    issued[rank][group] = number + 1
                    handles[rank][instr.outputs[0]] = (group, number)
                    collected.setdefault((group, number), {})[rank] = now[rank]
                elif instr.op is Op.WAIT:
                    meeting = handles[rank][instr.inputs[0]]
                    if len(collected[meeting]) < len(meeting[0][1]):
                        break
                    now[rank] = max(now[rank], max(collected[meeting].values()) + costs.comm)
                at[rank] += 1
                progressed = True
            if at[rank] == len(program.instrs):
                runnable.remove(rank)
        if runnable and not progressed:
            stuck = "; ".join(
                f"rank {r} waits in {programs[r].instrs[at[r]].task}" for r in runnable
            )
            raise PiperError(f"the plan deadlocks in simulation: {stuck}")
    makespan = max(now, default=0.0)
    return Simulation(
        timeline=Timeline(events=events),
        makespan=makespan,
        peaks=tuple(p.peak_bytes for p in programs),
    )


def _task_key(name: TaskName) -> tuple[object, ...]:
    """Chunks of one (PP, MB, PASS) share its cost; regions without PP stand for themselves."""
    tags = dict(name.tags)
    return (tags.get("PP", str(name.region)), name.mb, name.which)


def _shares(programs: Sequence[RankProgram]) -> dict[tuple[object, ...], int]:
    names = {i.task for p in programs for i in p.instrs if i.op is Op.RUN}
    shares: dict[tuple[object, ...], int] = {}
    for text in names:
        key = _task_key(TaskName.parse(text))
        shares[key] = shares.get(key, 0) + 1
    return shares


def _cost(name: TaskName, costs: Costs, halves: Mapping[str, tuple[bool, bool]]) -> float:
    if costs.of is not None:
        return float(costs.of(name))
    has_input, has_weight = halves.get(str(name.region), (True, True))
    match name.which:
        case Pass.F:
            return costs.F
        case Pass.BI:
            return costs.BI
        case Pass.BW:
            return costs.BW
        case Pass.B:
            return costs.BI * has_input + costs.BW * has_weight


def _message(rank: int, task: str, start: float, end: float) -> Event:
    name = TaskName.parse(task) if task and task[0] in "FB" else None
    return Event(
        rank=rank,
        stream="send",
        name=task,
        kind="send",
        tags=dict(name.tags) if name is not None else {},
        start_s=start,
        end_s=end,
    )
