"""Looking at a model, and refusing it, leaves nothing behind, whatever the model holds."""

import dataclasses
import functools
import gc
import random
import time
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import examination
from piper_dynamo.garbage import resting_collector, young_collector
from piper_dynamo.recording import memory_of
from piper_dynamo.restoring import Kept, unchanged
from piper_dynamo.seen import seen
from tests import jobs

X = torch.ones(4, 4)


def strategy(num_microbatches: int = 1, **more: Any) -> piper.Strategy:
    """One rank."""
    split = piper.Split({}, num_microbatches=num_microbatches)
    return piper.Strategy(split, piper.Place({}, devices=[0]), **more)


class Net(nn.Module):
    """A layer, and whatever else forward does."""

    def __init__(self, also: Callable[["Net"], object] = lambda net: None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.also = also

    def forward(self, x: Tensor) -> Tensor:
        self.also(self)
        return self.layer(x).sum()


def plan(model: nn.Module, inputs: Any = (X,)) -> None:
    """Look at it; what it changes is told elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        piper.plan(model, strategy(), inputs)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


@pytest.mark.parametrize("look", [plan, lambda model: piper.doctor(model, (X,))])
def test_a_lazy_module_has_its_shape_from_then_on(look: Callable[[nn.Module], object]) -> None:
    model = Lazy()
    look(model)
    assert model.layer.in_features == 4
    assert not model.layer._forward_pre_hooks
    assert model(X).isfinite()


class Late(nn.Module):
    """Makes a part in its first call, outside of any graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.make()
        return self.late(x).sum()

    @torch.compiler.disable
    def make(self) -> None:
        if "late" not in self._modules:
            self.late = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))


def test_doctor_leaves_no_parts_that_a_first_call_makes() -> None:
    model = Late()
    assert not piper.doctor(model, (X,)).is_fine
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
    model(X)


def counts(net: Net) -> None:
    net.calls = getattr(net, "calls", 0) + 1  # type: ignore[assignment]


@pytest.mark.parametrize("also", [lambda net: None, counts])
def test_a_model_that_was_looked_at_is_let_go(also: Callable[[Net], object]) -> None:
    model = Net(also)
    plan(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Node:
    """Holds itself."""

    def __init__(self, number: int) -> None:
        self.me, self.number = self, number


class Odd:
    """What cannot be compared."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError("cannot compare")


def new_node(net: Net) -> None:
    node = Node.__new__(Node)
    node.me, node.number = node, 1
    net.held = node  # type: ignore[assignment]


def no_odd(net: Net) -> None:
    net.held = 1  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("held", "also"),
    [
        pytest.param(Node(0), new_node, id="holds itself"),
        pytest.param(Odd(), no_odd, id="cannot be compared"),
        pytest.param(random.SystemRandom(), lambda net: None, id="has no state"),
    ],
)
def test_objects_of_every_kind(held: Any, also: Callable[[Net], object]) -> None:
    model = Net(also)
    model.held = held
    plan(model)
    assert model.held is held


def hooked() -> nn.Module:
    """A hook takes the dict apart."""
    model = Both()
    model.register_forward_pre_hook(lambda _, args: (args[0]["a"], args[0]["b"]))
    return model


def unpacked(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Takes a dict apart."""

    @functools.wraps(forward)
    def from_dict(self: Any, batch: dict[str, Tensor]) -> Tensor:
        return forward(self, batch["a"], batch["b"])

    return from_dict


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(a + b).sum()


class Decorated(Both):
    forward = unpacked(Both.forward)  # type: ignore[assignment]


@pytest.mark.parametrize("build", [hooked, Decorated])
def test_what_is_given_to_forward_may_be_other_than_the_inputs(
    build: Callable[[], nn.Module],
) -> None:
    model, given = build(), {"a": X, "b": X}
    assert model(given).isfinite()
    plan(model, (given,))


def test_control_inputs_that_forward_does_not_take() -> None:
    with pytest.raises(piper.PiperCaptureError, match="cannot be called"):
        plan(Both(), ({"a": X, "b": X},))


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(4, 4).sum()


def test_a_refused_call_leaves_no_marks_on_its_inputs() -> None:
    x = X.clone()
    step: Any = torch.compile(Fixed(), backend="piper", options={"strategy": strategy(2)})
    with pytest.raises(Exception, match="baked into the model"):
        step(x)
    assert not vars(x)


def test_doctor_takes_no_fault_of_pipers_for_one_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = compile("def look(*a, **k): raise AssertionError('ours')", examination.__file__, "exec")
    found: dict[str, Any] = {}
    exec(code, found)
    monkeypatch.setattr(examination, "look", found["look"])
    with pytest.raises(AssertionError, match="ours"):
        piper.doctor(Net(), (X,))

    def theirs(*_args: Any, **_named: Any) -> None:
        raise AssertionError("torch's")

    monkeypatch.setattr(examination, "look", theirs)
    jobs.mentions(str(piper.doctor(Net(), (X,))), "cannot be captured", "torch's")


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor


class WithOutput(Net):
    def forward(self, x: Tensor) -> Any:
        logits = self.layer(x)
        return Output(logits.sum(), logits)


def test_what_a_dataclass_has_is_listed() -> None:
    with pytest.raises(piper.PiperCaptureError, match="loss, logits"):
        piper.plan(WithOutput(), strategy(loss="los"), (X,))
    assert piper.plan(WithOutput(), strategy(loss="loss"), (X,)).dag.loss is not None


def test_deques_have_their_values_at_once() -> None:
    with piper.deferred_init():
        model = Net()
        model.held = deque([torch.ones(3)])
    assert memory_of(model.held[0]) is None


class Peer(nn.Module):
    peers: list["Peer"]


def together(size: int) -> nn.ModuleList:
    """Modules that all hold a list of all."""
    peers = [Peer() for _ in range(size)]
    for one in peers:
        one.peers = peers
    return nn.ModuleList(peers)


def many(size: int) -> None:
    with piper.deferred_init():
        nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(size)])


