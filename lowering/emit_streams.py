"""Emit for streams: beside what a program does, where, after what, and into what.

    compute, recv_from_0 = rt.streams
    e0, e1 = rt.events
    [b0] = rt.buffers
    compute.record_event(e0)                                    # the entry
    recv_from_0.wait_event(e0)
    h_x = rt.post(recv_from_0, b0, 0, 0, float32_8x4)  # F.PP0.MB0
    recv_from_0.record_event(e1)
    x = rt.take(h_x)
    compute.wait_event(e1)
    y, kept = F_PP1([w, x])  # F  PP=1 MB=0
    ...
    compute.wait_event(e3)                                      # the exit

Streams and events are those of torch.cuda, or of `runtime/fake_device.py`.

Signature: stream program -> source text, and the instruction of each of its lines.
"""

from collections.abc import Iterable

from piper_dynamo.ir.program import COLLECTIVES, UNWATCHED, Op, Watch
from piper_dynamo.ir.spec import TensorSpec, show_bytes
from piper_dynamo.ir.streams import OWN, Step, StreamProgram
from piper_dynamo.lowering.emit import Device, Module, emit, spec_name, targets


def emit_on_streams(
    given: StreamProgram, watch: Watch = UNWATCHED, *, looks: bool = False
) -> Module:
    """The module of a stream program.

    Args:
        given: What to emit.
        watch: See `emit`.
        looks: See `emit`.
    """
    return emit(given.program, watch, looks=looks, device=_Writing(given).device())


class _Writing:
    """One program; its names are none of its registers' or chunks'."""

    def __init__(self, given: StreamProgram) -> None:
        self.given = given
        program = given.program
        taken = {reg for i in program.instrs for reg in (*i.reads(), *i.writes(), i.target)}
        taken |= {*program.sources(), *program.results(), "rt", "state", "data", "weights", "step"}
        self.streams = _free(taken, (stream.name for stream in given.streams))
        self.events = _free(taken, (f"e{n}" for n in range(given.num_events)))
        self.buffers = _free(taken, (f"b{n}" for n in range(len(given.buffers))))
        self.taken = taken

    def device(self) -> Device:
        given = self.given
        counts = [
            f"on {', '.join(stream.name for stream in given.streams)}",
            f"{given.num_events} event{'s' * (given.num_events != 1)}",
            f"{len(given.buffers)} buffer{'s' * (len(given.buffers) != 1)}",
            f"of {show_bytes(sum(given.buffers))}" if given.buffers else "",
        ]
        unpacked = [
            f"{targets(names)} = rt.{kind}"
            for kind, names in (
                ("streams", self.streams),
                ("events", self.events),
                ("buffers", self.buffers),
            )
            if names
        ]
        entry, *_, final = given.steps
        return Device(
            title=" · ".join(part for part in counts if part),
            first=[*unpacked, *self._before(entry), *self._after(entry)],
            last=[*self._before(final), *self._after(final)],
            around=lambda index: (
                self._before(given.steps[index + 1]),
                self._after(given.steps[index + 1]),
            ),
            lines=lambda index, specs: self._lines(given.steps[index + 1], specs),
        )

    def _before(self, step: Step) -> list[str]:
        stream = self.streams[step.stream]
        waits = [f"{stream}.wait_event({self.events[event]})" for event in step.waits]
        if step.synchronizes >= 0:
            waits.append(f"{self.events[step.synchronizes]}.synchronize()  # the host reads counts")
        return waits

    def _after(self, step: Step) -> list[str]:
        if step.record < 0:
            return []
        return [f"{self.streams[step.stream]}.record_event({self.events[step.record]})"]

    def _lines(self, step: Step, specs: dict[str, TensorSpec]) -> list[str] | None:
        instr = self.given.program.instrs[step.index]
        stream = self.streams[step.stream]
        ins, outs, task = instr.inputs, instr.outputs, f"  # {instr.task}"
        room = [self.buffers[b] if b != OWN else "None" for b in step.room]
        match instr.op:
            case Op.POST:
                like = spec_name(instr.spec, specs)
                args = f"{stream}, {room[0]}, {instr.peer}, {instr.message}, {like}"
                return [f"{outs[0]} = rt.post({args}){task}"]
            case Op.SEND:
                args = f"{stream}, {ins[0]}, {instr.peer}, {instr.message}"
                return [f"{self._sent(step)} = rt.send({args}){task}"]
            case Op.DRAIN:
                return [f"del {self._sent(step)}"]
            case Op.WAIT if instr.peer >= 0:
                return [f"{outs[0]} = rt.take({ins[0]})"]
            case Op.WAIT:
                return [f"{targets(list(outs))} = rt.take_all({ins[0]})"]
            case _ if instr.op in COLLECTIVES:
                likes = ", ".join(spec_name(spec, specs) for spec in instr.specs)
                args = f"{stream}, [{', '.join(ins)}], {instr.communicator}, [{likes}]"
                rooms = f"[{', '.join(room)}]"
                return [f"{outs[0]} = rt.{instr.op}({args}, {rooms}){task}"]
            case _:
                return None

    def _sent(self, step: Step) -> str:
        """The variable that holds a value on its way."""
        instr = self.given.program.instrs[step.index]
        name = f"sent_{instr.message}_to_{instr.peer}"
        while name in self.taken:
            name += "_"
        return name


def _free(taken: set[str], names: Iterable[str]) -> list[str]:
    """The names, or others where these are taken; taken they are then."""
    found = []
    for wanted in names:
        name = "".join(c if c.isalnum() or c == "_" else "_" for c in wanted)
        while name in taken:
            name += "_"
        taken.add(name)
        found.append(name)
    return found
