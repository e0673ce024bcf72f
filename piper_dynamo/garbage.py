"""When garbage is collected while a step is captured and planned.

Tracing and planning make many objects, and leave many that refer to one another in circles. To look
for garbage all the time takes long; not to look at all heaps up what every stage leaves, and Python
seldom gives such memory back. So the collector rests, and each stage calls it when it ends. Graphs
are taken apart where they are no longer needed (`_torch_compat.drop_graph`).

Large tensors that come and go, while small things that stay are put between them, leave holes that
glibc keeps: `freed` gives their pages back, and `keep_large_apart` lets none come about.
"""

import ctypes
import gc
import linecache
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, ClassVar

# So many new objects between two looks within a stage; one look goes through no others.
OFTEN = 20_000
NEVER = 1_000_000
# From Python 3.14 on, `gc.collect(1)` does a part of a collection, not all of the young objects.
_YOUNG = 1 if sys.version_info < (3, 14) else 2
HOLES_BYTES = 16 * 2**20  # so much may be free and not given back
APART_BYTES = 2**20  # blocks from this size on are taken from the system and given back to it
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# What users set to choose for themselves how malloc holds memory.
_OWN_CHOICES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


class _Resting:
    """How many blocks are in force, in all threads, and whether the collector ran before them."""

    lock = threading.Lock()
    blocks = 0
    ran_before = False


@contextmanager
def resting_collector() -> Iterator[None]:
    """No collection inside, but where `collect` and `young_collector` ask for it."""
    with _Resting.lock:
        if not _Resting.blocks:
            _Resting.ran_before = gc.isenabled()
            gc.disable()
        _Resting.blocks += 1
    try:
        yield
    finally:
        with _Resting.lock:
            _Resting.blocks -= 1
            ends = not _Resting.blocks and _Resting.ran_before
            if ends:
                gc.enable()  # under the lock: the next block must see that it runs
        if ends:
            collect()


@contextmanager
def young_collector() -> Iterator[None]:
    """Within a stage that makes much more than it leaves: look at new objects now and then."""
    if gc.isenabled() or not (_Resting.blocks and _Resting.ran_before):
        yield
        return
    before = gc.get_threshold()
    gc.set_threshold(OFTEN, NEVER, NEVER)
    gc.enable()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        with _Resting.lock:
            if _Resting.blocks:
                gc.disable()


def collect() -> None:
    """End a stage: free what it made in circles, and the source lines that its traces quote.

    Only objects made since the last stage are looked at (before Python 3.14), and source lines read
    since, so that many stages take what one does.
    """
    gc.collect(_YOUNG)
    # Every graph that was ever compiled has lines in there. What is new comes last, but for names
    # that tracebacks leave with a function that reads the lines: it is called in place.
    names = list(linecache.cache)  # at once: other threads may add some
    new = takewhile(lambda name: name != _Lines.last, reversed(names))
    for name in [*new, *_Lines.unread]:
        entry: Sequence[Any] = linecache.cache.get(name, ())
        _Lines.unread.discard(name)
        size = len(entry)
        if size == 1:
            _Lines.unread.add(name)
        # A file's lines are read again when they are asked for; other lines have no file.
        elif size > 1 and entry[1] is not None and os.path.isfile(entry[3]):
            linecache.cache.pop(name, None)
    _Lines.last = next((name for name in reversed(names) if name in linecache.cache), "")


class _Lines:
    """The last file or graph whose source lines were looked at, and those not read by then."""

    last = ""
    unread: ClassVar[set[str]] = set()


class _Holes:
    """Bytes freed since pages were given back."""

    nbytes = 0


def freed(nbytes: int) -> None:
    """Count memory that was freed in large pieces, and give pages back once it is enough."""
    _Holes.nbytes += nbytes
    if _Holes.nbytes < HOLES_BYTES:
        return
    give_back()


def give_back() -> None:
    """Give pages back that malloc keeps though nothing is in them; glibc's only."""
    _Holes.nbytes = 0
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def keep_large_apart() -> None:
    """From now on, glibc gives large blocks back when they are freed; nothing elsewhere.

    Left alone it keeps them, and small blocks that stay break them up: a rank of a job with sharded
    parameters then holds twice what it uses. The price is time, for pages that are cleared anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None or any(name in os.environ for name in _OWN_CHOICES):
        return
    mallopt(_M_MMAP_THRESHOLD, APART_BYTES)
    mallopt(_M_TRIM_THRESHOLD, 2 * APART_BYTES)
