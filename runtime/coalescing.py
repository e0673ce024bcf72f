"""Small values of one collective are coalesced: they travel as one.

Over gloo each value is an operation of its own, for which the ranks meet again: between two
processes here 65 of 256 bytes each took 29 ms, and 0.8 ms as one; from 256 KiB on, copying them
together takes as long as it saves. A reduce-scatter adds in the order of ranks as before; in which
order an all-reduce adds more than two ranks' parts is gloo's choice, by their place in the whole.

Signature: the values of a collective -> which travel together -> one value, and what takes the
results out of its result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.ir.program import Op

SMALL_BYTES = 2**17  # of a value that travels with others; of a gathered one, of the whole
MOST_BYTES = 2**22  # of all that travel together; they need twice that beside them, unplanned
COALESCED = frozenset({Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER})


def with_rows(value: Tensor, rows: int) -> Tensor:
    """The value with zeros below, up to so many rows; itself where it has them."""
    if value.shape[0] == rows:
        return value
    padded = value.new_zeros((rows, *value.shape[1:]))
    padded.narrow(0, 0, value.shape[0]).copy_(value)
    return padded


def together(op: Op, values: Sequence[Tensor], size: int) -> list[list[int]]:
    """Which values travel together, by place; alike on all ranks, whose values have one shape.

    Args:
        op: What is done with them.
        values: Of this rank: of an all-gather blocks, else whole.
        size: How many ranks.
    """
    found: list[list[int]] = []
    last: dict[torch.dtype, tuple[list[int], int]] = {}  # with the bytes of the whole values
    for place, value in enumerate(values):
        whole = value.nbytes * (size if op is Op.ALL_GATHER else 1)
        if op not in COALESCED or value.device.type != "cpu" or not 0 < whole <= SMALL_BYTES:
            found.append([place])
            continue
        places, nbytes = last.get(value.dtype, ([], 0))
        if not places or nbytes + whole > MOST_BYTES:
            places, nbytes = [], 0
            found.append(places)
        places.append(place)
        last[value.dtype] = places, nbytes + whole
    return found


def coalesce(
    op: Op, values: Sequence[Tensor], likes: Sequence[Any], size: int
) -> tuple[Tensor, tuple[int], Callable[[Tensor], list[Tensor]]]:
    """Several values as one.

    Args:
        op: Of `COALESCED`.
        values: Of one dtype.
        likes: What each result is shaped like.
        size: How many ranks.

    Returns:
        The one value, the shape of its result, and what takes the results out of that.
    """
    if op is Op.REDUCE_SCATTER:
        values = [
            with_rows(value, size * like.shape[0]).reshape(size, -1)
            for value, like in zip(values, likes, strict=True)
        ]
        sizes = [value.shape[1] for value in values]
        return torch.cat(list(values), 1).view(-1), (sum(sizes),), _split(sizes, likes)
    flat = torch.cat([value.reshape(-1) for value in values])
    sizes = [value.numel() for value in values]
    if op is Op.ALL_GATHER:
        return flat, (size * flat.numel(),), _gathered(sizes, values, likes, size)
    return flat, (flat.numel(),), _summed(sizes, values)


def _split(sizes: list[int], likes: Sequence[Any]) -> Callable[[Tensor], list[Tensor]]:
    return lambda whole: [
        part.view(like.shape) for part, like in zip(torch.split(whole, sizes), likes, strict=True)
    ]


def _gathered(
    sizes: list[int], values: Sequence[Tensor], likes: Sequence[Any], size: int
) -> Callable[[Tensor], list[Tensor]]:
    return lambda whole: [
        part.reshape(size * value.shape[0], *value.shape[1:]).narrow(0, 0, like.shape[0])
        for part, value, like in zip(
            torch.split(whole.view(size, -1), sizes, 1), values, likes, strict=True
        )
    ]


def _summed(sizes: list[int], values: Sequence[Tensor]) -> Callable[[Tensor], list[Tensor]]:
    """An all-reduce gives its values' own memory."""

    def put(whole: Tensor) -> list[Tensor]:
        for value, part in zip(values, torch.split(whole, sizes), strict=True):
            value.copy_(part.view(value.shape))
        return list(values)

    return put
