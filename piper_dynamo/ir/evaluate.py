"""The part of the proof about what is computed: tasks read, and ranks end with, what a step means.

Terms: a register holds a value (`meaning.py`) of some *owner*: a replica by its number, or, of rows
that experts got and of all that is made of them, the replicas whose rows they are and the rank's
part of the experts; a *total* is a sum of such, or a block of rows of one; a *play* is one run of
all programs, in which nothing is computed and every register gets its value's name.

Formal: in one play each input of each task is what the meaning names, of the owner whose task it
is; the loss and each gradient are the sum of exactly the parts that the meaning names, over exactly
the owners whose parts they are to be; each buffer and output is what it names, of its rank's
replica. One play stands for all that happens-before allows: a register is written once, and is not
changed while a message or a collective reads it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from piper_dynamo.ir.contributions import last_write
from piper_dynamo.ir.meaning import Meaning, Value, shown
from piper_dynamo.ir.program import COLLECTIVES, REDUCTIONS, Group, Instr, Op, RankProgram, where
from piper_dynamo.ir.spec import short

Owner: TypeAlias = Any  # int, or ("rows", replicas, part)
Named: TypeAlias = tuple[Value, Owner]
Groups: TypeAlias = Mapping[int, tuple[int, ...]]


class Total:
    """A sum of named values, or a block of rows of one; made in constant time, compared in it.

    `mark` adds up a random number of 128 bits per part, so that equal marks mean equal sums.
    """

    __slots__ = ("leaf", "left", "mark", "piece", "right")

    def __init__(
        self,
        mark: int,
        *,
        leaf: Named | None = None,
        left: "Total | None" = None,
        right: "Total | None" = None,
        piece: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.mark, self.leaf, self.left, self.right = mark, leaf, left, right
        self.piece = piece

    def parts(self) -> Iterator[Named]:
        """All parts, each as often as it is in the sum."""
        left: list[Total | None] = [self]
        while left:
            one = left.pop()
            if one is not None and one.leaf is not None:
                yield one.leaf
            elif one is not None:
                left += [one.right, one.left]

    def block(self, index: int, count: int) -> "Total":
        """One of `count` blocks of its rows."""
        piece = (*self.piece, (index, count))
        return Total(self.mark, leaf=self.leaf, left=self.left, right=self.right, piece=piece)


Held: TypeAlias = Named | Total


Meeting: TypeAlias = tuple[Group, int]  # a communicator's collective, by number
_UNKNOWN: Named = (("unknown",), None)
_BITS = 128
_MANY = 3  # parts that a message names, of those missing or too many


@dataclass(slots=True, kw_only=True)
class _Rank:
    """Where a rank is in the play, and what its registers hold."""

    program: RankProgram
    replica: int
    at: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    meetings: dict[str, tuple[Meeting, Instr]] = field(default_factory=dict)
    issued: dict[Group, int] = field(default_factory=dict)


def check_values(
    programs: Sequence[RankProgram], meaning: Meaning, replicas: Mapping[int, int]
) -> list[str]:
    """Play the programs and compare.

    Args:
        programs: Those of all ranks; messages and collectives match, and nothing deadlocks.
        meaning: What the step has to compute.
        replicas: Which replica each rank belongs to.
    """
    play = _Play(programs, meaning, replicas)
    play.run()
    return [*play.faults, *play.check_results(), *_check_holders(programs, meaning)]


class _Play:
    """All ranks, and what is under way between them."""

    def __init__(
        self, programs: Sequence[RankProgram], meaning: Meaning, replicas: Mapping[int, int]
    ) -> None:
        self.meaning, self.replicas = meaning, replicas
        self.num_replicas = len(set(replicas.values()))
        self.faults: list[str] = []
        self.sent: dict[tuple[int, int, int], Held] = {}
        self.given: dict[Meeting, dict[int, tuple[Held, ...]]] = {}
        self.totals: dict[tuple[Meeting, int], Total] = {}
        self.waiting: dict[object, list[int]] = {}
        self._marks: dict[Named, int] = {}
        self._draw = Random(0)
        self.ranks = {p.rank: _Rank(program=p, replica=replicas[p.rank]) for p in programs}
        for one in self.ranks.values():
            self._start(one)
        self._do: dict[Op, Callable[[_Rank, Instr], object]] = {
            Op.RUN: self._run,
            Op.SLICE: self._slice,
            Op.POST: lambda *_: None,
            Op.WAIT: self._wait,
            Op.SEND: self._send,
            Op.DRAIN: lambda *_: None,
            Op.ACCUMULATE: self._accumulate,
            Op.CAST: self._cast,
            Op.ADD: self._add,
            Op.LOSS: self._loss,
            Op.CONCAT: self._concat,
            Op.FREE: self._free,
            **dict.fromkeys(COLLECTIVES, self._give),
        }

    def _start(self, one: _Rank) -> None:
        program, owner = one.program, one.replica
        experts, shards = dict(program.experts), dict(program.shards)
        for reg, position in program.state:
            value: Value = ("arg", position)
            for kind, groups in (("own", experts), ("block", shards)):
                group = groups.get(position)
                if group is not None and program.rank in group:
                    of = position if kind == "own" else value
                    value = (kind, of, group.index(program.rank), len(group))
            one.held[reg] = value, owner
        one.held.update((reg, (("arg", position), owner)) for reg, position in program.data)
        one.held.update((reg, (("weight", reg), owner)) for reg in program.weights)
        one.held.update((reg, (("tangent", index), owner)) for index, reg in program.tangents)

    def run(self) -> None:
        """Let every rank go on until it waits for what is not there yet."""
        ready = list(self.ranks)
        while ready:
            one = self.ranks[ready.pop()]
            instrs = one.program.instrs
            while one.at < len(instrs):
                instr = instrs[one.at]
                missing = self._do[instr.op](one, instr)
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(one.program.rank)
                    break
                one.at += 1
                if instr.op is Op.SEND or instr.op in COLLECTIVES:
                    ready += self._woken(one, instr)

    def _woken(self, one: _Rank, instr: Instr) -> list[int]:
        if instr.op is Op.SEND:
            return self.waiting.pop((one.program.rank, instr.peer, instr.message), [])
        meeting, _ = one.meetings[instr.outputs[0]]
        complete = len(self.given[meeting]) == len(instr.group)
        return self.waiting.pop(meeting, []) if complete else []

    def _get(self, one: _Rank, reg: str) -> Held:
        return one.held.get(reg, _UNKNOWN)

    def _fault(self, one: _Rank, text: str) -> None:
        self.faults.append(f"{where(one.program, one.at)}: {text}")

    # Instructions. Each returns what it waits for, if that is not there.

    def _run(self, one: _Rank, instr: Instr) -> None:
        task = self.meaning.tasks.get(instr.task)
        if task is None:
            self._fault(one, "the step has no such task")
            return
        held = [self._get(one, reg) for reg in instr.inputs]
        bundle = self._get(one, instr.bundle_in) if instr.bundle_in else None
        owner: Owner = one.replica
        for have in (*held, bundle):  # a task on other replicas' rows is theirs altogether
            if type(have) is tuple and type(have[1]) is tuple:
                owner = have[1]
                break
        if len(held) != len(task.inputs):
            self._fault(one, f"it has {len(held)} inputs, expected {len(task.inputs)}")
        for index, (have, want) in enumerate(zip(held, task.inputs, strict=False)):
            if have != (want, owner) and not self._is_state(one, have, want, owner):
                expected = self._shown((want, owner))
                self._fault(one, f"its input {index} is {self._shown(have)}, expected {expected}")
        if bundle != (None if task.bundle is None else (task.bundle, owner)):
            found = "nothing" if bundle is None else self._shown(bundle)
            expected = "nothing" if task.bundle is None else self._shown((task.bundle, owner))
            self._fault(one, f"its bundle is {found}, expected {expected}")
        if (instr.target, instr.seed) != (task.target, task.seed):
            self._fault(
                one,
                f"it runs {instr.target} with seed {instr.seed}, "
                f"expected {task.target} with seed {task.seed}",
            )
        if instr.num_primals != task.num_primals:
            self._fault(one, f"{instr.num_primals} inputs are primals, not {task.num_primals}")
        for slot, reg in enumerate(instr.outputs):
            made: Named = (("task", instr.task, slot), owner)
            one.held[reg] = (
                self._sum(one, self._get(one, reg), made) if slot in instr.adds else made
            )
        if instr.bundle_in:
            one.held[instr.bundle_in] = ("emptied", instr.bundle_in), None
        if instr.bundle_out:
            one.held[instr.bundle_out] = ("bundle", instr.task), owner

    def _is_state(self, one: _Rank, have: Held, want: Value, owner: Owner) -> bool:
        """Whether a task on others' rows reads its rank's own experts, or what all hold whole."""
        if type(owner) is not tuple or isinstance(have, Total) or want[0] not in ("arg", "cast"):
            return False
        _, replicas, part = owner
        own = _of_part(want, part, len(replicas))
        return have in ((own, one.replica), (want, one.replica))

    def _slice(self, one: _Rank, instr: Instr) -> None:
        of = self._get(one, instr.inputs[0])
        if isinstance(of, Total):
            of = ("total", of.mark), one.replica
        one.held[instr.outputs[0]] = (("slice", of[0], instr.dim, instr.part, instr.parts), of[1])

    def _send(self, one: _Rank, instr: Instr) -> None:
        message = (one.program.rank, instr.peer, instr.message)
        self.sent[message] = self._get(one, instr.inputs[0])

    def _give(self, one: _Rank, instr: Instr) -> None:
        group = instr.communicator
        meeting = (group, one.issued.get(group, 0))
        one.issued[group] = meeting[1] + 1
        one.meetings[instr.outputs[0]] = meeting, instr
        values = tuple(self._get(one, reg) for reg in instr.inputs)
        self.given.setdefault(meeting, {})[one.program.rank] = values

    def _wait(self, one: _Rank, instr: Instr) -> object:
        if instr.peer >= 0:
            message = (instr.peer, one.program.rank, instr.message)
            if message not in self.sent:
                return message
            one.held[instr.outputs[0]] = self.sent[message]
            return None
        meeting, start = one.meetings[instr.inputs[0]]
        if len(self.given[meeting]) < len(start.group):
            return meeting
        results = self._results(one, start, meeting)
        one.held.update(zip(instr.outputs, results, strict=False))
        return None

    def _accumulate(self, one: _Rank, instr: Instr) -> None:
        *before, part = (self._get(one, reg) for reg in instr.inputs)
        total = self._total(part)
        one.held[instr.outputs[0]] = self._sum(one, before[0], total) if before else total

    def _cast(self, one: _Rank, instr: Instr) -> None:
        """A parameter, or what a rank has of it, is another value then; a gradient is not."""
        value, spec = self._get(one, instr.inputs[0]), instr.spec
        if type(value) is tuple and value[0][0] in ("arg", "own", "block") and spec is not None:
            value = _as_cast(value[0], short(spec.dtype)), value[1]
        else:
            value = self._total(value)
        one.held[instr.outputs[0]] = value

    def _add(self, one: _Rank, instr: Instr) -> None:
        total = self._total(self._get(one, instr.inputs[0]))
        for reg in instr.inputs[1:]:
            total = self._sum(one, total, self._get(one, reg))
        one.held[instr.outputs[0]] = total

    def _loss(self, one: _Rank, instr: Instr) -> None:
        parts = tuple(self._key(self._get(one, reg), one.replica) for reg in instr.inputs)
        one.held[instr.outputs[0]] = ("loss", parts), one.replica

    def _concat(self, one: _Rank, instr: Instr) -> None:
        parts = tuple(self._key(self._get(one, reg), one.replica) for reg in instr.inputs)
        one.held[instr.outputs[0]] = ("concat", instr.dim, parts), one.replica

    def _free(self, one: _Rank, instr: Instr) -> None:
        for reg in instr.inputs:
            one.held.pop(reg, None)

    # Collectives.

    def _results(self, one: _Rank, start: Instr, meeting: Meeting) -> list[Held]:
        if start.op in REDUCTIONS:
            return [self._reduced(one, start, meeting, index) for index in range(len(start.inputs))]
        if start.op is Op.ALL_GATHER:
            return [self._whole(one, start, meeting, index) for index in range(len(start.inputs))]
        return self._exchanged(one, start, meeting)

    def _reduced(self, one: _Rank, start: Instr, meeting: Meeting, index: int) -> Total:
        total = self.totals.get((meeting, index))
        if total is None:
            first, *others = (self.given[meeting][rank][index] for rank in start.group)
            total = self._total(first)
            for other in others:
                total = self._sum(one, total, other)
            self.totals[meeting, index] = total
        if start.op is Op.ALL_REDUCE:
            return total
        return total.block(start.group.index(one.program.rank), len(start.group))

    def _whole(self, one: _Rank, start: Instr, meeting: Meeting, index: int) -> Held:
        """A parameter, of its blocks in order."""
        blocks = [self.given[meeting][rank][index] for rank in start.group]
        first = blocks[0]
        if isinstance(first, Total) or first[0][0] != "block":
            self._fault(one, f"{self._shown(first)} is no block of a parameter")
            return _UNKNOWN
        of = first[0][1]
        for place, (rank, block) in enumerate(zip(start.group, blocks, strict=True)):
            want = (("block", of, place, len(blocks)), self.replicas[rank])
            if block != want:
                self._fault(
                    one,
                    f"rank {rank} gives {self._shown(block)}, expected {self._shown(want)}",
                )
        return of, one.replica

    def _exchanged(self, one: _Rank, start: Instr, meeting: Meeting) -> list[Held]:
        """Rows, or their counts, at experts; or back at their replicas."""
        if start.op is Op.ALL_TO_ALL:
            return [_UNKNOWN] * len(start.inputs)
        rank, group = one.program.rank, start.group
        theirs = tuple(self.replicas[member] for member in group)
        experts = {member: ("rows", theirs, place) for place, member in enumerate(group)}
        back = start.op is Op.UNEXCHANGE
        mine = self.given[meeting][rank][0]
        value: Value = ("total", mine.mark) if isinstance(mine, Total) else mine[0]
        for member in group if rank == group[0] else ():
            want = value, experts[member] if back else self.replicas[member]
            have = self.given[meeting][member][0]
            if have != want:
                self._fault(
                    one,
                    f"rank {member} gives {self._shown(have)}, expected {self._shown(want)}",
                )
        owner = one.replica if back else experts[rank]
        routing = self.meaning.routing.get(value)
        if routing is None:
            self._fault(one, f"{self._shown(mine)} is nothing that experts get or give")
            routing = ("", None)
        splits: Named = (("splits", *routing), experts[rank])
        if start.op is Op.EXCHANGE_COUNTS:
            return [(value, owner), splits]
        if len(start.inputs) > 1 and self.given[meeting][rank][1] != splits:
            found = self._shown(self.given[meeting][rank][1])
            self._fault(one, f"rows travel by {found}, expected {self._shown(splits)}")
        return [(value, owner)]

    # Sums.

    def _mark(self, value: Named) -> int:
        found = self._marks.get(value)
        if found is None:
            found = self._marks[value] = self._draw.getrandbits(_BITS)
        return found

    def _total(self, value: Held) -> Total:
        return value if isinstance(value, Total) else Total(self._mark(value), leaf=value)

    def _sum(self, one: _Rank, first: Held, second: Held) -> Total:
        a, b = self._total(first), self._total(second)
        if a.piece != b.piece:
            self._fault(one, f"adds {self._shown(b)} to {self._shown(a)}: other rows of gradients")
        return Total((a.mark + b.mark) % 2**_BITS, left=a, right=b, piece=a.piece)

    def _sum_of(self, parts: Sequence[Named]) -> Total:
        total = Total(self._mark(parts[0]), leaf=parts[0])
        for part in parts[1:]:
            leaf = Total(self._mark(part), leaf=part)
            total = Total((total.mark + leaf.mark) % 2**_BITS, left=total, right=leaf)
        return total

    def _key(self, held: Held, owner: Owner) -> Value:
        """What stands for a value in one that is made of it on the same replica."""
        if isinstance(held, Total):
            return ("total", held.mark, held.piece)
        return held[0] if held[1] == owner else ("elsewhere", *held)

    # What the step means.

    def check_results(self) -> list[str]:
        """Loss, outputs, gradients and buffers of every rank."""
        faults = []
        for one in self.ranks.values():
            for what, reg, want in self._wanted(one):
                have = self._get(one, reg)
                if not _same(have, want):
                    at = last_write(one.program, reg)
                    faults.append(f"{at}: {what} {reg!r} {self._difference(have, want)}")
        return faults

    def _wanted(self, one: _Rank) -> Iterator[tuple[str, str, Held]]:
        meaning, program, replica = self.meaning, one.program, one.replica
        if program.loss and meaning.loss is not None:
            value = meaning.loss
            yield (
                "the loss",
                program.loss,
                self._sum_of([(value, owner) for owner in range(self.num_replicas)]),
            )
        for index, reg in program.outputs:
            yield "the output", reg, self._of_one(meaning.outputs.get(index), replica)
        for position, reg in program.buffers:
            yield "the buffer", reg, self._of_one(meaning.buffers.get(position), replica)
        experts, shards = dict(program.experts), dict(program.shards)
        for position, reg in program.grads:
            parts = meaning.grads.get(position, ())
            if position not in meaning.parameters:
                total = self._parts(parts, replica)
            else:
                owners = self._owners(one, position, experts.get(position))
                total = self._sum_of([(part, owner) for part in parts for owner in owners])
                group = shards.get(position)
                if group is not None and position not in meaning.kept:
                    total = total.block(group.index(program.rank), len(group))
            yield "the gradient", reg, total

    def _owners(self, one: _Rank, position: int, group: tuple[int, ...] | None) -> list[Owner]:
        """Whose parts a parameter's gradient is the sum of: all replicas', by groups of experts."""
        kept = position in self.meaning.kept
        if group is None:
            return [one.replica] if kept else list(range(self.num_replicas))
        place = group.index(one.program.rank)
        own = [tuple(self.replicas[rank] for rank in group)]
        groups = own if kept else self._expert_groups(position)
        return [("rows", replicas, place) for replicas in groups]

    def _expert_groups(self, position: int) -> list[tuple[int, ...]]:
        """The groups of replicas that share one copy of the experts each."""
        found: dict[tuple[int, ...], None] = {}
        for other in self.ranks.values():
            group = dict(other.program.experts).get(position)
            if group is not None:
                found[tuple(self.replicas[rank] for rank in group)] = None
        return list(found)

    def _of_one(self, value: Value | None, replica: int) -> Held:
        if value is None:
            return _UNKNOWN
        if value[0] == "sum":
            return self._sum_of([(part, replica) for part in value[1]])
        if value[0] == "concat":
            parts = (self._of_one(part, replica) for part in value[2])
            value = (*value[:2], tuple(self._key(part, replica) for part in parts))
        return value, replica

    def _parts(self, parts: Sequence[Value], replica: int) -> Held:
        """A gradient of an input: its parts' sum, or the one that joins them."""
        if len(parts) == 1:
            return self._of_one(parts[0], replica)
        return self._sum_of([(part, replica) for part in parts])

    # Messages.

    def _shown(self, held: Held) -> str:
        names = self.meaning.names
        if isinstance(held, Total):
            parts = [self._shown(part) for _, part in zip(range(_MANY), held.parts(), strict=False)]
            more = " + ..." if sum(1 for _ in held.parts()) > _MANY else ""
            rows = "".join(f", rows {i} of {n}" for i, n in held.piece)
            return f"the sum {' + '.join(parts)}{more}{rows}"
        value, owner = held
        text = shown(value, names)
        if type(owner) is tuple:
            return f"{text} at part {owner[2]} of the experts of replicas {owner[1]}"
        return f"{text} of replica {owner}" if owner is not None and self.num_replicas > 1 else text

    def _difference(self, have: Held, want: Held) -> str:
        if not isinstance(want, Total) or have is _UNKNOWN:
            return f"is {self._shown(have)}, expected {self._shown(want)}"
        found = Total(0, leaf=have) if not isinstance(have, Total) else have
        mine, theirs = Counter(found.parts()), Counter(want.parts())
        texts = []
        if found.piece != want.piece:
            texts.append(f"has rows {found.piece}, expected {want.piece}")
        for verb, parts in (("lacks", theirs - mine), ("has too much", mine - theirs)):
            several = list(parts.elements())
            if several:
                more = f" and {len(several) - _MANY} more" if len(several) > _MANY else ""
                texts.append(f"{verb} {', '.join(map(self._shown, several[:_MANY]))}{more}")
        return "; ".join(texts)


