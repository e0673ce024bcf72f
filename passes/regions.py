"""Regions: which part of the model each node of the joint graph belongs to.

Terms: a *run* is a stretch of consecutive forward nodes with the same tags; a *region* is the union
of runs with the same tags, split into *visits* where the union would make a cycle (PP 0 -> 1 -> 0).
A node is *free* when it is computed from parameters and constants alone: free nodes belong to no
region and are recomputed wherever they are used. A *tail* is a backward node that carries a
parameter's gradient back through free nodes (a transpose, a cast, the sum of two uses): it is
linear, so each region keeps its own partial gradient instead of a sum across regions.

Signature: joint graph -> region of every node that is not free, partial gradients per parameter and
region.
"""

import sys
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo.ir.alias import exchange_of, is_random, operator_name
from piper_dynamo.ir.joint import OUTPUT_COPY, ArgKind, Capture
from piper_dynamo.ir.spec import Source, module_paths, user_line
from piper_dynamo.ir.tags import adopt, number_entries, tags_of
from piper_dynamo.ir.task import RegionId
from piper_dynamo.passes.pieces import Cuts, number_pieces

Tags = tuple[tuple[str, int], ...]


@dataclass(slots=True, kw_only=True)
class Regions:
    """The joint graph cut into regions.

    Attributes:
        order: Regions in forward order.
        of: Region of each node that is neither a placeholder nor free.
        is_backward: Names of the nodes that depend on a tangent.
        partials: For each argument position with a gradient: the partial gradient of each region.
        where: The first user line of each region.
        sources: The modules and user lines that each region comes from, in order, each once.
        untagged: User lines of forward nodes that carried no tag, and the region they joined.
    """

    order: tuple[RegionId, ...]
    of: dict[Node, RegionId]
    is_backward: set[Node]
    partials: dict[int, dict[RegionId, Node]]
    where: dict[RegionId, str]
    sources: dict[RegionId, tuple[Source, ...]]
    untagged: tuple[tuple[str, RegionId], ...] = field(default=())


def find_regions(capture: Capture, cuts: Cuts | None = None) -> Regions:
    """Assign every node of the joint graph to a region; `cuts` cut regions into pieces.

    rewrite:   a parameter's gradient summed over regions -> one partial gradient per region
    requires:  the graph is functional; forward nodes come before the backward nodes they feed
    keeps:     values up to summation order; every node's meta
    """
    graph = capture.graph
    backward = _tangent_dependents(capture)
    free = _free_nodes(capture, backward)
    tags = number_entries({n: tags_of(n) for n in graph.nodes if n.op == "call_function"})
    forward = [
        n for n in graph.nodes if n.op == "call_function" and n not in backward and n not in free
    ]
    # What autograd made of forward values alone belongs to the operator whose backward it is.
    made = _made_by_autograd(graph, forward, backward)
    forward = [n for n in forward if n not in made]
    untagged = adopt(forward, tags)
    pieces = number_pieces(capture, forward, tags, free, cuts or Cuts())
    of, order = _merge_runs(forward, tags, pieces)
    seq = _forward_by_seq(capture, backward | made)
    tails = _tails(capture, backward, free, seq)
    grad_nodes = _grad_nodes(capture)
    _place_backward(graph, backward, made, tails, tags, seq, of, order)
    partials = _split_tails(capture, grad_nodes, tails, of, order)
    where: dict[RegionId, str] = {}
    sources: dict[RegionId, dict[Source, None]] = {}
    for node in forward:
        line, module = user_line(node), (module_paths(node) or [""])[-1]
        if line:
            where.setdefault(of[node], line)
        if line or module:
            sources.setdefault(of[node], {})[Source(module=module, line=line)] = None
    return Regions(
        order=order,
        of=of,
        is_backward=backward | {n for found in partials.values() for n in found.values()},
        partials=partials,
        where=where,
        sources={region: tuple(found) for region, found in sources.items()},
        untagged=tuple((user_line(n), of[n]) for n in untagged),
    )


