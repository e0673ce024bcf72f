"""Streams: a rank program for a device whose queues run beside each other.

    chunks and all that is computed        the caller's stream, `compute`
    messages                               a stream per direction and peer
    collectives                            a stream per logical stream of the strategy

What touches one memory on two streams is ordered by an event, unless other events, the order of a
stream, or the host say so already: of the dependencies of a step only those are kept that no other
implies. What comes from other ranks lies in buffers that are planned here, each given to the next
value once all that touched the last one has run; so memory is the same in every run, whichever
stream is ahead. All other memory is the allocator's of the compute stream. It gives a block away in
the order of the host, so compute waits for the other streams that touched a block before that.

A receive starts once the task before the last one issued has run: not at once, since a kernel that
waits takes room from others, nor after the last one, since it may bring what the next one needs.

Signature: rank program in launch order, its chunks -> stream program.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import REDUCTIONS, ROW_EXCHANGES, Instr, Op, RankProgram
from piper_dynamo.ir.streams import (
    COMPUTE,
    HOST_ONLY,
    OWN,
    Step,
    Stream,
    StreamProgram,
    stream_name,
)
from piper_dynamo.lowering.touches import Touch, Touches, touches_of

FIRST = -1  # CUDA's priority of what others wait for
RUNNING = 2  # a receive waits for the task so many before it

_Clock = list[int]  # by stream: up to which step it is known to have run


def has_streams(program: RankProgram) -> bool:
    """Whether anything of a program runs beside its compute stream."""
    return any(stream_name(instr) != "compute" for instr in program.instrs)


def on_streams(program: RankProgram, chunks: Mapping[str, Chunk]) -> StreamProgram:
    """Put a program on streams.

    Args:
        program: One rank's, in launch order.
        chunks: What it runs.
    """
    streams = _streams(program)
    number = {stream.name: at for at, stream in enumerate(streams)}
    lowering = _Lowering(program, touches_of(program, chunks), number)
    steps, num_events = _pooled(lowering.run())
    return StreamProgram(
        program=program,
        streams=streams,
        steps=steps,
        num_events=num_events,
        buffers=tuple(lowering.buffers.nbytes),
    )


def _streams(program: RankProgram) -> tuple[Stream, ...]:
    """In order of first use; one that only reduces does not go before others."""
    urgent: dict[str, bool] = {"compute": False}
    for instr in program.instrs:
        name = stream_name(instr)
        if name != "compute":
            urgent[name] = urgent.get(name, False) or instr.op not in REDUCTIONS
    return tuple(Stream(name=n, priority=FIRST if is_ else 0) for n, is_ in urgent.items())


def is_planned(instr: Instr) -> bool:
    """Whether results have a size that is known before the step, so that buffers can hold them.

    How many rows come by splits is known when the host has read these; what the host reads of
    counts is no value of the device; and an all-reduce gives its values' own memory.
    """
    if instr.op in ROW_EXCHANGES:
        return len(instr.inputs) == 1
    return instr.op not in (Op.EXCHANGE_COUNTS, Op.ALL_REDUCE)


@dataclass(slots=True)
class _Buffers:
    """Planned memory; of free buffers of a size, the one that has been free for longest goes."""

    nbytes: list[int] = field(default_factory=list)
    touched: list[list[int]] = field(default_factory=list)  # by buffer: steps, by the last value
    free: dict[int, deque[int]] = field(default_factory=dict)

    def take(self, nbytes: int) -> int:
        queue = self.free.setdefault(nbytes, deque())
        if queue:
            return queue.popleft()
        self.nbytes.append(nbytes)
        self.touched.append([0])  # earlier steps of the job used it before the entry
        return len(self.nbytes) - 1

    def give_back(self, buffer: int, touched: list[int]) -> None:
        self.touched[buffer] = touched
        self.free[self.nbytes[buffer]].append(buffer)


class _Lowering:
    """One program; steps are counted from the entry, 0."""

    def __init__(self, program: RankProgram, touches: Touches, number: Mapping[str, int]) -> None:
        self.program, self.touches, self.number = program, touches, number
        self.buffers = _Buffers()
        self.stream: list[int] = []  # by step
        self.known: list[_Clock] = []  # by step: what has run once it has
        self.clock: list[_Clock] = [[-1] * len(number) for _ in number]  # by stream
        self.host: _Clock = [-1] * len(number)
        self.waits: list[list[int]] = []  # by step: the steps it waits for
        self.synchronizes: dict[int, int] = {}  # by step: the step that the host waits for
        self.rooms: dict[int, tuple[int, ...]] = {}
        self.writer: dict[int, int] = {}  # by block: the step that wrote it last
        self.readers: dict[int, list[int]] = {}  # by block: what has read it since
        self.buffer_of: dict[int, int] = {}  # by block
        self.counts: dict[str, int] = {}  # by handle of an exchange of counts: its step
        self.last = 0  # the last step that put something on the compute stream
        self.runs = [0] * RUNNING

    def run(self) -> list[Step]:
        """All steps, with numbers of steps in place of events."""
        self._add(COMPUTE, ())
        for block in self.touches.given:
            self.writer[block] = 0
        for index, instr in enumerate(self.program.instrs):
            self._instr(instr, self.touches.of[index])
        ends = {stream: step for step, stream in enumerate(self.stream)}
        self._add(COMPUTE, ends.values())
        return [
            Step(
                index=step - 1,
                stream=self.stream[step],
                synchronizes=self.synchronizes.get(step, -1),
                waits=tuple(sorted(self.waits[step])),
                room=self.rooms.get(step, ()),
            )
            for step in range(len(self.stream))
        ]

    def _instr(self, instr: Instr, touch: Touch) -> None:
        step, stream = len(self.stream), self.number[stream_name(instr)]
        needs = [self.writer[block] for block in touch.reads]
        for block in touch.writes:
            if block not in touch.born:
                needs += [self.writer[block], *self.readers.get(block, ())]
        if stream != COMPUTE:
            needs += self._room(instr, touch, step)
        if instr.op is Op.POST:
            needs.append(self.runs[-RUNNING])
        for block in touch.dead:
            if block not in self.buffer_of:
                needs += [self.writer.get(block, 0), *self.readers.get(block, ())]
        if instr.op is Op.WAIT and instr.inputs[0] in self.counts:
            self._synchronize(step, self.counts[instr.inputs[0]])
        self._add(stream, [need for need in needs if need != step])
        if instr.op is Op.EXCHANGE_COUNTS:
            self.counts[instr.outputs[0]] = step
        for block in touch.reads:
            self.readers.setdefault(block, []).append(step)
        for block in touch.writes:
            self.writer[block] = step
            self.readers[block] = []
        for block in touch.dead:
            touched = [self.writer.pop(block, 0), *self.readers.pop(block, ())]
            if block in self.buffer_of:
                self.buffers.give_back(self.buffer_of.pop(block), touched)
        if stream == COMPUTE and instr.op not in HOST_ONLY:
            self.last = step
        if instr.op is Op.RUN:
            self.runs.append(step)

    def _room(self, instr: Instr, touch: Touch, step: int) -> list[int]:
        """Memory for what comes; what must have run before it may be written."""
        room, needs = [], []
        for block in touch.born:
            if is_planned(instr) and block not in self.touches.kept:
                buffer = self.buffers.take(self.touches.nbytes[block])
                self.buffer_of[block] = buffer
                needs += self.buffers.touched[buffer]
                room.append(buffer)
            else:
                needs.append(self.last)  # the allocator's: compute may have used it until now
                room.append(OWN)
        self.rooms[step] = tuple(room)
        return needs

    def _synchronize(self, step: int, origin: int) -> None:
        if self.host[self.stream[origin]] < origin:
            self.synchronizes[step] = origin
            self.host = _joined(self.host, self.known[origin])

    def _add(self, stream: int, needs: Iterable[int]) -> None:
        """A step that comes after these; only those are waited for that nothing else implies.

        A step's clock holds earlier steps alone, so taken from the last on, each need is either
        implied by one before it or by none.
        """
        step = len(self.stream)
        clock = _joined(self.clock[stream], self.host)
        waits = []
        for need in sorted(set(needs), reverse=True):
            other = self.stream[need]
            if other != stream and clock[other] < need:
                waits.append(need)
                clock = _joined(clock, self.known[need])
        clock[stream] = step
        self.stream.append(stream)
        self.waits.append(waits)
        self.known.append(clock)
        self.clock[stream] = clock


def _joined(one: _Clock, other: _Clock) -> _Clock:
    return [max(pair) for pair in zip(one, other, strict=True)]


def _pooled(steps: list[Step]) -> tuple[tuple[Step, ...], int]:
    """Events for the steps that are waited for, each used again after its last wait."""
    last: dict[int, int] = {}  # by step: the last that waits for it
    for at, step in enumerate(steps):
        for origin in (*step.waits, *((step.synchronizes,) if step.synchronizes >= 0 else ())):
            last[origin] = at
    ending: dict[int, list[int]] = {}
    for origin, at in last.items():
        ending.setdefault(at, []).append(origin)
    event: dict[int, int] = {}
    free: deque[int] = deque()
    count = 0
    found = []
    for at, step in enumerate(steps):
        waits = tuple(event[origin] for origin in step.waits)
        host = event[step.synchronizes] if step.synchronizes >= 0 else -1
        free.extend(event[origin] for origin in sorted(ending.get(at, ())))
        record = -1
        if at in last:
            if free:
                record = free.popleft()
            else:
                record, count = count, count + 1
            event[at] = record
        found.append(replace(step, waits=waits, synchronizes=host, record=record))
    return tuple(found), count
