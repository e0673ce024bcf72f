"""Capacity: expert regions whose experts take a fixed number of rows each.

Terms: *slots* hold the rows that experts take, as many for each expert whatever the routing
(`moe/slots.py`); an expert region is *static* once it works on slots.

Signature: joint graph, its regions, and capacities by filter -> the same with static regions. It
comes before the regions are cut: what padding needs is part of the graph that is partitioned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node, map_arg

from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir.alias import exchange_of, operator_name, root
from piper_dynamo.ir.joint import Capture
from piper_dynamo.ir.spec import source_meta, user_line
from piper_dynamo.ir.task import Kind, RegionId
from piper_dynamo.moe import slots
from piper_dynamo.moe.capacity import Capacity
from piper_dynamo.passes.padding import Padding, padding_of, to_mask
from piper_dynamo.passes.regions import Regions
from piper_dynamo.passes.rows import COMES_BACK, ONLY_ROWS, Unfit, free_views, sizes_refused

aten = torch.ops.aten
_EVEN = {"grouped_mm": slots.even_mm, "grouped_outer": slots.even_outer}


# A region's nodes: a dict, since rewriting adds some and removes others.
_Members = dict[RegionId, dict[Node, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How many rows the experts of some regions take of one routing.

    Attributes:
        filter: Which regions.
        capacity: How many.
        label: The directive, for a message.
    """

    filter: Any
    capacity: Capacity
    label: str = field(compare=False)

    def covers(self, region: RegionId) -> bool:
        """Whether it is for a region's experts."""
        return bool(self.filter.matches(dict(region.tags)))


@dataclass(slots=True, kw_only=True)
class _Routing:
    """One `dispatch`, the operators that know it by its counts, and the regions of its rows."""

    arrived: Node
    to_experts: list[Node] = field(default_factory=list)
    from_experts: list[Node] = field(default_factory=list)
    products: list[Node] = field(default_factory=list)
    others: list[Node] = field(default_factory=list)
    inside: tuple[RegionId, ...] = ()


def set_capacities(capture: Capture, regions: Regions, bounds: Sequence[Bound]) -> None:
    """Make the regions that a capacity is asked for static.

    rewrite:   x = exchange(rows, counts) ; y = grouped_mm(x, w, counts) ; unexchange(y, counts)
               ->  x = pad(rows, counts, c) ; y = even_mm(x, w, E) ; unpad(y, counts, r)
               and the same in the backward; factors of experts' gradients are masked where padding
               might not vanish by itself
    requires:  the rows of a dispatch are used by such a region alone, which treats rows alike
    keeps:     values, if no expert is asked to take more than c rows; otherwise those of a model in
        which the rows of an expert after its first c give zeros, and get none of the gradient

    Raises:
        PiperPlanError: Lists every region that cannot be made static.
    """
    if not bounds:
        return
    members = _members(regions)
    found: list[tuple[_Routing, Bound]] = []
    for routing in _routings(capture, regions):
        wanted = next((b for b in bounds if any(map(b.covers, routing.inside))), None)
        if wanted is not None:
            found.append((routing, wanted))
    faults = [f for r, wanted in found for f in _check(capture, regions, members, r, wanted)]
    if not faults:
        for routing, wanted in found:
            _rewrite(capture, regions, members, routing, wanted.capacity)
        faults += _propagate(capture)
    if faults:
        raise PiperPlanError(join_faults("these experts cannot have a capacity", faults))
    static = {region for routing, _ in found for region in routing.inside}
    _mask(capture, regions, [n for n in capture.graph.nodes if regions.of.get(n) in static])


def _members(regions: Regions) -> _Members:
    found: _Members = {}
    for node, region in regions.of.items():
        found.setdefault(region, {})[node] = None
    return found


def _routings(capture: Capture, regions: Regions) -> list[_Routing]:
    found: dict[Node, _Routing] = {}
    for node in capture.graph.nodes:
        kind = exchange_of(node)
        if kind is Kind.EXCHANGE_COUNTS:
            found[node] = _Routing(arrived=node)
            continue
        for arrived in dict.fromkeys(map(root, node.all_input_nodes)):
            if arrived not in found or root(node) is arrived:
                continue
            routing = found[arrived]
            if kind is Kind.EXCHANGE:
                routing.to_experts.append(node)
            elif kind is Kind.UNEXCHANGE:
                routing.from_experts.append(node)
            elif operator_name(node) in _EVEN:
                routing.products.append(node)
            else:
                routing.others.append(node)
    for routing in found.values():
        routing.inside = _inside(routing, regions)
    return list(found.values())


