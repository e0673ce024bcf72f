"""What forward does to Python's objects is not done by looking at the model; who trains is told."""

import copy
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs
from tests.jobs import LINE2
from tests.models import rows

LIST: list[int] = []
TABLE: dict[str, Any] = {"calls": 0, "of": {"set": set()}}


class Guarded(dict[str, int]):
    """A dict whose own functions refuse what fills it again."""

    def __setitem__(self, key: str, value: int) -> None:
        if key == "a":
            raise KeyError(key)
        super().__setitem__(key, value)

    def update(self, *_args: Any, **_named: int) -> None:
        raise KeyError("update")


class Slotted:
    """An object without a dict."""

    __slots__ = ("calls", "later")

    def __init__(self) -> None:
        self.calls = 0


class Plain:
    """An object that is no module."""

    def __init__(self) -> None:
        self.calls = 0
        self.list: list[int] = []


class Noting(nn.Module):
    """Two stages; the first notes something, and may read it."""

    def __init__(self, note: Callable[[Any], object], scale: Callable[[Any], float] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.note, self.scale = note, scale
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()
        self.calls = 0
        self.list: list[Any] = []
        self.table: dict[str, Any] = {"list": []}
        self.ordered: OrderedDict[str, int] = OrderedDict(a=1, b=2)
        self.many: defaultdict[str, list[int]] = defaultdict(list)
        self.counts: Counter[str] = Counter("a")
        self.queue: deque[int] = deque([1], maxlen=1)
        self.set = {1}
        self.plain = Plain()
        self.inside = [Plain()]
        self.guarded = Guarded(a=1)
        self.slotted = Slotted()
        self.itself: list[Any] = [1]
        self.itself.append(self.itself)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.first(x)
            if self.scale is not None:
                h = h * self.scale(self)
            self.note(self)
        with piper.annotate("PP", 1):
            return (self.second(h) - y).square().mean()

    def noted(self) -> list[Any]:
        """A copy of all that may be changed."""
        mine = [self.calls, self.list, self.table, self.ordered, self.many, self.counts]
        more = [self.queue, self.set, vars(self.plain), vars(self.inside[0])]
        slots = self.slotted.calls, hasattr(self.slotted, "later"), len(self.itself)
        return copy.deepcopy([*mine, *more, dict(self.guarded), *slots, LIST, TABLE])


NOTES: dict[str, Callable[[Any], object]] = {
    "self.calls": lambda m: setattr(m, "calls", m.calls + 1),
    "self.list": lambda m: m.list.append(1),
    "self.table": lambda m: m.table.update(a=2),
    "self.table['list']": lambda m: m.table["list"].append(3),
    "self.ordered": lambda m: m.ordered.update(c=3),
    "self.many": lambda m: m.many["a"].append(1),
    "self.counts": lambda m: m.counts.update(b=1),
    "self.queue": lambda m: m.queue.append(2),
    "self.set": lambda m: m.set.add(2),
    "self.plain": lambda m: setattr(m.plain, "calls", 1),
    "self.inside[0].list": lambda m: m.inside[0].list.append(1),
    "self.guarded": lambda m: m.guarded.__setitem__("b", 2),
    "self.slotted": lambda m: setattr(m.slotted, "calls", m.slotted.calls + 1),
    "self.itself": lambda m: m.itself.append(2),
    "LIST": lambda m: LIST.append(1),
    "TABLE": lambda m: TABLE.update(calls=TABLE["calls"] + 1),
    "TABLE['of']['set']": lambda m: TABLE["of"]["set"].add(1),
}


@pytest.mark.parametrize("where", NOTES)
def test_looking_changes_nothing_and_tells(where: str) -> None:
    """By each of the ways to look; again, where Dynamo has traced it already."""
    model = Noting(NOTES[where])
    before = model.noted()
    with pytest.warns(UserWarning, match="forward changes ") as told:
        piper.plan(model, jobs.strategy(LINE2, 2), rows(4, 0), 2)
    assert where in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        piper.plan(model, jobs.strategy(LINE2, 1), rows(4, 0), 2)
        piper.plan(Noting(NOTES[where]), jobs.strategy(LINE2, 2), rows(4, 0), 2)
        assert piper.doctor(model, rows(4, 0)).is_fine
    assert model.noted() == before


def test_what_forward_makes_itself_is_not_told() -> None:
    def note(module: Any) -> None:
        made = [module.calls]
        made.append(2)
        {"a": made}["a"].clear()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        piper.plan(Noting(note), jobs.strategy(LINE2, 2), rows(4, 0), 2)


def first_is_other(module: Any) -> float:
    return 1.0 if module.list or LIST else 3.0


@pytest.mark.parametrize("where", ["self.list", "LIST"])
def test_the_first_call_is_the_first_that_trains(where: str) -> None:
    """One microbatch, so that eager calls the model as often."""
    batches = [rows(4, k) for k in range(3)]

    def losses(step: Any, params: Any) -> list[float]:
        optimizer = torch.optim.SGD(params, lr=0.01)
        found = []
        for batch in batches:
            loss = step(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def rank() -> list[float]:
        strategy = jobs.strategy({0: [0], 1: [0]}, 1)
        step = piper.compile(Noting(NOTES[where], first_is_other), strategy, batches[0])
        return losses(step, piper.parameters(step))

    def alone(model: Noting) -> list[float]:
        LIST.clear()
        return losses(model, list(model.parameters()))

    want = alone(Noting(NOTES[where], first_is_other))
    assert want[0] != pytest.approx(alone(Noting(NOTES[where]))[0])  # the first call is another
    LIST.clear()
    with pytest.warns(UserWarning, match="forward changes "):
        (got,) = piper.launch(rank, 1, engine="inprocess")
    LIST.clear()
    assert got == pytest.approx(want, rel=1e-12)
