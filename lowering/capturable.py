"""Capturable: whether a whole step can be recorded once, as a CUDA graph, and replayed.

What is recorded is what the device does: whatever the host decides in a step is decided for good.

Signature: rank program, its chunks -> why not.
"""

from collections.abc import Mapping

from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import Op, RankProgram, where


def why_not_captured(program: RankProgram, chunks: Mapping[str, Chunk]) -> list[str]:
    """What of a program the host decides anew in each step; nothing where it can be recorded.

    Args:
        program: One rank's.
        chunks: What it runs.
    """
    found = []
    if program.tangents:
        found.append(
            f"rank {program.rank}: no output is the loss, so the step stops for the caller's "
            "gradients"
        )
    for index, instr in enumerate(program.instrs):
        at = where(program, index)
        if instr.op is Op.EXCHANGE_COUNTS:
            found.append(f"{at}: the host reads how many rows go to each expert")
        elif instr.op is Op.RUN and instr.seed is not None:
            found.append(f"{at}: draws random numbers, whose seed the host gives")
        elif instr.op is Op.RUN and chunks[instr.target].is_ragged:
            found.append(f"{at}: runs on as many rows as come")
    return found
