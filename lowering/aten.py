"""Chunks that run operator by operator, with less memory traffic than their graphs ask for.

Four rewrites, each on a copy of a chunk's graph:

- `simplify` drops operators that change nothing, and what stands for exchanges of rows; results
  stay the same bit by bit.
- `write_over` lets a pointwise operator write over an operand that dies there; the same bits.
- `add_into` lets a matrix product that is a parameter's gradient add to the sum of the microbatches
  before (one rounding less per element than adding afterwards).
- `write_in_blocks` lets a product that is a whole gradient be written into memory that the step
  uses again; the same bits.

Draws get their seeds as `draws.py` says.

Signature: chunk -> a graph that runs; chunk -> which of its outputs can be added into sums.
"""

from collections import Counter
from typing import Any

from torch import Tag, fx, ops
from torch._ops import OpOverload
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo import blocks
from piper_dynamo.ir.alias import (
    drop_dead,
    exchange_of,
    is_even_exchange,
    is_random,
    root,
    viewed,
)
from piper_dynamo.ir.chunk import Chunk, copied, spec_of
from piper_dynamo.lowering.draws import seed_draws

aten = ops.aten
_COMMUTES = (aten.add.Tensor, aten.mul.Tensor)
# Pointwise operators without an in-place form, which can be told where to write.
_TOLD_WHERE = {
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
}
_addable: dict[tuple[str, int], tuple[int, ...]] = {}


def addable(chunk: Chunk) -> tuple[int, ...]:
    """Which results are matrix products, turned or not, that no operator of the chunk reads."""
    key = (chunk.key, chunk.num_results)
    if key not in _addable:
        outputs = _outputs(chunk.graph)
        times = Counter(node for node in outputs if isinstance(node, Node))
        _addable[key] = tuple(
            i
            for i, node in enumerate(outputs[: chunk.num_results])
            if _product(node) is not None and times[node] == 1
        )
    return _addable[key]


def runnable_graph(
    chunk: Chunk, adds: tuple[int, ...] = (), passing: tuple[int, ...] = ()
) -> fx.Graph:
    """The chunk's graph as it runs: one list in, which it empties.

    Args:
        chunk: Which.
        adds: Outputs, some of `addable(chunk)`, that it adds into sums: it takes these after its
            other inputs, in the same order, and gives them back in place of the outputs.
        passing: Outputs, others than these, that are gone before the step ends.
    """
    graph = copied(chunk.graph)
    if adds:
        add_into(graph, adds)
    simplify(graph)
    write_over(graph)
    write_in_blocks(graph, passing)
    seed_draws(graph)
    graph.set_codegen(compat.boxed_codegen())
    return graph


def add_into(graph: fx.Graph, positions: tuple[int, ...]) -> None:
    """Add products into given sums.

    rewrite:   w = a @ b ; return w   ->   s = placeholder ; s.addmm_(a, b) ; return s
    requires:  `positions` as `addable` gives them
    """
    outputs = _outputs(graph)
    inputs = graph.find_nodes(op="placeholder")
    for position in positions:
        old = outputs[position]
        product = _product(old)
        assert isinstance(old, Node)
        assert product is not None
        with graph.inserting_after(inputs[-1]):
            total = graph.placeholder(f"into_{position}")  # a name that no operator has
        total.meta = {"val": old.meta["val"]}
        inputs.append(total)
        with graph.inserting_before(product):
            target = total
            node = old
            while (source := _turned(node)) is not None:
                target = graph.call_function(aten.t.default, (target,))
                target.meta = {"val": total.meta["val"].t()}
                node = source
            added = graph.call_function(aten.addmm_.default, (target, *product.args))
            added.meta = dict(product.meta)
        outputs[position] = total
    graph.output_node().args = (tuple(outputs),)
    drop_dead(graph)


def simplify(graph: fx.Graph) -> None:
    """Drop what gives its operand: a transposition of a transposition, a power of one."""
    drop_stand_ins(graph)
    given = {root(node) for node in _outputs(graph) if isinstance(node, Node)}
    for node in list(graph.nodes):
        same = _same_as(node)
        # An output keeps the memory that the chunk says it has.
        if same is not None and (viewed(node) is not None or node not in given):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    drop_dead(graph)


def drop_stand_ins(graph: fx.Graph) -> None:
    """Drop the copies that stand for exchanges of rows: the real ones are between chunks by now.

    rewrite:   y = exchange(x, counts)   ->   y = x
    requires:  x is laid out as y; where y is an output, x is made in this graph, fills its memory
               and is in no other output
    keeps:     every value, and which outputs share memory
    """
    given = {root(node) for node in _outputs(graph) if isinstance(node, Node)}
    for node in list(graph.nodes):
        if not exchange_of(node) or is_even_exchange(node):
            continue
        source = node.args[0]
        assert isinstance(source, Node)
        owner = root(source)
        have, whole = spec_of(source), spec_of(owner)
        if have is None or have != spec_of(node):
            continue
        if node in given:
            is_own = owner.op == "call_function" and owner not in given
            if not is_own or whole is None or whole.nbytes != have.nbytes:
                continue
            given.add(owner)
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _same_as(node: Node) -> Node | None:
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if _turned(node) is not None:
        return _turned(source)
    is_first_power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 1
    return source if is_first_power and spec_of(node) == spec_of(source) else None


