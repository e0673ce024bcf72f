"""Gather: sharded parameters made whole where they are used.

Terms: a *use* is a task that reads sharded parameters; a gather is issued some uses ahead of the
one it is for (`prefetch`), and what it gives stays for that use, for the step, or until its place
is needed (`keep`).

Signature: DAG with layouts, and the order of every device group's tasks -> DAG with gathers, and
order edges that say when they are issued.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch.fx.node import Node

from piper_dynamo.ir import ops
from piper_dynamo.ir.graph import Dag, Layout, collective, producer, safe, task_of
from piper_dynamo.ir.task import Kind, Task

Devices = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Gather:
    """One gather of a bucket, from its first use until it is let go.

    Attributes:
        bucket: Which bucket.
        at: The index, among the uses, of the one it is for.
        readers: Tasks that read what it gives.
        positions: Parameters that they read.
    """

    bucket: str
    at: int
    readers: list[Node] = field(default_factory=list)
    positions: dict[int, None] = field(default_factory=dict)


class Gather:
    """Insert a gather per bucket and residency, and bound how many gradient shards are in flight.

    rewrite:   F(w) ; B(w)
               keep "chunk"  ->  F(all_gather([w])) ; B(all_gather([w]))
               keep "step"   ->  a = all_gather([w]) ; F(a) ; B(a)
               keep k        ->  as "step" while at most k buckets are there; the one whose next
                   use is furthest makes room (Belady 1966)
               order edges   ->  issued after the task that runs just before `prefetch` uses ahead;
                   a microbatch's reductions follow the end of those of the task before
    requires:  the order is that in which the group's ranks run their tasks
    keeps:     values
    """

    name = "gather"

    def __init__(self, order: Mapping[Devices, Sequence[Node]]) -> None:
        self._order = order

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place."""
        sharded: dict[Devices, dict[int, Layout]] = {}
        for (position, devices), layout in dag.layouts.items():
            if layout.shard_groups:
                sharded.setdefault(devices, {})[position] = layout
        # Behind the parameters, and casts of them.
        first = next(n for n in dag.graph.nodes if n.op != "placeholder" and "arg" not in n.meta)
        for devices, layouts in sharded.items():
            tasks = self._order[devices]
            reads = {i: found for i, n in enumerate(tasks) if (found := _reads(n, layouts))}
            places = list(reads)
            with dag.graph.inserting_before(first):
                for gather in _plan([(tasks[i], found) for i, found in reads.items()], layouts):
                    self._insert(dag, devices, gather, layouts, places)
        self._chain_reductions(dag)

    def _insert(
        self,
        dag: Dag,
        devices: Devices,
        gather: _Gather,
        layouts: dict[int, Layout],
        uses: list[int],
    ) -> None:
        tasks = self._order[devices]
        layout = layouts[next(iter(gather.positions))]
        user = gather.readers[0]
        inputs = (n for reader in gather.readers for n in reader.all_input_nodes)
        sources = {n.meta["arg"]: n for n in inputs if "arg" in n.meta}
        name = f"{gather.bucket}.{task_of(user).name}"
        made = collective(
            dag.graph,
            Task(
                kind=Kind.ALL_GATHER,
                label=f"params.{name}",
                devices=devices,
                stream=layout.stream,
                where=task_of(user).where,
            ),
            ops.all_gather,
            [sources[p] for p in gather.positions],
            layout.shard_groups,
            name=f"all_gather_{safe(name)}_on_{devices[0]}",
            results=[
                (f"{sources[p].name}_for_{user.name}", layouts[p].used(sources[p].meta["spec"]))
                for p in gather.positions
            ],
        )
        for reader in gather.readers:
            for position, whole in zip(gather.positions, made, strict=True):
                reader.replace_input_with(sources[position], whole)
        ahead = uses[max(gather.at - layout.prefetch, 0)]
        if ahead:
            dag.orders.append((tasks[ahead - 1], producer(made[0]), layout.where))

    def _chain_reductions(self, dag: Dag) -> None:
        """A microbatch's reductions start when those of the group's task before have ended.

        So whole gradients of two tasks at most are there, and each reduction has a task's time.
        """
        place = {n: (d, i) for d, tasks in self._order.items() for i, n in enumerate(tasks)}
        by_task: dict[tuple[Devices, int], dict[Node, None]] = {}
        for node in dag.graph.nodes:
            task = node.meta.get("task")
            if task is None or task.kind is not Kind.ACCUMULATE:
                continue
            for part in [producer(n) for n in node.all_input_nodes]:
                if task_of(part).kind is not Kind.COMPUTE:
                    made = max(place[_maker(n)] for n in part.all_input_nodes)
                    by_task.setdefault(made, {})[part] = None
        for before, after in pairwise(sorted(by_task)):
            if before[0] == after[0]:
                dag.orders += [
                    (a, b, "one task's reductions at a time")
                    for a in by_task[before]
                    for b in by_task[after]
                ]


def _maker(value: Node) -> Node:
    """The task that makes a value, cast or not."""
    made = producer(value)
    return _maker(made.all_input_nodes[0]) if task_of(made).kind is Kind.CAST else made


def _reads(node: Node, layouts: Mapping[int, Layout]) -> list[int]:
    if node.meta.get("phase") is None:
        return []
    return [n.meta["arg"] for n in node.all_input_nodes if n.meta.get("arg") in layouts]


def _plan(uses: Sequence[tuple[Node, list[int]]], layouts: Mapping[int, Layout]) -> list[_Gather]:
    """The gathers of one device group, in the order in which they are needed."""
    wanted = [dict.fromkeys(layouts[p].bucket for p in reads) for _, reads in uses]
    later: dict[str, list[int]] = {}  # the uses of each bucket, last first
    for i in reversed(range(len(uses))):
        for bucket in wanted[i]:
            later.setdefault(bucket, []).append(i)
    resident: dict[str, _Gather] = {}
    found: list[_Gather] = []
    keep = {layout.bucket: layout for layout in layouts.values()}
    for i, (node, reads) in enumerate(uses):
        for bucket in wanted[i]:
            later[bucket].pop()
            gather = resident.get(bucket)
            if gather is None:
                gather = _Gather(bucket=bucket, at=i)
                found.append(gather)
                _make_room(resident, keep, bucket, wanted[i], later)
                if keep[bucket].keep != "chunk":
                    resident[bucket] = gather
            gather.readers.append(node)
            gather.positions.update(dict.fromkeys(p for p in reads if layouts[p].bucket == bucket))
    return found


def _make_room(
    resident: dict[str, _Gather],
    keep: Mapping[str, Layout],
    bucket: str,
    needed_now: Mapping[str, None],
    later: Mapping[str, list[int]],
) -> None:
    """Let go of buckets until `bucket` may stay, those first that are needed last."""
    limit = keep[bucket].keep
    if not isinstance(limit, int):
        return
    counted = [b for b in resident if keep[b].where == keep[bucket].where]
    free = [b for b in counted if b not in needed_now]
    free.sort(key=lambda b: later[b][-1] if later[b] else math.inf)
    while len(counted) >= limit and free:
        gone = free.pop()
        counted.remove(gone)
        del resident[gone]
