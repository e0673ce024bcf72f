"""One rank of 4,096: 16 pipeline stages, 256 replicas, 128 microbatches, ZeRO-3."""

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

import piper_dynamo as piper
from benchmarks.report import Row
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

JOB = Config(layers=16, pp=16, dp=256, microbatches=128, batch=128 * 256, zero=3, dim=64, seq=32)
RANK = 1234
BAR_S, BAR_BYTES = 60.0, 4 * 2**30


def planned() -> tuple[float, float, int, int]:
    """Seconds by the clock and of the processor, peak memory, and the rank's instructions."""
    with torch.device("meta"):
        model = build(JOB)
    tokens = torch.zeros(JOB.batch // JOB.dp, JOB.seq, dtype=torch.int64)
    start, start_cpu = time.perf_counter(), time.process_time()
    plan = piper.plan(model, JOB.strategy(), (tokens, tokens.clone()), JOB.world)
    count = len(plan.program(RANK).instrs)
    took, took_cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return took, took_cpu, peak, count


def run() -> Iterator[Row]:
    """From the model to one rank's program: captured, planned and proved, in a fresh process."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        took, took_cpu, peak, count = pool.submit(planned).result()
    yield Row(
        section="ranks",
        what=f"rank {RANK} of {JOB.world}, {count} instructions",
        figures=f"{took:.1f} s (processor {took_cpu:.1f} s), peak {peak / 2**30:.2f} GiB",
        bar=f"< {BAR_S:.0f} s, < {BAR_BYTES / 2**30:.0f} GiB",
        held=took < BAR_S and peak < BAR_BYTES,
        data={"ours": took, "unit": "s", "processor_s": took_cpu, "peak_bytes": peak}
        | {"instrs": count, "measured": "once"},
    )
