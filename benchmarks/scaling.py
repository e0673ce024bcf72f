"""More ranks for one model: 2 to 8 pipeline ranks, 1 to 4 replicas, on emulated devices.

The model is the same whatever the ranks, so a stage takes its part of a microbatch's time; every
replica has two microbatches per pipeline rank (Piper's paper: arXiv 2606.11169). Processes are real
and send real messages; torch's stages wait for the same times, with DDP over replicas.
"""

import functools
import statistics
from collections.abc import Iterator

import piper_dynamo as piper
from benchmarks.emulated import Setup, measure
from benchmarks.report import Row
from piper_dynamo.strategies import placement

PASS_S = 0.32  # forward, input gradient, weight gradient of a microbatch on one device, each
LAYOUTS = ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4))  # pipeline ranks, replicas
SCHEDULES = ("one_f_one_b", "interleaved_1f1b")


def run(pairs: int) -> Iterator[Row]:
    """Every layout under 1F1B and interleaved 1F1B."""
    for schedule in SCHEDULES:
        for ranks, replicas in LAYOUTS:
            stages = len(placement(schedule, ranks))
            setup = Setup(
                ranks=ranks,
                microbatches=2 * ranks,
                unit_s=PASS_S / stages,
                replicas=replicas,
            )
            found, simulated = piper.launch(
                functools.partial(measure, schedule, setup, pairs), setup.world
            )[0]
            passed = setup.microbatches * replicas
            alone = 3 * PASS_S * passed / setup.world  # without bubbles
            share = alone / statistics.median(found.first)
            yield Row(
                section="emulated",
                what=f"{schedule}, PP {ranks} x DP {replicas}",
                figures=f"{found.text()}   {share:.0%} of linear, "
                f"{alone / simulated:.0%} with the bubble alone",
                bar="<= 1.00 x torch's runtime",
                held=found.holds(1.0),
                data=found.figures(limit=1.0) | {"linear": share, "bubble": alone / simulated},
            )
