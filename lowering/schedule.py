"""Schedule: a total order of the compute tasks of every device group.

What Orders leave open is filled by list scheduling: tasks start as their inputs arrive, backward
before forward before weight gradient, early microbatches first. Where no order is given at all, a
stage holds at most as many microbatches in flight as there are stages from it to the end, which is
the memory of 1F1B.

Signature: placed DAG with orders -> per device group, its tasks in the order they run.
"""

import heapq

from torch.fx.node import Node

from piper_dynamo.ir.graph import Dag, producer, task_of
from piper_dynamo.ir.task import Kind, Pass, RegionId, TaskName

COST = {Pass.F: 1.0, Pass.B: 2.0, Pass.BI: 1.0, Pass.BW: 1.0}  # in units of a forward
_URGENCY = {Pass.B: 0, Pass.BI: 0, Pass.F: 1, Pass.BW: 2}


def schedule(dag: Dag) -> dict[tuple[int, ...], list[Node]]:
    """Run the DAG on an ideal machine, free communication, and record who ran what when.

    Returns:
        Every compute task (empty phases too), grouped by devices, in running order. Deterministic.
    """
    nodes = [n for n in dag.graph.nodes if n.meta.get("task") is not None]
    index = {node: i for i, node in enumerate(nodes)}
    successors, waiting = _edges(dag, nodes, index)
    depth = _depth(dag)
    order: dict[tuple[int, ...], list[Node]] = {}
    ready: dict[tuple[int, ...], list[tuple[tuple[int, int, int], int]]] = {}
    free_at: dict[tuple[int, ...], float] = {}
    events: list[tuple[float, int]] = []  # a node's work is done

    def release(vertex: int, now: float) -> None:
        """A node has all it waits for."""
        task = task_of(nodes[vertex])
        if task.kind is not Kind.COMPUTE or nodes[vertex].meta.get("phase") is None:
            if task.kind is Kind.COMPUTE:
                order.setdefault(task.devices, []).append(nodes[vertex])
            heapq.heappush(events, (now, vertex))
            return
        assert task.name is not None
        key = (_URGENCY[task.name.which], task.name.mb or 0, -depth[task.name.region])
        if task.name.which is not Pass.F:
            key = (key[0], key[1], depth[task.name.region])
        heapq.heappush(ready.setdefault(task.devices, []), (key, vertex))

    for vertex, count in enumerate(waiting):
        if count == 0:
            release(vertex, 0.0)
    now = 0.0
    while True:
        # Finish everything that ends now before anyone chooses, so that the choice does not depend
        # on event order.
        while events and events[0][0] <= now:
            _, vertex = heapq.heappop(events)
            for target in successors[vertex]:
                waiting[target] -= 1
                if waiting[target] == 0:
                    release(target, now)
        for devices in sorted(ready):
            if ready[devices] and free_at.get(devices, 0.0) <= now:
                _, vertex = heapq.heappop(ready[devices])
                name = task_of(nodes[vertex]).name
                assert name is not None
                order.setdefault(devices, []).append(nodes[vertex])
                free_at[devices] = now + COST[name.which]
                heapq.heappush(events, (free_at[devices], vertex))
        if not events:
            break
        now = max(now, events[0][0])
    scheduled = sum(map(len, order.values()))
    assert scheduled == sum(1 for _ in dag.tasks()), "a cycle got past the order pass"
    return order


def _depth(dag: Dag) -> dict[RegionId, int]:
    """Stages from each region to the end; the pieces of one stage count once."""
    later: set[object] = set()
    found: dict[RegionId, int] = {}
    for region in reversed(dag.regions):
        later.add(region.tags)
        found[region] = len(later)
    return found


def _edges(
    dag: Dag, nodes: list[Node], index: dict[Node, int]
) -> tuple[list[list[int]], list[int]]:
    successors: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)

    def edge(before: Node, after: Node) -> None:
        successors[index[before]].append(index[after])
        waiting[index[after]] += 1

    for node in nodes:
        for source in node.all_input_nodes:
            if producer(source) in index:
                edge(producer(source), node)
    for before, after, _ in dag.orders:
        edge(before, after)
    if not dag.orders and dag.training:
        for before, after in _in_flight_bounds(dag):
            edge(before, after)
    return successors, waiting


def _in_flight_bounds(dag: Dag) -> list[tuple[Node, Node]]:
    """F of microbatch k waits for the backward of microbatch k - depth on the same region."""
    forward: dict[TaskName, Node] = {}
    backward: dict[TaskName, Node] = {}
    for node in dag.tasks():
        name = task_of(node).name
        assert name is not None
        if name.which is Pass.F:
            forward[name] = node
        elif name.which in (Pass.B, Pass.BI) and node.meta.get("phase") is not None:
            backward[name.with_pass(Pass.F)] = node
    depth = _depth(dag)
    bounds = []
    for name, node in forward.items():
        assert name.mb is not None
        earlier = TaskName(which=Pass.F, region=name.region, mb=name.mb - depth[name.region])
        if earlier in backward:
            bounds.append((backward[earlier], node))
    return bounds
