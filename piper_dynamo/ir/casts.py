"""The part of the proof about dtypes: who adds or reduces in another dtype has been cast to it.

Terms: a register's dtype is *known* where an instruction states it: a cast's, a collective's.

Formal: a sum that takes parts of another dtype was begun by a cast to its own; what goes into a
collective, a message or a sum of several has the dtype that these state, wherever it is known.
"""

from collections.abc import Sequence

import torch

from piper_dynamo.ir.program import COLLECTIVES, Instr, Op, RankProgram, where
from piper_dynamo.ir.spec import short


def check_casts(programs: Sequence[RankProgram]) -> list[str]:
    """Every dtype that is known is the one that is stated where a register is read."""
    return [fault for program in programs for fault in _check_rank(program)]


def _check_rank(program: RankProgram) -> list[str]:
    if not any(instr.op is Op.CAST for instr in program.instrs):
        return []
    faults: list[str] = []
    known: dict[str, torch.dtype] = {}
    started: dict[str, Instr] = {}
    for index, instr in enumerate(program.instrs):
        for reg, wanted in _stated(instr, known):
            found = known.get(reg)
            if found != wanted and not (found is None and instr.op is not Op.ACCUMULATE):
                has = short(found) if found is not None else "the dtype of its first part"
                faults.append(f"{where(program, index)}: {reg!r} has {has}, not {short(wanted)}")
        match instr.op:
            case Op.CAST if instr.spec is not None:
                known[instr.outputs[0]] = instr.spec.dtype
            case Op.ACCUMULATE | Op.ADD if instr.inputs[0] in known:
                known[instr.outputs[0]] = known[instr.inputs[0]]
            case op if op in COLLECTIVES:
                started[instr.outputs[0]] = instr
            case Op.WAIT if instr.inputs[0] in started:
                specs = started[instr.inputs[0]].specs
                known.update(
                    (reg, spec.dtype) for reg, spec in zip(instr.outputs, specs, strict=False)
                )
            case _:
                pass
    return faults


def _stated(instr: Instr, known: dict[str, torch.dtype]) -> list[tuple[str, torch.dtype]]:
    """Registers that an instruction reads, with the dtypes that it states for them."""
    if instr.op is Op.ADD:
        first = next((known[reg] for reg in instr.inputs if reg in known), None)
        return [(reg, first) for reg in instr.inputs] if first is not None else []
    if instr.op in (Op.SEND, Op.ACCUMULATE) and instr.spec is not None:
        return [(instr.inputs[0], instr.spec.dtype)]
    if instr.op in COLLECTIVES:
        return [(r, s.dtype) for r, s in zip(instr.inputs, instr.specs, strict=False)]
    return []
