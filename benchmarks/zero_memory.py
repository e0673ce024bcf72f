"""Memory with replicas beside FSDP2 + pipelining: peaks, and the micro-batch that fits.

Every figure is that of the rank that needs most, from fresh processes; see `memory.py`. Processes
are as users start them: glibc keeps what is freed, unless a side asks it not to, as Piper does.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import click

import piper_dynamo as piper
from benchmarks.memory import measured
from benchmarks.paired import Comparison
from benchmarks.report import Row
from benchmarks.zero_sides import Job, PiperZero, TorchZero

PAIRS = 3
BARS = {1: 0.75, 2: 0.60, 3: 0.45}  # times torch's level 3
FIT_BARS = {2: 2.0, 3: 3.0}  # times torch's micro-batch, at the middle cap
CAPS = (1, 4, 8)  # torch's micro-batches whose peaks are the caps
MOST = 256  # no micro-batch above this is tried
MIB = 2**-20


def _one_rank(job: Job, side: str, level: int, steps: int) -> tuple[int, int]:
    kind = PiperZero if side == "piper" else TorchZero
    make = functools.partial(kind, job, level)
    return measured(make, job.batch(piper.rank()), steps=steps, without_reserves=False)


def peaks(job: Job, side: str, level: int, steps: int = 3) -> tuple[int, int]:
    """The most that any rank needs above the baseline, and above what stays between steps."""
    found = piper.launch(functools.partial(_one_rank, job, side, level, steps), job.ranks)
    peak, step = max(peak for peak, _ in found), max(step for _, step in found)
    rows = job.config.batch // job.config.microbatches
    click.echo(f"    {side} level {level}, micro-batch {rows}: {peak * MIB:.0f} MiB")
    return peak, step


def levels(job: Job, pairs: int, zeros: Sequence[int]) -> Iterator[Row]:
    """Every level of both beside torch's level 3; all in turn."""
    sides = [("torch", 3), ("torch", 2), ("torch", 0), *(("piper", zero) for zero in zeros)]
    found: dict[tuple[str, int], list[tuple[int, int]]] = {side: [] for side in sides}
    for pair in range(pairs):
        for one in sides if pair % 2 == 0 else reversed(sides):
            found[one].append(peaks(job, *one))
    reference = tuple(float(peak) for peak, _ in found["torch", 3])
    for (side, level), measured_ in found.items():
        if (side, level) == ("torch", 3):
            continue
        ratio = Comparison(first=tuple(float(peak) for peak, _ in measured_), second=reference)
        within = statistics.median(step for _, step in measured_)
        bar = BARS.get(level) if side == "piper" else None
        yield Row(
            section="memory",
            what=f"ZeRO-{level}" if side == "piper" else f"torch's level {level}",
            figures=f"{ratio.text(MIB, 'MiB')}   within a step {within * MIB:.0f} MiB",
            bar="" if bar is None else f"<= {bar:.2f} x torch's level 3",
            held=None if bar is None else ratio.holds(bar),
            data=ratio.figures("bytes", bar) | {"within_step": within, "needed": PAIRS},
        )


def largest(fits: Callable[[int], bool], start: int, most: int = MOST) -> int:
    """The largest number up to `most` that fits, 0 for none: doubling, then bisection."""
    low, high = 0, start
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def with_microbatch(job: Job, rows: int) -> Job:
    """The job with so many rows in each microbatch."""
    return replace(job, config=replace(job.config, batch=rows * job.config.microbatches))


def fitting(job: Job, zeros: Sequence[int], caps: Sequence[int] = CAPS) -> Iterator[Row]:
    """The largest micro-batch under torch's own peaks; each probe is a fresh job."""

    @functools.cache
    def peak(side: str, level: int, rows: int) -> int:
        return peaks(with_microbatch(job, rows), side, level, steps=1)[0]

    middle = caps[len(caps) // 2]
    for rows in caps:
        cap = peak("torch", 3, rows)
        for zero in zeros:

            def fits(tried: int, zero: int = zero, cap: int = cap) -> bool:
                return peak("piper", zero, tried) <= cap

            best = largest(fits, rows)
            bar = FIT_BARS[zero] if rows == middle else None
            yield Row(
                section="largest",
                what=f"ZeRO-{zero} under {cap * MIB:.0f} MiB",
                figures=f"micro-batch {best} against {rows}: {best / rows:.2f} x",
                bar="" if bar is None else f">= {bar:.1f} x torch's level 3",
                held=None if bar is None else best >= bar * rows,
                data={"cap": cap, "ours": best, "other": rows, "unit": "rows"}
                | {"measured": "1 probe each"},
            )
