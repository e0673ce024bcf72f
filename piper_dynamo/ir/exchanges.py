"""The part of the proof that is about experts: rows go and come back by what the counts said.

Formal: every exchange of rows over a group uses splits that an exchange of counts over the same
group gave; a block of expert parameters is read by chunks alone. Not proven: that the counts are
those of the same routing, and that the chunks are made for one rank's experts.
"""

from collections.abc import Sequence

from piper_dynamo.ir.program import Instr, Op, RankProgram


def check_exchanges(programs: Sequence[RankProgram]) -> list[str]:
    """Exchanges of rows against the exchanges of counts that they depend on."""
    return [fault for program in programs for fault in _check_rank(program)]


def _check_rank(program: RankProgram) -> list[str]:
    faults: list[str] = []
    gathered = {position for position, _ in program.shards}
    experts = {position for position, _ in program.experts if position not in gathered}
    blocks = {reg for reg, position in program.state if position in experts}
    asked: dict[str, Instr] = {}  # the exchange of counts behind each handle
    splits: dict[str, Instr] = {}  # and behind each register of splits
    for index, instr in enumerate(program.instrs):
        at = f"rank {program.rank} #{index} {instr.op} {instr.task}"
        if instr.op is Op.EXCHANGE_COUNTS:
            asked[instr.outputs[0]] = instr
        elif instr.op is Op.WAIT and instr.inputs[0] in asked:
            splits[instr.outputs[1]] = asked[instr.inputs[0]]
        elif instr.op in (Op.EXCHANGE, Op.UNEXCHANGE):
            by = splits.get(instr.inputs[-1])
            if by is None:
                faults.append(f"{at}: {instr.inputs[-1]!r} does not say how many rows go and come")
            elif by.communicator != instr.communicator:
                faults.append(
                    f"{at}: rows are exchanged over {instr.communicator}, but their counts were "
                    f"over {by.communicator}"
                )
        if instr.op not in (Op.RUN, Op.FREE):
            faults += [
                f"{at}: {reg!r} is a rank's own experts, and no other rank's"
                for reg in instr.reads()
                if reg in blocks
            ]
    return faults
