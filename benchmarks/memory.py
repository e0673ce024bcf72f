"""Peak memory of a training step beside torch's pipelining: each side alone, in fresh processes.

The figure is the high-water mark of resident memory (VmHWM) in steps 3 to 5, above what was
resident after the imports; optimizer, gradients and what gloo allocates are in it. glibc is told to
give blocks of 64 KiB and more back at once, so that its reserves do not count; both sides alike.
A second figure, without a bar, is the mark above what stays resident between steps: what a step
itself needs, without parameters, optimizer state, and what compiling leaves behind.
"""

import ctypes
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# Whatever one of the sides imports later is imported for both before the baseline is taken.
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401

import piper_dynamo as piper
from benchmarks.paired import Comparison, compare
from benchmarks.report import Row
from benchmarks.sides import PiperStep, TorchStep, batch_of
from piper_dynamo.train.config import Config

RANKS = 2
PAIRS = 3
BARS = {"aten": 0.85, "inductor": 0.95}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def measured(
    make: Callable[[], Any],
    batch: tuple[Any, ...],
    *,
    steps: int = 3,
    without_reserves: bool = True,
) -> tuple[int, int]:
    """This rank's peak in a step above the import baseline, and above what stays between steps.

    Args:
        make: Makes the step.
        batch: What it is called with.
        steps: How many steps the peak is taken over, after two others.
        without_reserves: Tell glibc to keep nothing that is freed; else it is as each side has it.
    """
    libc = ctypes.CDLL(None)
    if without_reserves:
        libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
        libc.mallopt(M_TRIM_THRESHOLD, 64 * 1024)
    gc.collect()
    baseline = resident("VmRSS")
    step = make()
    for _ in range(2):
        step(*batch)
    gc.collect()
    if without_reserves:
        libc.malloc_trim(0)
    between = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    for _ in range(steps):
        step(*batch)
    peak = resident("VmHWM")
    return peak - baseline, peak - between


def peak_bytes(config: Config, side: str) -> tuple[int, int]:
    """See `measured`, of a pipeline alone."""
    kind: Any = PiperStep if side == "piper" else TorchStep
    return measured(functools.partial(kind, config), batch_of(config))


def _highest(config: Config, side: str, steps: list[float]) -> float:
    """The most that any rank needs; its need within a step is added to `steps`."""
    found = piper.launch(functools.partial(peak_bytes, config, side), RANKS)
    steps.append(float(max(step for _, step in found)))
    return float(max(peak for peak, _ in found))


def run(config: Config, pairs: int, schedules: Sequence[str]) -> Iterator[Row]:
    """The rank that needs most: Piper against torch, eager and compiled."""
    jobs = [replace(config, schedule=s, compile="aten") for s in schedules]
    if "one_f_one_b" in schedules:
        jobs.append(replace(config, schedule="one_f_one_b", compile="inductor"))
    for job in jobs:
        ours: list[float] = []
        theirs: list[float] = []
        found = compare(
            functools.partial(_highest, job, "piper", ours),
            functools.partial(_highest, job, "torch", theirs),
            pairs=pairs,
            show=f"memory {job.schedule}",
        )
        kind, bar = "eager" if job.compile == "aten" else "compiled", BARS[job.compile]
        yield Row(
            section="memory",
            what=f"{job.schedule}, {kind}",
            figures=found.text(2**-20, "MiB"),
            bar=f"<= {bar:.2f} x {kind} torch",
            held=found.holds(bar),
            data=found.figures("bytes", bar) | {"needed": PAIRS},
        )
        within = Comparison(first=tuple(ours), second=tuple(theirs))
        yield Row(
            section="memory",
            what=f"{job.schedule}, {kind}, within a step",
            figures=within.text(2**-20, "MiB"),
            data=within.figures("bytes"),
        )
