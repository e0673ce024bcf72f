"""Floating-point operations of operators.

Products, convolutions, attention and recurrent layers count, by torch's own formulas
(`torch.utils.flop_counter`) or, where there is none, by those below; everything else counts as
nothing.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Size, Tensor
from torch.fx.node import Node, map_arg
from torch.utils._pytree import tree_leaves

from piper_dynamo import _torch_compat as compat


def flops_of(node: Node) -> int:
    """Of one operator on the shapes that it was traced with."""
    args, kwargs = map_arg(node.args, _value), map_arg(node.kwargs, _value)
    return flops_of_call(node.target, args, kwargs, node.meta.get("val"))


def flops_of_call(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Of an operator called with these arguments, which has given `result`; values may be fake."""
    if not isinstance(target, torch._ops.OpOverload):
        return 0
    own = _OWN.get(target._schema.name)
    if own is not None:
        # By argument: one tensor may be several of them.
        return own(*(given.shape for given in tree_leaves(args) if isinstance(given, Tensor)))
    formula = compat.flop_formula(target)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def total_flops(nodes: Iterable[Node]) -> int:
    """Of several operators."""
    return sum(map(flops_of, nodes))


def show_flops(flops: float) -> str:
    """FLOPs with a unit that reads well."""
    for unit in ("", "k", "M", "G"):
        if flops < 1000:
            return f"{flops:.1f} {unit}FLOP" if unit else f"{flops:.0f} FLOP"
        flops /= 1000
    return f"{flops:.1f} TFLOP"


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _by_expert(x: Size, weight: Size, *counts: Size) -> int:
    """Rows x [r, d] times their expert's matrix [E, d, h]."""
    return 2 * prod(x) * weight[-1]


def _outer_by_expert(x: Size, y: Size, *counts: Size) -> int:
    """Rows x [r, d] transposed times y [r, h], expert by expert."""
    return 2 * prod(x) * y[-1]


def _attention(query: Size, key: Size, value: Size, *mask: Size) -> int:
    """[B, heads, tokens, dim] each: scores and their product with the values."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(grad: Size, query: Size, key: Size, value: Size, *kept: Size) -> int:
    """Scores again, then the gradients of scores, of values, of queries and of keys."""
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _in_groups(one: Size, other: Size, *rest: Size) -> int:
    """A product per group of rows or columns: where `one` alone has a dim of groups, of columns."""
    rows = one[-2:] if len(other) == 2 else one
    return 2 * prod(rows) * other[-1]


def _by_vector(matrix: Size, *rest: Size) -> int:
    return 2 * prod(matrix)


def _added_by_vector(start: Size, matrix: Size, *rest: Size) -> int:
    return 2 * prod(matrix)


def _recurrent(x: Size, *rest: Size) -> int:
    """Every row of x [T, B, d] meets every weight; only these have two dims."""
    return 2 * prod(x[:-1]) * sum(prod(one) for one in rest if len(one) == 2)


def _recurrent_layer(x: Size, of_input: Size, of_state: Size, *rest: Size) -> int:
    return 2 * prod(x[:-1]) * (prod(of_input) + prod(of_state))


# Those without a formula in torch: Piper's own; attention's kernel for CPUs; products by groups and
# by a vector; what LSTMs and the like run as a whole, on CUDA and on CPUs.
_OWN: dict[str, Callable[..., int]] = {
    "piper::grouped_mm": _by_expert,
    "piper::even_mm": _by_expert,
    "piper::grouped_outer": _outer_by_expert,
    "piper::even_outer": _outer_by_expert,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_grouped_mm": _in_groups,
    "aten::mv": _by_vector,
    "aten::dot": _by_vector,
    "aten::vdot": _by_vector,
    "aten::addmv": _added_by_vector,
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": lambda *shapes: 2 * _recurrent(*shapes),
    "aten::mkldnn_rnn_layer": _recurrent_layer,
    "aten::mkldnn_rnn_layer_backward": lambda *shapes: 2 * _recurrent_layer(*shapes),
}
