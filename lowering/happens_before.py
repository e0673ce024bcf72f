"""The part of the proof about streams: every access to memory is ordered, whatever the timing.

Stream programs are followed step by step in host order with vector clocks: per stream, what the
host, a stream and an event know to have run. What is checked of each program:

    an event is recorded before it is waited for, and of a stream and event that exist
    a read comes after the write, a write after all reads and writes before it, of the same memory
    a planned buffer holds one value at a time, and is as large as the value
    compute comes after the other streams' touches of what its allocator may give away
    the host reads what has come, and a receive waits for tasks that are about to run
    the exit comes after everything

and of all together: what ranks start together, they start in one order.

Formal: let a -> b if b's stream, or the host, waited for something that comes after a.
    For all steps a, b that touch one memory, one of them writing:  a -> b or b -> a.
    With host order, in which every meeting of ranks is one vertex, acyclic: all waits point
    backwards in it, so no device waits in a circle, even where a send waits for its receive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.cycle import find_cycle
from piper_dynamo.ir.program import Instr, Op, RankProgram, where
from piper_dynamo.ir.streams import COMPUTE, HOST_ONLY, OWN, Step, StreamProgram, stream_name
from piper_dynamo.lowering.launches import meeting_key
from piper_dynamo.lowering.streams import RUNNING, is_planned
from piper_dynamo.lowering.touches import Touch, Touches, touches_of

Memory = tuple[str, int]  # a buffer, or a block of the allocator
At = tuple[int, int]  # a stream, and which of its steps


def verify_streams(programs: Sequence[StreamProgram], chunks: Mapping[str, Chunk]) -> None:
    """Prove stream programs free of races, whatever the timing.

    Args:
        programs: Those of all ranks, or of whole replicas that are like the others.
        chunks: What they run.

    Raises:
        PiperPlanError: Lists every fault.
    """
    faults = [fault for one in programs for fault in _Following(one, chunks).faults()]
    faults += check_launches([one.program for one in programs])
    if faults:
        raise PiperPlanError(join_faults("the plan's streams are unsafe", faults))


def check_launches(programs: Sequence[RankProgram]) -> list[str]:
    """There is one order in which all ranks start their messages and collectives."""
    vertex: dict[object, int] = {}
    at: list[list[str]] = []
    after: list[list[int]] = []
    for program in programs:
        last = -1
        started: dict[tuple[object, ...], int] = {}
        for index, instr in enumerate(program.instrs):
            key = meeting_key(instr, program.rank, started)
            if key is None:
                continue
            if key not in vertex:
                vertex[key] = len(after)
                after.append([])
                at.append([])
            at[vertex[key]].append(where(program, index))
            if last >= 0:
                after[last].append(vertex[key])
            last = vertex[key]
    cycle = find_cycle(after)
    if not cycle:
        return []
    shown = "\n".join("  " + "  with  ".join(at[one]) for one in cycle)
    return [f"ranks start messages and collectives in different orders:\n{shown}"]


@dataclass(slots=True)
class _Touched:
    """Who has touched one memory."""

    writer: At = (COMPUTE, 0)
    readers: dict[int, int] = field(default_factory=dict)  # by stream: the last
    holds: int = -1  # the block that is there

    def all(self) -> list[At]:
        return [self.writer, *self.readers.items()]


class _Following:
    """One program, followed in host order."""

    def __init__(self, stream_program: StreamProgram, chunks: Mapping[str, Chunk]) -> None:
        self.given = stream_program
        self.program = stream_program.program
        self.touches: Touches = touches_of(self.program, chunks)
        count = len(stream_program.streams)
        self.clock = [[-1] * count for _ in range(count)]
        self.host = [-1] * count
        self.events: list[list[int] | None] = [None] * stream_program.num_events
        self.position = [-1] * count
        self.touched: dict[Memory, _Touched] = {}
        self.place: dict[int, Memory] = {}
        self.counts: dict[str, At] = {}
        self.last = 0  # the last step of compute that is not the host's alone
        self.runs = [0] * RUNNING  # positions of tasks
        self.found: list[str] = []

    def faults(self) -> list[str]:
        """What is wrong, in host order."""
        steps, instrs = self.given.steps, self.program.instrs
        if [step.index for step in steps] != list(range(-1, len(instrs) + 1)):
            return [f"rank {self.program.rank}: not one step per instruction, in order"]
        for step in steps:
            instr = self.given.instr(step)
            clock = self._begin(step)
            if instr is None:
                self._boundary(step, clock)
            else:
                self._touch(step, instr, self.touches.of[step.index], clock)
            if step.record >= 0:
                self.events[step.record] = list(clock)
        return self.found

    def _fault(self, step: Step, text: str) -> None:
        rank, count = self.program.rank, len(self.program.instrs)
        ends = {-1: f"rank {rank} entry", count: f"rank {rank} exit"}
        at = ends.get(step.index) or where(self.program, step.index)
        self.found.append(f"{at}: {text}")

    def _begin(self, step: Step) -> list[int]:
        """What is known to have run when a step runs; itself included."""
        if step.synchronizes >= 0:
            self.host = self._after(step, step.synchronizes, self.host)
        stream = step.stream
        clock = [max(pair) for pair in zip(self.clock[stream], self.host, strict=True)]
        for event in step.waits:
            clock = self._after(step, event, clock)
        self.position[stream] += 1
        clock[stream] = self.position[stream]
        self.clock[stream] = clock
        return clock

    def _after(self, step: Step, event: int, clock: list[int]) -> list[int]:
        recorded = self.events[event] if event < len(self.events) else None
        if recorded is None:
            self._fault(step, f"event {event} is waited for before it is recorded")
            return clock
        return [max(pair) for pair in zip(clock, recorded, strict=True)]

    def _boundary(self, step: Step, clock: list[int]) -> None:
        if step.index < 0:
            for block in self.touches.given:
                self.place[block] = ("block", block)
                self.touched[self.place[block]] = _Touched(holds=block)
            self.touched |= {("buffer", b): _Touched() for b in range(len(self.given.buffers))}
            return
        for stream, position in enumerate(self.position):
            if clock[stream] < position:
                name = self.given.streams[stream].name
                self._fault(step, f"the step ends before its stream {name!r} does")

    def _touch(self, step: Step, instr: Instr, touch: Touch, clock: list[int]) -> None:
        if self.given.streams[step.stream].name != stream_name(instr):
            self._fault(step, f"runs on stream {self.given.streams[step.stream].name!r}")
        self._births(step, instr, touch, clock)
        here = (step.stream, self.position[step.stream])
        for block in touch.reads:
            self._ordered(step, "reads", block, [self._of(block).writer], clock)
        for block in touch.writes:
            self._ordered(step, "writes", block, self._of(block).all(), clock)
        if instr.op is Op.WAIT and instr.inputs[0] in self.counts:
            stream, position = self.counts[instr.inputs[0]]
            if self.host[stream] < position:
                self._fault(step, "the host reads counts that may not have come")
        if instr.op is Op.POST and clock[COMPUTE] < self.runs[-RUNNING:][0]:
            self._fault(step, "the receive may hold room while earlier tasks run")
        if instr.op is Op.RUN:
            self.runs.append(here[1])
        if instr.op is Op.EXCHANGE_COUNTS:
            self.counts[instr.outputs[0]] = here
        for block in touch.reads:
            self._of(block).readers[here[0]] = here[1]
        for block in touch.writes:
            found = self._of(block)
            found.writer, found.readers = here, {}
        self._deaths(step, touch, clock)
        if step.stream == COMPUTE and instr.op not in HOST_ONLY:
            self.last = here[1]

    def _of(self, block: int) -> _Touched:
        return self.touched[self.place[block]]

    def _births(self, step: Step, instr: Instr, touch: Touch, clock: list[int]) -> None:
        room = step.room or (OWN,) * len(touch.born)
        for block, buffer in zip(touch.born, room, strict=True):
            if buffer == OWN:
                self.place[block] = ("block", block)
                self.touched[self.place[block]] = _Touched(writer=(step.stream, -1), holds=block)
                if step.stream != COMPUTE and clock[COMPUTE] < self.last:
                    self._fault(step, "takes memory that the compute stream may still use")
                continue
            self.place[block] = ("buffer", buffer)
            found = self.touched[self.place[block]]
            if found.holds >= 0:
                self._fault(step, f"buffer {buffer} still holds another value")
            if self.given.buffers[buffer] != self.touches.nbytes[block]:
                self._fault(step, f"buffer {buffer} is not of the value's size")
            if not is_planned(instr) or block in self.touches.kept:
                self._fault(step, f"buffer {buffer} is given to a value that cannot lie there")
            found.holds = block

    def _deaths(self, step: Step, touch: Touch, clock: list[int]) -> None:
        for block in touch.dead:
            kind, number = self.place.pop(block)
            if kind == "buffer":
                self.touched[kind, number].holds = -1
            else:
                found = self.touched.pop((kind, number))
                self._ordered(step, "gives away", block, found.all(), clock)

    def _ordered(
        self, step: Step, does: str, block: int, earlier: Sequence[At], clock: list[int]
    ) -> None:
        for stream, position in earlier:
            if clock[stream] < position:
                name = self.given.streams[stream].name
                self._fault(
                    step, f"{does} memory that stream {name!r} may still be at work on ({block})"
                )
