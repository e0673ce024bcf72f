"""What steps do, as committed: a change of these counts is a regression unless it is meant.

Exact on every machine, since they are read from plans. `make bench-counts` shows all that differs,
and writes benchmarks/counts.json again. Time and memory: `make bench`.
"""

import functools
from dataclasses import asdict, fields
from pathlib import Path

import pytest

import piper_dynamo as piper
from benchmarks import counts
from benchmarks.counts import GATE, Counts, committed, counts_of, difference, plan_of
from benchmarks.sides import batch_of
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.train.model import build

WANT = committed()


def test_every_job_and_count_is_committed() -> None:
    assert list(WANT) == list(GATE)
    names = [field.name for field in fields(Counts)]
    assert all(list(found) == names for found in WANT.values())
    assert SCHEDULES.keys() <= WANT.keys()


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are proved; that they also run is not what is counted."""
    monkeypatch.setenv("PIPER_VERIFY", "1")


@functools.cache
def measured(job: str) -> dict[str, int]:
    """The counts of now."""
    return asdict(counts_of(GATE[job]))


# Every schedule, and one of each other kind; all are compared by make bench-counts, too.
QUICK = (
    *SCHEDULES,
    "tied head",
    "recompute full",
    "2 replicas, zero 3, buckets",
    "experts",
)


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=[pytest.mark.slow] * (job not in QUICK)) for job in GATE]
)
def test_counts(job: str) -> None:
    found = difference({job: WANT[job]}, {job: measured(job)})
    assert not found, "\n" + found


def test_schedules_change_neither_the_work_nor_its_messages() -> None:
    """What is computed does not depend on the order; what is sent only on the placement."""
    found = {schedule: measured(schedule) for schedule in SCHEDULES}
    assert len({one["matmuls"] for one in found.values()}) == 1
    for alike in (("gpipe", "one_f_one_b", "zb_h1"), ("zbv", "dualpipev")):
        assert len({(found[s]["messages"], found[s]["bytes"]) for s in alike}) == 1


def test_jobs_that_share_a_model_have_the_plans_that_they_have_alone() -> None:
    config = GATE["zbv"]
    alone = piper.plan(build(config), config.strategy(), batch_of(config), config.world)
    assert [p.instrs for p in alone.programs] == [p.instrs for p in plan_of(config).programs]
    assert alone.fingerprint() == plan_of(config).fingerprint()


def test_a_difference_is_a_table() -> None:
    want = {"a": {"messages": 4, "bytes": 0}, "b": {"messages": 2}}
    now = {"a": {"messages": 5, "bytes": 8}, "c": {"messages": 1}}
    shown = difference(want, now).splitlines()
    assert shown[:-1] == [
        "job  count     committed  now       change",
        "a    messages          4    5  +1 (+25.0%)",
        "a    bytes             0    8           +8",
        "b    messages          2    -         gone",
        "c    messages          -    1     only now",
    ]
    assert "--write" in shown[-1]
    assert difference(want, want) == ""


def test_what_is_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "PATH", tmp_path / "counts.json")
    counts.write(WANT)
    assert counts.committed() == WANT
