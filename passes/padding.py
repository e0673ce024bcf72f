"""Padding: what an expert region's operators make of rows of zeros.

Terms: *padding* is the rows that fill an expert's slots up to its capacity; they come as zeros, and
their results' gradients are zeros. No other row sees what becomes of them, except where rows are
added up: in the experts' own gradients, x^T @ y over an expert's rows. There padding adds nothing
if one factor is zeros and the other finite. Where that is not known (0 / 0 in a norm makes a NaN),
the rows whose gradient is zeros must be left out.

Signature: a node, and what padding is in its operands -> what it is in its value.
"""

from collections.abc import Mapping
from enum import IntEnum

from torch.fx.node import Node

from piper_dynamo.ir.alias import operator_name


class Padding(IntEnum):
    """What is known of padding in a value; the larger, the less."""

    ZERO = 0
    FINITE = 1
    ANY = 2


# Zeros of zeros, and finite of what is finite.
_KEEPS_ZERO = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "expand", "clone", "_to_copy", "alias", "detach"),
        *("transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "cat", "getitem"),
        *("constant_pad_nd", "split", "split_with_sizes", "neg", "add", "sub", "sum"),
        *("relu", "silu", "gelu", "tanh", "even_mm"),
    )
)
# A gradient times what is finite of a finite value, though not zero where that is: zeros where the
# first operand, the gradient, is.
_BACKWARDS = frozenset(
    (
        *("silu_backward", "gelu_backward", "tanh_backward", "sigmoid_backward"),
        "threshold_backward",
    )
)
_FINITE = frozenset(("sigmoid",))


def padding_of(node: Node, known: Mapping[Node, Padding]) -> Padding:
    """What padding is in a node's value.

    Args:
        node: Has an operand that is rows.
        known: What it is in the values of nodes that are rows. Experts' matrices are taken to be
            finite: where one is not, so is its gradient.
    """
    name = operator_name(node)
    operands = [known[n] for n in node.all_input_nodes if n in known]
    others = [n for n in node.all_input_nodes if n not in known]
    if others and name != "even_mm":
        return Padding.ANY
    worst = max(operands)
    if worst is Padding.ANY:
        return Padding.ANY
    if name in _KEEPS_ZERO:
        shifts = name in ("add", "sub") and _has_number(node)
        shifts = shifts or (name == "constant_pad_nd" and len(node.args) > 2)
        return max(worst, Padding.FINITE) if shifts else worst
    if name == "mul":  # zeros where one operand is, since the others are finite
        return min(operands)
    if name in _BACKWARDS:
        gradient = node.args[0]
        return known.get(gradient, Padding.FINITE) if isinstance(gradient, Node) else Padding.ANY
    return Padding.FINITE if name in _FINITE else Padding.ANY


def _has_number(node: Node) -> bool:
    """Whether an operand is a number that may be other than zero."""
    return any(isinstance(a, int | float) for a in node.args[:2])


def to_mask(x: Padding, y: Padding) -> tuple[int, ...]:
    """Which factors of x^T @ y must be made zeros in padding, for it to add nothing; the fewest."""
    found = tuple(place for place, one in enumerate((x, y)) if one is Padding.ANY)
    return found if found or Padding.ZERO in (x, y) else (0,)
