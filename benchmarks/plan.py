"""How long planning takes: the proof and simulation by instructions, planning by tasks and ranks.

make bench-plan
make bench-plan ARGS="--only proof --json results.json"
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch

import piper_dynamo as piper
from benchmarks import command, many_ranks, planning
from benchmarks.emulated import WIDTH, Chain
from benchmarks.report import Row, growth_row

STAGES, REPLICAS = 8, 4
MICROBATCHES = (16, 32, 64, 128, 256)  # x 8 stages x 4 replicas, ZeRO 3
BAR_INSTRUCTIONS, BAR_S = 100_000, 10.0
BAR_EXPONENT = 1.2
REPEATS = 5
MEASURED = f"median of {REPEATS}"


def plan_of(microbatches: int) -> piper.Plan:
    """A plan with messages, gathers and reductions."""
    x = torch.zeros(microbatches, WIDTH)
    strategy = piper.strategies.pipeline(
        "one_f_one_b",
        ranks=STAGES,
        num_microbatches=microbatches,
        replicas=REPLICAS,
        zero=3,
    )
    return piper.plan(Chain(STAGES), strategy, (x, x.clone()), world_size=STAGES * REPLICAS)


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """The median time of a call, by the clock and of the processor."""
    spent, spent_cpu = [], []
    for _ in range(REPEATS):
        gc.collect()
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        spent.append(time.perf_counter() - start)
        spent_cpu.append(time.process_time() - start_cpu)
    return statistics.median(spent), statistics.median(spent_cpu)


def proof() -> Iterator[Row]:
    """Growing plans, and the exponent between the smallest and the largest."""
    found = []
    for microbatches in MICROBATCHES:
        plan = plan_of(microbatches)
        count = sum(len(program.instrs) for program in plan.programs)
        proved, proved_cpu = seconds(plan.verify)
        simulated, simulated_cpu = seconds(plan.simulate)
        took = proved + simulated
        found.append((count, took))
        judged = BAR_INSTRUCTIONS <= count < 2 * BAR_INSTRUCTIONS
        yield Row(
            section="proof",
            what=f"{count} instructions",
            figures=f"proved in {proved:.2f} s, simulated in {simulated:.2f} s "
            f"(processor {proved_cpu + simulated_cpu:.2f} s)",
            bar=f"< {BAR_S:.0f} s" if judged else "",
            held=took < BAR_S if judged else None,
            data={
                **{"ours": took, "unit": "s", "measured": MEASURED},
                "instructions": count,
                "proved_s": proved,
                "simulated_s": simulated,
                "processor_s": proved_cpu + simulated_cpu,
            },
        )
    yield growth_row("proof", "instructions", found, BAR_EXPONENT, MEASURED)


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "proof": proof,
    "planning": planning.run,
    "ranks": many_ranks.run,
}


if __name__ == "__main__":
    command.of_sections(SECTIONS)()
