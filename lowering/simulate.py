"""Simulate: run the lowered programs event by event with given costs, without computing anything.

A rank issues its instructions in order. A chunk takes its cost; a message arrives `comm` after its
send; a wait lasts until then; everything else takes no time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper_dynamo.costs import Costs, durations
from piper_dynamo.errors import PiperError
from piper_dynamo.ir.program import Group, Op, RankProgram
from piper_dynamo.ir.task import TaskName
from piper_dynamo.timeline import Event, Timeline


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
    took = durations(programs, costs, halves)
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
                    spent = took[instr.task]
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