def _tangent_dependents(capture: Capture) -> set[Node]:
    found: set[Node] = set()
    tangents = set(capture.tangents.values())
    for node in capture.graph.nodes:
        if node.name in tangents or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _made_by_autograd(graph: fx.Graph, forward: list[Node], backward: set[Node]) -> set[Node]:
    """Which of the nodes that depend on no tangent autograd has made for its backward.

    Torch does not always say so: not of those of a custom Function's backward, which come after
    the first node that depends on a tangent.
    """
    place = {n: i for i, n in enumerate(graph.nodes)}
    first = min((place[n] for n in backward if n.op == "call_function"), default=len(place))
    return {n for n in forward if compat.is_marked_backward(n) or place[n] > first}


def _free_nodes(capture: Capture, backward: set[Node]) -> set[Node]:
    """Nodes computed from parameters, unchanging buffers and constants alone."""
    sources = {
        capture.placeholders[a.position]
        for a in capture.args
        if a.kind is ArgKind.PARAMETER
        or (a.kind is ArgKind.BUFFER and a.position not in capture.buffers)
    }
    keep = {o.node for o in capture.outputs} | set(capture.buffers.values())
    free: set[Node] = set()
    for node in capture.graph.nodes:
        if node.op == "placeholder":
            if node.name in sources:
                free.add(node)
        elif (
            node.op in ("call_function", "get_attr")
            and node not in backward
            and not is_random(node)
            and not exchange_of(node)  # it is a border, whatever the routing is made of
            and node.name not in keep
            and all(i in free for i in node.all_input_nodes)
        ):
            free.add(node)
    return {n for n in free if n.op != "placeholder"}


def _merge_runs(
    forward: list[Node], tags: dict[Node, dict[str, int]], pieces: dict[Node, int]
) -> tuple[dict[Node, RegionId], tuple[RegionId, ...]]:
    """A run joins the last region of its tags unless a path leaves that and comes back.

    A further piece of a region is a region of its own.
    """
    of: dict[Node, RegionId] = {}
    before: dict[RegionId, set[RegionId]] = {}  # all regions a region depends on
    last: dict[Tags, RegionId] = {}
    piece: dict[RegionId, int] = {}
    run: list[Node] = []

    def close() -> None:
        if not run:
            return
        key = tuple(tags[run[0]].items())
        sources = {of[i] for n in run for i in n.all_input_nodes if i in of}
        region = last.get(key)
        comes_back = region is not None and any(
            s != region and region in before[s] for s in sources
        )
        if region is None or comes_back or piece[region] != pieces[run[0]]:
            region = RegionId(tags=key, visit=0 if region is None else region.visit + 1)
            piece[region] = pieces[run[0]]
            before[region] = set()
            last[key] = region
        ancestors = (sources | {a for s in sources for a in before[s]}) - {region}
        for other, known in before.items():
            if other == region or region in known:
                known |= ancestors
        for node in run:
            of[node] = region
        run.clear()

    for node in forward:
        source = node.args[0] if node.args else None
        if run and _is_getitem(node) and isinstance(source, Node) and source in run:
            tags[node] = tags[run[0]]
        if run and (tags[node] != tags[run[0]] or pieces[node] != pieces[run[0]]):
            close()
        run.append(node)
    close()
    order = _topological(list(before), before)
    return of, order


def _topological(
    regions: list[RegionId], before: dict[RegionId, set[RegionId]]
) -> tuple[RegionId, ...]:
    """Forward order; among the ready ones, the first seen."""
    done: list[RegionId] = []
    left = list(regions)
    while left:
        ready = next(r for r in left if not (before[r] & set(left)))
        done.append(ready)
        left.remove(ready)
    return tuple(done)


