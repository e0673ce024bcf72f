"""Rows: which operators treat every row of an expert region alike.

Terms: a value is *rows* when its first dim is the rows of an expert region, as many as come. Under
`Shard` a rank has other rows than one process would, so no operator may let one row see another.

Signature: a node and which of its operands are rows -> why it may not be there, or nothing.
"""

from collections.abc import Callable
from typing import Any

from torch import Tag
from torch._ops import OpOverload
from torch.fx.node import Node

from piper_dynamo.ir.alias import is_random, operator_name

# Where each operator says along which dims it works; none of these may be dim 0.
_DIM_ARGUMENT = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "_softmax", "_log_softmax", "cumsum"), 1),
    **dict.fromkeys(("slice", "select", "unsqueeze", "squeeze", "split", "split_with_sizes"), 1),
    **dict.fromkeys(("cat", "stack", "unbind", "linalg_vector_norm", "var_mean", "argmax"), 1),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 2),
    **dict.fromkeys(("slice_backward", "select_backward"), 2),
}
_DIM_PLACE = {"split": 2, "split_with_sizes": 2, "linalg_vector_norm": 2}
_KEEPS_ROWS = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "expand", "clone", "_to_copy", "detach", "alias"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "lift_fresh_copy"),
    )
)
_BY_EXPERT = frozenset(("grouped_mm", "grouped_outer", "getitem"))


def mixing(node: Node, is_rows: Callable[[Any], bool], dims: int) -> str:
    """Why an operator on rows may let one row see another; empty where it cannot.

    Args:
        node: It has an operand that is rows.
        is_rows: Whether a node's value is rows.
        dims: How many dims its first rows operand has.
    """
    name = operator_name(node)
    if is_random(node):
        return f"{name} draws random numbers, which would differ from one process's"
    if name in _BY_EXPERT:
        return ""
    is_pointwise = isinstance(node.target, OpOverload) and Tag.pointwise in node.target.tags
    if is_pointwise or name in _KEEPS_ROWS:
        return "" if is_rows(node) else f"{name} does not keep the rows apart"
    if name in ("mm", "addmm"):
        first, second = node.args[-2:]
        return "" if is_rows(first) and not is_rows(second) else f"{name} adds up rows"
    along = _along(node, name, dims)
    if along is None:
        return f"{name} is not known to treat every row alike"
    return f"{name} works along the rows" if along else ""


def _along(node: Node, name: str, dims: int) -> bool | None:
    """Whether an operator that works along some dims works along the rows; None for others."""
    if name in ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm"):
        shape = node.args[2 if name.endswith("backward") else 1]
        return not (isinstance(shape, list | tuple) and len(shape) < dims)
    if name == "constant_pad_nd":  # pairs of sizes, the last dim first
        pads = node.args[1]
        return not (isinstance(pads, list | tuple) and len(pads) < 2 * dims)
    if name not in _DIM_ARGUMENT:
        return None
    place = _DIM_PLACE.get(name, _DIM_ARGUMENT[name])
    found = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    listed = found if isinstance(found, list | tuple) else [found]
    dims += name in ("unsqueeze", "stack")  # they count the new dim, too
    return not listed or any(not isinstance(d, int) or d % max(dims, 1) == 0 for d in listed)
