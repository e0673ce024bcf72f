"""What becomes of a job whose ranks end: their values, or the failure that was first."""

import time
from collections.abc import Callable, Mapping

from piper_dynamo.errors import PiperRuntimeError
from piper_dynamo.runtime.failure import first_of, message
from piper_dynamo.runtime.world import Outcome

GRACE_S = 2.5  # how long other ranks may take to end after the first failure


class JobFailedError(PiperRuntimeError):
    """Ranks failed; carries the first failure's own text.

    Attributes:
        is_refusal: Whether another start would end alike.
    """

    def __init__(self, text: str, *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


def collect(ranks: int, arrivals: Callable[[], Mapping[int, Outcome]]) -> dict[int, Outcome]:
    """How each rank ended. After the first failure the others get a moment to say what they know.

    Args:
        ranks: How many there are.
        arrivals: Waits a moment, and gives the outcomes that have come since the last call.

    Raises:
        JobFailedError: A rank failed.
    """
    found: dict[int, Outcome] = {}
    failed_s = 0.0
    while len(found) < ranks:
        found |= arrivals()
        if any(one.failure is not None for one in found.values()):
            failed_s = failed_s or time.monotonic()
            if time.monotonic() - failed_s > GRACE_S:
                break
    if any(one.failure is not None for one in found.values()):
        raise job_failed(found)
    return found


def job_failed(found: Mapping[int, Outcome]) -> JobFailedError:
    """The error for a job of which these ranks have ended, some of them badly."""
    failures = [one.failure for one in found.values() if one.failure is not None]
    first = first_of(failures)
    return JobFailedError(message(failures), is_refusal=found[first.rank].is_refusal)
