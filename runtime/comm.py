"""What a rank program asks of communication, and how torch.distributed gives it.

Sends are asynchronous and first-in first-out per channel; receives are posted in the order the peer
sends. A message's tag is its position in the channel, so that the two ends must agree on which
message it is.
"""

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from piper_dynamo import _torch_compat as compat
from piper_dynamo import blocks
from piper_dynamo.errors import PiperTimeoutError, format_error
from piper_dynamo.ir.program import EXCHANGES, Group, Op, copy_groups
from piper_dynamo.runtime import nccl, waiting
from piper_dynamo.runtime.alarm import Alarm, Report
from piper_dynamo.runtime.coalescing import coalesce, together, with_rows
from piper_dynamo.runtime.exchange import pack
from piper_dynamo.runtime.faults import damaged
from piper_dynamo.runtime.store import Store
from piper_dynamo.runtime.waiting import At

POLL_S = 0.002
STATE = "state"  # the stream of what is said about parameters outside of programs
FOREVER_S = 1e6  # what a timedelta and gloo take for no deadline
MOST_TAGS = 2**30  # of a group's collectives in flight, no two have one tag


def sum_of(parts: Sequence[Tensor], given: int) -> Tensor:
    """The sum, in the order given: that of ranks, so that it does not depend on which adds.

    Args:
        parts: At least two, which are written over, but for one.
        given: Which one.
    """
    first, second = parts[:2]
    total = second.add_(first) if given == 0 else first.add_(second)
    for part in parts[2:]:
        total.add_(part)
    return total


def start_reduce_scatter(into: Tensor, value: Tensor, members: Any) -> Any:
    """Start to sum over a group of ranks, of which each gets its block of rows.

    NCCL knows no complex numbers: torch gives it their real view, but not in this collective.
    """
    if value.is_complex():
        into, value = torch.view_as_real(into), torch.view_as_real(value)
    return compat.reduce_scatter_single(into, value, group=members, async_op=True)


def ended(rank: int, job: int) -> tuple[str, str]:
    """Where a rank says that its function has returned, and how."""
    return f"ended/{rank}", f"job {job}"


class Communicator(Protocol):
    """One rank's way to the others; every wait ends within the deadline or raises.

    Attributes:
        rank: This rank.
        world_size: Of how many.
        timeout_s: How long it waits for another.
        job: Of how many process groups of this process it is: one store may serve several.
        steps: How many steps it has started.
        adoptions: How many times it has compared parameters.
        meetings: Steps at the last call of all ranks, and how many of those since that step.
        saving: The save that still runs in the background, if there is one.
        programs: This rank's compiled programs.
        is_checked: Whether messages are announced and compared (`headers.py`).
        is_inside: Whether the ranks are threads of one process.
    """

    rank: int
    world_size: int
    timeout_s: float
    job: int
    steps: int
    adoptions: int
    meetings: tuple[int, int]
    saving: Any
    programs: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]]
    is_checked: bool
    is_inside: bool

    def about(self, task: str) -> None:
        """Where messages are compared: what is sent, received or started next is of this task."""

    def post(self, source: int, message: int, like: Any) -> Any:
        """Start to receive a message of the channel from `source`, shaped like `like`; a handle."""

    def wait(self, handle: Any) -> Tensor:
        """The value of a posted receive."""

    def send(self, value: Tensor, target: int, message: int) -> None:
        """Start to send; `value` must not change before its `drain`."""

    def drain(self, target: int, message: int) -> None:
        """Wait until a sent value has left."""

    def damage_next(self) -> None:
        """Change a bit of the next message, on purpose (`faults.py`)."""

    def start_collective(
        self, op: Op, values: Sequence[Tensor], group: Group, likes: Sequence[Any]
    ) -> Any:
        """Start a collective, with a result shaped like `likes[i]` for value i; a handle.

        An all-reduce gives its values' own memory. Exchanges of rows give as many as come
        (`exchange.py`).
        """

    def wait_all(self, handle: Any) -> list[Tensor]:
        """The results of a started collective."""

    def prepare_groups(self, groups: Sequence[Group]) -> None:
        """Create communicators; every rank calls this with the same groups in the same order."""

    def reduce_now(self, value: Tensor) -> Tensor:
        """The sum of `value` over all ranks; blocks."""

    def publish(self, key: str, text: str) -> None:
        """Leave a short text that any rank can read, in place of an earlier one."""

    def lookup(self, key: str, start: str, timeout_s: float) -> str | None:
        """A published text that begins with `start`; None if there is none within the time."""

    def lookup_any(
        self, wanted: Sequence[tuple[str, str]], timeout_s: float, poll_s: float = POLL_S
    ) -> tuple[int, str] | None:
        """The first published text that is there, of (key, start) pairs, and which one it is.

        Where waiting is looking again and again, that is every `poll_s`.
        """

    def ask(self, mine: At) -> Report:
        """What all ranks are at, for one whose wait has run out."""

    def explain_loss(self, mine: At) -> Report:
        """The same for one whose connection to another broke, if others know why."""

    def mesh(self, groups: Sequence[tuple[int, ...]], device: str) -> Any:
        """A DeviceMesh over the ranks that hold one parameter: rows are its copies."""

    def end_step(self) -> None:
        """Where messages are compared: wait for those that have not surely left."""

    def abandon(self) -> None:
        """Forget what a failed step left in flight."""


