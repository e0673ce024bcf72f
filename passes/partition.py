"""Partition: a region's joint graph becomes the chunks F and B, or F, BI and BW.

Terms: a *bundle* is what one phase keeps for the next on the same rank: it is sized, and never
sent.

Signature: region joint -> chunks with input and output positions. Regions whose joints are equal
share one partition.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo.ir.alias import drop_dead
from piper_dynamo.ir.chunk import Chunk, copied, make_chunk, spec_of, structural_key
from piper_dynamo.ir.joint import Recomputed
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.passes.cut import RegionGraph
from piper_dynamo.passes.mincut import MinCut

# What is asked of a chunk's nodes; the rest was for the passes before.
_CHUNK_META = ("val", "constant", "stack_trace", "draw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One chunk of a region, with what it reads by position.

    Attributes:
        chunk: Its code.
        primals: Which of the region's primals it takes, in order.
        takes_bundle: Whether the previous phase's bundle comes next.
        tangents: Which of the region's tangents it takes, last.
        results: Which of the region's forward (for F) or backward outputs it gives, in order.
        gives_bundle: Whether it leaves a bundle for the next phase.
    """

    chunk: Chunk
    primals: tuple[int, ...]
    takes_bundle: bool
    tangents: tuple[int, ...]
    results: tuple[int, ...]
    gives_bundle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The phases of a class of equal regions. A phase that would compute nothing is None.

    Attributes:
        forward: F.
        backward: B.
        input_grad: BI.
        weight_grad: BW.
        recomputed: What is made again in the backward, where that was asked.
    """

    forward: Phase | None
    backward: Phase | None = None
    input_grad: Phase | None = None
    weight_grad: Phase | None = None
    recomputed: Recomputed | None = None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Those that compute something."""
        found = (self.forward, self.backward, self.input_grad, self.weight_grad)
        return tuple(phase for phase in found if phase is not None)


class Partitioner:
    """Partitions regions, each class of equal ones once."""

    def __init__(self, mode: compat.FakeTensorMode) -> None:
        """`mode` is the fake mode of the graphs' values."""
        self._cut = MinCut(mode=mode)
        self._fakes: dict[TensorSpec, torch.Tensor] = {}
        self._known: dict[tuple[Any, ...], Partition] = {}

    def __call__(
        self, region: RegionGraph, keeps_primal: tuple[bool, ...], budget: float | None = None
    ) -> Partition:
        """The region's phases.

        Args:
            region: Its joint graph.
            keeps_primal: For each primal, whether the rank holds it anyway until the backward
                (parameters, buffers, data): such values are read again, others travel in the
                bundle.
            budget: How much the forward may keep, see `MinCut`.
        """
        shape = (len(region.forward), region.needed_early, keeps_primal)
        key = (structural_key(region.graph), *shape, budget)
        if key not in self._known:
            made = self._partition(region, keeps_primal, budget)
            self._slim(made)
            self._known[key] = made
        return self._known[key]

    def _partition(
        self, region: RegionGraph, keeps_primal: tuple[bool, ...], budget: float | None
    ) -> Partition:
        if not region.backward:
            return self._phases(region, keeps_primal, copied(region.graph), None, [])
        placeholders = region.graph.find_nodes(op="placeholder")
        held = {n for n, stays in zip(placeholders, keeps_primal, strict=False) if stays}
        halves, recomputed = self._cut(region.graph, len(region.forward), held, budget)
        made = self._phases(
            region, keeps_primal, halves.forward, halves.backward, list(halves.saved)
        )
        halves.drop()
        return replace(made, recomputed=recomputed)

    def _slim(self, partition: Partition) -> None:
        """Leave what chunks are asked for: they live as long as the plans made of them.

        Nothing asks which of their values share memory by what the fake tensors say, so that one
        stands for all that look the same: a chunk has many values and few shapes.
        """
        for node in (n for phase in partition.phases for n in phase.chunk.graph.nodes):
            node.meta = {k: node.meta[k] for k in _CHUNK_META if k in node.meta}
            spec = spec_of(node)
            if spec is not None:
                node.meta["val"] = self._fakes.setdefault(spec, node.meta["val"])

    def _phases(
        self,
        region: RegionGraph,
        keeps_primal: tuple[bool, ...],
        forward: fx.Graph,
        backward: fx.Graph | None,
        saved: list[str],
    ) -> Partition:
        num_forward = len(region.forward)
        names = [n.name for n in region.graph.find_nodes(op="placeholder")]
        primal_index = {name: i for i, name in enumerate(names[: len(region.primals)])}
        tangent_index = {name: i for i, name in enumerate(names[len(region.primals) :])}
        again = {n for n in saved if n in primal_index and keeps_primal[primal_index[n]]}
        bundled = [n for n in saved if n not in again]
        _set_outputs(forward, num_forward, bundled)
        phase_f = _phase(
            forward,
            primal_index,
            {},
            bundled=(),
            results=tuple(range(num_forward)),
            gives_bundle=bool(bundled),
        )
        if backward is None:
            return Partition(forward=phase_f)
        everything = tuple(range(len(region.backward)))
        phase_b = _phase(
            backward, primal_index, tangent_index, bundled, results=everything, gives_bundle=False
        )
        if all(region.needed_early):
            return Partition(forward=phase_f, backward=phase_b, input_grad=phase_b)
        if not any(region.needed_early):
            return Partition(forward=phase_f, backward=phase_b, weight_grad=phase_b)
        halves = _split_backward(backward, region.needed_early, primal_index, keeps_primal)
        kept = halves.kept
        phase_bi = _phase(
            halves.input_grad,
            primal_index,
            tangent_index,
            bundled,
            halves.early,
            gives_bundle=bool(kept),
        )
        phase_bw = _phase(
            halves.weight_grad, primal_index, tangent_index, kept, halves.late, gives_bundle=False
        )
        return Partition(
            forward=phase_f, backward=phase_b, input_grad=phase_bi, weight_grad=phase_bw
        )


