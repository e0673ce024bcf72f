"""Real processes over gloo: a smaller parity set, and failures, which only real processes have."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs, replicas
from tests.jobs import LINE2, LOOP2, ONE, STEPS, V2, Trace
from tests.models import (
    BareLoss,
    Counter,
    Dropped,
    NormNet,
    Outputs,
    Stack4,
    TiedLM,
    rows,
)
from tests.pool import Pool
from tests.replicas import CASES, PAIR
from tests.resuming import MIXED, Run, layout

pytestmark = pytest.mark.dist(2)


# What the workers run: functions at the top of this module, called by name. Models by name too.

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "stack of two": (lambda: Stack4(2), rows(8)),
    "stack of four": (lambda: Stack4(4), rows(8)),
    "skip": (lambda: Stack4(4, "all"), rows(8)),
    "tied": (TiedLM, TiedLM.batch()),
    "statistics": (NormNet, rows(8)),
    "counter": (Counter, rows(8)),
    "bare": (BareLoss, rows(8)),
}


def train(name: str, placement: jobs.Placement, microbatches: int, schedule: str) -> Trace:
    build, batch = MODELS[name]
    last = max(placement)
    strategy = jobs.strategy(placement, microbatches, schedule)
    mine = jobs.given_to(piper.rank(), batch, ((0,), (last,)), jobs.uses(strategy))
    step = piper.compile(build(), strategy, example_inputs=mine, timeout_s=30.0)
    return jobs.train(step, [mine] * STEPS)


@pytest.mark.parametrize(
    ("name", "placement", "microbatches", "schedule"),
    [
        ("stack of two", LINE2, 4, "gpipe"),
        ("stack of two", LINE2, 4, "one_f_one_b"),
        ("stack of two", LINE2, 1, "one_f_one_b"),
        ("stack of two", LINE2, 4, "zb_h1"),
        ("stack of four", LOOP2, 4, "interleaved_1f1b"),
        ("stack of four", V2, 4, "zbv"),
        ("stack of two", LINE2, 4, "dualpipe"),
        ("tied", LINE2, 4, "dualpipe"),
        ("skip", V2, 2, "gpipe"),
        ("tied", LINE2, 2, "one_f_one_b"),
        ("statistics", LINE2, 4, "one_f_one_b"),
        ("counter", LINE2, 4, "one_f_one_b"),
        ("bare", LINE2, 2, "gpipe"),
    ],
)
def test_parity(
    pool: Pool, name: str, placement: jobs.Placement, microbatches: int, schedule: str
) -> None:
    ranks = pool.values(train, name, placement, microbatches, schedule)
    build, batch = MODELS[name]
    jobs.compare(ranks, jobs.reference(build(), [batch] * STEPS, microbatches))


def train_from_the_first(schedule: str) -> Trace:
    """The second rank starts from other values of what the first holds, too."""
    build, batch = MODELS["stack of two"]
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(piper.rank())
    strategy = jobs.strategy(LINE2, 4, schedule)
    step = piper.compile(model, strategy, batch, start="broadcast", timeout_s=30.0)
    return jobs.train(step, [batch] * STEPS)


def test_copies_take_the_first_ones_values_on_request(pool: Pool) -> None:
    ranks = pool.values(train_from_the_first, "dualpipe")
    jobs.compare(ranks, jobs.reference(Stack4(2), [rows(8)] * STEPS, 4))


def test_control_a_dropped_microbatch_is_noticed(pool: Pool) -> None:
    ranks = pool.values(train, "stack of two", LINE2, 4, "gpipe")
    x, y = rows(8)
    wrong = jobs.reference(Stack4(2), [(x[:6], y[:6])] * STEPS, 3)
    with pytest.raises(AssertionError, match="off by"):
        jobs.compare(ranks, wrong)


def dropped(placement: jobs.Placement, schedule: str) -> list[float]:
    strategy = jobs.strategy(placement, 4, schedule)
    step = piper.compile(Dropped(), strategy, example_inputs=rows(8))
    torch.manual_seed(7)
    losses = []
    for _ in range(3):
        loss = step(*rows(8))
        loss.backward()
        losses.append(loss.item())
    return losses


def test_dropout_does_not_depend_on_schedule_or_placement(pool: Pool) -> None:
    first, second = pool.values(dropped, LINE2, "gpipe")
    assert first == second
    assert len(set(first)) == 3
    for losses in pool.values(dropped, LINE2, "one_f_one_b"):
        assert losses == first
    (alone,) = jobs.run_ranks(lambda: dropped(ONE, "gpipe"), 1)
    assert alone == first


def wide(megabytes: int) -> float:
    """Activations far above what a socket buffers, both ways at once."""
    width = megabytes * 2**20 // 8 // 4
    x, y = torch.full((8, 4), 0.5), torch.zeros(8, 4)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.ParameterList(nn.Parameter(torch.full((4, 1), 0.1 * k)) for k in range(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = x
            for k in range(4):
                with piper.annotate("PP", k):
                    h = torch.tanh(h[:, :4] @ self.w[k]).expand(-1, width) * 1.0
            with piper.annotate("PP", 3):
                return (h[:, :4] - y).square().mean()

    texts = ("F0.0 F0.1 F3.0 F3.1 B3.0 B3.1 B0.0 B0.1", "F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1")
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=2), *jobs.places(V2), *jobs.by_hand(*texts)
    )
    step = piper.compile(Wide(), strategy, example_inputs=(x, y), timeout_s=30.0)
    loss = step(x, y)
    loss.backward()
    model = Wide()
    want = model(x, y)
    want.backward()
    for name, p in piper.named_parameters(step):
        torch.testing.assert_close(p.grad, dict(model.named_parameters())[name].grad)
    torch.testing.assert_close(loss.detach(), want.detach())
    return loss.item()


def test_large_activations_both_ways_at_once(pool: Pool) -> None:
    first, second = pool.values(wide, 16)
    assert first == second


def everywhere() -> dict[str, Any]:
    strategy = jobs.strategy(LINE2, 4, loss="nested.loss")
    step = piper.compile(Outputs(), strategy, example_inputs=rows(8), outputs="everywhere")
    with torch.no_grad():
        quiet = step(*rows(4))
    out = step(*rows(8))
    out["nested"]["loss"].backward()
    return {"hidden": out["hidden"], "logits": out["logits"], "quiet": quiet["logits"]}


def test_outputs_everywhere_and_forward_only(pool: Pool) -> None:
    want, quiet = Outputs()(*rows(8)), Outputs()(*rows(4))
    for got in pool.values(everywhere):
        jobs.close(got["hidden"], want["hidden"].detach(), "hidden")
        jobs.close(got["logits"], want["logits"].detach(), "logits")
        jobs.close(got["quiet"], quiet["logits"].detach(), "logits under no_grad")


def hand_over() -> tuple[float, float]:
    """Two calls add up; the second rank's parameters change in place in between."""
    x, y = rows(8)
    strategy = jobs.strategy(LINE2, 2)
    step = piper.compile(Stack4(2), strategy, example_inputs=(x[:4], y[:4]))
    (step(x[:4], y[:4]) / 2).backward()
    (step(x[4:], y[4:]) / 2).backward()
    first = float(piper.clip_grad_norm_(step, float("inf")))
    with torch.no_grad():
        for p in piper.parameters(step):
            p.mul_(0.5)
    return first, step(x, y).item()


