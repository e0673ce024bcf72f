"""Section O: buffers that forward changes: once per microbatch, in order, and no more."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, about
from tests.jobs import LINE2
from tests.models import NormNet, NormOfOne, rows, weights
from tests.replicas import LINE

F64 = torch.float64


class Counting(nn.Module):
    """A buffer that counts forwards and is a factor of the second stage's input."""

    c: Tensor

    def __init__(self, how: str = "+=") -> None:
        super().__init__()
        self.w, self.how = weights(2), how
        self.register_buffer("c", torch.zeros((), dtype=F64))

    def count(self) -> None:
        match self.how:
            case "+=":
                self.c += 1
            case "add_":
                self.c.add_(1)
            case "new":
                self.c = self.c + 1
            case "copy_":
                self.c.copy_(self.c + 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
        with piper.annotate("PP", 1):
            self.count()
            return F.mse_loss((h * self.c) @ self.w[1].T, y)


def counted(how: str, wanted: piper.Strategy) -> list[tuple[list[float], list[float], bool]]:
    """The counts before and after each of two steps, their losses, and whether it is one tensor."""

    def job() -> tuple[list[float], list[float], bool]:
        model = Counting(how)
        given = fx.part(EIGHT, wanted)
        buffer = model.c
        step = piper.compile(model, wanted, example_inputs=given)
        counts, losses = [float(model.c)], []
        for _ in range(2):
            loss = step(*given)
            loss.backward()
            losses.append(loss.item())
            counts.append(float(model.c))
        return counts, losses, model.c is buffer

    return jobs.run_ranks(job, fx.world(wanted))


@pytest.mark.parametrize("how", ["+=", "new", *fx.slowly("add_", "copy_")])
@pytest.mark.parametrize(
    "schedule",
    ["one_f_one_b", *fx.slowly("gpipe", "zb_h1")],
)
def test_a_counter_counts_microbatches_in_order(how: str, schedule: str) -> None:
    """R63, updates of buffers: 4 after a step and 8 after two, however forward writes them."""
    model = Counting("add_")
    want = [jobs.accumulate(model, EIGHT, 4) for _ in range(2)]  # factors 1 to 4, then 5 to 8
    ranks = counted(how, jobs.strategy(LINE2, 4, schedule))
    assert ranks[1][0] == [0.0, 4.0, 8.0]
    assert all(same for *_, same in ranks)
    for _, losses, _ in ranks:
        assert losses == about(want, 1e-12)


def test_replicas_count_their_own_microbatches() -> None:
    """R63, replicas: each counts what it is given, and nothing is synchronised."""
    ranks = counted("add_", replicas.strategy(LINE, 4, "one_f_one_b"))
    assert [counts for counts, *_ in ranks[2:]] == [[0.0, 4.0, 8.0]] * 2


@pytest.mark.parametrize("factor", [5, 1, 0])
def test_control_factors_of_a_dry_run_a_dropped_update_and_none(factor: int) -> None:
    """R63, signatures: a count that starts at 5, stays at 1, or at 0 gives another loss."""
    model = Counting("add_")
    want = jobs.accumulate(model, EIGHT, 4)
    broken = Counting("none")
    broken.c.fill_(factor)
    assert abs(jobs.accumulate(broken, EIGHT, 4) - want) > 1e-6


@pytest.mark.parametrize(
    "schedule",
    ["one_f_one_b", *fx.slowly("gpipe", "zb_h1")],
)
def test_running_statistics_are_those_of_microbatches(schedule: str) -> None:
    """R64, BatchNorm: .59, 1.19 and 2, for every schedule; of a whole batch .3, 1.5667, 1."""

    def job() -> dict[str, float]:
        model, batch = NormOfOne(), NormOfOne.batch()
        step = piper.compile(model, jobs.strategy(LINE2, 2, schedule), example_inputs=batch)
        step(*batch).backward()
        return {n: float(b) for n, b in model.named_buffers()}

    found = jobs.run_ranks(job, 2)[0]
    assert found["norm.running_mean"] == about(0.59, 1e-12)
    assert found["norm.running_var"] == about(1.19, 1e-12)
    assert found["norm.num_batches_tracked"] == 2


def test_control_statistics_of_the_whole_batch() -> None:
    """R64, signature: one microbatch of all rows."""

    def job() -> list[float]:
        model, batch = NormOfOne(), NormOfOne.batch()
        step = piper.compile(model, jobs.strategy(LINE2, 1), example_inputs=batch)
        step(*batch).backward()
        return [float(b) for b in model.buffers()]

    assert jobs.run_ranks(job, 2)[0] == [about(0.3), about(1.5667, 1e-4), 1.0]


def test_replicas_have_statistics_of_their_own_rows() -> None:
    """R64, replicas: local, as docs/zero.md says; of 0 and 2, or 4 and 6."""

    def job() -> float:
        wanted = replicas.strategy(LINE, 1, "one_f_one_b")
        mine = fx.part(NormOfOne.batch(), wanted)
        model = NormOfOne()
        piper.compile(model, wanted, example_inputs=mine)(*mine).backward()
        return float(model.norm.running_mean)

    assert jobs.run_ranks(job, 4)[:2] == [about(0.1), about(0.5)]


# More inputs of the kind.


class Averaging(nn.Module):
    """A moving average of activations and a count, in a nested module, kept by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)
        self.inner = nn.Module()
        self.inner.register_buffer("mean", torch.zeros(4, dtype=torch.float32))
        self.inner.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
            self.inner.mean = 0.9 * self.inner.mean + 0.1 * h.detach().mean(0).float()
            self.inner.seen += h.shape[0]
        with piper.annotate("PP", 1):
            return F.mse_loss(h @ self.w[1].T, y)


@pytest.mark.parametrize(
    ("placement", "schedule"),
    [(LINE2, "zb_h1"), pytest.param(LINE2, "gpipe", marks=pytest.mark.slow)],
)
def test_a_moving_average_by_assignment(placement: jobs.Placement, schedule: str) -> None:
    """Another model and dtype: float32 averages and whole numbers, in a submodule."""
    want = Averaging()
    for _ in range(2):
        jobs.accumulate(want, EIGHT, 4)

    def job() -> dict[str, Tensor]:
        model = Averaging()
        step = piper.compile(model, jobs.strategy(placement, 4, schedule), example_inputs=EIGHT)
        for _ in range(2):
            step(*EIGHT).backward()
        return {n: b.clone() for n, b in model.named_buffers()}

    found = jobs.run_ranks(job, 2)[0]
    for name, value in want.named_buffers():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("build", [Averaging, *fx.slowly(NormNet)])
def test_buffers_of_replicas_of_one_stage(build: Callable[[], nn.Module]) -> None:
    """Another layout: two replicas with the same rows have what one process has of these."""
    want = build()
    jobs.accumulate(want, rows(4), 2)
    wanted = replicas.strategy({0: [0, 1], 1: [0, 1]}, 2, "")

    def job() -> dict[str, Tensor]:
        model = build()
        step = piper.compile(model, wanted, example_inputs=rows(4))
        step(*rows(4)).backward()
        return {n: b.clone() for n, b in model.named_buffers()}

    for found in jobs.run_ranks(job, 2):
        for name, value in want.named_buffers():
            torch.testing.assert_close(found[name], value)
