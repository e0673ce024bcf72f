"""The measured timeline of a step, from the times at which its instructions ended."""

from collections.abc import Callable
from itertools import pairwise

from piper_dynamo.ir.program import Op
from piper_dynamo.ir.task import TaskName
from piper_dynamo.runtime.executor import Executor
from piper_dynamo.timeline import Event, Timeline


def recorder(rank: int) -> tuple[Timeline, Callable[[Executor], None]]:
    """An empty timeline, and what fills it from an executor whose last step was timed."""
    events: list[Event] = []
    timeline = Timeline(events=events)

    def take(executor: Executor) -> None:
        marks = executor.marks
        for (_, start), (index, end) in pairwise(marks):
            instr = executor.program.instrs[index]
            kind, stream = _kind(instr.op), "compute"
            tags: dict[str, int | str] = {}
            if instr.op is Op.RUN:
                name = TaskName.parse(instr.task)
                kind, tags = name.which.value, dict(name.tags)
            elif kind in ("send", "recv", "wait"):
                stream = kind
            events.append(
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

    return timeline, take


def _kind(op: Op) -> str:
    match op:
        case Op.SEND:
            return "send"
        case Op.POST:
            return "recv"
        case Op.WAIT | Op.DRAIN:
            return "wait"
        case Op.ALL_REDUCE | Op.REDUCE_SCATTER:
            return "reduce"
        case Op.ALL_GATHER | Op.ALL_TO_ALL:
            return "gather"
        case _:
            return "other"
