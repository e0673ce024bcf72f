"""Place: which ranks run each task.

Terms: a *device group* is the tuple of ranks that run one task together; every group in one step
has the same size.

Signature: DAG over the whole batch -> the same DAG, every task with its devices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir.graph import Dag, producer, task_of
from piper_dynamo.ir.task import Kind, Pass, RegionId
from piper_dynamo.passes.select import describe_miss, region_misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One Place directive: what it matches, its ranks, and its name in a message."""

    filter: Any
    devices: tuple[int, ...]
    label: str


class Place:
    """Give every compute task its device group; slices, sums and joins go where their values are.

    rewrite:   F.PP0.MB0  ->  F.PP0.MB0 on 0
    requires:  every task is matched by exactly one placement; ranks are inside the world; every
        rank has a task
    keeps:     the graph
    """

    name = "place"

    def __init__(
        self,
        placements: Sequence[Placement],
        world_size: int,
        *,
        sharers: Sequence[Any],
    ) -> None:
        """`sharers` are the directives that say how several ranks share tasks: filter and label."""
        self._placements = placements
        self._world_size = world_size
        self._sharers = sharers

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place."""
        faults = self._assign(dag)
        if faults:
            raise PiperPlanError(join_faults("the placement is not possible", faults))
        for node in dag.graph.nodes:
            task = node.meta.get("task")
            if task is None or task.devices or task.kind in (Kind.SLICE, Kind.ACCUMULATE):
                continue
            source = _last_task(node)
            node.meta["task"] = replace(task, devices=task_of(source).devices)

    def _assign(self, dag: Dag) -> list[str]:
        faults: list[str] = []
        tasks = list(dag.tasks())
        if not self._placements:
            for node in tasks:
                node.meta["task"] = replace(task_of(node), devices=(0,))
            if self._world_size != 1:
                faults.append(
                    f"nothing is placed, but the world has {self._world_size} ranks\n"
                    "  hint  add piper.Place({...}, devices=[...]) for every region"
                )
            return faults
        used = [False] * len(self._placements)
        homeless: dict[RegionId, dict[int | None, str]] = {}  # by microbatch, the line
        for node in tasks:
            task = task_of(node)
            assert task.name is not None
            tags = dict(task.name.tags)
            tags["PASS"] = Pass.F.value  # a backward runs where its forward ran
            matched = [i for i, p in enumerate(self._placements) if p.filter.matches(tags)]
            for i in matched:
                used[i] = True
            distinct = {self._placements[i].devices for i in matched}
            if len(distinct) > 1:
                labels = " and ".join(self._placements[i].label for i in matched)
                faults.append(f"{task.name} is placed twice: {labels}")
            elif not matched:
                lost = homeless.setdefault(task.name.region, {})
                lost.setdefault(task.name.mb, task.where or "no source line")
            else:
                node.meta["task"] = replace(task, devices=self._placements[matched[0]].devices)
        for i, placement in enumerate(self._placements):
            outside = [d for d in placement.devices if d >= self._world_size]
            if outside:
                faults.append(
                    f"{placement.label} names ranks {outside}, but the world has ranks "
                    f"0-{self._world_size - 1}\n"
                    f"  hint  start {max(outside) + 1} ranks, or change the devices"
                )
            if not used[i]:
                faults.append(f"{placement.label} " + describe_miss(placement.filter, dag))
        for region, lost in homeless.items():
            some = f" for microbatches {_listed(lost)}" if len(lost) < dag.num_microbatches else ""
            faults.append(f"{region} is placed nowhere{some} ({next(iter(lost.values()))})")
        if not faults:
            faults += self._check_groups(tasks)
        if faults:  # a miss may be why nobody says how ranks share a task
            faults += region_misses(self._sharers, dag)
        return _merge_repeats(faults)

    def _check_groups(self, tasks: list[Node]) -> list[str]:
        faults = []
        placed = {d for node in tasks for d in task_of(node).devices}
        idle = sorted(set(range(self._world_size)) - placed)
        if idle:
            faults.append(
                f"the world has {self._world_size} ranks, but nothing is placed on {_ranks(idle)}\n"
                f"  hint  start {len(placed)} ranks, or place regions on them"
            )
        groups = sorted({task_of(node).devices for node in tasks})
        if len({len(g) for g in groups}) > 1:
            faults.append(
                f"the device groups differ in size: {', '.join(map(str, groups))}\n"
                "  hint  regions of one step need the same number of replicas"
            )
        of_rank: dict[int, tuple[int, ...]] = {}
        for devices in groups:
            for rank in devices:
                if of_rank.setdefault(rank, devices) != devices:
                    faults.append(
                        f"rank {rank} is in two device groups: {of_rank[rank]} and {devices}\n"
                        "  hint  regions that share a rank are placed on the same ranks, in the "
                        "same order"
                    )
        shared: dict[tuple[Any, tuple[int, ...]], Node] = {}
        for node in tasks:
            task = task_of(node)
            if len(task.devices) > 1 and task.name is not None:
                shared.setdefault((task.name.region, task.devices), node)
        for (region, devices), node in shared.items():
            if not any(one.filter.matches(dict(region.tags)) for one in self._sharers):
                faults.append(
                    f"{task_of(node).name} is placed on {len(devices)} ranks {devices}, "
                    "and no directive says how they share it\n"
                    "  hint  add piper.Replicate(...) or piper.Shard(...), or place it on one rank"
                )
        return faults


def _last_task(node: Node) -> Node:
    """The last compute task behind a value: several groups' values meet where it runs."""
    while task_of(node).kind is not Kind.COMPUTE:
        node = [s for i in node.all_input_nodes if (s := producer(i)).meta.get("task")][-1]
    return node


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + _listed(ranks)


def _listed(numbers: Iterable[int | None]) -> str:
    return ", ".join(map(str, numbers))


def _merge_repeats(faults: list[str]) -> list[str]:
    """One line per kind of fault: the first few tasks stand for the many that share it."""
    shown: list[str] = []
    for fault in faults:
        tail = fault.split(" ", 1)[-1]
        if sum(f.split(" ", 1)[-1] == tail for f in shown) < 3:
            shown.append(fault)
    if len(faults) > len(shown):
        shown.append(f"and {len(faults) - len(shown)} more of these")
    return shown
