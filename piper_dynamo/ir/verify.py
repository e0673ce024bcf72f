"""The proof that a job's rank programs are safe, on the programs that run.

Nodes of the happens-before graph: the issue and the completion of every instruction. Edges: host
order on a rank (a host wait, its own or a message's, holds back every later issue), data,
completion of a message only after both its ends are issued and after the messages before it in its
channel, completion of a collective only after every member has issued it.

Formal: acyclic(happens-before)  =>  no run of these programs deadlocks, given asynchronous sends
and FIFO channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from piper_dynamo.errors import PiperPlanError, format_error, join_faults
from piper_dynamo.ir.contributions import check_gathers, check_reductions
from piper_dynamo.ir.cycle import find_cycle
from piper_dynamo.ir.exchanges import check_exchanges
from piper_dynamo.ir.program import COLLECTIVES, REDUCTIONS, Group, Instr, Op, RankProgram


def verify(programs: Sequence[RankProgram]) -> None:
    """Prove the programs of all ranks safe together.

    Raises:
        PiperPlanError: Lists every fault: messages that do not match, registers read before
            they are written or after they are freed, collectives in different orders, gradients not
            given, and, if these hold, a deadlock's cycle.
    """
    faults = [
        *_check_registers(programs),
        *_check_sums(programs),
        *_check_messages(programs),
        *_check_collectives(programs),
    ]
    if not faults:  # these follow values through messages and collectives that match
        faults = [
            *check_reductions(programs),
            *check_gathers(programs),
            *check_exchanges(programs),
        ]
    if faults:
        raise PiperPlanError(join_faults("the plan is unsafe", faults))
    cycle = _HappensBefore(programs).cycle()
    if cycle:
        ranks = sorted({point.rank for point in cycle})
        shown = ", ".join(f"rank {rank}" for rank in ranks)
        raise PiperPlanError(
            format_error(
                f"the plan deadlocks: {shown} wait for one another",
                {
                    "cycle": "\n".join(
                        _arrow(programs, a, b)
                        for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)
                    )
                },
                hint="change the order of one of these tasks",
            )
        )


def where(programs: Sequence[RankProgram], rank: int, index: int) -> str:
    """An instruction for a message: rank, position, task, the user's line."""
    instr = programs[rank].instrs[index]
    line = f" [{instr.where}]" if instr.where else ""
    return f"rank {rank} #{index} {instr.op} {instr.task}{line}"


def _check_registers(programs: Sequence[RankProgram]) -> list[str]:
    """Reads between write and free, every result written, nothing but sums written twice."""
    faults = []
    for program in programs:
        alive = set(program.sources())
        for index, instr in enumerate(program.instrs):
            for reg in instr.reads():
                if reg not in alive:
                    faults.append(
                        f"{where(programs, program.rank, index)}: "
                        f"{reg!r} is read before it is written, or after its free"
                    )
            if instr.op is Op.FREE:
                alive -= set(instr.inputs)
                continue
            for reg in instr.writes():
                if reg in alive and reg != "_" and reg not in instr.sums:
                    faults.append(
                        f"{where(programs, program.rank, index)}: {reg!r} is written twice"
                    )
                alive.add(reg)
        missing = sorted(program.results() - alive)
        if missing:
            faults.append(f"rank {program.rank}: results never written: {', '.join(missing)}")
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
                    at = where(programs, program.rank, index)
                    faults.append(f"{at}: {reg!r} is added or reduced here, but read elsewhere")
            for reg in instr.writes() if instr.op is not Op.FREE else ():
                if reg not in readers and reg not in results and reg != "_":
                    at = where(programs, program.rank, index)
                    faults.append(f"{at}: {reg!r} is made and never used")
    return faults


def _check_messages(programs: Sequence[RankProgram]) -> list[str]:
    """Each message is sent, posted, waited for and drained once, with one spec, in order."""
    faults = []
    by_op: dict[Op, dict[tuple[int, int], list[tuple[int, int]]]] = {
        op: {} for op in (Op.SEND, Op.POST, Op.WAIT, Op.DRAIN)
    }
    for program in programs:
        for index, instr in enumerate(program.instrs):
            if instr.op in by_op and instr.peer >= 0:
                outward = instr.op in (Op.SEND, Op.DRAIN)
                channel = (program.rank, instr.peer) if outward else (instr.peer, program.rank)
                by_op[instr.op].setdefault(channel, []).append((instr.message, index))
                if instr.peer == program.rank or not 0 <= instr.peer < len(programs):
                    faults.append(
                        f"{where(programs, program.rank, index)}: "
                        f"rank {instr.peer} cannot be its peer"
                    )
    channels = sorted({channel for found in by_op.values() for channel in found})
    for channel in channels:
        source, target = channel
        numbers = {op: [m for m, _ in by_op[op].get(channel, [])] for op in by_op}
        count = len(numbers[Op.SEND])
        for op in (Op.SEND, Op.POST):
            if numbers[op] != list(range(count)):
                faults.append(
                    f"channel rank {source} -> rank {target}: {op} has messages {numbers[op]}, "
                    f"expected 0-{count - 1} in order"
                )
        for op in (Op.WAIT, Op.DRAIN):
            if sorted(numbers[op]) != list(range(count)):
                faults.append(
                    f"channel rank {source} -> rank {target}: {op} has messages "
                    f"{sorted(numbers[op])}, expected each of 0-{count - 1} once"
                )
        if faults:
            continue
        for (message, i), (_, j) in zip(
            by_op[Op.SEND][channel], by_op[Op.POST][channel], strict=True
        ):
            sent, posted = programs[source].instrs[i], programs[target].instrs[j]
            if _wire(sent) != _wire(posted) or sent.task != posted.task:
                faults.append(
                    f"message {message} from rank {source} to rank {target} differs: "
                    f"sent {sent.task} {sent.spec}, "
                    f"expected {posted.task} {posted.spec}"
                )
    return faults


