"""Files that are there as a whole or not at all, though several ranks may write the same.

Signature: a path -> another to write to, which takes its place.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write: when that has ended well, `path` is replaced by it.

    Raises:
        OSError: The folder or the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield begun
        begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)
