"""Whether a step needs the same memory always: two runs, and steps 3 and 10 of each.

By what torch's allocator gives out during a whole step, optimizer included: see `allocated.py`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import piper_dynamo as piper
from benchmarks.allocated import Allocated, allocated
from benchmarks.report import Row
from benchmarks.sides import PiperStep, batch_of
from piper_dynamo.train.config import Config

# Sizes change how much, and not whether it is the same.
CONFIG = Config(dim=256, layers=8, heads=8, kv_heads=4, seq=64, batch=16, microbatches=8)
RUNS = 2
STEPS = (3, 10)
MIB = 2**-20


def peaks(step: Callable[[], object], steps: Sequence[int] = STEPS) -> dict[int, Allocated]:
    """What some of the steps allocate; `steps` are counted from 1 and grow."""
    found = {}
    for number in range(1, steps[-1] + 1):
        if number in steps:
            found[number] = allocated(step)
        else:
            step()
    return found


def _one_rank(config: Config) -> dict[int, Allocated]:
    return peaks(functools.partial(PiperStep(config), *batch_of(config)))


def runs(config: Config) -> list[list[dict[int, Allocated]]]:
    """Of each run, of each rank."""
    return [piper.launch(functools.partial(_one_rank, config), config.world) for _ in range(RUNS)]


def run(schedules: Sequence[str]) -> Iterator[Row]:
    """Every schedule: the peaks of every rank, which do not differ, and what is left, nothing."""
    for schedule in schedules:
        found = runs(replace(CONFIG, schedule=schedule))
        ranks = list(zip(*found, strict=True))
        kinds = [{one for run in rank for one in run.values()} for rank in ranks]
        highest = [max(one.ever for one in kind) for kind in kinds]
        left = max(one.left for kind in kinds for one in kind)
        spread = max(h - min(one.ever for one in k) for h, k in zip(highest, kinds, strict=True))
        told = ", ".join(f"{nbytes * MIB:.1f}" for nbytes in highest)
        yield Row(
            section="steady",
            what=f"{schedule}: steps {STEPS[0]} and {STEPS[1]} of {RUNS} runs",
            figures=f"peaks of the ranks {told} MiB, {spread} bytes apart; {left} bytes left",
            bar="the same to the byte, nothing left",
            held=spread == 0 and left == 0,
            data={"ours": max(highest), "unit": "bytes", "spread": spread, "left": left}
            | {"ranks": [[run_[n].ever for run_ in rank for n in STEPS] for rank in ranks]}
            | {"measured": f"{RUNS} runs of {STEPS[1]} steps"},
        )
