"""A debugger before a task.

Signature: a step, tasks -> a context in which steps stop.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from piper_dynamo.access import state_of
from piper_dynamo.debug.find import Tasks, matching, plan_of, wanted
from piper_dynamo.ir.program import RankProgram


@contextmanager
def stop_at(step: Any, tasks: Tasks) -> Iterator[None]:
    """Enter the debugger before tasks: `breakpoint()`, in the rank's program.

    `step` there goes into the task's chunk, one line per operator; `up` shows the program. Inside
    of another `stop_at` steps stop at the tasks of both.

    Args:
        step: A compiled step that has been prepared or run.
        tasks: A task's name (`F.PP0.MB1`) or a filter (`{"PP": 1, "PASS": "B"}`).

    Raises:
        PiperError: The plan has no such task.
        PiperStrategyError: It is no filter.
    """
    state, found = state_of(step), wanted(plan_of(step), tasks)
    before = state.stops

    def stops(program: RankProgram) -> frozenset[int]:
        return matching(program, found) | (before(program) if before is not None else frozenset())

    state.stops = stops
    try:
        yield
    finally:
        state.stops = before