def _is_getitem(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _forward_by_seq(capture: Capture, backward: set[Node]) -> dict[int, Node]:
    """The forward node that autograd numbered; its backward nodes have the same number.

    An operator that needs no gradient shows the number of the operator before it, so the first
    counts. What a custom Function's backward makes shows that of the last operator of all, whatever
    it belongs to.
    """
    found: dict[int, Node] = {}
    for node in capture.graph.nodes:
        if node in backward and node.op == "call_function":
            break
        number = node.meta.get("seq_nr")
        # Output copies are the last operators, whose number accumulation nodes show by mistake.
        is_copy = OUTPUT_COPY in (node.meta.get("custom") or {})
        is_forward = node.op == "call_function" and node not in backward and not is_copy
        if is_forward and number is not None:
            found.setdefault(number, node)
    return found


def _grad_nodes(capture: Capture) -> dict[int, Node]:
    by_name = {n.name: n for n in capture.graph.nodes}
    return {position: by_name[name] for position, name in capture.grads.items()}


def _tails(
    capture: Capture, backward: set[Node], free: set[Node], seq: dict[int, Node]
) -> set[Node]:
    """Backward nodes that only carry parameter gradients through free nodes."""
    params = {a.position for a in capture.args if a.kind is not ArgKind.DATA}
    ends = {node for position, node in _grad_nodes(capture).items() if position in params}
    tails: set[Node] = set()
    for node in reversed(list(capture.graph.nodes)):
        if node not in backward or node.op != "call_function":
            continue
        if not (node in ends or node.users) or not all(user in tails for user in node.users):
            continue
        of_free = seq.get(node.meta.get("seq_nr", -1)) in free and _is_linear(node)
        if _is_accumulation(node) or of_free:
            carried = [i for i in node.all_input_nodes if i in backward]
            if _is_sum(node) or len(carried) == 1:
                tails.add(node)
    return tails


# Operators linear in any one of their tensor arguments: a custom Function's backward need not be.
_LINEAR = frozenset(
    (
        *("t", "transpose", "permute", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"),
        *("expand", "sum", "clone", "neg", "mul", "div", "mm", "bmm", "_to_copy", "getitem"),
        *("slice_backward", "select_backward"),
    )
)


def _is_linear(node: Node) -> bool:
    return operator_name(node) in _LINEAR


def _is_sum(node: Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor and len(node.args) == 2 and not node.kwargs


def _is_accumulation(node: Node) -> bool:
    return bool(node.meta.get("is_gradient_acc")) and _is_sum(node)


def _place_backward(
    graph: fx.Graph,
    dependent: set[Node],
    made: set[Node],
    tails: set[Node],
    tags: dict[Node, dict[str, int]],
    seq: dict[int, Node],
    of: dict[Node, RegionId],
    order: tuple[RegionId, ...],
) -> None:
    """Assign a region to every backward node other than tails: dependent on a tangent, or made."""
    late: list[Node] = []
    latest: dict[Node, int] = {}  # the place in forward order of the last region it may be in
    backward = dependent | made
    rank = {region: i for i, region in enumerate(order)}
    for node in graph.nodes:
        if node.op != "call_function" or node in of or node in tails or node not in backward:
            continue
        found = None
        if not _is_accumulation(node):
            made_by = seq.get(node.meta.get("seq_nr", -1))
            found = of.get(made_by) if made_by is not None else None
            # Nodes of a custom Function's backward show no number of its own.
            if found is None or (tags[node] and found.tags != tuple(tags[node].items())):
                found = _of_tags(node, tags[node], of, rank, latest) or found
        if found is None:
            late.append(node)
            latest[node] = _latest(node, latest)
        else:
            of[node] = found
            if node in dependent:
                latest[node] = rank[found]
    for node in late:
        sources = {of[i] for i in node.all_input_nodes if i in of and i in backward}
        # A custom Function's backward goes where what its forward saved is, so that only gradients
        # are sent.
        saved = {of[i] for i in node.all_input_nodes if i in of and i not in backward}
        least = min((rank[r] for r in sources), default=len(order))
        near = [r for r in saved if rank[r] <= least]
        if near or len(sources) == 1:
            of[node] = max(near, key=rank.__getitem__) if near else next(iter(sources))
            continue
        # What passes a residual branch unchanged comes to its region anyway: summed there, it need
        # not be sent on beside the branch's own gradient.
        parts = [i for i in node.all_input_nodes if i in of and i in backward]
        there = [r for r in sources if all(of[i] == r or _used_in(i, r, of) for i in parts)]
        if there:
            of[node] = min(there, key=rank.__getitem__)
            continue
        # Pieces of one region sum what it would have summed, in the one that runs last: what leaves
        # them is the gradient of what came in, as of experts, which take rows and give them back.
        if len({region.tags for region in sources}) == 1:
            of[node] = min(sources, key=rank.__getitem__)
            continue
        users = [of[u] for u in node.users if u in of]
        # The forward value was made in the last region, in forward order, that uses its gradient:
        # others made what passed through there unchanged, and come later in the backward.
        if users:
            of[node] = max(users, key=rank.__getitem__)
        else:
            of[node] = min(sources, key=rank.__getitem__) if sources else order[-1]


def _latest(node: Node, latest: dict[Node, int]) -> int:
    """The place of the last region whose backward has all the gradients that a node reads."""
    return min((latest[i] for i in node.all_input_nodes if i in latest), default=sys.maxsize)


def _of_tags(
    node: Node,
    tags: dict[str, int],
    of: dict[Node, RegionId],
    rank: dict[RegionId, int],
    latest: dict[Node, int],
) -> RegionId | None:
    """The region with a backward node's tags, where no operator of the forward is known for it.

    Of several visits or pieces, the one whose forward values it reads, or else the last whose
    backward has its gradients.
    """
    alike = [region for region in rank if region.tags == tuple(tags.items())]
    if not tags or len(alike) < 2:
        return alike[0] if tags and alike else None
    forward = [of[i] for i in node.all_input_nodes if i in of and i not in latest]
    near = [region for region in forward if region in alike] or alike
    found = [region for region in near if rank[region] <= _latest(node, latest)]
    return max(found or alike[:1], key=rank.__getitem__)


def _used_in(node: Node, region: RegionId, of: dict[Node, RegionId]) -> bool:
    return any(of.get(user) == region for user in node.users)


def _loss_region(
    capture: Capture, of: dict[Node, RegionId], order: tuple[RegionId, ...]
) -> RegionId:
    names = {capture.outputs[index].node for index in capture.tangents}
    found = [region for node, region in of.items() if node.name in names]
    return found[0] if found else order[-1]


def _split_tails(
    capture: Capture,
    grads: dict[int, Node],
    tails: set[Node],
    of: dict[Node, RegionId],
    order: tuple[RegionId, ...],
) -> dict[int, dict[RegionId, Node]]:
    """Each region's partial gradient of each argument; tails are copied per region."""
    rank = {region: i for i, region in enumerate(order)}
    split: dict[Node, dict[RegionId, Node]] = {}
    for node in [n for n in capture.graph.nodes if n in tails]:
        parts = [split.get(i) or {of[i]: i} for i in node.all_input_nodes if i in split or i in of]
        regions = sorted({r for part in parts for r in part}, key=rank.__getitem__)
        if not regions:  # the gradient of a parameter that the loss reads with nothing between
            regions = [_loss_region(capture, of, order)]
        if len(regions) == 1:
            of[node] = regions[0]
            split[node] = {regions[0]: node}
            continue
        found: dict[RegionId, Node] = {}
        for region in regions:
            mine = [part[region] for part in parts if region in part]
            if _is_sum(node) and len(mine) == 1:
                found[region] = mine[0]
                continue
            originals = [i for i in node.all_input_nodes if i in split or i in of]
            swap = dict(zip(originals, [p.get(region) for p in parts], strict=True))
            with capture.graph.inserting_after(node):
                copy = capture.graph.node_copy(node, lambda i, swap=swap: swap.get(i) or i)  # type: ignore[misc]
            of[copy] = region
            found[region] = copy
        split[node] = found
    partials: dict[int, dict[RegionId, Node]] = {}
    for position, node in grads.items():
        partials[position] = split.get(node) or {of.get(node, order[-1]): node}
    return partials
