"""Numbers and shapes that follow from what a tensor holds are refused, with line and remedy."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from tests import jobs
from tests.jobs import LINE2
from tests.models import rows


class Reading(nn.Module):
    """Two stages; the first does something with its value."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.w = read, nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.read(self.w(x))
        with piper.annotate("PP", 1):
            return (h - y).square().mean()


def plan(read: Callable[[Tensor], Tensor]) -> piper.Plan:
    return piper.plan(Reading(read), jobs.strategy(LINE2, 2), rows(4, 0), 2)


def scaled(h: Tensor) -> Tensor:
    return h * h.sum().item()


READ = {
    "item": (scaled, "keep .item()"),
    "a float": (lambda h: h * float(h.mean()), "keep .item()"),
    "an int of two": (lambda h: h * h.max().item() + h * int(h.abs().sum()), "keep .item()"),
    "a mask": (lambda h: h * h[h > 0].sum(), "torch.where"),
    "a slice": (lambda h: h * h[: int(h.sum().abs())].sum(), "torch.where"),
    "nonzero": (lambda h: h + h.nonzero().sum(), "torch.where"),
    "unique": (lambda h: h + torch.unique(h).sum(), "torch.where"),
    "in a checkpoint": (lambda h: checkpoint(scaled, h, use_reentrant=False), "keep .item()"),
}


@pytest.mark.parametrize(("read", "remedy"), READ.values(), ids=READ)
def test_values_that_become_numbers_or_shapes(read: Callable[..., Tensor], remedy: str) -> None:
    text = jobs.refusal(lambda: plan(read), piper.PiperCaptureError)
    jobs.mentions(text, "what a tensor holds", "test_read_values.py:", remedy)


def test_control_the_same_as_tensors() -> None:
    assert plan(lambda h: h * h.sum()).programs
    assert plan(lambda h: h * torch.where(h > 0, h, 0).sum()).programs