def looked_at(size: int) -> None:
    model = together(size)
    seen(model)
    with unchanged(model):
        pass


@pytest.mark.parametrize(("run", "size"), [(looked_at, 400), (many, 400)], ids=["peers", "many"])
def test_time_follows_what_there_is(run: Callable[[int], None], size: int) -> None:
    """Four times as much takes far less than the square of it longer."""

    def least(count: int) -> float:
        took = []
        for _ in range(3):
            begin = time.process_time()
            run(count)
            took.append(time.process_time() - begin)
        return min(took)

    run(size)  # warm
    assert least(4 * size) < 9 * least(size) + 0.2


class Stops(Late):
    """Is stopped by its user, outside of any graph."""

    @torch.compiler.disable
    def make(self) -> None:
        with torch.no_grad():
            self.layer.weight.add_(1)
        self.stopped = True
        raise KeyboardInterrupt


def test_doctor_that_is_stopped_leaves_the_model_as_it_was() -> None:
    model = Stops()
    before = model.layer.weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        piper.doctor(model, (X,))
    torch.testing.assert_close(model.layer.weight, before, rtol=0, atol=0)
    assert not hasattr(model, "stopped")


def test_what_cannot_be_put_back_hinders_nothing_else() -> None:
    class Broken:
        def __hash__(self) -> int:
            if self.is_broken:
                raise TypeError("broken")
            return 1

        is_broken = False

    key, other = Broken(), [1]
    kept = Kept()
    kept.content({key: 1})
    kept.content(other)
    key.is_broken = True
    other.append(2)
    with pytest.raises(TypeError, match="broken"):
        kept.restore()
    assert other == [1]


def test_dicts_that_did_not_change_are_not_touched() -> None:
    """Their order and their content come back; other threads may be reading what is the same."""
    same: OrderedDict[str, int] = OrderedDict(a=1, b=2)
    other: OrderedDict[str, int] = OrderedDict(a=1, b=2, c=3)
    kept = Kept()
    kept.content(same)
    kept.content(other)
    entries = iter(same)
    next(entries)
    other["a"], other["d"] = 5, 4
    del other["b"]
    other["b"] = 2
    other.move_to_end("a")
    kept.restore()
    assert next(entries) == "b"  # an iterator says so where a dict was filled again
    assert list(other.items()) == [("a", 1), ("b", 2), ("c", 3)]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"strategy": strategy(), "num_microbatches": 2}, "without a strategy"),
        ({"num_microbatches": -7}, "give a number >= 1"),
    ],
)
def test_doctor_ignores_no_number_of_microbatches(more: dict[str, Any], words: str) -> None:
    with pytest.raises(piper.PiperError, match=words):
        piper.doctor(Net(), (X,), **more)


def test_prepare_runs_nothing_of_a_step_without_a_strategy() -> None:
    model = nn.BatchNorm1d(4)
    with pytest.raises(piper.PiperError, match="and a strategy"):
        piper.prepare(torch.compile(model, backend="piper"), X)
    assert model.num_batches_tracked == 0


def test_the_collector_of_a_user_who_switched_it_off_stays_off() -> None:
    with resting_collector():
        pass
    gc.disable()
    try:
        with young_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
