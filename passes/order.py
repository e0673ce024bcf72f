"""Order: constraints on when tasks of one device group run.

Terms: a *group* of an order is a set of tasks that run before the next group's; tasks inside one
group may interleave, which the scheduler decides where several filters name them (`meta["group"]`).

Signature: placed DAG -> the same DAG with order edges beside it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, format_error, join_faults
from piper_dynamo.ir.cycle import find_cycle
from piper_dynamo.ir.graph import Dag, producer, task_of
from piper_dynamo.ir.task import Kind, Pass, RegionId, TaskName
from piper_dynamo.passes.select import TaskIndex, describe_misses, made_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """What orders say of backwards.

    Attributes:
        split: The B tasks whose BI or BW some order names; they are split before all else.
        undecided: Those that some order also names as B; they stay whole.
        refused: What is wrong with these, or None.
    """

    split: AbstractSet[TaskName] = frozenset()
    undecided: AbstractSet[TaskName] = frozenset()
    refused: PiperPlanError | None = None


def named_halves(orders: Sequence[Any], dag: Dag) -> Halves:
    """Which backwards orders name by their halves; refused where one is also named whole."""
    backward: dict[TaskName, str] = {}
    whole: dict[TaskName, str] = {}
    index = TaskIndex(
        (name, None)
        for node in dag.tasks()
        if (name := task_of(node).name) is not None and name.which is Pass.B
    )
    for order in orders:
        for group in order.groups:
            for wanted in group:
                values = _pass_values(wanted)
                if not values & {"B", "BI", "BW"}:
                    continue
                for name, _ in index.candidates(wanted):
                    tags = dict(name.tags)
                    for which in sorted(values & {"BI", "BW", "B"}):
                        if wanted.matches({**tags, "PASS": which}):
                            (whole if which == "B" else backward).setdefault(name, _at(order))
    both: dict[tuple[RegionId, str, str], list[TaskName]] = {}
    for name in backward:
        if name in whole:
            both.setdefault((name.region, whole[name], backward[name]), []).append(name)
    if not both:
        return Halves(split=set(backward))
    refused = PiperPlanError(
        join_faults(
            "a backward is ordered both whole and split",
            [
                f"{_together(same)}: as B at {as_whole}, as BI or BW at {as_halves}"
                for (_, as_whole, as_halves), same in both.items()
            ],
            hint='use PASS "B", or the pair "BI" and "BW", for one region and microbatch',
        )
    )
    undecided = {name for same in both.values() for name in same}
    return Halves(split=set(backward) - undecided, undecided=undecided, refused=refused)


def _together(names: Sequence[TaskName]) -> str:
    """Tasks that differ by their microbatch alone."""
    if len(names) == 1:
        return str(names[0])
    return f"{replace(names[0], mb=None)} of microbatches {', '.join(str(n.mb) for n in names)}"


def _at(order: Any) -> str:
    """The user's line, and what was called there to make the order."""
    return f"{order.where} ({order.maker})" if order.maker else str(order.where)


def _labels(orders: Sequence[Any]) -> list[str]:
    """Where each order is from, and which of those of one line it is: a loop may have made them."""
    lines = [_at(order) for order in orders]
    many, met = Counter(lines), Counter[str]()
    labels = []
    for order, line in zip(orders, lines, strict=True):
        met[line] += 1
        is_told = many[line] > 1 and not order.maker
        labels.append(f"{line}, number {met[line]} of {many[line]} there" if is_told else line)
    return labels


def _ranks(devices: Sequence[int]) -> str:
    return f"{'rank' if len(devices) == 1 else 'ranks'} {', '.join(map(str, devices))}"


def _pass_values(wanted: Any) -> set[str]:
    """The passes a filter names; none if it takes any."""
    for tag, value in wanted.items:
        if tag == "PASS" and value != "*":
            return {value} if isinstance(value, str) else set(map(str, value))
    return set()


