"""A device that runs stream programs on the CPU, as unlike each other as a device may.

Every stream is a queue; which of the streams whose heads can go on does so, is drawn, and so is how
far the host is ahead of them. What the host holds of a value is a *cell*: the value may not be
there yet. Mistakes of the program show as they would on CUDA, but each time:

    a value is read before it is made       an error
    memory is given away too early          NaN: when the host drops the last cell of a block, the
                                            compute stream, when it gets there, spoils the block
    memory is taken too early               an error: another stream writes what compute may use
    a planned buffer is used again early    the wrong value

So a program that is right gives the same numbers, bit for bit, whatever is drawn.
"""

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperRuntimeError
from piper_dynamo.runtime.device import Named, placed

_SPOILED = 255  # of every byte: NaN as a float, -1 as a whole number
_MISSING = object()


class FakeMachine:
    """The streams of all ranks of a process, and the draw of who goes on."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.ahead = self.random.choice((0.0, 0.5, 0.9, 1.0))  # how rarely streams go on at once
        self.streams: list[FakeStream] = []
        self.alive: Counter[int] = Counter()  # by storage: cells that have it, as streams see it
        self.failure: BaseException | None = None

    def step(self) -> bool:
        """Let one stream run one thing; whether any could."""
        able = [s for s in self.streams if s.queue and (s.queue[0][0] is None or s.queue[0][0]())]
        if not able or self.failure is not None:
            return False
        (stream,) = self.random.choices(able, [s.speed for s in able])
        _, run = stream.queue.popleft()
        try:
            with torch.no_grad(), compat.no_autocast():
                run()
        except BaseException as error:  # raised where a host waits, whichever rank's this is
            self.failure = error
        return True

    def run_until(self, done: Callable[[], bool]) -> bool:
        """Run until something is done or has failed; False where nothing can go on."""
        while not done() and self.failure is None:
            if not self.step():
                return False
        return True

    def take(self, tensors: Sequence[Tensor]) -> None:
        """One more cell has these."""
        for storage in _storages(tensors):
            self.alive[storage.data_ptr()] += 1

    def drop(self, tensors: Sequence[Tensor], *, spoil: bool = True) -> None:
        """One cell less has these: what no other has, is memory for others."""
        for storage in _storages(tensors):
            place = storage.data_ptr()
            self.alive[place] -= 1
            if not self.alive[place]:
                del self.alive[place]
                if spoil:
                    spoiled(storage)


class FakeStream:
    """A queue; the methods are those of torch.cuda.Stream."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.queue: deque[tuple[Callable[[], bool] | None, Callable[[], Any]]] = deque()
        self.speed = 10 ** machine.random.uniform(-2, 2)
        self.given = self.done = 0  # things that touch memory
        machine.streams.append(self)

    def push_work(self, run: Callable[[], Any], ready: Callable[[], bool] | None = None) -> None:
        """The same of what touches memory."""
        self.given += 1

        def counted() -> None:
            run()
            self.done += 1

        self.push(counted, ready)

    def push(
        self, run: Callable[[], Any], ready: Callable[[], bool] | None = None, *, go: bool = True
    ) -> None:
        """Give it something to run; some streams may go on."""
        self.queue.append((ready, run))
        while go and self.machine.random.random() > self.machine.ahead:
            if not self.machine.step():
                break

    def record_event(self, event: "FakeEvent") -> None:
        """The event is over once the stream gets here."""
        recorded = event.recorded = [False]

        def over() -> None:
            recorded[0] = True

        self.push(over)

    def wait_event(self, event: "FakeEvent") -> None:
        """Go on once what the event recorded last is over."""
        recorded = event.recorded
        self.push(lambda: None, lambda: recorded[0])


