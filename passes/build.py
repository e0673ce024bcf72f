"""Build the one-microbatch DAG from the partitioned regions.

Signature: regions' chunks -> DAG with one F and one B task per region, connected by the model's
true dataflow.
"""

from torch import fx
from torch.fx.node import Node

from piper_dynamo.errors import PiperCaptureError, format_error
from piper_dynamo.ir import ops
from piper_dynamo.ir.alias import exchange_of, is_even_exchange, root
from piper_dynamo.ir.graph import WEIGHT, Border, Dag, call, chunk_name, pick, safe
from piper_dynamo.ir.joint import ArgKind, Capture
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind, Pass, RegionId, Task, TaskName
from piper_dynamo.passes.cut import RegionGraph
from piper_dynamo.passes.partition import Partition, Phase
from piper_dynamo.passes.regions import Regions


def build(
    capture: Capture,
    regions: Regions,
    graphs: dict[RegionId, RegionGraph],
    partitions: dict[RegionId, Partition],
) -> Dag:
    """The DAG of one microbatch.

    rewrite:   region joints -> placeholders, F and B tasks, one bundle edge F -> B per region
    requires:  no cycle among the regions' phases
    keeps:     values
    """
    builder = _Builder(capture, regions, graphs, partitions)
    for position in sorted(capture.placeholders):
        builder.placeholder(position)
    builder.tangents()
    phases = [(Pass.F, r) for r in regions.order]
    if capture.tangents:
        phases += [(Pass.B, r) for r in reversed(regions.order)]
    builder.run(phases)
    return builder.finish()


