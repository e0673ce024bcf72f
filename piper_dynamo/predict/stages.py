"""Stages of about equal work: where to cut a model that does not say it.

Terms: a *unit* is a module that a stage has whole; a module that has more than a stage's share is
taken apart into those that it calls. *Work* is the FLOPs of its forward, or the seconds that this
takes: those of its backward are in the same proportion. A stage's *weight* is the bytes of the
parameters that it uses; one that two stages share counts for both.

Signature: Dynamo's graph of a call -> its units in order -> regions by module path.
"""

import glob
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo.api import look
from piper_dynamo.capture import fake_args
from piper_dynamo.captured import Call
from piper_dynamo.errors import PiperStrategyError, format_error
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.spec import module_paths, show_bytes
from piper_dynamo.ir.tags import indices_of
from piper_dynamo.strategy import Strategy
from piper_dynamo.tables import table
from piper_dynamo.values import is_whole

SLACK = 0.05  # how much slower than it must be a stage may be, if that saves parameters
_RUNS = 3  # of which the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of a graph.

    Attributes:
        paths: The modules that it is in, outermost first.
        work: FLOPs, or seconds.
        params: Bytes of the parameters that it reads, by name.
    """

    paths: tuple[str, ...]
    work: float
    params: Mapping[str, int]


@dataclass(slots=True, kw_only=True)
class Unit:
    """A module that a stage has whole: its path, its work, and bytes of its parameters by name."""

    path: str
    work: float
    params: dict[str, int]


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
        total = sum(one.work for found in self.units for one in found) or 1.0
        for stage, found in enumerate(self.units):
            work = sum(one.work for one in found)
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
        raise PiperStrategyError(f"auto_stages: num_stages is {num_stages!r}; give a number >= 1")
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


def operators_of(graph: fx.GraphModule, call: Call, *, measure: bool = False) -> list[Operator]:
    """The operators of a graph, in order, with what each computes or takes."""
    if measure:
        return _measured(graph, call)
    mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)

    def count(run: Callable[[], Any]) -> tuple[Any, float]:
        with compat.FlopCounterMode(display=False) as counted:
            result = run()
        return result, float(counted.get_total_flops())

    walk = _Walk(graph, _params(call.args), count)
    with mode:
        walk.run(*fake_args(mode, call.args, call.numbers, {}, 1))
    return walk.found


def _measured(graph: fx.GraphModule, call: Call) -> list[Operator]:
    """The fastest of several runs on values that are as large as the call's."""

    def clock(run: Callable[[], Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        result = run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result, time.perf_counter() - start

    mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
    runs = []
    for _ in range(_RUNS):
        walk = _Walk(graph, _params(call.args), clock)
        values = [_value_like(v) for v in fake_args(mode, call.args, call.numbers, {}, 1)]
        with torch.no_grad(), torch.random.fork_rng():
            walk.run(*values)
        runs.append(walk.found)
    return [min(found, key=lambda one: one.work) for found in zip(*runs, strict=True)]


def _value_like(fake: Any) -> Any:
    """Small numbers of the shape of a fake tensor; zeros, which every table of embeddings has."""
    if not isinstance(fake, torch.Tensor):
        return fake
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return made.normal_(std=0.02) if fake.is_floating_point() else made.zero_()


class _Walk(fx.Interpreter):
    """Says of each node of a graph, in order, what running it came to."""

    def __init__(
        self,
        graph: fx.GraphModule,
        params: Sequence[Mapping[str, int]],
        weigh: Callable[[Callable[[], Any]], tuple[Any, float]],
    ) -> None:
        """`params` has the bytes of each argument by name, where it is a parameter."""
        super().__init__(graph)
        self.found: list[Operator] = []
        self._weigh = weigh
        placeholders = graph.graph.find_nodes(op="placeholder")
        self._params = dict(zip(placeholders, params, strict=True))

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        result, work = self._weigh(lambda: super(_Walk, self).run_node(n))
        inside = self._inside(n)
        if inside is not None:  # a checkpoint, of which each operator has its own modules
            self.found += inside
            return result
        params: dict[str, int] = {}
        for source in n.all_input_nodes:
            params |= self._params.get(source, {})
        self.found.append(Operator(paths=tuple(module_paths(n)), work=work, params=params))
        return result

    def _inside(self, n: Node) -> list[Operator] | None:
        """The operators of the one graph that a node calls; None where it calls none or more."""
        bodies = [i for i in n.all_input_nodes if isinstance(self.env.get(i), fx.GraphModule)]
        if len(bodies) != 1 or n.args[0] is not bodies[0]:
            return None
        body: fx.GraphModule = self.env[bodies[0]]
        count = len(body.graph.find_nodes(op="placeholder"))
        given = n.args[len(n.args) - count :]
        if len(given) != count or bodies[0] in given:
            return None
        params = [self._params.get(i, {}) if isinstance(i, Node) else {} for i in given]
        walk = _Walk(body, params, self._weigh)
        values: Any = self.map_nodes_to_values(given, n)
        walk.run(*values)
        return walk.found


def _params(args: Sequence[Arg]) -> list[dict[str, int]]:
    """The bytes of each argument by name, where it is a parameter."""
    return [
        {arg.name: arg.spec.nbytes} if arg.kind is ArgKind.PARAMETER and arg.spec else {}
        for arg in args
    ]


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
    if num_stages == 1:  # also what lies outside of all modules
        whole = Unit(path="", work=sum(one.work for one in found), params={})
        for one in found:
            whole.params |= one.params
        stages = Stages([[whole]], unit_of_work)
        stages.clear()
        stages["*"] = {"PP": 0}
        return stages
    units = units_of(found, num_stages)
    if len(units) < num_stages:
        raise PiperStrategyError(
            format_error(
                f"the model cannot be cut into {num_stages} stages between modules",
                {"modules that can be": ", ".join(one.path for one in units) or "none"},
                hint="ask for fewer stages, or annotate them inside forward with piper.annotate",
            )
        )
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
    return Stages([units[begin:end] for begin, end in _ranges(sizes)], unit_of_work)


def units_of(found: Sequence[Operator], num_stages: int) -> list[Unit]:
    """Modules in the order in which they are first called, none with more than a stage's share.

    Modules that call no others stay whole however much they have. What lies outside of all modules
    belongs to none: such operators join the stage of what they read.
    """
    share = sum(one.work for one in found) / num_stages
    whole: dict[str, float] = {}
    for one in found:
        for path in dict.fromkeys(one.paths):
            whole[path] = whole.get(path, 0) + one.work
    units: dict[str, Unit] = {}
    for one in found:
        inside = [path for path in one.paths if path]
        path = next((p for p in inside if whole[p] <= share), inside[-1] if inside else "")
        if path:
            unit = units.setdefault(path, Unit(path=path, work=0, params={}))
            unit.work += one.work
            unit.params |= one.params
    # What a module that is taken apart does itself would, as a unit, claim those it calls.
    return [
        unit
        for path, unit in units.items()
        if not any(other.startswith(path + ".") for other in units)
    ]


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
    work = [0.0]
    for one in units:
        work.append(work[-1] + one.work)
    weight = {}
    for begin in range(count):
        params: dict[str, int] = {}
        for end in range(begin + 1, count + 1):
            params |= units[end - 1].params
            weight[begin, end] = sum(params.values())

    def fits(begin: int, end: int) -> bool:
        return memory is None or weight[begin, end] <= memory

    def cost(begin: int, end: int) -> float:
        return work[end] - work[begin] if fits(begin, end) else float("inf")

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
