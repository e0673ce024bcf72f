"""Step time on real processes beside `torch.distributed.pipelining`.

Same model, data, optimizer, threads and run: two gloo ranks, both sides in the same processes.
"""

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

import piper_dynamo as piper
from benchmarks import predict
from benchmarks.paired import Comparison, compare, seconds
from benchmarks.report import Row, gain_row, ratio_row
from benchmarks.sides import PiperStep, TorchStep, batch_of
from piper_dynamo.predict.links import ratios, slowdown_of
from piper_dynamo.predict.measuring import measurable
from piper_dynamo.train.config import Config

RANKS = 2
GAIN = 1.05
BEST_BAR, COMPILED_BAR, BOUND_BAR = 0.97, 1.0, 1.06

Side = tuple[Config, str]  # a job, and torch's name of its schedule


def side(config: Config, schedule: str, compile: str) -> Side:
    """A job under a schedule of torch's; looped BFS has the stages of interleaved 1F1B."""
    known = "interleaved_1f1b" if schedule == "looped_bfs" else schedule
    return replace(config, schedule=known, compile=compile), schedule


def measure(ours: Side, theirs: Side, pairs: int) -> Comparison:
    """Piper's step time against torch's; call it on every rank.

    Raises:
        AssertionError: The losses differ, so that the two are not the same job.
    """
    batch = batch_of(ours[0])
    sides: tuple[Any, Any] = (PiperStep(*ours), TorchStep(*theirs))
    for _ in range(2):
        mine, other = (step(*batch) for step in sides)
        if other is not None and abs(mine - other) > 1e-3 * abs(other):
            raise AssertionError(f"the losses differ: {mine} and {other}")
    return compare(
        lambda: seconds(lambda: sides[0](*batch), dist.barrier),
        lambda: seconds(lambda: sides[1](*batch), dist.barrier),
        pairs=pairs,
        show=ours[1] if piper.rank() == 0 else None,
    )


def run(ours: Side, theirs: Side, pairs: int) -> Comparison:
    """Measure on fresh processes; rank 0's times, which are those of the slowest."""
    found: Comparison = piper.launch(functools.partial(measure, ours, theirs, pairs), RANKS)[0]
    return found


def _both(section: str, what: str, found: Comparison, bar: float, of: str) -> Iterator[Row]:
    """The bar of throughput, then the weaker one of time that this was held to before."""
    yield gain_row(section, what, found, GAIN, of)
    yield ratio_row(section, f"{what}, time", found, bar, of)


def eager(config: Config, pairs: int, schedules: Sequence[str]) -> Iterator[Row]:
    """Every schedule: eager torch beside aten chunks; then the fastest beside the fastest."""
    found: dict[str, Comparison] = {}
    for schedule in schedules:
        job = side(config, schedule, "aten")
        found[schedule] = run(job, job, pairs)
        yield ratio_row("real", schedule, found[schedule], 1.0, "eager torch")
    ours = min(found, key=lambda s: statistics.median(found[s].first))
    theirs = min(found, key=lambda s: statistics.median(found[s].second))
    best = run(side(config, ours, "aten"), side(config, theirs, "aten"), pairs)
    what = f"best of {len(found)}: {ours} against {theirs}"
    yield from _both("real", what, best, BEST_BAR, "torch's best, eager")


def compiled(config: Config, pairs: int, schedules: Sequence[str]) -> Iterator[Row]:
    """Every schedule: torch.compile of each stage beside inductor chunks; the bar is 1F1B's."""
    for schedule in schedules:
        job = side(config, schedule, "inductor")
        found = run(job, job, pairs)
        if schedule == "one_f_one_b":
            yield from _both("compiled", schedule, found, COMPILED_BAR, "compiled torch")
        else:
            yield Row(section="compiled", what=schedule, figures=found.text(), data=found.figures())


def _beside_bound(config: Config, pairs: int) -> Comparison:
    """Steps without the optimizer, and what their program would take if chunks alone took time.

    In turn: after each step this rank's chunks are called one by one, and how much longer they take
    while both ranks compute is measured. On every rank; rank 0's chunks count.
    """
    step, plan = predict.step_of(config), predict.planned(config)
    chunks = measurable(plan.chunks, config.compile) if piper.rank() == 0 else []
    took: list[float] = []
    bounds: list[float] = []
    for _ in range(pairs):
        took.append(seconds(step, dist.barrier))
        slower = slowdown_of([ratios()])
        alone = {one.chunk.key: one.once() for one in chunks}
        if alone:
            costs = piper.Costs(chunks=alone, slowdown=slower)
            bounds.append(plan.simulate(costs).makespan)
    return Comparison(first=tuple(took), second=tuple(bounds))


def bound(config: Config, pairs: int, schedules: Sequence[str]) -> Iterator[Row]:
    """Every schedule: a step beside the simulator's bound, from chunks measured in turn with it."""
    for schedule in schedules:
        job = replace(config, schedule=schedule)
        found = piper.launch(functools.partial(_beside_bound, job, pairs), RANKS)[0]
        yield ratio_row("bound", schedule, found, BOUND_BAR, "the simulated bound")
