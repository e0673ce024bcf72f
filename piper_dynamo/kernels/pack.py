"""Many values as one, and back: cast, scaled, and moved in one pass and one launch.

A collective of many small values costs a launch each; of one, one. Each value is a matrix of as
many rows as the others; in the pack, its columns lie beside theirs:

    pack([a [s, x], b [s, y]])  =  [a | b]  [s, x + y]

A kernel with a table of addresses copies them all, where torch launches a copy per value or, as
`_foreach_copy_` does, a cast and a scaling beside it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.kernels.launching import Form, can_launch, tl, triton, tuned

_CONFIGS = [({"BLOCK": 1024}, 4), ({"BLOCK": 2048}, 8), ({"BLOCK": 4096}, 8)]


@tuned(_CONFIGS, key=["width"])  # type: ignore[untyped-decorator]
def move_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    flat,
    addresses,
    starts,
    like,
    scale,
    width,
    count,
    TO_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and block of columns of the pack, in which several values may lie.

    `like` is a pointer of the values' type that is never read; `starts` has one entry more than
    there are values.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    # The value that the block's first column lies in: the starts are sorted.
    low = 0
    high = count - 1
    while low < high:
        middle = (low + high + 1) // 2
        below = tl.load(starts + middle) <= first
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
    end = tl.minimum(first + BLOCK, width)
    start = tl.load(starts + low)
    while (low < count) & (start < end):
        after = tl.load(starts + low + 1)
        inside = (at >= start) & (at < after) & (at < width)
        values = tl.load(addresses + low).to(like.dtype)
        there = values + row * (after - start) + (at - start)
        if TO_FLAT:
            value = tl.load(there, mask=inside, other=0.0).to(tl.float32) * scale
            tl.store(flat + row * width + at, value.to(flat.dtype.element_ty), mask=inside)
        else:
            value = tl.load(flat + row * width + at, mask=inside, other=0.0).to(tl.float32) * scale
            tl.store(there, value.to(like.dtype.element_ty), mask=inside)
        start = after
        low += 1


def pack_reference(values: Sequence[Tensor], flat: Tensor, scale: float) -> None:
    """See the module."""
    parts = torch.split(flat, [value.shape[1] for value in values], dim=1)
    torch._foreach_copy_(list(parts), list(values))
    if scale != 1.0:
        flat.mul_(scale)


def unpack_reference(flat: Tensor, values: Sequence[Tensor], scale: float) -> None:
    """See the module."""
    parts = torch.split(flat, [value.shape[1] for value in values], dim=1)
    torch._foreach_copy_(list(values), list(parts))
    if scale != 1.0:
        torch._foreach_mul_(list(values), scale)


def pack(values: Sequence[Tensor], dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
    """One matrix of these beside each other.

    Args:
        values: Matrices of equally many rows, of one dtype and device.
        dtype: Of the pack; None: theirs.
        scale: What each element is multiplied by.
    """
    rows, width = values[0].shape[0], sum(value.shape[1] for value in values)
    flat = values[0].new_empty((rows, width), dtype=dtype)
    if _fits(values, flat):
        _move(flat, values, scale, to_flat=True)
    else:
        pack_reference(values, flat, scale)
    return flat


def unpack(flat: Tensor, values: Sequence[Tensor], scale: float = 1.0) -> None:
    """What `pack` put beside each other, into these matrices, in their dtype.

    Args:
        flat: A pack.
        values: Where its parts go.
        scale: What each element is multiplied by.
    """
    if _fits(values, flat):
        _move(flat, values, scale, to_flat=False)
    else:
        unpack_reference(flat, values, scale)


def _fits(values: Sequence[Tensor], flat: Tensor) -> bool:
    """Whether the kernel takes these: it computes in float32, which holds what it moves."""
    first = values[0].dtype
    exact = {torch.float32, torch.bfloat16, torch.float16}
    return (
        can_launch(flat, *values)
        and flat.dtype in exact
        and first in exact
        and all(value.dtype == first and value.is_contiguous() for value in values)
        and flat.numel() > 0
    )


def _move(flat: Tensor, values: Sequence[Tensor], scale: float, *, to_flat: bool) -> None:
    starts = [0]
    for value in values:
        starts.append(starts[-1] + value.shape[1])
    table = torch.tensor(
        [*(value.data_ptr() for value in values), *starts],
        dtype=torch.int64,
        pin_memory=flat.is_cuda,
    ).to(flat.device, non_blocking=True)
    rows, width = flat.shape

    def grid(meta: Any) -> tuple[int, int]:
        return rows, triton.cdiv(width, meta["BLOCK"])

    move_kernel[grid](
        *(flat, table, table[len(values) :], values[0], scale, width, len(values)), TO_FLAT=to_flat
    )


def forms(values: str = "bf16", flat: str = "fp32") -> list[Form]:
    """What is compiled ahead: both ways in each configuration."""
    signature = {
        **{"flat": f"*{flat}", "addresses": "*i64", "starts": "*i64", "like": f"*{values}"},
        **{"scale": "fp32", "width": "i32", "count": "i32"},
        **{"TO_FLAT": "constexpr", "BLOCK": "constexpr"},
    }
    return [
        Form(
            kernel=move_kernel,
            signature=signature,
            constants={**constants, "TO_FLAT": way},
            num_warps=warps,
        )
        for constants, warps in _CONFIGS
        for way in (True, False)
    ]
