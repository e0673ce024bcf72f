"""Emit: a rank program as a Python module that a person can read, and that is what runs.

Signature: rank program -> source text, and the instruction of each of its lines.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from piper_dynamo.ir.program import COLLECTIVES, UNWATCHED, Instr, Op, RankProgram, Watch
from piper_dynamo.ir.spec import TensorSpec, show_bytes
from piper_dynamo.ir.task import TaskName


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """An emitted program.

    Attributes:
        source: The text; defines `step(rt, state, data, weights)`.
        instr_of_line: For a 1-based line number, the index of its instruction.
        specs: The names of message specs that the text uses.
    """

    source: str
    instr_of_line: dict[int, int]
    specs: dict[str, TensorSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """How a program is written for a device other than the host (`emit_streams.py`).

    Attributes:
        title: A comment below the program's own.
        first: Lines before the first instruction.
        last: Lines after the last one.
        around: Of an instruction, the lines before it and after it.
        lines: How an instruction is written; None where it is written as for the host.
    """

    title: str
    first: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    around: Callable[[int], tuple[list[str], list[str]]]
    lines: Callable[[int, dict[str, TensorSpec]], list[str] | None]


def emit(  # noqa: PLR0912
    program: RankProgram,
    watch: Watch = UNWATCHED,
    *,
    seconds: Mapping[str, float] | None = None,
    looks: bool = False,
    device: Device | None = None,
) -> Module:
    """The module of a program.

    Args:
        program: What to emit.
        watch: What is looked at: where it is timed, `rt.mark(i)` is called after instruction i.
        seconds: How long each task's chunk lasts at least, on emulated devices.
        looks: Call `rt.look(i, [values])` after each task, which notes whether they are finite.
        device: What it runs on; None: the host, or one queue.
    """
    specs: dict[str, TensorSpec] = {}
    lines = _head(program)
    if device is not None:
        lines.insert(1, f"# {device.title}")
    lines.append("def step(rt, state, data, weights):")
    for names, source in (
        ([r for r, _ in program.state], "state"),
        ([r for r, _ in program.data], "data"),
        (list(program.weights), "weights"),
    ):
        if names:
            lines.append(f"    {targets(names)} = {source}")
    lines += [f"    {line}" for line in device.first] if device is not None else []
    instr_of_line: dict[int, int] = {}
    pause = program.pause()
    for index, instr in enumerate(program.instrs):
        if index == pause:
            lines.append(_pause(program))
        written = device.lines(index, specs) if device is not None else None
        if index in watch.probed:
            written = _probed_lines(instr, index)
        elif written is None:
            written = lines_of(instr, specs)
        if watch.named and (instr.op in COLLECTIVES or instr.op in (Op.POST, Op.SEND)):
            written = [f"rt.about({instr.task!r})", *written]
        if index in watch.faults:
            written = [f"rt.fail({index})", *written, *_spoiling(instr, index)]
        if index in watch.stops:
            written = [f"breakpoint()  # before {instr.task}", *written]
        if seconds and instr.op is Op.RUN:
            written = [f"rt.begin({seconds[instr.task]:.9g})", *written, "rt.finish()"]
        if looks and instr.op is Op.RUN:
            made = ", ".join("None" if reg == "_" else reg for reg in instr.outputs)
            written.append(f"rt.look({index}, [{made}])")
        if watch.ranged and instr.op not in (Op.FREE, Op.DRAIN):
            written = [f"rt.open({instr.task or instr.op.value!r})", *written, "rt.close()"]
        if watch.timed and instr.op is not Op.FREE:
            written = [*written, f"rt.mark({index})"]
        if device is not None:
            before, after = device.around(index)
            written = [*before, *written, *after]
        for line in written:
            lines.append("    " + line)
            instr_of_line[len(lines)] = index
    if pause == len(program.instrs):
        lines.append(_pause(program))
    lines += [f"    {line}" for line in device.last] if device is not None else []
    lines.append(f"    return {_returned(program)}")
    return Module(source="\n".join(lines) + "\n", instr_of_line=instr_of_line, specs=specs)


def _head(program: RankProgram) -> list[str]:
    tags: dict[str, set[int]] = {}
    streams = sorted({i.stream for i in program.instrs})
    for instr in program.instrs:
        if instr.op is Op.RUN:
            for tag, value in TaskName.parse(instr.task).tags.items():
                if isinstance(value, int):
                    tags.setdefault(tag, set()).add(value)
    microbatches = len(tags.pop("MB", {0}))
    regions = ", ".join(f"{t}={','.join(map(str, sorted(v)))}" for t, v in sorted(tags.items()))
    parts = [
        f"rank {program.rank} of {program.world_size}",
        regions or "one region",
        f"{microbatches} microbatch{'es' if microbatches != 1 else ''}",
        f"streams: {', '.join(streams)}",
        f"peak {show_bytes(program.peak_bytes)}",
    ]
    return ["# " + " · ".join(parts), ""]


def lines_of(instr: Instr, specs: dict[str, TensorSpec]) -> list[str]:  # noqa: PLR0911, PLR0912
    """An instruction as Python, and into `specs` the specs of messages that it names."""
    ins, outs = instr.inputs, instr.outputs
    match instr.op:
        case Op.RUN:
            return _run_lines(instr)
        case Op.SLICE:
            return [f"{outs[0]} = rt.slice({ins[0]}, {instr.dim}, {instr.part}, {instr.parts})"]
        case Op.POST:
            like = spec_name(instr.spec, specs)
            return [f"{outs[0]} = rt.post({instr.peer}, {instr.message}, {like})  # {instr.task}"]
        case Op.WAIT if instr.peer < 0:
            return [f"{targets(list(outs))} = rt.wait_all({ins[0]})"]
        case Op.WAIT:
            return [f"{outs[0]} = rt.wait({ins[0]})"]
        case Op.SEND:
            return [f"rt.send({ins[0]}, {instr.peer}, {instr.message})  # {instr.task}"]
        case Op.DRAIN:
            return [f"rt.drain({instr.peer}, {instr.message})"]
        case Op.ACCUMULATE if len(ins) == 1:
            return [f"{outs[0]} = {ins[0]}"]
        case Op.ACCUMULATE:
            return [f"{outs[0]} = rt.accumulate({ins[0]}, {ins[1]})"]
        case Op.CAST:
            return [f"{outs[0]} = rt.cast({ins[0]}, {spec_name(instr.spec, specs)})"]
        case Op.ADD:
            return [f"{outs[0]} = rt.add({', '.join(ins)})"]
        case Op.LOSS:
            return [f"{outs[0]} = rt.loss({', '.join(ins)})"]
        case Op.CONCAT:
            return [f"{outs[0]} = rt.concat([{', '.join(ins)}], {instr.dim})"]
        case Op.FREE:
            return [f"del {', '.join(ins)}"]
        case (
            Op.ALL_REDUCE
            | Op.REDUCE_SCATTER
            | Op.ALL_GATHER
            | Op.ALL_TO_ALL
            | Op.EXCHANGE_COUNTS
            | Op.EXCHANGE
            | Op.UNEXCHANGE
        ):
            likes = ", ".join(spec_name(spec, specs) for spec in instr.specs)
            values, group = ", ".join(ins), instr.communicator
            return [f"{outs[0]} = rt.{instr.op}([{values}], {group}, [{likes}])  # {instr.task}"]


def _spoiling(instr: Instr, index: int) -> list[str]:
    """What a task has made, as it is after a fault on purpose."""
    made = [reg for reg in instr.outputs if reg != "_"] if instr.op is Op.RUN else []
    return [f"{targets(made)} = rt.spoiled({index}, [{', '.join(made)}])"] if made else []


def _probed_lines(instr: Instr, index: int) -> list[str]:
    """A chunk's call, with the probe before it and after it."""
    written = list(instr.writes())
    given = ", ".join((*instr.inputs, *instr.sums))
    return [
        *_seed_lines(instr),
        f"rt.probe.enter({index}, [{given}], {instr.bundle_in or '()'})",
        f"_results = {_call(instr)}{_comment(instr)}",
        f"rt.probe.leave({index}, _results)",
        *([f"{targets(written)} = _results"] if written else []),
        "del _results" + (", _" if "_" in written else ""),
    ]


