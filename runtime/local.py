"""The in-process communicator: all ranks as threads of one process, one running at a time.

A rank runs until it waits for something that is not there; then the next rank that can go on is
given the turn, in rank order. So runs are deterministic, a debugger sees all ranks, and a deadlock
shows at once: nobody can go on.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperRuntimeError, PiperTimeoutError
from piper_dynamo.ir.program import EXCHANGES, Group, Op
from piper_dynamo.runtime.alarm import Report
from piper_dynamo.runtime.coalescing import with_rows
from piper_dynamo.runtime.comm import ended
from piper_dynamo.runtime.exchange import Parcel, pack
from piper_dynamo.runtime.faults import damaged
from piper_dynamo.runtime.waiting import At


class PeerFailedError(PiperRuntimeError):
    """Another rank of the process failed first."""

    is_echo = True


@dataclass(slots=True)
class _Turn:
    """Whose turn it is, and what the others wait for."""

    ready: Callable[[], bool] | None = None
    what: str = ""
    finished: bool = False
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class LocalWorld:
    """The shared state of an in-process job."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.channels: dict[tuple[int, int, int], deque[Tensor]] = {}
        self.taken: dict[tuple[int, int, int], int] = {}
        self.sent: dict[tuple[int, int, int], int] = {}
        self.meetings: dict[tuple[Any, ...], dict[int, list[Tensor]]] = {}
        self.left: dict[tuple[Any, ...], int] = {}
        self.desk: dict[Any, Any] = {}  # what ranks on streams leave for one another
        self.store: dict[str, str] = {}
        self.failure: tuple[int, BaseException] | None = None
        self._turns = [_Turn() for _ in range(world_size)]

    def run(self, fn: Callable[[], Any]) -> list[Any]:
        """Call `fn` as every rank; the results in rank order.

        Raises:
            BaseException: What the first failing rank raised.
        """
        results: list[Any] = [None] * self.world_size
        random = torch.get_rng_state()

        def body(rank: int) -> None:
            self._turns[rank].go.acquire()
            compat.raise_recompile_limit()  # a setting of the thread
            torch.set_rng_state(random)
            set_current(LocalCommunicator(self, rank))
            try:
                if self.failure is None:
                    results[rank] = fn()
            except BaseException as error:  # handed to the caller below
                if self.failure is None:
                    self.failure = (rank, error)
            finally:
                set_current(None)
                self.store.update([ended(rank, 0)])
                self._turns[rank].finished = True
                self._pass_on(rank)

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        self._turns[0].go.release()
        for thread in threads:
            thread.join()
        torch.set_rng_state(random)
        if self.failure is not None:
            raise self.failure[1]
        return results

    def block(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Give the turn away until `ready()`; raises where it can never be."""
        if ready():
            return
        turn = self._turns[rank]
        turn.ready, turn.what = ready, what
        random = torch.get_rng_state()  # a process has one generator; a rank must have its own
        self._pass_on(rank)
        turn.go.acquire()
        turn.ready = None
        torch.set_rng_state(random)
        if self.failure is not None:
            raise PeerFailedError(f"rank {self.failure[0]} failed: {self.failure[1]}")
        if not ready():
            raise PiperTimeoutError(f"deadlock: {self._waiting(rank)}")

    def _pass_on(self, rank: int) -> None:
        order = [(rank + 1 + i) % self.world_size for i in range(self.world_size)]
        alive = [r for r in order if not self._turns[r].finished]
        if not alive:
            self._turns[rank].go.release()
            return
        for other in alive:
            ready = self._turns[other].ready
            if ready is None or self.failure is not None or ready():
                self._turns[other].go.release()
                return
        self._turns[alive[0]].go.release()  # nobody can go on: that rank finds out, and says so

    def _waiting(self, rank: int) -> str:
        lines = []
        for other, turn in enumerate(self._turns):
            if turn.finished:
                lines.append(f"rank {other} has ended")
            elif other == rank or turn.ready is not None:
                lines.append(f"rank {other} waits for {turn.what}")
        return "; ".join(lines)


_local = threading.local()


def set_current(comm: "LocalCommunicator | None") -> None:
    """Make this thread a rank of an in-process job."""
    _local.comm = comm


def current() -> "LocalCommunicator | None":
    """The communicator of the rank that this thread is, if it is one."""
    comm: LocalCommunicator | None = getattr(_local, "comm", None)
    return comm


class LocalCommunicator:
    """One rank of an in-process job; checks shape and dtype of every message."""

    is_checked = False
    is_inside = True

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world.world_size
        self.timeout_s = float("inf")
        self.job = 0
        self.steps = 0
        self.adoptions = 0
        self.meetings = (0, 0)
        self.saving: Any = None
        self.programs: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()
        self._meeting: dict[Group, int] = {}
        self._damages = False

    def about(self, task: str) -> None:
        """See `Communicator`."""

    def post(self, source: int, message: int, like: Any) -> Any:
        """See `Communicator`."""
        return ("message", source, message, like)

    def wait(self, handle: Any) -> Tensor:
        """See `Communicator`."""
        _, source, message, like = handle
        key = (source, self.rank, message)
        queue = self.world.channels.setdefault(key, deque())
        self.world.block(self.rank, lambda: bool(queue), f"message {message} from rank {source}")
        value = queue.popleft()
        self.world.taken[key] = self.world.taken.get(key, 0) + 1
        if tuple(value.shape) != tuple(like.shape) or value.dtype != like.dtype:
            raise PiperRuntimeError(
                f"message {message} from rank {source} to rank {self.rank} "
                f"is {value.dtype}{tuple(value.shape)}, "
                f"expected {like.dtype}{tuple(like.shape)}"
            )
        return value

    def send(self, value: Tensor, target: int, message: int) -> None:
        """See `Communicator`."""
        if not value.is_contiguous():
            raise PiperRuntimeError(f"message {message} to rank {target} is not contiguous")
        key = (self.rank, target, message)
        sent = damaged(value) if self._damages else _left([value])[0]
        self._damages = False
        self.world.channels.setdefault(key, deque()).append(sent)
        self.world.sent[key] = self.world.sent.get(key, 0) + 1

    def damage_next(self) -> None:
        """See `Communicator`."""
        self._damages = True

    def drain(self, target: int, message: int) -> None:
        """See `Communicator`."""
        key, world = (self.rank, target, message), self.world
        world.block(
            self.rank,
            lambda: world.taken.get(key, 0) >= world.sent[key],
            f"rank {target} to take message {message}",
        )

    def start_collective(
        self, op: Op, values: Sequence[Tensor], group: Group, likes: Sequence[Any]
    ) -> Any:
        """See `Communicator`."""
        number = self._meeting.get(group, 0)
        self._meeting[group] = number + 1
        key = (group, number)
        mine: list[Any] = list(values)
        sent: list[Tensor] = mine
        if op in EXCHANGES:
            parcel = pack(op, values, len(group[1]))
            mine, sent = [parcel], list(torch.split(parcel.value, parcel.sent))
        self.world.meetings.setdefault(key, {})[self.rank] = _left(sent)
        return key, op, mine, list(likes)

    def wait_all(self, handle: Any) -> list[Tensor]:
        """See `Communicator`."""
        key, op, mine, likes = handle
        (stream, members), _ = key
        parts = self.world.meetings[key]
        self.world.block(
            self.rank,
            lambda: len(parts) == len(members),
            f"{op} of ranks {members} on stream {stream!r} "
            f"(missing: {[m for m in members if m not in parts]})",
        )
        place = members.index(self.rank)
        if op in EXCHANGES:
            results: list[Any] = mine[0].unpack(_arrived(parts, members, place, mine[0]))
        else:
            results = [
                combine(op, [parts[m][i] for m in members], place, like)
                for i, like in enumerate(likes)
            ]
        self.world.left[key] = self.world.left.get(key, 0) + 1
        if self.world.left[key] == len(members):
            del self.world.meetings[key], self.world.left[key]
        if op is not Op.ALL_REDUCE:
            return results
        return [value.copy_(result) for value, result in zip(mine, results, strict=True)]

    def prepare_groups(self, groups: Sequence[Group]) -> None:
        """Nothing to create."""

    def reduce_now(self, value: Tensor) -> Tensor:
        """See `Communicator`."""
        everyone = ("now", tuple(range(self.world_size)))
        handle = self.start_collective(Op.ALL_REDUCE, [value.clone()], everyone, [value])
        return self.wait_all(handle)[0]

    def publish(self, key: str, text: str) -> None:
        """See `Communicator`."""
        self.world.store[key] = text

    def lookup(self, key: str, start: str, timeout_s: float) -> str | None:
        """See `Communicator`."""
        found = self.lookup_any([(key, start)], timeout_s)
        return found[1] if found is not None else None

    def lookup_any(
        self, wanted: Sequence[tuple[str, str]], timeout_s: float, poll_s: float = 0.0
    ) -> tuple[int, str] | None:
        """See `Communicator`; waiting is free: the others run until a text is there."""
        store = self.world.store

        def there() -> list[int]:
            found = [key in store and store[key].startswith(start) for key, start in wanted]
            return [index for index, is_there in enumerate(found) if is_there]

        if timeout_s > 0:
            names = " or ".join(repr(key) for key, _ in wanted)
            try:
                self.world.block(self.rank, lambda: bool(there()), f"the text {names}")
            except PiperTimeoutError:
                return None
        found = there()
        return (found[0], store[wanted[found[0]][0]]) if found else None

    def ask(self, mine: At) -> Report:
        """See `Communicator`; what all wait for is in the error already."""
        return Report()

    def explain_loss(self, mine: At) -> Report:
        """See `Communicator`; there are no connections."""
        return Report()

    def mesh(self, groups: Sequence[tuple[int, ...]], device: str) -> Any:
        """See `Communicator`."""
        return compat.mesh_of(groups, self.rank, device, [])

    def end_step(self) -> None:
        """See `Communicator`."""

    def abandon(self) -> None:
        """See `Communicator`."""


def _left(values: Sequence[Tensor]) -> list[Tensor]:
    """Copies that other ranks find made, whichever streams they are on."""
    found = [value.detach().clone() for value in values]
    if any(value.is_cuda for value in found):
        torch.cuda.current_stream().synchronize()
    return found


def _arrived(
    parts: dict[int, list[Tensor]], members: Sequence[int], place: int, parcel: Parcel
) -> Tensor:
    """What the members have sent to the one at this place; as many rows as it was told."""
    come = [parts[member][place] for member in members]
    told = parcel.received
    if [part.shape[0] for part in come] != told:
        raise PiperRuntimeError(f"{[len(part) for part in come]} rows came, {told} were told")
    return torch.cat(come)


def combine(op: Op, parts: list[Tensor], place: int, like: Any) -> Tensor:
    """What a collective gives the member at this place, of the size of `like`."""
    if op is Op.ALL_GATHER:
        result = torch.cat(parts).narrow(0, 0, like.shape[0])
    elif op is Op.ALL_TO_ALL:
        result = torch.cat([part.chunk(len(parts))[place] for part in parts])
    else:
        result = parts[0].clone()
        for part in parts[1:]:
            result += part
        if op is Op.REDUCE_SCATTER:
            rows = like.shape[0]
            result = with_rows(result, rows * len(parts)).narrow(0, place * rows, rows).clone()
    if tuple(result.shape) != tuple(like.shape):
        raise PiperRuntimeError(f"{op}: got {tuple(result.shape)}, expected {tuple(like.shape)}")
    return result
