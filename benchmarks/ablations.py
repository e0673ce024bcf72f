"""What each part brings: the same job with it and without it, in the same processes.

make bench ARGS="ablations"

Interleaving of exchanges is measured with experts (`exposed` in `experts.py`); events beside a
synchronisation after each task need a GPU (`gpu.py`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import piper_dynamo as piper
from benchmarks import pipeline, zero
from benchmarks.emulated import FOUR, WIDTH, Chain
from benchmarks.links import Links
from benchmarks.paired import Comparison, compare, seconds
from benchmarks.report import Row
from benchmarks.sides import LossStep, PiperStep, batch_of
from benchmarks.zero_counts import collectives
from benchmarks.zero_hidden import MBIT, PASS_S
from benchmarks.zero_sides import Job
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

Step = Callable[[], Any]
Make = Callable[[], Step]


def _measure(first: Make, second: Make, pairs: int) -> Comparison:
    """The step of the first against the second's; on every rank."""
    steps = [first(), second()]
    for step in steps:
        for _ in range(2):
            step()
    return compare(
        lambda: seconds(steps[0], dist.barrier),
        lambda: seconds(steps[1], dist.barrier),
        pairs=pairs,
        show="ablation" if piper.rank() == 0 else None,
    )


def _row(section: str, what: str, found: Comparison) -> Row:
    return Row(
        section=section,
        what=what,
        figures=f"{found.text()}   {found.ratio - 1:+.1%}",
        data=found.figures(),
    )


def _backward(step: Any, batch: tuple[torch.Tensor, ...]) -> Step:
    """Forward and backward of a step, whose gradients are dropped."""

    def once() -> None:
        step(*batch).backward()
        for parameter in piper.parameters(step):
            parameter.grad = None

    return once


def _emulated(schedule: str) -> Step:
    """A pipeline of four ranks on emulated devices."""
    costs = piper.Costs(F=FOUR.unit_s, BI=FOUR.unit_s, BW=FOUR.unit_s)
    batch = tuple(torch.zeros(FOUR.microbatches, WIDTH) for _ in range(2))
    strategy = piper.strategies.pipeline(
        schedule, ranks=FOUR.ranks, num_microbatches=FOUR.microbatches
    )
    return _backward(
        piper.compile(Chain(FOUR.ranks), strategy, batch, compile="emulate", costs=costs), batch
    )


def split_backward(pairs: int) -> Iterator[Row]:
    """Weight gradients when nobody waits for them, and right after input gradients."""
    first, second = (functools.partial(_emulated, name) for name in ("zb_h1", "one_f_one_b"))
    found = piper.launch(functools.partial(_measure, first, second, pairs), FOUR.world)[0]
    yield _row("split-backward", "zb_h1 beside 1F1B, 4 emulated ranks", found)


BUCKET_MB = 4.0
LINKED = Job(
    config=replace(zero.JOB.config, dim=256, heads=4, kv_heads=2, pp=1), bucket_mb=BUCKET_MB
)


# All of a backward counts as weight gradients: the first region has no others, and a stage has more
# regions that have them the more it is cut.
PASSES = piper.Costs(F=PASS_S, BI=0.0, BW=2 * PASS_S)


def _linked(strategy: piper.Strategy) -> Step:
    """Two replicas on emulated devices, over links."""
    costs = replace(PASSES, bandwidth=MBIT * 1e6 / 8)
    batch = LINKED.batch(piper.rank())
    step = piper.compile(build(LINKED.config), strategy, batch, compile="emulate", costs=costs)
    return _backward(step, batch)


def _over_links(first: Make, second: Make, pairs: int) -> Comparison:
    with Links(2, MBIT) as links:
        found: Comparison = links.run(functools.partial(_measure, first, second, pairs))[0]
    return found


def prefetch(pairs: int) -> Iterator[Row]:
    """ZeRO-3 that gathers one use ahead, and at the use."""
    first, second = (
        functools.partial(_linked, LINKED.strategy(3, prefetch=ahead)) for ahead in (1, 0)
    )
    what = f"ZeRO-3, prefetch 1 beside 0, DP 2, {MBIT:.0f} Mbit/s"
    yield _row("prefetch", what, _over_links(first, second, pairs))


def in_buckets(bucket_mb: float | None) -> piper.Strategy:
    """Replicas of a stage that is one region, since no bucket spans regions; None: one bucket."""
    return piper.strategies.pipeline(
        LINKED.config.schedule,
        ranks=1,
        replicas=LINKED.replicas,
        num_microbatches=LINKED.config.microbatches,
        bucket_mb=bucket_mb,
    )


def outline(strategy: piper.Strategy) -> tuple[int, float]:
    """How many sums of gradients a step of a rank has, and its seconds with free transfers."""
    plan = piper.plan(build(LINKED.config), strategy, LINKED.batch(0), LINKED.ranks)
    return collectives(plan).reductions // LINKED.ranks, plan.simulate(PASSES).makespan


def buckets(pairs: int) -> Iterator[Row]:
    """Gradients reduced by bucket as soon as they are there, and all at once.

    Raises:
        AssertionError: The plans do not differ in how often they reduce, and in that alone.
    """
    sides = [in_buckets(BUCKET_MB), in_buckets(None)]
    (many, cut_s), (one, whole_s) = map(outline, sides)
    if not many > one or abs(cut_s - whole_s) > 1e-6:
        raise AssertionError(f"{many} and {one} reductions in steps of {cut_s} s and {whole_s} s")
    first, second = (functools.partial(_linked, side) for side in sides)
    what = f"ZeRO-0, {many} buckets of {BUCKET_MB:g} MiB beside {one}, DP 2, {MBIT:.0f} Mbit/s"
    yield _row("buckets", what, _over_links(first, second, pairs))


def _real(config: Config) -> Step:
    step: LossStep = PiperStep(config)
    return functools.partial(step, *batch_of(config))


def inductor(pairs: int) -> Iterator[Row]:
    """Chunks that inductor fuses, and operator by operator."""
    job = replace(pipeline.JOB, schedule="one_f_one_b")
    first, second = (
        functools.partial(_real, replace(job, compile=how)) for how in ("inductor", "aten")
    )
    found = piper.launch(functools.partial(_measure, first, second, pairs), job.world)[0]
    yield _row("inductor", "inductor beside aten, 1F1B, 2 ranks that compute", found)


SECTIONS: Mapping[str, Callable[[int], Iterator[Row]]] = {
    "split-backward": split_backward,
    "inductor": inductor,
    "prefetch": prefetch,
    "buckets": buckets,
}