def _inside(routing: _Routing, regions: Regions) -> tuple[RegionId, ...]:
    """The regions that work on the routing's rows."""
    nodes = [user for node in routing.to_experts for user in node.users]
    nodes += routing.products
    nodes += [n for node in routing.from_experts for n in node.args[:1] if isinstance(n, Node)]
    return tuple(
        dict.fromkeys(regions.of[n] for n in nodes if n in regions.of and exchange_of(n) is None)
    )


def _returned(capture: Capture) -> set[str | None]:
    """The names of what a call gives back: outputs, and new values of buffers."""
    return {o.node for o in capture.outputs} | set(capture.buffers.values())


def _leaks(
    capture: Capture, regions: Regions, members: _Members, mine: Sequence[RegionId]
) -> list[tuple[RegionId, RegionId | str]]:
    """What leaves the forward of expert regions otherwise than by `combine`."""
    found: dict[tuple[RegionId, RegionId | str], None] = {}
    returned = _returned(capture)
    for region in mine:
        for node in members[region]:
            if node.name in returned:
                found[region, "an output or a buffer"] = None
            if node in regions.is_backward:
                continue
            for user in node.users:
                home = regions.of.get(user, region)
                if user not in regions.is_backward and home not in mine and not exchange_of(user):
                    found[region, home] = None
    return list(found)


def _check(
    capture: Capture, regions: Regions, members: _Members, routing: _Routing, wanted: Bound
) -> list[str]:
    def at(region: RegionId) -> str:
        return f"{region} ({regions.where.get(region, 'no source line')})"

    faults = [
        f"{at(region)} works on rows that experts take by {wanted.label}, but is not one of their "
        "regions\n  hint  let only the expert region use what piper.moe.dispatch sends, and only "
        "piper.moe.combine what comes back"
        for region in routing.inside
        if not wanted.covers(region)
    ]
    mine = [region for region in routing.inside if wanted.covers(region)]
    faults += [
        f"{at(region)} gives {other} a value that {COMES_BACK}"
        for region, other in _leaks(capture, regions, members, mine)
    ]
    faults += [
        f"{user_line(node)} {node} reads how many rows an expert gets, which is not known by "
        f"{wanted.label}\n  hint  read routing.counts outside of the expert region"
        for node in routing.others
        if regions.of.get(node) in routing.inside
    ]
    return faults


def _rewrite(
    capture: Capture, regions: Regions, members: _Members, routing: _Routing, capacity: Capacity
) -> None:
    """Slots instead of rows. Nodes stay, and so do their names: only what they call changes."""
    arrived = routing.arrived
    counts = arrived.args[0]
    assert isinstance(counts, Node)
    experts = counts.meta["val"].shape[0]
    for node in routing.to_experts:
        rows = node.args[0]
        assert isinstance(rows, Node)
        num_rows = rows.meta["val"].shape[0]
        node.target = slots.pad
        node.args = (rows, counts, capacity.slots_per_expert(num_rows, experts))
    for node in routing.from_experts:
        num_rows = node.meta["val"].shape[0]
        node.target = slots.unpad
        node.args = (node.args[0], counts, num_rows)
    for node in routing.products:
        node.target = _EVEN[operator_name(node)]
        node.args = (*node.args[:2], experts)

    def adopt(new: Node, old: Node) -> None:
        """A node made in the place of another."""
        region = regions.of[new] = regions.of[old]
        members[region].pop(old, None)
        members[region][new] = None
        if old in regions.is_backward:
            regions.is_backward.add(new)

    for num_rows in dict.fromkeys(n.meta["val"].shape[0] for n in routing.from_experts):
        nodes = [node for region in routing.inside for node in members[region]]
        free_views(capture.graph, num_rows, nodes, adopt)
    results = _returned(capture)
    for node in (*list(arrived.users), arrived):
        if not node.users and node.name not in results:
            region = regions.of.pop(node, None)
            if region is not None:
                members[region].pop(node, None)
            capture.graph.erase_node(node)


