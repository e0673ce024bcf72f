"""Tensors that forward leaves in lists, dicts and objects of its module are refused by line.

They would be one microbatch's, and no value on ranks without the region; the control is what
outlives no call, or is no tensor of it.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs
from tests.jobs import LINE2
from tests.models import rows

GLOBAL: list[Any] = []


class Own(list[Any]):
    """A user's own list."""


class Keeping(nn.Module):
    """Two stages; the first does something with a value."""

    total: Tensor

    def __init__(self, keep: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.keep, self.first, self.second = keep, nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()
        self.seen: list[Any] = []
        self.by_name: dict[str, Any] = {"list": []}
        self.ordered: OrderedDict[str, Any] = OrderedDict()
        self.many: defaultdict[str, list[Any]] = defaultdict(list)
        self.queue: deque[Any] = deque()
        self.own = Own()
        self.second.seen = [torch.zeros(())]  # type: ignore[assignment]
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.first(x)
            self.keep(self, h.detach().mean())
        with piper.annotate("PP", 1):
            return (self.second(h) - y).square().mean()


def plan(keep: Callable[[Any, Tensor], object]) -> piper.Plan:
    return piper.plan(Keeping(keep), jobs.strategy(LINE2, 2), rows(4, 0), 2)


KEPT = {
    "self.seen": lambda m, t: m.seen.append(t),
    "self.seen ": lambda m, t: m.seen.append((1, {"a": t})),
    "self.seen  ": lambda m, t: setattr(m, "seen", [t]),
    "self.by_name": lambda m, t: m.by_name.update(t=t),
    "self.by_name['list']": lambda m, t: m.by_name["list"].append(t),
    "self.ordered": lambda m, t: m.ordered.update(t=t),
    "self.many": lambda m, t: m.many["t"].append(t),
    "self.queue": lambda m, t: m.queue.append(t),
    "self.own": lambda m, t: m.own.append(t),
    "self.second.seen": lambda m, t: m.second.seen.__setitem__(0, t),
    "GLOBAL": lambda m, t: GLOBAL.append(t),
}


@pytest.mark.parametrize("where", KEPT)
def test_what_outlives_the_call_is_refused(where: str) -> None:
    text = jobs.refusal(lambda: plan(KEPT[where]), piper.PiperCaptureError)
    jobs.mentions(text, f"{where.strip()} ", "is given a tensor at ", "test_kept.py:", "return")
    assert not GLOBAL


def emptied(module: Any, value: Tensor) -> None:
    module.seen.append(value)
    module.seen.clear()


def counted(module: Any, _value: Tensor) -> None:
    module.calls += 1
    module.by_name["calls"] = module.calls


def buffered(module: Any, value: Tensor) -> None:
    module.total.add_(value)
    module.by_name["total"] = module.total


def local(_module: Any, value: Tensor) -> None:
    {}["list"] = [value]


def test_a_number_that_forward_counts_is_told() -> None:
    """It is one value for all microbatches of a step; a buffer sees them one by one."""
    with pytest.warns(
        UserWarning, match=r"forward changes self\.calls, self\.by_name: once in"
    ) as told:
        assert plan(counted).programs
    assert {one.filename for one in told} == {__file__}


@pytest.mark.filterwarnings("ignore:forward changes")
@pytest.mark.parametrize("keep", [emptied, counted, buffered, local])
def test_control_what_is_no_tensor_of_the_call_may_stay(keep: Callable[..., None]) -> None:
    assert plan(keep).programs


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_the_old_weight_norm_is_refused_with_the_one_that_works() -> None:
    def normed(how: Callable[[nn.Module], nn.Module]) -> Keeping:
        model = Keeping(lambda module, value: None)
        how(model.first)
        return model

    def planned(model: Keeping) -> piper.Plan:
        return piper.plan(model, jobs.strategy(LINE2, 2), rows(4, 0), 2)

    old = normed(torch.nn.utils.weight_norm)
    text = jobs.refusal(lambda: planned(old), piper.PiperCaptureError)
    jobs.mentions(text, "self.weight", "take torch.nn.utils.parametrizations.weight_norm")
    assert planned(normed(torch.nn.utils.parametrizations.weight_norm)).programs
