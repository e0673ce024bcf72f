"""The part of the proof about what several ranks hold: summed once, gathered before use.

Terms: the *contributions* in a gradient are the ranks whose tasks made parts of it. A part has its
own rank's; a reduction joins those of its group, and a message carries its sender's.

Formal: each gradient a rank ends with has exactly the contributions of the ranks that it must be
the sum of, none of them twice: of all replicas of every device group that makes a part of it; no
block of a parameter is read but by its gather.
"""

from collections.abc import Sequence

from piper_dynamo.ir.program import REDUCTIONS, Instr, Op, RankProgram, where

_SUMMING = (Op.ACCUMULATE, Op.CAST)


def check_reductions(programs: Sequence[RankProgram]) -> list[str]:
    """Each gradient of several ranks' parts is the sum of exactly these, once."""
    if not any(program.contributors for program in programs):
        return []
    finder = _Contributions(programs)
    faults = []
    for program in programs:
        registers = dict(program.grads)
        for position, ranks in program.contributors:
            reg, want = registers[position], set(ranks)
            found = finder.of(program.rank, reg)
            if found == want:
                continue
            at = f"{last_write(program, reg)}: the gradient {reg!r}"
            if want - found:
                faults.append(
                    f"{at} is not reduced over ranks {sorted(want)}, which make parts of it: "
                    f"it has the contributions of {sorted(found)} without {sorted(want - found)}"
                )
            if found - want:
                faults.append(
                    f"{at} has the contributions of ranks {sorted(found - want)}, which it is not "
                    f"to be reduced over: these are {sorted(want)}"
                )
    return [*finder.faults, *faults]


def last_write(program: RankProgram, reg: str) -> str:
    """Where a register gets its last value, for a message."""
    found = [i for i, instr in enumerate(program.instrs) if reg in instr.writes()]
    return where(program, found[-1]) if found else f"rank {program.rank}"


class _Contributions:
    """The ranks whose contributions a register contains; found on demand, each register once."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self.faults: list[str] = []
        self._programs = {program.rank: program for program in programs}
        self._writers: dict[int, dict[str, list[Instr]]] = {}
        self._sent: dict[tuple[int, int, int], str] = {}
        self._issued: dict[tuple[object, int], dict[int, Instr]] = {}
        self._number: dict[int, dict[str, tuple[object, int]]] = {}
        self._known: dict[tuple[int, str], frozenset[int]] = {}
        for program in programs:
            writers: dict[str, list[Instr]] = {}
            numbers: dict[str, tuple[object, int]] = {}
            count: dict[object, int] = {}
            for instr in program.instrs:
                for reg in instr.writes():
                    writers.setdefault(reg, []).append(instr)
                if instr.op is Op.SEND:
                    self._sent[program.rank, instr.peer, instr.message] = instr.inputs[0]
                elif instr.group:
                    key = (instr.communicator, count.get(instr.communicator, 0))
                    count[instr.communicator] = key[1] + 1
                    numbers[instr.outputs[0]] = key
                    self._issued.setdefault(key, {})[program.rank] = instr
            self._writers[program.rank] = writers
            self._number[program.rank] = numbers

    def of(self, rank: int, reg: str) -> frozenset[int]:
        key = (rank, reg)
        if key not in self._known:
            self._known[key] = frozenset()  # what comes back here has been refused as a cycle
            self._known[key] = self._find(rank, reg)
        return self._known[key]

    def _find(self, rank: int, reg: str) -> frozenset[int]:
        writers = self._writers[rank].get(reg, [])
        if not writers:
            return frozenset()
        first = writers[0]
        match first.op:
            case Op.ACCUMULATE | Op.CAST:
                return self._sum(rank, reg, writers)
            case Op.ADD:
                return self._join(reg, [(rank, part) for part in first.inputs])
            case Op.WAIT if first.peer >= 0:
                return self.of(first.peer, self._sent[first.peer, rank, first.message])
            case Op.WAIT:
                return self._collective(rank, reg, first)
            case _:
                return frozenset({rank})

    def _sum(self, rank: int, reg: str, writers: Sequence[Instr]) -> frozenset[int]:
        """Parts of different tasks: each has the same ranks' contributions."""
        parts = [w.inputs[-1] if w.op in _SUMMING else w.task for w in writers]
        found = [
            self.of(rank, w.inputs[-1]) if w.op in _SUMMING else frozenset({rank}) for w in writers
        ]
        odd = next((i for i, one in enumerate(found) if one != found[0]), None)
        if odd is not None:
            self.faults.append(
                f"{last_write(self._programs[rank], reg)}: {reg!r} adds what is reduced and what "
                f"is not: {parts[0]!r} has the contributions of ranks {sorted(found[0])}, "
                f"{parts[odd]!r} of {sorted(found[odd])}"
            )
        return frozenset().union(*found)

    def _join(self, reg: str, parts: Sequence[tuple[int, str]]) -> frozenset[int]:
        """Parts of different ranks: none has another's contributions."""
        total: frozenset[int] = frozenset()
        for rank, part in parts:
            found = self.of(rank, part)
            if total & found:
                self.faults.append(
                    f"{last_write(self._programs[rank], part)}: {part!r} is reduced again into "
                    f"{reg!r}, which has the contributions of ranks {sorted(total & found)} already"
                )
            total |= found
        return total

    def _collective(self, rank: int, reg: str, wait: Instr) -> frozenset[int]:
        members = self._issued[self._number[rank][wait.inputs[0]]]
        index = wait.outputs.index(reg)
        start = members[rank]
        if start.op not in REDUCTIONS:
            return frozenset({rank})
        parts = [(r, members[r].inputs[index]) for r in start.group if r in members]
        return self._join(reg, parts)


def check_gathers(programs: Sequence[RankProgram]) -> list[str]:
    """A block is read by gathers over its group alone; what they give is freed in the step."""
    faults = []
    for program in programs:
        groups = dict(program.shards)
        blocks = {reg: groups[p] for reg, p in program.state if p in groups}
        gathering: dict[str, Instr] = {}
        whole: dict[str, Instr] = {}
        for index, instr in enumerate(program.instrs):
            if instr.op is Op.ALL_GATHER:
                gathering[instr.outputs[0]] = instr
            elif instr.op is Op.WAIT and instr.inputs[0] in gathering:
                whole.update(dict.fromkeys(instr.outputs, instr))
            elif instr.op is Op.FREE:
                for reg in instr.inputs:
                    whole.pop(reg, None)
            if instr.op is Op.CAST and instr.inputs[0] in blocks:
                blocks[instr.outputs[0]] = blocks[instr.inputs[0]]
                continue
            for reg in instr.reads() if instr.op is not Op.FREE else ():
                if reg not in blocks:
                    continue
                at = where(program, index)
                if instr.op is not Op.ALL_GATHER:
                    faults.append(
                        f"{at}: {reg!r} is a block of a parameter, read before its gather"
                    )
                elif instr.group != blocks[reg]:
                    faults.append(
                        f"{at}: {reg!r} is gathered over ranks {instr.group}, "
                        f"but its blocks are on {blocks[reg]}"
                    )
        faults += [
            f"{last_write(program, reg)}: {reg!r} is gathered ({instr.task}) and never freed"
            for reg, instr in whole.items()
            if reg != "_"
        ]
    return faults