class TorchCommunicator:
    """torch.distributed's default process group (gloo on CPU)."""

    is_checked = False
    is_inside = False
    _jobs = itertools.count()

    def __init__(self, timeout_s: float) -> None:
        self.job = next(self._jobs)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout_s = timeout_s
        self.steps = 0
        self.adoptions = 0
        self.meetings = (0, 0)
        self.saving: Any = None
        self.programs: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()
        self.group = dist.group.WORLD
        self.store = Store(compat.default_store())
        self._sending: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        self._damaging: Callable[..., Any] | None = None
        self._damaged: Tensor | None = None
        self.groups: dict[Group, Any] = {}
        self._meshes: dict[Any, Any] = {}
        self._pairwise: Counter[Group] = Counter()  # collectives made of messages, so far
        self._alarm = Alarm(self.store, self.job, self.rank, self.world_size)
        # Also at the end of Python: a thread inside of the store's code would end it by a signal.
        self.close = finalize(self, self._alarm.close)
        waiting.watch(self)

    def about(self, task: str) -> None:
        """See `Communicator`."""

    def _room(self, like: Any) -> Tensor:
        """Memory for a message."""
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def post(self, source: int, message: int, like: Any) -> Any:
        """See `Communicator`."""
        buffer = self._room(like)
        return dist.irecv(buffer, source, tag=message), buffer

    def wait(self, handle: Any) -> Tensor:
        """See `Communicator`."""
        work, value = handle
        self.finish(work)
        return value  # type: ignore[no-any-return]

    def finish(self, work: Any) -> None:
        """Wait for something started, within the deadline."""
        try:
            work.wait(timedelta(seconds=min(self.timeout_s, FOREVER_S)))
        except RuntimeError as error:
            if "imed out" in str(error) or "timeout" in str(error).lower():
                raise PiperTimeoutError(f"nothing came within {self.timeout_s:g} s") from error
            raise

    def send(self, value: Tensor, target: int, message: int) -> None:
        """See `Communicator`."""
        # The Work must be kept: dropping it loses the message.
        work = (self._damaging or dist.isend)(value, target, tag=message)
        self._sending[target, message] = work, value

    def drain(self, target: int, message: int) -> None:
        """See `Communicator`."""
        work, _ = self._sending.pop((target, message))
        self.finish(work)

    def damage_next(self) -> None:
        """See `Communicator`."""

        def once(value: Tensor, target: int, tag: int) -> Any:
            self._damaging = None
            self._damaged = damaged(value)  # must stay until it has left
            return dist.isend(self._damaged, target, tag=tag)

        self._damaging = once

    def start_collective(
        self, op: Op, values: Sequence[Tensor], group: Group, likes: Sequence[Any]
    ) -> Any:
        """See `Communicator`."""
        members = self.groups[group]
        if op in EXCHANGES:
            parcel = pack(op, values, len(group[1]))
            room = parcel.empty_receive_buffer()
            work = dist.all_to_all_single(
                room, parcel.value, parcel.received, parcel.sent, group=members, async_op=True
            )
            return [work], lambda: parcel.unpack(room)
        works: list[Any] = []
        ends: list[tuple[list[int], Callable[[], list[Tensor]]]] = []
        for places in together(op, values, len(group[1])):
            some, wanted = [values[i] for i in places], [likes[i] for i in places]
            ends.append((places, self._start_some(op, some, group, wanted, works)))

        def results() -> list[Tensor]:
            found = {i: one for places, end in ends for i, one in zip(places, end(), strict=True)}
            return [found[i] for i in range(len(values))]

        return works, results

    def _start_some(
        self,
        op: Op,
        values: Sequence[Tensor],
        group: Group,
        likes: Sequence[Any],
        works: list[Any],
    ) -> Callable[[], list[Tensor]]:
        """What gives the results of values that travel together; see `_start_one`."""
        if len(values) == 1:
            end = self._start_one(op, values[0], group, likes[0].shape, works)
            return lambda: [end()]
        one, shape, unpack = coalesce(op, values, likes, len(group[1]))
        end = self._start_one(op, one, group, shape, works)
        return lambda: unpack(end())

    def _start_one(
        self, op: Op, value: Tensor, group: Group, shape: Sequence[int], works: list[Any]
    ) -> Callable[[], Tensor]:
        """What gives the result once all that is added to `works` is done."""
        members, size = self.groups[group], len(group[1])
        if not value.numel():
            result = value.new_zeros(shape)
        elif op is Op.ALL_REDUCE:
            works.append(dist.all_reduce(value, group=members, async_op=True))
            result = value
        elif op is Op.ALL_GATHER:
            whole = blocks.empty((size * value.shape[0], *value.shape[1:]), value)
            if value.device.type == "cpu":
                parts = torch.split(whole, value.shape[0])
                self._exchange(group, [value] * size, parts, works)
                parts[group[1].index(self.rank)].copy_(value)
            else:
                works.append(compat.all_gather_single(whole, value, group=members, async_op=True))
            result = whole.narrow(0, 0, shape[0])
        elif op is Op.REDUCE_SCATTER:
            value = with_rows(value, size * shape[0])
            if value.device.type == "cpu":
                rows, mine = shape[0], group[1].index(self.rank)
                sent = torch.split(value, rows)
                come = [blocks.empty(shape, value) if i != mine else sent[i] for i in range(size)]
                self._exchange(group, sent, come, works)
                return functools.partial(sum_of, come, mine)
            result = value.new_empty(shape)
            works.append(start_reduce_scatter(result, value, members))
        else:
            result = value.new_empty(shape)
            works.append(dist.all_to_all_single(result, value, group=members, async_op=True))
        return lambda: result

    def _exchange(
        self, group: Group, sent: Sequence[Tensor], come: Sequence[Tensor], works: list[Any]
    ) -> None:
        """Start to send part i to member i, and to receive its part, for each other member.

        gloo gathers into memory of its own and copies from there, and scatters what it has reduced
        whole; messages move each value once, straight to where it is wanted.
        """
        members, tag = self.groups[group], self._pairwise[group]
        self._pairwise[group] = (tag + 1) % MOST_TAGS
        others = [place for place, rank in enumerate(group[1]) if rank != self.rank]
        works += [dist.isend(sent[i], group[1][i], group=members, tag=tag) for i in others]
        works += [dist.irecv(come[i], group[1][i], group=members, tag=tag) for i in others]

    def wait_all(self, handle: Any) -> list[Tensor]:
        """See `Communicator`."""
        works, results = handle
        for work in works:
            self.finish(work)
        return results()  # type: ignore[no-any-return]

    def prepare_groups(self, groups: Sequence[Group]) -> None:
        """Create communicators; every rank calls this with the same groups in the same order."""
        new = [group for group in groups if group not in self.groups]
        for group in new:
            self.groups[group] = dist.new_group(list(group[1]))
        device = nccl.bound_device(self.group)
        if device is not None:
            nccl.connect([(group, self.groups[group]) for group in new], self.rank, device)

    def reduce_now(self, value: Tensor) -> Tensor:
        """See `Communicator`."""
        result = value.clone()
        others = tuple(rank for rank in range(self.world_size) if rank != self.rank)
        text = "waits for all ranks to add up a value beside a step"
        with waiting.expecting(text, *others):
            try:
                self.finish(dist.all_reduce(result, async_op=True))
            except PiperTimeoutError as error:
                report = self.ask(At(text=text, peers=others, seconds=self.timeout_s))
                title = f"rank {self.rank} has waited {self.timeout_s:g} s for all ranks to add up"
                hint = "call the same on every rank, in one order"
                made = PiperTimeoutError(format_error(title, {"hint": hint, **report.rows}))
                raise report.marks(made) from error
        return result

    def ask(self, mine: At) -> Report:
        """See `Communicator`."""
        return self._alarm.ask(mine)

    def explain_loss(self, mine: At) -> Report:
        """See `Communicator`."""
        return self._alarm.explain_loss(mine)

    def publish(self, key: str, text: str) -> None:
        """See `Communicator`."""
        self.store.set(key, text)

    def lookup(self, key: str, start: str, timeout_s: float) -> str | None:
        """See `Communicator`."""
        found = self.lookup_any([(key, start)], timeout_s)
        return found[1] if found is not None else None

    def lookup_any(
        self, wanted: Sequence[tuple[str, str]], timeout_s: float, poll_s: float = POLL_S
    ) -> tuple[int, str] | None:
        """See `Communicator`."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index, (key, start) in enumerate(wanted):
                text = self.store.get(key)
                if text is not None and text.startswith(start):
                    return index, text
            if time.monotonic() >= deadline:
                return None
            time.sleep(poll_s)

    def mesh(self, groups: Sequence[tuple[int, ...]], device: str) -> Any:
        """See `Communicator`."""
        key = (tuple(groups), device)
        if key not in self._meshes:
            mine = [g for g in (*copy_groups(key[0]), *groups) if self.rank in g]
            found = [self.groups[STATE, group] for group in mine]
            self._meshes[key] = compat.mesh_of(groups, self.rank, device, found)
        return self._meshes[key]

    def end_step(self) -> None:
        """See `Communicator`."""

    def abandon(self) -> None:
        """See `Communicator`."""
        self._sending.clear()