def test_hand_over(pool: Pool) -> None:
    want = Stack4(2)
    with torch.no_grad():
        for p in want.parameters():
            p.mul_(0.5)
    for norm, loss in pool.values(hand_over):
        assert norm == pytest.approx(Stack4.NORM, abs=1e-9)
        assert loss == pytest.approx(want(*rows(8)).item(), abs=1e-12)


def absent() -> str:
    model = Stack4(2)
    piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=rows(8))
    return jobs.refusal(lambda: str(model.w[2 if piper.rank() == 0 else 0]))


def test_absent_parameters(pool: Pool) -> None:
    for rank, text in enumerate(pool.values(absent)):
        jobs.mentions(text, f"rank {1 - rank}", "piper.parameters", "w.2" if rank == 0 else "w.0")


# Checkpoints


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


# Failures. The group's own timeout is 60 s; everything here must be told long before.


def disagreeing() -> dict[str, tuple[str, float]]:
    """Steps in which the ranks differ: what this rank was told, and after how many seconds."""
    first = piper.rank() == 0

    def attempt(
        microbatches: int = 2, size: int = 8, training: bool = True, good: int = 0
    ) -> tuple[str, float]:
        strategy = jobs.strategy(LINE2, microbatches)
        started = time.monotonic()

        def run() -> None:
            step = piper.compile(Stack4(2), strategy, example_inputs=rows(8), timeout_s=8.0)
            for _ in range(good):
                step(*rows(8))
            with torch.set_grad_enabled(training):
                step(*rows(size))

        return jobs.refusal(run), time.monotonic() - started

    return {
        "strategies": attempt(microbatches=2 if first else 4),
        "grad modes": attempt(training=first),
        "shapes at the first step": attempt(size=8 if first else 4),
        "shapes at a later step": attempt(size=8 if first else 4, good=1),
    }


