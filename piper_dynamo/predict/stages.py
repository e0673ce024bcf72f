"""Stages of about equal work: where to cut a model that does not say it.

Terms: a *unit* is a module that a stage has whole; a module that has more than a stage's share is
taken apart into those that it calls. What such a module, or the model itself, does beside them is
of the unit that it joins: it has no tag, and goes where what it reads was made (`ir/tags.py`).
*Work* is the FLOPs of a forward, or the seconds that it takes: those of its backward are in the
same proportion. A stage's *weight* is the bytes of the parameters that it uses; one that two stages
share counts for both, and so does the work of what each computes again.

Signature: Dynamo's graph of a call -> its units in order -> regions by module path.
"""

import glob
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from piper_dynamo.api import look
from piper_dynamo.errors import PiperStrategyError, format_error
from piper_dynamo.ir.spec import show_bytes
from piper_dynamo.ir.tags import indices_of, joined
from piper_dynamo.predict.operators import Operator, operators_of
from piper_dynamo.strategy import Strategy
from piper_dynamo.tables import table
from piper_dynamo.values import is_number, is_whole, shown

SLACK = 0.05  # how much slower than it must be a stage may be, if that saves parameters


@dataclass(slots=True, kw_only=True)
class Unit:
    """A module that a stage has whole.

    Attributes:
        path: Its path.
        work: Of its operators.
        params: Bytes of the parameters that it uses, by name.
        again: Work of what each stage that uses it computes again, by operator.
        parts: Where it stands for several modules that one stage must have: these.
    """

    path: str
    work: float
    params: dict[str, int]
    again: dict[int, float] = field(default_factory=dict)
    parts: list["Unit"] = field(default_factory=list)

    @property
    def modules(self) -> list["Unit"]:
        """The modules that it stands for."""
        return self.parts or [self]


class Stages(dict[str, dict[str, int]]):
    """`regions=` of a strategy; `str()` shows the cut as a table.

    Attributes:
        units: The modules of each stage.
        unit_of_work: What work is counted in.
    """

    def __init__(self, units: Sequence[Sequence[Unit]], unit_of_work: str) -> None:
        super().__init__(
            {
                glob.escape(one.path): {"PP": stage}
                for stage, found in enumerate(units)
                for one in found
            }
        )
        self.units = tuple(tuple(found) for found in units)
        self.unit_of_work = unit_of_work

    def __str__(self) -> str:
        rows = []
        total = sum(map(work_of, self.units)) or 1.0
        for stage, found in enumerate(self.units):
            work = work_of(found)
            shown = found[0].path + (f" ... {found[-1].path}" if len(found) > 1 else "")
            rows.append(
                [
                    f"PP {stage}",
                    shown or "all of it",
                    str(len(found)),
                    f"{work:.3g}",
                    f"{100 * work / total:.0f} %",
                    show_bytes(weight_of(found)),
                ]
            )
        heads = ["stage", "modules", "count", self.unit_of_work, "share", "parameters"]
        return "\n".join(table(heads, rows, left=("stage", "modules")))


def auto_stages(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    num_stages: int,
    *,
    measure: bool = False,
    memory: float | None = None,
) -> Stages:
    """Regions that cut a model into pipeline stages of about equal work, and of few parameters.

    Of all cuts between whole modules whose slowest stage has at most 5 % more work than it must,
    the one whose largest stage has the fewest bytes of parameters.

    Args:
        model: The single-device model, without `PP` annotations of its own.
        example_inputs: As for `compile`.
        num_stages: How many.
        measure: Count the seconds that forwards take here, on random values, instead of FLOPs: for
            models whose time is not in products. Needs the memory of the whole model.
        memory: Bytes of parameters that a stage may have at most; None: any number.

    Returns:
        `regions=` of a strategy: the stage of each module, by its path. Print it to see the cut.

    Raises:
        PiperStrategyError: The model has its own stages, too few modules, or too many parameters.
        PiperError: The model or the inputs are refused.
    """
    if not is_whole(num_stages) or num_stages < 1:
        raise PiperStrategyError(
            f"auto_stages: num_stages is {shown(num_stages)}; give a number >= 1"
        )
    if memory is not None and not (is_number(memory) and memory > 0):
        raise PiperStrategyError(f"auto_stages: memory is {memory!r}; give a number of bytes")
    if not isinstance(measure, bool):
        raise PiperStrategyError(f"auto_stages: measure is {measure!r}; give True or False")
    now = look(model, Strategy(), example_inputs, 1, capture=True)
    graph = now.steps[-1].graph
    own = indices_of(graph, "PP")
    if own:
        raise PiperStrategyError(
            format_error(
                "the model says itself what its stages are",
                {"stages": len(own)},
                hint="take its annotations of PP out of forward, or do without auto_stages",
            )
        )
    found = operators_of(graph, now.calls[-1], measure=measure)
    return regions_of(
        found,
        num_stages,
        memory=memory,
        slack=SLACK,
        unit_of_work="seconds" if measure else "FLOPs",
    )