def _run_lines(instr: Instr) -> list[str]:
    written = list(instr.writes())
    call = (f"{targets(written)} = " if written else "") + _call(instr)
    return [
        *_seed_lines(instr),
        call + _comment(instr),
        *(["del _"] if "_" in written else []),
    ]


def _seed_lines(instr: Instr) -> list[str]:
    return [f"rt.seed({', '.join(map(str, instr.seed))})"] if instr.seed is not None else []


def _call(instr: Instr) -> str:
    primals = ", ".join(instr.inputs[: instr.num_primals])
    tangents = ", ".join(instr.inputs[instr.num_primals :])
    args = f"[{primals}]"
    if instr.bundle_in or tangents or instr.adds:
        args += f", {instr.bundle_in or 'None'}"
    if tangents or instr.adds:
        args += f", [{tangents}]"
    if instr.adds:
        args += f", [{', '.join(instr.sums)}]"
    return f"{instr.target}({args})"


def _comment(instr: Instr) -> str:
    name = TaskName.parse(instr.task)
    tags = " ".join(f"{k}={v}" for k, v in name.tags.items() if k != "PASS")
    where = re.sub(r"^.*[/\\]", "", instr.where)
    return f"  # {name.which.value:<2} {tags}" + (f"  {where}" if where else "")


def targets(names: list[str]) -> str:
    """What a list of values is unpacked into."""
    return f"[{names[0]}]" if len(names) == 1 else ", ".join(names)


def _pause(program: RankProgram) -> str:
    """Between forward and backward of a program without a loss, the caller makes one."""
    given = targets([reg for _, reg in program.tangents])
    outputs = _tuple([r for _, r in program.outputs])
    buffers = _tuple([r for _, r in program.buffers])
    return f"    {given} = yield {outputs}, {buffers}  # the caller's gradients of the outputs"


def _returned(program: RankProgram) -> str:
    grads = _tuple([r for _, r in program.grads])
    if program.tangents:
        return grads
    outputs = _tuple([r for _, r in program.outputs])
    buffers = _tuple([r for _, r in program.buffers])
    return f"{program.loss or 'None'}, {outputs}, {grads}, {buffers}"


def _tuple(regs: list[str]) -> str:
    return "(" + "".join(f"{r}, " for r in regs).rstrip() + ")"


def spec_name(spec: TensorSpec | None, specs: dict[str, TensorSpec]) -> str:
    """The name by which emitted text refers to a spec, noted in `specs`."""
    assert spec is not None, "a message without a spec cannot be emitted"
    shape = "x".join(map(str, spec.shape)) or "scalar"
    name = f"{str(spec.dtype).removeprefix('torch.')}_{shape}"
    if spec.device != "cpu":
        name += "_" + re.sub(r"\W", "_", spec.device)
    specs[name] = spec
    return name
