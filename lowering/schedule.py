"""Schedule: a total order of the compute tasks of every device group.

What Orders leave open is filled by list scheduling: tasks start as their inputs arrive, and of
those that could start the most urgent does, by one of two rules. By the critical path: what has the
longest way to the end, of equally long ones the earlier microbatch's. By microbatches: backward
before forward before weight gradient, early microbatches first, of one microbatch the longest way.
Where stages come back to a rank the first is right for many microbatches, since what it idles does
not grow with them, and the second for a few. Both are tried, and what ends first is taken.

Exchanges of rows take time, during which the tasks that wait for them are not ready: whoever may
interleave with them, another microbatch in the same group of an Order or without any, runs
meanwhile. A region that no order names has at most as many microbatches in flight on a device group
as there are stages from it to the end, which is the memory of 1F1B; the bound gives way where
orders of other groups would make everybody wait.

Signature: placed DAG with orders, costs -> per device group, its tasks in the order they run.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.fx.node import Node

from piper_dynamo.costs import Costs, durations, sent_bytes
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.cycle import topological_order
from piper_dynamo.ir.graph import Dag, is_pick, producer, task_of
from piper_dynamo.ir.task import COLLECTIVE_KINDS, ROW_EXCHANGES, Kind, Pass, RegionId, TaskName

COST = {Pass.F: 1.0, Pass.B: 2.0, Pass.BI: 1.0, Pass.BW: 1.0}  # in units of a chunk's forward
EXCHANGE_COST = 1.0  # long enough that a chunk of whoever may interleave comes in between
_URGENCY = {Pass.B: 0, Pass.BI: 0, Pass.F: 1, Pass.BW: 2}
_FIRST = -math.inf  # before all else: tasks that an order groups
_Home = tuple[RegionId, tuple[int, ...]]  # a region, and the devices on which it may be
# What is smaller is more urgent; the vertex comes last.
_Key = tuple[float, float, float, int]
# From a task and its way to the end.
_Rule = Callable[[TaskName, float], tuple[float, float, float]]


def _by_critical_path(name: TaskName, way: float) -> tuple[float, float, float]:
    return -way, name.mb or 0, _URGENCY[name.which]


def _by_microbatches(name: TaskName, way: float) -> tuple[float, float, float]:
    return _URGENCY[name.which], name.mb or 0, -way


_ROUNDING = 1e-9  # ends are sums of costs in another order
_RULES: tuple[_Rule, ...] = (_by_microbatches, _by_critical_path)  # of equal ends the first's


@dataclass(slots=True)
class _Group:
    """What one device group could run now.

    Attributes:
        ready: Tasks whose inputs are there, most urgent first.
        free_at: When the task that it runs ends.
        order: What it has run.
    """

    ready: list[_Key] = field(default_factory=list)
    free_at: float = 0.0
    order: list[Node] = field(default_factory=list)


def schedule(
    dag: Dag,
    costs: Costs | None = None,
    halves: Mapping[str, tuple[bool, bool]] | None = None,
) -> dict[tuple[int, ...], list[Node]]:
    """Run the DAG on an ideal machine and record who ran what when.

    Args:
        dag: Placed, with orders.
        costs: What tasks, messages and collectives take; None: every chunk of a forward 1, a
            backward 2, an exchange of rows 1, and other communication nothing.
        halves: For each region, whether it has input-gradient and weight-gradient work; with costs.

    Returns:
        Every compute task (empty phases too), grouped by devices, in running order. Deterministic.
    """
    work = _Work(dag, costs, halves or {})
    best, *others = [_Scheduler(work, rule) for rule in _RULES]
    end = best.run()
    for other in others:
        ends = other.run()
        if ends < end * (1 - _ROUNDING):
            best, end = other, ends
    return best.order()


class _Work:
    """What is to be scheduled: nodes, what waits for what, and how long each takes."""

    def __init__(
        self, dag: Dag, costs: Costs | None, halves: Mapping[str, tuple[bool, bool]]
    ) -> None:
        self.nodes = [n for n in dag.graph.nodes if n.meta.get("task") is not None]
        self.tasks = sum(1 for _ in dag.tasks())
        index = {node: i for i, node in enumerate(self.nodes)}
        self.successors, self.waiting = _edges(dag, self.nodes, index)
        self.names = [task_of(n).name if _runs(n) else None for n in self.nodes]
        self.cost, self.taken = _costs(self.nodes, self.names, costs, halves, dag.chunks)
        sweep = topological_order(self.successors)
        self.way = _way_to_end(self.successors, sweep, self.cost)
        self.way_in_group = _way_in_group(self.nodes, self.successors, sweep, self.cost)
        self.depth = _depth(dag)
        self.last = _last_backward(self.names)
        self.bounded = {name.region for v in self.last if (name := self.names[v]) is not None}
        self.ordered = {n for before, after, _ in dag.orders for n in (before, after)}


class _Scheduler:
    """One run on the ideal machine, by one rule."""

    def __init__(self, work: _Work, rule: _Rule) -> None:
        self.work = work
        self.rule = rule
        self.waiting = list(work.waiting)
        # Of each region on each of its device groups.
        self.in_flight: dict[_Home, int] = {}
        # Forwards that would exceed their region's bound, most urgent first.
        self.held: dict[_Home, list[_Key]] = {}
        self.let_past: set[int] = set()  # forwards that their bound does not hold
        self.groups: dict[tuple[int, ...], _Group] = {}
        self.events: list[tuple[float, int]] = []  # a node's work is done
        self.free_at: dict[object, float] = {}  # when a link has carried what it was given

    def run(self) -> float:
        """When all is done."""
        for vertex in [v for v, count in enumerate(self.waiting) if count == 0]:
            self.release(vertex, 0.0)
        now = 0.0
        while True:
            # Finish everything that ends now before anyone chooses, so that the choice does not
            # depend on event order.
            while self.events and self.events[0][0] <= now:
                self.finish(heapq.heappop(self.events)[1], now)
            for devices in sorted(self.groups):
                self.start(self.groups[devices], now)
            if not self.events and not self.let_go():
                break
            if self.events:
                now = max(now, self.events[0][0])
        return now

    def order(self) -> dict[tuple[int, ...], list[Node]]:
        found = {devices: group.order for devices, group in self.groups.items()}
        scheduled = sum(map(len, found.values()))
        assert scheduled == self.work.tasks, "a cycle got past the order pass"
        return found

    def release(self, vertex: int, now: float) -> None:
        """A node has all it waits for."""
        task, name = task_of(self.work.nodes[vertex]), self.work.names[vertex]
        if name is None:
            if task.kind is Kind.COMPUTE:
                self.group(task.devices).order.append(self.work.nodes[vertex])
            link = _link(self.work.nodes[vertex])
            begin = max(now, self.free_at.get(link, 0.0)) if self.work.taken[vertex] else now
            if self.work.taken[vertex]:
                self.free_at[link] = begin + self.work.taken[vertex]
            heapq.heappush(self.events, (begin + self.work.cost[vertex], vertex))
            return
        way = self.work.way_in_group.get(vertex)
        if way is None:
            self.make_ready((*self.rule(name, self.work.way[vertex]), vertex))
        else:  # the order wants the group over before what comes next
            self.make_ready((_FIRST, -way, _URGENCY[name.which], vertex))

    def make_ready(self, key: _Key) -> None:
        heapq.heappush(self.group(task_of(self.work.nodes[key[-1]]).devices).ready, key)

    def group(self, devices: tuple[int, ...]) -> _Group:
        return self.groups.setdefault(devices, _Group())

    def finish(self, vertex: int, now: float) -> None:
        name = self.work.names[vertex]
        if name is not None and vertex in self.work.last:
            home = self.home(vertex, name)
            self.in_flight[home] = self.in_flight.get(home, 0) - 1
            if self.held.get(home):
                self.make_ready(heapq.heappop(self.held[home]))
        for target in self.work.successors[vertex]:
            self.waiting[target] -= 1
            if self.waiting[target] == 0:
                self.release(target, now)

    def start(self, group: _Group, now: float) -> None:
        """The most urgent task that no bound holds back."""
        while group.ready and group.free_at <= now:
            key = heapq.heappop(group.ready)
            name = self.work.names[key[-1]]
            assert name is not None
            home = self.home(key[-1], name)
            if self.is_full(key[-1], name):
                heapq.heappush(self.held.setdefault(home, []), key)
                continue
            if name.which is Pass.F:
                self.in_flight[home] = self.in_flight.get(home, 0) + 1
            group.order.append(self.work.nodes[key[-1]])
            group.free_at = now + self.work.cost[key[-1]]
            heapq.heappush(self.events, (group.free_at, key[-1]))

    def is_full(self, vertex: int, name: TaskName) -> bool:
        bounded = name.which is Pass.F and name.region in self.work.bounded
        if not bounded or vertex in self.let_past or self.work.nodes[vertex] in self.work.ordered:
            return False
        return self.in_flight.get(self.home(vertex, name), 0) >= self.work.depth[name.region]

    def home(self, vertex: int, name: TaskName) -> _Home:
        return name.region, task_of(self.work.nodes[vertex]).devices

    def let_go(self) -> bool:
        """Everybody waits: one forward may exceed its bound."""
        waiting = [held for held in self.held.values() if held]
        if not waiting:
            return False
        key = heapq.heappop(min(waiting))
        self.let_past.add(key[-1])
        self.make_ready(key)
        return True


def _runs(node: Node) -> bool:
    return task_of(node).kind is Kind.COMPUTE and node.meta.get("phase") is not None


def _costs(
    nodes: list[Node],
    names: list[TaskName | None],
    costs: Costs | None,
    halves: Mapping[str, tuple[bool, bool]],
    chunks: Mapping[str, Chunk],
) -> tuple[list[float], list[float]]:
    """How long each node takes, and how long of that it takes its link."""
    if costs is None:
        of_names = [COST[name.which] if name is not None else 0.0 for name in names]
        exchanges = [EXCHANGE_COST * (task_of(n).kind in ROW_EXCHANGES) for n in nodes]
        return [a + b for a, b in zip(of_names, exchanges, strict=True)], [0.0] * len(nodes)
    keys = {
        name: chunks[str(node.target)].key
        for node, name in zip(nodes, names, strict=True)
        if name is not None
    }
    spent = durations(keys, costs, halves)
    taken = [costs.on_link(_sent_bytes(node), _values(node)) for node in nodes]
    cost = list(taken)
    for vertex, (node, name) in enumerate(zip(nodes, names, strict=True)):
        if name is not None:
            cost[vertex] = spent[str(name)]
        elif task_of(node).kind in COLLECTIVE_KINDS | {Kind.SEND}:
            cost[vertex] += costs.after_link(task_of(node).kind)
    return cost, taken


def _link(node: Node) -> object:
    """What has one transfer at a time: a channel between two ranks, or a communicator."""
    task = task_of(node)
    return (task.devices, task.stream, node.meta.get("ranks", {}).get("target"))


def _values(node: Node) -> int:
    """How many values a collective has."""
    return len(node.users) if task_of(node).kind in COLLECTIVE_KINDS else 0


def _sent_bytes(node: Node) -> float:
    kind = task_of(node).kind
    if kind is Kind.SEND:
        return sent_bytes(kind, [node.meta["spec"]], 2)
    if kind not in COLLECTIVE_KINDS:
        return 0.0
    groups = node.meta["ranks"]["groups"]
    return sent_bytes(kind, [u.meta["spec"] for u in node.users if is_pick(u)], len(groups[0]))


def _way_to_end(successors: list[list[int]], sweep: list[int], cost: list[float]) -> list[float]:
    """The cost of the costliest chain from each vertex to the end, itself included."""
    way = [0.0] * len(successors)
    for vertex in reversed(sweep):
        after = max((way[target] for target in successors[vertex]), default=0.0)
        way[vertex] = after + cost[vertex]
    return way


def _way_in_group(
    nodes: list[Node], successors: list[list[int]], sweep: list[int], cost: list[float]
) -> dict[int, float]:
    """The same to the end of a task's group of an order, along tasks of it and what they exchange.

    The longest goes first: so a short chain of tasks is kept for while a long one's rows travel.
    """
    groups = {v: group for v, node in enumerate(nodes) if (group := node.meta.get("group"))}
    way: dict[int, float] = {}
    for vertex in reversed(sweep):
        if vertex not in groups:
            continue
        after = 0.0
        for target in successors[vertex]:
            for last in (target, *(successors[target] if target not in groups else ())):
                if groups.get(last) == groups[vertex]:
                    between = cost[target] if last != target else 0.0
                    after = max(after, between + way[last])
        way[vertex] = after + cost[vertex]
    return way


def _last_backward(names: list[TaskName | None]) -> set[int]:
    """The task after which a microbatch holds nothing of a region any more."""
    found: dict[tuple[RegionId, int | None], int] = {}
    for vertex, name in enumerate(names):
        if name is not None and name.which is not Pass.F:
            found[name.region, name.mb] = vertex
    return set(found.values())


def _depth(dag: Dag) -> dict[RegionId, int]:
    """Stages from each region to the end.

    The pieces of one stage count once, and so do regions inside it on the same devices: experts.
    """
    devices: dict[tuple[tuple[str, int], ...], set[tuple[int, ...]]] = {}
    for node in dag.tasks():
        name = task_of(node).name
        if name is not None:
            devices.setdefault(name.region.tags, set()).add(task_of(node).devices)

    def stage(tags: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        around = (tags[:k] for k in range(1, len(tags)))
        return next((t for t in around if devices.get(t) == devices.get(tags)), tags)

    later: set[object] = set()
    found: dict[RegionId, int] = {}
    for region in reversed(dag.regions):
        later.add(stage(region.tags))
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
    return successors, waiting
