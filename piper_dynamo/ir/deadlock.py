"""The part of the proof about deadlocks, and the picture of one.

Nodes of the happens-before graph: the issue and the completion of every instruction. Edges: host
order on a rank (a host wait, its own or a message's, holds back every later issue), completion of a
message only after both its ends are issued and after the messages before it in its channel,
completion of a collective only after every member has issued it. Data is host order, since a
register is written before it is read.

Formal: acyclic(happens-before)  =>  no run of these programs deadlocks, given asynchronous sends
and FIFO channels.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from piper_dynamo.errors import format_error
from piper_dynamo.ir.cycle import find_cycle
from piper_dynamo.ir.matching import Channel
from piper_dynamo.ir.program import COLLECTIVES, Group, Instr, Op, RankProgram, where


@dataclass(frozen=True, slots=True)
class Point:
    """The issue or the completion of an instruction."""

    rank: int
    index: int
    done: bool


def find_deadlock(
    programs: Sequence[RankProgram], unmatched: Collection[Channel | Group] = ()
) -> str:
    """What waits for what in a shortest cycle, drawn; nothing where there is none.

    Args:
        programs: Those of all ranks.
        unmatched: Channels and communicators whose ends do not match: of these it is not known who
            waits for whom, so they make no cycle.
    """
    by_rank = {program.rank: program for program in programs}
    cycle = _HappensBefore(by_rank, unmatched).cycle()
    if not cycle:
        return ""
    shown = ", ".join(f"rank {rank}" for rank in sorted({point.rank for point in cycle}))
    return format_error(
        f"the plan deadlocks: {shown} wait for one another",
        {"cycle": _drawn(by_rank, cycle)},
        hint="change the order of one of these tasks",
    )


def _drawn(programs: Mapping[int, RankProgram], cycle: list[Point]) -> str:
    """Each instruction needs the one below it first, the last one the first.

    ┌> rank 1 #10 send B.PP1.MB0 on stream 'send' [model.py:8]
    │    comes after, on its rank (8 instructions later),
    │  rank 1 #2 wait F.PP0.MB0 on stream 'recv' [model.py:8]
    │    waits for the end of
    │  rank 1 #0 post F.PP0.MB0 on stream 'recv' [model.py:8]
    │    needs its other end,
    └─ rank 0 #7 send F.PP0.MB0 on stream 'send' [model.py:8]
         ...
    """
    backwards = _turns(programs, cycle[::-1])
    lines = []
    for place, point in enumerate(backwards):
        after = backwards[(place + 1) % len(backwards)]
        last = place == len(backwards) - 1
        corner = "┌>" if place == 0 else "└─" if last else "│ "
        lines.append(f"{corner} {where(programs[point.rank], point.index)}")
        reason = _reason(programs, point, after)
        end = f"{reason.rstrip(',')}, the first" if last else reason
        lines.append(f"{' ' if last else '│'}    {end}")
    return "\n".join(lines)


def _reason(programs: Mapping[int, RankProgram], later: Point, before: Point) -> str:
    if later.rank == before.rank:
        instr = programs[later.rank].instrs[later.index]
        origin = programs[before.rank].instrs[before.index]
        if later.index > before.index and _waits_for(instr, origin):
            return "waits for the end of"
        later_by = later.index - before.index
        return f"comes after, on its rank ({later_by} instruction{'s' * (later_by > 1)} later),"
    if programs[later.rank].instrs[later.index].group:
        return f"needs rank {before.rank} to start it, too,"
    return "needs its other end,"


def _turns(programs: Mapping[int, RankProgram], backwards: list[Point]) -> list[Point]:
    """Without the instructions that only lie between two others on their rank."""

    def follows(later: Point, before: Point) -> bool:
        instrs = programs[later.rank].instrs
        same = later.rank == before.rank and later.index > before.index
        return same and not _waits_for(instrs[later.index], instrs[before.index])

    size = len(backwards)
    return [
        point
        for i, point in enumerate(backwards)
        if not (follows(backwards[i - 1], point) and follows(point, backwards[(i + 1) % size]))
    ]


def _waits_for(instr: Instr, origin: Instr) -> bool:
    if instr.op is Op.DRAIN:
        return origin.op is Op.SEND
    return instr.op is Op.WAIT and origin.outputs[:1] == instr.inputs


class _HappensBefore:
    """The graph; a vertex per issue, per completion, and per collective that all have issued."""

    def __init__(
        self, programs: Mapping[int, RankProgram], unmatched: Collection[Channel | Group]
    ) -> None:
        self.programs = programs
        self.unmatched = unmatched
        self.start: dict[int, int] = {}
        count = 0
        for program in programs.values():
            self.start[program.rank] = count
            count += 2 * len(program.instrs)
        self.num_points = count
        self.successors: list[list[int]] = [[] for _ in range(count)]
        self.sends: dict[tuple[int, int, int], int] = {}  # the issue
        self.posts: dict[tuple[int, int, int], int] = {}
        self.groups: dict[tuple[Group, int], list[int]] = {}
        for program in programs.values():
            self._host_order(program)
        self._messages()
        self._collectives()

    def _host_order(self, program: RankProgram) -> None:
        """An instruction is issued after the one before it is, or after its end if that waits."""
        rank, successors = program.rank, self.successors
        issued: dict[Group, int] = {}
        handles: dict[str, int] = {}
        sent: dict[tuple[int, int], int] = {}
        point = self.start[rank]
        last = point + 2 * (len(program.instrs) - 1)
        for instr in program.instrs:
            op = instr.op
            starts = op is Op.SEND or op is Op.POST or op in COLLECTIVES
            successors[point].append(point + 1)
            if point < last:
                successors[point if starts else point + 1].append(point + 2)
            if op is Op.SEND:
                self.sends[rank, instr.peer, instr.message] = point
                sent[instr.peer, instr.message] = point
            elif op is Op.POST:
                self.posts[instr.peer, rank, instr.message] = point
                handles[instr.outputs[0]] = point
            elif op is Op.WAIT:
                self._after(handles.get(instr.inputs[0]), point)
            elif op is Op.DRAIN:
                self._after(sent.get((instr.peer, instr.message)), point)
            elif starts:
                group = instr.communicator
                number = issued.get(group, 0)
                issued[group] = number + 1
                self.groups.setdefault((group, number), []).append(point)
                handles[instr.outputs[0]] = point
            point += 2

    def _after(self, origin: int | None, waiting: int) -> None:
        """A host wait ends after what it waits for; one of nothing is another check's fault."""
        if origin is not None:
            self.successors[origin + 1].append(waiting + 1)

    def _messages(self) -> None:
        """A message ends after both ends are issued.

        That it ends after the one before it says no more: both ends of that are issued before.
        """
        for key, sent in self.sends.items():
            source, target, _ = key
            if (source, target) in self.unmatched:
                continue
            posted = self.posts[key]
            self.successors[sent].append(posted + 1)
            self.successors[posted].append(sent + 1)

    def _collectives(self) -> None:
        """A collective ends on each member after all have issued it."""
        for (communicator, _), members in self.groups.items():
            if communicator in self.unmatched:
                continue
            all_here = len(self.successors)
            self.successors.append([point + 1 for point in members])
            for point in members:
                self.successors[point].append(all_here)

    def cycle(self) -> list[Point]:
        """The points of a shortest cycle, one per instruction."""
        found = [self._point(v) for v in find_cycle(self.successors) if v < self.num_points]
        return [
            p
            for i, p in enumerate(found)
            if (p.rank, p.index) != (found[i - 1].rank, found[i - 1].index)
        ]

    def _point(self, vertex: int) -> Point:
        here = (r for r, start in self.start.items() if start <= vertex and self._has(r))
        rank = max(here, key=self.start.__getitem__)
        index, done = divmod(vertex - self.start[rank], 2)
        return Point(rank, index, done=bool(done))

    def _has(self, rank: int) -> bool:
        return bool(self.programs[rank].instrs)
