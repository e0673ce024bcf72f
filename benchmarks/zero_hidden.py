"""How much of gathers and reductions is hidden under compute, over links of a stated rate.

Two replicas on emulated devices: chunks wait, what is gathered and reduced really travels. *Hidden*
is what of the transfers' time, at the links' rate, a rank does not spend waiting for them. Needs
what `links.py` needs.
"""

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import piper_dynamo as piper
from benchmarks.links import Links, exposed_s, missing
from benchmarks.paired import PAIRS
from benchmarks.report import NOT_RUN, Row
from benchmarks.zero_sides import Job
from piper_dynamo.train.model import build

MBIT = 1000.0
PASS_S = 0.2  # forward, input gradient and weight gradient of a microbatch, each
BAR = 0.80
STREAMS = ("reduce", "gather")  # and so are the kinds of their collectives called


def _measure(job: Job, zero: int, steps: int) -> tuple[list[float], float]:
    """The hidden share of each step, over both ranks, and of the simulated one."""
    costs = piper.Costs(F=PASS_S, BI=PASS_S, BW=PASS_S, bandwidth=MBIT * 1e6 / 8)
    batch = job.batch(piper.rank())
    step = piper.compile(
        build(job.config), job.strategy(zero), batch, compile="emulate", costs=costs
    )
    simulated = piper.explain(step).simulate(costs)
    found = [simulated.communication(piper.rank(), stream) for stream in STREAMS]
    total_s = sum(one.total for one in found)
    shares = []
    for number in range(steps + 2):
        with piper.record(step) as timeline:
            step(*batch).backward()
        for parameter in piper.parameters(step):
            parameter.grad = None
        exposed = exposed_s(timeline, STREAMS)
        if number >= 2:
            shares.append(1 - exposed / total_s)
    return shares, 1 - sum(one.exposed for one in found) / total_s


def hidden(job: Job, pairs: int, zeros: Sequence[int]) -> Iterator[Row]:
    """Every level, two replicas without a pipeline."""
    if missing():
        yield Row(section="hidden", what=NOT_RUN, figures=f"needs {missing()}")
        return
    config = replace(job.config, dim=256, heads=4, kv_heads=2, pp=1)
    alone = Job(config=config, replicas=job.replicas, bucket_mb=4)
    for zero in zeros:
        with Links(alone.ranks, MBIT) as links:
            shares, simulated = links.run(functools.partial(_measure, alone, zero, pairs))[0]
        share = statistics.median(shares)
        yield Row(
            section="hidden",
            what=f"ZeRO-{zero}, DP 2, {MBIT:.0f} Mbit/s",
            figures=f"{share:.0%} of gathers and reductions (simulated {simulated:.0%})",
            bar=f">= {BAR:.0%}",
            held=share >= BAR,
            data={"shares": shares, "ours": share, "other": simulated, "unit": "share hidden"}
            | {"runs": pairs, "needed": PAIRS, "measured": f"median of {pairs} steps"},
        )
