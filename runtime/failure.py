"""How a rank failed, and which failure of a job came first.

Terms: an *echo* is a failure that only follows from another rank's: a wait that ran out, a
connection whose other end is gone. A job's *first* failure is the earliest that is no echo; where
all are, it is the rank that the others waited for (`alarm.py` finds out which that is).

Signature: an exception, or an exit code -> a `Failure`; all of a job's -> one message whose last
lines are the first failure's place and error.
"""

import json
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.runtime.faults import kill_of

_OWN = (
    str(Path(__file__).resolve().parents[1] / "piper_dynamo") + os.sep,
    str(Path(__file__).resolve().parent) + os.sep,
)
_LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib")),
        *_OWN,
        "<",  # what has no file
    }
)
_CAPTURING = (*_OWN, os.path.join(sysconfig.get_path("purelib"), "torch") + os.sep)
# What gloo says when the other end of a connection is gone.
_LOST = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "Socket is not connected",
    "No route to host",
)


# Exit code of a process that was to start ranks while it read the script again; none of sysexits.
UNGUARDED = 170
UNGUARDED_TEXT = """\
the process read the script again, to find the function, and came to the call that starts ranks
put that under `if __name__ == "__main__":`, as in
    if __name__ == "__main__":
        piper.launch(train, ranks=2)"""


def is_users(file: str) -> bool:
    """Whether a file is neither Python's, nor an installed library's, nor Piper's."""
    return not file.startswith(_LIBRARIES)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that the other end of a connection is gone."""
    return isinstance(error, RuntimeError | OSError) and any(w in str(error) for w in _LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: Which.
        when: Seconds since the epoch, of the clock of its machine.
        text: All that is known.
        where: The user's `file:line`, if there is one.
        error: The error in one line, if it is one of Python.
        is_echo: Whether it only follows from another rank's.
        blames: The rank that this one waited for in vain, if that is known; else -1.
    """

    rank: int
    when: float
    text: str
    where: str = ""
    error: str = ""
    is_echo: bool = False
    blames: int = -1

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Failure":
        """What a rank's function raised."""
        is_ours = isinstance(error, PiperError)
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = str(cause).splitlines() or [""]
        return cls(
            rank=rank,
            when=time.time(),
            text=str(error) if is_ours else "".join(traceback.format_exception(error)).rstrip(),
            where=getattr(error, "where", "")
            or _last_users_line(error.__traceback__, until_library=is_ours),
            error=f"{type(cause).__name__}: {lines[0]}",
            is_echo=getattr(error, "is_echo", False) or is_lost(cause),
            blames=getattr(error, "blames", -1),
        )

    @classmethod
    def ended(
        cls, rank: int, exit_code: int | None, restarts: int = 0, *, has_begun: bool = True
    ) -> "Failure":
        """A process that ended without a word.

        Args:
            rank: Which.
            exit_code: How.
            restarts: How often the job was started before.
            has_begun: Whether it came as far as to call the job's function.
        """
        if exit_code == UNGUARDED and not has_begun:
            text = UNGUARDED_TEXT
        elif exit_code is not None and exit_code < 0:
            text = f"the process was killed by {signal.Signals(-exit_code).name}"
            if -exit_code == signal.SIGKILL:
                unasked = "where nobody did it on purpose, the system ran out of memory"
                text += f" ({asked_for(rank, restarts) or unasked})"
        else:
            text = f"the process ended with exit code {exit_code}"
            if not has_begun:
                text += (
                    " before it called the function: it could not read the script again, or import "
                    "the function; what it wrote says why"
                )
        return cls(rank=rank, when=time.time(), text=text, error=text)

    def to_json(self) -> str:
        """A text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Failure":
        """The failure that a text tells."""
        return cls(**json.loads(text))


def asked_for(rank: int, restarts: int) -> str:
    """That the environment asked for the end of a process; nothing where it did not."""
    asked = kill_of(rank, restarts)
    return f"PIPER_FAULT asks for it: {asked}" if asked is not None else ""


def _last_users_line(trace: TracebackType | None, *, until_library: bool) -> str:
    """The user's innermost line; of a refusal the one that called for what is refused.

    While a model is captured its own forward is among the callers, which is not to blame.
    """
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            found = f"{file}:{trace.tb_lineno}"
        elif found and until_library and file.startswith(_CAPTURING):
            break
        trace = trace.tb_next
    return found


def first_of(failures: Sequence[Failure]) -> Failure:
    """The first failure; of echoes alone, the first that knows which rank is to blame."""
    ordered = sorted(failures, key=lambda f: f.when)
    causes = [f for f in ordered if not f.is_echo]
    knowing = [f for f in ordered if f.blames >= 0]
    return (causes or knowing or ordered)[0]


def message(failures: Sequence[Failure]) -> str:
    """One text for a job that failed."""
    first = first_of(failures)
    others = sorted({f.rank for f in failures} - {first.rank})
    also = {"also failed": ", ".join(f"rank {r}" for r in others) or "no other rank"}
    last = {"where": first.where} if first.where else {}
    if first.is_echo and first.blames >= 0:
        title = f"rank {first.blames} did not go on, and rank {first.rank} waited for it in vain"
        if first.blames == first.rank:
            title = f"rank {first.rank} did not go on: no other rank answers it"
        return format_error(title, {**also, "why": first.text, **last})
    told = {"error": first.error} if first.error and first.error != first.text else {}
    return format_error(f"rank {first.rank} failed", {**also, "why": first.text, **last, **told})


def leave(text: str) -> None:
    """End this process, whatever its threads are at: nobody waits for them any more."""
    sys.stdout.flush()
    sys.stderr.write(text.rstrip() + "\n")
    sys.stderr.flush()
    os._exit(1)
