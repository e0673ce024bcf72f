"""`PIPER_DEBUG=comm`: whatever ranks send each other is announced first, and compared.

gloo does not tell a message of another shape, dtype or task from the one that is waited for: what
is too short leaves old values behind, what is of another dtype is read as if it were not, two
collectives in another order are mixed, and what is too long ends the process.

Terms: a *header* says what a rank is about to send or to do: task, shape, dtype, and of a message
the checksum of its bytes, of a collective the operation and how many rows go where. Headers go
through the key-value store, so they cannot be mixed up with what they speak of. A receive or a
collective is *started* once its headers have been compared. A rank that waits for anything starts
whatever has been announced meanwhile, so that the order in which ranks wait does not matter:
nothing that ends without headers waits for ever with them.

Signature: as `TorchCommunicator`, slower, with copies of what is sent.
"""

import json
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.errors import PiperError, PiperRuntimeError, PiperTimeoutError, format_error
from piper_dynamo.ir.program import EXCHANGES, Group, Op
from piper_dynamo.runtime.comm import POLL_S, TorchCommunicator
from piper_dynamo.runtime.exchange import pack

VARIABLE, COMM = "PIPER_DEBUG", "comm"
OUTSIDE = "no task"
CHECK = " crc32="


def is_asked_for() -> bool:
    """Whether the environment asks for headers.

    Raises:
        PiperError: It asks for something else.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", COMM):
        raise PiperError(f"PIPER_DEBUG is {value!r}; set it to {COMM!r}, or leave it out")
    return value == COMM


@dataclass(slots=True, kw_only=True)
class _Announced:
    """What starts once the headers of all others have been compared.

    Attributes:
        keys: Where each other rank's header comes.
        compare: Raises if that rank's header does not fit.
        start: Starts it; gives TorchCommunicator's handle.
        after: What must be started before; ranks start collectives of a group in one order.
        check: Of a message: the checksum that its sender told.
        handle: That of the started operation.
    """

    keys: dict[int, str]
    compare: Callable[[int, str], None]
    start: Callable[[], Any]
    after: "_Announced | None" = None
    check: str = ""
    handle: Any = None


class CheckedCommunicator(TorchCommunicator):
    """torch.distributed with a header before every message and collective."""

    is_checked = True

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._task = OUTSIDE
        self._counts: dict[Any, int] = {}
        self._waiting: list[_Announced] = []
        self._last: dict[Group, _Announced] = {}
        self._given: dict[tuple[int, int], Tensor] = {}
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="piper collective")

    def about(self, task: str) -> None:
        """See `Communicator`."""
        self._task = task

    # messages

    def _room(self, like: Any) -> Tensor:
        """Filled with what would be noticed if a receive left it there."""
        room = super()._room(like)
        if room.is_floating_point() or room.is_complex():
            room.fill_(float("nan"))
        return room

    def post(self, source: int, message: int, like: Any) -> Any:
        """See `Communicator`."""
        channel = (source, self.rank)
        key = self._key(channel, self._next(channel), source, self.rank)
        want = _of_value(self._task, like)

        def compare(rank: int, header: str) -> None:
            text, _, announced.check = header.partition(CHECK)
            if text != want:
                raise PiperRuntimeError(
                    format_error(
                        f"rank {self.rank} receives another message than it waits for",
                        {"waits for": want, f"rank {rank} sends": text},
                        hint="this is a fault of Piper, or of a changed program: please report it",
                    )
                )

        start = super().post
        announced = _Announced(
            keys={source: key}, compare=compare, start=lambda: start(source, message, like)
        )
        return self._announce(announced)

    def wait(self, handle: Any) -> Tensor:
        """See `Communicator`."""
        self._until(handle)
        value = super().wait(handle.handle)
        if checksum(value) != handle.check:
            raise PiperRuntimeError(
                format_error(
                    f"rank {self.rank} received other bytes than were sent to it",
                    {"checksum sent": handle.check, "received": checksum(value)},
                    hint="memory, a network card or the system between the two ranks is at fault",
                )
            )
        return value

    def send(self, value: Tensor, target: int, message: int) -> None:
        """See `Communicator`; a copy is sent, so that changes of the value can be found."""
        text = _of_value(self._task, value)
        whole = value.is_contiguous()
        channel = (self.rank, target)
        key = self._key(channel, self._next(channel), self.rank, target)
        self.publish(key, text + CHECK + checksum(value) if whole else f"{text}, strided")
        if not whole:
            raise PiperRuntimeError(
                format_error(
                    f"message {message} to rank {target} is not contiguous", {"message": text}
                )
            )
        self._given[target, message] = value
        super().send(value.clone(), target, message)

    def drain(self, target: int, message: int) -> None:
        """See `Communicator`; the message itself is waited for at the end of the step."""
        value, (_, sent) = self._given.pop((target, message)), self._sending[target, message]
        if not _are_same(value, sent):
            raise PiperRuntimeError(
                f"message {message} to rank {target} was changed before it had left"
            )

    def end_step(self) -> None:
        """See `Communicator`."""
        for work, _ in self._sending.values():
            self.finish(work)
        self._sending.clear()
        self._given.clear()
        self._task = OUTSIDE

    def abandon(self) -> None:
        """See `Communicator`."""
        super().abandon()
        self._task = OUTSIDE
        self._given.clear()
        self._waiting.clear()
        self._last.clear()

    # collectives

    def start_collective(
        self, op: Op, values: Sequence[Tensor], group: Group, likes: Sequence[Any]
    ) -> Any:
        """See `Communicator`."""
        _, members = group
        place, size = members.index(self.rank), len(members)
        told = _of_values(op, values, likes, size)
        mine: dict[str, Any] = {"op": op.value, "task": self._task, "values": told}
        if op in EXCHANGES:
            parcel = pack(op, values, size)
            mine |= {"sent": parcel.sent, "received": parcel.received}

        def compare(rank: int, text: str) -> None:
            theirs = json.loads(text)
            self._compare(mine, theirs, place, members.index(rank), rank)

        number = self._next(group)
        others = [rank for rank in members if rank != self.rank]
        for rank in others:
            self.publish(self._key(group, number, self.rank, rank), json.dumps(mine))
        start = super().start_collective
        announced = _Announced(
            keys={rank: self._key(group, number, rank, self.rank) for rank in others},
            compare=compare,
            start=lambda: start(op, values, group, likes),
            after=self._last.get(group),
        )
        self._last[group] = announced
        return self._announce(announced)

    def wait_all(self, handle: Any) -> list[Tensor]:
        """See `Communicator`."""
        self._until(handle)
        # Others may need this rank to start what comes later before they come to the end of this.
        works, results = handle.handle
        ended = self._waiter.submit(self._finish_all, works)
        self._poll(ended.done, "end of it")
        ended.result()
        handle.after = None
        return results()  # type: ignore[no-any-return]

    def _finish_all(self, works: Sequence[Any]) -> None:
        for work in works:
            self.finish(work)

    def _compare(
        self, mine: Mapping[str, Any], theirs: Mapping[str, Any], place: int, at: int, rank: int
    ) -> None:
        """Two members' headers of one collective; rows that one sends the other must await."""
        same = all(mine[name] == theirs[name] for name in ("op", "task", "values"))
        if same and "sent" in mine:
            same = (
                mine["received"][at] == theirs["sent"][place]
                and theirs["received"][place] == mine["sent"][at]
            )
        if not same:
            raise PiperRuntimeError(
                format_error(
                    f"ranks {self.rank} and {rank} are in different collectives",
                    {f"rank {r}": _told(one) for r, one in ((self.rank, mine), (rank, theirs))},
                    hint="this is a fault of Piper, or of a changed program: please report it",
                )
            )

    # headers

    def _next(self, channel: Any) -> int:
        """The number of this rank's next header of a channel or group; both ends count alike."""
        number: int = self._counts.get(channel, 0)
        self._counts[channel] = number + 1
        return number

    def _key(self, channel: Any, number: int, writer: int, reader: int) -> str:
        """Where the header of that number is, which its one reader takes away."""
        return f"header/{self.job}/{channel}/{number}/{writer}/{reader}"

    def _announce(self, announced: _Announced) -> _Announced:
        self._waiting.append(announced)
        self._start_what_came()
        return announced

    def _start_what_came(self) -> None:
        """Compare the headers that are there, and start what has all of its own."""
        for announced in list(self._waiting):
            for rank, key in list(announced.keys.items()):
                text = self.lookup(key, "", 0.0)
                if text is not None:
                    self.store.forget(key)
                    announced.compare(rank, text)
                    del announced.keys[rank]
            is_next = announced.after is None or announced.after.handle is not None
            if not announced.keys and is_next:
                announced.handle = announced.start()
                self._waiting.remove(announced)

    def _until(self, announced: _Announced) -> None:
        """Wait until it is started."""
        self._poll(
            lambda: announced.handle is not None,
            f"an announcement of ranks {sorted(announced.keys)}",
        )

    def _poll(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not is_done():
            self._start_what_came()
            if is_done():
                return
            if time.monotonic() > deadline:
                raise PiperTimeoutError(f"nothing came within {self.timeout_s:g} s; no {what}")
            time.sleep(POLL_S)


def _of_value(task: str, value: Any) -> str:
    """A message's header."""
    return f"{task} {_form(value)}"


def checksum(value: Tensor) -> str:
    """Of a value's bytes."""
    if not value.numel():
        return "0"
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{zlib.crc32(data.numpy().data):08x}"


def _form(value: Any) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{tuple(value.shape)}"


def _of_values(op: Op, values: Sequence[Any], likes: Sequence[Any], size: int) -> list[str]:
    """What members of a collective must agree on; of rows exchanged all but their number."""
    if op in EXCHANGES:
        rows = pack(op, values, size).value
        return [f"{_form(rows[:0])} a row"]
    return [f"{_form(value)} to {_form(like)}" for value, like in zip(values, likes, strict=True)]


def _told(header: Mapping[str, Any]) -> str:
    rows = f", rows sent {header['sent']}, to come {header['received']}" if "sent" in header else ""
    return f"{header['op']} of {header['task']}: {', '.join(header['values'])}{rows}"


def _are_same(value: Tensor, sent: Tensor) -> bool:
    """Bit by bit, so that values that are no numbers are equal to themselves."""
    if not value.numel():
        return True
    first, second = (t.detach().reshape(-1).view(torch.uint8) for t in (value, sent))
    return torch.equal(first, second)