def write_over(graph: fx.Graph) -> None:
    """Let pointwise operators write over what dies there; linear in the nodes.

    rewrite:   y = op(x, ...)   ->   y = op_(x, ...)
    requires:  x is made in this graph, fills its memory, and has y's shape, strides and dtype;
               nothing reads that memory later, nor does `op` through another view of it
    keeps:     every value
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    memory = _Memory()
    for node in graph.nodes:
        memory.add(node, max((position[user] for user in node.users), default=position[node]))
    for node in graph.nodes:
        found = _written_over(node, memory, position[node])
        if found is not None:
            memory.hand_over(found, node)


def write_in_blocks(graph: fx.Graph, positions: tuple[int, ...]) -> None:
    """Take the memory of large products from the step's blocks.

    rewrite:   w = a @ b ; return w   ->   m = block() ; w = mm(a, b, out=m) ; return w
    requires:  w is dense; nothing keeps the outputs at `positions` beyond the step
    """
    outputs = _outputs(graph)
    for node in dict.fromkeys(outputs[position] for position in positions):
        spec = spec_of(node)
        if node.target is not aten.mm.default or spec is None or not spec.is_dense:
            continue
        with graph.inserting_before(node):
            block = graph.call_function(blocks.empty, (spec.shape, node.args[0]))
        node.target, node.kwargs = aten.mm.out, {"out": block}


class _Memory:
    """Whose memory each node is, and where each memory is read last."""

    def __init__(self) -> None:
        self._owner: dict[Node, Node] = {}
        self._last: dict[Node, int] = {}

    def add(self, node: Node, last: int) -> None:
        """A node, whose value is read last at this place."""
        base = viewed(node)
        owner = self.of(base) if base is not None else node
        self._owner[node] = owner
        self._last[owner] = max(self._last.get(owner, 0), last)

    def of(self, node: Node) -> Node:
        """The node that made the memory."""
        while (owner := self._owner[node]) is not node:
            self._owner[node] = self._owner[owner]
            node = owner
        return node

    def last(self, node: Node) -> int:
        """Where anything reads this node's memory last."""
        return self._last[self.of(node)]

    def hand_over(self, old: Node, new: Node) -> None:
        """`new` now lies in `old`'s memory."""
        owner = self.of(old)
        self._last[owner] = self._last[self.of(new)]
        self._owner[self.of(new)] = owner


def _written_over(node: Node, memory: _Memory, here: int) -> Node | None:
    """Make `node` write over an operand, and say which; None where it cannot."""
    target = node.target
    if (
        node.op != "call_function"
        or not isinstance(target, OpOverload)
        or Tag.pointwise not in target.tags
        or is_random(node)
    ):
        return None
    operands = node.all_input_nodes
    for index, operand in enumerate(node.args[:2]):
        if not isinstance(operand, Node) or not _may_take(operand, node, memory, here):
            continue
        if any(memory.of(o) is memory.of(operand) for o in operands if o is not operand):
            continue  # another view of what it would write
        if target in _TOLD_WHERE:
            told, name = _TOLD_WHERE[target]
            node.target = told
            node.kwargs = {**node.kwargs, name: operand}
            return operand
        in_place = _in_place(target)
        if in_place is None:
            return None
        if index == 1:
            if target not in _COMMUTES or node.kwargs:
                return None
            node.args = (operand, node.args[0])
        node.target = in_place
        return operand
    return None


def _may_take(operand: Node, node: Node, memory: _Memory, here: int) -> bool:
    owner = memory.of(operand)
    have, want, whole = spec_of(operand), spec_of(node), spec_of(owner)
    return (
        owner.op == "call_function"
        and memory.last(operand) == here
        and have is not None
        and have == want
        and whole is not None
        and have.nbytes == whole.nbytes
        and have.is_dense
    )


def _in_place(target: OpOverload) -> OpOverload | None:
    """The operator's in-place form with the same arguments."""
    packet = getattr(aten, target._schema.name.removeprefix("aten::") + "_", None)
    overload = getattr(packet, target._overloadname, None)
    if not isinstance(overload, OpOverload):
        return None
    ours, theirs = target._schema.arguments, overload._schema.arguments
    same = [(a.name, str(a.type)) for a in ours] == [(a.name, str(a.type)) for a in theirs]
    return overload if same else None


def _product(node: object) -> Node | None:
    """The matrix product of which `node` is the value, turned or not, and nobody else's."""
    while isinstance(node, Node) and len(node.users) == 1:
        if node.target is aten.mm.default:
            return node
        node = _turned(node)
    return None


def _turned(node: Node) -> Node | None:
    """The matrix of which `node` is the transposition."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    spec = spec_of(source)
    if spec is None or len(spec.shape) != 2:
        return None
    swaps = (
        node.target is aten.t.default
        or (node.target is aten.transpose.int and (node.args[1] - node.args[2]) % 2)  # type: ignore[operator]
        or (node.target is aten.permute.default and [d % 2 for d in node.args[1]] == [1, 0])  # type: ignore[operator, union-attr]
    )
    return source if swaps else None


def _outputs(graph: fx.Graph) -> list[Any]:
    found = graph.output_node().args[0]
    assert isinstance(found, tuple | list)
    return list(found)
