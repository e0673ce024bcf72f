"""One device: Piper without a strategy, and with one of one rank, beside inductor's training step.

All three compile the model's chunks by inductor; what differs is who splits forward and backward,
and what runs them.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import piper_dynamo as piper
from benchmarks.memory import PAIRS as MEMORY_PAIRS
from benchmarks.memory import measured
from benchmarks.paired import Comparison, compare
from benchmarks.report import Row, ratio_row
from benchmarks.sides import LossStep, PiperStep, batch_of
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

JOB = Config(
    dim=512,
    layers=8,
    heads=8,
    kv_heads=4,
    seq=256,
    batch=4,
    microbatches=1,
    pp=1,
    schedule="gpipe",
    compile="inductor",
)
BAR = 1.03


class Compiled(LossStep):
    """One optimizer step of the model as `torch.compile` makes it, by a backend."""

    def __init__(self, config: Config, **how: Any) -> None:
        model = build(config, 0)
        self.step = torch.compile(model, **how)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, foreach=True)


SIDES: Mapping[str, Callable[..., LossStep]] = {
    "inductor": Compiled,
    "no strategy": functools.partial(Compiled, backend="piper", options={"compile": "inductor"}),
    "a strategy of one rank": PiperStep,
}
OURS = [side for side in SIDES if side != "inductor"]


def _times(config: Config, side: str, pairs: int) -> Comparison:
    """Step times of one of ours and of inductor, in one process.

    Raises:
        AssertionError: The losses differ, so that the two are not the same job.
    """
    batch = batch_of(config)
    plain = SIDES["inductor"](config)
    plain(*batch)  # compiled before Piper changes what Dynamo guards in this process
    both = [SIDES[side](config), plain]
    both[0](*batch)  # as many steps as the other
    for _ in range(3):
        mine, other = (step(*batch) for step in both)
        if abs(mine - other) > 1e-3 * abs(other):
            raise AssertionError(f"the losses differ: {mine} and {other}")

    def once(step: LossStep) -> float:
        start = time.perf_counter()
        step(*batch)
        return time.perf_counter() - start

    first, second = (functools.partial(once, step) for step in both)
    return compare(first, second, pairs=pairs, show=side)


def run_times(pairs: int) -> Iterator[Row]:
    """Step times."""
    for side in OURS:
        found: Comparison = piper.launch(functools.partial(_times, JOB, side, pairs), 1)[0]
        yield ratio_row("time", side, found, BAR, "inductor's own step")


def _peak(config: Config, side: str) -> int:
    return measured(functools.partial(SIDES[side], config), batch_of(config))[0]


def _peak_of_its_own_process(side: str) -> float:
    return float(piper.launch(functools.partial(_peak, JOB, side), 1)[0])


def run_memory(pairs: int) -> Iterator[Row]:
    """The high-water mark of steps above the imports, each in a process of its own."""
    for side in OURS:
        found = compare(
            functools.partial(_peak_of_its_own_process, side),
            functools.partial(_peak_of_its_own_process, "inductor"),
            pairs=pairs,
            show=side,
        )
        yield Row(
            section="memory",
            what=side,
            figures=found.text(2**-20, "MiB"),
            bar=f"<= {BAR:.2f} x inductor's own step",
            held=found.holds(BAR),
            data=found.figures("bytes", BAR) | {"needed": MEMORY_PAIRS},
        )