def test_ranks_that_would_run_different_programs_raise_together(pool: Pool) -> None:
    """All ranks are told what differs, before their deadline of 8 s."""
    try:
        ranks = pool.values(disagreeing)
    finally:
        pool.close()
    words = {
        "strategies": ("strategy",),
        "grad modes": ("training", "forward"),
        "shapes at the first step": ("(8, 4)", "(4, 4)"),
        "shapes at a later step": ("(8, 4)", "(4, 4)"),
    }
    faults = []
    for rank, told in enumerate(ranks):
        for case, (text, seconds) in told.items():
            wanted = ("different programs", "rank 0", "rank 1", *words[case])
            missing = [word for word in wanted if word not in text]
            if missing or seconds > 12:
                faults.append(f"rank {rank}, {case}, {seconds:.1f} s, no {missing}:\n{text}")
    assert not faults, "\n\n".join(faults)


def late() -> None:
    step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8), timeout_s=3.0)
    step(*rows(8)).backward()
    if piper.rank() == 1:
        time.sleep(8)
    step(*rows(8))


def test_a_wait_has_a_deadline_and_says_for_what(pool: Pool) -> None:
    first, _ = pool.run(late)
    assert first.error is not None
    assert first.kind == "PiperTimeoutError"
    jobs.mentions(first.error, "rank 0", "rank 1", "3")


# Launching. Each starts processes of its own.


def report() -> tuple[int, int, float]:
    step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8))
    return piper.rank(), piper.world_size(), step(*rows(8)).item()


def test_launch_returns_what_each_rank_returned() -> None:
    found = piper.launch(report, 2, engine="local", timeout_s=60.0)
    assert [(rank, world) for rank, world, _ in found] == [(0, 2), (1, 2)]
    for *_, loss in found:
        assert loss == pytest.approx(Stack4.LOSS, abs=1e-12)


class Boom(Stack4):
    """Stack4 for the jobs that fail."""


def failing(act: Callable[[], None]) -> None:
    """One good step, then rank 1 does `act` where it should take the second."""
    step = piper.compile(Boom(2), jobs.strategy(LINE2, 2), example_inputs=rows(8), timeout_s=6.0)
    step(*rows(8)).backward()
    if piper.rank() == 1:
        act()
    step(*rows(8)).backward()


def boom() -> None:
    raise ValueError("boom")


def idle() -> None:
    """Start and end."""


def raising() -> None:
    failing(boom)


def killed() -> None:
    failing(lambda: os._exit(17))


def sleeping() -> None:
    failing(lambda: time.sleep(40))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (raising, ("rank 1", "boom", "test_gloo.py")),
        pytest.param(killed, ("rank 1", "17"), marks=pytest.mark.slow),
        pytest.param(sleeping, ("rank 0", "rank 1"), marks=pytest.mark.slow),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_launch_tells_the_first_failure_in_time(
    job: Callable[[], None], words: tuple[str, ...]
) -> None:
    start = time.monotonic()
    piper.launch(idle, 2, engine="local")
    starting = time.monotonic() - start  # imports alone take long where others use the cores
    start = time.monotonic()
    text = jobs.refusal(lambda: piper.launch(job, 2, engine="local", timeout_s=6.0))
    seconds = time.monotonic() - start
    jobs.mentions(text, *words)
    assert seconds < 25 + 3 * starting, f"told after {seconds:.0f} s:\n{text}"


def test_launch_refuses_what_it_cannot_send() -> None:
    """A closure has no name that another process could find it by."""
    text = jobs.refusal(lambda: piper.launch(lambda: None, 2, engine="local"))
    jobs.mentions(text, "top of a module")
