"""Static: chunks of expert regions that always get as many rows for each expert and rank.

Legend: R ranks share E experts, each has E / R of them and sends c rows to each: r = E * c rows,
which is also what a rank gets. They are sent, and come, by rank, then expert: [R, E / R, c].

Signature: a chunk's graph for all experts -> for one rank's; rows by rank -> by expert; products
for experts -> one batched product.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, Node

from piper_dynamo.ir.spec import source_meta
from piper_dynamo.moe import slots

aten = torch.ops.aten


def share_experts(graph: fx.Graph, size: int) -> None:
    """Let products be for one rank's share of the experts."""
    for node in graph.nodes:
        if node.target in (slots.even_mm, slots.even_outer):
            node.args = (*node.args[:2], int(str(node.args[2])) // size)


def sort_by_expert(
    graph: fx.Graph, inputs: Mapping[int, int], results: Mapping[int, int], *, size: int
) -> None:
    """Rows by rank become rows by expert where they enter, and the other way where they leave.

    Args:
        graph: A chunk's.
        inputs: Which of its inputs are rows, and how many experts E they are for.
        results: Likewise.
        size: R.
    """
    placeholders = graph.find_nodes(op="placeholder")
    first = placeholders[-1].next
    for place, experts in inputs.items():
        value = placeholders[place]
        users = list(value.users)
        with graph.inserting_before(first):
            found = _turned(graph, value, size, experts // size)
        for user in users:
            user.replace_input_with(value, found)
    output = graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for place, experts in results.items():
        with graph.inserting_before(output):
            values[place] = _turned(graph, values[place], experts // size, size)
    output.args = (tuple(values),)


def _turned(graph: fx.Graph, value: Node, first: int, second: int) -> Node:
    """Rows by `first` things, then by `second` others, the other way round."""
    if first == 1 or second == 1:
        return value
    shape = list(value.meta["val"].shape)
    apart = [first, second, shape[0] // first // second, *shape[1:]]
    opened = _add(graph, value, aten.view.default, value, apart)
    turned = _add(graph, value, aten.transpose.int, opened, 0, 1)
    return _add(graph, value, aten.view.default, _dense(graph, turned), shape)


def _add(graph: fx.Graph, origin: Node, target: Any, *args: Argument) -> Node:
    """A node that works for another, with its tags and line."""
    node = graph.call_function(target, args)
    node.meta = source_meta(origin)
    return node


def _dense(graph: fx.Graph, value: Node) -> Node:
    node = _add(graph, value, aten.clone.default, value)
    node.kwargs = {"memory_format": torch.contiguous_format}
    return node


def multiply_in_batches(graph: fx.Graph) -> None:
    """Products for experts as batched ones, which any compiler knows.

    rewrite:   even_mm(x, w, E)     ->  view(bmm(view(x, [E, c, d]), w), [E * c, h])
               even_outer(x, y, E)  ->  bmm(transpose(view(x, [E, c, d])), view(y, [E, c, h]))
    keeps:     values
    """
    for node in list(graph.nodes):
        if node.target not in (slots.even_mm, slots.even_outer):
            continue
        first, second, experts = node.args
        with graph.inserting_before(node):
            x = _by_expert(graph, node, first, experts)
            if node.target is slots.even_mm:
                product = _add(graph, node, aten.bmm.default, x, second)
                shape = list(node.meta["val"].shape)
                new = _add(graph, node, aten.view.default, product, shape)
            else:
                y = _by_expert(graph, node, second, experts)
                turned = _add(graph, node, aten.transpose.int, x, 1, 2)
                new = _add(graph, node, aten.bmm.default, turned, y)
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _by_expert(graph: fx.Graph, product: Node, rows: Any, experts: Any) -> Node:
    """[E * c, d] -> [E, c, d], for a product."""
    count, width = rows.meta["val"].shape
    shape = [experts, count // int(str(experts)), width]
    if not rows.meta["val"].is_contiguous():
        rows = _dense(graph, rows)
    return _add(graph, product, aten.view.default, rows, shape)
