"""When a wait has run out: what every rank of the job is at, told once.

Terms: an *alarm* is raised by the first rank whose wait runs out; alarms of a job are numbered.
Each rank that can still speak *answers* with what it is at, and the rank that raised it writes the
*report*, which the others only refer to. The rank *to blame* is the one at the end of the waits: it
does not answer, or it waits for nobody.

Ranks look for an alarm in a thread of their own, by a connection of its own to the key-value store,
so a rank that computes, sleeps or waits answers all the same.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from piper_dynamo.errors import PiperTimeoutError
from piper_dynamo.runtime import waiting
from piper_dynamo.runtime.store import Store
from piper_dynamo.runtime.waiting import At

LOOK_S = 0.4  # how often a rank looks for an alarm
ANSWER_S = 1.2  # how long answers may take
LOST_S = 0.8  # how long a rank whose connection broke waits for an alarm that tells why
LIMIT_S = 3.0  # of all of it, also where the store cannot be reached
FRESH_S = 10.0  # an alarm that is not older explains the next wait that runs out, too
SHOWN = 16  # ranks in a report

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the ranks are at.

    Attributes:
        rows: What is told, by rank.
        blames: The rank to blame; -1 where that is not known.
        is_cut_off: Whether the store could not be reached.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    blames: int = -1
    is_cut_off: bool = False

    def marks(self, error: PiperTimeoutError) -> PiperTimeoutError:
        """The error, which this report's rows are part of, knowing whom it blames."""
        error.blames, error.is_cut_off = self.blames, self.is_cut_off
        return error


CUT_OFF = Report(
    rows={
        "others": "the key-value store, on the machine of rank 0 or of the launcher, does not "
        "answer: this machine or that one is cut off"
    },
    is_cut_off=True,
)


class Alarm:
    """A rank's part in the alarms of its job."""

    def __init__(self, store: Store, job: int, rank: int, world_size: int) -> None:
        self._store, self._key = store, f"alarm/{job}"
        self._rank, self._world_size = rank, world_size
        self._seen, self._seen_s = 0, 0.0  # the last alarm that this rank answered, and when
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer_all, name="piper alarm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._over.set()
        if threading.current_thread() is not self._thread:  # whichever collects the communicator
            self._thread.join(1.0)

    def ask(self, mine: At) -> Report:
        """What all ranks are at, for one whose wait has run out."""

        def asked() -> Report:
            store = self._store.another()
            last = self._number(store)
            is_fresh = last == self._seen and time.monotonic() - self._seen_s < FRESH_S
            if last and (is_fresh or store.get(f"{self._key}/{last}/report") is None):
                return self._follow(store, last)
            if store.count(f"{self._key}/after/{last}") == 1:
                return self._raise(store, last + 1, mine)
            return self._follow(store, last + 1)

        with waiting.expecting(mine.text, *mine.peers, seconds=mine.seconds):
            return _within(LIMIT_S, asked) or CUT_OFF

    def explain_loss(self, mine: At) -> Report:
        """Why a connection broke: by an alarm of the other end, or else it is not known here."""
        last = self._seen

        def asked() -> Report:
            store = self._store.another()
            found = _until(lambda: max(self._number(store) - last, 0), LOST_S)
            return self._follow(store, last + found) if found else Report()

        with waiting.expecting(mine.text, *mine.peers):
            return _within(LIMIT_S, asked) or CUT_OFF

    def _number(self, store: Store) -> int:
        return int(store.get(self._key) or 0)

    def _raise(self, store: Store, number: int, mine: At) -> Report:
        store.set(self._key, str(number))
        answers: dict[int, At] = {self._rank: mine}

        def come() -> bool:
            for rank in range(self._world_size):
                if rank not in answers:
                    text = store.get(f"{self._key}/{number}/{rank}")
                    if text is not None:
                        answers[rank] = _at(text)
            return len(answers) == self._world_size

        _until(come, ANSWER_S)
        found = [answers.get(rank) for rank in range(self._world_size)]
        blames = to_blame(self._rank, found)
        told = {"blames": blames, "teller": self._rank}
        store.set(f"{self._key}/{number}/report", json.dumps(told))
        return Report(rows=_rows(found, blames), blames=blames)

    def _follow(self, store: Store, number: int) -> Report:
        """What the rank that raised an alarm found out."""
        key = f"{self._key}/{number}/report"
        text = _until(lambda: store.get(key), ANSWER_S + LOOK_S)
        if text is None:
            return Report()
        told = json.loads(text)
        rows = {"others": f"rank {told['teller']} tells what every rank is at"}
        return Report(rows=rows, blames=told["blames"])

    def _answer_all(self) -> None:
        try:
            store = self._store.another()
            self._seen = self._number(store)
            while not self._over.wait(LOOK_S):
                number = self._number(store)
                if number != self._seen:
                    self._seen, self._seen_s = number, time.monotonic()
                    store.set(
                        f"{self._key}/{number}/{self._rank}", json.dumps(asdict(waiting.at()))
                    )
        except RuntimeError as error:
            # The store is gone, so nobody asks any more; whoever waits is told by its deadline.
            waiting.log.debug("rank %d answers no alarms: %s", self._rank, error)


def to_blame(asker: int, found: Sequence[At | None]) -> int:
    """The rank at the end of the waits that begin at `asker`; -1 where they go in a circle.

    Args:
        asker: A rank whose wait has run out.
        found: What every rank is at; None of one that does not answer.
    """
    silent = {rank for rank, one in enumerate(found) if one is None}
    if len(found) > 2 and len(silent) == len(found) - 1:
        return asker  # rather than all the others
    seen, reached = {asker}, [asker]
    for rank in reached:
        one = found[rank]
        new = [peer for peer in (one.peers if one is not None else ()) if peer not in seen]
        seen.update(new)
        reached += new
    idle = [rank for rank in reached if (one := found[rank]) is not None and not one.peers]
    ends = [rank for rank in reached if rank in silent] or idle or sorted(silent)
    return ends[0] if ends else -1


def _rows(found: Sequence[At | None], blames: int) -> dict[str, str]:
    texts = [str(one) if one is not None else "does not answer" for one in found]
    shown = [rank for rank in range(len(texts)) if rank < SHOWN or rank == blames]
    rows = {f"rank {rank}": texts[rank] for rank in shown}
    if len(texts) > len(shown):
        rows["and"] = f"{len(texts) - len(shown)} more"
    if blames >= 0:
        rows["first"] = f"rank {blames} {texts[blames]}"
    else:
        rows["first"] = "they wait for each other"
    return rows


def _at(text: str) -> At:
    told = json.loads(text)
    return At(text=told["text"], peers=tuple(told["peers"]), seconds=told["seconds"])


def _until(look: Callable[[], T | None], seconds: float) -> T | None:
    """What `look` gives as soon as it is something, or in the end."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """What a call gives in this time; None where it takes longer, or fails."""
    found: list[T] = []

    def run() -> None:
        try:
            found.append(call())
        except RuntimeError as error:
            waiting.log.debug("no report: %s", error)

    thread = threading.Thread(target=run, name="piper alarm report", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
