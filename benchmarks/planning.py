"""Planning time by the number of tasks: from a captured model to proved programs of all ranks."""

import functools
import gc
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import piper_dynamo as piper
from benchmarks.emulated import WIDTH, Chain
from benchmarks.report import Row, growth_row
from piper_dynamo import captured
from piper_dynamo.ir.program import Op

STAGES = 8
MICROBATCHES = (64, 128, 256, 512, 1024)  # x 8 stages x F, B
BAR_TASKS, BAR_S = 4000, 3.0
BAR_EXPONENT = 1.2
REPEATS = 5
MEASURED = f"median of {REPEATS}"


def plan_seconds(microbatches: int) -> tuple[int, float, float]:
    """The number of tasks, and the median time of `make_plan` alone: the capture is made before.

    Both by the clock and of the processor, which tells whether the machine was busy.
    """
    spent, spent_cpu = [], []
    make = captured.make_plan

    def timed(*args: Any, **kwargs: Any) -> piper.Plan:
        gc.collect()
        start, start_cpu = time.perf_counter(), time.process_time()
        plan = make(*args, **kwargs)
        spent.append(time.perf_counter() - start)
        spent_cpu.append(time.process_time() - start_cpu)
        return plan

    x = torch.zeros(microbatches, WIDTH)
    strategy = piper.strategies.pipeline("one_f_one_b", ranks=STAGES, num_microbatches=microbatches)
    with mock.patch.object(captured, "make_plan", timed):
        for _ in range(REPEATS):
            plan = piper.plan(Chain(STAGES), strategy, (x, x.clone()), world_size=STAGES)
    tasks = sum(i.op is Op.RUN for p in plan.programs for i in p.instrs)
    return tasks, statistics.median(spent), statistics.median(spent_cpu)


def plan_bytes(microbatches: int) -> tuple[int, int]:
    """The number of instructions of a plan, and the bytes of Python's that it keeps."""
    x = torch.zeros(microbatches, WIDTH)
    make = functools.partial(
        piper.plan,
        Chain(STAGES),
        piper.strategies.pipeline("one_f_one_b", ranks=STAGES, num_microbatches=microbatches),
        (x, x.clone()),
        world_size=STAGES,
    )
    make()  # what is imported and captured once
    torch._dynamo.reset()
    gc.collect()
    tracemalloc.start()
    try:
        plan = make()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return sum(len(p.instrs) for p in plan.programs), kept


def weight() -> Iterator[Row]:
    """What a plan weighs: growing ones, and what each instruction adds."""
    found = [plan_bytes(microbatches) for microbatches in MICROBATCHES[:3]]
    for instructions, kept in found:
        yield Row(
            section="weight",
            what=f"{instructions} instructions",
            figures=f"{kept / 2**20:.1f} MiB, {kept / instructions:.0f} bytes each",
            data={"ours": kept, "unit": "bytes", "instructions": instructions, "measured": "once"},
        )


def run() -> Iterator[Row]:
    """Growing plans, and the exponent between the smallest and the largest."""
    found = []
    for microbatches in MICROBATCHES:
        tasks, took, took_cpu = plan_seconds(microbatches)
        found.append((tasks, took))
        judged = BAR_TASKS <= tasks < 2 * BAR_TASKS
        yield Row(
            section="planning",
            what=f"{tasks} tasks",
            figures=f"{took:.2f} s (processor {took_cpu:.2f} s)",
            bar=f"< {BAR_S:.0f} s" if judged else "",
            held=took < BAR_S if judged else None,
            data={"ours": took, "unit": "s", "tasks": tasks, "processor_s": took_cpu}
            | {"measured": MEASURED},
        )
    yield growth_row("planning", "tasks", found, BAR_EXPONENT, MEASURED)
