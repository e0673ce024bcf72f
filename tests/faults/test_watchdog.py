"""When a wait runs out: what every rank is at, which is to blame, and one message for a job."""

import os
import re
import time

import pytest

import piper_dynamo as piper
from piper_dynamo.runtime import failure
from piper_dynamo.runtime.alarm import to_blame
from piper_dynamo.runtime.failure import Failure, first_of, is_lost, is_users, message
from piper_dynamo.runtime.waiting import At
from tests import jobs
from tests.faults.fixtures import EIGHT
from tests.jobs import LINE2
from tests.models import Stack4
from tests.pool import Pool

BUSY = At(text="is in F.PP0.MB0")


def waits(*peers: int) -> At:
    return At(text="waits", peers=peers)


@pytest.mark.parametrize(
    ("asker", "found", "want"),
    [
        (0, [waits(1), waits(2), waits(3), BUSY], 3),  # along a pipeline
        (0, [waits(1), waits(2), None, waits(2)], 2),  # it does not answer
        (0, [waits(1, 2), waits(0, 2), BUSY], 2),  # a collective that one does not join
        (0, [waits(1), BUSY, None, BUSY], 1),  # what answers, but is waited for
        (0, [waits(1), waits(0), None, BUSY], 2),  # in a circle, beside one that is gone
        (1, [None, waits(0), None, None], 1),  # all others are silent: it is this one
        (0, [waits(1), None], 1),  # of two, who knows
        (0, [waits(1), waits(0)], -1),  # a circle
    ],
)
def test_the_rank_at_the_end_of_the_waits(asker: int, found: list[At | None], want: int) -> None:
    assert to_blame(asker, found) == want


def failed(rank: int, when: float, text: str = "boom", **named: object) -> Failure:
    return Failure(rank=rank, when=when, text=text, **named)  # type: ignore[arg-type]


def test_the_first_failure_is_the_earliest_that_follows_from_no_other() -> None:
    echo = failed(0, 1.0, "Connection closed by peer", is_echo=True)
    cause = failed(2, 2.0, "boom", where="train.py:41", error="ValueError: boom")
    late = failed(1, 3.0, "later")
    assert first_of([late, echo, cause]) is cause
    text = message([late, echo, cause])
    assert text.splitlines()[0] == "rank 2 failed"
    assert re.search(r"also failed +rank 0, rank 1", text)
    where, error = text.splitlines()[-2:]
    assert where.split() == ["where", "train.py:41"]
    assert error.split() == ["error", "ValueError:", "boom"]


def test_a_job_of_which_all_ranks_wait_names_the_one_they_wait_for() -> None:
    knows = failed(3, 2.0, "rank 3 waits for ...", is_echo=True, blames=1)
    text = message([failed(0, 1.0, "lost", is_echo=True), knows])
    assert text.startswith("rank 1 did not go on, and rank 3 waited for it in vain")


def test_failures_are_told_as_text() -> None:
    one = failed(1, 2.5, "a\nb", where="x.py:1", error="E: a", is_echo=True, blames=3)
    assert Failure.from_json(one.to_json()) == one


def test_an_exception_is_told_with_the_users_line() -> None:
    try:
        jobs.run_ranks(lambda: [][1], 1)
    except IndexError as error:
        found = Failure.of(2, error)
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+", found.where)
    assert found.error == "IndexError: list index out of range"
    assert "Traceback" in found.text
    assert not found.is_echo


def test_ends_without_a_word_are_told() -> None:
    assert "killed by SIGKILL" in Failure.ended(1, -9).text
    assert Failure.ended(1, 17).text == "the process ended with exit code 17"


def test_what_is_the_users() -> None:
    assert is_users(__file__)
    others = (os.__file__, pytest.__file__, piper.__file__, failure.__file__, "<string>")
    assert not any(map(is_users, others))


def test_lost_connections_are_told_apart() -> None:
    assert is_lost(RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [::1]"))
    assert not is_lost(RuntimeError("boom"))
    assert not is_lost(KeyError("Connection closed by peer"))


# With processes.


def sleeping() -> tuple[str, int, float]:
    """The second rank sleeps in its own code; what the first is told, and after how long."""
    wanted = jobs.strategy(LINE2, 2, "one_f_one_b")
    step = piper.compile(Stack4(2), wanted, example_inputs=EIGHT, timeout_s=3.0)
    step(*EIGHT).backward()
    if piper.rank() == 1:
        time.sleep(5.0)  # the line that hangs
        return "", -1, 0.0
    begin = time.monotonic()
    with pytest.raises(piper.PiperTimeoutError) as caught:
        step(*EIGHT)
    return str(caught.value), caught.value.blames, time.monotonic() - begin


def line_that_hangs() -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(k for k, line in enumerate(file, 1) if line.endswith("# the line that hangs\n"))


@pytest.mark.dist(2)
def test_a_rank_that_sleeps_is_named_with_its_line(pool: Pool) -> None:
    """By the rank that waits; the message ends with it."""
    try:
        text, blames, seconds = pool.values(sleeping)[0]
    finally:
        pool.close()
    assert blames == 1
    assert 3.0 <= seconds < 8.0
    jobs.mentions(text, "rank 0 waits for B.PP1.MB0 from rank 1 since 3 s")
    place = rf"is at {re.escape(__file__)}:{line_that_hangs()} in sleeping, outside of a step"
    first, second, last = text.splitlines()[-3:]
    assert re.fullmatch(r" +rank 0 +waits for B\.PP1\.MB0 from rank 1 since 3\.0 s", first)
    assert re.fullmatch(rf" +rank 1 +{place} since \d\.\d s", second)
    assert re.fullmatch(rf" +first +rank 1 {place} since \d\.\d s", last)
