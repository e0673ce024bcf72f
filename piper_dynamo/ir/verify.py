"""The proof that a job's rank programs are safe and compute what they are to, as they will run.

Its parts: registers and sums (here), messages and collectives (`matching.py`), deadlocks
(`deadlock.py`), what several ranks hold (`contributions.py`), experts (`exchanges.py`), dtypes
(`casts.py`), and what is computed (`evaluate.py`).

All parts that look at one rank at a time, at both ends of messages or at the order of collectives
are asked, whatever the others found, and so is that about deadlocks, of the channels and groups
that match. Two parts follow values through messages and sums, so that they would blame every task
behind another fault: contributions are asked once registers, messages and collectives are right,
and what is computed once all else is.
"""

from collections.abc import Mapping, Sequence

from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir.casts import check_casts
from piper_dynamo.ir.contributions import check_gathers, check_reductions
from piper_dynamo.ir.deadlock import find_deadlock
from piper_dynamo.ir.evaluate import check_values
from piper_dynamo.ir.exchanges import check_exchanges
from piper_dynamo.ir.matching import match
from piper_dynamo.ir.meaning import Meaning
from piper_dynamo.ir.program import COLLECTIVES, REDUCTIONS, Instr, Op, RankProgram, where


def verify(
    programs: Sequence[RankProgram],
    meaning: Meaning | None = None,
    replicas: Mapping[int, int] | None = None,
) -> None:
    """Prove the programs of all ranks safe together.

    Args:
        programs: Those of all ranks, in rank order.
        meaning: What they have to compute; None: only whether they are safe is proved.
        replicas: Which replica each rank belongs to; None: there is one.

    Raises:
        PiperPlanError: Lists every fault: messages that do not match, registers read before
            they are written or after they are freed, collectives in different orders, gradients not
            given or not of what they are to be, values that are not those of the model, and a
            deadlock's cycle.
    """
    between = match(programs)
    registers = _check_registers(programs)
    faults = [
        *registers,
        *_check_sums(programs),
        *_check_flights(programs),
        *between.faults,
        *check_gathers(programs),
        *check_exchanges(programs),
        *check_casts(programs),
    ]
    if not registers and not between.faults:
        faults += check_reductions(programs)
    deadlock = find_deadlock(programs, between.unmatched)
    if meaning is not None:
        kept = _check_frees(programs)
        if not faults and not deadlock:
            ranks = {program.rank: 0 for program in programs}
            faults += check_values(programs, meaning, ranks if replicas is None else replicas)
        faults += kept
    if deadlock and not faults:
        raise PiperPlanError(deadlock)
    if faults:
        raise PiperPlanError(
            join_faults("the plan is unsafe", [*faults, *([deadlock] if deadlock else [])])
        )


def _check_registers(programs: Sequence[RankProgram]) -> list[str]:
    """Reads between write and free, every result written, nothing but sums written twice."""
    faults = []
    for program in programs:
        alive = set(program.sources())
        for index, instr in enumerate(program.instrs):
            for reg in instr.reads():
                if reg not in alive:
                    faults.append(
                        f"{where(program, index)}: "
                        f"{reg!r} is read before it is written, or after its free"
                    )
            if instr.op is Op.FREE:
                alive -= set(instr.inputs)
                continue
            for reg in instr.writes():
                if reg in alive and reg != "_" and reg not in instr.sums:
                    faults.append(f"{where(program, index)}: {reg!r} is written twice")
                alive.add(reg)
        missing = sorted(program.results() - alive)
        if missing:
            faults.append(
                f"rank {program.rank}: results never written: {', '.join(missing)}"
                f"{''.join(_near(program, reg) for reg in missing)}"
            )
    return faults


def _near(program: RankProgram, reg: str) -> str:
    """A line for a result that is not there: who frees it, or who reads what it is the result of.

    Nothing where that is no parameter or buffer.
    """
    positions = {position for position, made in (*program.grads, *program.buffers) if made == reg}
    given = {held for held, position in program.state if position in positions}
    freed, read = -1, -1
    for index, instr in enumerate(program.instrs):
        if instr.op is Op.FREE and reg in instr.inputs:
            freed = index
        elif read < 0 and given & set(instr.reads()):
            read = index
    if freed >= 0:
        return f"\n  {reg!r} is freed at {where(program, freed)}"
    used = f"\n  {reg!r} is of what is read first at {where(program, read)}"
    return used if read >= 0 else ""


