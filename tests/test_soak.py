"""The judge of `make soak`, and one round of it."""

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.links import missing
from tests.soak import Tally, Try, table
from tests.source_tree import ROOT

WANT = [(1.0, 2.0), (0.5, 1.5), (0.25, 1.0)]
GOOD = Try(is_over=True, seconds=1.5, text="rank 1 failed", names="^rank 1 failed", committed=1)


@pytest.mark.parametrize(
    ("found", "resumed", "fault"),
    [
        (GOOD, (1, WANT[1:]), ""),
        (GOOD, (2, WANT[2:]), ""),  # saved, and killed before it said so
        (replace(GOOD, is_over=False), (1, WANT[1:]), "hangs"),
        (GOOD, (0, WANT), "lost"),
        (GOOD, None, "lost"),
        (GOOD, (1, [(0.5, 1.5), (0.25, 1.0 + 1e-6)]), "wrong"),
        (GOOD, (1, WANT[1:2]), "wrong"),
        (replace(GOOD, text="rank 0 failed"), (1, WANT[1:]), "unnamed"),
        (replace(GOOD, text="rank 0 failed", names=""), (1, WANT[1:]), ""),
    ],
)
def test_each_fault_is_counted(
    found: Try, resumed: tuple[int, list[Any]] | None, fault: str
) -> None:
    tally = Tally(kind="kill")
    tally.judge(GOOD, (1, WANT[1:]), WANT)
    tally.judge(found, resumed, WANT)
    counts = {name: getattr(tally, name) for name in ("hangs", "lost", "wrong", "unnamed")}
    assert counts == {name: int(name == fault) for name in counts}
    assert tally.is_good == (not fault)
    row = table([tally]).splitlines()[1].split()
    assert row[:2] == ["kill", "2"]
    assert row[-1] == ("FAILED" if fault else "ok")
    assert len(tally.notes) == bool(fault)


@pytest.mark.slow
@pytest.mark.dist(4)
@pytest.mark.timeout(900)
def test_one_of_each() -> None:
    """All kinds that this machine lets be tried, once, and a short long run."""
    network = "" if missing() else ",full disk,partition,slow link"
    only = f"kill,raise,hang,nan,interrupt,growth{network}"
    command = [sys.executable, "-m", "tests.soak", "--tries", "1", "--steps", "200"]
    done = subprocess.run([*command, "--only", only], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r" ok$", done.stdout, re.MULTILINE)) == only.count(",") + 1
