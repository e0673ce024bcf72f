"""The part of the proof about what ranks say to one another: both ends of it are there, and agree.

Terms: a *channel* is the ordered messages from one rank to another.

Formal: the sends and the posts of a channel are its messages 0, 1, ... in this order; each is
waited for once, by its own handle, and drained once; both ends name one task, shape and dtype, and
what comes is laid out in rows. Per communicator, all members start the same collectives of the same
form in the same order; each is waited for once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from piper_dynamo.ir.program import COLLECTIVES, Group, Instr, Op, RankProgram, where

Channel = tuple[int, int]
_ENDS = (Op.SEND, Op.POST, Op.WAIT, Op.DRAIN)


def check_messages(programs: Sequence[RankProgram]) -> list[str]:
    """Each message is sent, posted, waited for and drained once, with one spec, in order."""
    faults: list[str] = []
    found: dict[Channel, dict[Op, list[int]]] = {}  # where, on the rank of that end
    by_rank = {program.rank: program for program in programs}
    for program in programs:
        for index, instr in enumerate(program.instrs):
            if instr.op not in _ENDS or instr.peer < 0:
                continue
            outward = instr.op in (Op.SEND, Op.DRAIN)
            channel = (program.rank, instr.peer) if outward else (instr.peer, program.rank)
            ends = found.setdefault(channel, {op: [] for op in _ENDS})
            ends[instr.op].append(index)
            if instr.peer == program.rank or instr.peer not in by_rank:
                faults.append(f"{where(program, index)}: rank {instr.peer} cannot be its peer")
    for channel in sorted(found):
        if all(rank in by_rank for rank in channel):
            faults += _check_channel(by_rank, channel, found[channel])
    return faults


def _check_channel(
    programs: Mapping[int, RankProgram], channel: Channel, ends: dict[Op, list[int]]
) -> list[str]:
    source, target = channel
    sender, receiver = programs[source], programs[target]
    side = {Op.SEND: sender, Op.DRAIN: sender, Op.POST: receiver, Op.WAIT: receiver}
    numbers = {op: [side[op].instrs[i].message for i in ends[op]] for op in _ENDS}
    count = len(numbers[Op.SEND])
    faults = []
    for op in _ENDS:
        ordered = op in (Op.SEND, Op.POST)
        mine = numbers[op] if ordered else sorted(numbers[op])
        if mine != list(range(count)):
            rule = "in order" if ordered else "once"
            each = "" if ordered else "each of "
            wrong = "".join(f"\n  {where(side[op], i)}" for i in _wrong(numbers[op], ends[op], op))
            faults.append(
                f"channel rank {source} -> rank {target}: {op} has messages {mine}, "
                f"expected {each}0-{count - 1} {rule}{wrong}"
            )
    if faults:
        return faults
    for number, (i, j) in enumerate(zip(ends[Op.SEND], ends[Op.POST], strict=True)):
        sent, posted = sender.instrs[i], receiver.instrs[j]
        if wire(sent) != wire(posted) or sent.task != posted.task:
            faults.append(
                f"message {number} from rank {source} to rank {target} differs: "
                f"sent {sent.task} {sent.spec}, expected {posted.task} {posted.spec}\n"
                f"  {where(sender, i)}\n  {where(receiver, j)}"
            )
        if posted.spec is not None and not posted.spec.is_contiguous:
            faults.append(
                f"{where(receiver, j)}: what comes is laid out in rows, "
                f"not with strides {posted.spec.stride}"
            )
    handles = {receiver.instrs[j].message: receiver.instrs[j].outputs for j in ends[Op.POST]}
    faults += [
        f"{where(receiver, k)}: waits by {', '.join(receiver.instrs[k].inputs)}, which is not the "
        f"handle of message {receiver.instrs[k].message} from rank {source}"
        for k in ends[Op.WAIT]
        if receiver.instrs[k].inputs != handles[receiver.instrs[k].message]
    ]
    return faults


def _wrong(numbers: list[int], at: list[int], op: Op) -> list[int]:
    """Which instructions are out of place, or twice."""
    if op in (Op.SEND, Op.POST):
        return [i for place, (n, i) in enumerate(zip(numbers, at, strict=True)) if n != place][:1]
    often = Counter(numbers)
    return [i for n, i in zip(numbers, at, strict=True) if often[n] > 1]


def wire(instr: Instr) -> tuple[object, ...]:
    """What both ends of a message, and all members of a collective, must agree on."""
    return tuple((s.shape, s.dtype) for s in (instr.spec, *instr.specs) if s is not None)


def check_collectives(programs: Sequence[RankProgram]) -> list[str]:
    """Per group, every member issues the same collectives in the same order."""
    faults = []
    issued: dict[Group, dict[int, list[int]]] = {}
    for program in programs:
        open_handles: set[str] = set()
        started: set[str] = set()
        for index, instr in enumerate(program.instrs):
            if instr.op in COLLECTIVES:
                if program.rank not in instr.group:
                    faults.append(f"{where(program, index)}: is not in its group {instr.group}")
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
    by_rank = {program.rank: program for program in programs}
    for communicator, members in issued.items():
        faults += _check_communicator(by_rank, communicator, members)
    return faults


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
