"""Random jobs and wrong programs: a few of what `make fuzz` tries."""

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

import piper_dynamo as piper
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.ir.alike import replicas_of
from piper_dynamo.ir.verify import verify
from piper_dynamo.schedules import SCHEDULES
from tests import fuzz, jobs, mutants, trial
from tests.drawn import Job, Layer
from tests.models import Stack4, rows

LINEAR = Layer(stage=0), Layer(stage=1)
JOB = Job(layers=LINEAR, on=(0, 1), microbatches=2, zero=(0, 0), schedule="one_f_one_b")


# Torch says so where a custom autograd.Function is traced.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch):
    """The models are those of other tests, of which they compute every pass's values."""
    monkeypatch.setenv("PIPER_VERIFY", "1")


def test_random_jobs_and_mutants():
    tally = fuzz.Tally()
    fuzz.fuzz(6, 14, 0, 0, tally)
    assert tally.plans == tally.on_streams >= 6
    assert sum(tally.refused.values()) >= 40


def test_a_random_job_learns_what_one_process_does():
    job = Job(
        layers=(
            Layer(stage=0),
            Layer(stage=0, kind="uneven"),
            Layer(stage=1, kind="tied", of=0, skip=0),
            Layer(stage=1, kind="count"),
        ),
        on=(0, 1),
        microbatches=2,
        replicas=2,
        zero=(3, 3),
        options=(("bucket_mb", 0.0001), ("prefetch", 2)),
        combine="sum",
        outputs=(1,),
        split=frozenset({1}),
        chosen=(5, 70),
        merged=30,
    )
    fuzz.check_training(job, fuzz.Tally())


def test_every_kind_of_mutant_is_refused():
    """Of one plan with replicas, messages and experts."""
    layers = (Layer(stage=0), Layer(stage=0, kind="experts"), Layer(stage=1))
    job = Job(layers=layers, on=(0, 1), microbatches=2, replicas=2, zero=(3, 3), experts="all")
    plan = job.plan()
    done = {m.kind for m in mutants.mutants(plan, 40, Random(0)) if mutants.judge(plan, m)}
    missing = set(mutants.KINDS) - done
    # Nothing here is random or moves little; what is summed is reduced first.
    few = {"another random seed", "moved", "a chunk that no longer adds"}
    few.add("a reduction over two groups")  # these have unlike parameters
    assert missing <= {*few, "two sends' values exchanged"}, missing


def test_a_reduction_over_two_groups_is_told_by_whose_parts_it_adds():
    job = replace(JOB, replicas=2)
    plan = job.plan()
    make, reasons = mutants.KINDS["a reduction over two groups"]
    at, edits = next(found for n in range(20) if (found := make(plan, Random(n))))
    mutant = mutants.Mutant(kind="", at=at, edits=tuple(edits), reasons=reasons)
    assert len(edits) == 4
    with pytest.raises(PiperPlanError, match=r"ranks .*, which it is not to be reduced over"):
        verify(mutant.of(plan), plan.meaning, replicas_of(plan.groups))
    assert mutants.judge(plan, mutant)


def test_a_failing_job_is_a_script_that_runs_alone():
    plan = JOB.plan()
    mutant = next(iter(mutants.mutants(plan, 30, Random(1))))
    namespace: dict[str, Any] = {"__name__": "script"}
    with pytest.raises(PiperPlanError):
        exec(compile(JOB.script(mutant.script(plan)), "script.py", "exec"), namespace)
    assert _instrs(namespace["plan"]) == _instrs(plan)


def _instrs(plan: piper.Plan) -> list[str]:
    """All of a plan, without the lines of its model, whose file is another's."""
    return [str(replace(i, where="")) for p in plan.programs for i in p.instrs]


def test_control_a_gap_in_the_proof_is_found(monkeypatch: pytest.MonkeyPatch):
    """Without the proof of values, a slice of another microbatch is accepted, and noticed."""
    monkeypatch.setattr("piper_dynamo.ir.verify.check_values", lambda *_: [])
    plan = JOB.plan()
    kind = {"another microbatch": mutants.KINDS["another microbatch"]}
    monkeypatch.setattr(mutants, "KINDS", kind)
    (mutant,) = mutants.mutants(plan, 1, Random(0))
    with pytest.raises(AssertionError, match="is accepted, but its results are others"):
        mutants.judge(plan, mutant)


def test_control_wrong_training_is_noticed():
    once = JOB.trial()
    (want,) = trial.alone(once)
    want.values["w0"] += 1e-8
    with pytest.raises(AssertionError, match="parameter w0"):
        trial.compare(trial.train(once), [want], 1e-9, "one process")


def takes(schedule: str, p: int, m: int) -> bool:
    """Which numbers of ranks and microbatches a schedule takes, as its docstring says."""
    match schedule:
        case "interleaved_1f1b":
            return m % max(1, m // p) == 0
        case "dualpipev":
            return m >= 2 * p
        case "dualpipe":
            return p % 2 == 0 and m % 2 == 0 and m >= 2 * p
        case _:
            return True


def raises_no_alarm(schedule: str, ranks: int, microbatches: int) -> None:
    """A size that the schedule takes is planned, proved and simulated, and no other."""

    def made() -> piper.Strategy:
        return piper.strategies.pipeline(schedule, ranks=ranks, num_microbatches=microbatches)

    if not takes(schedule, ranks, microbatches):
        with pytest.raises(piper.PiperStrategyError, match=r"num_microbatches|ranks|placement"):
            made()
        return
    strategy = made()
    stages = 1 + max(p.filter.tags["PP"] for p in strategy.of(piper.Place))
    plan = piper.plan(Deep(stages), strategy, rows(microbatches), ranks)
    plan.verify()
    assert plan.simulate().makespan > 0


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_no_false_alarm_on_small_sizes(schedule: str):
    for ranks, microbatches in ((1, 1), (2, 3), (2, 4), (3, 6)):
        raises_no_alarm(schedule, ranks, microbatches)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_no_false_alarm_on_any_schedule(schedule: str):
    """From one rank and one microbatch to 16 by 64."""
    for ranks, microbatches in product((1, 2, 3, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64)):
        raises_no_alarm(schedule, ranks, microbatches)


class Deep(torch.nn.Module):
    """A layer per stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        one = Stack4(1)
        self.w = torch.nn.ParameterList(one.w[k % 4].detach().clone() for k in range(stages))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x
        for stage, weight in enumerate(self.w):
            with piper.annotate("PP", stage):
                h = torch.tanh(h @ weight.T)
                if stage == len(self.w) - 1:
                    loss = (h - y).square().mean()
        return loss


def test_places_are_those_of_the_schedules():
    """The jobs' strategies are the ones that users write."""
    strategy = JOB.strategy()
    assert strategy.of(piper.Place) == tuple(jobs.places({0: [0], 1: [1]}, "one_f_one_b", 2))
