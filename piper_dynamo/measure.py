"""The measured timeline of a step, from the times at which its instructions ended.

A collective is drawn in its stream's lane from its issue to the end of the wait for it: how long it
had, of which it may have needed less. The wait itself has a lane of its own.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise

from piper_dynamo.ir.program import COLLECTIVES, Instr, Op
from piper_dynamo.ir.task import TaskName
from piper_dynamo.runtime.executor import Executor
from piper_dynamo.timeline import COLLECTIVE_LOOKS, Event, Timeline


def recorder(rank: int) -> tuple[Timeline, Callable[[Executor], None]]:
    """An empty timeline, and what fills it from an executor whose last step was timed."""
    events: list[Event] = []
    timeline = Timeline(events=events)

    def take(executor: Executor) -> None:
        marks = executor.marks
        issued: dict[str, tuple[Instr, float]] = {}  # by handle: a collective, and when it began
        for (_, start), (index, end) in pairwise(marks):
            instr = executor.program.instrs[index]
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

    return timeline, take


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
