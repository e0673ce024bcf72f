"""Apart: gradients are reduced while no rows travel.

A reduction beside an exchange of rows takes bandwidth from it, and the tasks behind the exchange
wait, while whoever waits for the reduction comes later: the next task's reduction, or the end of
the step.

Signature: a rank's instructions -> the same, some reductions later.
"""

from bisect import bisect_right

from piper_dynamo.ir.program import REDUCTIONS, ROW_EXCHANGES, Instr, Op
from piper_dynamo.lowering.lower import Draft


def keep_apart(draft: Draft) -> None:
    """Start reductions before chunks during which no rows travel.

    rewrite:   R ; exchange ; wait exchange ; RUN  ->  exchange ; wait exchange ; R ; RUN
    requires:  ranks that reduce together have alike programs, so that all of them move alike
    keeps:     what each instruction does; a reduction stays before its wait, and in its place if
        no rows travel before the next chunk has run, or always until its wait; at most one comes
        to a chunk if others are free
    """
    instrs = draft.instrs
    quiet, places = _quiet_runs(instrs)
    crowded = _crowded(instrs)
    waits = {i.inputs[0]: at for at, i in enumerate(instrs) if i.op is Op.WAIT}
    moved: dict[int, list[Instr]] = {}
    here: set[int] = set()
    free = 0  # the first of the quiet chunks to which no reduction has come
    for at, instr in enumerate(instrs):
        if instr.op not in REDUCTIONS or at not in crowded:
            continue
        end = waits.get(instr.outputs[0], len(instrs))
        first = bisect_right(quiet, at)
        chosen = max(first, free)
        if chosen == len(quiet) or quiet[chosen] >= end:
            chosen = first  # shared, if there is one
        if chosen < len(quiet) and quiet[chosen] < end:
            moved.setdefault(max(places[chosen], at + 1), []).append(instr)
            here.add(at)
            free = max(free, chosen + 1)
    draft.instrs = [
        one
        for at, instr in enumerate(instrs)
        for one in (*moved.get(at, ()), *(() if at in here else (instr,)))
    ]


def _quiet_runs(instrs: list[Instr]) -> tuple[list[int], list[int]]:
    """Chunks that run while no rows travel; and for each, since when none did: after which wait."""
    travelling: set[str] = set()
    found: list[int] = []
    since: list[int] = []
    ended = 0
    for at, instr in enumerate(instrs):
        if instr.op in ROW_EXCHANGES:
            travelling.add(instr.outputs[0])
        elif instr.op is Op.WAIT and instr.inputs[0] in travelling:
            travelling.discard(instr.inputs[0])
            ended = at + 1
        elif instr.op is Op.RUN and not travelling:
            found.append(at)
            since.append(ended)
            ended = at + 1
    return found, since


def _crowded(instrs: list[Instr]) -> set[int]:
    """Reductions beside which rows travel, or start to before the next chunk."""
    travelling: set[str] = set()
    waiting: list[int] = []  # reductions since the last chunk
    found: set[int] = set()
    for at, instr in enumerate(instrs):
        if instr.op in ROW_EXCHANGES:
            travelling.add(instr.outputs[0])
            found.update(waiting)
        elif instr.op is Op.WAIT:
            travelling.discard(instr.inputs[0])
        elif instr.op is Op.RUN:
            waiting.clear()
        elif instr.op in REDUCTIONS:
            waiting.append(at)
            if travelling:
                found.add(at)
    return found
