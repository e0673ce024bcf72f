"""Bytes sent are the least that the strategy has to send, to the byte: planned, and really sent."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.counts import PAIR, plan_of
from benchmarks.sent import JOBS, ROWS, bound, planned
from piper_dynamo.schedules import SCHEDULES
from tests.pool import Pool
from tests.sending import check_steps

QUICK = (*SCHEDULES, "2 replicas, zero 3")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Four processes for all tests of this file."""
    made = Pool(4)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are proved; that they also run is not what is counted."""
    monkeypatch.setenv("PIPER_VERIFY", "1")


@pytest.mark.parametrize(
    "job", [pytest.param(j, marks=[pytest.mark.slow] * (j not in QUICK)) for j in JOBS]
)
def test_plans_send_the_least(job: str) -> None:
    config = JOBS[job]
    least = bound(config)
    assert planned(plan_of(config)) == {kind: n for kind, n in least.items() if kind != ROWS}


def test_a_stage_that_is_one_bucket_gathers_its_embedding_for_the_backward_too() -> None:
    """That keeps less and gathers more; with a bucket per layer it is not read."""
    config = replace(PAIR, zero=3)
    least, plan = bound(config), planned(plan_of(config))
    embedding = 256 * config.dim * 4
    assert plan.pop("gathers") - least.pop("gathers") == config.microbatches * embedding
    assert plan == least


@pytest.mark.slow  # one of them is among the quick tests: tests/test_gloo_replicas.py
@pytest.mark.dist(4)
@pytest.mark.parametrize("job", [job for job, config in JOBS.items() if config.world == 4])
def test_steps_send_the_least(pool: Pool, job: str) -> None:
    check_steps(pool, job)
