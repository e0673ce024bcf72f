"""Two dumps, and the first task at which they part.

Signature: two folders -> a comparison.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from piper_dynamo.debug.dump import Record, Values, read_dump
from piper_dynamo.errors import PiperError, format_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """A value that is not the same in both.

    Attributes:
        name: The user's name of a parameter or input, else the program's register.
        is_input: Whether the task was given it; else it gave it.
        largest: The largest absolute difference of an element; infinity where one is no number.
        scale: The largest absolute value of the first.
        why: What else differs: its shape or dtype; empty where only values do.
    """

    name: str
    is_input: bool
    largest: float
    scale: float
    why: str = ""

    def __str__(self) -> str:
        side = "given" if self.is_input else "gave "
        what = self.why or f"differs by {self.largest:.3g} of {self.scale:.3g}"
        return f"{side} {self.name}: {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """A task that the two runs did not do alike.

    Attributes:
        task: Its name.
        ranks: The rank that ran it in each.
        where: The first line of the model that it runs.
        values: What differs, inputs first.
    """

    task: str
    ranks: tuple[int, int]
    where: str
    values: tuple[Parted, ...]

    @property
    def is_cause(self) -> bool:
        """Whether it was given the same, so that what it computes differs."""
        return not any(one.is_input for one in self.values)

    def __str__(self) -> str:
        a, b = self.ranks
        ranks = f"rank {a}" if a == b else f"rank {a}, in the other run rank {b}"
        verdict = (
            "was given the same and gives something else" if self.is_cause else "was given another"
        )
        lines = [f"{self.task} on {ranks} {verdict}", f"  {self.where or 'no source line'}"]
        return "\n".join([*lines, *(f"  {one}" for one in self.values)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two dumps have in common.

    Attributes:
        common: How many tasks are in both.
        partings: Those that differ, in order of execution: the first is where the runs part.
        alone: Tasks that are in one only, of the first and of the second.
        unlike: How many tasks add gradients to sums in one run and give them alone in the other,
            so that these were not compared.
    """

    common: int
    partings: tuple[Parting, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    unlike: int

    @property
    def is_equal(self) -> bool:
        """Whether what both have is the same."""
        return not self.partings

    def __str__(self) -> str:
        lines = [f"{self.common} tasks are in both"]
        for which, tasks in zip(("first", "second"), self.alone, strict=True):
            if tasks:
                lines.append(f"{len(tasks)} are in the {which} only, such as {tasks[0]}")
        if self.unlike:
            lines.append(f"{self.unlike} add gradients to sums in one run only: not compared")
        if self.is_equal:
            return "\n".join([*lines, "no value differs"])
        lines.append(f"{len(self.partings)} differ; in order of execution the first is")
        return "\n".join([*lines, str(self.partings[0])])


def diff(first: str | Path, second: str | Path, *, tolerance: float = 0.0) -> Comparison:
    """Compare two dumps, task by task.

    Tasks are matched by name and replica, so that runs under other schedules, ZeRO levels or ranks
    can be compared, as long as their microbatches and regions are the same. Values of equal chunks
    are matched by position, of others by name.

    Args:
        first: A folder that `dump` wrote to; its order of execution counts.
        second: Another.
        tolerance: Differences up to that share of the value's largest element do not count.

    Raises:
        PiperError: A folder holds no whole dump, or they have no task in common.
    """
    ours = {(one.task, one.replica): one for one in read_dump(first)}
    theirs = {(one.task, one.replica): one for one in read_dump(second)}
    common = [key for key in ours if key in theirs]
    if not common:
        raise PiperError(
            format_error(
                "the dumps have no task in common",
                {
                    str(first): ", ".join(task for task, _ in list(ours)[:3]) or "no task",
                    str(second): ", ".join(task for task, _ in list(theirs)[:3]) or "no task",
                },
                hint="dump the same filter under strategies with the same regions and microbatches",
            )
        )
    partings = [_parting(ours[key], theirs[key], tolerance) for key in common]
    return Comparison(
        common=len(common),
        partings=tuple(one for one in partings if one is not None),
        alone=(
            tuple(task for task, replica in ours if (task, replica) not in theirs),
            tuple(task for task, replica in theirs if (task, replica) not in ours),
        ),
        unlike=sum(ours[key].adds != theirs[key].adds for key in common),
    )


def _parting(ours: Record, theirs: Record, tolerance: float) -> Parting | None:
    if ours.adds != theirs.adds:
        added = {*ours.adds, *theirs.adds}
        ours, theirs = _without(ours, added), _without(theirs, added)
    is_alike = ours.chunk == theirs.chunk
    found = [
        parted
        for is_input, mine, other in (
            (True, ours.inputs, theirs.inputs),
            (False, ours.outputs, theirs.outputs),
        )
        for name, a, b in _pairs(mine, other, by_position=is_alike)
        if (parted := _parted(name, a, b, tolerance, is_input=is_input)) is not None
    ]
    if not found:
        return None
    return Parting(
        task=ours.task, ranks=(ours.rank, theirs.rank), where=ours.where, values=tuple(found)
    )


def _without(record: Record, added: set[int]) -> Record:
    """A record without its sums: those that it took come last."""
    return replace(
        record,
        inputs=record.inputs[: len(record.inputs) - len(record.adds)],
        outputs=[one for at, one in enumerate(record.outputs) if at not in added],
    )


def _pairs(
    ours: Values, theirs: Values, *, by_position: bool
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    if by_position:
        for at in range(max(len(ours), len(theirs))):
            mine = ours[at] if at < len(ours) else (theirs[at][0], None)
            yield (*mine, theirs[at][1] if at < len(theirs) else None)
        return
    other = dict(theirs)
    for name, value in ours:
        if name in other:
            yield name, value, other[name]


def _parted(
    name: str, a: Tensor | None, b: Tensor | None, tolerance: float, *, is_input: bool
) -> Parted | None:
    if a is None and b is None:
        return None
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        why = f"{_shown(a)} in the first run, {_shown(b)} in the second"
        return Parted(name=name, is_input=is_input, largest=float("inf"), scale=0.0, why=why)
    if torch.equal(a, b):
        return None
    wide = [v.to(torch.complex128 if v.is_complex() else torch.float64) for v in (a, b)]
    same = (wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan())
    gaps = (wide[0] - wide[1]).abs().masked_fill(same, 0.0).nan_to_num(float("inf"))
    numbers = wide[0].abs()[wide[0].isfinite()]
    largest = float(gaps.max())
    scale = float(numbers.max()) if numbers.numel() else 0.0
    if largest <= tolerance * scale:
        return None
    return Parted(name=name, is_input=is_input, largest=largest, scale=scale)


def _shown(value: Tensor | None) -> str:
    if value is None:
        return "nothing"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
