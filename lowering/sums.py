"""Sums: a gradient is added into its sum by the chunk that makes it, not after it.

The partial gradient then never exists, which saves its memory and one pass over it and its sum.

Signature: rank program -> the same with fewer accumulations.
"""

from collections.abc import Mapping
from dataclasses import replace

from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import Instr, Op, RankProgram
from piper_dynamo.lowering.aten import addable


def add_in_chunks(program: RankProgram, chunks: Mapping[str, Chunk]) -> RankProgram:
    """Let chunks add to sums.

    rewrite:   w = run(...) ; s = accumulate(s, w)   ->   s = run(..., s)
    requires:  the chunk can add all of its products, all are added before the next chunk, and
               nothing between reads or writes w or s
    keeps:     the order of the parts in each sum
    """
    instrs: list[Instr] = list(program.instrs)
    dropped: set[int] = set()
    for index, instr in enumerate(instrs):
        if instr.op is not Op.RUN:
            continue
        positions = tuple(p for p in addable(chunks[instr.target]) if instr.outputs[p] != "_")
        if positions != addable(chunks[instr.target]) or not positions:
            continue
        parts = {instr.outputs[p]: p for p in positions}
        found = _accumulations(instrs, index, parts)
        if len(found) != len(positions):
            continue
        outputs = list(instr.outputs)
        for at in found:
            total, part = instrs[at].inputs
            outputs[parts[part]] = total
        instrs[index] = replace(instr, outputs=tuple(outputs), adds=positions)
        dropped.update(found)
    return replace(program, instrs=tuple(x for i, x in enumerate(instrs) if i not in dropped))


def _accumulations(instrs: list[Instr], index: int, parts: Mapping[str, int]) -> list[int]:
    """Where the parts that a chunk makes are added, before the next chunk."""
    touched: set[str] = set()
    found = []
    for at in range(index + 1, len(instrs)):
        instr = instrs[at]
        if instr.op is Op.RUN:
            break
        is_ours = instr.op is Op.ACCUMULATE and len(instr.inputs) == 2 and instr.inputs[1] in parts
        if is_ours and not touched & set(instr.inputs):
            found.append(at)
        touched.update(instr.reads(), instr.writes())
    return found
