"""Rows in slots: what stands for a routing's rows where experts have a capacity.

Legend: E experts, c slots of each (its capacity), r rows sorted by expert, as `dispatch` has them.

Slot e * c + j holds the j-th row of expert e. Rows beyond the c-th have no slot: they are dropped.
Slots beyond an expert's rows are *padding*: zeros. All shapes are known before the rows are, and
nothing is read by the host. `pad` and `unpad` are each other's transposes, so each is the other's
backward. There are no autograd formulas here: these operators come into graphs that have their
backward already.
"""

import torch
from torch import Tensor


def _slot_of(counts: Tensor, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    """The slot of each row [r], and whether it is dropped."""
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=counts.device)
    expert = torch.searchsorted(ends, row, right=True)
    place = row - (ends - counts).index_select(0, expert)
    return expert * capacity + place.clamp(max=capacity - 1), place >= capacity


def _row_of(counts: Tensor, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    """The row of each slot [E * c], and whether it is padding."""
    place = torch.arange(capacity, device=counts.device)
    row = (counts.cumsum(0) - counts).unsqueeze(1) + place
    is_padding = place >= counts.unsqueeze(1)
    return row.clamp(max=rows - 1).flatten(), is_padding.flatten()


def _chosen(values: Tensor, index: Tensor, is_none: Tensor) -> Tensor:
    """`values[index]`, and zeros where there is none."""
    if not values.shape[0]:
        return values.new_zeros((index.shape[0], *values.shape[1:]))
    wide = is_none.view(-1, *[1] * (values.dim() - 1))
    return values.index_select(0, index).masked_fill_(wide, 0)


@torch.library.custom_op("piper::pad", mutates_args=())
def _pad(rows: Tensor, counts: Tensor, capacity: int) -> Tensor:
    """Rows [r, ...] in slots [E * c, ...]."""
    return _chosen(rows, *_row_of(counts, rows.shape[0], capacity))


@_pad.register_fake
def _(rows: Tensor, counts: Tensor, capacity: int) -> Tensor:
    return rows.new_empty((counts.shape[0] * capacity, *rows.shape[1:]))


@torch.library.custom_op("piper::unpad", mutates_args=())
def _unpad(slots: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Slots [E * c, ...] as rows [r, ...]; zeros where a row was dropped."""
    return _chosen(slots, *_slot_of(counts, rows, slots.shape[0] // counts.shape[0]))


@_unpad.register_fake
def _(slots: Tensor, counts: Tensor, rows: int) -> Tensor:
    return slots.new_empty((rows, *slots.shape[1:]))


@torch.library.custom_op("piper::even_mm", mutates_args=())
def _even_mm(x: Tensor, weight: Tensor, experts: int) -> Tensor:
    """As grouped_mm where every expert has as many rows."""
    _check(x, weight, experts)
    return torch.bmm(x.reshape(experts, -1, x.shape[1]), weight).flatten(0, 1)


@_even_mm.register_fake
def _(x: Tensor, weight: Tensor, experts: int) -> Tensor:
    _check(x, weight, experts)
    return x.new_empty((x.shape[0], weight.shape[2]))


@torch.library.custom_op("piper::even_outer", mutates_args=())
def _even_outer(x: Tensor, y: Tensor, experts: int) -> Tensor:
    """As grouped_outer where every expert has as many rows."""
    by_expert = [t.reshape(experts, -1, t.shape[1]) for t in (x, y)]
    return torch.bmm(by_expert[0].transpose(1, 2), by_expert[1])


@_even_outer.register_fake
def _(x: Tensor, y: Tensor, experts: int) -> Tensor:
    return x.new_empty((experts, x.shape[1], y.shape[1]))


def _check(x: Tensor, weight: Tensor, experts: int) -> None:
    if weight.shape[0] != experts:
        raise RuntimeError(f"{weight.shape[0]} matrices for {experts} experts")
    if x.shape[0] % experts:
        raise RuntimeError(f"{x.shape[0]} rows are not the same number for {experts} experts")


# As nodes of graphs call them.
pad = torch.ops.piper.pad.default
unpad = torch.ops.piper.unpad.default
even_mm = torch.ops.piper.even_mm.default
even_outer = torch.ops.piper.even_outer.default