def regions_of(
    found: Sequence[Operator],
    num_stages: int,
    *,
    memory: float | None = None,
    slack: float = 0.0,
    unit_of_work: str = "FLOPs",
) -> Stages:
    """The regions of stages of about equal work.

    Args:
        found: As `operators_of` gives it.
        num_stages: How many.
        memory: Bytes of parameters that a stage may have at most; None: any number.
        slack: By which part more work than it must a stage may have, if that saves parameters.
        unit_of_work: What work is counted in.

    Raises:
        PiperStrategyError: There are not so many modules, or no cut has so few parameters.
    """
    units = [_all_of(found)] if num_stages == 1 else units_of(found, num_stages)
    if len(units) < num_stages:
        raise PiperStrategyError(_cannot_be_cut(units, num_stages))
    sizes = balanced(units, num_stages, memory=memory, slack=slack)
    if sizes is None:
        raise PiperStrategyError(
            format_error(
                f"no cut into {num_stages} stages has so few parameters",
                {
                    "memory": show_bytes(memory or 0),
                    "parameters in all": show_bytes(weight_of(units)),
                    "largest module": show_bytes(max(weight_of([one]) for one in units)),
                },
                hint="ask for more stages or more memory; ZeRO shards parameters, too",
            )
        )
    parts = [units[begin:end] for begin, end in _ranges(sizes)]
    stages = Stages(
        [[one for unit in part for one in unit.modules] for part in parts], unit_of_work
    )
    if num_stages == 1:  # also what lies outside of all modules
        stages.clear()
        stages["*"] = {"PP": 0}
    return stages


def _cannot_be_cut(units: Sequence[Unit], num_stages: int) -> str:
    apart = {", ".join(one.path for one in unit.modules): unit for unit in units}
    detail = {"modules that can be": "; ".join(apart) or "none"}
    hint = "ask for fewer stages, or annotate them inside forward with piper.annotate"
    if any(len(unit.modules) > 1 for unit in units):
        detail["in one stage"] = "those between commas, of which one is used again after another"
        hint = (
            "ask for fewer stages, or annotate the calls inside forward with piper.annotate: calls "
            "of one module may be in different stages, which then share its parameters"
        )
    return format_error(
        f"the model cannot be cut into {num_stages} stages between modules", detail, hint=hint
    )


def units_of(found: Sequence[Operator], num_stages: int) -> list[Unit]:
    """Modules in the order in which they are first called, none with more than a stage's share.

    Modules that call no others stay whole however much they have. Every operator is of one unit; a
    free one of all that use it. One without parameters that is called after later ones, such as an
    activation that all layers share, is no unit; others with all that come between are one, for a
    forward may not come back to an earlier stage.
    """
    needs = _needs(found)
    modules: dict[str, Unit] = {}
    for number, one in enumerate(found):
        for path in dict.fromkeys(one.paths):
            if not one.is_free:
                _add(modules.setdefault(path, _unit(path)), number, found, needs)
    share = sum(one.work for one in found) / num_stages
    small = {path for path, unit in modules.items() if work_of([unit]) <= share}
    paths = _apart([one.paths for one in found if not one.is_free], small)
    reads = {number: one.reads for number, one in enumerate(found) if not one.is_free}
    while True:
        owners: dict[int, str] = {}
        for number, one in enumerate(found):
            # As tags go: the innermost module counts.
            owner = next((path for path in reversed(one.paths) if path in paths), None)
            if owner is not None and not one.is_free:
                owners[number] = owner
        if not owners:
            return []
        units = {path: _unit(path) for path in owners.values()}
        owners = joined(reads, owners)
        for number, path in owners.items():
            _add(units[path], number, found, needs)
        back = _back(list(units), reads, owners)
        needless = {path for path in back if not units[path].params}
        if not needless:
            return _together(list(units.values()), back)
        paths -= needless


def _back(
    paths: Sequence[str], reads: Mapping[int, Sequence[int]], owners: Mapping[int, str]
) -> dict[str, int]:
    """Modules that read what later ones make, and the place of the last of these."""
    place = {path: k for k, path in enumerate(paths)}
    found: dict[str, int] = {}
    for number, path in owners.items():
        last = max((place[owners[r]] for r in reads[number] if r in owners), default=0)
        if last > place[path]:
            found[path] = max(last, found.get(path, 0))
    return found


def _together(units: Sequence[Unit], back: Mapping[str, int]) -> list[Unit]:
    """Units, those one of which reads what another makes, with all in between, as one."""
    found: list[Unit] = []
    end = 0  # of the last one
    for k, one in enumerate(units):
        if k >= end:
            found.append(_unit(one.path))
            found[-1].parts = []
        whole = found[-1]
        whole.work += one.work
        whole.params |= one.params
        whole.again |= one.again
        whole.parts.append(one)
        end = max(end, k + 1, back.get(one.path, k) + 1)
    return found


