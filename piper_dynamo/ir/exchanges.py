"""The part of the proof that is about experts: rows go and come back by what the counts said.

Terms: an exchange of rows is *even* where it has no splits: as many rows go to every rank.

Formal: every exchange of rows over a group uses splits that an exchange of counts over the same
group gave, or is even and the group divides its rows; all by which rows come to a region's tasks of
one microbatch, and leave them, are over one group, and all have splits or all are even and of
equally many rows; a block of expert parameters is read by chunks alone. Not proven: that the counts
are those of the same routing, and that the chunks are made for one rank's experts. That the members
of a group agree on the rows of an even exchange is a part of the proof of collectives.
"""

from collections.abc import Sequence

from piper_dynamo.errors import PiperSyntaxError
from piper_dynamo.ir.program import EXCHANGES, ROW_EXCHANGES, Instr, Op, RankProgram, where
from piper_dynamo.ir.task import RegionId, TaskName


def check_exchanges(programs: Sequence[RankProgram]) -> list[str]:
    """Exchanges of rows against the exchanges of counts that they depend on."""
    return [
        fault for program in programs for fault in (*_check_rank(program), *_check_ways(program))
    ]


def _check_rank(program: RankProgram) -> list[str]:
    faults: list[str] = []
    if not program.experts and not any(instr.op in EXCHANGES for instr in program.instrs):
        return faults
    gathered = {position for position, _ in program.shards}
    experts = {position for position, _ in program.experts if position not in gathered}
    blocks = {reg for reg, position in program.state if position in experts}
    asked: dict[str, Instr] = {}  # the exchange of counts behind each handle
    splits: dict[str, Instr] = {}  # and behind each register of splits
    for index, instr in enumerate(program.instrs):
        if instr.op is Op.EXCHANGE_COUNTS:
            asked[instr.outputs[0]] = instr
        elif instr.op is Op.WAIT and instr.inputs[0] in asked:
            if len(instr.outputs) == 2:
                splits[instr.outputs[1]] = asked[instr.inputs[0]]
            else:
                faults.append(
                    f"{where(program, index)}: counts and splits are 2 results, "
                    f"not {len(instr.outputs)}"
                )
        elif _is_even(instr):
            rows, size = instr.specs[0].shape[0], len(instr.group)
            if rows % size:
                faults.append(
                    f"{where(program, index)}: {rows} rows cannot go evenly to {size} ranks"
                )
        elif instr.op in ROW_EXCHANGES:
            by = splits.get(instr.inputs[-1])
            if by is None:
                faults.append(
                    f"{where(program, index)}: {instr.inputs[-1]!r} does not say how many rows "
                    "go and come"
                )
            elif by.communicator != instr.communicator:
                faults.append(
                    f"{where(program, index)}: rows are exchanged over "
                    f"{instr.communicator}, but their counts were over {by.communicator}"
                )
        if instr.op is Op.CAST and instr.inputs[0] in blocks:
            blocks.add(instr.outputs[0])
        elif instr.op not in (Op.RUN, Op.FREE):
            faults += [
                f"{where(program, index)}: {reg!r} is a rank's own experts, and no other rank's"
                for reg in instr.reads()
                if reg in blocks
            ]
    return faults


def _is_even(instr: Instr) -> bool:
    return instr.op in ROW_EXCHANGES and len(instr.inputs) == 1


def _check_ways(program: RankProgram) -> list[str]:
    """Rows leave a region's tasks as they came to them."""
    faults: list[str] = []
    if not any(instr.op in ROW_EXCHANGES for instr in program.instrs):
        return faults
    started: dict[str, Instr] = {}  # the exchange behind each handle
    came: dict[str, Instr] = {}  # and behind each register of rows
    maker: dict[str, tuple[RegionId, int | None]] = {}
    ways: dict[tuple[RegionId, int | None], str] = {}

    def note(task: tuple[RegionId, int | None], exchange: Instr) -> None:
        way, (region, microbatch) = _way(exchange), task
        if ways.setdefault(task, way) != way:
            faults.append(
                f"rank {program.rank} {exchange.op} {exchange.task}: rows are exchanged {way}, but "
                f"others of {region}, microbatch {microbatch}, {ways[task]}"
            )

    for index, instr in enumerate(program.instrs):
        if instr.op is Op.EXCHANGE:
            started[instr.outputs[0]] = instr
        elif instr.op is Op.WAIT and instr.inputs[0] in started:
            came[instr.outputs[0]] = started[instr.inputs[0]]
        elif instr.op is Op.UNEXCHANGE and instr.inputs[0] in maker:
            note(maker[instr.inputs[0]], instr)
        elif instr.op is Op.RUN:
            try:
                name = TaskName.parse(instr.task)
            except PiperSyntaxError:
                faults.append(f"{where(program, index)}: the step has no such task")
                continue
            maker.update(dict.fromkeys(instr.outputs, (name.region, name.mb)))
            for reg in instr.inputs:
                if reg in came:
                    note((name.region, name.mb), came[reg])
    return faults


def _way(exchange: Instr) -> str:
    how = f"evenly, {exchange.specs[0].shape[0]} rows," if _is_even(exchange) else "by counts"
    return f"{how} over {exchange.communicator}"
