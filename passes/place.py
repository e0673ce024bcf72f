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
        faults += self._check_ranks()
        for i, placement in enumerate(self._placements):
            if not used[i]:
                faults.append(f"{placement.label} " + describe_miss(placement.filter, dag))
        faults += [_homeless(region, lost, dag) for region, lost in homeless.items()]
        if not faults:
            faults += self._check_groups(tasks, dag)
        if faults:  # a miss may be why nobody says how ranks share a task
            faults += region_misses(self._sharers, dag)
        return _merge_repeats(faults)

    def _check_ranks(self) -> list[str]:
        """Every rank of the world is in a placement, and none outside of it."""
        placed = sorted({rank for p in self._placements for rank in p.devices})
        world = set(range(self._world_size))
        if placed == sorted(world):
            return []
        if placed == list(range(len(placed))):
            hint = f"start {len(placed)} ranks, or change the devices"
        else:
            hint = f"number the ranks that are used from 0 to {len(placed) - 1}"
        faults = [
            f"{p.label} names ranks {outside}, but the world has ranks 0-{self._world_size - 1}\n"
            f"  hint  {hint}"
            for p in self._placements
            if (outside := [rank for rank in p.devices if rank not in world])
        ]
        idle = sorted(world - set(placed))
        if idle and not faults:
            labels = dict.fromkeys(p.label for p in self._placements)
            faults.append(
                f"nothing is placed on {_ranks(idle)} of {self._world_size}; placed are "
                f"{_ranks(placed)}, by {', '.join(labels)}\n  hint  {hint}"
            )
        return faults

    def _check_groups(self, tasks: list[Node], dag: Dag) -> list[str]:
        faults = []
        regions: dict[tuple[int, ...], RegionId] = {}
        for node in tasks:
            name = task_of(node).name
            assert name is not None
            regions.setdefault(task_of(node).devices, name.region)
        groups = sorted(regions)
        if len({len(g) for g in groups}) > 1:
            shown = ", ".join(f"{regions[g]} on {g}" for g in groups)
            labels = dict.fromkeys(p.label for p in self._placements)
            faults.append(
                f"the device groups differ in size: {shown}, by {', '.join(labels)}\n"
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
        shared: dict[tuple[RegionId, tuple[int, ...]], None] = {}
        for node in tasks:
            task = task_of(node)
            if len(task.devices) > 1 and task.name is not None:
                shared[task.name.region, task.devices] = None
        for region, devices in shared:
            if not any(one.filter.matches(dict(region.tags)) for one in self._sharers):
                label = next(p.label for p in self._placements if p.devices == devices)
                where = dag.regions[region] or "no source line"
                faults.append(
                    f"{region} ({where}) is placed on {len(devices)} ranks {devices} by {label}, "
                    "and no directive says how they share it\n"
                    "  hint  add piper.Replicate(...) or piper.Shard(...), or place it on one rank"
                )
        return faults


def _homeless(region: RegionId, lost: dict[int | None, str], dag: Dag) -> str:
    """A region, or some of its microbatches (each with its line), that no Place matches."""
    where = next(iter(lost.values()))
    if not region.tags:
        return (
            f"code without a tag is placed nowhere ({where})\n  hint  tag it, by piper.annotate or "
            "by piper.Strategy(regions=), so that a piper.Place can match it"
        )
    tags: dict[str, Any] = dict(region.tags)
    some = ""
    if len(lost) < dag.num_microbatches:
        some = f" for microbatches {_listed(lost)}"
        tags |= {"MB": sorted(mb for mb in lost if mb is not None)}
    return (
        f"{region} is placed nowhere{some} ({where})\n"
        f"  hint  add piper.Place({tags}, devices=[...])"
    )


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
