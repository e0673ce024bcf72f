"""Checkpoints over real processes: saves beside steps, calls of one rank, whole jobs that save."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import piper_dynamo as piper
from tests import jobs, replicas
from tests.pool import Pool
from tests.replicas import CASES, PAIR
from tests.resuming import MIXED, Run, layout

pytestmark = pytest.mark.dist(2)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    workers = Pool(2)
    yield workers
    workers.close()


def beside_steps(folder: str) -> tuple[list[Any], list[Any], bool]:
    """A save in the background holds what was there when it was called, not what came after."""
    run = Run.start(MIXED, layout(PAIR, 3))
    run.train(0, 2)
    saving = piper.save_checkpoint_async(
        folder, run.step, run.optimizer, scheduler=run.schedule, extra={"steps": 2}
    )
    want = run.train(2, 2)
    # The next save waits for the first, and replaces it when it is whole.
    later = piper.save_checkpoint_async(Path(folder) / "later", run.step, run.optimizer)
    first_done = saving.done
    assert run.load(Path(folder)) == {"steps": 2}
    assert later.done
    return want, run.train(2, 2), first_done


def test_a_save_beside_steps(pool: Pool, tmp_path: Path) -> None:
    for want, got, first_done in pool.values(beside_steps, str(tmp_path)):
        assert got == want
        assert first_done


def only_first(folder: str) -> tuple[str, float, float]:
    """Rank 0 alone saves; it is told, and both can go on and save together."""
    case = CASES["plain"]
    step = replicas.compiled(case, PAIR, replicas.strategy(PAIR, 2, zero=3))
    batch = replicas.mine(case.batch(0), PAIR)
    step(*batch).backward()
    text, started = "", time.monotonic()
    if piper.rank() == 0:
        text = jobs.refusal(lambda: piper.save_checkpoint(folder, step))
    seconds = time.monotonic() - started
    step(*batch).backward()
    piper.save_checkpoint(folder, step, extra=torch.ones(2))
    total = sum(float(piper.load_checkpoint(folder, step).sum()) for _ in range(2))
    return text, seconds, total


def test_a_save_on_one_rank_only(pool: Pool, tmp_path: Path) -> None:
    (text, seconds, total), (_, _, other) = pool.values(only_first, str(tmp_path))
    jobs.mentions(text, "all ranks together", "rank 1", "went on to its next step")
    assert seconds < 20
    assert total == other == 4
