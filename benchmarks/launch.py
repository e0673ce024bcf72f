"""What starting a job takes by engine, whether steps differ, and planning a rank of few or many.

make bench-launch
make bench-launch ARGS="--only flat"
"""

import functools
import logging
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

import piper_dynamo as piper
from benchmarks import command
from benchmarks.paired import Comparison, compare
from benchmarks.report import Row, ratio_row
from benchmarks.sides import PiperStep, batch_of
from piper_dynamo.runtime.launch_ray import cluster
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

RANKS = 2
JOB = Config(dim=64, layers=2, heads=4, kv_heads=2, seq=64, batch=16, microbatches=4)
STEPS, WARM = 60, 10
STARTS, PAIRS = 3, 8
BAR_STEP = 1.02
# One pipeline of four stages, and sixteen of them; a replica's batch is the same.
FEW, MANY = 1, 16
BAR_FLAT = 1.5


def idle() -> float:
    """Be a rank, and end; when that was."""
    return time.time()


def start() -> Iterator[Row]:
    """From the call to the first rank's function, and to the end, of a job that does nothing."""
    for engine in ("local", "torchrun", "ray"):
        reached, ended = [], []
        for _ in range(STARTS):
            begin = time.time()
            found = piper.launch(idle, RANKS, engine=engine)
            ended.append(time.time() - begin)
            reached.append(max(found) - begin)
        first, all_ = statistics.median(reached), statistics.median(ended)
        yield Row(
            section="start",
            what=f"{engine}, {RANKS} ranks",
            figures=f"{first:.1f} s until all ranks run, {all_:.1f} s with the end",
            data={"ours": first, "unit": "s", "reached_s": reached, "ended_s": ended}
            | {"measured": f"median of {STARTS}"},
        )


def step_seconds() -> float:
    """The median step of a pipeline on two ranks."""
    step, batch = PiperStep(JOB), batch_of(JOB)
    spent = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step(*batch)
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent[WARM:])


def measured(engine: str) -> float:
    """The median step of a fresh job; the slower rank's."""
    return max(piper.launch(step_seconds, RANKS, engine=engine))


def step(pairs: int) -> Iterator[Row]:
    """Steps of the same job started by each engine in turn."""
    with cluster(None, RANKS):  # one for all of Ray's jobs
        for engine in ("ray", "local"):
            found: Comparison = compare(
                functools.partial(measured, engine),
                functools.partial(measured, "torchrun"),
                pairs=pairs,
                show=engine,
            )
            yield ratio_row("step", engine, found, BAR_STEP, "torchrun", needed=PAIRS)


def planned(replicas: int) -> tuple[float, float, int]:
    """Seconds by the clock and of the processor for one rank's program, and its instructions."""
    job = Config(layers=8, pp=4, dp=replicas, microbatches=8, batch=8 * replicas, dim=64, seq=32)
    with torch.device("meta"):
        model = build(job)
    tokens = torch.zeros(job.batch // job.dp, job.seq, dtype=torch.int64)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    plan = piper.plan(model, job.strategy(), (tokens, tokens.clone()), job.world)
    plan.fingerprint()
    count = len(plan.program(job.world - 1).instrs)
    return time.perf_counter() - begin, time.process_time() - begin_cpu, count


def flat() -> Iterator[Row]:
    """What planning costs one rank of 4 and one of 64, each in a fresh process."""
    context = get_context("spawn")
    found: dict[int, list[tuple[float, float, int]]] = {FEW: [], MANY: []}
    for _ in range(STARTS):
        for replicas, times in found.items():
            with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
                times.append(pool.submit(planned, replicas).result())
    few, many = (
        [statistics.median(column) for column in zip(*times, strict=True)]
        for times in found.values()
    )
    ratio = many[0] / few[0]
    yield Row(
        section="flat",
        what=f"one rank's plan, of {4 * FEW} and of {4 * MANY} ranks",
        figures=f"{few[0]:.1f} s and {many[0]:.1f} s (processor {few[1]:.1f} s and {many[1]:.1f} "
        f"s), ratio {ratio:.2f}; {few[2]:.0f} and {many[2]:.0f} instructions",
        bar=f"<= {BAR_FLAT} x",
        held=ratio <= BAR_FLAT,
        data={"ours": many[0], "theirs": few[0], "unit": "s", "limit": BAR_FLAT}
        | {"few": found[FEW], "many": found[MANY], "measured": f"median of {STARTS}"},
    )


SECTIONS: dict[str, command.Section] = {
    "start": start,
    "step": command.Fewer(PAIRS, step),
    "flat": flat,
}


if __name__ == "__main__":
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    command.of_sections(SECTIONS)()
