"""Cutting: one joint graph per region.

Terms: a *border value* is a value made in one region and used in another (an activation in the
forward, a gradient in the backward); a *slot* is a border value's name as seen by a region; free
nodes are copied into every region using them.

Signature: joint graph + regions -> for each region a joint graph of its own, whose placeholders are
`primals_*` (parameters, buffers, data, other regions' forward values) then `tangents_*` (other
regions' backward values, the loss's tangent).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from piper_dynamo.ir.alias import draws, drop_dead, exchange_of, root
from piper_dynamo.ir.chunk import runnable
from piper_dynamo.ir.joint import Capture
from piper_dynamo.ir.spec import TensorSpec, contiguous_stride, source_meta
from piper_dynamo.ir.task import Kind, RegionId
from piper_dynamo.passes.regions import Regions


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGraph:
    """One region's joint graph; inputs and outputs are named by the captured graph's nodes.

    Attributes:
        region: Which region.
        graph: The region's own joint graph: forward outputs first, then backward outputs.
        primals: Names of what the forward and backward may read, in placeholder order.
        tangents: Names of the gradients the backward reads, in placeholder order.
        forward: Names of the values the forward gives to others, in output order.
        backward: Names of the gradients the backward gives to others or to a parameter, in
            output order.
        needed_early: For each backward output, whether another region or the user waits for it
            (BI, not BW).
        first_draw: The number of its first operator that draws random numbers, of all of the
            model's; 0 where none does. Its nodes' marks count from there.
    """

    region: RegionId
    graph: fx.Graph
    primals: tuple[str, ...]
    tangents: tuple[str, ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    needed_early: tuple[bool, ...]
    first_draw: int


def cut(capture: Capture, regions: Regions) -> dict[RegionId, RegionGraph]:
    """Cut the joint graph at every border between regions.

    rewrite:   joint -> one joint per region; values that cross a border are made contiguous
        where they are made
    requires:  every node that is not free has a region
    keeps:     values; meta of every node
    """
    number_draws(capture.graph)
    _make_borders_contiguous(capture, regions)
    _own_partials(capture, regions)
    members: dict[RegionId, list[Node]] = {region: [] for region in regions.order}
    for node in capture.graph.nodes:
        if node in regions.of:
            members[regions.of[node]].append(node)
    kept = {o.node for o in capture.outputs if o.node} | set(capture.buffers.values())
    # Exchanges at borders need the counts as a value of their own.
    kept |= {n.name for n in capture.graph.nodes if exchange_of(n) is Kind.EXCHANGE_COUNTS}
    partials: dict[RegionId, list[Node]] = {region: [] for region in regions.order}
    early: set[Node] = set()
    for position, found in regions.partials.items():
        for region, node in found.items():
            partials[region].append(node)
            if capture.args[position].kind == "data":
                early.add(node)
    return {
        region: _extract(capture, regions, region, members[region], kept, partials[region], early)
        for region in regions.order
    }


def number_draws(graph: fx.Graph) -> None:
    """Number what draws random numbers, in the order of the model.

    The number says which seed a draw has: it must not depend on where the model is cut.
    """
    for number, node in enumerate(filter(draws, graph.nodes)):
        node.meta["draw"] = number


def _count_from_first(graph: fx.Graph) -> int:
    """Let a region's draws count from its first, so that equal regions stay equal; its number."""
    drawing = [node for node in graph.nodes if "draw" in node.meta]
    first: int = min((node.meta["draw"] for node in drawing), default=0)
    for node in drawing:
        node.meta["draw"] -= first
    return first


def _crosses(node: Node, regions: Regions) -> bool:
    return any(u in regions.of and regions.of[u] != regions.of[node] for u in node.users)


def _make_borders_contiguous(capture: Capture, regions: Regions) -> None:
    """Messages are contiguous: a transposed value is copied once, by its producer."""
    graph = capture.graph
    for node in list(graph.nodes):
        if node not in regions.of or not _crosses(node, regions):
            continue
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or TensorSpec.of(value).is_contiguous:
            continue
        with graph.inserting_after(node):
            copy = graph.call_function(
                torch.ops.aten.clone.default,
                (node,),
                {"memory_format": torch.contiguous_format},
            )
        copy.meta = source_meta(node)
        with capture.mode:
            copy.meta["val"] = torch.empty_strided(
                value.shape, contiguous_stride(value.shape), dtype=value.dtype, device=value.device
            )
        copy.meta["piper_border_copy"] = True
        home = regions.of[node]
        regions.of[copy] = home
        if node in regions.is_backward:
            regions.is_backward.add(copy)
        for user in list(node.users):
            if user is not copy and regions.of.get(user, home) != home:
                user.replace_input_with(node, copy)


