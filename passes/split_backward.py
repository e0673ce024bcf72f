"""Split backward: B becomes BI (what others wait for) and BW (the rest).

Signature: DAG with tasks B, and the tasks to split -> DAG with BI and BW in their place.
"""

from collections.abc import Set as AbstractSet
from dataclasses import replace

from torch.fx.node import Node

from piper_dynamo.ir import ops
from piper_dynamo.ir.graph import Dag, call, chunk_name, pick, safe, task_of
from piper_dynamo.ir.task import Pass, TaskName
from piper_dynamo.passes.partition import Partition, Phase


class SplitBackward:
    """Split the backward of the named tasks.

    rewrite:   B.PP0.MB0  ->  BI.PP0.MB0 ; BW.PP0.MB0, with one bundle edge between them
    requires:  the tasks exist and are unsplit
    keeps:     values bitwise; BI and BW together run exactly B's matrix products
    """

    name = "split_backward"

    def __init__(self, tasks: AbstractSet[TaskName]) -> None:
        self._tasks = tasks

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place."""
        for node in list(dag.tasks()):
            if task_of(node).name in self._tasks:
                _split(dag, node)


def _split(dag: Dag, node: Node) -> None:
    partition: Partition = node.meta["partition"]
    whole: Phase | None = node.meta.get("phase")
    task = task_of(node)
    assert task.name is not None
    inputs = _Inputs(node, whole)
    new: dict[int, Node] = {}  # by index of the backward output
    bundle = inputs.bundle
    with dag.graph.inserting_before(node):
        for which, phase in ((Pass.BI, partition.input_grad), (Pass.BW, partition.weight_grad)):
            name = task.name.with_pass(which)
            part = replace(task, name=name)
            if phase is None:
                call(dag.graph, part, ops.nothing, (), name=safe(str(name)))
                continue
            target = chunk_name(which, name.region)
            dag.chunks[target] = phase.chunk
            args = inputs.of(phase, bundle)
            half = call(dag.graph, part, target, args, name=safe(str(name)))
            half.meta["phase"] = phase
            for slot, result in enumerate(phase.results):
                new[result] = pick(
                    dag.graph, half, slot, f"{half.name}_{slot}", phase.chunk.outputs[slot]
                )
            if phase.gives_bundle:
                bundle = pick(dag.graph, half, len(phase.results), f"bundle_{half.name}", None)
    for old in list(node.users):
        assert whole is not None
        replacement = new[whole.results[int(str(old.args[1]))]]
        label = old.name
        replacement.meta.update({k: v for k, v in old.meta.items() if k == "border"})
        old.replace_all_uses_with(replacement)
        dag.graph.erase_node(old)
        replacement._rename(label)
    dag.graph.erase_node(node)


class _Inputs:
    """A B task's inputs by the region's own numbering, to be dealt out to its halves."""

    def __init__(self, node: Node, phase: Phase | None) -> None:
        self.bundle: Node | None = None
        self._primals: dict[int, Node] = {}
        self._tangents: dict[int, Node] = {}
        if phase is None:
            return
        args = [a for a in node.args if isinstance(a, Node)]
        assert len(args) == len(node.args)
        split = len(phase.primals)
        self._primals = dict(zip(phase.primals, args[:split], strict=True))
        if phase.takes_bundle:
            self.bundle = args[split]
            split += 1
        self._tangents = dict(zip(phase.tangents, args[split:], strict=True))

    def of(self, phase: Phase, bundle: Node | None) -> tuple[Node, ...]:
        args = [self._primals[i] for i in phase.primals]
        if phase.takes_bundle:
            assert bundle is not None
            args.append(bundle)
        return (*args, *(self._tangents[i] for i in phase.tangents))
