"""Chunks: the compute of one task as a flat graph, with the key that equal chunks share.

A chunk is called with one list that holds its inputs, which it empties: what the caller does not
hold dies at its last use.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node, map_arg

from piper_dynamo.ir.alias import draws, operator_name, root
from piper_dynamo.ir.spec import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One phase (F, B, BI or BW) of one class of equal regions.

    Attributes:
        key: Structural hash; chunks with the same key compute the same function.
        graph: Placeholders are the inputs in order, the output node holds the outputs in order.
        inputs: Spec of each input (None for a number).
        outputs: Spec of each output (None for a None).
        shares: For each output, whose memory it is: the index of an input, or -1 - the index of
            the first output that has it.
        num_results: Outputs that are values of the DAG; those after them go into the bundle.
        is_random: Whether it draws random numbers.
        is_ragged: Whether it runs on any number of rows: that of its specs is the even share.
        matmuls: How many matrix products and convolutions it runs.
    """

    key: str
    graph: fx.Graph
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...]
    shares: tuple[int, ...]
    num_results: int
    is_random: bool
    matmuls: int
    is_ragged: bool = False


_MATMULS = frozenset(
    (
        *("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"),
        *("grouped_mm", "grouped_outer"),
    )
)


def make_chunk(graph: fx.Graph, num_results: int) -> Chunk:
    """The chunk of a finished graph."""
    nodes = list(graph.nodes)
    calls = [n for n in nodes if n.op == "call_function"]
    outputs = nodes[-1].args[0]
    return Chunk(
        key=structural_key(graph),
        graph=graph,
        inputs=tuple(spec_of(n) for n in nodes if n.op == "placeholder"),
        outputs=tuple(spec_of(n) if isinstance(n, Node) else None for n in outputs),
        shares=_shares(nodes, outputs),
        num_results=num_results,
        is_random=any(map(draws, calls)),
        matmuls=sum(map(is_matmul, calls)),
    )


def is_matmul(node: Node) -> bool:
    """Whether an operator is a matrix product or a convolution, forward or backward."""
    return operator_name(node) in _MATMULS


def _shares(nodes: list[Node], outputs: Any) -> tuple[int, ...]:
    owner: dict[Node, int] = {n: i for i, n in enumerate(m for m in nodes if m.op == "placeholder")}
    found = []
    for index, node in enumerate(outputs):
        base = root(node) if isinstance(node, Node) else None
        found.append(owner.setdefault(base, -1 - index) if base is not None else -1 - index)
    return tuple(found)


def runnable(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs a graph, with the constants its nodes carry."""
    return fx.GraphModule(_owner_of_constants(graph), graph)


def _owner_of_constants(graph: fx.Graph) -> torch.nn.Module:
    owner = torch.nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        setattr(owner, str(node.target), node.meta["constant"])
    return owner


def function_of(graph: fx.Graph, name: Callable[[str], str]) -> Callable[..., Any]:
    """What `runnable(graph)` runs; unlike the module it does not hold the graph.

    Args:
        graph: A finished graph.
        name: What the code is compiled as, by its text, in which comments name the user's lines.
    """
    made = graph.python_code("self", verbose=True)
    namespace = dict(made.globals)
    exec(compile(made.src, name(made.src), "exec"), namespace)
    return MethodType(namespace["forward"], _owner_of_constants(graph))


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of a finished graph."""
    new = fx.Graph()
    output = new.graph_copy(graph, {})
    new.output(output)
    return new


def spec_of(node: Node) -> TensorSpec | None:
    """The spec of a node's value; None where it is not a tensor."""
    value = node.meta.get("val")
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else None


def structural_key(graph: fx.Graph) -> str:
    """A hash of operators, arguments by index, and the placeholders' specs."""
    return hashlib.sha256("\n".join(structural_lines(graph)).encode()).hexdigest()[:16]


def structural_lines(graph: fx.Graph) -> list[str]:
    """What `structural_key` is a hash of: one line for each node."""
    index: dict[Node, int] = {}
    lines: list[str] = []

    def refer(node: Node) -> Any:
        return _Ref(index[node])

    for i, node in enumerate(graph.nodes):
        index[node] = i
        if node.op == "placeholder":
            role = "t" if str(node.target).startswith("tangents") else "p"
            lines.append(f"{role} {spec_of(node)} {_stride(node)}")
            continue
        if node.op == "get_attr":
            value = node.meta["constant"]
            lines.append(f"constant {value.dtype} {value.tolist()}")
            continue
        args = map_arg(node.args, refer)
        kwargs = map_arg(node.kwargs, refer)
        marks = node.meta.get("recompute"), node.meta.get("draw")
        lines.append(f"{node.op} {_target(node.target)} {args!r} {kwargs!r} {marks}")
    return lines


class _Ref:
    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _stride(node: Node) -> str:
    spec = spec_of(node)
    return f"{spec.stride} {spec.device}" if spec is not None else ""
