"""Selecting tasks by filter, what to say when a filter matches nothing, and ranks by mesh axis."""

import difflib
from collections.abc import Sequence
from typing import Any

from torch.fx.node import Node

from piper_dynamo.ir.graph import Dag, task_of
from piper_dynamo.ir.program import Groups


def select(nodes: list[Node], wanted: Any) -> list[Node]:
    """The compute tasks that a filter matches, in graph order."""
    found = []
    for node in nodes:
        name = task_of(node).name
        if name is not None and wanted.matches(name.tags):
            found.append(node)
    return found


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


def describe_miss(wanted: Any, dag: Dag) -> str:
    """Why a filter matches nothing: the tags and indices there are, nearest first."""
    have: dict[str, set[Any]] = {}
    for node in dag.tasks():
        name = task_of(node).name
        assert name is not None
        for tag, value in name.tags.items():
            have.setdefault(tag, set()).add(value)
    reasons = []
    for tag, value in wanted.items:
        if tag not in have:
            known = ", ".join(sorted(have)) or "none"
            near = difflib.get_close_matches(tag, sorted(have), n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            reasons.append(f"no task has the tag {tag!r}{meant} (there are: {known})")
        elif not any(wanted.allows(tag, v) for v in have[tag]):
            values = sorted(have[tag], key=str)
            shown = ", ".join(map(str, values[:12])) + (", ..." if len(values) > 12 else "")
            reasons.append(f"no task has {tag}={value!r}; there are: {shown}")
    if not reasons:
        reasons.append("each tag exists, but no task has this combination")
    return "matches nothing: " + "; ".join(reasons)


def region_misses(directives: Sequence[Any], dag: Dag) -> list[str]:
    """A fault for each directive (filter and label) that matches no region."""
    return [
        f"{one.label} " + describe_miss(one.filter, dag)
        for one in directives
        if not any(one.filter.matches(dict(region.tags)) for region in dag.regions)
    ]
