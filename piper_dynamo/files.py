"""Files: there as a whole or not at all, for their owner alone, and read only up to some size.

Several ranks may write the same. Only the user who runs a job can read what Piper writes: weights
and options are nobody else's business unless the user says so (`chmod`).
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper_dynamo.errors import PiperError, format_error

FOLDER_MODE, FILE_MODE = 0o700, 0o600
MOST_BYTES = 64 * 2**20  # of a text file: strategies, profiles and tables are far smaller


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write: when that has ended well, `path` is replaced by it.

    Raises:
        OSError: The folder or the file cannot be made.
    """
    path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    begun = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield begun
        begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)


def private(path: str, flags: int) -> int:
    """An opener for `open`: a new file is its owner's alone."""
    return os.open(path, flags, FILE_MODE)


@contextmanager
def private_files() -> Iterator[None]:
    """Whatever this process makes meanwhile is its owner's alone."""
    before = os.umask(0o777 & ~FOLDER_MODE)
    try:
        yield
    finally:
        os.umask(before)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """A text file, unless it is too large to be what is asked for.

    Raises:
        PiperError: It is too large.
        OSError: It cannot be read.
        UnicodeDecodeError: It is no text.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    check_size(len(data), most, str(path))
    return data.decode("utf-8")


def check_size(num_bytes: int, most: int, what: str) -> None:
    """Refuse what is too large.

    Raises:
        PiperError: It is.
    """
    if num_bytes > most:
        raise PiperError(
            format_error(
                f"{what} is too large",
                {"at most": f"{most:,} bytes"},
                hint="it is read whole: name the file that was meant",
            )
        )
