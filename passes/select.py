"""Selecting tasks by filter, what to say when a filter matches nothing, and ranks by mesh axis."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from piper_dynamo.ir.graph import Dag, task_of
from piper_dynamo.ir.program import Groups
from piper_dynamo.ir.task import TaskName

T = TypeVar("T")


class TaskIndex(Generic[T]):
    """Tasks by their tags: a filter is matched with those alone that have its indices."""

    def __init__(self, tasks: Iterable[tuple[TaskName, T]]) -> None:
        """Of names, with whatever is to be found by them."""
        self._tasks = list(tasks)
        # By the tags of which a filter says one index, then by these indices.
        self._by: dict[tuple[str, ...], dict[tuple[object, ...], list[tuple[TaskName, T]]]] = {}

    def candidates(self, wanted: Any) -> list[tuple[TaskName, T]]:
        """The tasks with the indices that a filter says, whatever else it asks for, in order."""
        said = {tag: value for tag, value in wanted.items if isinstance(value, int)}
        tags = tuple(said)
        if tags not in self._by:
            found = self._by[tags] = {}
            for one in self._tasks:
                own = one[0].tags
                found.setdefault(tuple(own.get(tag) for tag in tags), []).append(one)
        return self._by[tags].get(tuple(said.values()), [])

    def select(self, wanted: Any) -> list[T]:
        """What a filter matches, in order."""
        return [found for name, found in self.candidates(wanted) if wanted.matches(name.tags)]


def along(mesh: Any, devices: tuple[int, ...], axes: tuple[str, ...]) -> Groups:
    """The devices grouped by their place on all other axes of a mesh.

    Args:
        mesh: Anything with `names` and `shape`: it numbers the ranks, its last axis fastest.
        devices: Ranks.
        axes: Along which axes a group lies.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in devices:
        place, left = [], rank
        for name, size in reversed(tuple(zip(mesh.names, mesh.shape, strict=True))):
            left, at = divmod(left, size)
            if name not in axes:
                place.append(at)
        found.setdefault(tuple(place), []).append(rank)
    return tuple(tuple(group) for group in found.values())


def tags_there(dag: Dag) -> dict[str, set[Any]]:
    """By tag, the values that tasks have."""
    have: dict[str, set[Any]] = {}
    for node in dag.tasks():
        name = task_of(node).name
        assert name is not None
        for tag, value in name.tags.items():
            have.setdefault(tag, set()).add(value)
    return have


def misses(wanted: Any, have: Mapping[str, set[Any]]) -> dict[str, str]:
    """By each tag of a filter that no task meets, why: the tags and indices there are."""
    reasons = {}
    for tag, value in wanted.items:
        if tag not in have:
            known = ", ".join(sorted(have)) or "none"
            near = difflib.get_close_matches(tag, sorted(have), n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            reasons[tag] = f"no task has the tag {tag!r}{meant} (there are: {known})"
        elif not any(wanted.allows(tag, v) for v in have[tag]):
            values = sorted(have[tag], key=str)
            shown = ", ".join(map(str, values[:12])) + (", ..." if len(values) > 12 else "")
            reasons[tag] = f"no task has {tag}={value!r}; there are: {shown}"
    return reasons


def describe_miss(wanted: Any, dag: Dag) -> str:
    """Why a filter matches nothing."""
    return _described(misses(wanted, tags_there(dag)))


def _described(reasons: Mapping[str, str]) -> str:
    each = list(reasons.values()) or ["each tag exists, but no task has this combination"]
    return "matches nothing: " + "; ".join(each)


def made_for(num_microbatches: int, maker: str) -> str:
    """What may be wrong with an order that does not go with the number of microbatches."""
    if num_microbatches == 1 and not maker:
        return "the batch is not split; add piper.Split({}, num_microbatches=...)."
    asked = f"give {maker} as many." if maker else "is the schedule made for as many?"
    return f"the batch is split into {num_microbatches}; {asked}"


def describe_misses(missing: Sequence[Any], dag: Dag, maker: str = "") -> list[str]:
    """Why filters match nothing: those that lack the same tags are told as one.

    Args:
        missing: The filters of one order.
        dag: Where they match nothing.
        maker: The function that made the order, if one did.
    """
    have = tags_there(dag)
    count = dag.num_microbatches
    alike: dict[tuple[str, ...], list[tuple[Any, dict[str, str]]]] = {}
    for wanted in missing:
        reasons = misses(wanted, have)
        alike.setdefault(tuple(reasons), []).append((wanted, reasons))
    found = []
    for tags, ((first, reasons), *others) in alike.items():
        told = f"the filter {first!r} {_described(reasons)}"
        if others:
            told += f"\n  so do {len(others)} more of its filters, the last {others[-1][0]!r}"
        if tags == ("MB",):
            told += f"\n  hint  {made_for(count, maker)}"
        found.append(told)
    return found


def region_misses(directives: Sequence[Any], dag: Dag) -> list[str]:
    """A fault for each directive (filter and label) that matches no region."""
    return [
        f"{one.label} " + describe_miss(one.filter, dag)
        for one in directives
        if not any(one.filter.matches(dict(region.tags)) for region in dag.regions)
    ]
