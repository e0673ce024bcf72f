"""Piper's own cost per instruction: a whole step in which operators and transport take no time.

One rank runs a pipeline of tiny tensors whose chunks are emulated and take zero seconds, so that
what is left is Dynamo's guards, the program, and the hand-over of gradients.
"""

import statistics
import time
from collections.abc import Iterator

import torch

import piper_dynamo as piper
from benchmarks.emulated import WIDTH, Chain
from benchmarks.report import Row
from piper_dynamo.ir.program import Op

STAGES, MICROBATCHES = 4, 16
BAR_US = 25.0
REPEATS = 200


def step_seconds() -> tuple[float, int]:
    """The median time of a step, and its instructions, frees apart."""
    strategy = piper.strategies.pipeline(
        "gpipe", ranks=1, stages=STAGES, num_microbatches=MICROBATCHES
    )
    x, y = torch.zeros(MICROBATCHES, WIDTH), torch.zeros(MICROBATCHES, WIDTH)
    costs = piper.Costs(F=0.0, BI=0.0, BW=0.0)
    step = piper.compile(Chain(STAGES), strategy, (x, y), compile="emulate", costs=costs)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step(x, y).backward()
        times.append(time.perf_counter() - start)
        for parameter in piper.parameters(step):
            parameter.grad = None
    (program,) = piper.explain(step).programs
    return statistics.median(times), sum(i.op is not Op.FREE for i in program.instrs)


def run() -> Iterator[Row]:
    """The step's time over its instructions."""
    took, instructions = step_seconds()
    each_us = took / instructions * 1e6
    yield Row(
        section="host",
        what=f"{STAGES} stages x {MICROBATCHES} microbatches, one rank",
        figures=f"{took * 1e3:.2f} ms for {instructions} instructions: {each_us:.1f} us each",
        bar=f"<= {BAR_US:.0f} us",
        held=each_us <= BAR_US,
        data={"ours": took / instructions, "unit": "s", "step_s": took, "count": instructions}
        | {"measured": f"median of {REPEATS} steps"},
    )
