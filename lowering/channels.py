"""Channels: when to post receives and when a send has surely left.

Terms: *look-ahead* is how many messages of a channel are posted before they are needed; a send is
*implied done* once a later message from the same peer, sent after that peer had waited for it, has
arrived.

Signature: drafts with sends and waits -> drafts with numbered messages, posts and drains.
"""

from bisect import bisect_right
from dataclasses import replace

from piper_dynamo.ir.program import Instr, Op
from piper_dynamo.lowering.lower import Draft

LOOK_AHEAD = 2
Channel = tuple[int, int]


def number_messages(drafts: list[Draft]) -> None:
    """Give each message its position in its channel: the order in which the sender issues them."""
    position: dict[tuple[int, str], int] = {}
    sent: dict[Channel, int] = {}
    for draft in drafts:
        for i, instr in enumerate(draft.instrs):
            if instr.op is Op.SEND:
                channel = (draft.rank, instr.peer)
                number = sent.get(channel, 0)
                sent[channel] = number + 1
                position[draft.rank, instr.target + f">{instr.peer}"] = number
                draft.instrs[i] = replace(instr, target="", message=number)
    for draft in drafts:
        for i, instr in enumerate(draft.instrs):
            if instr.op is Op.WAIT and instr.peer >= 0:
                name = draft.received[instr.inputs[0]]
                number = position[instr.peer, name + f">{draft.rank}"]
                draft.instrs[i] = replace(instr, message=number)


def post_receives(draft: Draft, look_ahead: int = LOOK_AHEAD) -> None:
    """Post receives in the order they are sent, `look_ahead` messages before their waits.

    Posting all at the start would need a buffer per message; posting at the wait would make every
    message pay its latency.
    """
    waits: dict[int, dict[int, Instr]] = {}
    for instr in draft.instrs:
        if instr.op is Op.WAIT and instr.peer >= 0:
            waits.setdefault(instr.peer, {})[instr.message] = instr
    posted = dict.fromkeys(waits, 0)
    result: list[Instr] = []

    def post_until(peer: int, count: int) -> None:
        while posted[peer] < min(count, len(waits[peer])):
            wait = waits[peer][posted[peer]]
            assert wait.spec is not None
            result.append(
                replace(
                    wait,
                    op=Op.POST,
                    outputs=wait.inputs,
                    inputs=(),
                    nbytes=(wait.spec.nbytes,),
                )
            )
            posted[peer] += 1

    for peer in sorted(waits):
        post_until(peer, look_ahead)
    for instr in draft.instrs:
        if instr.op is Op.WAIT and instr.peer >= 0:
            post_until(instr.peer, instr.message + 1)
            result.append(instr)
            post_until(instr.peer, instr.message + 1 + look_ahead)
        else:
            result.append(instr)
    draft.instrs = result


def drain_sends(drafts: list[Draft]) -> None:
    """Drain every send: at the first message back that implies it is done, or at the end."""
    sends: dict[Channel, list[int]] = {}
    waits: dict[Channel, dict[int, int]] = {}
    for draft in drafts:
        for i, instr in enumerate(draft.instrs):
            if instr.op is Op.SEND:
                sends.setdefault((draft.rank, instr.peer), []).append(i)
            elif instr.op is Op.WAIT and instr.peer >= 0:
                waits.setdefault((instr.peer, draft.rank), {})[instr.message] = i
    for draft in drafts:
        after: dict[int, list[Instr]] = {}
        end: list[Instr] = []
        for instr in draft.instrs:
            if instr.op is not Op.SEND:
                continue
            there, back = (draft.rank, instr.peer), (instr.peer, draft.rank)
            taken = waits[there][instr.message]
            reply = bisect_right(sends.get(back, []), taken)
            drain = replace(instr, op=Op.DRAIN)
            if reply < len(sends.get(back, [])):
                after.setdefault(waits[back][reply], []).append(drain)
            else:
                end.append(drain)
        draft.instrs = [
            out for i, instr in enumerate(draft.instrs) for out in (instr, *after.get(i, ()))
        ] + end
