"""Tags of a graph's nodes, as annotations and `regions=` patterns left them in their meta.

Terms: an *entry* is an annotation without an index: its nodes carry a fresh number.

Signature: nodes -> the tags of each.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from torch import fx
from torch.fx.node import Node

from piper_dynamo.errors import PiperCaptureError, format_error
from piper_dynamo.ir.joint import ENTRY, OUTPUT_COPY, PREFIX

T = TypeVar("T")


def tags_of(node: Node) -> dict[str, int]:
    """A node's own tags; entries by their fresh numbers, which `number_entries` replaces."""
    custom = node.meta.get("custom") or {}
    return {
        key.removeprefix(PREFIX): value
        for key, value in custom.items()
        if key.startswith(PREFIX) and isinstance(value, int) and key != OUTPUT_COPY
    }


def nodes_of(gm: fx.GraphModule) -> Iterator[Node]:
    """The nodes of Dynamo's graph, and of the graphs nested in it (checkpoints)."""
    for graph in gm.modules():
        if isinstance(graph, fx.GraphModule):
            yield from graph.graph.nodes


def indices_of(gm: fx.GraphModule, tag: str) -> set[int]:
    """The values of a tag in Dynamo's graph; of entries, their fresh numbers."""
    found = (tags_of(node) for node in nodes_of(gm))
    return {tags[key] for tags in found for key in (tag, tag + ENTRY) if key in tags}


def number_entries(tags: dict[Node, dict[str, int]]) -> dict[Node, dict[str, int]]:
    """Number annotations without an index 0, 1, 2, ... in order of entry.

    Raises:
        PiperCaptureError: A tag is annotated both with and without an index.
    """
    entries: dict[str, set[int]] = defaultdict(set)
    explicit: set[str] = set()
    for found in tags.values():
        for key, value in found.items():
            if key.endswith(ENTRY):
                entries[key].add(value)
            else:
                explicit.add(key)
    mixed = sorted(
        key.removesuffix(ENTRY) for key in entries if key.removesuffix(ENTRY) in explicit
    )
    if mixed:
        raise PiperCaptureError(
            format_error(
                "a tag is annotated both with and without an index",
                {"tags": ", ".join(mixed)},
                hint="give every piper.annotate of one name an index, or none",
            )
        )
    index = {key: {v: i for i, v in enumerate(sorted(values))} for key, values in entries.items()}
    return {
        node: {
            key.removesuffix(ENTRY): index[key][value] if key in index else value
            for key, value in found.items()
        }
        for node, found in tags.items()
    }


def adopt(forward: list[Node], tags: dict[Node, dict[str, int]]) -> list[Node]:
    """Untagged forward nodes join the nearest tagged one before them, or else the first after.

    Args:
        forward: Forward nodes in graph order.
        tags: Their tags; those of untagged nodes are filled in.

    Returns:
        The nodes that had none; nothing where no node has any.
    """
    place = {node: i for i, node in enumerate(forward)}
    untagged = [n for n in forward if not tags[n]]
    if len(untagged) == len(forward):
        return []
    reads = {i: [place[s] for s in n.all_input_nodes if s in place] for n, i in place.items()}
    found = joined(reads, {i: tags[n] for n, i in place.items() if tags[n]})
    for node in untagged:
        tags[node] = found[place[node]]
    return untagged


def joined(reads: Mapping[int, Sequence[int]], groups: Mapping[int, T]) -> dict[int, T]:
    """The group of each operator: one without joins the last one with a group that leads to it.

    What leads to it by others without counts where it is itself: a view of an early value does not
    draw what also reads a late one back. One that nothing leads to joins the first with a group
    that it leads to, and one that leads to none either the first of all.

    Args:
        reads: For each operator, by number, those that it reads, which have smaller numbers; other
            numbers than these count as nothing.
        groups: The groups of some, at least of one.
    """
    at = {number: number for number in groups}  # whose group each operator has
    without = [number for number in reads if number not in at]
    readers: dict[int, list[int]] = defaultdict(list)
    for number, sources in reads.items():
        for source in sources:
            readers[source].append(number)
        producers = [at[source] for source in sources if source in at]
        if number not in at and producers:
            at[number] = max(producers)
    for number in reversed(without):
        consumers = [at[reader] for reader in readers[number] if reader in at]
        if number not in at and consumers:
            at[number] = min(consumers)
    first = min(groups)
    for number in without:  # an output made of inputs alone
        at.setdefault(number, first)
    return {number: groups[source] for number, source in at.items()}
