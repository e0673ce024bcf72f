"""Names of the units of work.

Terms: a *region* is a set of forward nodes with the same tags and the backward nodes that come from
them; a *pass* is one of F, B, BI, BW; a *task* is one pass of one region for one microbatch, run by
one device group.

The text form of a task is strict: `TaskName.parse(str(name)) == name`, and anything else is
refused.

    F.PP0.MB3        forward of region PP=0, microbatch 3
    BI.PP1.EP2.v1    input-gradient work of the second visit to region PP=1, EP=2, before the batch
    is split
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from piper_dynamo.errors import PiperSyntaxError


class Pass(StrEnum):
    """The part of the work on a region that a task does."""

    F = "F"
    B = "B"
    BI = "BI"
    BW = "BW"


class Kind(StrEnum):
    """What a node of the Global Training DAG does."""

    COMPUTE = "compute"
    SLICE = "slice"
    ACCUMULATE = "accumulate"
    SUM = "sum"
    CAST = "cast"
    LOSS = "loss"
    CONCAT = "concat"
    SEND = "send"
    RECV = "recv"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    EXCHANGE_COUNTS = "exchange_counts"
    EXCHANGE = "exchange"
    UNEXCHANGE = "unexchange"


ROW_EXCHANGES = frozenset({Kind.EXCHANGE, Kind.UNEXCHANGE})
COLLECTIVE_KINDS = ROW_EXCHANGES | {
    *(Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_TO_ALL),
    Kind.EXCHANGE_COUNTS,
}
_TAG = r"(?:[A-Za-z_][A-Za-z0-9_]*[A-Za-z_]|[A-Za-uw-zA-Z_])\d+"
_NAME = re.compile(rf"(F|B|BI|BW)((?:\.{_TAG})*)(?:\.v(\d+))?")
_ONE_TAG = re.compile(r"([A-Za-z_](?:[A-Za-z0-9_]*[A-Za-z_])?)(\d+)")
_TAG_NAME = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*[A-Za-z_]|[A-Za-uw-zA-Z_])")


def is_tag_name(name: str) -> bool:
    """Whether `name` can be a tag: an identifier not ending in a digit, nor `v`, `MB`, `PASS`."""
    return bool(_TAG_NAME.fullmatch(name)) and name not in ("MB", "PASS")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionId:
    """A region: its tags in the order of nesting, and which visit to it this is."""

    tags: tuple[tuple[str, int], ...]
    visit: int = 0

    def __str__(self) -> str:
        parts = [f"{name}{index}" for name, index in self.tags]
        if self.visit:
            parts.append(f"v{self.visit}")
        return ".".join(parts) or "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskName:
    """One pass of one region for one microbatch (`mb` is None before the batch is split)."""

    which: Pass
    region: RegionId
    mb: int | None = None

    def __str__(self) -> str:
        tags = list(self.region.tags)
        if self.mb is not None:
            tags.append(("MB", self.mb))
        parts = [self.which.value, *(f"{name}{index}" for name, index in tags)]
        if self.region.visit:
            parts.append(f"v{self.region.visit}")
        return ".".join(parts)

    @property
    def tags(self) -> Mapping[str, int | str]:
        """What a directive's filter is matched against: region tags, MB and PASS."""
        tags: dict[str, int | str] = dict(self.region.tags)
        if self.mb is not None:
            tags["MB"] = self.mb
        tags["PASS"] = self.which.value
        return tags

    def with_pass(self, which: Pass) -> "TaskName":
        """The same region and microbatch, another pass."""
        return replace(self, which=which)

    @classmethod
    def parse(cls, text: str) -> "TaskName":
        """The task that `text` names.

        Raises:
            PiperSyntaxError: `text` is not exactly the text form of a task.
        """
        return _parsed(text)


@lru_cache(maxsize=2**16)  # the same few names come again for every rank
def _parsed(text: str) -> TaskName:
    match = _NAME.fullmatch(text)
    if match is None:
        raise PiperSyntaxError(f"not a task: {text!r}; expected e.g. 'F.PP0.MB3'")
    tags = []
    for part in match[2].split(".")[1:]:
        one = _ONE_TAG.fullmatch(part)
        assert one is not None
        tags.append((one[1], int(one[2])))
    mb = tags.pop()[1] if tags and tags[-1][0] == "MB" else None
    names = [name for name, _ in tags]
    if len(set(names)) < len(names) or not all(map(is_tag_name, names)):
        raise PiperSyntaxError(
            f"not a task: {text!r}; each tag comes once; MB comes once, last; PASS is none"
        )
    task = TaskName(
        which=Pass(match[1]),
        region=RegionId(tags=tuple(tags), visit=int(match[3] or 0)),
        mb=mb,
    )
    if str(task) != text:
        raise PiperSyntaxError(f"not a task: {text!r}; the task is written {str(task)!r}")
    return task


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The record every node of the Global Training DAG carries in `meta["task"]`.

    Attributes:
        kind: What the node does.
        name: The task it is, or belongs to; None for nodes of no single task.
        label: What it moves or makes, in the user's terms (a value or parameter name).
        devices: The ranks that run it, in replica order; empty before placement.
        stream: The logical stream it is issued on.
        where: The user's source line it comes from, `file:line`, or empty.
    """

    kind: Kind
    name: TaskName | None = None
    label: str = ""
    devices: tuple[int, ...] = ()
    stream: str = "compute"
    where: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.COMPUTE:
            return str(self.name)
        return ".".join(p for p in (self.kind.value, str(self.name or ""), self.label) if p)
