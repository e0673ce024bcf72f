"""Memory: when each register dies, and the peak that follows.

Terms: a *block* is one allocation; views, bundles and registers share blocks and a block lives as
long as any of them. Its *category* says what it is for: a gradient that the step ends with, or a
sum on the way there; an activation, which is all else that tasks make or get; a parameter made
whole, or cast; or room for what is on its way, until that is waited for.

Signature: draft -> draft with frees; program -> its peak bytes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import COLLECTIVES, REDUCTIONS, Instr, Op, RankProgram
from piper_dynamo.lowering.inside import SOMEBODYS, most_inside
from piper_dynamo.timeline import STEP, Held

GRADIENT, ACTIVATION, GATHERED, COMING = range(len(STEP))


def free_dead(program: RankProgram) -> RankProgram:
    """Free every register after its last use; results and what was there before stay."""
    last: dict[str, int] = {}
    for i, instr in enumerate(program.instrs):
        for reg in (*instr.reads(), *instr.writes()):
            last[reg] = i
    keep = program.results() | program.sources() | {"_"}
    dead: dict[int, list[str]] = {}
    for reg, i in last.items():
        if reg not in keep:
            dead.setdefault(i, []).append(reg)
    instrs: list[Instr] = []
    for i, instr in enumerate(program.instrs):
        instrs.append(instr)
        if i in dead:
            gone = tuple(dead[i])
            instrs.append(Instr(op=Op.FREE, task=instr.task, inputs=gone, where=instr.where))
    return replace(program, instrs=tuple(instrs))


@dataclass(slots=True)
class _Blocks:
    """Reference counts of blocks, and the bytes alive by category."""

    size: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    category: list[int] = field(default_factory=list)
    now: list[int] = field(default_factory=lambda: [0] * len(STEP))

    def new(self, nbytes: int, category: int = ACTIVATION) -> int:
        self.size.append(nbytes)
        self.count.append(0)
        self.category.append(category)
        return len(self.size) - 1

    def take(self, block: int) -> None:
        if self.count[block] == 0:
            self.now[self.category[block]] += self.size[block]
        self.count[block] += 1

    def drop(self, block: int) -> None:
        self.count[block] -= 1
        if self.count[block] == 0:
            self.now[self.category[block]] -= self.size[block]

    def turn(self, block: int, category: int) -> None:
        """What was on its way has come."""
        if self.category[block] == COMING and self.count[block]:
            self.now[COMING] -= self.size[block]
            self.now[category] += self.size[block]
            self.category[block] = category


def bytes_over_time(program: RankProgram, chunks: Mapping[str, Chunk]) -> list[int]:
    """Bytes the step holds after each instruction (temporaries inside chunks are not counted)."""
    return [sum(held) for held in held_over_time(program, chunks)]


def held_over_time(
    program: RankProgram, chunks: Mapping[str, Chunk], highest: list[int] | None = None
) -> list[Held]:
    """The same by category, in the order of `timeline.STEP`.

    Args:
        program: One rank's.
        chunks: What it runs.
        highest: Filled with the most bytes that the step holds while each instruction runs and
            after it, so with temporaries inside chunks.
    """
    blocks = _Blocks()
    held: dict[str, list[int]] = {}
    handles: dict[str, tuple[Op, list[int]]] = {}  # what comes: how, and in which blocks
    history: list[Held] = []
    gradients = _gradients(program)

    parameters = {reg for reg, _ in program.state}

    def category(reg: str) -> int:
        return GRADIENT if reg in gradients else ACTIVATION

    def put(reg: str, found: list[int]) -> None:
        for block in found:
            blocks.take(block)
        drop(reg)
        held[reg] = found

    def drop(reg: str) -> None:
        for block in held.pop(reg, []):
            blocks.drop(block)

    for reg in program.sources():
        put(reg, [blocks.new(0)])
    for instr in program.instrs:
        inside = _while_it_runs(instr, chunks, blocks, held) if highest is not None else 0
        if instr.op is Op.RUN:
            _run(instr, chunks[instr.target], blocks, held, put, gradients)
        elif instr.op is Op.FREE:
            for reg in instr.inputs:
                drop(reg)
        elif instr.op is Op.POST or instr.op in COLLECTIVES:
            # Until it is waited for, a collective holds what it reads, too.
            given = [block for reg in instr.inputs for block in held[reg]]
            made = given
            if instr.op is not Op.ALL_REDUCE:
                made = [blocks.new(n, COMING) for n in instr.nbytes]
            handles[instr.outputs[0]] = instr.op, made
            put(instr.outputs[0], [*made, *given])
        elif instr.op is Op.WAIT:
            how, coming = handles[instr.inputs[0]]
            for reg, block in zip(instr.outputs, coming, strict=True):
                blocks.turn(block, GATHERED if how is Op.ALL_GATHER else category(reg))
                if reg != "_":
                    put(reg, [block])
        elif instr.op is Op.ACCUMULATE or (instr.op is Op.SLICE and instr.nbytes == (0,)):
            put(instr.outputs[0], list(held[instr.inputs[0]]))
        else:
            is_cast = instr.op is Op.CAST and instr.inputs[0] in parameters
            for reg, nbytes in zip(instr.outputs, instr.nbytes, strict=True):
                put(reg, [blocks.new(nbytes, GATHERED if is_cast else category(reg))])
        history.append(tuple(blocks.now))
        if highest is not None:
            highest.append(max(inside, sum(blocks.now)))
    return history


def _while_it_runs(
    instr: Instr, chunks: Mapping[str, Chunk], blocks: _Blocks, held: Mapping[str, Sequence[int]]
) -> int:
    """The most that is held at once while a chunk runs: what it makes, and all else."""
    if instr.op is not Op.RUN:
        return 0
    bundle = held.get(instr.bundle_in, ())
    times = Counter(bundle)
    numbers: dict[int, int] = {}  # from 0 on, so that equal chunks ask alike
    given = [
        (numbers.setdefault(block, len(numbers)), blocks.size[block])
        if blocks.count[block] == times[block]
        else (SOMEBODYS, 0)
        for block in bundle
    ]
    rest = sum(blocks.now) - sum(blocks.size[block] for block in numbers)
    return rest + most_inside(chunks[instr.target], instr.adds, instr.num_primals, given)


def _gradients(program: RankProgram) -> set[str]:
    """Registers of the gradients of the end, of all sums, and of what these are made of."""
    found = {reg for _, reg in program.grads}
    for instr in reversed(program.instrs):
        if instr.op is Op.ACCUMULATE:
            found |= {*instr.outputs, *instr.inputs}
        elif instr.op in REDUCTIONS or instr.op in (Op.WAIT, Op.ADD, Op.CAST):
            if found & set(instr.outputs):
                found |= set(instr.inputs)
        elif instr.op is Op.RUN:
            found |= set(instr.sums)
    return found


def _run(
    instr: Instr,
    chunk: Chunk,
    blocks: _Blocks,
    held: dict[str, list[int]],
    put: Callable[[str, list[int]], None],
    gradients: set[str],
) -> None:
    inputs = [held[reg][0] for reg in instr.inputs]
    bundle = held.get(instr.bundle_in, [])
    flat = [*inputs[: instr.num_primals], *bundle, *inputs[instr.num_primals :]]
    made: list[int] = []
    for i, (share, spec) in enumerate(zip(chunk.shares, chunk.outputs, strict=True)):
        if i in instr.adds:
            made.append(held[instr.outputs[i]][0])
        elif share >= 0:
            made.append(flat[share])
        elif share == -1 - i:
            is_gradient = i < len(instr.outputs) and instr.outputs[i] in gradients
            nbytes = spec.nbytes if spec is not None else 0
            made.append(blocks.new(nbytes, GRADIENT if is_gradient else ACTIVATION))
        else:
            made.append(made[-1 - share])
    for reg, block in zip(instr.outputs, made, strict=False):
        if reg != "_":
            put(reg, [block])
    if instr.bundle_out:
        put(instr.bundle_out, made[chunk.num_results :])
    if instr.bundle_in:
        for block in held.get(instr.bundle_in, []):
            blocks.drop(block)
        held[instr.bundle_in] = []


def peak_bytes(program: RankProgram, chunks: Mapping[str, Chunk]) -> int:
    """The most the step holds at once between instructions."""
    return max(bytes_over_time(program, chunks), default=0)


def memory_curve(
    program: RankProgram,
    chunks: Mapping[str, Chunk],
    starts: Sequence[float],
    before: Held = (),
) -> list[tuple[float, Held]]:
    """From when on a rank holds how many bytes of each category, where they change.

    What an instruction makes is there from its start.

    Args:
        program: One rank's.
        chunks: What it runs.
        starts: When each of its instructions starts.
        before: What is there before, in the categories that come first.
    """
    curve: list[tuple[float, Held]] = []
    for start, step in zip(starts, held_over_time(program, chunks), strict=True):
        held = before + step
        if len(curve) > 1 and curve[-2][0] == start:
            # Of what comes and goes at one moment, the most and the last.
            curve[-2:] = [(start, max(curve[-2][1], curve[-1][1], key=sum))]
        if not curve or curve[-1][1] != held:
            curve.append((start, held))
    return curve
