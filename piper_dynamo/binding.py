"""From a rank's program to what runs it: its chunks bound to code, and its emitted module.

Signature: program, chunks, their compiled code, communicator -> executor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from piper_dynamo.generated import named
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import RankProgram, Watch
from piper_dynamo.ir.streams import StreamProgram
from piper_dynamo.lowering.chunks import ChunkFn, compile_chunks
from piper_dynamo.lowering.emit import emit
from piper_dynamo.lowering.emit_streams import emit_on_streams
from piper_dynamo.lowering.sums import passing
from piper_dynamo.runtime.comm import Communicator
from piper_dynamo.runtime.device import Device
from piper_dynamo.runtime.executor import BoundChunk, Code, Executor
from piper_dynamo.runtime.graphs import Recorder
from piper_dynamo.runtime.on_streams import Meeting, StreamRuntime


def bind(
    program: RankProgram, chunks: Mapping[str, Chunk], functions: Mapping[str, ChunkFn]
) -> dict[str, BoundChunk]:
    """The chunks that a program calls.

    Args:
        program: A rank's.
        chunks: By name, at least those that it calls.
        functions: Their code, without sums; what adds to sums is compiled here.
    """
    adds = {i.target: i.adds for i in program.instrs if i.adds}
    adding = compile_chunks(
        {name: chunks[name] for name in adds}, "aten", adds=adds, passing=passing(program)
    )
    return {
        name: BoundChunk(
            fn=functions[name],
            num_results=chunks[name].num_results,
            gives_bundle=len(chunks[name].outputs) > chunks[name].num_results,
            adding=adding.get(name),
        )
        for name, _ in program.chunks
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OnStreams:
    """How a rank's program runs on the streams of a device.

    Attributes:
        program: The program with its streams.
        device: What it runs on.
        meeting: How ranks meet on streams.
    """

    program: StreamProgram
    device: Device
    meeting: Meeting


def executor_of(
    program: RankProgram,
    chunks: Mapping[str, BoundChunk],
    comm: Communicator,
    seconds: Mapping[str, float] | None = None,
    *,
    looks: bool = False,
    streams: OnStreams | None = None,
    record: Recorder | None = None,
) -> Executor:
    """What runs a program.

    Args:
        program: A rank's.
        chunks: What it calls.
        comm: The way to the others.
        seconds: The waits of emulated tasks, by name.
        looks: Whether it looks at what tasks make, for values that are not finite.
        streams: How it runs on streams; None: all in the order of the host.
        record: Records steps, which are then replayed.
    """

    def code(watch: Watch) -> Code:
        if streams is None:
            made = emit(program, watch, seconds=seconds, looks=looks)
        else:
            made = emit_on_streams(streams.program, watch, looks=looks)
        return Code(
            source=made.source,
            file=named(made.source, "step", f"rank{program.rank}"),
            instr_of_line=made.instr_of_line,
            specs=made.specs,
        )

    if streams is None:
        return Executor(program, code, chunks, comm, record=record)
    runtime = StreamRuntime(comm, streams.device, streams.meeting, streams.program)
    return Executor(streams.program.program, code, chunks, comm, runtime, record=record)
