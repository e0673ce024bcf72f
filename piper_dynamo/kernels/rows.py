"""Tokens to experts and back, weighed, in one pass over memory.

Legend: n tokens, k experts per token, r = n * k rows, d width.

    permute(tokens [n, d], order [r], k)            rows[i] = tokens[order[i] // k]
    combine(rows [r, d], order [r], weights [n, k])  out[t] = sum over j of weights[t, j] * row of
                                                    assignment t * k + j

Without the kernel `combine` makes the rows in order, then the weighted rows, then their sum: four
passes over [n, k, d] where this is one, read once.
"""

from typing import Any

import torch
from torch import Tensor

from piper_dynamo.kernels.launching import Form, can_launch, tl, triton, tuned

_CONFIGS = [({"BLOCK": 256}, 2), ({"BLOCK": 512}, 4), ({"BLOCK": 1024}, 4), ({"BLOCK": 1024}, 8)]


@tuned(_CONFIGS, key=["width"])  # type: ignore[untyped-decorator]
def permute_kernel(  # type: ignore[no-untyped-def]
    tokens,
    order,
    rows,
    copies,
    width,
    BLOCK: tl.constexpr,
):
    """One program per row and block of its width."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    token = tl.load(order + row) // copies
    value = tl.load(tokens + token * width + at, mask=inside)
    tl.store(rows + row * width + at, value, mask=inside)


@tuned(_CONFIGS, key=["width", "copies"])  # type: ignore[untyped-decorator]
def combine_kernel(  # type: ignore[no-untyped-def]
    rows,
    place,
    weights,
    out,
    copies,
    width,
    BLOCK: tl.constexpr,
):
    """One program per token and block of its width; sums in float32, or float64 of such."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    wide = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([BLOCK], dtype=wide)
    for copy in range(copies):
        row = tl.load(place + token * copies + copy)
        value = tl.load(rows + row * width + at, mask=inside, other=0.0)
        weight = tl.load(weights + token * copies + copy)
        total += value.to(wide) * weight.to(wide)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=inside)


def permute_reference(tokens: Tensor, order: Tensor, copies: int) -> Tensor:
    """See the module."""
    return tokens.index_select(0, order if copies == 1 else order // copies)


def combine_reference(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """See the module."""
    apart = torch.empty_like(rows).index_copy_(0, order, rows)
    return (apart.view(*weights.shape, rows.shape[1]) * weights.unsqueeze(-1)).sum(1)


def permute(tokens: Tensor, order: Tensor, copies: int) -> Tensor:
    """Rows for experts.

    Args:
        tokens: [n, d].
        order: Which assignment each row is, [r], int64.
        copies: k.
    """
    if not _fits(tokens) or not order.is_contiguous() or not order.numel():
        return permute_reference(tokens, order, copies)
    rows = tokens.new_empty((order.shape[0], tokens.shape[1]))
    _launch(permute_kernel, order.shape[0], tokens.shape[1], tokens, order, rows, copies)
    return rows


def combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """The experts' rows in the order of the tokens, weighed and summed over a token's experts.

    Args:
        rows: By expert, [r, d].
        order: Which assignment each row is, [r], int64.
        weights: [n, k].
    """
    if not _fits(rows) or not weights.is_contiguous() or not weights.numel():
        return combine_reference(rows, order, weights)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    out = rows.new_empty((weights.shape[0], rows.shape[1]))
    _launch(
        combine_kernel, weights.shape[0], rows.shape[1], rows, place, weights, out, weights.shape[1]
    )
    return out


def _fits(rows: Tensor) -> bool:
    return can_launch(rows) and rows.dim() == 2 and rows.is_contiguous() and rows.numel() > 0


def _launch(kernel: Any, count: int, width: int, *args: Any) -> None:
    kernel[lambda meta: (count, triton.cdiv(width, meta["BLOCK"]))](*args, width)


def forms(dtype: str = "bf16") -> list[Form]:
    """What is compiled ahead: each kernel in each of its configurations."""
    permuting = {"tokens": f"*{dtype}", "order": "*i64", "rows": f"*{dtype}"}
    combining = {"rows": f"*{dtype}", "place": "*i64", "weights": f"*{dtype}", "out": f"*{dtype}"}
    numbers = {"copies": "i32", "width": "i32", "BLOCK": "constexpr"}
    return [
        Form(kernel=kernel, signature=signature | numbers, constants=dict(c), num_warps=warps)
        for kernel, signature in ((permute_kernel, permuting), (combine_kernel, combining))
        for c, warps in _CONFIGS
    ]
