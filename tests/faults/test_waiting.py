"""What users are told while they wait, when a step fails, and before it starts (docs/ux.md)."""

import gc
import logging
import re
import threading
import time
import weakref
from typing import Any

import pytest
import torch

import piper_dynamo as piper
from piper_dynamo.runtime import waiting
from piper_dynamo.runtime.waiting import Running
from tests import jobs, replicas, resuming
from tests.faults import fixtures as fx
from tests.faults import kinds
from tests.faults.fixtures import EIGHT, F1, about
from tests.faults.test_hangs import failing_loss
from tests.jobs import LINE2
from tests.models import Stack4
from tests.pool import Pool
from tests.replicas import LINE
from tests.source_tree import ROOT

# While ranks wait.


class Kept(logging.Handler):
    """Keeps the lines that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def late() -> list[str]:
    """A step that the second rank comes to late; what this rank said meanwhile."""
    kept = Kept()
    waiting.log.addHandler(kept)
    wanted = jobs.strategy(LINE2, 2)
    with fx.patched((waiting, "FIRST_S", 0.3)):
        step = piper.compile(Stack4(2), wanted, example_inputs=EIGHT, timeout_s=30.0)
        step(*EIGHT).backward()
        time.sleep(0.5)
        if piper.rank() == 1:
            time.sleep(1.5)
        step(*EIGHT).backward()
    waiting.log.removeHandler(kept)
    return kept.lines


@pytest.mark.dist(2)
def test_a_rank_says_what_it_waits_for(pool: Pool) -> None:
    """Long before the deadline, and again after twice as long; the rank that is late is silent."""
    first, second = pool.values(late)
    assert second == []
    assert len(first) >= 2
    for line in first:
        assert re.fullmatch(r"rank 0 waits for B\.PP1\.MB[01] from rank 1 since \d+ s", line)


def test_a_wait_is_told_after_twice_as_long_each_time() -> None:
    """What is looked at is one line of one step; another line begins anew."""
    running = Running(
        file="step", rank=2, place=lambda line: (f"waits at {line}", (1,) if line < 9 else ())
    )
    seen = [running.look(line, now) for line, now in ((3, 0), (3, 9), (3, 10), (3, 15), (3, 20))]
    told = "rank 2 waits at 3 since"
    assert seen == [None, None, f"{told} 10 s", None, f"{told} 20 s"]
    assert running.look(4, 21.0) is None
    assert running.look(4, 31.0) == "rank 2 waits at 4 since 10 s"
    assert running.look(9, 40.0) is None
    assert running.look(9, 90.0) is None  # it computes


# When a step fails.


def test_a_failed_step_shows_the_program_around_it() -> None:
    """Some instructions of the rank before and after the one that failed, marked."""
    text = jobs.refusal(lambda: jobs.run_ranks(failing_loss, 2), piper.PiperRuntimeError)
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("-> F.PP1.MB0")
    assert lines[at - 1].endswith("wait for F.PP0.MB0")
    assert lines[at + 1] == "B.PP1.MB0"


# Before it starts.


def test_the_summary_says_who_holds_what() -> None:
    """Frozen and shared parameters, and how replicas share."""
    case = resuming.MIXED
    plan = piper.plan(case.build(2), replicas.strategy(LINE, 2, zero=3), case.batch(0))
    text = plan.summary()
    jobs.mentions(text, "6 parameters", "1 of them frozen")
    jobs.mentions(text, "a is held by ranks 0, 1 and ranks 2, 3: the sum of their gradients")
    jobs.mentions(text, "replicas by", 'Replicate({"PP": "*"}, zero=3')
    plan = piper.plan(Stack4(2), jobs.strategy(LINE2, 2), EIGHT)
    assert "is held by" not in plan.summary()
    assert "replicas by" not in plan.summary()


def test_a_program_that_is_made_is_logged_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each program, its time, and the sizes and mode that it was made for; on rank 0 alone."""

    def job() -> None:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=EIGHT)
        step(*EIGHT).backward()
        step(*(value[:4] for value in EIGHT)).backward()
        with torch.no_grad():
            step(*EIGHT)

    with caplog.at_level(logging.DEBUG, logger="piper.step"):
        jobs.run_ranks(job, 2)
    told: dict[int, list[str]] = {logging.INFO: [], logging.DEBUG: []}
    for record in caplog.records:
        if record.name == "piper.step":
            told[record.levelno].append(record.getMessage())
    for lines in told.values():
        assert all(re.match(r"program made in \d+\.\d s: ", line) for line in lines)
    # The other rank says as much, to who asks for more.
    assert len(told[logging.INFO]) == len(told[logging.DEBUG])
    # Prepared again once parameters are released, which takes no time.
    lines = list(dict.fromkeys(line.partition(": ")[2] for line in told[logging.INFO]))
    assert len(lines) == 3
    jobs.mentions(lines[0], "training", "(8, 4)")
    jobs.mentions(lines[1], "training", "(4, 4)")
    jobs.mentions(lines[2], "forward", "(8, 4)")


def test_ready_made_microbatches_are_joined() -> None:
    """Of one size, along the dim that is split: the step sees them as they were."""
    pieces = [tuple(value[2 * k : 2 * k + 2] for value in EIGHT) for k in range(4)]
    batch: tuple[Any, ...] = tuple(torch.cat(column) for column in zip(*pieces, strict=True))
    ranks = fx.run(lambda: Stack4(2), jobs.strategy(LINE2, 4), batch)
    each = [Stack4(2)(*piece).item() for piece in pieces]
    assert each == about(list(F1.MICROBATCHES))
    for found in ranks:
        assert found.loss == about(sum(each) / 4, 1e-12)


# The page.


def test_the_page_names_tests_that_exist() -> None:
    """Each point of docs/ux.md has one."""
    text = (ROOT / "docs" / "ux.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 16))
    for number, cell in rows:
        named = re.findall(r"`((?:faults/)?test_\w+\.py)::(\w+|\*)`", cell)
        assert named, f"point {number} names no test"
        for file, name in named:
            path = ROOT / "tests" / file
            names = [n for n, _ in kinds.tests_of(path)]
            assert name in names or (name == "*" and names), f"{file}::{name}"


def test_a_look_keeps_no_tensors() -> None:
    """What a step had when it was looked at goes with the step, without the collector."""
    looked, going_on, kept = threading.Event(), threading.Event(), []

    def step() -> None:
        value = torch.zeros(1)
        kept.append(weakref.ref(value))
        with waiting.watched(Running(file=__file__, rank=0, place=lambda line: ("", ()))):
            looked.set()
            going_on.wait(10)

    gc.disable()
    try:
        thread = threading.Thread(target=step)
        thread.start()
        looked.wait(10)
        waiting._look()
        going_on.set()
        thread.join()
        assert kept[0]() is None
    finally:
        gc.enable()
