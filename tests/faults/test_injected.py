"""`PIPER_FAULT`: failures on purpose happen where they are asked for, and nowhere else."""

import math
import time
from typing import Any

import pytest

import piper_dynamo as piper
from piper_dynamo.ir.program import Watch
from piper_dynamo.lowering.emit import emit
from piper_dynamo.runtime import faults
from piper_dynamo.runtime.failure import Failure
from piper_dynamo.runtime.faults import Fault, Kind, parse
from tests import jobs
from tests.faults.fixtures import EIGHT
from tests.jobs import LINE2
from tests.models import Stack4

PLAN = jobs.strategy(LINE2, 2, "one_f_one_b")


def losses(steps: int = 3, **options: Any) -> list[float]:
    step = piper.compile(Stack4(2), PLAN, example_inputs=EIGHT, **options)
    found = []
    for _ in range(steps):
        loss = step(*EIGHT)
        loss.backward()
        found.append(loss.item())
    return found


def failing(monkeypatch: pytest.MonkeyPatch, text: str, **options: Any) -> str:
    """What a job with this fault is told."""
    monkeypatch.setenv(faults.VARIABLE, text)
    return jobs.refusal(lambda: jobs.run_ranks(lambda: losses(**options), 2))


# The text.


def test_what_is_asked_for_is_read() -> None:
    text = "kill:rank=1,step=3,task=B; sleep:rank=0,step=2,seconds=0.5;nan:step=1, rank=2,attempt=1"
    assert parse(text) == (
        Fault(kind=Kind.KILL, rank=1, step=3, task="B"),
        Fault(kind=Kind.SLEEP, rank=0, step=2, seconds=0.5),
        Fault(kind=Kind.NAN, rank=2, step=1, attempt=1),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil:rank=1,step=3", ("'kil' is no kind; did you mean kill?",)),
        ("sleep:rank=1,step=3,seconds=inf", ("seconds are of a sleep",)),
        ("kill:rank=1", ("it has no step",)),
        ("kill", ("'' is no key=value",)),
        ("kill:rank=one,step=3", ("'rank=one': 'one' is no whole number",)),
        ("kill:rank=1,step=0", ("steps from 1",)),
        ("kill:rank=1,step=3,seconds=2", ("seconds are of a sleep",)),
        ("kill:rank=1,step=3,step=4", ("step stands twice",)),
        ("kill:rank=1,step=3,task=B PP1", ("is no task",)),
        ("kill:rank=1,step=3;raise:rank=1,when=3", ("'when=3' is no key=value",)),
        (";", ("there is nothing in it",)),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_can(text: str, words: tuple[str, ...]) -> None:
    told = jobs.refusal(lambda: parse(text))
    jobs.mentions(told, "PIPER_FAULT is not understood", *words)
    jobs.mentions(told, "kill, raise, sleep, nan, corrupt", "rank, step, task, seconds, attempt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise:rank=2,step=1", ("rank 2", "ranks 0 to 1")),
        ("raise:rank=1,step=2,task=F.PP0", ("rank 1 does not run F.PP0", "F.PP1.MB0")),
        ("corrupt:rank=1,step=1,task=F", ("rank 1 sends no message of F", "B.PP1.MB0")),
        ("kill:rank=0,step=1", ("would end all ranks",)),
    ],
)
def test_what_there_is_not_is_refused(
    text: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.mentions(failing(monkeypatch, text), "PIPER_FAULT", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [("kil:rank=0,step=1", "did you mean kill?"), ("raise:rank=2,step=1", "has ranks 0 to 1")],
)
def test_what_is_misspelt_is_refused_before_ranks_are_started(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function has no step, so no rank would look."""
    monkeypatch.setenv(faults.VARIABLE, text)
    for engine in ("local", "torchrun", "inprocess"):
        told = jobs.refusal(lambda engine=engine: piper.launch(int, 2, engine=engine))
        jobs.mentions(told, "PIPER_FAULT", words)


def test_a_rank_of_another_start_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "raise:rank=3,step=1;raise:rank=1,step=1,attempt=1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [fault.rank for fault in faults.faults_of(1, 2)] == [1]
    faults.check_variable((4, 2))


def test_a_kill_that_was_asked_for_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "kill:rank=1,step=3; raise:rank=0,step=1")
    jobs.mentions(Failure.ended(1, -9).text, "PIPER_FAULT asks for it: kill:rank=1,step=3")
    for rank, restarts in ((0, 0), (1, 1)):
        jobs.mentions(Failure.ended(rank, -9, restarts).text, "ran out of memory")


# What happens.


def test_an_error_at_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    text = failing(monkeypatch, "raise:rank=1,step=2,task=B.PP1.MB1")
    jobs.mentions(text, "rank 1 failed in B.PP1.MB1", "RuntimeError: PIPER_FAULT: raise:rank=1")


def test_an_error_before_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's process that fails, so nothing is added to what it says."""
    monkeypatch.setenv(faults.VARIABLE, "raise:rank=0,step=2")
    with pytest.raises(RuntimeError, match=r"PIPER_FAULT: raise:rank=0,step=2$"):
        jobs.run_ranks(losses, 2)


def test_values_that_are_no_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = failing(monkeypatch, "nan:rank=0,step=2,task=F.PP0.MB1", nan_check="raise")
    jobs.mentions(text, "not finite", "F.PP0.MB1", "on rank 0")


def test_a_task_that_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    want = jobs.run_ranks(losses, 2)
    monkeypatch.setenv(faults.VARIABLE, "sleep:rank=1,step=3,task=F,seconds=0.7")
    begin = time.monotonic()
    assert jobs.run_ranks(losses, 2) == want
    assert time.monotonic() - begin > 0.7


def test_a_message_that_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent without headers: only the loss is another one."""
    want = jobs.run_ranks(losses, 2)[0]
    monkeypatch.setenv(faults.VARIABLE, "corrupt:rank=0,step=2,task=F.PP0.MB0")
    got = jobs.run_ranks(losses, 2)[0]
    assert [got[0], got[2]] == [want[0], want[2]]
    assert got[1] != want[1] or not math.isfinite(got[1])


def test_a_job_that_is_started_again_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "raise:rank=0,step=2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert len(jobs.run_ranks(losses, 2)[0]) == 3


def test_nothing_is_emitted_for_steps_without_faults() -> None:
    """The control: with one, the program of that step alone has its lines."""
    program = piper.plan(Stack4(2), PLAN, EIGHT).programs[1]
    assert "rt.fail" not in emit(program).source
    assert "rt.spoiled" not in emit(program).source
    index = faults.place_of(Fault(kind=Kind.NAN, rank=1, step=1, task="F.PP1.MB1"), program)
    source = emit(program, Watch(faults=frozenset({index}))).source
    assert source.count("rt.fail(") == source.count("rt.spoiled(") == 1
