"""Says what ranks wait for while they still wait.

A thread looks at running steps every some seconds: at the line of the emitted program at which a
rank is. Steps pay nothing for it, and a step that hangs is told of long before its deadline.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("piper.waiting")

FIRST_S = 10.0  # of waiting for one thing, until it is told; then after twice as long each time
LOOKS = 5  # in that time


@dataclass(slots=True, kw_only=True)
class Running:
    """A step of a thread.

    Attributes:
        file: The emitted program's.
        waits: What the rank waits for in a line of it; None where it does not wait.
        line: Where it was when it was last looked at.
        since_s: Since when, in seconds of the monotonic clock.
        told: How often that has been told.
    """

    file: str
    waits: Callable[[int], str | None]
    line: int = 0
    since_s: float = 0.0
    told: int = 0

    def look(self, line: int, now_s: float) -> str | None:
        """What is to be told of a step that is at this line now."""
        if line != self.line:
            self.line, self.since_s, self.told = line, now_s, 0
            return None
        waited = now_s - self.since_s
        if waited < FIRST_S * 2**self.told:
            return None
        what = self.waits(line)
        if what is None:
            return None
        self.told += 1
        return f"{what} since {waited:.0f} s"


_running: dict[int, Running] = {}
_watcher: threading.Thread | None = None


@contextmanager
def watched(step: Running) -> Iterator[None]:
    """While a step runs on this thread, say what it waits for."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="piper waiting", daemon=True)
        _watcher.start()
    thread = threading.get_ident()
    _running[thread] = step
    try:
        yield
    finally:
        _running.pop(thread, None)


def _watch() -> None:
    while True:
        time.sleep(FIRST_S / LOOKS)
        _look()


def _look() -> None:
    """Tell of each running step that waits.

    A frame that is kept keeps its tensors, and all of them together hold this one, too: a cycle.
    """
    for thread, step in list(_running.items()):
        frame = sys._current_frames().get(thread)
        while frame is not None and frame.f_code.co_filename != step.file:
            frame = frame.f_back
        told = step.look(frame.f_lineno, time.monotonic()) if frame is not None else None
        if told is not None:
            log.warning("%s", told)
