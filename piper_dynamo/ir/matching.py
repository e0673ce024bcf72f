"""The part of the proof about what ranks say to one another: both ends of it are there, and agree.

Terms: a *channel* is the ordered messages from one rank to another.

Formal: the sends and the posts of a channel are its messages 0, 1, ... in this order; each is
waited for once, by its own handle, and drained once; both ends name one task, shape and dtype, and
what comes is laid out in rows. Per communicator, all members start the same collectives of the same
form in the same order; each is waited for once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper_dynamo.ir.program import COLLECTIVES, Group, Instr, Op, RankProgram, where

Channel = tuple[int, int]
_ENDS = (Op.SEND, Op.POST, Op.WAIT, Op.DRAIN)
# Where to look for the other end of one that is missing.
_OTHERS = {
    Op.SEND: (Op.POST, Op.WAIT, Op.DRAIN),
    Op.POST: (Op.SEND, Op.WAIT, Op.DRAIN),
    Op.WAIT: (Op.POST, Op.SEND, Op.DRAIN),
    Op.DRAIN: (Op.SEND, Op.POST, Op.WAIT),
}


@dataclass(slots=True)
class Matching:
    """What is said between ranks.

    Attributes:
        faults: What does not match.
        unmatched: Channels and communicators whose ends are not the same messages or collectives in
            the same order, so that nothing can be followed through them.
    """

    faults: list[str] = field(default_factory=list)
    unmatched: set[Channel | Group] = field(default_factory=set)


def match(programs: Sequence[RankProgram]) -> Matching:
    """Both ends of each message and collective."""
    found = Matching()
    _check_messages(programs, found)
    _check_collectives(programs, found)
    return found


def _check_messages(programs: Sequence[RankProgram], found: Matching) -> None:
    """Each message is sent, posted, waited for and drained once, with one spec, in order."""
    channels: dict[Channel, dict[Op, list[int]]] = {}  # where, on the rank of that end
    by_rank = {program.rank: program for program in programs}
    for program in programs:
        for index, instr in enumerate(program.instrs):
            if instr.op not in _ENDS or instr.peer < 0:
                continue
            outward = instr.op in (Op.SEND, Op.DRAIN)
            channel = (program.rank, instr.peer) if outward else (instr.peer, program.rank)
            ends = channels.setdefault(channel, {op: [] for op in _ENDS})
            ends[instr.op].append(index)
            if instr.peer == program.rank or instr.peer not in by_rank:
                found.faults.append(
                    f"{where(program, index)}: rank {instr.peer} cannot be its peer"
                )
                found.unmatched.add(channel)
    for channel in sorted(channels):
        if all(rank in by_rank for rank in channel):
            one = _Channel(channel, by_rank, channels[channel])
            order = one.check_order()
            if order:
                found.unmatched.add(channel)
            found.faults += [*order, *one.check_ends()]


class _Channel:
    """The ends of a channel's messages."""

    def __init__(
        self, channel: Channel, programs: Mapping[int, RankProgram], ends: Mapping[Op, list[int]]
    ) -> None:
        """`ends` says where they are in the programs of their ranks."""
        self.source, self.target = channel
        sender, receiver = programs[self.source], programs[self.target]
        self.side = {Op.SEND: sender, Op.DRAIN: sender, Op.POST: receiver, Op.WAIT: receiver}
        self.ends = ends
        self.numbers = {op: [self.side[op].instrs[i].message for i in ends[op]] for op in _ENDS}
        self.count = max(len(set(numbers)) for numbers in self.numbers.values())

    def check_order(self) -> list[str]:
        """Each kind of end has all messages: sends and posts in order, the others once."""
        faults = []
        for op in _ENDS:
            ordered = op in (Op.SEND, Op.POST)
            mine = self.numbers[op] if ordered else sorted(self.numbers[op])
            if mine != list(range(self.count)):
                rule = "in order" if ordered else "once"
                each = "" if ordered else "each of "
                faults.append(
                    f"channel rank {self.source} -> rank {self.target}: {op} has messages {mine}, "
                    f"expected {each}0-{self.count - 1} {rule}{self._places(op)}"
                )
        return faults

    def _places(self, op: Op) -> str:
        """A line for each end that is twice, of no message or out of place, or missing."""
        often = Counter(self.numbers[op])
        lines = [
            self._where(op, i)
            for number, i in zip(self.numbers[op], self.ends[op], strict=True)
            if often[number] > 1 or number not in range(self.count)
        ]
        for number in range(self.count):
            if number not in often:
                ends = [(other, self._of(other, number)) for other in _OTHERS[op]]
                other, i = next((one for one in ends if one[1] >= 0), (op, -1))
                end = f", whose other end is {self._where(other, i)}" if i >= 0 else ""
                lines.append(f"no {op} of message {number}{end}")
        if not lines:  # all are there: the first that is not where it is to be
            pairs = zip(self.numbers[op], self.ends[op], strict=True)
            lines = [next(self._where(op, i) for k, (n, i) in enumerate(pairs) if n != k)]
        return "".join(f"\n  {line}" for line in lines)

    def _where(self, op: Op, index: int) -> str:
        return where(self.side[op], index)

    def _of(self, op: Op, number: int) -> int:
        """Where the end of a message is; -1 where there is none."""
        pairs = zip(self.numbers[op], self.ends[op], strict=True)
        return next((i for n, i in pairs if n == number), -1)

    def _once(self, op: Op) -> dict[int, int]:
        """Where the ends are of which there is one."""
        often = Counter(self.numbers[op])
        pairs = zip(self.numbers[op], self.ends[op], strict=True)
        return {number: i for number, i in pairs if often[number] == 1}

    def check_ends(self) -> list[str]:
        """The ends of each message that are there once agree on what it is."""
        sender, receiver = self.side[Op.SEND], self.side[Op.POST]
        sends, posts = self._once(Op.SEND), self._once(Op.POST)
        faults = []
        for number, j in posts.items():
            posted = receiver.instrs[j]
            sent = sender.instrs[sends[number]] if number in sends else posted
            if wire(sent) != wire(posted) or sent.task != posted.task:
                faults.append(
                    f"message {number} from rank {self.source} to rank {self.target} differs: "
                    f"sent {sent.task} {sent.spec}, expected {posted.task} {posted.spec}\n"
                    f"  {where(sender, sends[number])}\n  {where(receiver, j)}"
                )
            if posted.spec is not None and not posted.spec.is_contiguous:
                faults.append(
                    f"{where(receiver, j)}: what comes is laid out in rows, "
                    f"not with strides {posted.spec.stride}"
                )
        for number, k in self._once(Op.WAIT).items():
            wait = receiver.instrs[k]
            if number in posts and wait.inputs != receiver.instrs[posts[number]].outputs:
                faults.append(
                    f"{where(receiver, k)}: waits by {', '.join(wait.inputs)}, which is not the "
                    f"handle of message {number} from rank {self.source}"
                )
        return faults


