"""The measured timeline of a step, from the times at which its instructions ended.

A collective is drawn in its stream's lane from its issue to the end of the wait for it: how long it
had, of which it may have needed less. The wait itself has a lane of its own. What a rank holds is
what its program's registers hold at the measured times, by their sizes, not what an allocator says.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from piper_dynamo.costs import Costs
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.footprint import held_before
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.joint import Arg
from piper_dynamo.ir.program import COLLECTIVES, Instr, Op, RankProgram
from piper_dynamo.ir.task import TaskName
from piper_dynamo.lowering.memory import memory_curve
from piper_dynamo.pictures import read_chrome_trace
from piper_dynamo.runtime.executor import Executor
from piper_dynamo.timeline import COLLECTIVE_LOOKS, COMPUTE, Event, Message, Timeline

PREDICTED_FROM_RUN = "predicted, from the mean time of each task"  # heading of a picture

Take = Callable[[Executor, Mapping[str, Chunk], Sequence[Arg]], None]


def recorder(rank: int) -> tuple[Timeline, Take]:
    """An empty timeline, and what fills it from an executor whose last step was timed.

    That takes the executor, the plan's chunks, and the captured call's arguments.
    """
    events: list[Event] = []
    messages: list[Message] = []
    timeline = Timeline(events=events, messages=messages)

    def take(executor: Executor, chunks: Mapping[str, Chunk], args: Sequence[Arg]) -> None:
        marks = executor.marks
        program = executor.program
        if not program.tangents:  # else the backward is still to come
            before = held_before(program, args)
            curve = memory_curve(program, chunks, _starts(program, marks), before)
            timeline.memory.setdefault(rank, []).extend(curve)
        issued: dict[str, tuple[Instr, float]] = {}  # by handle: a collective, and when it began
        for (_, start), (index, end) in pairwise(marks):
            instr = program.instrs[index]
            kind, stream = _kind(instr.op), "compute"
            tags: dict[str, int | str] = {}
            if instr.op is Op.RUN:
                name = TaskName.parse(instr.task)
                kind, tags = name.which.value, dict(name.tags)
            elif kind in ("send", "recv", "wait"):
                stream = kind
            elif instr.op in COLLECTIVES:
                issued[instr.outputs[0]] = instr, start
            if instr.op is Op.WAIT and instr.inputs[0] in issued:
                of, began = issued.pop(instr.inputs[0])
                events.append(_event(rank, of.stream, of.task, COLLECTIVE_LOOKS[of.op], began, end))
            events.append(_event(rank, stream, instr.task, kind, start, end, tags))
            if instr.op is Op.SEND and instr.spec is not None:
                messages.append(
                    Message(
                        source=rank,
                        target=instr.peer,
                        number=instr.message,
                        name=instr.task,
                        nbytes=instr.spec.nbytes,
                        sent_s=start,
                    )
                )
            elif instr.op is Op.WAIT and instr.peer >= 0:
                messages.append(
                    Message(
                        source=instr.peer,
                        target=rank,
                        number=instr.message,
                        name=instr.task,
                        taken_s=end,
                    )
                )

    return timeline, take


def _starts(program: RankProgram, marks: Sequence[tuple[int, float]]) -> list[float]:
    """When each instruction began: at the last mark before; frees have none of their own."""
    ends, now = dict(marks), marks[0][1]
    found = []
    for index in range(len(program.instrs)):
        found.append(now)
        now = ends.get(index, now)
    return found


def _event(
    rank: int,
    stream: str,
    name: str,
    kind: str,
    start_s: float,
    end_s: float,
    tags: Mapping[str, int | str] | None = None,
) -> Event:
    return Event(
        rank=rank,
        stream=stream,
        name=name,
        kind=kind,
        tags=tags or {},
        start_s=start_s,
        end_s=end_s,
    )


def _kind(op: Op) -> str:
    match op:
        case Op.SEND:
            return "send"
        case Op.POST:
            return "recv"
        case Op.WAIT | Op.DRAIN:
            return "wait"
        case _:
            return "other"


def measured_costs(timeline: Timeline) -> Costs:
    """Costs of a simulation: the mean measured time of each region's passes."""
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE:
            region = str(TaskName.parse(event.name).region)
            spent[region, event.kind].append(event.duration_s)
    mean = {key: sum(found) / len(found) for key, found in spent.items()}

    def cost(name: TaskName) -> float:
        return mean.get((str(name.region), name.which.value), 0.0)

    return Costs(of=cost)


def measured_step(folder: str | Path, programs: Sequence[RankProgram]) -> Timeline:
    """The step that a run folder holds the trace of.

    Args:
        folder: Of `piper train`.
        programs: Of the plan that it is to be compared with.

    Raises:
        PiperError: There is no trace, or it is of another plan.
    """
    measured = read_chrome_trace(Path(folder) / "trace.json")
    ran = {(e.rank, e.name) for e in measured.events if e.kind in COMPUTE}
    planned = {(p.rank, i.task) for p in programs for i in p.instrs if i.op is Op.RUN}
    other = sorted(ran ^ planned)
    if other:
        rank, task = other[0]
        whose = "the run has" if other[0] in ran else "the plan has"
        raise PiperError(
            format_error(
                "the run is not one of this plan",
                {"run": folder, "differs": f"{whose} {task} on rank {rank}, the other has not"},
                hint="plan what the run ran: its options are in config.json",
            )
        )
    return measured
