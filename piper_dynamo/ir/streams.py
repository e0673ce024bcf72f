"""A rank program on the streams of a device: which instruction runs where, after what, into what.

Terms: a *stream* runs what it is given in order; streams run beside each other. An *event* is
recorded on a stream after a step, and waited for by another before one; the same event serves again
once nobody will wait for what it recorded. A *buffer* is memory that is planned before the step: it
holds what comes from other ranks, one value after another.

The steps are in host order: entry, every instruction of the program, exit. The host issues them
without waiting, but for the few that it synchronizes with.
"""

from dataclasses import dataclass

from piper_dynamo.ir.program import COLLECTIVES, Instr, Op, RankProgram

COMPUTE = 0  # the stream of the caller, on which chunks run
OWN = -1  # no buffer: memory of the compute stream's allocator
HOST_ONLY = frozenset({Op.WAIT, Op.FREE, Op.DRAIN})  # they put nothing on a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A queue of the device.

    Attributes:
        name: What it is called in emitted code.
        priority: As CUDA counts: lower ones go first.
    """

    name: str
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction on its stream.

    Attributes:
        index: Which of the program's instructions; -1 is the entry, their number the exit.
        stream: Which of the program's streams.
        synchronizes: Event that the host waits for before it goes on; -1: none.
        waits: Events that the stream waits for before.
        record: Event recorded on the stream after; -1: none.
        room: Buffer of each result that comes from other ranks; OWN: the allocator's.
    """

    index: int
    stream: int = COMPUTE
    synchronizes: int = -1
    waits: tuple[int, ...] = ()
    record: int = -1
    room: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamProgram:
    """A rank program with its streams.

    Attributes:
        program: What runs, in the order in which the host issues it.
        streams: The compute stream first.
        steps: One per instruction, between the entry and the exit.
        num_events: How many events are needed at once.
        buffers: Bytes of each planned buffer.
    """

    program: RankProgram
    streams: tuple[Stream, ...]
    steps: tuple[Step, ...]
    num_events: int
    buffers: tuple[int, ...]

    def instr(self, step: Step) -> Instr | None:
        """A step's instruction; None for entry and exit."""
        instrs = self.program.instrs
        return instrs[step.index] if 0 <= step.index < len(instrs) else None


def stream_name(instr: Instr) -> str:
    """The stream of an instruction: one per direction and peer, one per logical stream."""
    if instr.op is Op.SEND:
        return f"send_to_{instr.peer}"
    if instr.op is Op.POST:
        return f"recv_from_{instr.peer}"
    return instr.stream if instr.op in COLLECTIVES else "compute"
