"""The work of operators: floating-point operations and bytes, from their formulas and shapes.

FLOPs are those of products, convolutions and attention, by torch's formulas; a multiply-add counts
as two. Bytes are what an operator reads and writes if nothing of it is in a cache; a view has none.

Signature: chunk graph -> the work of each of its operators.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import fx
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo.ir.alias import operator_name, viewed
from piper_dynamo.ir.chunk import spec_of
from piper_dynamo.ir.spec import TensorSpec

# Rows that meet a weight of their expert: two operations per element of x and column of the weight.
_OF_EXPERTS = frozenset({"grouped_mm", "even_mm"})
_OUTER_OF_EXPERTS = frozenset({"grouped_outer", "even_outer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operator does.

    Attributes:
        name: The operator, as `mm`.
        flops: Floating-point operations; 0 for what is no product, convolution or attention.
        nbytes: Bytes read and written.
    """

    name: str
    flops: int
    nbytes: int


def work_by_operator(graph: fx.Graph) -> Iterator[Work]:
    """The work of each operator of a graph whose nodes have values; views have none."""
    for node in graph.nodes:
        if node.op == "call_function" and viewed(node) is None:
            work = work_of(node)
            if work.flops or work.nbytes:
                yield work


def work_of(node: Node) -> Work:
    """The work of one operator that is no view."""
    read = [spec for source in node.all_input_nodes for spec in _specs(source)]
    made = _specs(node)
    name = operator_name(node)
    return Work(
        name=name,
        flops=_flops(node, name, read, made),
        nbytes=sum(spec.nbytes for spec in (*read, *made)) if made else 0,
    )


def _specs(node: Node) -> list[TensorSpec]:
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return [TensorSpec.of(one) for one in value if hasattr(one, "stride")]
    spec = spec_of(node)
    return [spec] if spec is not None else []


def _flops(node: Node, name: str, read: list[TensorSpec], made: list[TensorSpec]) -> int:
    if name in _OF_EXPERTS:
        return 2 * prod(read[0].shape) * made[0].shape[-1]
    if name in _OUTER_OF_EXPERTS:
        return 2 * prod(read[0].shape) * read[1].shape[-1]
    if "scaled_dot_product" in name:
        return _attention(name, read)
    return compat.flops_of(node)


def _attention(name: str, read: list[TensorSpec]) -> int:
    """Two products of the scores' size forward, five backward: one of them is made again.

    Masks save nothing here, as in torch's formulas.
    """
    is_backward = "backward" in name
    # Legend: B batch, H heads, S queries, T keys, C head dim.
    (batch, heads, queries, dim), key = (one.shape for one in read[is_backward : is_backward + 2])
    return 2 * batch * heads * queries * key[-2] * dim * (5 if is_backward else 2)
