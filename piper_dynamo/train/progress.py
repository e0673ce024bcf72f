"""What a run shows while it runs: lines, phases that tell how long they take, and a bar.

On rank 0 alone, on stderr, so that stdout holds results only. In a terminal a phase counts seconds
and the bar moves; in a log both write a whole line now and then.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

TICK_S, LOG_TICK_S = 0.5, 10.0
CLEAR = "\r\x1b[K"  # back to the start of the line, and empty it


class Progress:
    """The display of one rank."""

    def __init__(self, *, is_shown: bool, file: TextIO | None = None) -> None:
        """`is_shown` is false on ranks that stay quiet; `file` stands in for stderr."""
        self._is_shown = is_shown
        self._file = file or sys.stderr
        self._is_terminal = self._file.isatty()
        self._start = time.perf_counter()

    def say(self, text: str) -> None:
        """A line with the time since the start, above the bar if there is one."""
        if not self._is_shown:
            return
        from tqdm import tqdm

        clear = CLEAR if self._is_terminal else ""
        since = time.perf_counter() - self._start
        tqdm.write(f"{clear}[{since:6.1f} s] {text}", file=self._file)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Say what is going on now, and from time to time that it still is."""
        self.say(text)
        with self.ticking(text) if self._is_shown else nullcontext():
            yield

    @contextmanager
    def ticking(self, text: str) -> Iterator[None]:
        """Say from time to time that something still goes on."""
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(text, done), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()

    def _tick(self, text: str, done: threading.Event) -> None:
        begin = time.perf_counter()
        while not done.wait(TICK_S if self._is_terminal else LOG_TICK_S):
            spent = f"{time.perf_counter() - begin:.0f} s"
            if self._is_terminal:
                self._file.write(f"{CLEAR}  {text}: {spent}")
                self._file.flush()
            else:
                self.say(f"... {text}: {spent} so far")
        if self._is_terminal:
            self._file.write(CLEAR)
            self._file.flush()

    @contextmanager
    def steps(self, total: int, done: int = 0) -> Iterator[Callable[[str], None]]:
        """Show steps and the time left; call what this gives once per step, with what it was.

        A resumed run has done some of the total before.

        A bar of tqdm's and not rich's: it needs one line of the terminal and no thread.
        """
        if not self._is_shown:
            yield lambda text: None
            return
        if not self._is_terminal:
            yield _Lines(total, done, self.say).step
            return
        from tqdm import tqdm

        with tqdm(
            total=total, initial=done, file=self._file, unit="step", dynamic_ncols=True
        ) as bar:

            def step(text: str) -> None:
                bar.set_postfix_str(text, refresh=False)
                bar.update()

            yield step


@contextmanager
def waiting_for(text: str) -> Iterator[None]:
    """In a terminal, what goes on and for how long, until it has ended; elsewhere nothing."""
    is_terminal = sys.stderr.isatty()
    with Progress(is_shown=True).ticking(text) if is_terminal else nullcontext():
        yield


class _Lines:
    """What stands in for the bar in a log."""

    def __init__(self, total: int, done: int, say: Callable[[str], None]) -> None:
        self._total, self._say = total, say
        self._before = self._done = done
        self._start = self._last = time.perf_counter()

    def step(self, text: str) -> None:
        """Count a step; say so after the first, after the last, and every LOG_TICK_S."""
        self._done += 1
        now = time.perf_counter()
        made = self._done - self._before
        if made > 1 and self._done < self._total and now - self._last < LOG_TICK_S:
            return
        self._last = now
        left_s = (now - self._start) / made * (self._total - self._done)
        left = f"{left_s // 60:.0f}:{left_s % 60:02.0f} left"
        self._say(f"step {self._done} of {self._total}: {text}, {left}")