def _as_cast(value: Value, dtype: str) -> Value:
    """A parameter in another dtype; a block of it is the block of the cast one."""
    if value[0] == "block":
        return ("block", _as_cast(value[1], dtype), *value[2:])
    return ("cast", value, dtype)


def _of_part(value: Value, part: int, count: int) -> Value:
    """What a rank has of experts' parameters, of what all ranks together have."""
    if value[0] == "cast":
        return ("cast", _of_part(value[1], part, count), value[2])
    return ("own", value[1], part, count)


def _same(have: Held, want: Held) -> bool:
    """Equal values; a sum of one part is that part."""
    if isinstance(have, Total) and isinstance(want, Total):
        return have.mark == want.mark and have.piece == want.piece
    if isinstance(want, Total):
        return want.leaf == have and not want.piece
    if isinstance(have, Total):
        return have.leaf == want and not have.piece
    return have == want


def _check_holders(programs: Sequence[RankProgram], meaning: Meaning) -> list[str]:
    """All blocks of a parameter are somewhere, and who has a parameter ends with its gradient."""
    faults = []
    placed: set[int] = set()
    for program in programs:
        held = {position for _, position in program.state}
        placed |= held
        given = Counter(position for position, _ in program.grads)
        faults += [
            f"rank {program.rank}: {meaning.names[p]!r} is held, but its gradient is not given"
            for p in sorted(held & set(meaning.grads) - set(given))
        ]
        faults += [
            f"rank {program.rank}: the gradient of {meaning.names[p]!r} is given {count} times"
            for p, count in sorted(given.items())
            if count > 1
        ]
    shards = {p.rank: dict(p.shards) for p in programs}
    experts = {p.rank: dict(p.experts) for p in programs}
    for layouts in (shards, experts):
        faults += [
            f"rank {program.rank}: {meaning.names[position]!r} is in blocks on ranks {group}, "
            f"but rank {rank} holds none of these"
            for program in programs
            for position, group in layouts[program.rank].items()
            for rank in group
            if (theirs := layouts[rank].get(position)) is not group and theirs != group
        ]
    faults += [
        f"parameter {meaning.names[position]!r} has a gradient, but no rank holds it"
        for position in sorted(set(meaning.grads) & meaning.parameters - placed)
    ]
    return faults
