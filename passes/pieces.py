"""Pieces: where a region is cut though its tags go on: at buckets and at repeated blocks.

Terms: a *block* is a module that its parent holds several of (`layers.3`); a *piece* is a run of a
region's forward nodes that is cut off from the rest as a region of its own (a further visit).

Signature: forward nodes in order -> for each, the number of its piece among its region's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx.node import Node

from piper_dynamo.ir.graph import is_pick
from piper_dynamo.ir.joint import ArgKind, Capture
from piper_dynamo.ir.spec import module_paths

Tags = tuple[tuple[str, int], ...]
_BLOCK = re.compile(r"^(.*?(?:^|\.)\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """What cuts regions beside their tags.

    Attributes:
        buckets: Filters, and the most bytes of parameters that a piece of what they match uses
            first. One parameter may have more.
        blocks: Filters of regions in which each block is a piece: equal ones are compiled once, and
            one that is computed again in the backward is so by itself.
    """

    buckets: tuple[tuple[Any, int], ...] = ()
    blocks: tuple[Any, ...] = ()

    def at_blocks(self, tags: Tags) -> bool:
        """Whether a region is cut at its blocks."""
        return any(one.matches(dict(tags)) for one in self.blocks)

    def limit(self, tags: Tags) -> int | None:
        """The bucket size of a region."""
        return min((size for one, size in self.buckets if one.matches(dict(tags))), default=None)


@dataclass(slots=True)
class _Open:
    """The piece of a region that is being filled."""

    number: int = 0
    nbytes: int = 0
    block: str = ""
    seen: set[int] = field(default_factory=set)


def number_pieces(
    capture: Capture,
    forward: Sequence[Node],
    tags: Mapping[Node, Mapping[str, int]],
    free: set[Node],
    cuts: Cuts,
) -> dict[Node, int]:
    """The piece of each forward node.

    A bucket is closed before a block that does not fit into it, so that equal blocks are cut alike.
    """
    if not cuts.buckets and not cuts.blocks:
        return dict.fromkeys(forward, 0)
    uses = _parameters(capture, free)
    sizes = {a.position: a.spec.nbytes for a in capture.args if a.spec is not None}
    blocks = _blocks(forward)
    whole = _bytes_per_block(forward, tags, uses, sizes, blocks)
    open_: dict[Tags, _Open] = {}
    found: dict[Node, int] = {}
    for node in forward:
        key = tuple(tags[node].items())
        piece = open_.setdefault(key, _Open())
        source = node.args[0] if node.args else None
        if is_pick(node) and isinstance(source, Node) and source in found:
            found[node] = found[source]
            continue
        new = {p for i in node.all_input_nodes for p in uses.get(i, ())} - piece.seen
        nbytes = sum(sizes[p] for p in new)
        block = blocks.get(node, piece.block)
        starts = block != piece.block
        comes = max(nbytes, whole.get((key, block), 0)) if starts else nbytes
        limit = cuts.limit(key)
        full = limit is not None and piece.nbytes > 0 < comes and piece.nbytes + comes > limit
        if full or (starts and found and cuts.at_blocks(key)):
            piece.number += 1
            piece.nbytes = 0
        piece.block = block
        piece.nbytes += nbytes
        piece.seen |= new
        found[node] = piece.number
    return found


def _parameters(capture: Capture, free: set[Node]) -> dict[Node, set[int]]:
    """The parameters behind each placeholder and each node computed from parameters alone."""
    position_of = {name: p for p, name in capture.placeholders.items()}
    kinds = {a.position: a.kind for a in capture.args}
    found: dict[Node, set[int]] = {}
    for node in capture.graph.nodes:
        position = position_of.get(node.name)
        if position is not None and kinds[position] is ArgKind.PARAMETER:
            found[node] = {position}
        elif node in free:
            found[node] = {p for i in node.all_input_nodes for p in found.get(i, ())}
    return found


def _blocks(forward: Sequence[Node]) -> dict[Node, str]:
    """The outermost block that each node is in, among blocks with others beside them."""
    paths: dict[Node, str] = {}
    siblings: dict[str, set[str]] = {}
    for node in forward:
        names = module_paths(node)
        match = next((m for name in names if (m := _BLOCK.match(name))), None)
        if match is None:
            continue
        paths[node] = block = match[1]
        if any(name.startswith(block + ".") for name in names):  # it has modules of its own
            siblings.setdefault(re.sub(r"\d+$", "", block), set()).add(block)
    repeated = {path for found in siblings.values() if len(found) > 1 for path in found}
    return {node: path for node, path in paths.items() if path in repeated}


def _bytes_per_block(
    forward: Sequence[Node],
    tags: Mapping[Node, Mapping[str, int]],
    uses: Mapping[Node, set[int]],
    sizes: Mapping[int, int],
    blocks: Mapping[Node, str],
) -> dict[tuple[Tags, str], int]:
    """Bytes of the parameters that each block is the first of its region to use."""
    seen: dict[Tags, set[int]] = {}
    found: dict[tuple[Tags, str], int] = {}
    for node in forward:
        key = tuple(tags[node].items())
        known = seen.setdefault(key, set())
        new = {p for i in node.all_input_nodes for p in uses.get(i, ())} - known
        known |= new
        if node in blocks:
            place = (key, blocks[node])
            found[place] = found.get(place, 0) + sum(sizes[p] for p in new)
    return found
