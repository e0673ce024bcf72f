"""Sums: a gradient is added into its sum by the chunk that makes it, not after it.

The partial gradient then never exists, which saves its memory and one pass over it and its sum.

Signature: rank program -> the same with fewer accumulations.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import Instr, Op, RankProgram
from piper_dynamo.lowering.aten import addable


def add_in_chunks(program: RankProgram, chunks: Mapping[str, Chunk]) -> RankProgram:
    """Let chunks add to sums.

    rewrite:   w = run(...) ; s = accumulate(s, w)   ->   s = run(..., s)
    requires:  w is a product, and nothing else reads it (`cut` copies gradients that are read);
               it is added before the next chunk runs, and nothing between reads or writes w or s;
               the chunk's other runs that add do the same
    keeps:     the order of the parts in each sum
    """
    instrs: list[Instr] = list(program.instrs)
    readers = Counter(reg for instr in instrs for reg in instr.reads())
    found: dict[int, dict[int, int]] = {}  # by chunk run: where the output at a position is added
    chosen: dict[str, set[int]] = {}  # by chunk: what all its runs can add
    for index, instr in enumerate(instrs):
        if instr.op is not Op.RUN:
            continue
        alone = [p for p in addable(chunks[instr.target]) if readers[instr.outputs[p]] == 1]
        mine = _accumulations(instrs, index, alone)
        if mine:
            found[index] = mine
            chosen[instr.target] = chosen.get(instr.target, set(mine)) & set(mine)
    dropped: set[int] = set()
    for index, mine in found.items():
        instr = instrs[index]
        positions = sorted(chosen[instr.target])
        outputs = list(instr.outputs)
        for position in positions:
            outputs[position] = instrs[mine[position]].outputs[0]
            dropped.add(mine[position])
        instrs[index] = replace(instr, outputs=tuple(outputs), adds=tuple(positions))
    return replace(program, instrs=tuple(x for i, x in enumerate(instrs) if i not in dropped))


def passing(program: RankProgram) -> dict[str, tuple[int, ...]]:
    """By chunk, the outputs that only a reduce-scatter reads, in each of its runs."""
    scattered: set[str] = set()
    others = program.results()  # registers that anything else reads
    for instr in program.instrs:
        if instr.op is not Op.FREE:
            (scattered if instr.op is Op.REDUCE_SCATTER else others).update(instr.reads())
    scattered -= others
    found: dict[str, set[int]] = {}
    for instr in program.instrs:
        if instr.op is Op.RUN:
            mine = {
                position
                for position, reg in enumerate(instr.outputs)
                if reg in scattered and position not in instr.adds
            }
            found[instr.target] = found.get(instr.target, mine) & mine
    return {name: tuple(sorted(positions)) for name, positions in found.items() if positions}


def _accumulations(instrs: list[Instr], index: int, positions: Sequence[int]) -> dict[int, int]:
    """Where these outputs of a chunk are added before the next chunk, untouched until then."""
    parts = {instrs[index].outputs[p]: p for p in positions}
    touched: set[str] = set()
    found: dict[int, int] = {}
    for at in range(index + 1, len(instrs)):
        instr = instrs[at]
        if instr.op is Op.RUN:
            break
        is_ours = instr.op is Op.ACCUMULATE and len(instr.inputs) == 2 and instr.inputs[1] in parts
        is_ours = is_ours and instr.spec is None  # a product is of its factors' dtype
        if is_ours and not touched & set(instr.inputs):
            found[parts[instr.inputs[1]]] = at
        touched.update(instr.reads(), instr.writes())
    return found
