"""A debugger before a task.

Signature: a step, tasks -> a context in which steps stop.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from piper_dynamo.access import state_of
from piper_dynamo.debug.find import Tasks, matching, plan_of, wanted
from piper_dynamo.filters import Filter
from piper_dynamo.ir.program import RankProgram, Watch


@dataclass(slots=True)
class _Stops:
    """Stops before tasks; it is shown nothing."""

    tasks: Filter

    def watch(self, plan: Any, program: RankProgram, watch: Watch) -> Watch:
        return replace(watch, stops=matching(program, self.tasks))

    def enter(self, index: int, values: Sequence[Any], bundle: Sequence[Any]) -> None:
        raise AssertionError("nothing is probed")

    def leave(self, index: int, results: Sequence[Any]) -> None:
        raise AssertionError("nothing is probed")

    def finish(self) -> None:
        """Nothing is kept."""


@contextmanager
def stop_at(step: Any, tasks: Tasks) -> Iterator[None]:
    """Enter the debugger before tasks: `breakpoint()`, in the rank's program.

    `step` there goes into the task's chunk, one line per operator; `up` shows the program.

    Args:
        step: A compiled step that has been prepared or run.
        tasks: A task's name (`F.PP0.MB1`) or a filter (`{"PP": 1, "PASS": "B"}`).

    Raises:
        PiperError: The plan has no such task.
        PiperStrategyError: It is no filter.
    """
    state = state_of(step)
    before, state.debugger = state.debugger, _Stops(wanted(plan_of(step), tasks))
    try:
        yield
    finally:
        state.debugger = before