def _propagate(capture: Capture) -> list[str]:
    """New values in `meta` for what follows from slots; why some operator cannot take them."""
    moved: set[Node] = set()
    for node in capture.graph.nodes:
        is_first = node.target in (slots.pad, slots.unpad)
        if node.op != "call_function" or not (
            is_first or "val" not in node.meta or any(i in moved for i in node.all_input_nodes)
        ):
            continue
        old = node.meta.get("val")
        args, kwargs = map_arg(node.args, _value), map_arg(node.kwargs, _value)
        try:
            with capture.mode, sizes_refused(node):
                new = node.target(*args, **kwargs)
        except Unfit as error:
            return [f"{error}\n  hint  {ONLY_ROWS}"]
        node.meta["val"] = new
        node.meta.pop("tensor_meta", None)
        if old is None or _form(old) != _form(new):
            moved.add(node)
    return []


def _value(node: Node) -> Any:
    return node.meta["val"] if "val" in node.meta else node.meta["constant"]


def _form(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_form(v) for v in value]
    return (value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def _mask(capture: Capture, regions: Regions, nodes: Sequence[Node]) -> None:
    """Leave padding out of experts' gradients where it might not vanish.

    rewrite:   w = even_outer(x, y)   ->   w = even_outer(masked(x), y), or masked(y), or both
               where masked(x) is x, and zeros in rows whose result has a gradient of zeros

    Such a row adds nothing to any gradient, padding or not; so nobody needs to tell the experts
    which rows are padding.
    """
    known: dict[Node, Padding] = {
        n: Padding.ZERO for n in capture.graph.nodes if n.target is slots.pad
    }
    for node in nodes:
        rows = [n for n in node.all_input_nodes if n in known]
        if rows and node.target not in (slots.even_outer, slots.unpad):
            known[node] = padding_of(node, known)
    masks = _Masks(capture, regions)
    for node in nodes:
        if node.target is not slots.even_outer:
            continue
        factors = node.args[:2]
        x, y = (known.get(f, Padding.ANY) for f in factors if isinstance(f, Node))
        for place in to_mask(x, y):
            value = factors[place]
            assert isinstance(value, Node)
            node.replace_input_with(value, masks.masked(value, node))


class _Masks:
    """Values with zeros in rows that have no gradient, each made once."""

    def __init__(self, capture: Capture, regions: Regions) -> None:
        self._capture, self._regions = capture, regions
        self._empty: dict[tuple[Node, ...], Node] = {}  # by the gradients that come to the experts
        self._masked: dict[tuple[Node, Node], Node] = {}

    def masked(self, value: Node, user: Node) -> Node:
        """A factor of an expert's gradient, in which padding is zeros."""
        empty = self._is_empty(self._gradients(user), user)
        if (value, empty) not in self._masked:
            new = self._add(user, aten.masked_fill.Scalar, (value, empty, 0))
            self._masked[value, empty] = new
        return self._masked[value, empty]

    def _gradients(self, user: Node) -> tuple[Node, ...]:
        """The gradients of the experts' results behind a node of their backward."""
        found: set[Node] = set()
        seen: set[Node] = set()
        stack = list(user.all_input_nodes)
        while stack:
            node = stack.pop()
            if node in seen or node not in self._regions.is_backward:
                continue
            seen.add(node)
            if node.target is slots.pad:
                found.add(node)
            else:
                stack += node.all_input_nodes
        assert found, f"{user} has no gradient of rows behind it"
        return tuple(sorted(found))

    def _is_empty(self, gradients: tuple[Node, ...], user: Node) -> Node:
        """Which rows are zeros in all of them: [E * c, 1]. `user` is the first to ask."""
        if gradients not in self._empty:
            each = []
            for gradient in gradients:
                size = self._add(user, aten.abs.default, (gradient,))
                most = self._add(user, aten.amax.default, (size, [1], True))
                each.append(self._add(user, aten.eq.Scalar, (most, 0)))
            while len(each) > 1:
                pair = (each.pop(), each.pop())
                each.append(self._add(user, aten.logical_and.default, pair))
            self._empty[gradients] = each[0]
        return self._empty[gradients]

    def _add(self, before: Node, target: Any, args: tuple[Any, ...]) -> Node:
        graph: fx.Graph = self._capture.graph
        with graph.inserting_before(before):
            node = graph.call_function(target, args)
        node.meta = source_meta(before)
        with self._capture.mode:
            node.meta["val"] = target(*map_arg(args, _value))
        self._regions.of[node] = self._regions.of[before]
        self._regions.is_backward.add(node)
        return node
