"""What forward does to Python's objects is not done by looking at the model; who trains is told."""

import copy
import threading
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
COUNT = 0
OWN = threading.local()
OWN.calls = 0
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

    made = 0

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls
        self.list: list[int] = []


class Closed:
    """A function that counts in a variable of its closure, and one that reads it."""

    def __init__(self) -> None:
        number = 0

        def count(_module: Any) -> None:
            nonlocal number
            number += 1

        self.count, self.read = count, lambda: number


CLOSED = Closed()


def count_globally() -> None:
    """As functions of the model's own file do."""
    global COUNT
    COUNT += 1


class Noting(nn.Module):
    """Two stages; the first notes something, and may read it."""

    classwide = 0

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
        self.pair, self.dtype, self.again = (0,), torch.float32, Plain()
        self.arrays: list[Any] = [torch.zeros(2)]
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
        arrays = [getattr(one, "shape", one) for one in self.arrays]
        others = arrays, self.pair, self.dtype, vars(self.again), self.classwide, Plain.made
        outside = COUNT, OWN.calls, CLOSED.read(), LIST, TABLE
        return copy.deepcopy([*mine, *more, dict(self.guarded), *slots, *others, *outside])


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
    "self.arrays": lambda m: m.arrays.__setitem__(0, 1),
    "self.plain": lambda m: setattr(m.plain, "calls", 1),
    "self.inside[0].list": lambda m: m.inside[0].list.append(1),
    "self.guarded": lambda m: m.guarded.__setitem__("b", 2),
    "self.slotted": lambda m: setattr(m.slotted, "calls", m.slotted.calls + 1),
    "self.itself": lambda m: m.itself.append(2),
    "self.list ": lambda m: setattr(m, "list", [*m.list, 1]),
    "self.pair": lambda m: setattr(m, "pair", (*m.pair, 1)),
    "self.dtype": lambda m: setattr(m, "dtype", torch.float64),
    "self.again": lambda m: setattr(m, "again", Plain(m.again.calls + 1)),
    "self.classwide": lambda m: setattr(m, "classwide", m.classwide + 1),
    "Plain.made": lambda m: setattr(Plain, "made", Plain.made + 1),
    "COUNT": lambda m: count_globally(),
    "OWN.calls": lambda m: setattr(OWN, "calls", OWN.calls + 1),
    "self.note.__closure__[0]": CLOSED.count,
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
    assert where.strip() in str(told[0].message)
    assert told[0].filename == __file__
    assert told[0].lineno == Noting.forward.__code__.co_firstlineno
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


@pytest.mark.filterwarnings("ignore:forward changes calls")
def test_a_variable_of_a_closure_around_the_model() -> None:
    """An int there is a symbol, whose value nobody computes where a call is looked at."""
    calls = 0

    class Counting(Noting):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x, y) * calls

    model, batch = Counting(lambda module: None), rows(4)
    strategy = jobs.strategy({0: [0], 1: [0]}, 2)
    with pytest.warns(UserWarning, match="forward changes calls: once in a step"):
        piper.plan(model, strategy, batch)
    assert calls == 0
    step = piper.compile(model, strategy, batch)
    assert calls == 0
    once = Noting.forward(model, *batch).item()
    for number in (1, 2, 3):
        assert step(*batch).item() == pytest.approx(number * once, rel=1e-12)
        assert calls == number


def test_hooks_that_a_graph_break_lets_through_are_taken_off() -> None:
    class Hooking(Noting):
        done = False

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if not self.done:
                self.done = True
                self.first.register_forward_hook(lambda module, given, out: out * 2)
            return super().forward(x, y)

    model = Hooking(lambda module: None)
    piper.doctor(model, rows(4))
    assert not model.first._forward_hooks
    assert not model.done
