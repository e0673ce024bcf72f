"""Where generated code lies, so that tracebacks show its lines and debuggers stop in them.

With `PIPER_CACHE_DIR` every module is a file there, in which an editor or `break file:line` of pdb
can set breakpoints; without it, its lines are kept for tracebacks and for stepping alone.

Signature: source text -> the name to compile it under.
"""

import hashlib
import linecache
import os
from pathlib import Path

from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.files import written_whole


def named(source: str, kind: str, label: str) -> str:
    """The file name for code, under which its lines are found; equal code has one name.

    Args:
        source: The code.
        kind: What it is: `step` or `chunk`.
        label: Which, as a part of a file's name.

    Raises:
        PiperError: The file cannot be written.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    folder = os.environ.get("PIPER_CACHE_DIR")
    if not folder:
        name = f"<piper {kind} {label} {digest}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        return name
    path = Path(folder).absolute() / "generated" / f"{kind}-{label}-{digest}.py"
    if not path.exists():
        try:
            with written_whole(path) as begun:  # other ranks write the same
                begun.write_text(source, encoding="utf-8")
        except OSError as error:
            raise PiperError(
                format_error(
                    "generated code cannot be written",
                    {"file": path, "why": error},
                    hint="set PIPER_CACHE_DIR to a folder that you may write to, or leave it out",
                )
            ) from error
    return str(path)