def _check_frees(programs: Sequence[RankProgram]) -> list[str]:
    """Nothing but results outlives the step: what two steps hold is what one holds."""
    faults = []
    for program in programs:
        last: dict[str, int] = {}
        freed: set[str] = set()
        for index, instr in enumerate(program.instrs):
            if instr.op is Op.FREE:
                freed.update(instr.inputs)
            else:
                last.update(dict.fromkeys(instr.writes(), index))
        kept = program.results() | program.sources() | freed | {"_"}
        faults += [
            f"{where(program, index)}: {reg!r} is never freed"
            for reg, index in last.items()
            if reg not in kept
        ]
    return faults


def _check_sums(programs: Sequence[RankProgram]) -> list[str]:
    """What is made is used; a partial gradient by its sum or reduction alone, which it becomes."""
    faults = []
    for program in programs:
        readers: dict[str, int] = {}
        results = program.results()
        for instr in program.instrs:
            for reg in instr.reads() if instr.op is not Op.FREE else ():
                if reg not in instr.sums:  # a sum reads itself
                    readers[reg] = readers.get(reg, 0) + 1
        for index, instr in enumerate(program.instrs):
            added = instr.inputs if instr.op in REDUCTIONS else ()
            if instr.op is Op.ACCUMULATE:
                added = instr.inputs[-1:]
            for reg in added:
                if readers[reg] > 1 or reg in results:
                    at = where(program, index)
                    faults.append(f"{at}: {reg!r} is added or reduced here, but read elsewhere")
            for reg in instr.writes() if instr.op is not Op.FREE else ():
                if reg not in readers and reg not in results and reg != "_":
                    at = where(program, index)
                    faults.append(f"{at}: {reg!r} is made and never used")
        faults += [
            f"rank {program.rank}: {reg!r} is given to the step, which never uses it"
            for reg in (*(reg for reg, _ in program.data), *program.weights)
            if reg not in readers and reg not in results
        ]
    return faults


def _check_flights(programs: Sequence[RankProgram]) -> list[str]:
    """What a message or a collective reads stays as it is until it has been read."""
    faults = []
    for program in programs:
        summing: dict[str, int] = {}  # in place: nobody else may read it
        lent: dict[object, tuple[str, ...]] = {}
        flying: dict[str, dict[object, int]] = {}  # by register, what reads it since when
        for index, instr in enumerate(program.instrs):
            for reg in instr.sums:
                if flying.get(reg):
                    since = where(program, min(flying[reg].values()))
                    faults.append(
                        f"{where(program, index)}: adds to {reg!r} while it is on its way\n"
                        f"  since {since}"
                    )
            for reg in instr.inputs if instr.op is not Op.FREE and summing else ():
                if reg in summing and instr.op is not Op.WAIT:
                    faults.append(
                        f"{where(program, index)}: reads {reg!r} while it is summed in place\n"
                        f"  since {where(program, summing[reg])}"
                    )
            if instr.op is Op.SEND or instr.op in COLLECTIVES:
                key = _flight(instr)
                lent[key] = instr.inputs
                for reg in instr.inputs:
                    flying.setdefault(reg, {})[key] = index
                    if instr.op is Op.ALL_REDUCE:
                        summing[reg] = index
            elif instr.op is Op.DRAIN or (instr.op is Op.WAIT and instr.peer < 0):
                key = _flight(instr)
                for reg in lent.pop(key, ()):
                    flying[reg].pop(key, None)
                    summing.pop(reg, None)
    return faults


def _flight(instr: Instr) -> object:
    """What names a message, or a collective, at its start and at its end."""
    if instr.op is Op.WAIT:
        return instr.inputs[0]
    return instr.outputs[0] if instr.outputs else (instr.peer, instr.message)
