"""Touches: which memory each instruction reads, writes, takes and gives back.

Terms: a *block* is one allocation; views, bundles and registers share blocks, and a block dies with
the last of them, on the host: what is still to run may touch it later. A sent value lives until its
drain, and what a collective reads until its handle is gone.

Signature: rank program, its chunks -> a touch per instruction, and the blocks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import COLLECTIVES, Instr, Op, RankProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """What one instruction does to memory, as numbers of blocks.

    Attributes:
        reads: Blocks it reads.
        writes: Blocks it writes; its new ones are among them.
        born: New blocks, of a collective or a post in the order of its results.
        dead: Blocks that nothing holds after it.
    """

    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    born: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Touches:
    """A program's touches.

    Attributes:
        of: By instruction.
        nbytes: By block.
        given: Blocks that are there before.
        kept: Blocks that outlive the program.
    """

    of: list[Touch] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    given: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


def touches_of(program: RankProgram, chunks: Mapping[str, Chunk]) -> Touches:
    """Follow a program's blocks.

    Args:
        program: One rank's.
        chunks: What it runs.
    """
    following = _Following(chunks)
    for reg in sorted(program.sources()):
        following.put(reg, [following.new(0)])
    given = frozenset(range(len(following.found.nbytes)))
    for instr in program.instrs:
        following.found.of.append(following.touch(instr))
    kept = {block for reg in program.results() for block in following.held.get(reg, ())}
    following.found.given, following.found.kept = given, frozenset(kept)
    return following.found


class _Following:
    """What registers, messages and handles hold while a program is followed."""

    def __init__(self, chunks: Mapping[str, Chunk]) -> None:
        self.chunks = chunks
        self.found = Touches()
        self.held: dict[str, list[int]] = {}
        self.comes: dict[str, list[int]] = {}  # by handle, its results
        self.count: list[int] = []
        self.gone: list[int] = []

    def new(self, nbytes: int) -> int:
        self.found.nbytes.append(nbytes)
        self.count.append(0)
        return len(self.count) - 1

    def put(self, name: str, found: list[int]) -> None:
        """Let a register hold these blocks; nobody reads what is put in `_`."""
        for block in found:
            self.count[block] += 1
        self.drop(name)
        self.held[name] = found
        if name == "_":
            self.drop(name)

    def drop(self, name: str) -> None:
        for block in self.held.pop(name, ()):
            self.count[block] -= 1
            self.gone.append(block)

    def touch(self, instr: Instr) -> Touch:
        self.gone = []
        first = len(self.count)
        match instr.op:
            case Op.RUN:
                reads, writes = self._run(instr)
            case Op.FREE:
                reads, writes = [], []
                for reg in instr.inputs:
                    self.drop(reg)
            case Op.SEND:
                reads, writes = self._blocks(instr.inputs), []
                self.put(_lent(instr), list(reads))
            case Op.DRAIN:
                reads, writes = [], []
                self.drop(_lent(instr))
            case Op.WAIT:
                reads, writes = [], []
                for reg, block in zip(instr.outputs, self.comes[instr.inputs[0]], strict=True):
                    self.put(reg, [block])
            case _ if instr.op is Op.POST or instr.op in COLLECTIVES:
                reads, writes = self._starts(instr)
            case Op.ACCUMULATE:
                reads = self._blocks(instr.inputs)
                writes = self._blocks(instr.sums)
                self.put(instr.outputs[0], self._blocks(instr.inputs[:1]))
            case Op.SLICE if instr.nbytes == (0,):  # a view
                reads, writes = self._blocks(instr.inputs), []
                self.put(instr.outputs[0], list(reads))
            case _:
                reads, writes = self._blocks(instr.inputs), []
                for reg, nbytes in zip(instr.outputs, instr.nbytes, strict=True):
                    self.put(reg, [self.new(nbytes)])
        born = range(first, len(self.count))
        return Touch(
            reads=_distinct(reads),
            writes=_distinct((*writes, *born)),
            born=tuple(born),
            dead=_distinct(block for block in self.gone if self.count[block] == 0),
        )

    def _blocks(self, regs: Iterable[str]) -> list[int]:
        return [block for reg in regs for block in self.held[reg]]

    def _starts(self, instr: Instr) -> tuple[list[int], list[int]]:
        given = self._blocks(instr.inputs)
        made = given
        if instr.op is not Op.ALL_REDUCE:
            made = [self.new(nbytes) for nbytes in instr.nbytes]
        handle = instr.outputs[0]
        self.comes[handle] = made
        self.put(handle, [*made, *given])
        return given, made

    def _run(self, instr: Instr) -> tuple[list[int], list[int]]:
        chunk = self.chunks[instr.target]
        inputs = [self.held[reg][0] for reg in instr.inputs]
        bundle = list(self.held.get(instr.bundle_in, ()))
        sums = self._blocks(instr.sums)
        flat = [*inputs[: instr.num_primals], *bundle, *inputs[instr.num_primals :]]
        made: list[int] = []
        for i, (share, spec) in enumerate(zip(chunk.shares, chunk.outputs, strict=True)):
            if i in instr.adds:
                made.append(self.held[instr.outputs[i]][0])
            elif share >= 0:
                made.append(flat[share])
            elif share == -1 - i:
                made.append(self.new(spec.nbytes if spec is not None else 0))
            else:
                made.append(made[-1 - share])
        for reg, block in zip(instr.outputs, made, strict=False):
            self.put(reg, [block])
        if instr.bundle_out:
            self.put(instr.bundle_out, made[chunk.num_results :])
        if instr.bundle_in:  # the chunk empties it
            self.drop(instr.bundle_in)
            self.held[instr.bundle_in] = []
        return [*flat, *sums], sums


def _lent(instr: Instr) -> str:
    """What holds a sent value until its drain; no register is called so."""
    return f"{instr.peer}>{instr.message}"


def _distinct(blocks: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(blocks))
