"""The work of operators: floating-point operations and bytes, from their formulas and shapes.

FLOPs are those of `flops.py`; a multiply-add counts as two. Bytes are what an operator reads and
writes if nothing of it is in a cache; a view has none.

Signature: chunk graph -> the work of each of its operators.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx
from torch.fx.node import Node

from piper_dynamo.ir.alias import operator_name, viewed
from piper_dynamo.ir.chunk import spec_of
from piper_dynamo.ir.flops import flops_of
from piper_dynamo.ir.spec import TensorSpec


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
    return Work(
        name=operator_name(node),
        flops=flops_of(node),
        nbytes=sum(spec.nbytes for spec in (*read, *made)) if made else 0,
    )


def _specs(node: Node) -> list[TensorSpec]:
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return [TensorSpec.of(one) for one in value if hasattr(one, "stride")]
    spec = spec_of(node)
    return [spec] if spec is not None else []