def _wire(instr: Instr) -> tuple[object, ...]:
    return tuple((s.shape, s.dtype) for s in (instr.spec, *instr.specs) if s is not None)


def _check_collectives(programs: Sequence[RankProgram]) -> list[str]:
    """Per group, every member issues the same collectives in the same order."""
    faults = []
    issued: dict[Group, dict[int, list[Instr]]] = {}
    for program in programs:
        for index, instr in enumerate(program.instrs):
            if instr.op in COLLECTIVES:
                if program.rank not in instr.group:
                    faults.append(
                        f"{where(programs, program.rank, index)}: is not in its group {instr.group}"
                    )
                issued.setdefault(instr.communicator, {}).setdefault(program.rank, []).append(instr)
    for (stream, group), found in issued.items():
        lists = {rank: [(i.op, i.task, _wire(i)) for i in found.get(rank, [])] for rank in group}
        first = lists[group[0]]
        for rank, mine in lists.items():
            if mine != first:
                step = next(
                    (k for k, (a, b) in enumerate(zip(first, mine, strict=False)) if a != b),
                    min(len(first), len(mine)),
                )
                faults.append(
                    f"group {group} on stream {stream!r}: collective {step} differs "
                    f"between rank {group[0]} "
                    f"({_item(first, step)}) and rank {rank} ({_item(mine, step)})"
                )
    return faults


def _item(items: list[tuple[Op, str, tuple[object, ...]]], index: int) -> str:
    return f"{items[index][0]} {items[index][1]}" if index < len(items) else "none left"


@dataclass(frozen=True, slots=True)
class Point:
    """The issue or the completion of an instruction."""

    rank: int
    index: int
    done: bool


class _HappensBefore:
    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self.points: list[Point] = []
        self.start: list[int] = []
        for program in programs:
            self.start.append(len(self.points))
            for index in range(len(program.instrs)):
                self.points += [
                    Point(program.rank, index, done=False),
                    Point(program.rank, index, done=True),
                ]
        self.successors: list[list[int]] = [[] for _ in self.points]
        self.sends: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.posts: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.groups: dict[tuple[Group, int], list[tuple[int, int]]] = {}
        self.handles: dict[tuple[int, str], tuple[int, int]] = {}
        for program in programs:
            self._host_order(program)
        self._messages()
        self._waits(programs)

    def _host_order(self, program: RankProgram) -> None:
        """An instruction is issued after the one before it is, or after its end if that waits."""
        rank = program.rank
        issued: dict[Group, int] = {}
        for index, instr in enumerate(program.instrs):
            self.edge(self.at(rank, index), self.at(rank, index, done=True))
            starts = instr.op in (Op.SEND, Op.POST) or instr.op in COLLECTIVES
            if index + 1 < len(program.instrs):
                self.edge(self.at(rank, index, done=not starts), self.at(rank, index + 1))
            if instr.op is Op.SEND:
                self.sends[rank, instr.peer, instr.message] = (rank, index)
            elif instr.op is Op.POST:
                self.posts[instr.peer, rank, instr.message] = (rank, index)
                self.handles[rank, instr.outputs[0]] = (rank, index)
            elif instr.op in COLLECTIVES:
                group = instr.communicator
                number = issued.get(group, 0)
                issued[group] = number + 1
                self.groups.setdefault((group, number), []).append((rank, index))
                self.handles[rank, instr.outputs[0]] = (rank, index)

    def _messages(self) -> None:
        """A message ends after both ends are issued and after the one before it."""
        for key, sent in self.sends.items():
            posted = self.posts[key]
            self.edge(self.at(*sent), self.at(*posted, done=True))
            self.edge(self.at(*posted), self.at(*sent, done=True))
            source, target, message = key
            if message:
                before = (source, target, message - 1)
                for end, ends in ((sent, self.sends), (posted, self.posts)):
                    self.edge(self.at(*ends[before], done=True), self.at(*end, done=True))
        for members in self.groups.values():
            for one in members:
                for other in members:
                    if one != other:
                        self.edge(self.at(*one), self.at(*other, done=True))

    def _waits(self, programs: Sequence[RankProgram]) -> None:
        for program in programs:
            for index, instr in enumerate(program.instrs):
                if instr.op is Op.WAIT:
                    origin = self.handles[program.rank, instr.inputs[0]]
                elif instr.op is Op.DRAIN:
                    origin = self.sends[program.rank, instr.peer, instr.message]
                else:
                    continue
                self.edge(self.at(*origin, done=True), self.at(program.rank, index, done=True))

    def at(self, rank: int, index: int, *, done: bool = False) -> int:
        return self.start[rank] + 2 * index + int(done)

    def edge(self, before: int, after: int) -> None:
        self.successors[before].append(after)

    def cycle(self) -> list[Point]:
        """The points of a shortest cycle, one per instruction."""
        found = [self.points[v] for v in find_cycle(self.successors)]
        return [
            p
            for i, p in enumerate(found)
            if (p.rank, p.index) != (found[i - 1].rank, found[i - 1].index)
        ]


def _arrow(programs: Sequence[RankProgram], before: Point, after: Point) -> str:
    waiting = where(programs, after.rank, after.index)
    return f"{waiting}  waits for  {where(programs, before.rank, before.index)}"
