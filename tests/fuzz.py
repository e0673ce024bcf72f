"""Random jobs and wrong programs, many of them: `make fuzz`, or `python -m tests.fuzz --help`.

Each job is planned, proved and simulated; some are trained on the ranks of this process and
compared with one process; of each plan's programs some random changes must be refused. The first
failure is made as small as it can be and written as a script that runs alone.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import click

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tqdm import tqdm

from piper_dynamo.costs import Costs
from piper_dynamo.ir.program import Op
from piper_dynamo.lowering.memory import bytes_over_time
from piper_dynamo.planning import Plan
from tests import on_streams, trial
from tests.drawing import drawn_jobs
from tests.drawn import Job
from tests.mutants import judge, mutants, run

MOST_RANKS = 6  # of a job that is trained: each is a thread that captures and compiles


@dataclass(slots=True)
class Tally:
    """What has been tried, and what a failing script is made of."""

    plans: int = 0
    trained: int = 0
    on_streams: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    equal: Counter[str] = field(default_factory=Counter)
    last: str = ""

    def __str__(self) -> str:
        refused, equal = sum(self.refused.values()), sum(self.equal.values())
        return (
            f"{self.plans} plans, {self.on_streams} run on streams, {self.trained} trained; "
            f"{refused + equal} mutants: {refused} refused, {equal} that mean the same"
        )

    def table(self) -> str:
        """How many mutants of each kind were refused, and how many meant the same."""
        kinds = sorted({*self.refused, *self.equal})
        width = max(map(len, kinds), default=0)
        lines = [
            f"  {kind:<{width}}  {self.refused[kind]:>6} refused  {self.equal[kind]:>5} the same"
            for kind in kinds
        ]
        return "\n".join(lines)


def check_plan(job: Job, tally: Tally) -> Plan:
    """A legal job is planned, proved (in the plan), and simulated; memory ends where it began."""
    tally.last = job.script("plan.verify()\nprint(plan.simulate())")
    plan = job.plan()
    ran = [e.name for e in plan.simulate(Costs()).timeline.events if e.stream == "compute"]
    want = [i.task for p in plan.programs for i in p.instrs if i.op is Op.RUN]
    assert sorted(ran) == sorted(want), "the simulation leaves tasks out"
    for program in plan.programs:
        history = bytes_over_time(program, plan.chunks)
        assert min(history, default=0) >= 0, f"rank {program.rank} frees what it does not have"
        assert max(history, default=0) == program.peak_bytes
    tally.plans += 1
    return plan


def check_mutants(job: Job, plan: Plan, count: int, draw: Random, tally: Tally) -> None:
    """Wrong programs are refused."""
    for mutant in mutants(plan, count, draw):
        tally.last = job.script(mutant.script(plan))
        refused = judge(plan, mutant)
        (tally.refused if refused else tally.equal)[mutant.kind] += 1


def check_streams(job: Job, plan: Plan, draw: Random, tally: Tally) -> None:
    """As CUDA would run it, the plan is proved, and gives the same numbers whatever the timing."""
    seed = draw.randrange(10**6)
    tally.last = job.script(
        "from tests import mutants, on_streams\n"
        "programs = on_streams.proved(plan)\n"
        f"have = on_streams.run(plan, programs, {seed})\n"
        "assert on_streams.are_equal(have, mutants.run(plan, plan.programs))"
    )
    programs = on_streams.proved(plan)
    want = run(plan, plan.programs)
    assert on_streams.are_equal(on_streams.run(plan, programs, seed), want), "other numbers"
    tally.on_streams += 1


def check_training(job: Job, tally: Tally) -> None:
    """The job's ranks learn what one process does."""
    can = job.sync and job.is_comparable and job.compile == "aten"
    if not can or job.world > MOST_RANKS:
        return
    tally.last = job.training_script()
    trial.check(job.trial())
    tally.trained += 1


def fuzz(
    plans: int,
    mutations: int,
    train_every: int,
    start: int,
    tally: Tally,
    progress: Callable[[], object] = lambda: None,
    failed: Callable[[Exception], object] = lambda error: None,
) -> None:
    """Try so many jobs; `progress` is called after each, `failed` on each failure found.

    Raises:
        Exception: That of the smallest failing job found; `tally.last` is its script.
    """

    @seed(start)
    @settings(
        max_examples=plans,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(drawn_jobs(), st.integers(0, 10**6))
    def one(job: Job, number: int) -> None:
        try:
            plan = check_plan(job, tally)
            check_mutants(job, plan, mutations, Random(number), tally)
            check_streams(job, plan, Random(number), tally)
            if train_every and number % train_every == 0:
                check_training(job, tally)
        except Exception as error:
            failed(error)
            raise
        progress()

    one()


@click.command()
@click.option("--plans", type=click.IntRange(min=1), default=300, show_default=True)
@click.option("--mutations", type=click.IntRange(min=0), default=30, help="Per plan.")
@click.option("--train-every", type=click.IntRange(min=0), default=8, help="0: never.")
@click.option("--seed", "start", type=int, default=0, show_default=True)
@click.option("--out", type=Path, default=Path("fuzz-failure.py"), help="Where a script goes.")
def main(plans: int, mutations: int, train_every: int, start: int, out: Path) -> None:
    """Try random jobs and wrong programs; exit 1 at the first failure, made small."""
    torch.set_num_threads(1)
    os.environ.setdefault("PIPER_VERIFY", "1")
    tally, began = Tally(), time.perf_counter()
    failure: Exception | None = None
    with tqdm(total=plans, unit="plan", mininterval=1.0) as bar:

        def failed(error: Exception) -> None:
            """Written at once: whoever stops the search for a smaller one has this one."""
            out.write_text(tally.last, encoding="utf-8")
            bar.set_description(f"{type(error).__name__}; making it small")

        try:
            fuzz(plans, mutations, train_every, start, tally, bar.update, failed)
        except Exception as error:  # whatever it is, it is what was looked for
            failure = error
    click.echo(f"seed {start}: {tally}; {time.perf_counter() - began:.0f} s")
    click.echo(tally.table())
    if failure is not None:
        click.echo(f"\n{type(failure).__name__}: {failure}\n\nscript: {out}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
