"""Tie: one gradient for a parameter that several device groups hold.

Signature: placed DAG -> DAG in which each holder accumulates its own partial gradients, then adds
all holders' sums.
"""

from dataclasses import replace

from torch.fx.node import Node

from piper_dynamo.ir import ops
from piper_dynamo.ir.graph import Dag, call, producer, results_of, task_of
from piper_dynamo.ir.task import Kind, Task


class Tie:
    """Sum the gradient of a parameter over its holders, and note who makes parts of it.

    rewrite:   g = accumulate(B.PP0 on 0, B.PP1 on 1)
               ->  a = accumulate(B.PP0) on 0 ; b = accumulate(B.PP1) on 1 ; add(a, b) on 0 ; add(a,
               b) on 1
    requires:  tasks are placed
    keeps:     values up to summation order; every holder adds in the same order, so copies stay
        bit-equal
    """

    name = "tie"

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place; a gradient in the results becomes its holders' nodes."""
        results = results_of(dag.graph)
        output = dag.graph.find_nodes(op="output")[0]
        grads = {}
        readers = _readers(dag)
        for key, node in results["grads"].items():
            if task_of(node).kind is Kind.ACCUMULATE:
                grads[key] = _tie(dag, int(key), node, readers.get(key, set()))
            else:
                grads[key] = [node]
        output.args = ({**results, "grads": grads},)
        for node in list(dag.graph.nodes):
            if not node.users and task_kind(node) is Kind.ACCUMULATE:
                dag.graph.erase_node(node)


def task_kind(node: Node) -> Kind | None:
    """A node's kind; None for placeholders and picks."""
    task = node.meta.get("task")
    return task.kind if task is not None else None


def _tie(dag: Dag, position: int, node: Node, readers: set[tuple[int, ...]]) -> list[Node]:
    """The gradient on every group that reads the parameter, whether it makes a part or not."""
    parts: dict[tuple[int, ...], list[Node]] = {}
    for partial in node.all_input_nodes:
        parts.setdefault(task_of(producer(partial)).devices, []).append(partial)
    dag.makers[position] = tuple(sorted(parts))
    holders = sorted(set(parts) | readers)
    task = task_of(node)
    if len(holders) == 1:
        node.meta["task"] = replace(task, devices=holders[0])
        return [node]
    spec = node.meta["spec"]
    with dag.graph.inserting_before(node):
        sums = {
            devices: call(
                dag.graph,
                replace(task, devices=devices),
                ops.accumulate,
                tuple(found),
                name=f"{node.name}_on_{devices[0]}",
                spec=spec,
            )
            for devices, found in sorted(parts.items())
        }
        return [
            call(
                dag.graph,
                Task(kind=Kind.SUM, label=task.label, devices=devices),
                ops.add,
                tuple(sums.values()),
                name=f"{node.name}_total_{devices[0]}",
                spec=spec,
            )
            for devices in holders
        ]


def _readers(dag: Dag) -> dict[str, set[tuple[int, ...]]]:
    """The groups whose tasks read each argument, by its position as text."""
    return {
        str(node.meta["arg"]): {task_of(user).devices for user in node.users}
        for node in dag.graph.find_nodes(op="placeholder")
        if "arg" in node.meta
    }