def _set_outputs(graph: fx.Graph, num_results: int, bundled: list[str]) -> None:
    """Give the results, then the bundle; drop other saved values from the outputs."""
    output = graph.find_nodes(op="output")[0]
    by_name = {n.name: n for n in graph.nodes}
    results = list(output.args[0])[:num_results]
    output.args = ((*results, *(by_name[n] for n in bundled)),)


def _phase(
    graph: fx.Graph,
    primal_index: dict[str, int],
    tangent_index: dict[str, int],
    bundled: list[str] | tuple[str, ...],
    results: tuple[int, ...],
    *,
    gives_bundle: bool,
) -> Phase | None:
    """A graph with its inputs in order: primals, bundle, tangents; None if it computes nothing."""
    drop_dead(graph)
    new = fx.Graph()
    values: dict[Node, Node] = {}
    order = {name: i for i, name in enumerate(bundled)}
    groups: dict[str, list[tuple[int, Node]]] = {"primals": [], "saved": [], "tangents": []}
    for node in graph.find_nodes(op="placeholder"):
        name = node.meta.get("saved", node.name)
        if name in order:
            groups["saved"].append((order[name], node))
        elif name in primal_index:
            if node.users:
                groups["primals"].append((primal_index[name], node))
        elif name in tangent_index:
            if node.users:
                groups["tangents"].append((tangent_index[name], node))
        else:
            raise AssertionError(f"{name} is neither saved, primal nor tangent")
    found = {i for i, _ in groups["saved"]}
    assert found == set(range(len(bundled))), (found, bundled)
    for prefix, members in groups.items():
        for count, (_, node) in enumerate(sorted(members, key=lambda m: m[0])):
            values[node] = new.placeholder(f"{prefix}_{count + 1}")
            values[node].meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            values[node] = new.node_copy(node, values.__getitem__)
            values[node].meta.pop("recompute", None)  # a chunk is what it computes
    outputs = graph.find_nodes(op="output")[0].args[0]
    new.output(tuple(values[n] if isinstance(n, Node) else n for n in outputs))
    if not outputs:
        return None
    return Phase(
        chunk=make_chunk(new, len(results)),
        primals=tuple(sorted(i for i, _ in groups["primals"])),
        takes_bundle=bool(bundled),
        tangents=tuple(sorted(i for i, _ in groups["tangents"])),
        results=results,
        gives_bundle=gives_bundle,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Halves:
    """A backward cut in two.

    Attributes:
        input_grad: BI: what the early outputs need.
        weight_grad: BW: the rest, from values that BI keeps.
        kept: The names of these values.
        early: Which outputs of the backward BI gives.
        late: Which BW gives.
    """

    input_grad: fx.Graph
    weight_grad: fx.Graph
    kept: list[str]
    early: tuple[int, ...]
    late: tuple[int, ...]


def _split_backward(
    backward: fx.Graph,
    needed_early: tuple[bool, ...],
    primal_index: dict[str, int],
    keeps_primal: tuple[bool, ...],
) -> _Halves:
    outputs = list(backward.find_nodes(op="output")[0].args[0])
    made_early = _made_early(backward, outputs, needed_early)
    gives_early = [
        now or (isinstance(o, Node) and o in made_early)
        for o, now in zip(outputs, needed_early, strict=True)
    ]
    early = tuple(i for i, now in enumerate(gives_early) if now)
    late = tuple(i for i, now in enumerate(gives_early) if not now)
    needs, made_late = _made_late([outputs[i] for i in late], made_early)
    kept = {
        n: None
        for n in backward.nodes
        if n in needs and not _read_again(n, primal_index, keeps_primal)
    }
    bi, bw = fx.Graph(), fx.Graph()
    values: dict[Node, Node] = {}
    for node in backward.nodes:
        if node.op == "placeholder" or node in made_early:
            values[node] = bi.node_copy(node, values.__getitem__)
    given = [*(outputs[i] for i in early), *kept]
    bi.output(tuple(values[o] if isinstance(o, Node) else o for o in given))
    values = {}
    for node in backward.nodes:
        if node in needs:
            values[node] = bw.placeholder(node.name)
            saved = node.name if node in kept else node.meta.get("saved", node.name)
            values[node].meta = {**node.meta, "saved": saved}
        elif node in made_late:
            values[node] = bw.node_copy(node, values.__getitem__)
    bw.output(tuple(values[o] if isinstance(o, Node) else o for o in (outputs[i] for i in late)))
    return _Halves(
        input_grad=bi, weight_grad=bw, kept=[n.name for n in kept], early=early, late=late
    )


def _made_early(
    backward: fx.Graph, outputs: list[Any], needed_early: tuple[bool, ...]
) -> set[Node]:
    """What the early outputs come from; the results of one operator stay together."""
    early: set[Node] = set()
    stack = [o for o, now in zip(outputs, needed_early, strict=True) if now and isinstance(o, Node)]
    while stack:
        node = stack.pop()
        if node not in early:
            early.add(node)
            stack += node.all_input_nodes
    for node in backward.nodes:  # a tuple cannot be kept, its members can
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and source in early and _is_tuple(source):
            early.add(node)
    return {n for n in early if n.op != "placeholder"}


def _made_late(outputs: list[Any], made_early: set[Node]) -> tuple[set[Node], set[Node]]:
    """What the late outputs come from: values that are there, and what is made of these."""
    needs: set[Node] = set()
    late: set[Node] = set()
    stack = [o for o in outputs if isinstance(o, Node)]
    while stack:
        node = stack.pop()
        if node in made_early or node.op == "placeholder":
            needs.add(node)
        elif node not in late:
            late.add(node)
            stack += node.all_input_nodes
    return needs, late


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _read_again(node: Node, primal_index: dict[str, int], keeps_primal: tuple[bool, ...]) -> bool:
    name = node.meta.get("saved", node.name)
    return name in primal_index and keeps_primal[primal_index[name]]
