"""Step time with replicas beside FSDP2 or DDP: same processes, model, data, optimizer, threads.

Piper asks glibc to give large blocks back, where it shards; that costs time, which the other side
is not to pay. So each has, in its turns, the thresholds that it would have alone.

Nor is a side to pay for what the other left: FSDP2's step gives so much memory back to the system
that the step after it is slower, whoever's it is, with as many page faults (ZeRO-1: 4.5 s rather
than 3.1). In a job every step follows one of its own, so that a step of its own comes, untimed,
before each that is timed.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

import piper_dynamo as piper
from benchmarks.memory import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
from benchmarks.paired import Comparison, compare, seconds
from benchmarks.report import Row, gain_row, ratio_row
from benchmarks.zero_sides import BESIDE, Ddp, Fsdp, Job, PiperZero, TorchZero, mean_over_ranks
from piper_dynamo.garbage import keep_large_apart

BAR, DDP_BAR, FSDP_GAIN = 0.9, 1.0, 1.1
MOST_MMAP = 32 * 2**20  # where glibc's own threshold ends up, once such blocks were freed
NAMES = {
    0: "DDP + pipelining",
    2: "FSDP2 + pipelining, not resharded",
    3: "FSDP2 + pipelining, resharded",
}


def _measure(job: Job, make: Callable[[Job], Any], zero: int, pairs: int) -> Comparison:
    """Piper's step time against the other's; on every rank.

    Raises:
        AssertionError: The losses differ, so that the two are not the same job.
    """
    batch = job.batch(piper.rank())
    sides: tuple[Any, Any] = (PiperZero(job, zero), make(job))

    def ours() -> Any:
        if zero >= 2:
            keep_large_apart()
        return sides[0](*batch)

    def theirs() -> Any:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MOST_MMAP)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * MOST_MMAP)
        return sides[1](*batch)

    for _ in range(2):
        mine = ours()
        other = mean_over_ranks(theirs())
        if abs(mine - other) > 1e-3 * abs(other):
            raise AssertionError(f"the losses differ: {mine} and {other}")

    def after_its_own(step: Callable[[], Any]) -> float:
        step()
        return seconds(step, dist.barrier)

    return compare(
        lambda: after_its_own(ours),
        lambda: after_its_own(theirs),
        pairs=pairs,
        show=f"zero={zero}" if piper.rank() == 0 else None,
    )


def measure_beside(job: Job, make: Callable[[Job], Any], zero: int, pairs: int) -> Comparison:
    """Piper's step against another's, in fresh processes."""
    found: Comparison = piper.launch(
        functools.partial(_measure, job, make, zero, pairs), job.ranks
    )[0]
    return found


def levels(job: Job, pairs: int, zeros: Sequence[int]) -> Iterator[Row]:
    """Every level beside torch's nearest, with pipeline and replicas."""
    for zero in zeros:
        found = measure_beside(job, functools.partial(TorchZero, level=BESIDE[zero]), zero, pairs)
        yield ratio_row("time", f"ZeRO-{zero}", found, BAR, NAMES[BESIDE[zero]])


def ddp(job: Job, pairs: int) -> Iterator[Row]:
    """Replicas alone, nothing sharded, beside DDP with its default buckets."""
    alone = Job(config=replace(job.config, pp=1, microbatches=1), replicas=job.replicas)
    found = measure_beside(alone, Ddp, 0, pairs)
    yield ratio_row("ddp", "ZeRO-0, no pipeline", found, DDP_BAR, "DDP")


def fsdp(job: Job, pairs: int) -> Iterator[Row]:
    """Replicas alone, everything sharded, beside FSDP2, which gathers parameters again, too."""
    alone = Job(config=replace(job.config, pp=1, microbatches=1), replicas=job.replicas)
    found = measure_beside(alone, Fsdp, 3, pairs)
    yield gain_row("fsdp", "ZeRO-3, no pipeline", found, FSDP_GAIN, "FSDP2's throughput")
