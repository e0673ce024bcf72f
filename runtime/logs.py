"""A log per rank: what its process writes, whoever writes it.

Of rank 0 it stays on the terminal, too.
"""

import faulthandler
import io
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

CLEAR_LINE = "\x1b[K"


def log_file(folder: str | Path, rank: int) -> Path:
    """Where a rank's log is; later starts of the job write behind the earlier ones."""
    return Path(folder) / f"rank-{rank}.log"


@contextmanager
def kept(folder: str | Path | None, rank: int) -> Iterator[None]:
    """Keep what this process writes to stdout and stderr in the rank's log, if there is a folder.

    Of ranks above 0 the log takes the place of both, also for what is written by native code. Rank
    0 writes where it wrote before, a progress bar included; native code of it does not reach the
    log.
    """
    if folder is None:
        yield
        return
    path = log_file(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", buffering=1) as log:
        log.write(f"-- rank {rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        with _shown(log) if rank == 0 else _instead(log):
            try:
                yield
            except BaseException:
                traceback.print_exc(file=log)
                raise


@contextmanager
def _shown(log: TextIO) -> Iterator[None]:
    traces = not faulthandler.is_enabled()
    if traces:
        faulthandler.enable(log)
    out, err = Tee(sys.stdout, log), Tee(sys.stderr, log)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        out.end()
        err.end()
        if traces:
            faulthandler.disable()


@contextmanager
def _instead(log: TextIO) -> Iterator[None]:
    sys.stdout.flush()
    sys.stderr.flush()
    before = [(number, os.dup(number)) for number in (1, 2)]
    for number, _ in before:
        os.dup2(log.fileno(), number)
    try:
        # By Python's own streams: theirs may hold lines back, or be no files at all.
        with redirect_stdout(log), redirect_stderr(log):
            yield
    finally:
        for number, kept_as in before:
            os.dup2(kept_as, number)
            os.close(kept_as)


class Tee(io.TextIOBase):
    """Text for a stream, and its whole lines for a log: of a line written over, the last form."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        """`stream` answers for both: whether it is a terminal, its encoding, its number."""
        self._stream, self._log = stream, log
        self._line = ""

    def write(self, text: str) -> int:
        """To both."""
        self._stream.write(text)
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            self._log.write(_last_form(line).removeprefix(CLEAR_LINE) + "\n")
        # A bar writes over its line for hours.
        self._line = _last_form(rest) + "\r" * rest.endswith("\r")
        return len(text)

    def flush(self) -> None:
        """Of the stream; lines are in the log once they end."""
        self._stream.flush()

    def end(self) -> None:
        """Write the line that has not ended."""
        if self._line:
            self.write("\n")

    def isatty(self) -> bool:
        """The stream's."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute, to mypy
        """The stream's."""
        return self._stream.encoding


def _last_form(line: str) -> str:
    """What is left of a line that was written over."""
    return line.rstrip("\r").rpartition("\r")[2]