def _unit(path: str) -> Unit:
    return Unit(path=path, work=0.0, params={})


def _all_of(found: Sequence[Operator]) -> Unit:
    """All that a call computes, once."""
    whole = _unit("")
    for one in found:
        whole.work += one.work
        whole.params |= one.params
    return whole


def _needs(found: Sequence[Operator]) -> list[AbstractSet[int]]:
    """For each operator the free ones that it needs, directly or by others."""
    needs: list[AbstractSet[int]] = []
    for one in found:
        free = {number for number in one.reads if found[number].is_free}
        needs.append(free.union(*(needs[number] for number in free)))
    return needs


def _add(
    unit: Unit, number: int, found: Sequence[Operator], needs: Sequence[AbstractSet[int]]
) -> None:
    """Make an operator a part of a unit, with the free ones that it needs."""
    unit.work += found[number].work
    unit.params |= found[number].params
    for free in sorted(needs[number]):
        unit.params |= found[free].params
        if found[free].work:
            unit.again[free] = found[free].work


def _apart(stacks: Sequence[Sequence[str]], small: AbstractSet[str]) -> set[str]:
    """Modules, none inside of another, that together have what can be had.

    Args:
        stacks: The modules of each operator, outermost first.
        small: Those that can stay whole though they call others.
    """
    apart = {""}
    while True:
        paths = set()
        for stack in dict.fromkeys(map(tuple, stacks)):
            inside = [path for path in stack if path not in apart]
            if inside:
                paths.add(next((path for path in inside if path in small), inside[-1]))
        # A unit claims the modules inside of it, which are called by others, too, or are too large.
        wrong = {
            outer
            for path in paths
            for k, letter in enumerate(path)
            if letter == "." and (outer := path[:k]) in paths
        }
        if not wrong:
            return paths
        apart |= wrong


def work_of(units: Sequence[Unit]) -> float:
    """Work of a stage of some units; what it computes again for several counts once."""
    again: dict[int, float] = {}
    for one in units:
        again |= one.again
    return sum(one.work for one in units) + sum(again.values())


def weight_of(units: Sequence[Unit]) -> int:
    """Bytes of the parameters of some units; one that several share counts once."""
    found: dict[str, int] = {}
    for one in units:
        found |= one.params
    return sum(found.values())


def balanced(
    units: Sequence[Unit], parts: int, *, memory: float | None = None, slack: float = 0.0
) -> list[int] | None:
    """The sizes of consecutive parts, the slowest as fast, then the largest as small as can be.

    Args:
        units: In order.
        parts: How many, at most as many as units; none is empty.
        memory: Bytes of parameters that a part may have at most.
        slack: By which part more work than it must the slowest may have.

    Returns:
        The sizes; None if every cut has a part with too many parameters.
    """
    count = len(units)
    work: dict[tuple[int, int], float] = {}
    weight: dict[tuple[int, int], int] = {}
    for begin in range(count):
        own, again, params = 0.0, dict[int, float](), dict[str, int]()
        for end in range(begin + 1, count + 1):
            one = units[end - 1]
            own += one.work
            again |= one.again
            params |= one.params
            work[begin, end] = own + sum(again.values())
            weight[begin, end] = sum(params.values())

    def fits(begin: int, end: int) -> bool:
        return memory is None or weight[begin, end] <= memory

    def cost(begin: int, end: int) -> float:
        return work[begin, end] if fits(begin, end) else float("inf")

    fastest = _lightest(cost, count, parts)
    if fastest is None:
        return None
    most = max(cost(begin, end) for begin, end in _ranges(fastest)) * (1 + slack)

    def size(begin: int, end: int) -> float:
        return weight[begin, end] if cost(begin, end) <= most else float("inf")

    return _lightest(size, count, parts)


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _lightest(cost: Callable[[int, int], float], count: int, parts: int) -> list[int] | None:
    """The sizes of consecutive parts of which the costliest costs as little as can be."""
    # best[k][i]: the costliest of k parts of the first i, as cheap as can be; the last begins
    best = [[(0.0, 0)] + [(float("inf"), 0)] * count]
    for k in range(1, parts + 1):
        best.append([(float("inf"), 0)] * (count + 1))
        for i in range(k, count + 1):
            best[k][i] = min((max(best[k - 1][j][0], cost(j, i)), j) for j in range(k - 1, i))
    if best[parts][count][0] == float("inf"):
        return None
    sizes, end = [], count
    for k in range(parts, 0, -1):
        begin = best[k][end][1]
        sizes.append(end - begin)
        end = begin
    return sizes[::-1]
