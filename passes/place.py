"""Place: which ranks run each task.

Terms: a *device group* is the tuple of ranks that run one task together; every group in one step
has the same size.

Signature: DAG over the whole batch -> the same DAG, every task with its devices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir.graph import Dag, producer, task_of
from piper_dynamo.ir.task import Kind, Pass, RegionId
from piper_dynamo.passes.select import describe_miss, region_misses, tags_there


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One Place directive: what it matches, its ranks, its name in a message, and what made it."""

    filter: Any
    devices: tuple[int, ...]
    label: str
    maker: str = ""


class _Says(NamedTuple):
    """The arguments of a function that makes Places which say what there is."""

    ranks: str
    stages: str


_MAKERS = {
    "piper.strategies.pipeline": _Says("ranks= or replicas=", "ranks= or stages="),
    "piper.strategies.places": _Says("the placement", "the placement"),
    "piper.strategies.from_orders": _Says("the orders or replicas=", "the orders"),
    "piper.strategies.from_torchtitan": _Says("world_size=", "regions="),
    "piper.strategies.from_megatron": _Says("world_size=", "regions="),
    "piper.strategies.from_deepspeed": _Says("world_size=", "regions="),
}


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
        faults, hint = self._assign(dag)
        if faults:
            raise PiperPlanError(join_faults("the placement is not possible", faults, hint=hint))
        for node in dag.graph.nodes:
            task = node.meta.get("task")
            if task is None or task.devices or task.kind in (Kind.SLICE, Kind.ACCUMULATE):
                continue
            source = _last_task(node)
            node.meta["task"] = replace(task, devices=task_of(source).devices)

    def _assign(self, dag: Dag) -> tuple[list[str], str]:
        """Set the tasks' devices; what is wrong, and what to do about all of it, if that is one."""
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
            return faults, ""
        used = [False] * len(self._placements)
        # By microbatch, the line.
        homeless: dict[RegionId, dict[int | None, str]] = {}
        twice: dict[tuple[RegionId, tuple[int, ...]], dict[int | None, str]] = {}
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
                both = twice.setdefault((task.name.region, tuple(matched)), {})
                both.setdefault(task.name.mb, task.where or "no source line")
            elif not matched:
                lost = homeless.setdefault(task.name.region, {})
                lost.setdefault(task.name.mb, task.where or "no source line")
            else:
                node.meta["task"] = replace(task, devices=self._placements[matched[0]].devices)
        faults += [self._twice(*key, both, dag) for key, both in twice.items()]
        faults += self._check_ranks()
        for i, placement in enumerate(self._placements):
            if not used[i]:
                faults.append(f"{placement.label} " + describe_miss(placement.filter, dag))
        is_misfit = not all(used) or any(region.tags for region in homeless)
        hint = self._stages_hint(dag) if is_misfit else ""
        faults += [_homeless(region, lost, dag, hint) for region, lost in homeless.items()]
        if not faults:
            faults += self._check_groups(tasks, dag)
        if faults:  # a miss may be why nobody says how ranks share a task
            faults += region_misses(self._sharers, dag)
        return _merge_repeats(faults), hint

    def _arguments(self) -> _Says | None:
        """What the user would change, where one function made all Places."""
        makers = {placement.maker for placement in self._placements}
        maker = makers.pop() if len(makers) == 1 else ""
        if maker not in _MAKERS:
            return None
        return _Says(*(f"{one} of {maker}" for one in _MAKERS[maker]))

    def _stages_hint(self, dag: Dag) -> str:
        """That a function placed other stages than the model has, if one did."""
        arguments = self._arguments()
        if arguments is None:
            return ""
        have = tags_there(dag).get("PP", set())
        placed = {tag for p in self._placements if isinstance(tag := p.filter.tags.get("PP"), int)}
        if have == placed:
            return ""  # what is not placed has other tags
        return (
            f"the model has {len(have)} stages (PP={_listed(sorted(have))}) and {len(placed)} are "
            f"placed (PP={_listed(sorted(placed))}); change {arguments.stages}, or tag other "
            "parts, by piper.annotate or regions="
        )

    def _twice(
        self, region: RegionId, matched: Sequence[int], lines: Mapping[int | None, str], dag: Dag
    ) -> str:
        """A region that several Places put on unlike ranks, or some of its microbatches."""
        where = next(iter(lines.values()))
        labels = " and ".join(self._placements[i].label for i in matched)
        return (
            f"{region} is placed twice{_some(lines, dag)} ({where}): {labels}\n"
            "  hint  leave one of them out, or let each name other microbatches (MB)"
        )

    def _check_ranks(self) -> list[str]:
        """Every rank of the world is in a placement, and none outside of it."""
        placed = sorted({rank for p in self._placements for rank in p.devices})
        world = set(range(self._world_size))
        if placed == sorted(world):
            return []
        if placed == list(range(len(placed))):
            arguments = self._arguments()
            devices = arguments.ranks if arguments is not None else "the devices"
            hint = f"start {_count(len(placed))}, or change {devices}"
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
                f"nothing is placed on {_ranks(idle)} of {self._world_size}; "
                f"{', '.join(labels)} {'use' if len(labels) > 1 else 'uses'} {_ranks(placed)}\n"
                f"  hint  {hint}"
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


def _homeless(region: RegionId, lost: dict[int | None, str], dag: Dag, told: str) -> str:
    """A region, or some of its microbatches (each with its line), that no Place matches.

    Args:
        region: Which.
        lost: The microbatches.
        dag: The DAG.
        told: What is said about all such regions, if something is.
    """
    where = next(iter(lost.values()))
    if not region.tags:
        return (
            f"code without a tag is placed nowhere ({where})\n  hint  tag it, by piper.annotate or "
            "by piper.Strategy(regions=), so that a piper.Place can match it"
        )
    tags: dict[str, Any] = dict(region.tags)
    fault = f"{region} is placed nowhere{_some(lost, dag)} ({where})"
    if told:
        return fault
    if len(lost) < dag.num_microbatches:
        tags |= {"MB": sorted(mb for mb in lost if mb is not None)}
    return f"{fault}\n  hint  add piper.Place({tags}, devices=[...])"


def _some(lines: Mapping[int | None, str], dag: Dag) -> str:
    """Which microbatches these are, where they are not all."""
    if len(lines) == dag.num_microbatches:
        return ""
    return f" for microbatch{'es' * (len(lines) > 1)} {_listed(lines)}"


def _last_task(node: Node) -> Node:
    """The last compute task behind a value: several groups' values meet where it runs."""
    while task_of(node).kind is not Kind.COMPUTE:
        node = [s for i in node.all_input_nodes if (s := producer(i)).meta.get("task")][-1]
    return node


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + _listed(ranks)


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"


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
