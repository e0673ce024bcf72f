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

from piper_dynamo.errors import PiperRuntimeError, format_error
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
        raise PiperRuntimeError(
            format_error(
                "other rows are to be sent than were counted",
                {"rows": rows.shape[0], "counted": told},
                hint="experts must give as many rows as they take: one result for each",
            )
        )
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
        raise PiperRuntimeError(
            format_error(
                "rows cannot go evenly to all ranks of experts",
                {"rows": rows.shape[0], "ranks": size},
                hint="with a capacity, every expert takes as many rows: this is a fault of Piper",
            )
        )
    even = [share] * size
    return Parcel(value=rows.contiguous(), sent=even, received=even, unpack=lambda come: [come])


def _taken(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows if order is None else rows.index_select(0, order)


def _splits(asked: Tensor, arrived: Tensor) -> Splits:
    """From the rows of each [rank, expert] that this rank sends, and those that come to it."""
    counted = count_rows(asked, arrived)
    sent, received = counted.numbers()
    by_expert, by_rank = counted.orders(sum(received)) if counted.is_sorted else (None, None)
    return Splits(sent=sent, received=received, by_expert=by_expert, by_rank=by_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Rows counted, whose numbers the host asks for.

    Attributes:
        totals: Rows sent to and received from each rank, [2, ranks].
        arrived: Rows that come from each rank to each expert here, [ranks, experts].
    """

    totals: Tensor
    arrived: Tensor

    @property
    def is_sorted(self) -> bool:
        """Whether what comes is sorted again: there are several experts here."""
        return self.arrived.shape[1] > 1

    def numbers(self) -> tuple[list[int], list[int]]:
        """Rows sent to and received from each rank; `totals` are there."""
        sent, received = self.totals.tolist()
        return sent, received

    def orders(self, rows: int) -> tuple[Tensor, Tensor]:
        """Which of the rows as they arrive is each row as experts take them, and the way back."""
        arrived = self.arrived
        expert = torch.arange(arrived.shape[1], device=arrived.device).repeat(arrived.shape[0])
        expert = expert.repeat_interleave(arrived.reshape(-1), output_size=rows)
        by_expert = expert.argsort(stable=True)
        by_rank = torch.empty_like(by_expert)
        by_rank[by_expert] = torch.arange(by_expert.shape[0], device=by_expert.device)
        return by_expert, by_rank


def count_rows(asked: Tensor, arrived: Tensor, *, early: bool = False) -> Counted:
    """Count the rows of each [rank, expert] that this rank sends, and those that come to it.

    Args:
        asked: What is sent.
        arrived: What comes.
        early: Start to copy the numbers to the host, which will wait before it reads them. Else
            reading waits: at once for all, since on an accelerator each reading does.
    """
    totals = torch.stack([asked.sum(1), arrived.sum(1)])
    if early and totals.is_cuda:
        here = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
        totals = here.copy_(totals, non_blocking=True)
    return Counted(totals=totals, arrived=arrived)