def wire(instr: Instr) -> tuple[object, ...]:
    """What both ends of a message, and all members of a collective, must agree on."""
    return tuple((s.shape, s.dtype) for s in (instr.spec, *instr.specs) if s is not None)


def _check_collectives(programs: Sequence[RankProgram], found: Matching) -> None:
    """Per group, every member issues the same collectives in the same order."""
    faults = found.faults
    issued: dict[Group, dict[int, list[int]]] = {}
    by_rank = {program.rank: program for program in programs}
    strange: set[Group] = set()  # some members have no program to compare
    for program in programs:
        open_handles: set[str] = set()
        started: set[str] = set()
        for index, instr in enumerate(program.instrs):
            if instr.op in COLLECTIVES:
                if program.rank not in instr.group:
                    faults.append(f"{where(program, index)}: is not in its group {instr.group}")
                    found.unmatched.add(instr.communicator)
                if strangers := [rank for rank in instr.group if rank not in by_rank]:
                    named = ", ".join(map(str, strangers))
                    faults.append(f"{where(program, index)}: its group has no rank {named}")
                    found.unmatched.add(instr.communicator)
                    strange.add(instr.communicator)
                mine = issued.setdefault(instr.communicator, {})
                mine.setdefault(program.rank, []).append(index)
                open_handles.add(instr.outputs[0])
                started.add(instr.outputs[0])
            elif instr.op is Op.WAIT and instr.peer < 0:
                if instr.inputs[0] not in open_handles:
                    before = instr.inputs[0] in started
                    why = "again" if before else "but no collective before it has that handle"
                    faults.append(f"{where(program, index)}: waits for {instr.inputs[0]!r}, {why}")
                open_handles.discard(instr.inputs[0])
    for communicator, members in issued.items():
        if communicator in strange:
            continue
        differing = _check_communicator(by_rank, communicator, members)
        if differing:
            found.unmatched.add(communicator)
        faults += differing


def _check_communicator(
    programs: Mapping[int, RankProgram], communicator: Group, members: dict[int, list[int]]
) -> list[str]:
    stream, group = communicator
    faults = []

    def items(rank: int) -> list[tuple[object, ...]]:
        instrs = programs[rank].instrs
        mine = (instrs[i] for i in members.get(rank, []))
        return [(one.op, one.task, len(one.inputs), wire(one)) for one in mine]

    first = items(group[0])
    for rank in group[1:]:
        mine = items(rank)
        if mine == first:
            continue
        step = next(
            (k for k, (a, b) in enumerate(zip(first, mine, strict=False)) if a != b),
            min(len(first), len(mine)),
        )
        ends = [(r, members.get(r, [])) for r in (group[0], rank)]
        texts = [
            f"{programs[r].instrs[at[step]].op} {programs[r].instrs[at[step]].task}"
            if step < len(at)
            else "none left"
            for r, at in ends
        ]
        places = [f"\n  {where(programs[r], at[step])}" for r, at in ends if step < len(at)]
        faults.append(
            f"group {group} on stream {stream!r}: collective {step} differs between "
            f"rank {group[0]} ({texts[0]}) and rank {rank} ({texts[1]}){''.join(places)}"
        )
    return faults
