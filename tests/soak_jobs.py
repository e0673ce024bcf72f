"""What the ranks of `tests/soak.py` run: a small training that saves, and marks how far it is.

A job's folder has `at-<rank>`, the step that a rank began last; `committed`, a line for every
checkpoint that is whole; and `saved`, the checkpoint.
"""

import functools
import gc
import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


import piper_dynamo as piper
from piper_dynamo.runtime.faults import VARIABLE
from tests import replicas
from tests.replicas import LINE
from tests.resuming import MIXED, Run, layout, optimizer

RANKS = 4
START_METHOD = "forkserver"  # ranks start with torch imported
PRELOADED = ["torch", "piper_dynamo", "tests.soak_jobs", "benchmarks.netbed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Two stages of two replicas each.

    Attributes:
        folder: Where it marks and saves.
        steps: Up to which it trains.
        zero: How replicas share.
        every: A checkpoint after every so many steps; 0: none.
        timeout_s: Of every wait.
        fills: The step in which the disk gets full; -1: in none.
        fault: What fails on purpose, as `PIPER_FAULT` says it.
    """

    folder: str
    steps: int
    zero: int = 0
    every: int = 2
    timeout_s: float = 6.0
    fills: int = -1
    fault: str = ""

    @property
    def saved(self) -> Path:
        return Path(self.folder) / "saved"


def train(job: Job) -> tuple[int, list[tuple[float, float]]]:
    """From the last checkpoint to the end: the first step, and (loss, norm) of each."""
    quiet()
    if job.fault:  # processes have the environment of the server that forks them
        os.environ[VARIABLE] = job.fault
    folder, where = Path(job.folder), layout(LINE, job.zero)
    step = replicas.compiled(
        MIXED, LINE, where.strategy, timeout_s=job.timeout_s, nan_check="raise"
    )
    found, schedule = optimizer(list(piper.named_parameters(step)))
    run = Run(case=MIXED, layout=where, step=step, optimizer=found, schedule=schedule)
    first = run.load(job.saved)["steps"] if (job.saved / ".metadata").exists() else 0
    trace = []
    for number in range(first, job.steps):
        (folder / f"at-{piper.rank()}").write_text(str(number))
        if number == job.fills and piper.rank() == 0:
            fill(job.saved / "ballast")
        trace += run.train(number, 1)
        if job.every and (number + 1) % job.every == 0:
            run.save(job.saved, number + 1)
            if piper.rank() == 0:
                with (folder / "committed").open("a") as file:
                    file.write(f"{number + 1}\n")
    return first, trace


def quiet() -> None:
    """Ranks are given no values of what they do not use, on purpose."""
    warnings.filterwarnings("ignore", "ranks of one replica were given different inputs")


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass  # that is what was wanted; then the rest of the last block


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a process has in use."""

    step: int
    rss_kb: int
    files: int
    threads: int
    objects: int

    @classmethod
    def now(cls, step: int) -> "Use":
        gc.collect()
        status = Path("/proc/self/status").read_text()
        rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(
            step=step,
            rss_kb=int(rss.split()[1]),
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            objects=len(gc.get_objects()),
        )


def used(steps: int, looks: int = 4) -> list[dict[str, int]]:
    """What a rank has in use now and then in a long run, from a quarter of it on."""
    quiet()
    where = layout(LINE, 2)
    step = replicas.compiled(MIXED, LINE, where.strategy, timeout_s=60.0)
    found, schedule = optimizer(list(piper.named_parameters(step)))
    run = Run(case=MIXED, layout=where, step=step, optimizer=found, schedule=schedule)
    wanted = {steps * (k + 1) // looks for k in range(looks)}
    seen = []
    for number in range(steps):
        run.train(number % 50, 1)
        if number + 1 in wanted:
            seen.append(asdict(Use.now(number + 1)))
    return seen


def step_time(steps: int) -> tuple[float, float]:
    """When this rank's first step was done, in seconds since the epoch, and a step's median."""
    quiet()
    where = layout(LINE, 0)
    step = replicas.compiled(MIXED, LINE, where.strategy, timeout_s=60.0)
    batch = replicas.mine(MIXED.batch(0), LINE)
    step(*batch).backward()
    ready, seconds = time.time(), []
    for _ in range(steps):
        begin = time.perf_counter()
        step(*batch).backward()
        seconds.append(time.perf_counter() - begin)
    return ready, statistics.median(seconds)


def main() -> None:
    """`python -m tests.soak_jobs train JOB`, or `time STEPS ENGINE`: one launch."""
    what, argument, *engine = sys.argv[1:]
    if what == "train":
        from piper_dynamo.runtime import launch_local

        launch_local.START_METHOD = START_METHOD
        job = Job(**json.loads(argument))
        piper.launch(functools.partial(train, job), RANKS, timeout_s=job.timeout_s)
    else:
        measure = functools.partial(step_time, int(argument))
        found = piper.launch(measure, RANKS, engine=engine[0], timeout_s=60.0)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found[0]))


if __name__ == "__main__":
    main()
