"""Section I: in which dtype gradients are summed, and autocast inside of the model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs, mixed, replicas
from tests.faults import fixtures as fx
from tests.jobs import LINE2, ONE
from tests.models import fill, xin
from tests.replicas import PAIR

BF16 = torch.bfloat16
FP32 = piper.Precision({}, grad="fp32")


class Weight(nn.Module):
    """The gradient of each microbatch is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return (self.w * x).sum()


def summed(first: float, count: int, part: float, *more: Any) -> Tensor:
    """The gradient after one microbatch of `first` and `count` of `part`."""
    x = torch.full((count + 1, 1), part, dtype=BF16)
    x[0] = first
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=count + 1, loss="sum"), *jobs.places({0: [0]}), *more
    )
    (found,) = fx.run(Weight, wanted, (x,))
    assert found.grads["w"].dtype is BF16
    return found.grads["w"]


CHEAP = (16.0, 16, 2.0**-4)
LONG = (1.0, 256, 2.0**-8)


@pytest.mark.parametrize(
    ("parts", "want"), [(CHEAP, 17.0), pytest.param(LONG, 2.0, marks=pytest.mark.slow)]
)
def test_small_gradients_are_not_lost_where_sums_are_float32(
    parts: tuple[float, int, float], want: float
) -> None:
    """R49, accumulation dtype: chosen by Precision(grad="fp32"); `.grad` has eager's dtype."""
    assert summed(*parts, FP32).item() == want


@pytest.mark.parametrize(
    ("parts", "want"), [(CHEAP, 16.0), pytest.param(LONG, 1.0, marks=pytest.mark.slow)]
)
def test_control_sums_in_bfloat16_are_those_of_eager(
    parts: tuple[float, int, float], want: float
) -> None:
    """R49, signature: without it bfloat16 is summed in bfloat16, as autograd does."""
    assert summed(*parts).item() == want
    model = Weight()
    for value in (parts[0], *[parts[2]] * parts[1]):
        model(torch.full((1, 1), value, dtype=BF16)).backward()
    assert model.w.grad is not None
    assert model.w.grad.item() == want


# Autocast.


class Inner(nn.Module):
    """v W with an inner region whose autocast is off; v = 1 + 2 ** -9 is 1 in bfloat16."""

    def __init__(self, off: bool, cut: str) -> None:
        super().__init__()
        self.w, self.off, self.cut = nn.Parameter(torch.ones(1, 1)), off, cut

    def forward(self, v: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            v = v * 1.0
            if self.cut == "after":
                y = self.product(v)
        with piper.annotate("PP", 1):
            if self.cut == "before":
                y = self.product(v)
            return y.float().mean()

    def product(self, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=not self.off, dtype=BF16):
            return v @ self.w


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize(("off", "want"), [(True, 1.001953125), (False, 1.0)])
def test_an_inner_autocast_is_that_of_its_backward(off: bool, want: float, cut: str) -> None:
    """R50, autocast in the captured region: off inside, the gradient is float32's, not 1.0."""
    v = torch.full((2, 1), 1.0 + 2.0**-9)

    def job() -> list[float]:
        with torch.autocast("cpu", dtype=BF16):
            step = piper.compile(Inner(off, cut), jobs.strategy(LINE2, 2), example_inputs=(v,))
            loss = step(v)
        loss.backward()
        return [g.item() for g in replicas.grads(step).values()]

    found = [value for rank in jobs.run_ranks(job, 2) for value in rank]
    assert found == [want]


# More inputs of the kind.


@pytest.mark.parametrize("zero", replicas.levels(3))
def test_a_master_over_replicas_equals_the_casts_by_hand(zero: int) -> None:
    """Mixed dtypes of another model and layout: bfloat16 over two replicas."""
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        *jobs.places(PAIR),
        piper.Replicate({"PP": "*"}, zero=zero),
        piper.Precision({}, param="bf16"),
    )
    got = mixed.run(lambda: mixed.Net(1), replicas.numbers, PAIR, wanted)
    want = mixed.reference(mixed.Net, replicas.numbers, mixed.ByHand(replicas=2, each=zero >= 2))
    replicas.compare(got, want, PAIR, zero)


class TwoTypes(nn.Module):
    """A float64 stage, and one whose parameters are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(fill([4, 4], 0)), nn.Parameter(fill([4, 4], 1).float())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.a)
        with piper.annotate("PP", 1):
            return (torch.tanh(h.float() @ self.b).double() - y).square().mean()


@pytest.mark.parametrize("placement", [LINE2, ONE], ids=["two ranks", "one"])
def test_parameters_of_two_dtypes_keep_theirs(placement: jobs.Placement) -> None:
    """Gradients have their parameters' dtypes, and the border carries the first stage's."""
    batch = xin([8, 4], 0), xin([8, 4], 1)
    ranks = fx.run(TwoTypes, jobs.strategy(placement, 4), batch)
    model, losses = fx.eager(TwoTypes, batch)
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        for name, grad in found.grads.items():
            torch.testing.assert_close(grad, dict(model.named_parameters())[name].grad)
