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
from benchmarks.paired import Comparison, compare, seconds
from benchmarks.report import Row, ratio_row
from benchmarks.sides import PiperStep, TorchStep, batch_of
from piper_dynamo.train.config import Config

RANKS = 2


def measure(ours: Config, theirs: Config, pairs: int) -> Comparison:
    """Piper's step time against torch's; call it on every rank.

    Raises:
        AssertionError: The losses differ, so that the two are not the same job.
    """
    batch = batch_of(ours)
    sides: tuple[Any, Any] = (PiperStep(ours), TorchStep(theirs))
    for _ in range(2):
        mine, other = (side(*batch) for side in sides)
        if other is not None and abs(mine - other) > 1e-3 * abs(other):
            raise AssertionError(f"the losses differ: {mine} and {other}")
    return compare(
        lambda: seconds(lambda: sides[0](*batch), dist.barrier),
        lambda: seconds(lambda: sides[1](*batch), dist.barrier),
        pairs=pairs,
        show=ours.schedule if piper.rank() == 0 else None,
    )


def run(ours: Config, theirs: Config, pairs: int) -> Comparison:
    """Measure on fresh processes; rank 0's times, which are those of the slowest."""
    found: Comparison = piper.launch(functools.partial(measure, ours, theirs, pairs), RANKS)[0]
    return found


def eager(config: Config, pairs: int, schedules: Sequence[str]) -> Iterator[Row]:
    """Every schedule: eager torch beside aten chunks; then the fastest beside the fastest."""
    found: dict[str, Comparison] = {}
    for schedule in schedules:
        job = replace(config, schedule=schedule, compile="aten")
        found[schedule] = run(job, job, pairs)
        yield ratio_row("real", schedule, found[schedule], 1.0, "eager torch")
    ours = min(found, key=lambda s: statistics.median(found[s].first))
    theirs = min(found, key=lambda s: statistics.median(found[s].second))
    best = run(
        replace(config, schedule=ours, compile="aten"),
        replace(config, schedule=theirs, compile="aten"),
        pairs,
    )
    yield ratio_row("real", f"best: {ours} against {theirs}", best, 0.97, "eager torch")


def compiled(config: Config, pairs: int) -> Iterator[Row]:
    """1F1B: torch.compile of each stage beside inductor chunks."""
    job = replace(config, schedule="one_f_one_b", compile="inductor")
    yield ratio_row("compiled", job.schedule, run(job, job, pairs), 1.0, "compiled torch")