def _own_partials(capture: Capture, regions: Regions) -> None:
    """A value that is two parameters' gradient, or a gradient and a border value, is copied.

    Partial gradients are added up in place: each needs a node of its own.
    """
    taken: set[Node] = set()
    for _, found in sorted(regions.partials.items()):
        for region, node in found.items():
            if node.op == "placeholder" or not (node in taken or _crosses(node, regions)):
                taken.add(node)
                continue
            with capture.graph.inserting_after(node):
                copy = capture.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = {**source_meta(node), "val": node.meta["val"]}
            regions.of[copy] = region
            regions.is_backward.add(copy)
            found[region] = copy


def _extract(
    capture: Capture,
    regions: Regions,
    region: RegionId,
    nodes: list[Node],
    kept: set[str],
    partials: list[Node],
    early: set[Node],
) -> RegionGraph:
    graph = fx.Graph()
    inside = set(nodes)
    values: dict[Node, Node] = {}
    primals: list[Node] = []
    tangents: list[Node] = []
    loss_tangents = set(capture.tangents.values())

    def source_of(node: Node) -> None:
        """Find where an outside value comes from: a placeholder, or a free node's own sources."""
        if node in values or node in inside:
            return
        if node.op == "placeholder" or node in regions.of:
            is_tangent = node in regions.is_backward or node.name in loss_tangents
            (tangents if is_tangent else primals).append(node)
            return
        for source in node.all_input_nodes:
            source_of(source)

    seen: set[Node] = set()
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and source not in seen:
                seen.add(source)
                source_of(source)
    for node in partials:  # a gradient that no node of the region makes: the loss's own tangent
        source_of(node)
    primals = list(dict.fromkeys(primals))
    tangents = list(dict.fromkeys(tangents))
    stale = False
    for prefix, sources in (("primals", primals), ("tangents", tangents)):
        for i, source in enumerate(sources):
            node = graph.placeholder(f"{prefix}_{i + 1}")
            node.meta = {"val": source.meta["val"]} if "val" in source.meta else {}
            # Made contiguous by its producer after what reads it was traced.
            stale = stale or "piper_border_copy" in source.meta
            values[source] = node
    lookup: Callable[[Node], Node] = values.__getitem__

    def copy(node: Node) -> None:
        if node in values:
            return
        for source in node.all_input_nodes:
            if source not in inside:
                copy(source)
        new = graph.node_copy(node, lookup)
        if node not in inside:
            new.meta["piper_free"] = True
        values[node] = new

    for node in nodes:
        copy(node)
    forward = [
        n
        for n in nodes
        if n not in regions.is_backward and (n.name in kept or _crosses(n, regions))
    ]
    crossing = [n for n in nodes if n in regions.is_backward and _crosses(n, regions)]
    backward = list(dict.fromkeys([*crossing, *partials]))
    outputs = [values[n] for n in forward] + _own_gradients(
        graph, [values[n] for n in backward], [n in crossing for n in backward], capture
    )
    graph.output(tuple(outputs))
    if stale:
        for node in graph.nodes:  # a view of what was transposed is none of its contiguous copy
            if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
                node.target = torch.ops.aten.reshape.default
        FakeTensorProp(runnable(graph), capture.mode).propagate(
            *[values[n].meta["val"] for n in (*primals, *tangents)]
        )
    drop_dead(graph)
    return RegionGraph(
        region=region,
        graph=graph,
        primals=tuple(n.name for n in primals),
        tangents=tuple(n.name for n in tangents),
        forward=tuple(n.name for n in forward),
        backward=tuple(n.name for n in backward),
        needed_early=tuple(n in crossing or n in early for n in backward),
        first_draw=_count_from_first(graph),
    )


def _own_gradients(
    graph: fx.Graph, outputs: list[Node], shared: list[bool], capture: Capture
) -> list[Node]:
    """Copy parameter gradients that share memory with an input or output, or are expanded.

    Gradients are accumulated in place and handed to the user, so each needs memory of its own.
    """
    seen: dict[Node, int] = {}
    for node in outputs:
        seen[root(node)] = seen.get(root(node), 0) + 1
    own: list[Node] = []
    for node, is_border in zip(outputs, shared, strict=True):
        base = root(node)
        value = node.meta["val"]
        expanded = any(s == 0 and n > 1 for s, n in zip(value.stride(), value.shape, strict=True))
        if is_border or (seen[base] == 1 and base.op != "placeholder" and not expanded):
            own.append(node)
            continue
        copy = graph.call_function(
            torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
        copy.meta = {key: value for key, value in node.meta.items() if key != "draw"}
        with capture.mode:
            copy.meta["val"] = torch.empty_strided(
                value.shape, contiguous_stride(value.shape), dtype=value.dtype, device=value.device
            )
        own.append(copy)
    return own
