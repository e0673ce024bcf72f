"""Says what ranks wait for while they still wait, and ends those that nothing else would end.

A thread looks at running steps every some seconds: at the line of the emitted program at which a
rank is. Steps pay nothing for it, and a step that hangs is told of long before its deadline. What
it sees is also what other ranks are told when a wait of theirs has run out (`alarm.py`).

Terms: what a rank is *at* is what it waits for, or computes, or the user's line outside of a step.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from piper_dynamo.runtime.failure import is_users, leave

log = logging.getLogger("piper.waiting")

FIRST_S = 10.0  # of waiting for one thing, until it is told; then after twice as long each time
LOOKS = 20  # in that time
STUCK_S = 10.0  # the most that the key-value store may take for an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """What a rank is at.

    Attributes:
        text: In words that go on after "rank 3".
        peers: The ranks that it waits for; none where it does not wait.
        seconds: For how long.
    """

    text: str
    peers: tuple[int, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.text} since {self.seconds:.1f} s"


Place = tuple[str, tuple[int, ...]]  # the text and peers of an `At`


@dataclass(slots=True, kw_only=True)
class Running:
    """A step of a thread.

    Attributes:
        file: The emitted program's.
        rank: Whose.
        place: What the rank is at in a line of it.
        line: Where it was when it was last looked at.
        since_s: Since when, in seconds of the monotonic clock.
        told: How often that has been told.
    """

    file: str
    rank: int
    place: Callable[[int], Place]
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
        text, peers = self.place(line)
        if not peers:
            return None
        self.told += 1
        return f"rank {self.rank} {text} since {waited:.0f} s"


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A rank of this process that may be asked what it is at.

    Attributes:
        thread: Its thread.
        comm: Its communicator.
        spot: Outside of steps, the user's line and how many steps were done, when last looked at.
        since_s: Since when.
    """

    thread: int
    comm: Any
    spot: tuple[str, int] = ("", 0)
    since_s: float = 0.0


_running: dict[int, Running] = {}
_expected: dict[int, tuple[Place, float]] = {}
_watched: _Watched | None = None
_watcher: threading.Thread | None = None


@contextmanager
def watched(step: Running) -> Iterator[None]:
    """While a step runs on this thread, say what it waits for."""
    _start()
    thread = threading.get_ident()
    _running[thread] = step
    try:
        yield
    finally:
        _running.pop(thread, None)


@contextmanager
def expecting(text: str, *peers: int, seconds: float = 0.0) -> Iterator[None]:
    """While this thread waits for these ranks outside of a program's lines, that is what it is at.

    Args:
        text: In words that go on after "rank 3".
        peers: Which ranks.
        seconds: For how long it has done so already.
    """
    thread = threading.get_ident()
    before = _expected.get(thread)
    _expected[thread] = (text, peers), time.monotonic() - seconds
    try:
        yield
    finally:
        if before is None:
            _expected.pop(thread, None)
        else:
            _expected[thread] = before


def watch(comm: Any) -> None:
    """Be able to say what this thread, which is a rank with processes of its own, is at."""
    global _watched
    _watched = _Watched(thread=threading.get_ident(), comm=comm, since_s=time.monotonic())
    _start()


def at() -> At:
    """What the watched rank is at now."""
    rank, now = _watched, time.monotonic()
    if rank is None:
        return At(text="has not begun")
    frame = sys._current_frames().get(rank.thread)
    expected = _expected.get(rank.thread)
    if expected is not None:
        (text, peers), since = expected
        return At(text=text, peers=peers, seconds=now - since)
    step = _running.get(rank.thread)
    inner = _frame_of(frame, step.file) if step is not None else None
    if step is not None and inner is not None:
        since = step.since_s if step.line == inner.f_lineno else now
        text, peers = step.place(inner.f_lineno)
        return At(text=text, peers=peers, seconds=now - since)
    spot = _users_spot(frame)
    since = rank.since_s if rank.spot == (spot, rank.comm.steps) else now
    where = f"is at {spot}, outside of a step" if spot else "is outside of a step"
    return At(text=where, seconds=now - since)


def _start() -> None:
    global _watcher
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="piper waiting", daemon=True)
        _watcher.start()


def _watch() -> None:
    while True:
        time.sleep(FIRST_S / LOOKS)
        _look()


def _look() -> None:
    """Tell of each running step that waits; note where the watched rank is outside of steps.

    A frame that is kept keeps its tensors, and all of them together hold this one, too: a cycle.
    """
    for thread, step in list(_running.items()):
        frame = _frame_of(sys._current_frames().get(thread), step.file)
        told = step.look(frame.f_lineno, time.monotonic()) if frame is not None else None
        if told is not None:
            log.warning("%s", told)
    if _watched is not None:
        _look_outside(_watched, sys._current_frames().get(_watched.thread))
        _end_if_stuck(_watched.comm)


def _look_outside(rank: _Watched, frame: FrameType | None) -> None:
    spot = (_users_spot(frame), rank.comm.steps)
    if spot != rank.spot or rank.thread in _running:
        rank.spot, rank.since_s = spot, time.monotonic()


def _end_if_stuck(comm: Any) -> None:
    """A request to a machine that is cut off never returns, so nothing else ends this rank."""
    since = comm.store.since_s
    limit = min(comm.timeout_s, STUCK_S)
    if since and time.monotonic() - since > limit:
        leave(
            f"rank {comm.rank} ends: the key-value store, on the machine of rank 0 or of the "
            f"launcher, has not answered for {limit:g} s; this machine or that one is cut off"
        )


def _frame_of(frame: FrameType | None, file: str) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame


def _users_spot(frame: FrameType | None) -> str:
    """The user's innermost line, as `file:line in function`."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
