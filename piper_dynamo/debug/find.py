"""Which code of the model a task runs.

Signature: a step or plan, a task -> modules and lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from piper_dynamo.access import explain
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.filters import Filter, FilterLike
from piper_dynamo.ir.graph import task_of
from piper_dynamo.ir.program import Op, RankProgram
from piper_dynamo.ir.spec import Source
from piper_dynamo.ir.task import TaskName
from piper_dynamo.planning import Plan

Tasks = str | FilterLike | Filter


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a task comes from.

    Attributes:
        task: Its name.
        ranks: The ranks that run it, in replica order.
        sources: The modules that its region calls and the lines that call them, in order; a
            backward's are those of its forward.
    """

    task: str
    ranks: tuple[int, ...]
    sources: tuple[Source, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        head = f"{self.task} on rank{'s' if len(self.ranks) > 1 else ''} {ranks}"
        return "\n".join([head, *(f"  {source}" for source in self.sources)])


def find(step: Any, task: str) -> Found:
    """The modules and source lines behind a task.

    Args:
        step: A compiled step that has been prepared or run, or a `piper.Plan`.
        task: Its name, as programs, pictures and errors write it: `F.PP0.MB1`.

    Raises:
        PiperError: There is no such task; near ones are listed.
    """
    plan = plan_of(step)
    nodes = {str(task_of(node).name): node for node in plan.dag.tasks()}
    if task not in nodes:
        near = get_close_matches(str(task), nodes, n=5, cutoff=0.5)
        raise PiperError(
            format_error(
                f"the plan has no task {task!r}",
                {"near": ", ".join(near)} if near else {},
                hint="name one as programs do, such as F.PP0.MB0",
            )
        )
    found = task_of(nodes[task])
    assert found.name is not None
    sources = plan.dag.sources.get(found.name.region, ())
    return Found(task=task, ranks=found.devices, sources=sources)


def plan_of(step: Any) -> Plan:
    """The plan of a step, or the plan itself."""
    return step if isinstance(step, Plan) else explain(step)


def wanted(plan: Plan, tasks: Tasks) -> Filter:
    """The filter for tasks named by a filter, or for one named by its name.

    Raises:
        PiperError: The plan has no such task.
        PiperStrategyError: It is no filter.
    """
    if isinstance(tasks, str):
        return Filter(_tags(find(plan, tasks).task))
    found = tasks if isinstance(tasks, Filter) else Filter(tasks)
    if not any(matching(program, found) for program in plan.distinct):
        tasks_run = (i.task for program in plan.distinct for i in program.instrs if i.op is Op.RUN)
        raise PiperError(
            format_error(
                f"no task matches {found!r}",
                {"one is": next(tasks_run, "-")},
                hint="a filter asks for tags of tasks: PP, MB, PASS, ...",
            )
        )
    return found


def _tags(task: str) -> Mapping[str, Any]:
    return TaskName.parse(task).tags


def matching(program: RankProgram, tasks: Filter) -> frozenset[int]:
    """Indices of the instructions that run such tasks."""
    return frozenset(
        index
        for index, instr in enumerate(program.instrs)
        if instr.op is Op.RUN and tasks.matches(_tags(instr.task))
    )
