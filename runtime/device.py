"""What stream programs ask of a device, and how CUDA, and the host in its place, give it.

Terms: to *put* is to give a stream something to run; on CUDA the host runs the function at once and
its kernels later. A *mark* is a place in a stream that another rank of the process can wait for.
"""

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from piper_dynamo.runtime.comm import Communicator

ALIGNED = 512  # bytes: as CUDA's allocator aligns
Named = Sequence[tuple[str, int]]  # streams: name and priority


def placed(buffer: Tensor, shape: Sequence[int], like: Any) -> Tensor:
    """The first bytes of a planned buffer as a value of this shape, with the dtype of `like`."""
    count = prod(shape) * like.dtype.itemsize
    return buffer[:count].view(like.dtype).view(tuple(shape))


class Device(Protocol):
    """One rank's device.

    Attributes:
        compute: The stream that chunks run on: of the caller.
    """

    compute: Any

    def streams(self, wanted: Named) -> list[Any]:
        """The streams of these names, the caller's own first; the same ones in each step."""

    def events(self, count: int) -> list[Any]:
        """So many events; the same ones in each step."""

    def buffers(self, sizes: Sequence[int]) -> list[Any]:
        """Memory of these sizes in bytes, in one block that all programs of the rank share."""

    def bind(self, fn: Callable[..., Sequence[Any]], count: int) -> Callable[..., Sequence[Any]]:
        """A chunk (see `call_chunk`) of so many results that runs on the compute stream."""

    def lazily(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one result that runs on the compute stream."""

    def put(
        self,
        stream: Any,
        fn: Callable[..., Any],
        *args: Any,
        count: int = 0,
        ready: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Let a stream run `fn(*args)`, once `ready()` where that is given; its `count` results."""

    def room(
        self, buffer: Any, shape: Sequence[int], like: Any, rows: int | None = None
    ) -> tuple[Any, Any]:
        """Memory for what comes, and what of it is the result: its first rows, or all.

        Args:
            buffer: Planned; None takes memory of the compute stream's allocator.
            shape: Of the memory.
            like: Has the dtype and device.
            rows: Of the result; None: all.
        """

    def known(self, value: Any) -> Any:
        """A value that the host has synchronized with."""

    def first(self, fn: Callable[[], None]) -> None:
        """Run something on the host just before the next chunk runs."""

    def given(self, values: Sequence[Any]) -> Sequence[Any]:
        """The caller's tensors as the program takes them."""

    def fetch(self, values: Any) -> Any:
        """What the program returned as the caller takes it."""

    def tick(self, stream: Any) -> Any:
        """The time at which a stream gets here, once it has."""

    def seconds(self, ticks: Sequence[Any]) -> list[float]:
        """The times, in order; waits for them."""

    def mark(self) -> Any:
        """Where the stream is that `put` is at."""

    def after(self, mark: Any) -> None:
        """Let that stream wait for a mark of another rank's."""


class _Label:
    """A stream, or an event, where all runs in the order of the host."""

    def record_event(self, event: Any) -> None:
        """Nothing to record."""

    def wait_event(self, event: Any) -> None:
        """All before has run."""

    def synchronize(self) -> None:
        """All before has run."""


class HostDevice:
    """Everything at once, in the order of the host: what a program means, without streams.

    Waits block, so that a step ends only if ranks start what they do together in one order.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        block: Callable[[Callable[[], bool], str], None] | None = None,
    ) -> None:
        """`block` waits for another rank of the process."""
        self.device = device if device is not None else torch.device("cpu")
        self._block = block
        self._streams: dict[str, Any] = {}
        self._events: list[Any] = []
        self._arena: Tensor | None = None
        self._views: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self.compute: Any = self._caller()

    def _caller(self) -> Any:
        """The stream that the caller is on."""
        return _Label()

    def _new_stream(self, priority: int) -> Any:
        return _Label()

    def _new_event(self) -> Any:
        return _Label()

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def streams(self, wanted: Named) -> list[Any]:
        """See `Device`."""
        self.compute = self._caller()
        for name, priority in wanted[1:]:
            if name not in self._streams:
                self._streams[name] = self._new_stream(priority)
        return [self.compute, *(self._streams[name] for name, _ in wanted[1:])]

    def events(self, count: int) -> list[Any]:
        """See `Device`."""
        while len(self._events) < count:
            self._events.append(self._new_event())
        return self._events[:count]

    def buffers(self, sizes: Sequence[int]) -> list[Any]:
        """See `Device`."""
        padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        if self._arena is None or self._arena.numel() < sum(padded):
            self._views.clear()
            self._arena = None  # before the new one is there
            self._arena = torch.empty(sum(padded), dtype=torch.uint8, device=self.device)
        starts = [sum(padded[:i]) for i in range(len(padded))]
        return [
            self._arena.narrow(0, start, size) for start, size in zip(starts, sizes, strict=True)
        ]

    def bind(self, fn: Callable[..., Sequence[Any]], count: int) -> Callable[..., Sequence[Any]]:
        """See `Device`."""
        return fn

    def lazily(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """See `Device`."""
        return fn

    def put(
        self,
        stream: Any,
        fn: Callable[..., Any],
        *args: Any,
        count: int = 0,
        ready: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """See `Device`."""
        if ready is not None and self._block is not None:
            self._block(ready, "what another rank starts")
        with self._on(stream):
            found = fn(*args)
        return list(found) if count else []

    def room(
        self, buffer: Any, shape: Sequence[int], like: Any, rows: int | None = None
    ) -> tuple[Any, Any]:
        """See `Device`."""
        if buffer is None:
            whole = torch.empty(tuple(shape), dtype=like.dtype, device=self.device)
            return whole, whole if rows is None else whole.narrow(0, 0, rows)
        key = (buffer.data_ptr(), tuple(shape), like.dtype, rows)
        if key not in self._views:
            whole = placed(buffer, shape, like)
            self._views[key] = whole, whole if rows is None else whole.narrow(0, 0, rows)
        return self._views[key]

    def known(self, value: Any) -> Any:
        """See `Device`."""
        return value

    def first(self, fn: Callable[[], None]) -> None:
        """See `Device`."""
        fn()

    def given(self, values: Sequence[Any]) -> Sequence[Any]:
        """See `Device`."""
        return values

    def fetch(self, values: Any) -> Any:
        """See `Device`."""
        return values

    def tick(self, stream: Any) -> Any:
        """See `Device`."""
        return time.perf_counter()

    def seconds(self, ticks: Sequence[Any]) -> list[float]:
        """See `Device`."""
        return list(ticks)

    def mark(self) -> Any:
        """See `Device`."""
        return None

    def after(self, mark: Any) -> None:
        """See `Device`."""


class CudaDevice(HostDevice):
    """torch.cuda: the host issues what the device runs later."""

    def _caller(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def _new_stream(self, priority: int) -> Any:
        return torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]

    def _new_event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def tick(self, stream: Any) -> Any:
        """See `Device`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stream.record_event(event)
        return event

    def seconds(self, ticks: Sequence[Any]) -> list[float]:
        """See `Device`."""
        for event in ticks:
            event.synchronize()
        return [ticks[0].elapsed_time(event) / 1e3 for event in ticks]

    def mark(self) -> Any:
        """See `Device`."""
        event = self._new_event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def after(self, mark: Any) -> None:
        """See `Device`."""
        torch.cuda.current_stream(self.device).wait_event(mark)


def device_of(comm: Communicator, device: torch.device) -> CudaDevice:
    """A rank's CUDA device; ranks that are threads of one process each have their streams."""
    known = _devices.setdefault(comm, {})
    if device not in known:
        known[device] = CudaDevice(device, functools.partial(_block, weakref.proxy(comm)))
    return known[device]


_devices: WeakKeyDictionary[Any, dict[torch.device, CudaDevice]] = WeakKeyDictionary()


def _block(comm: Any, ready: Callable[[], bool], what: str) -> None:
    """Wait for another rank of this process."""
    comm.world.block(comm.rank, ready, what)
