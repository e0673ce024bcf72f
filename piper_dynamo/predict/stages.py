"""Stages of about equal work: where to cut a model that does not say it.

Terms: a *unit* is a module that a stage has whole; a module that has more than a stage's share is
taken apart into those that it calls. Work is the FLOPs of its forward: those of its backward are in
the same proportion.

Signature: Dynamo's graph of a call -> its units in order -> regions by module path.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo.api import look
from piper_dynamo.capture import fake_args
from piper_dynamo.captured import Call
from piper_dynamo.errors import PiperStrategyError, format_error
from piper_dynamo.ir.spec import module_paths
from piper_dynamo.ir.tags import indices_of
from piper_dynamo.strategy import Strategy
from piper_dynamo.values import is_whole

Unit = tuple[str, int]  # a module's path, and the FLOPs of its forward


def auto_stages(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    num_stages: int,
) -> dict[str, dict[str, int]]:
    """Regions that cut a model into pipeline stages of about equal work.

    The stage with the most FLOPs has as few as any cut between whole modules can have.

    Args:
        model: The single-device model, without `PP` annotations of its own.
        example_inputs: As for `compile`.
        num_stages: How many.

    Returns:
        `regions=` of a strategy: the stage of each module, by its path.

    Raises:
        PiperStrategyError: The model has its own stages, or too few modules.
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
    return regions_of(flops_by_node(graph, now.calls[-1]), num_stages)


def flops_by_node(graph: fx.GraphModule, call: Call) -> list[tuple[list[str], int]]:
    """For each operator in order: the modules it is in, outermost first, and its FLOPs."""
    mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
    counter = _Counter(graph)
    with mode:
        counter.run(*fake_args(mode, call.args, call.numbers, {}, 1))
    return counter.found


class _Counter(fx.Interpreter):
    """Counts what each node of a graph computes, on fake values."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.found: list[tuple[list[str], int]] = []

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        with compat.FlopCounterMode(display=False) as counted:
            result = super().run_node(n)
        self.found.append((module_paths(n), counted.get_total_flops()))
        return result


def regions_of(
    found: Sequence[tuple[list[str], int]], num_stages: int
) -> dict[str, dict[str, int]]:
    """The regions of stages of about equal work.

    Args:
        found: As `flops_by_node` gives it.
        num_stages: How many.

    Raises:
        PiperStrategyError: There are not so many modules.
    """
    if num_stages == 1:  # also what lies outside of all modules
        return {"*": {"PP": 0}}
    units = units_of(found, num_stages)
    if len(units) < num_stages:
        raise PiperStrategyError(
            format_error(
                f"the model cannot be cut into {num_stages} stages between modules",
                {"modules that can be": ", ".join(path for path, _ in units) or "none"},
                hint="ask for fewer stages, or annotate them inside forward with piper.annotate",
            )
        )
    cuts = balanced([flops for _, flops in units], num_stages)
    stages = [stage for stage, size in enumerate(cuts) for _ in range(size)]
    return {path: {"PP": stage} for (path, _), stage in zip(units, stages, strict=True)}


def units_of(found: Sequence[tuple[list[str], int]], num_stages: int) -> list[Unit]:
    """Modules in the order in which they are first called, none with more than a stage's share.

    Modules that call no others stay whole however much they have. What lies outside of all modules
    belongs to none: such operators join the stage of what they read.
    """
    share = sum(flops for _, flops in found) / num_stages
    whole: dict[str, int] = {}
    for paths, flops in found:
        for path in dict.fromkeys(paths):
            whole[path] = whole.get(path, 0) + flops
    units: dict[str, int] = {}
    for paths, flops in found:
        inside = [path for path in paths if path]
        path = next((p for p in inside if whole[p] <= share), inside[-1] if inside else "")
        if path:
            units[path] = units.get(path, 0) + flops
    # What a module that is taken apart does itself would, as a unit, claim those it calls.
    return [
        (path, flops)
        for path, flops in units.items()
        if not any(other.startswith(path + ".") for other in units)
    ]


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """The sizes of consecutive parts of which the heaviest is as light as can be.

    Args:
        weights: In order.
        parts: How many, at most as many as weights; none is empty.
    """
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    count = len(weights)
    # best[k][i]: the heaviest of k parts of the first i, as light as can be; where the last begins.
    best = [[(0.0, 0)] + [(float("inf"), 0)] * count]
    for k in range(1, parts + 1):
        best.append([(float("inf"), 0)] * (count + 1))
        for i in range(k, count + 1):
            best[k][i] = min(
                (max(best[k - 1][j][0], total[i] - total[j]), j) for j in range(k - 1, i)
            )
    sizes, end = [], count
    for k in range(parts, 0, -1):
        begin = best[k][end][1]
        sizes.append(end - begin)
        end = begin
    return sizes[::-1]