class _Builder:
    def __init__(
        self,
        capture: Capture,
        regions: Regions,
        graphs: dict[RegionId, RegionGraph],
        partitions: dict[RegionId, Partition],
    ) -> None:
        self.capture, self.regions = capture, regions
        self.graphs, self.partitions = graphs, partitions
        self.graph = fx.Graph()
        self.sources = {node.name: node for node in capture.graph.nodes}
        self.values: dict[str, Node] = {}  # by name in the captured joint graph
        self.bundles: dict[RegionId, Node] = {}
        self.partial: dict[tuple[RegionId, str], Node] = {}
        self.dag = Dag(
            graph=self.graph,
            chunks={},
            args=capture.args,
            outputs=capture.outputs,
            loss=capture.loss,
            regions={r: regions.where.get(r, "") for r in regions.order},
            training=bool(capture.tangents),
            draws={region: graph.first_draw for region, graph in graphs.items()},
            computed=capture.computed,
            sources=regions.sources,
        )

    def placeholder(self, position: int) -> None:
        arg = self.capture.args[position]
        if arg.kind is ArgKind.NUMBER:
            return
        source = self.sources[self.capture.placeholders[position]]
        node = self.graph.placeholder(safe(arg.name))
        node.meta["arg"] = position
        node.meta["spec"] = TensorSpec.of(source.meta["val"])
        self.values[source.name] = node

    def tangents(self) -> None:
        """What the backward starts from.

        With a loss it is the microbatch's weight in the whole loss, by which its loss is
        multiplied too; without one, the gradient of each output, which the caller gives.
        """
        capture = self.capture
        if capture.loss is not None:
            node = self.graph.placeholder(WEIGHT)
            node.meta["spec"] = capture.outputs[capture.loss].spec
            if capture.tangents:
                self.values[capture.tangents[capture.loss]] = node
            return
        for index, name in sorted(capture.tangents.items()):
            node = self.graph.placeholder(f"tangent_{index}")
            node.meta["spec"] = capture.outputs[index].spec
            node.meta["tangent"] = index
            self.values[name] = node

    def run(self, phases: list[tuple[Pass, RegionId]]) -> None:
        """Add the tasks as their inputs become known; one sweep does for most models."""
        left = list(phases)
        while left:
            waiting = []
            for which, region in left:
                if self._ready(which, region):
                    self._add(which, region)
                else:
                    waiting.append((which, region))
            if len(waiting) == len(left):
                raise PiperCaptureError(
                    format_error(
                        "the captured graph's regions wait for one another",
                        {
                            f"{which}.{region}": self.regions.where.get(region, "no source line")
                            for which, region in waiting
                        },
                        hint="give what runs again after another region a tag of its own",
                    )
                )
            left = waiting

    def _phase(self, which: Pass, region: RegionId) -> Phase | None:
        partition = self.partitions[region]
        return partition.forward if which is Pass.F else partition.backward

    def _inputs(self, phase: Phase, region: RegionId) -> list[str]:
        graph = self.graphs[region]
        primals = [graph.primals[i] for i in phase.primals]
        return primals + [graph.tangents[i] for i in phase.tangents]

    def _ready(self, which: Pass, region: RegionId) -> bool:
        phase = self._phase(which, region)
        needs_bundle = which is Pass.B and phase is not None and phase.takes_bundle
        if needs_bundle and region not in self.bundles:
            return False
        return phase is None or all(n in self.values for n in self._inputs(phase, region))

    def _add(self, which: Pass, region: RegionId) -> None:
        task = Task(
            kind=Kind.COMPUTE,
            name=TaskName(which=which, region=region),
            where=self.regions.where.get(region, ""),
        )
        phase = self._phase(which, region)
        bundle = self.bundles.get(region) if which is Pass.B else None
        node = add_phase(self.dag, task, phase, self.graphs[region], self.values, bundle)
        if which is Pass.B:
            node.meta["partition"] = self.partitions[region]
        if phase is None:
            return
        names = self.graphs[region].forward if which is Pass.F else self.graphs[region].backward
        for slot, result in enumerate(phase.results):
            value = pick(self.graph, node, slot, names[result], phase.chunk.outputs[slot])
            self.values.setdefault(names[result], value)
            self.partial[region, names[result]] = value
        if phase.gives_bundle:
            self.bundles[region] = pick(
                self.graph, node, len(phase.results), f"bundle_{safe(str(region))}", None
            )

    def _mark_borders(self) -> None:
        """Say of values that cross a border by an exchange which it is, and by whose counts."""
        for node in self.capture.graph.nodes:
            kind = exchange_of(node)
            if kind is None:
                continue
            value, routing = node, node
            if kind is not Kind.EXCHANGE_COUNTS:
                routing = root(node.args[1])
            if kind is Kind.UNEXCHANGE:
                value = node.args[0]
            if value.name in self.values:
                self.values[value.name].meta["border"] = Border(
                    kind=kind,
                    routing=routing.name,
                    experts=routing.meta["val"].shape[0] if is_even_exchange(node) else None,
                )

    def finish(self) -> Dag:
        capture = self.capture
        self._mark_borders()
        outputs = [self.values[o.node] if o.node is not None else None for o in capture.outputs]
        grads = {
            position: [self.partial[region, node.name] for region, node in found.items()]
            for position, found in self.regions.partials.items()
        }
        for position, parts in grads.items():
            for part in parts:  # an operator's name says nothing to the reader of a program
                part._rename(f"d_{safe(capture.args[position].name)}")
        self.graph.output(
            {
                "loss": outputs[capture.loss] if capture.loss is not None else None,
                "outputs": [o if i != capture.loss else None for i, o in enumerate(outputs)],
                "grads": {str(p): parts for p, parts in sorted(grads.items())},
                "buffers": {str(p): self.values[n] for p, n in sorted(capture.buffers.items())},
            }
        )
        self.dag.graph.lint()
        return self.dag


def add_phase(
    dag: Dag,
    task: Task,
    phase: Phase | None,
    region: RegionGraph,
    values: dict[str, Node],
    bundle: Node | None,
) -> Node:
    """A task node that runs `phase` on the values it names; an empty phase keeps its place."""
    name = safe(str(task.name))
    if phase is None:
        return call(dag.graph, task, ops.nothing, (), name=name)
    assert task.name is not None
    target = chunk_name(task.name.which, region.region)
    assert target not in dag.chunks, target
    dag.chunks[target] = phase.chunk
    args: list[Node] = [values[region.primals[i]] for i in phase.primals]
    if phase.takes_bundle:
        assert bundle is not None
        args.append(bundle)
    args += [values[region.tangents[i]] for i in phase.tangents]
    node = call(dag.graph, task, target, tuple(args), name=name)
    node.meta["phase"] = phase
    return node
