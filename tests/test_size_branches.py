"""A branch on the batch size that microbatches decide otherwise is refused, with its line."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs
from tests.jobs import LINE2
from tests.models import rows


class Branching(nn.Module):
    """Two stages; the first does another thing with batches of some sizes."""

    def __init__(self, decide: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.decide, self.w = decide, nn.Linear(4, 4).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.w(x)
            if self.decide(h):
                h = 2 * h
        with piper.annotate("PP", 1):
            return (h - y).square().mean()


def plan(decide: Callable[[Tensor], bool], microbatches: int) -> piper.Plan:
    return piper.plan(Branching(decide), jobs.strategy(LINE2, microbatches), rows(8, 0), 2)


@pytest.mark.parametrize(
    "decide",
    [
        lambda h: h.shape[0] > 5,
        lambda h: h.size(0) >= 8,
        lambda h: len(h) <= 4,
        lambda h: h.shape[0] % 8 == 0,
        lambda h: 2 * h.shape[0] > 9 and h.shape[1] == 4,
    ],
    ids=["more", "as many", "fewer", "a multiple", "twice as many"],
)
def test_microbatches_on_the_other_side_are_refused(decide: Callable[[Tensor], bool]) -> None:
    """Before, all microbatches took the whole batch's side, and nothing was said."""
    text = jobs.refusal(lambda: plan(decide, 4), piper.PiperCaptureError)
    jobs.mentions(text, "another branch", "test_size_branches.py:", "torch.where")


@pytest.mark.parametrize(
    "decide", [lambda h: h.shape[0] > 1, lambda h: h.size(0) % 2 == 0, lambda h: len(h) > 100]
)
def test_control_those_on_the_same_side_are_not(decide: Callable[[Tensor], bool]) -> None:
    assert plan(decide, 4).programs


def test_control_the_whole_batch_has_one_side() -> None:
    assert plan(lambda h: len(h) > 5, 1).programs
