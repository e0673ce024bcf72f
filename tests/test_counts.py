"""What steps do, as committed: a change of these counts is a regression unless it is meant.

Exact on every machine, since they are read from plans. `make bench-counts` shows all that differs,
and writes benchmarks/counts.json again. Time and memory: `make bench`.
"""

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from benchmarks import counts
from benchmarks.counts import GATE, Counts, committed, counts_of, difference
from piper_dynamo.schedules import SCHEDULES

WANT = committed()


def test_every_job_and_count_is_committed() -> None:
    assert list(WANT) == list(GATE)
    names = [field.name for field in fields(Counts)]
    assert all(list(found) == names for found in WANT.values())
    assert SCHEDULES.keys() <= WANT.keys()


# One of each kind; all of them are compared by make bench-counts, too.
QUICK = (
    "one_f_one_b",
    "dualpipev",
    "tied head",
    "recompute full",
    "2 replicas, zero 3, buckets",
    "experts",
)


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=[pytest.mark.slow] * (job not in QUICK)) for job in GATE]
)
def test_counts(job: str) -> None:
    found = difference({job: WANT[job]}, {job: asdict(counts_of(GATE[job]))})
    assert not found, "\n" + found


def test_schedules_change_neither_the_work_nor_its_messages() -> None:
    """What is computed does not depend on the order; what is sent only on the placement."""
    assert len({WANT[s]["matmuls"] for s in SCHEDULES}) == 1
    for alike in (("gpipe", "one_f_one_b", "zb_h1"), ("zbv", "dualpipev")):
        assert len({(WANT[s]["messages"], WANT[s]["bytes"]) for s in alike}) == 1


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
