"""Calls of all ranks together: who does not come, comes with something else, or fails, is named."""

from pathlib import Path
from typing import Any

import pytest
import torch

import piper_dynamo as piper
from piper_dynamo.checkpoint import save
from piper_dynamo.meeting import Meeting
from piper_dynamo.runtime.world import communicator
from tests import jobs, replicas
from tests.jobs import LINE2
from tests.replicas import CASES, PAIR
from tests.resuming import MIXED, layout


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests execute the graphs of such plans between passes."""
    monkeypatch.setenv("PIPER_VERIFY", "1")


def compiled() -> tuple[Any, Any]:
    """Two replicas that shard what they hold, so that a save or state dict needs both."""
    case = CASES["plain"]
    step = replicas.compiled(case, PAIR, replicas.strategy(PAIR, 2, zero=3))
    return step, torch.optim.SGD(piper.parameters(step), lr=0.1)


def train(step: Any) -> None:
    step(*replicas.mine(CASES["plain"].batch(0), PAIR)).backward()


CALLS = {
    "save": lambda folder, step, opt: piper.save_checkpoint(folder, step, opt),
    "load": lambda folder, step, opt: piper.load_checkpoint(folder, step, opt),
    "state dict": lambda folder, step, opt: piper.state_dict(step),
    "load state dict": lambda folder, step, opt: piper.load_state_dict(step, {}),
}


@pytest.mark.parametrize(
    ("call", "then"),
    [("save", "step"), ("state dict", "end")]
    + [
        pytest.param(call, then, marks=pytest.mark.slow)
        for call in CALLS
        for then in ("step", "end")
        if (call, then) not in (("save", "step"), ("state dict", "end"))
    ],
)
@pytest.mark.parametrize("caller", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_call_on_one_rank_only(call: str, then: str, caller: int, tmp_path: Path) -> None:
    """It is told which rank did not call, whether that went on or ended."""

    def job() -> str | None:
        step, optimizer = compiled()
        train(step)
        if piper.rank() == caller:
            return jobs.refusal(lambda: CALLS[call](tmp_path, step, optimizer))
        if then == "step":
            jobs.refusal(lambda: train(step))  # the other one never comes to it
        return None

    text = jobs.run_ranks(job, 2)[caller]
    what = "went on to its next step" if then == "step" else "has ended without calling it"
    jobs.mentions(text, "all ranks together", f"rank {1 - caller}", what, "if rank == 0")


def test_ranks_that_save_to_different_folders(tmp_path: Path) -> None:
    def job() -> str:
        step, optimizer = compiled()
        mine = tmp_path / str(piper.rank())
        return jobs.refusal(lambda: piper.save_checkpoint(mine, step, optimizer))

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "ranks call different things", str(tmp_path / "0"), str(tmp_path / "1"))
    assert not (tmp_path / "1").exists()


def test_ranks_of_which_one_saves_and_one_loads(tmp_path: Path) -> None:
    def job() -> str:
        step, optimizer = compiled()
        call = CALLS["load" if piper.rank() else "save"]
        return jobs.refusal(lambda: call(tmp_path, step, optimizer))

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "ranks call different things", "load_checkpoint", "save_checkpoint")


def test_a_failure_of_one_rank_is_told_to_all_and_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks can go on, and save again."""

    written, write = [0, 0], save.write

    def fail(*args: Any) -> Any:
        written[piper.rank()] += 1
        if (piper.rank(), written[1]) == (1, 2):
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(save, "write", fail)

    def job() -> str:
        step, optimizer = compiled()
        piper.save_checkpoint(tmp_path, step, optimizer, extra=1)
        text = jobs.refusal(lambda: piper.save_checkpoint(tmp_path, step, optimizer, extra=2))
        assert piper.load_checkpoint(tmp_path, step, optimizer) == 1
        train(step)
        piper.save_checkpoint(tmp_path, step, optimizer, extra=3)
        assert piper.load_checkpoint(tmp_path, step, optimizer) == 3
        return text

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "rank 1", "No space left on device")


def test_ranks_that_disagree_about_a_group(tmp_path: Path) -> None:
    def job() -> str:
        step, optimizer = compiled()
        optimizer.param_groups[0]["lr"] = 0.1 + piper.rank()
        return jobs.refusal(lambda: piper.save_checkpoint(tmp_path, step, optimizer))

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "different settings", "w.0: lr is 1.1 on rank 1, 0.1 on another")


def test_state_dicts_out_of_and_into_blocks() -> None:
    """The whole model on the ranks that asked, bit by bit, and back into whatever they hold."""

    def job() -> None:
        step, _ = compiled()
        want = CASES["plain"].build(1).state_dict()
        with torch.no_grad():
            for p in piper.parameters(step):
                p.mul_(-0.0)
        for rank in (None, 1):
            found = piper.state_dict(step, rank=rank)
            assert list(found) == (list(want) if rank in (None, piper.rank()) else [])
            for value in found.values():
                assert not value.any()
                assert value.shape == (4, 4)
        piper.load_state_dict(step, want)
        for name, value in piper.state_dict(step).items():
            assert torch.equal(value, want[name])
            assert torch.equal(value.signbit(), want[name].signbit())

    jobs.run_ranks(job, 2)


def test_a_state_dict_has_the_plain_names_at_every_moment() -> None:
    """Before the first call, after it and after a step; tied parameters under both names."""

    def job() -> None:
        where = layout(LINE2)
        model = MIXED.build(2)
        step = torch.compile(model, backend="piper", options={"strategy": where.strategy})
        want = {name: value.clone() for name, value in MIXED.build(2).state_dict().items()}
        batch = MIXED.batch(0)
        for moment in ("before", "prepared", "stepped"):
            if moment == "prepared":
                piper.prepare(step, *batch)
            elif moment == "stepped":
                step(*batch).backward()
                want["calls"] += 2
            found = piper.state_dict(step)
            assert list(found) == list(want)
            for name, value in want.items():
                assert torch.equal(found[name], value), (moment, name)
            MIXED.build(1).load_state_dict(found)

    jobs.run_ranks(job, 2)


def test_a_failure_of_all_ranks_says_in_which_call() -> None:
    """As of a disk that is full: the error alone would not say what was tried."""

    def fail() -> None:
        raise OSError(28, "No space left on device")

    def job() -> str:
        meeting = Meeting(communicator(5.0), "save_checkpoint('x')")
        return jobs.refusal(lambda: meeting.together(fail, lambda parts: None))

    for text in jobs.run_ranks(job, 2):
        assert text == "save_checkpoint('x'): OSError: [Errno 28] No space left on device"
