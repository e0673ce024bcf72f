"""Min-cut: a region's joint graph is cut into forward and backward, keeping what was asked.

Signature: joint graph and budget -> forward graph, backward graph, what passes between them.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import fx
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo.garbage import collect, young_collector
from piper_dynamo.ir.chunk import copied, is_matmul, runnable, spec_of
from piper_dynamo.ir.flops import total_flops
from piper_dynamo.ir.joint import Recomputed
from piper_dynamo.passes import recompute
from piper_dynamo.passes.recompute import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The two halves of a region's joint graph.

    Attributes:
        forward: Its results, then what it keeps.
        backward: Takes what was kept, whose names are in `meta["saved"]`, and the gradients.
        saved: Names of what is kept: nodes of the forward, or inputs.
        kept: The nodes of the joint graph that are kept, but for inputs that are there anyway.
    """

    forward: fx.Graph
    backward: fx.Graph
    saved: tuple[str, ...]
    kept: tuple[Node, ...]

    @property
    def kept_bytes(self) -> int:
        """Of what the forward keeps."""
        return sum(spec.nbytes for spec in map(spec_of, self.kept) if spec is not None)

    def drop(self) -> None:
        """Free the graphs."""
        compat.drop_graph(self.forward)
        compat.drop_graph(self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinCut:
    """Cuts joint graphs with torch's min-cut partitioner.

    Attributes:
        mode: The fake mode of the graphs' values.
    """

    mode: compat.FakeTensorMode

    def __call__(
        self, graph: fx.Graph, num_forward: int, held: AbstractSet[Node], budget: float | None
    ) -> tuple[Halves, Recomputed | None]:
        """The halves of a joint graph, and what is made again if anything was asked.

        Args:
            graph: A region's joint graph; left as it is but for marks in `meta`.
            num_forward: How many of its outputs are the forward's.
            held: Its inputs that the rank has in the backward anyway.
            budget: What it may keep between its inputs alone (0) and what it keeps unasked (1).
        """
        for place, node in enumerate(graph.nodes):
            node.meta["place"] = place

        def cut(kept: AbstractSet[Node] | None = None, *, checkpoints: bool = True) -> Halves:
            wanted = recompute.policies(graph, held, kept=kept, checkpoints=checkpoints)
            return self._cut(graph, num_forward, held, wanted, apart=kept is None)

        plain = cut()
        found = plain
        if budget is not None and budget < 1:
            bare = cut(frozenset())
            spare = plain.kept_bytes - bare.kept_bytes
            if spare <= 0:  # the inputs are more than what is kept of them
                bare.drop()
            elif budget == 0:
                found = bare
            else:
                found = cut(self._chosen(plain, bare, held, int(budget * spare)))
                bare.drop()
        has_checkpoints = recompute.is_checkpointed(graph)
        if budget is None and not has_checkpoints:
            return plain, None
        unasked = cut(checkpoints=False) if has_checkpoints else plain
        report = _report(found, unasked)
        for one in (plain, unasked):
            if one is not found:
                one.drop()
        return found, report

    def _chosen(
        self, plain: Halves, bare: Halves, held: AbstractSet[Node], most: int
    ) -> frozenset[Node]:
        """What stays of what is kept unasked, beside what is kept in any case."""
        always = {*bare.kept, *held}
        values = [n for n in plain.kept if n.op == "call_function" and n not in always]
        return frozenset(recompute.choose(values, always, most))

    def _cut(
        self,
        graph: fx.Graph,
        num_forward: int,
        held: AbstractSet[Node],
        wanted: dict[Node, Policy],
        *,
        apart: bool,
    ) -> Halves:
        nodes = list(graph.nodes)
        joint = runnable(copied(graph))
        pairs = zip(joint.graph.nodes, nodes, strict=True)
        advice = {new: wanted[old] for new, old in pairs if old in wanted}
        recompute.advise(joint.graph, advice, apart=apart)
        inputs = [n.meta["val"] for n in nodes if n.op == "placeholder"]
        with young_collector():
            fw, bw = compat.min_cut_partition(joint, inputs, num_forward, self.mode)
        (output,) = fw.graph.find_nodes(op="output")
        kept: list[Node] = list(output.args[0])[num_forward:]
        saved = [n.name for n in kept]
        takes = list(bw.graph.find_nodes(op="placeholder"))
        forward, backward = fw.graph, copied(bw.graph)
        # The partitioner's backward takes the saved values by position, then the tangents.
        by_name = {n.name: n for n in backward.find_nodes(op="placeholder")}
        for name, old in zip(saved, takes[: len(saved)], strict=True):
            by_name[old.name].meta["saved"] = name
        for half in (forward, backward):
            recompute.restore_draws(half)
        for done in (joint.graph, bw.graph):
            compat.drop_graph(done)
        collect()
        origins = [nodes[n.meta["place"]] for n in kept]
        return Halves(
            forward=forward,
            backward=backward,
            saved=tuple(saved),
            kept=tuple(n for n in origins if n not in held),
        )


def _report(halves: Halves, unasked: Halves) -> Recomputed:
    """What the backward makes again: operators of both halves."""
    forward, backward = (
        [n for n in half.nodes if n.op == "call_function"]
        for half in (halves.forward, halves.backward)
    )
    done = {n.meta["place"] for n in forward}
    again = [n for n in backward if n.meta["place"] in done]
    return Recomputed(
        kept_bytes=halves.kept_bytes,
        kept_without=unasked.kept_bytes,
        flops=total_flops(again),
        matmuls=sum(map(is_matmul, again)),
    )