class FakeEvent:
    """What torch.cuda.Event is: it stands for what was recorded last."""

    def __init__(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        self.recorded = [True]
        self._wait = wait

    def synchronize(self) -> None:
        """The host waits."""
        recorded = self.recorded
        self._wait(lambda: recorded[0])


class _Memory:
    """A value as streams see it."""

    __slots__ = ("since", "value")

    def __init__(self, value: Any = _MISSING, since: int = 0) -> None:
        self.value = value
        self.since = since  # how much of compute's work may be at work on it

    def read(self) -> Any:
        if self.value is _MISSING:
            raise PiperRuntimeError("a stream reads a value that is not there yet")
        return self.value


class Cell:
    """A value as the host holds it."""

    __slots__ = ("_dropped", "memory")

    def __init__(self, memory: _Memory, dropped: Callable[[_Memory], None] | None) -> None:
        self.memory = memory
        self._dropped = dropped

    def __del__(self) -> None:
        if self._dropped is not None:
            self._dropped(self.memory)


class FakeDevice:
    """One rank's streams."""

    def __init__(
        self, machine: FakeMachine, block: Callable[[Callable[[], bool], str], None] | None = None
    ) -> None:
        """`block` lets other ranks of the process go on."""
        self.machine = machine
        self.compute = FakeStream(machine)
        self._block = block
        self._streams: dict[str, FakeStream] = {}
        self._events: list[FakeEvent] = []
        self._before: list[Callable[[], None]] = []
        self._given: list[list[Tensor]] = []

    def _wait(self, done: Callable[[], bool]) -> None:
        if self._block is not None:
            self._block(lambda: self.machine.run_until(done), "its device")
        elif not self.machine.run_until(done):
            raise PiperRuntimeError("the device's streams wait for each other")
        if self.machine.failure is not None:
            raise self.machine.failure

    def streams(self, wanted: Named) -> list[Any]:
        """See `Device`."""
        for name, _ in wanted[1:]:
            if name not in self._streams:
                self._streams[name] = FakeStream(self.machine)
        return [self.compute, *(self._streams[name] for name, _ in wanted[1:])]

    def events(self, count: int) -> list[Any]:
        """See `Device`."""
        while len(self._events) < count:
            self._events.append(FakeEvent(self._wait))
        return self._events[:count]

    def buffers(self, sizes: Sequence[int]) -> list[Any]:
        """See `Device`."""
        found = [torch.full((size,), _SPOILED, dtype=torch.uint8) for size in sizes]
        self._keep(found)
        return found

    def _keep(self, tensors: list[Tensor]) -> None:
        """Whose memory nobody gives away in this step."""
        self.machine.take(tensors)
        self._given.append(tensors)

    def bind(self, fn: Callable[..., Sequence[Any]], count: int) -> Callable[..., Sequence[Any]]:
        """See `Device`."""

        def call(
            primals: list[Any],
            bundle: Cell | None = None,
            tangents: Sequence[Any] = (),
            sums: Sequence[Any] = (),
        ) -> Sequence[Any]:
            before, self._before = self._before, []
            given = [_inner(list(one)) for one in (primals, tangents, sums)]
            taken = bundle.memory if bundle is not None else None
            found = [_Memory() for _ in range(count)]

            def run() -> None:
                for one in before:
                    one()
                values, tangent_values, sum_values = map(_outer, given)
                emptied = taken.read() if taken is not None else None
                held = list(_tensors(emptied))
                outputs = fn(values, emptied, tangent_values, sum_values)
                self._fill(found, outputs)
                self.machine.drop(held)  # the chunk has emptied its bundle

            self.compute.push_work(run)
            return [Cell(memory, self._dropped) for memory in found]

        return call

    def lazily(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """See `Device`."""

        def call(*args: Any) -> Any:
            return self.put(self.compute, lambda *a: [fn(*a)], *args, count=1)[0]

        return call

    def put(
        self,
        stream: Any,
        fn: Callable[..., Any],
        *args: Any,
        count: int = 0,
        ready: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """See `Device`."""
        given = _inner(list(args))
        found = [_Memory() for _ in range(count)]

        def run() -> None:
            if any(memory.since > self.compute.done for memory in _memories(given)):
                raise PiperRuntimeError("a stream writes memory that compute is still at work on")
            outputs = fn(*_outer(given))
            if count:
                self._fill(found, outputs)

        stream.push_work(run, ready)
        dropped = functools.partial(self._dropped, stream=stream)
        return [Cell(memory, dropped) for memory in found]

    def _fill(self, found: Sequence[_Memory], outputs: Sequence[Any]) -> None:
        for memory, value in zip(found, outputs, strict=True):
            memory.value = value
            self.machine.take(list(_tensors(value)))

    def _dropped(self, memory: _Memory, stream: FakeStream | None = None) -> None:
        """The host holds a value no more: its stream gives its memory away when it gets here."""

        def free() -> None:
            self.machine.drop(list(_tensors(memory.read())))

        (stream or self.compute).push(free, go=False)

    def room(
        self, buffer: Any, shape: Sequence[int], like: Any, rows: int | None = None
    ) -> tuple[Any, Any]:
        """See `Device`."""
        if buffer is not None:
            whole, dropped = placed(buffer, shape, like), None
        else:
            whole = torch.empty(tuple(shape), dtype=like.dtype)
            spoiled(whole.untyped_storage())
            dropped = self._dropped
        part = whole if rows is None else whole.narrow(0, 0, rows)
        for value in (whole, part) if dropped is not None else ():
            self.machine.take([value])
        since = self.compute.given if buffer is None else 0
        return Cell(_Memory(whole, since), dropped), Cell(_Memory(part), dropped)

    def known(self, value: Any) -> Any:
        """See `Device`."""
        return value.memory.read() if isinstance(value, Cell) else value

    def first(self, fn: Callable[[], None]) -> None:
        """See `Device`."""
        self._before.append(fn)

    def given(self, values: Sequence[Any]) -> Sequence[Any]:
        """See `Device`."""
        self._keep(list(values))
        return [Cell(_Memory(value), None) for value in values]

    def fetch(self, values: Any) -> Any:
        """See `Device`."""
        end = FakeEvent(self._wait)
        self.compute.record_event(end)
        end.synchronize()
        for tensors in self._given:
            self.machine.drop(tensors, spoil=False)
        self._given = []
        return _fetched(values, self.machine)

    def tick(self, stream: Any) -> Any:
        """See `Device`."""
        found: list[float] = []
        stream.push(lambda: found.append(time.perf_counter()))
        return found

    def seconds(self, ticks: Sequence[Any]) -> list[float]:
        """See `Device`."""
        self._wait(lambda: all(ticks))
        return [at for (at,) in ticks]

    def mark(self) -> Any:
        """See `Device`."""
        return None

    def after(self, mark: Any) -> None:
        """See `Device`."""


def spoiled(storage: Any) -> None:
    """Make every value of some memory a wrong one."""
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_SPOILED)


def _storages(tensors: Sequence[Tensor]) -> list[Any]:
    """Each memory once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage
    return list(found.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))


def _memories(value: Any) -> Iterator[_Memory]:
    if isinstance(value, _Memory):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _memories(one)


def _inner(value: Any) -> Any:
    """Cells as streams see them: the host may drop the cells."""
    if isinstance(value, Cell):
        return value.memory
    if isinstance(value, list | tuple):
        return [_inner(one) for one in value]
    return value


def _outer(value: Any) -> Any:
    if isinstance(value, _Memory):
        return value.read()
    return [_outer(one) for one in value] if isinstance(value, list) else value


def _fetched(value: Any, machine: FakeMachine) -> Any:
    if isinstance(value, Cell):
        found = value.memory.read()
        if value._dropped is not None:
            value._dropped = None
            machine.drop(list(_tensors(found)), spoil=False)
        return found
    if isinstance(value, tuple):
        return tuple(_fetched(one, machine) for one in value)
    return value
