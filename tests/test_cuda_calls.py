"""What the CUDA device asks of torch.cuda: the calls, with torch.cuda made up on the host."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import piper_dynamo as piper
from piper_dynamo.runtime import local
from piper_dynamo.runtime import on_streams as running
from piper_dynamo.runtime.device import CudaDevice, device_of
from piper_dynamo.runtime.local import LocalCommunicator, LocalWorld
from tests import experts, mutants, on_streams, replicas
from tests.models import Stack4, rows
from tests.replicas import LINE


class Stream:
    """A stream that notes what is recorded and waited for."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority
        self.log: list[tuple[str, Any]] = []

    def record_event(self, event: Any) -> None:
        event.recorded += 1
        self.log.append(("record", event))

    def wait_event(self, event: Any) -> None:
        assert event.recorded, "waited for before it was recorded"
        self.log.append(("wait", event))

    def synchronize(self) -> None:
        self.log.append(("synchronize", None))


class Event:
    """An event that counts."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.recorded = 0

    def record(self, stream: Stream) -> None:
        stream.record_event(self)

    def synchronize(self) -> None:
        assert self.recorded, "the host waits for what was not recorded"

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Stream]:
    """torch.cuda as far as the device needs it; what it gives says which stream is current."""
    here = threading.local()

    def current(device: Any = None) -> Stream:
        if not hasattr(here, "stack"):
            here.stack = [Stream()]
        return here.stack[-1]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current()
        here.stack.append(stream)
        try:
            yield
        finally:
            here.stack.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return current


@pytest.mark.parametrize("kind", ["zero", "experts"])
def test_programs_run_on_the_calls_of_torch_cuda(kind: str, cuda: Callable[[], Stream]):
    if kind == "zero":
        wanted = replicas.strategy(LINE, 2, "one_f_one_b", zero=3, bucket_mb=0.00005)
        plan = piper.plan(Stack4(), wanted, rows(8))
    else:
        plan = piper.plan(experts.Mixture(2), experts.strategy(LINE, 2, "one_f_one_b"), rows(8))
    programs = on_streams.proved(plan)
    devices: list[CudaDevice] = []

    def made(block: on_streams.Block) -> CudaDevice:
        devices.append(CudaDevice(torch.device("cpu"), block))
        return devices[-1]

    want = mutants.run(plan, plan.programs)
    assert on_streams.are_equal(on_streams.run(plan, programs, 0, made), want)
    assert len(devices) == len(programs)
    for device, program in zip(devices, programs, strict=True):
        streams = device.streams([(s.name, s.priority) for s in program.streams])
        assert [s.priority for s in streams[1:]] == [s.priority for s in program.streams[1:]]
        for k, stream in enumerate(streams):
            waits = [e for step in program.steps if step.stream == k for e in step.waits]
            own = {id(event) for event in device.events(program.num_events)}
            said = [e for what, e in stream.log if what == "wait" and id(e) in own]
            assert len(said) >= (len(waits) if k else 0)
        sizes = [buffer.numel() for buffer in device.buffers(program.buffers)]
        assert sizes == list(program.buffers)


def test_meetings_are_put_on_the_streams_that_are_named(
    cuda: Callable[[], Stream], monkeypatch: pytest.MonkeyPatch
):
    """While a collective runs, its stream is the current one; chunks run on the caller's."""
    seen: list[tuple[str, Any]] = []
    combine = running.combine

    def noted(op: Any, *args: Any) -> Any:
        seen.append((str(op), cuda()))
        return combine(op, *args)

    monkeypatch.setattr(running, "combine", noted)
    plan = piper.plan(Stack4(1), replicas.strategy({0: [0, 1]}, 2, zero=3), rows(8))
    programs = on_streams.proved(plan)
    devices: list[CudaDevice] = []

    def made(block: on_streams.Block) -> CudaDevice:
        devices.append(CudaDevice(torch.device("cpu"), block))
        return devices[-1]

    on_streams.run(plan, programs, 0, made)
    names = [s.name for s in programs[0].streams]
    by_name = [d.streams([(n, 0) for n in names]) for d in devices]
    for op, stream in seen:
        wanted = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}[op]
        assert any(stream is streams[names.index(wanted)] for streams in by_name)
    assert {op for op, _ in seen} >= {"all_gather", "reduce_scatter"}


def test_a_rank_has_one_device_and_memory_grows_once(cuda: Callable[[], Stream]):
    world = LocalWorld(2)
    one, other = LocalCommunicator(world, 0), LocalCommunicator(world, 1)
    cpu = torch.device("cpu")
    assert device_of(one, cpu) is device_of(one, cpu)
    assert device_of(one, cpu) is not device_of(other, cpu)
    device = device_of(one, cpu)
    small = device.buffers([100, 20])
    large = device.buffers([1000, 20])
    assert [b.numel() for b in large] == [1000, 20]
    assert device.buffers([100, 20])[0].data_ptr() == large[0].data_ptr() != small[0].data_ptr()
    starts = [b.data_ptr() for b in device.buffers([1, 513, 3])]
    assert [b - starts[0] for b in starts] == [0, 512, 1536]
    whole, part = device.room(large[0], (4, 5), torch.empty(0), rows=3)
    assert (whole.shape, part.shape) == ((4, 5), (3, 5))
    assert device.room(large[0], (4, 5), torch.empty(0), rows=3)[0] is whole
    assert local.current() is None
