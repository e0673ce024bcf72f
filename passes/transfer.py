"""Transfer: send what one device group makes and another uses.

Signature: placed DAG -> DAG in which every value is used where it is, or received there.
"""

from dataclasses import replace
from typing import Any

from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, format_error
from piper_dynamo.ir import ops
from piper_dynamo.ir.graph import Dag, call, is_pick, producer, results_of, task_of
from piper_dynamo.ir.task import Kind, Task


class Transfer:
    """Insert one send and receive per value and destination group.

    rewrite:   F.PP1.MB0(h) on 1, h made on 0  ->  s = send(h) on 0 ; r = recv(s) on 1 ;
        F.PP1.MB0(r)
    requires:  every task has devices; groups have one size
    keeps:     values; a value used three regions on goes there directly, once per destination group
    """

    name = "transfer"

    def __init__(self, *, outputs_everywhere: bool = False) -> None:
        """`outputs_everywhere` brings every output to every group, not only the loss."""
        self._outputs_everywhere = outputs_everywhere

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place."""
        self._local_slices(dag)
        received: dict[tuple[Node, tuple[int, ...]], Node] = {}
        for node in list(dag.graph.nodes):
            task = node.meta.get("task")
            if task is None or not task.devices:
                continue
            for source in node.all_input_nodes:
                if source.op == "placeholder":
                    continue
                if task_of(producer(source)).devices != task.devices:
                    local = self._receive(dag, source, task.devices, received)
                    node.replace_input_with(source, local)
        self._spread_results(dag, received)

    def _local_slices(self, dag: Dag) -> None:
        """Every group slices its own copy of the batch: nobody relays inputs."""
        for node in list(dag.graph.nodes):
            task = node.meta.get("task")
            if task is None or task.kind is not Kind.SLICE:
                continue
            by_group: dict[tuple[int, ...], list[Node]] = {}
            for user in node.users:
                by_group.setdefault(task_of(user).devices, []).append(user)
            for i, (devices, users) in enumerate(sorted(by_group.items())):
                if i == 0:
                    node.meta["task"] = replace(task, devices=devices)
                    continue
                with dag.graph.inserting_after(node):
                    copy = dag.graph.node_copy(node)
                copy._rename(f"{node.name}_on_{devices[0]}")
                copy.meta["task"] = replace(task, devices=devices)
                for user in users:
                    user.replace_input_with(node, copy)

    def _receive(
        self,
        dag: Dag,
        value: Node,
        devices: tuple[int, ...],
        received: dict[tuple[Node, tuple[int, ...]], Node],
    ) -> Node:
        if (value, devices) in received:
            return received[value, devices]
        made = task_of(producer(value))
        if "spec" not in value.meta:
            raise PiperPlanError(
                format_error(
                    "a bundle would have to be sent",
                    {"of": made.name, "at": made.where, "from": made.devices, "to": devices},
                    hint="place the forward and the backward of a microbatch on the same ranks",
                )
            )
        after = value
        while after.next.op == "call_function" and is_pick(after.next):
            after = after.next
        with dag.graph.inserting_after(after):
            sent = call(
                dag.graph,
                Task(
                    kind=Kind.SEND,
                    name=made.name,
                    label=value.name,
                    devices=made.devices,
                    stream="send",
                    where=made.where,
                ),
                ops.send,
                (value,),
                {"source": made.devices, "target": devices},
                name=f"send_{value.name}_to_{devices[0]}",
                spec=value.meta["spec"],
            )
        with dag.graph.inserting_after(sent):
            local = call(
                dag.graph,
                Task(
                    kind=Kind.RECV,
                    name=made.name,
                    label=value.name,
                    devices=devices,
                    stream="recv",
                    where=made.where,
                ),
                ops.recv,
                (sent,),
                name=f"{value.name}_on_{devices[0]}",
                spec=value.meta["spec"].contiguous(),
            )
        if "buffer" in value.meta:
            local.meta["buffer"] = value.meta["buffer"]
        received[value, devices] = local
        return local

    def _spread_results(self, dag: Dag, received: dict[tuple[Node, tuple[int, ...]], Node]) -> None:
        """The loss on every group; a changed buffer, an input's gradient where these are read."""
        output = dag.graph.find_nodes(op="output")[0]
        results: dict[str, Any] = dict(results_of(dag.graph))
        groups = sorted({task_of(n).devices for n in dag.tasks()})
        loss = results["loss"]
        if loss is not None:
            results["loss"] = [self._at(dag, loss, g, received) for g in groups]
        results["outputs"] = [
            node
            and [
                self._at(dag, node, g, received)
                for g in (groups if self._outputs_everywhere else [_devices(node, groups)])
            ]
            for node in results["outputs"]
        ]
        readers = _readers(dag)
        results["buffers"] = {
            key: [self._at(dag, node, g, received) for g in readers.get(key, [])]
            for key, node in results["buffers"].items()
        }
        results["grads"] = {
            key: [self._at(dag, nodes[0], g, received) for g in readers[key]]
            if task_of(producer(nodes[0])).kind is Kind.CONCAT
            else nodes
            for key, nodes in results["grads"].items()
        }
        output.args = (results,)

    def _at(
        self,
        dag: Dag,
        value: Node,
        devices: tuple[int, ...],
        received: dict[tuple[Node, tuple[int, ...]], Node],
    ) -> Node:
        if value.op == "placeholder" or task_of(producer(value)).devices == devices:
            return value
        return self._receive(dag, value, devices, received)


def _readers(dag: Dag) -> dict[str, list[tuple[int, ...]]]:
    """The groups that read each argument, or what a microbatch leaves of a buffer to the next."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for node in dag.graph.nodes:
        position = node.meta.get("arg", node.meta.get("buffer"))
        if position is not None:
            tasks = [task_of(user) for user in node.users if "task" in user.meta]
            reading = {t.devices for t in tasks if t.kind in (Kind.COMPUTE, Kind.SLICE)}
            found.setdefault(str(position), set()).update(reading)
    return {key: sorted(groups) for key, groups in found.items()}


def _devices(node: Node, groups: list[tuple[int, ...]]) -> tuple[int, ...]:
    task = producer(node).meta.get("task")
    return task.devices if task is not None else groups[0]
