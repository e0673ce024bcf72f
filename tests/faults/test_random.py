"""Section L: masks, initial values, and runs that must repeat."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, LAYOUTS, about
from tests.jobs import LINE2, LINE4, ONE
from tests.models import Dropped, Stack4, rows
from tests.replicas import LINE, PAIR

# Masks.


class Masked(nn.Module):
    """y = dropout(x * w) or attention of each row to itself under a checkpoint; all ones."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.attention = attention

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with piper.annotate("PP", 0):
            h = x * 1.0
        with piper.annotate("PP", 1):
            y = checkpoint(self.drop, h, use_reentrant=False)
            return y.sum(), y

    def drop(self, h: Tensor) -> Tensor:
        if not self.attention:
            return F.dropout(h * self.w, 0.5, self.training)
        q = (h * self.w).unflatten(-1, (4, 1)).unsqueeze(2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).flatten(1)


@pytest.mark.parametrize("attention", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["one_f_one_b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_a_mask_is_the_same_in_forward_and_backward(attention: bool, schedule: str) -> None:
    """R56, masks under recompute: zeros of gradient and output agree, masks differ, runs repeat."""
    jobs.check_masks(lambda: Masked(attention), schedule)


# Initial values.


class Layers(nn.Module):
    """Four layers as torch initialises them, one per stage."""

    def __init__(self, stages: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.stages = stages

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k, layer in enumerate(self.layers):
            with piper.annotate("PP", k * self.stages // 4):
                h = torch.tanh(layer(h))
        with piper.annotate("PP", self.stages - 1):
            return F.mse_loss(h, y)


@pytest.mark.parametrize("deferred", [False, True])
def test_initial_values_are_those_of_one_process(deferred: bool) -> None:
    """R57, the same random stream in every stage: as one process, and no two layers are equal."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        if not deferred:
            return Layers()
        with piper.deferred_init():
            return Layers()

    def job() -> dict[str, Tensor]:
        return jobs.held(piper.compile(build(), jobs.strategy(LINE4, 2), example_inputs=rows(4)))

    torch.manual_seed(0)
    want = {n: p.detach() for n, p in Layers().named_parameters()}
    found = {name: value for rank in jobs.run_ranks(job, 4) for name, value in rank.items()}
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(found[name], value), name
    weights = [found[f"layers.{k}.weight"] for k in range(4)]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])


@pytest.mark.parametrize("deferred", [False, True])
def test_replicas_that_start_from_other_values_are_refused(deferred: bool) -> None:
    """R57, replicas: equal, or told apart by name before the first step."""

    def job() -> str:
        torch.manual_seed(piper.rank())
        if deferred:
            with piper.deferred_init():
                model = Layers(1)
        else:
            model = Layers(1)

        def run() -> None:
            wanted = replicas.strategy(PAIR, 2)
            piper.compile(model, wanted, example_inputs=rows(4), timeout_s=20.0)(*rows(4))

        return jobs.refusal(run)

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "layers.0.weight", "rank 0", "other parameters")


# Runs that repeat.


@pytest.mark.parametrize("zero", [None, *replicas.levels()])
def test_two_runs_are_bit_equal_and_layouts_within_rounding(zero: int | None) -> None:
    """R58, same configuration, other curve: two runs are the same bits; layouts within 1e-12."""
    if zero is None:
        wanted = LAYOUTS["zbv"].strategy()
        build = fx.stack(LAYOUTS["zbv"])
    else:
        wanted = replicas.strategy(LINE, 2, zero=zero)
        build = lambda: Stack4(2)  # noqa: E731
    first, second = (fx.train(build, wanted, fx.adamw, *[EIGHT] * 3) for _ in range(2))
    assert first == second
    want = fx.trained_alone(Stack4, fx.adamw, *[EIGHT] * 3)
    assert want == about(list(F1.ADAMW[:3]))
    for losses in first:
        assert losses == about(want, 1e-12)


@pytest.mark.parametrize("layout", ["replicas", *fx.slowly("one", "line")])
def test_float32_layouts_agree_within_its_rounding(layout: str) -> None:
    """R58, in float32: within 1e-6 of the float64 losses."""
    batch = tuple(value.float() for value in EIGHT)
    wanted = {
        "one": jobs.strategy(ONE, 4),
        "line": jobs.strategy(LINE2, 4, "one_f_one_b"),
        "replicas": replicas.strategy(PAIR, 2, zero=2),
    }[layout]
    stages = 1 if layout == "replicas" else 2
    losses = fx.train(lambda: Stack4(stages).float(), wanted, fx.sgd, *[batch] * 3)
    assert losses == [pytest.approx(F1.SGD, abs=1e-6)] * len(losses)


# More inputs of the kind.


@pytest.mark.parametrize("schedule", ["zb_h1", *fx.slowly("gpipe")])
def test_masks_do_not_depend_on_the_schedule(schedule: str) -> None:
    """Another model and layout: the losses of a run on one rank and on two are the same bits."""

    def run(placement: jobs.Placement, schedule: str) -> list[list[float]]:
        def job() -> list[float]:
            wanted = jobs.strategy(placement, 4, schedule)
            step = piper.compile(Dropped(), wanted, example_inputs=EIGHT)
            torch.manual_seed(7)
            return [step(*EIGHT).item() for _ in range(2)]

        return jobs.run_ranks(job, jobs.world(placement))

    (alone,) = run(ONE, "gpipe")
    assert run(LINE2, schedule) == [alone] * 2
    assert len(set(alone)) == 2


def test_masks_of_float32_replicas_differ_by_their_rows() -> None:
    """Another dtype: two replicas with the same rows draw other masks, as one process would."""
    x, y = (value.float() for value in rows(4))

    def losses(wanted: piper.Strategy, times: int) -> list[float]:
        def job() -> float:
            given = fx.part((x.repeat(times, 1), y.repeat(times, 1)), wanted)
            step = piper.compile(Dropped().float(), wanted, example_inputs=given)
            torch.manual_seed(7)
            return step(*given).item()

        return jobs.run_ranks(job, fx.world(wanted))

    (whole,) = losses(jobs.strategy(ONE, 4), 2)
    (half,) = losses(jobs.strategy(ONE, 2), 1)
    copied = losses(replicas.strategy(LINE, 2), 2)
    assert copied == [pytest.approx(whole, abs=1e-6)] * 4
    assert abs(half - whole) > 1e-5
