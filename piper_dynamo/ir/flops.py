"""Floating-point operations of captured operators.

Matrix products, convolutions and attention count, by torch's own formulas
(`torch.utils.flop_counter`); everything else counts as nothing, as there.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from torch import Size
from torch.fx.node import Node, map_arg

from piper_dynamo import _torch_compat as compat
from piper_dynamo.ir.alias import operator_name


def flops_of(node: Node) -> int:
    """Of one operator on the shapes that it was traced with."""
    own = _OWN.get(operator_name(node))
    if own is not None:
        # By argument: one tensor may be several of them.
        return own(*(given.meta["val"].shape for given in node.args if isinstance(given, Node)))
    formula = compat.flop_formula(node.target)
    if formula is None:
        return 0
    args, kwargs = map_arg(node.args, _value), map_arg(node.kwargs, _value)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


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


# Those without a formula in torch: Piper's own, and attention's kernel for CPUs.
_OWN: dict[str, Callable[..., int]] = {
    "grouped_mm": _by_expert,
    "even_mm": _by_expert,
    "grouped_outer": _outer_by_expert,
    "even_outer": _outer_by_expert,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