class Order:
    """Add the order edges of every Order directive.

    rewrite:   Order([[F.PP0.MB0], [F.PP0.MB1]])  ->  F.PP0.MB1 after F.PP0.MB0
    requires:  each filter matches a task; the tasks of one order are on one device group; no
        cycle with the dataflow
    keeps:     the graph
    """

    name = "order"

    def __init__(
        self, orders: Sequence[Any], undecided: AbstractSet[TaskName] = frozenset()
    ) -> None:
        """Of `undecided` backwards it is not known whether they are split, nor said anything."""
        self._orders = orders
        self._undecided = undecided

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place.

        Raises:
            PiperPlanError: All that is wrong with the orders, and a cycle if they make one.
        """
        faults: list[str] = []
        is_doubled = False
        named: list[tuple[TaskName, Node]] = []
        decided: dict[tuple[int, ...], list[tuple[TaskName, Node]]] = {}  # by their devices
        for node in dag.tasks():
            task = task_of(node)
            assert task.name is not None
            named.append((task.name, node))
            if task.name not in self._undecided:
                decided.setdefault(task.devices, []).append((task.name, node))
        index = TaskIndex(named)
        labels = _labels(self._orders)
        grouped: dict[Node, list[tuple[int, int]]] = {}
        for number, order in enumerate(self._orders):
            groups: list[list[Node]] = []
            missing: list[Any] = []
            for group in order.groups:
                found = self._tasks(group, dag.training, index, missing)
                if found:
                    groups.append(found)
                if len(group) > 1:
                    for node in found:
                        grouped.setdefault(node, []).append((number, len(groups)))
            if missing:
                told = describe_misses(missing, dag, order.maker)
                faults += [f"{labels[number]}: {one}" for one in told]
            faults += _same_devices(labels[number], groups)
            twice = _doubled(labels[number], groups)
            is_doubled |= bool(twice)
            faults += twice
            slips = _left_out(order.maker, groups, decided, dag.num_microbatches)
            faults += [f"{labels[number]}: {one}" for one in slips]
            for before, after in pairwise(groups):
                dag.orders += [(a, b, labels[number]) for a in before for b in after if a is not b]
        # A task that comes twice waits for itself, which says nothing more.
        cycle = "" if is_doubled else find_contradiction(dag)
        if faults:
            refused = join_faults("an order cannot be kept", list(dict.fromkeys(faults)))
            raise PiperPlanError("\n".join(filter(None, (refused, cycle))))
        if cycle:
            raise PiperPlanError(cycle)
        for node, found_in in grouped.items():
            if len(found_in) == 1:  # in two orders' groups, a task is in no one's alone
                node.meta["group"] = found_in[0]

    def _tasks(
        self,
        group: Sequence[Any],
        training: bool,
        index: TaskIndex[Node],
        missing: list[Any],
    ) -> list[Node]:
        """The tasks of a group, each once; filters that match nothing go into `missing`."""
        found: list[Node] = []
        for wanted in group:
            passes = _pass_values(wanted)
            if not training and passes and "F" not in passes:
                continue  # a forward-only program keeps the order of its forwards
            matched = index.select(wanted)
            if not matched and not self._names_undecided(wanted):
                missing.append(wanted)
            found += matched
        return list(dict.fromkeys(found))

    def _names_undecided(self, wanted: Any) -> bool:
        """Whether a filter would match one, if it were as the filter wants it."""
        return any(
            wanted.matches({**dict(name.tags), "PASS": which})
            for name in self._undecided
            for which in ("B", "BI", "BW")
        )


def _same_devices(order: str, groups: list[list[Node]]) -> list[str]:
    devices: dict[tuple[int, ...], Node] = {}
    for group in groups:
        for node in group:
            if task_of(node).devices:  # else it is misplaced, which is told by itself
                devices.setdefault(task_of(node).devices, node)
    if len(devices) <= 1:
        return []
    shown = ", ".join(f"{task_of(n).name} on {_ranks(d)}" for d, n in list(devices.items())[:4])
    return [
        f"{order}: one order names tasks of several device groups: {shown}\n"
        "  hint  write one piper.Order for each rank, or for each group of replicas"
    ]


def _doubled(order: str, groups: list[list[Node]]) -> list[str]:
    seen: dict[Node, int] = {}
    twice: list[str] = []
    for position, group in enumerate(groups):
        for node in group:
            if node in seen:
                both = f"in groups[{seen[node]}] and groups[{position}]"
                twice.append(f"{task_of(node).name} comes twice, {both}")
            seen[node] = position
    if not twice:
        return []
    first, *others = twice
    more = f"; so do {len(others)} more of its tasks: the last {others[-1]}" if others else ""
    return [f"{order}: {first}{more}\n  hint  a task runs once: name it in one group"]


def _left_out(
    maker: str,
    groups: list[list[Node]],
    decided: Mapping[tuple[int, ...], list[tuple[TaskName, Node]]],
    num_microbatches: int,
) -> list[str]:
    """An order that names a region's pass for some microbatches names it for all that are there.

    Leaving a pass out altogether is fine: it runs when it can. Leaving out one microbatch of many
    is a slip, and would surprise whoever counts on the order.
    """
    if not groups:
        return []
    homes = (task_of(node).devices for group in groups for node in group)
    devices = next(filter(None, homes), ())
    if not devices:  # its tasks are misplaced, which is told by itself
        return []
    named = {node for group in groups for node in group}
    started: set[tuple[Any, str]] = set()
    missing: list[tuple[TaskName, set[tuple[Any, str]]]] = []
    for name, node in decided.get(devices, []):
        parts = {(name.region, half) for half in _halves(name.which)}
        if node in named:
            started |= parts
        else:
            missing.append((name, parts))
    slips = [str(name) for name, parts in missing if parts & started]
    if not slips:
        return []
    shown = ", ".join(slips[:6]) + (f" and {len(slips) - 6} more" if len(slips) > 6 else "")
    return [
        f"leaves out {shown}, though it names the same pass of other microbatches\n"
        f"  hint  {made_for(num_microbatches, maker)} Name a pass for all microbatches, or "
        "for none"
    ]


def _halves(which: Pass) -> tuple[str, ...]:
    return ("BI", "BW") if which is Pass.B else (which.value,)


def find_contradiction(dag: Dag) -> str:
    """What is wrong with orders that contradict the dataflow or each other; empty if none does.

    It shows a shortest cycle: which task waits for which, and why.
    """
    tasks = [n for n in dag.graph.nodes if n.meta.get("task") is not None]
    index = {node: i for i, node in enumerate(tasks)}
    successors: list[list[int]] = [[] for _ in tasks]
    reason: dict[tuple[int, int], str] = {}
    ordered: dict[tuple[int, int], str] = {}
    for node in tasks:
        for source in node.all_input_nodes:
            made = producer(source)
            if made in index:
                successors[index[made]].append(index[node])
                reason[index[made], index[node]] = _use(dag, source)
    for before, after, where in dag.orders:
        edge = index[before], index[after]
        successors[edge[0]].append(edge[1])
        if edge not in reason:
            reason[edge] = f"ordered at {where}"
            ordered[edge] = where
    cycle = find_cycle(successors)
    if not cycle:
        return ""
    edges = list(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    lines, hint = [], "change the order of one of these tasks"
    for earlier, later in edges:
        if task_of(tasks[later]).kind in _TRANSFERS:  # told by the task that takes what comes
            continue
        source, why = task_of(tasks[earlier]), reason[earlier, later]
        if source.kind in _TRANSFERS:
            value = _sent(tasks[earlier])
            source = task_of(producer(value))
            why = f"{_use(dag, value)}, from {_ranks(source.devices)}"
        lines.append(f"{_line(tasks[later])}  waits for  {source}  ({why})")
        if _BUFFER in why:
            hint = (
                "microbatches that change a buffer run one after the other on all of its ranks: "
                "order them so, or keep the buffer as it is (eval mode, track_running_stats=False)"
            )
    ranks = {devices for i in cycle if (devices := task_of(tasks[i]).devices)}
    title = (
        "the orders deadlock: tasks wait for one another across ranks"
        if len(ranks) > 1
        else "an order contradicts the dataflow or another order"
    )
    asked = _orders_of([(ordered.get(edge, ""), *(tasks[i] for i in edge)) for edge in edges])
    has_buffer = any(_BUFFER in reason[edge] for edge in edges)
    if not has_buffer and any(_MADE.search(ordered.get(edge, "")) for edge in edges):
        hint = (
            "the order is right for stages that follow one another in forward: see in "
            "plan.summary() of a gpipe what patterns of regions= or annotations take in, and "
            "number the stages as forward runs them"
        )
    again = _entered_again([tasks[i] for i in cycle])
    if again:
        asked["again"] = again
        hint = (
            "a region that runs again after another needs that one's forward first: if this is not "
            "meant, see in plan.summary() what its pattern of regions= or annotation takes in; "
            "with all forwards before all backwards (gpipe) it runs"
        )
    return format_error(title, {**asked, "cycle": "\n".join(lines)}, hint=hint)


def _entered_again(cycle: list[Node]) -> str:
    """The forwards in a cycle of regions that a microbatch enters for another time, and where."""
    found = [
        f"{task.name}, part {task.name.region.visit + 1} of its region in a microbatch"
        f"{f', from {task.where} on' if task.where else ''}"
        for task in map(task_of, cycle)
        if task.name is not None and task.name.which is Pass.F and task.name.region.visit
    ]
    return "\n".join(dict.fromkeys(found))


def _orders_of(edges: list[tuple[str, Node, Node]]) -> dict[str, str]:
    """What the orders in a cycle ask for, in a line each.

    Args:
        edges: The cycle's, in turn: what orders it, if that is an order, and its two tasks.
    """
    start = next((i for i, edge in enumerate(edges) if edge[0] != edges[i - 1][0]), 0)
    found: list[str] = []
    for where, same in groupby(edges[start:] + edges[:start], key=lambda edge: edge[0]):
        run = list(same)
        if where:
            first, last = task_of(run[0][1]), task_of(run[-1][2])
            on = f", on {_ranks(first.devices)}" if first.devices else ""
            found.append(f"the Order at {where}: {first} before {last}{on}")
    if not found:
        return {}
    return {"contradict" if len(found) > 1 else "asked": "\n".join(dict.fromkeys(found))}


_BUFFER = "the new value of buffer"
_MADE = re.compile(r" \(piper\.")  # how `_at` says that a function of Piper made an order
_TRANSFERS = (Kind.SEND, Kind.RECV)


def _sent(transfer: Node) -> Node:
    """The value that is sent, of either end of a message."""
    value = transfer
    while task_of(producer(value)).kind in _TRANSFERS:
        value = producer(value).all_input_nodes[0]
    return value


def _use(dag: Dag, value: Node) -> str:
    """Why a task waits for the one that makes this value."""
    if "buffer" in value.meta:
        return f"uses {_BUFFER} {dag.args[value.meta['buffer']].name!r}"
    return f"uses {value.name}"


def _line(node: Node) -> str:
    task = task_of(node)
    ranks = ",".join(map(str, task.devices))
    where = f" [{task.where}]" if task.where else ""
    return f"{f'rank {ranks} ' if ranks else ''}{task}{where}"
