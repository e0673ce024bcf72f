"""Apart: gradients are reduced while no rows travel.

A reduction beside an exchange of rows takes bandwidth from it, and the tasks behind the exchange
wait; nothing waits for the reduction until the step's end.

Signature: a rank's instructions -> the same, some reductions later.
"""

from bisect import bisect_right

from piper_dynamo.ir.program import REDUCTIONS, Instr, Op
from piper_dynamo.lowering.lower import Draft

_EXCHANGES = (Op.EXCHANGE, Op.UNEXCHANGE)


def keep_apart(draft: Draft) -> None:
    """Start reductions before chunks during which no rows travel.

    rewrite:   R ; exchange ; wait exchange ; RUN  ->  exchange ; wait exchange ; R ; RUN
    requires:  ranks that reduce together have alike programs, so that all of them move alike
    keeps:     what each instruction does; a reduction stays before its wait, and in its place if
        there is no such chunk before that; at most one comes to a chunk if others are free
    """
    instrs = draft.instrs
    quiet = _quiet_runs(instrs)
    if not quiet or not any(i.op in _EXCHANGES for i in instrs):
        return
    waits = {i.inputs[0]: at for at, i in enumerate(instrs) if i.op is Op.WAIT}
    moved: dict[int, list[Instr]] = {}
    here: set[int] = set()
    free = 0  # the first of the quiet chunks to which no reduction has come
    for at, instr in enumerate(instrs):
        if instr.op not in REDUCTIONS:
            continue
        end = waits.get(instr.outputs[0], len(instrs))
        first = bisect_right(quiet, at)
        chosen = max(first, free)
        if chosen == len(quiet) or quiet[chosen] >= end:
            chosen = first  # shared, if there is one
        if chosen < len(quiet) and quiet[chosen] < end:
            moved.setdefault(quiet[chosen], []).append(instr)
            here.add(at)
            free = max(free, chosen + 1)
    draft.instrs = [
        one
        for at, instr in enumerate(instrs)
        for one in (*moved.get(at, ()), *(() if at in here else (instr,)))
    ]


def _quiet_runs(instrs: list[Instr]) -> list[int]:
    """Where chunks run while no rows travel."""
    travelling: set[str] = set()
    found = []
    for at, instr in enumerate(instrs):
        if instr.op in _EXCHANGES:
            travelling.add(instr.outputs[0])
        elif instr.op is Op.WAIT:
            travelling.discard(instr.inputs[0])
        elif instr.op is Op.RUN and not travelling:
            found.append(at)
    return found
