"""Runs stream programs: what their emitted modules call, and how their ranks meet.

What comes from other ranks is put on the streams that the program names; a handle is what comes,
with what must stay until it is dropped. How ranks meet is torch.distributed's (`TorchStreams`: NCCL
on CUDA, gloo on the host), or that of the ranks of one process (`LocalStreams`).
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperRuntimeError
from piper_dynamo.ir.program import COLLECTIVES, Group, Op
from piper_dynamo.ir.streams import StreamProgram
from piper_dynamo.runtime import nccl
from piper_dynamo.runtime.coalescing import with_rows
from piper_dynamo.runtime.comm import (
    Communicator,
    TorchCommunicator,
    start_reduce_scatter,
)
from piper_dynamo.runtime.device import Device
from piper_dynamo.runtime.exchange import Counted, Splits, count_rows
from piper_dynamo.runtime.executor import BoundChunk, Runtime, call_chunk
from piper_dynamo.runtime.local import LocalCommunicator, combine


class Meeting(Protocol):
    """How what a rank does with others gets onto its streams.

    All methods return at once on a device; whatever comes is in `into` once the stream gets there.
    """

    def send(self, stream: Any, value: Any, target: int, message: int) -> None:
        """Send a value."""

    def receive(self, stream: Any, into: Any, source: int, message: int) -> None:
        """Receive one."""

    def collective(
        self, stream: Any, op: Op, values: Sequence[Any], group: Group, into: Sequence[Any]
    ) -> None:
        """Run a collective; an all-reduce, into its values."""

    def rows(
        self, stream: Any, value: Any, group: Group, into: Any, sent: list[int], come: list[int]
    ) -> None:
        """Exchange so many rows with each rank of the group."""


class StreamRuntime(Runtime):
    """What emitted stream programs call."""

    def __init__(
        self, comm: Communicator, device: Device, meeting: Meeting, given: StreamProgram
    ) -> None:
        self._device, self._meeting, self._program = device, meeting, given
        super().__init__(comm)
        self._names = [(stream.name, stream.priority) for stream in given.streams]
        self.streams: list[Any] = []
        self.events: list[Any] = []
        self.buffers: list[Any] = []
        for name in ("slice", "accumulate", "cast", "add", "loss", "concat"):
            setattr(self, name, device.lazily(getattr(super(), name)))

    def connect(self, comm: Communicator) -> None:
        """See `Runtime`."""
        for op in COLLECTIVES:
            setattr(self, op.value, functools.partial(self._collective, op))
        self.exchange_counts = self._exchange_counts
        self.exchange = functools.partial(self._exchange, Op.EXCHANGE)
        self.unexchange = functools.partial(self._exchange, Op.UNEXCHANGE)

    def begin_step(self) -> None:
        """See `Runtime`."""
        self.streams = self._device.streams(self._names)
        self.events = self._device.events(self._program.num_events)
        self.buffers = self._device.buffers(self._program.buffers)

    def given(self, values: Sequence[Any]) -> Sequence[Any]:
        """See `Runtime`."""
        return self._device.given(values)

    def taken(self, results: Any) -> Any:
        """See `Runtime`."""
        return self._device.fetch(results)

    def bind(self, chunk: BoundChunk) -> Callable[..., Sequence[Any]]:
        """See `Runtime`."""
        return self._device.bind(call_chunk(chunk), chunk.num_results + chunk.gives_bundle)

    def seed(self, microbatch: int, first_draw: int) -> None:
        """See `Runtime`."""
        self._device.first(functools.partial(super().seed, microbatch, first_draw))

    def look(self, index: int, values: Sequence[Any]) -> None:
        """See `Runtime`."""
        for slot, value in enumerate(values):
            if value is not None:
                self.looks.append((index, slot, self._device.lazily(_is_finite)(value)))

    def mark(self, index: int) -> None:
        """See `Runtime`: where the instruction's stream is now."""
        stream = self.streams[self._program.steps[index + 1].stream]
        self.marks.append((index, self._device.tick(stream)))

    def times(self) -> list[tuple[int, float]]:
        """See `Runtime`; waits for the device."""
        seconds = self._device.seconds([tick for _, tick in self.marks])
        return [(index, at) for (index, _), at in zip(self.marks, seconds, strict=True)]

    # messages and collectives

    def post(self, stream: Any, buffer: Any, source: int, message: int, like: Any) -> Any:
        """Receive a message; the handle is what comes."""
        into, result = self._device.room(buffer, like.shape, like)
        self._meeting.receive(stream, into, source, message)
        return result

    def take(self, handle: Any) -> Any:
        """What a message has brought, or will have."""
        return handle

    def send(self, stream: Any, value: Any, target: int, message: int) -> Any:  # type: ignore[override]
        """Send a value, which is to be held until its drain."""
        self._meeting.send(stream, value, target, message)
        return value

    def take_all(self, handle: Any) -> list[Any]:
        """The results of a collective."""
        return [self._learnt(one) if isinstance(one, _Counts) else one for one in handle[0]]

    def _collective(
        self,
        op: Op,
        stream: Any,
        values: Sequence[Any],
        group: Group,
        likes: Sequence[Any],
        buffers: Sequence[Any],
    ) -> Any:
        if op is Op.ALL_REDUCE:
            self._meeting.collective(stream, op, values, group, values)
            return list(values), values
        into, results = [], []
        for like, buffer in zip(likes, buffers, strict=True):
            shape, rows = tuple(like.shape), None
            if op is Op.ALL_GATHER:  # equal blocks of rows; the last may be filled up
                size, rows = len(group[1]), shape[0]
                shape = (size * -(-rows // size), *shape[1:])
            room, result = self._device.room(buffer, shape, like, rows)
            into.append(room)
            results.append(result)
        self._meeting.collective(stream, op, values, group, into)
        return results, values

    # exchanges of rows

    def _exchange_counts(
        self,
        stream: Any,
        values: Sequence[Any],
        group: Group,
        likes: Sequence[Any],
        buffers: Sequence[Any],
    ) -> Any:
        """Exchange counts, and start to copy to the host what it will ask for."""
        (counts,) = values
        like, size = likes[0], len(group[1])
        (table,) = self._device.put(stream, _table, like, size, count=1)
        share = [like.shape[0]] * size
        self._meeting.rows(stream, counts, group, table, share, share)
        _, arrived = self._device.room(None, like.shape, like)
        (counted,) = self._device.put(stream, _count, counts, table, arrived, count=1)
        return [arrived, _Counts(stream, counted)], values

    def _learnt(self, counts: "_Counts") -> Splits:
        """The host has waited: how many rows go and come."""
        counted: Counted = self._device.known(counts.value)
        sent, received = counted.numbers()
        by_expert = by_rank = None
        if counted.is_sorted:
            orders = functools.partial(counted.orders, sum(received))
            by_expert, by_rank = self._device.put(counts.stream, orders, count=2)
        return Splits(sent=sent, received=received, by_expert=by_expert, by_rank=by_rank)

    def _exchange(
        self,
        op: Op,
        stream: Any,
        values: Sequence[Any],
        group: Group,
        likes: Sequence[Any],
        buffers: Sequence[Any],
    ) -> Any:
        (like,), (buffer,) = likes, buffers
        put, meeting = self._device.put, self._meeting
        if len(values) == 1:  # evenly
            room, result = self._device.room(buffer, like.shape, like)
            share = [like.shape[0] // len(group[1])] * len(group[1])
            meeting.rows(stream, values[0], group, room, share, share)
            return [result], values
        rows, splits = values
        sent, come = splits.sent, splits.received
        if op is Op.UNEXCHANGE:
            sent, come = come, sent
            if splits.by_rank is not None:
                (rows,) = put(stream, _sorted, rows, splits.by_rank, count=1)
        shape = (sum(come), *like.shape[1:])
        room, result = self._device.room(buffer, shape, like)
        if op is Op.EXCHANGE and splits.by_expert is not None:
            (arrived,) = put(stream, _empty, shape, like, rows, count=1)
            meeting.rows(stream, rows, group, arrived, sent, come)
            put(stream, _sort_into, arrived, splits.by_expert, room)
        else:
            meeting.rows(stream, rows, group, room, sent, come)
        return [result], values


class _Counts:
    """Counts on their way to the host."""

    def __init__(self, stream: Any, value: Any) -> None:
        self.stream, self.value = stream, value


def _is_finite(value: Tensor) -> Tensor:
    return torch.isfinite(value).all()


def _table(like: Any, size: int) -> list[Tensor]:
    return [torch.empty(size * like.shape[0], dtype=like.dtype, device=like.device)]


def _count(counts: Tensor, table: Tensor, arrived: Tensor) -> list[Counted]:
    share = arrived.shape[0]
    come = table.view(-1, share)
    torch.sum(come, 0, out=arrived)
    return [count_rows(counts.view(-1, share), come, early=True)]


def _empty(shape: Sequence[int], like: Any, rows: Tensor) -> list[Tensor]:
    return [rows.new_empty(tuple(shape), dtype=like.dtype)]


def _sorted(rows: Tensor, order: Tensor) -> list[Tensor]:
    return [rows.index_select(0, order)]


def _sort_into(rows: Tensor, order: Tensor, into: Tensor) -> None:
    torch.index_select(rows, 0, order, out=into)


# How ranks meet


@dataclass(slots=True)
class _Message:
    """A message between two ranks of one process."""

    value: Tensor | None = None
    sent: Any = None  # marks of the two streams
    taken: Any = None
    is_taken: bool = False


@dataclass(slots=True)
class _Gathering:
    """A collective of the ranks of one process: what they gave, and what each gets."""

    parts: dict[int, Any] = field(default_factory=dict)
    marks: list[Any] = field(default_factory=list)
    results: list[list[Tensor]] | None = None
    done: Any = None
    left: int = 0


class LocalStreams:
    """The ranks of one process: a send waits for its receive, as NCCL's may."""

    def __init__(self, comm: LocalCommunicator, device: Device) -> None:
        self._rank, self._desk, self._device = comm.rank, comm.world.desk, device
        self._count: Counter[Any] = Counter()

    def _next(self, channel: Any, kind: Callable[[], Any]) -> tuple[Any, Any]:
        number = self._count[channel]
        self._count[channel] += 1
        key = (channel, number)
        return key, self._desk.setdefault(key, kind())

    def send(self, stream: Any, value: Any, target: int, message: int) -> None:
        """See `Meeting`."""
        key, found = self._next(("message", self._rank, target), _Message)

        def offer(value: Tensor) -> None:
            found.value, found.sent = value.contiguous(), self._device.mark()

        def end() -> None:
            self._device.after(found.taken)
            del self._desk[key]

        self._device.put(stream, offer, value)
        self._device.put(stream, end, ready=lambda: found.is_taken)

    def receive(self, stream: Any, into: Any, source: int, message: int) -> None:
        """See `Meeting`."""
        _, found = self._next(("message", source, self._rank), _Message)

        def take(into: Tensor) -> None:
            value = found.value
            assert value is not None
            if value.shape != into.shape or value.dtype != into.dtype:
                raise PiperRuntimeError(
                    f"message {message} from rank {source} is {value.dtype}{tuple(value.shape)}, "
                    f"expected {into.dtype}{tuple(into.shape)}"
                )
            self._device.after(found.sent)
            into.copy_(value)
            found.taken, found.is_taken = self._device.mark(), True

        self._device.put(stream, take, into, ready=lambda: found.value is not None)

    def collective(
        self, stream: Any, op: Op, values: Sequence[Any], group: Group, into: Sequence[Any]
    ) -> None:
        """See `Meeting`."""

        def results(parts: Mapping[int, Any]) -> list[list[Tensor]]:
            ordered = [parts[member] for member in group[1]]
            return [
                [
                    combine(op, [given[i] for given, _ in ordered], place, like)
                    for i, like in enumerate(likes)
                ]
                for place, (_, likes) in enumerate(ordered)
            ]

        self._meet(stream, group, results, list(values), list(into))

    def rows(
        self, stream: Any, value: Any, group: Group, into: Any, sent: list[int], come: list[int]
    ) -> None:
        """See `Meeting`."""

        def results(parts: Mapping[int, Any]) -> list[list[Tensor]]:
            split = [torch.split(parts[m][0][0], parts[m][0][1]) for m in group[1]]
            return [[torch.cat([row[place] for row in split])] for place in range(len(split))]

        self._meet(stream, group, results, [value, sent], [into])

    def _meet(
        self,
        stream: Any,
        group: Group,
        results: Callable[[Mapping[int, Any]], list[list[Tensor]]],
        values: list[Any],
        into: list[Any],
    ) -> None:
        key, found = self._next(group, _Gathering)
        place = group[1].index(self._rank)

        def arrive(values: list[Any], into: list[Tensor]) -> None:
            found.parts[self._rank] = values, into
            found.marks.append(self._device.mark())

        def leave(into: list[Tensor]) -> None:
            if found.results is None:  # the first takes what all have given, before any changes
                for mark in found.marks:
                    self._device.after(mark)
                found.results, found.done = results(found.parts), self._device.mark()
            else:
                self._device.after(found.done)
            for room, value in zip(into, found.results[place], strict=True):
                if room.shape != value.shape:
                    raise PiperRuntimeError(f"{tuple(value.shape)} came for {tuple(room.shape)}")
                room.copy_(value)
            found.left += 1
            if found.left == len(group[1]):
                del self._desk[key]

        self._device.put(stream, arrive, values, into)
        self._device.put(stream, leave, into, ready=lambda: len(found.parts) == len(group[1]))


class TorchStreams:
    """torch.distributed: NCCL on CUDA, where waiting for a collective is the stream's."""

    def __init__(self, comm: TorchCommunicator, device: Device, *, waits: bool) -> None:
        """`waits` says that the host waits for what it has started: gloo's way."""
        self._comm, self._device, self._waits = comm, device, waits

    def _end(self, work: Any) -> None:
        if work is None:
            return
        if self._waits:
            self._comm.finish(work)
        else:
            work.wait()  # not with a time: then the host would wait

    def send(self, stream: Any, value: Any, target: int, message: int) -> None:
        """See `Meeting`."""
        pair = self._comm.groups[nccl.PAIR, (self._comm.rank, target)]

        def start(value: Tensor) -> None:
            self._end(dist.isend(value.contiguous(), target, group=pair))

        self._device.put(stream, start, value)

    def receive(self, stream: Any, into: Any, source: int, message: int) -> None:
        """See `Meeting`."""
        pair = self._comm.groups[nccl.PAIR, (source, self._comm.rank)]
        self._device.put(stream, lambda into: self._end(dist.irecv(into, source, group=pair)), into)

    def collective(
        self, stream: Any, op: Op, values: Sequence[Any], group: Group, into: Sequence[Any]
    ) -> None:
        """See `Meeting`; several values travel as one."""
        members, size = self._comm.groups[group], len(group[1])

        def start(values: list[Tensor], into: list[Tensor]) -> None:
            full = [(v, i) for v, i in zip(values, into, strict=True) if v.numel()]
            for value, room in zip(values, into, strict=True):
                if not value.numel():
                    room.zero_()
            if full:
                together = _as_one(op, [v for v, _ in full], [i for _, i in full], size)
                self._end(_started(op, *together[:2], members))
                together[2]()

        self._device.put(stream, start, list(values), list(into))

    def rows(
        self, stream: Any, value: Any, group: Group, into: Any, sent: list[int], come: list[int]
    ) -> None:
        """See `Meeting`."""
        members = self._comm.groups[group]

        def start(value: Tensor, into: Tensor) -> None:
            self._end(
                dist.all_to_all_single(
                    into, value.contiguous(), come, sent, group=members, async_op=True
                )
            )

        self._device.put(stream, start, value, into)


def _started(op: Op, value: Tensor, into: Tensor, members: Any) -> Any:
    match op:
        case Op.ALL_REDUCE:
            return dist.all_reduce(value, group=members, async_op=True)
        case Op.ALL_GATHER:
            return compat.all_gather_single(into, value, group=members, async_op=True)
        case Op.REDUCE_SCATTER:
            return start_reduce_scatter(into, value, members)
        case Op.ALL_TO_ALL:
            return dist.all_to_all_single(into, value, group=members, async_op=True)
    raise AssertionError(f"{op} is started elsewhere")


def _as_one(
    op: Op, values: list[Tensor], into: list[Tensor], size: int
) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """One value to send and one to receive into, and what brings what came to where it belongs."""
    if op is Op.REDUCE_SCATTER:
        values = [with_rows(v, size * i.shape[0]) for v, i in zip(values, into, strict=True)]
    if len(values) == 1:
        return values[0].contiguous(), into[0], lambda: None
    from piper_dynamo.kernels.pack import pack, unpack  # takes a while: Triton

    # Blocks as rows, one for each rank that has or gets one.
    sent_rows = 1 if op in (Op.ALL_REDUCE, Op.ALL_GATHER) else size
    come_rows = 1 if op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER) else size
    flat = pack([value.reshape(sent_rows, -1) for value in values])
    if op is Op.ALL_REDUCE:
        come = flat
    else:
        width = sum(room.numel() for room in into) // come_rows
        come = flat.new_empty((come_rows, width))
    rooms = [room.view(come_rows, -1) for room in into]
    return flat.view(-1), come.view(-1), lambda: unpack(come, rooms)


def meeting_of(comm: Communicator, device: Device, *, waits: bool = False) -> Meeting:
    """How the ranks of a communicator meet on streams.

    Args:
        comm: Theirs.
        device: This rank's.
        waits: See `TorchStreams`.
    """
    if isinstance(comm, LocalCommunicator):
        return LocalStreams(comm, device)
    if comm.is_checked:
        raise PiperRuntimeError(
            "PIPER_DEBUG=comm compares messages of gloo; on streams they are not announced: "
            "leave it out, or run on CPU"
        )
    assert isinstance(comm, TorchCommunicator)
    if not waits:
        nccl.refuse_unbound(comm.group)
    return TorchStreams(comm, device, waits=waits)
