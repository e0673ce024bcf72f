"""What a step holds beside what its plan says: between instructions, and while tasks run.

`rss`: one rank's resident memory (VmRSS) after every instruction of a step, and its highest value
(VmHWM), above what is resident before the step. glibc is told to give blocks of 64 KiB and more
back at once, so that its reserves do not count. On one rank alone: room for what is to come over
a link is resident only once that is there.

`allocated`: the same of what torch's allocator gives out (`allocated.py`), on every rank of
pipelines and of replicas that shard.
"""

import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch._dynamo
import torch._inductor.compile_fx

import piper_dynamo as piper
from benchmarks.allocated import allocated
from benchmarks.memory import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, resident
from benchmarks.report import Row
from benchmarks.sides import PiperStep, batch_of
from piper_dynamo.lowering.memory import held_over_time
from piper_dynamo.runtime.executor import Runtime
from piper_dynamo.train.config import Config

CONFIG = Config(
    dim=256,
    layers=4,
    heads=8,
    kv_heads=4,
    seq=256,
    batch=32,
    microbatches=4,
    pp=1,
    schedule="gpipe",
)
LAYOUTS: dict[str, Config] = {
    "1f1b, 2 ranks": replace(CONFIG, pp=2, schedule="one_f_one_b"),
    "zbv, 2 ranks": replace(CONFIG, pp=2, schedule="zbv"),
    "ZeRO-3, 2 replicas": replace(CONFIG, dp=2, zero=3, bucket_mb=4.0),
}
CASES: dict[str, tuple[str | None, bool]] = {
    "float32": (None, False),
    "float32, recompute 0.5": ("0.5", False),
    "float32, recompute full": ("full", False),
    "autocast bfloat16": (None, True),
    "autocast bfloat16, recompute full": ("full", True),
}
# Of several ranks.
SHARED = ("float32", "float32, recompute full", "autocast bfloat16")
WITHIN = 0.05
MIB = 2**-20
Measure = Callable[[Callable[[], object]], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One rank's step, in bytes.

    Attributes:
        between: The most between two instructions, as measured.
        inside: The most at any moment.
        planned_between: The plan's figure for the first.
        planned_inside: And for the second.
    """

    between: int
    inside: int
    planned_between: int
    planned_inside: int


def measured(config: Config, measure: Measure) -> Kept:
    """This rank's figures of a step after two others.

    Args:
        config: The job.
        measure: Gives the two measured figures of a call.
    """
    step = PiperStep(config)
    batch = batch_of(config, piper.data_rank(step.step))
    for _ in range(2):
        with piper.record(step.step):
            step(*batch)
    gc.collect()
    with piper.record(step.step):
        between, inside = measure(lambda: step.step(*batch))
    plan = piper.explain(step.step)
    program = plan.programs[piper.rank()]
    highest: list[int] = []
    held_over_time(program, plan.chunks, highest)
    return Kept(
        between=between,
        inside=inside,
        planned_between=program.peak_bytes,
        planned_inside=max(highest),
    )


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Resident memory at every mark of a recorded step."""
    found: list[int] = []
    mark = Runtime.mark

    def watching(self: Runtime, index: int) -> None:
        found.append(resident("VmRSS"))
        mark(self, index)

    Runtime.mark = watching  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Runtime.mark = mark  # type: ignore[method-assign]


def by_residence(call: Callable[[], object]) -> tuple[int, int]:
    """The two figures from resident memory."""
    ctypes.CDLL(None).malloc_trim(0)
    with _watched() as found:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        call()
        inside = resident("VmHWM")
    return max(found) - found[0], inside - found[0]


def by_allocator(call: Callable[[], object]) -> tuple[int, int]:
    """The two figures from torch's allocator."""
    found = allocated(call)
    return found.between, found.ever


def kept(config: Config, autocast: bool, measure: Measure) -> Kept:
    """This rank's figures, under autocast or not."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    libc.mallopt(M_TRIM_THRESHOLD, 64 * 1024)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return measured(config, measure)


def activations() -> Iterator[Row]:
    """One rank by resident memory, several by the allocator: all cases, before and after."""
    for name in CASES:
        yield from rows("1 rank", CONFIG, name, by_residence)
    for layout, config in LAYOUTS.items():
        for name in SHARED:
            yield from rows(layout, config, name, by_allocator)


def rows(layout: str, config: Config, name: str, measure: Measure) -> Iterator[Row]:
    """The rank whose figures are furthest from the plan's: between instructions, and ever."""
    recompute, autocast = CASES[name]
    job = functools.partial(kept, replace(config, recompute=recompute), autocast, measure)
    ranks: list[Kept] = piper.launch(job, config.world)
    for what, of in (("between tasks", "between"), ("at any moment", "inside")):
        pairs = [(getattr(rank, of), getattr(rank, f"planned_{of}")) for rank in ranks]
        found, planned = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
        off = found / planned - 1
        yield Row(
            section="activations",
            what=f"{layout}, {name}, {what}",
            figures=f"planned {planned * MIB:.1f} MiB, measured {found * MIB:.1f} MiB ({off:+.1%})",
            bar=f"within {WITHIN:.0%} of the plan",
            held=abs(off) <= WITHIN,
            data={"ours": found, "other": planned, "unit": "bytes", "ranks": pairs}
            | {"measured": "1 step"},
        )
