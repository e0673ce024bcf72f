"""Rows on their way to experts and back.

Terms: a *group* of ranks holds the experts of one copy, each rank as many, in rank order. Rows are
exchanged by *splits*, which say how many go and come, or *evenly*: as many to every rank, and that
is all. By splits, rows that a rank sends are sorted by expert, so those for one rank lie together;
rows that arrive come rank by rank and are sorted again by expert, then by rank: the order that one
process would have them in.

Signature: values of an exchange -> what to send, how many rows go and come, and what becomes of
what arrives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.errors import PiperRuntimeError
from piper_dynamo.ir.program import EXCHANGES, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """How many rows of one routing go and come; on the host, since messages have sizes.

    Attributes:
        sent: To each rank of the group.
        received: From each rank of the group.
        by_expert: Which of the rows as they arrive is each row as experts take them; None where
            that is the same.
        by_rank: The way back.
    """

    sent: list[int]
    received: list[int]
    by_expert: Tensor | None
    by_rank: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One all-to-all: a tensor, its rows for and from each rank, and how to unpack what comes."""

    value: Tensor
    sent: list[int]
    received: list[int]
    unpack: Callable[[Tensor], list[Any]]

    def empty_receive_buffer(self) -> Tensor:
        """Memory for what comes."""
        return self.value.new_empty((sum(self.received), *self.value.shape[1:]))


def pack(op: Op, values: Sequence[Any], size: int) -> Parcel:
    """What an exchange sends.

    Args:
        op: EXCHANGE_COUNTS, EXCHANGE or UNEXCHANGE.
        values: The counts of all experts [E]; or rows [r, ...] and their splits; or rows alone,
            which are exchanged evenly.
        size: Ranks in the group.

    Raises:
        PiperRuntimeError: There are not as many rows as were counted, or as divide.
    """
    assert op in EXCHANGES, f"{op} exchanges no rows"
    if op is Op.EXCHANGE_COUNTS:
        (counts,) = values
        share = counts.shape[0] // size
        even = [share] * size

        def learn(arrived: Tensor) -> list[Any]:
            table = arrived.view(size, share)
            return [table.sum(0), _splits(counts.view(size, share), table)]

        return Parcel(value=counts.contiguous(), sent=even, received=even, unpack=learn)
    if len(values) == 1:
        return _even(values[0], size)
    rows, splits = values
    told = sum(splits.sent if op is Op.EXCHANGE else splits.received)
    if rows.shape[0] != told:
        raise PiperRuntimeError(f"{rows.shape[0]} rows are to be sent, but {told} were counted")
    if op is Op.EXCHANGE:
        return Parcel(
            value=rows.contiguous(),
            sent=splits.sent,
            received=splits.received,
            unpack=lambda come: [_taken(come, splits.by_expert)],
        )
    return Parcel(
        value=_taken(rows, splits.by_rank).contiguous(),
        sent=splits.received,
        received=splits.sent,
        unpack=lambda come: [come],
    )


def _even(rows: Tensor, size: int) -> Parcel:
    share, rest = divmod(rows.shape[0], size)
    if rest:
        raise PiperRuntimeError(f"{rows.shape[0]} rows cannot go evenly to {size} ranks")
    even = [share] * size
    return Parcel(value=rows.contiguous(), sent=even, received=even, unpack=lambda come: [come])


def _taken(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows if order is None else rows.index_select(0, order)


def _splits(asked: Tensor, arrived: Tensor) -> Splits:
    """From the rows of each [rank, expert] that this rank sends, and those that come to it."""
    # Read at once: on an accelerator each reading waits for it.
    sent, received = torch.stack([asked.sum(1), arrived.sum(1)]).tolist()
    by_expert = by_rank = None
    if arrived.shape[1] > 1:
        expert = torch.arange(arrived.shape[1], device=arrived.device).repeat(arrived.shape[0])
        expert = expert.repeat_interleave(arrived.reshape(-1), output_size=sum(received))
        by_expert = expert.argsort(stable=True)
        by_rank = torch.empty_like(by_expert)
        by_rank[by_expert] = torch.arange(by_expert.shape[0], device=by_expert.device)
    return Splits(sent=sent, received=received, by_expert=by_expert, by_rank=by_rank)
