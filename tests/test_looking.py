"""A model is captured once for all strategies, and again where it has changed."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.parametrizations import weight_norm

import piper_dynamo as piper
from piper_dynamo import looking, planning
from piper_dynamo.lowering import chunks
from piper_dynamo.planning import Plan
from tests import jobs
from tests.jobs import LINE2, LINE4, LOOP2, V2
from tests.models import Stack4, rows

Change = Callable[["Net"], Any]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what other tests captured; what passes do is not looked at here."""
    monkeypatch.setenv("PIPER_VERIFY", "1")
    monkeypatch.setattr(planning, "_templates", {})
    torch._dynamo.reset()


class Counted:
    """How often Dynamo handed a call over, and how often one microbatch was traced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures = self.traces = 0
        read, trace = looking.read_call, planning.capturing.trace

        def captured(*args: Any) -> Any:
            self.captures += 1
            return read(*args)

        def traced(*args: Any, **kwargs: Any) -> Any:
            self.traces += 1
            return trace(*args, **kwargs)

        monkeypatch.setattr(looking, "read_call", captured)
        monkeypatch.setattr(planning.capturing, "trace", traced)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def said(plan: Plan) -> tuple[Any, ...]:
    """All that a plan says, down to what chunks compute."""
    keys = {name: chunk.key for name, chunk in plan.chunks.items()}
    programs = [str(program) for program in plan.programs]
    return plan.fingerprint(), plan.graph, plan.summary(), keys, programs


def anew(make: Callable[[], Plan]) -> Plan:
    """The plan, with nothing of what was captured before."""
    torch._dynamo.reset()
    planning._templates.clear()
    return make()


def test_other_strategies_take_what_was_captured(counted: Counted) -> None:
    model, batch = Stack4(4), rows(8)
    wanted = [
        *(jobs.strategy(LINE4, 4, name) for name in ("gpipe", "one_f_one_b", "zb_h1")),
        jobs.strategy(V2, 4, "zbv"),
        jobs.strategy(LOOP2, 4, "interleaved_1f1b"),
        jobs.strategy(LOOP2, 1, "gpipe"),
        jobs.strategy(LOOP2, 2, "gpipe"),
    ]
    plans = [piper.plan(model, one, batch) for one in wanted]
    assert counted.captures == 1
    assert counted.traces == 3  # of a microbatch of 2 rows, of 8, and of 4
    assert len({plan.fingerprint() for plan in plans}) == len(plans)
    for one, plan in [*zip(wanted, plans, strict=True)][1::2]:
        assert said(plan) == said(anew(lambda one=one: piper.plan(model, one, batch)))


def test_stages_search_and_plans_share_a_capture(counted: Counted) -> None:
    def roofline(found: Any) -> piper.Costs:
        return piper.Costs.roofline(found, flops=1e9, memory_bandwidth=1e9)

    model, batch = Plain(), rows(8)
    regions = piper.auto_stages(model, batch, 2)
    found = piper.search(model, batch, 2, costs=roofline, schedules=("gpipe",), top=1)
    plan = piper.plan(model, found.best[0].strategy, batch, 2)
    assert counted.captures == 1
    assert plan.world_size == 2
    assert regions


class Plain(nn.Module):
    """Two layers without tags."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - y).square().mean()


def test_tags_of_one_strategy_are_not_those_of_the_next(counted: Counted) -> None:
    model, batch = Plain(), rows(8)
    patterns: list[dict[str, dict[str, int]]] = [
        {"layers.0": {"PP": 0}, "layers.1": {"PP": 1}},
        {"layers.*": {"PP": 0}},
        {"layers.1": {"PP": 0}, "layers.0": {"PP": 1}},
    ]

    def planned(regions: Any) -> Plan:
        stages = {tags["PP"] for tags in regions.values()}
        return piper.plan(
            model,
            piper.Strategy(
                piper.Split({}, num_microbatches=2),
                *(piper.Place({"PP": stage}, [stage]) for stage in stages),
                regions=regions,
            ),
            batch,
        )

    plans = [planned(regions) for regions in (*patterns, patterns[0])]
    assert counted.captures == 1
    assert said(plans[0]) == said(plans[-1])
    for regions, plan in zip(patterns, plans, strict=False):
        assert said(plan) == said(anew(lambda regions=regions: planned(regions)))
    with pytest.raises(piper.PiperError, match="nothing is placed"):
        piper.plan(model, piper.Strategy(piper.Split({}, num_microbatches=2)), batch, 2)


class Two(nn.Module):
    """Two losses, of which the strategy names one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.layer(x)
        return {"near": (out - y).square().mean(), "far": (out - y).abs().sum()}


def test_each_strategy_has_its_loss(counted: Counted) -> None:
    model, batch = Two(), rows(8)
    kinds = {}
    for name in ("near", "far", "near"):
        plan = piper.plan(model, piper.Strategy(loss=name), batch)
        kinds.setdefault(name, []).append(plan.fingerprint())
        assert plan.dag.loss == ("near", "far").index(name)
    assert counted.captures == 1
    assert kinds["near"][0] == kinds["near"][1] != kinds["far"][0]


def test_batch_sizes_that_are_numbers_are_made_symbols_once(counted: Counted) -> None:
    """Dims beside the first are symbols for strategies that slice them alone."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[1]
            return (self.layer(x.T).reshape(size, 4) ** 2).mean()

    def planned(microbatches: int) -> Plan:
        split = piper.Split({}, num_microbatches=microbatches, inputs={"x": 1})
        return piper.plan(model, piper.Strategy(split), batch)

    model, batch = Turned(), (torch.zeros(4, 8, dtype=torch.float64),)
    plans = [planned(1), planned(2)]
    before = counted.captures
    plans += [planned(4), planned(1), planned(2)]
    assert counted.captures == before
    assert said(plans[1]) == said(plans[4]) != said(plans[2])
    assert said(plans[1]) == said(anew(lambda: planned(2)))


def test_errors_name_the_lines_of_their_own_strategy() -> None:
    model, batch = Stack4(2), rows(8)
    piper.plan(model, jobs.strategy(LINE2, 2), batch)
    for microbatches in (3, 5):
        split = piper.Split({}, num_microbatches=microbatches)
        wanted = piper.Strategy(split, *jobs.places(LINE2))
        text = jobs.refusal(lambda wanted=wanted: piper.plan(model, wanted, batch))
        jobs.mentions(text, split.where, f"{microbatches} microbatches do not divide")
    wanted = piper.Strategy(*jobs.places(LINE2), regions={"nowhere": {"PP": 0}})
    jobs.mentions(jobs.refusal(lambda: piper.plan(model, wanted, batch)), "'nowhere'")


def test_a_model_on_meta_is_captured_once(counted: Counted) -> None:
    with torch.device("meta"):
        model = Net()
    batch = tuple(torch.empty(8, 4, device="meta") for _ in range(2))
    plans = [piper.plan(model, jobs.strategy(LINE2, 2, name), batch) for name in ("gpipe", "zb_h1")]
    assert counted.captures == 1
    assert all(parameter.is_meta for parameter in model.parameters())
    assert plans[0].fingerprint() != plans[1].fingerprint()


def steps(schedule: str) -> None:
    step = piper.compile(Stack4(4), jobs.strategy(V2, 4, schedule), example_inputs=rows(8))
    step(*rows(8)).backward()


def test_equal_chunks_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of another strategy run the chunks that are there."""
    monkeypatch.setattr(chunks, "_compiled", {})
    jobs.run_ranks(lambda: steps("gpipe"), 2)
    before = set(chunks._compiled)
    assert before
    jobs.run_ranks(lambda: steps(""), 2)
    assert set(chunks._compiled) == before


# A model that has changed.


def scaled(value: Tensor) -> Tensor:
    return value * 2.0


class Factor:
    """A plain object that a module holds."""

    def by(self, value: Tensor) -> Tensor:
        return value * 2.0


class Summand:
    """One that is held in a list in a dict."""

    def to(self, value: Tensor, *, is_more: bool = True) -> Tensor:
        return value + 1.0 if is_more else value - 2.0


class Net(nn.Module):
    """Something of each kind that a call of a model depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.drop = nn.Tanh(), nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(4))
        self.kind, self.parts = "mean", [1, 2]
        self.factor, self.held = Factor(), {"all": [Summand()]}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.drop(self.act(self.a(x))) + self.shift
            h = self.held["all"][0].to(self.factor.by(h + scaled(torch.ones(4))))
        with piper.annotate("PP", 1):
            h = self.finish(self.b(h)[:, None, None]).flatten(1)
            loss = (h - y).square()
            return loss.mean() if self.kind == "mean" else loss.sum()

    def finish(self, h: Tensor, is_even: bool = True) -> Tensor:
        return scaled_dot_product_attention(h, h, h) * (len(self.parts) if is_even else 3)


def batch() -> tuple[Tensor, Tensor]:
    return torch.zeros(8, 4), torch.zeros(8, 4)


def hooked(model: Net) -> Any:
    return model.act.register_forward_hook(lambda one, given, out: out * 3)


def frozen(model: Net) -> None:
    model.a.weight.requires_grad_(False)


def evaluated(model: Net) -> None:
    model.eval()


def evaluated_in_part(model: Net) -> None:
    model.drop.eval()


def with_another_forward(model: Net) -> None:
    model.a.forward = lambda x: x + model.a.weight.sum()  # type: ignore[method-assign]


def with_another_function(model: Net) -> None:
    model.finish = lambda h: h.sin()  # type: ignore[method-assign]


def tied(model: Net) -> None:
    model.b.weight = model.a.weight


def with_another_buffer(model: Net) -> None:
    model.shift = torch.zeros(1, 4)


def with_another_layer(model: Net) -> None:
    model.act = nn.ReLU()


def with_a_parameter_less(model: Net) -> None:
    model.b.bias = None


def in_another_dtype(model: Net) -> None:
    model.double()


def parametrized(model: Net) -> None:
    weight_norm(model.a)


def with_another_text(model: Net) -> None:
    model.kind = "sum"


def with_a_longer_list(model: Net) -> None:
    model.parts.append(3)


def with_another_layout(model: Net) -> None:
    model.b.weight = nn.Parameter(model.b.weight.detach().T.contiguous().T)


CHANGES: list[Change] = [frozen, evaluated, with_another_forward, tied, with_another_buffer, hooked]
MORE: list[Change] = [
    *(evaluated_in_part, with_another_function, with_another_layer, with_a_parameter_less),
    *(in_another_dtype, parametrized, with_another_text, with_a_longer_list, with_another_layout),
]


def planned(model: Net, around: AbstractContextManager[Any] | None = None) -> Plan:
    given = tuple(v.to(model.a.bias.dtype) for v in batch())
    with around or nullcontext():
        return piper.plan(model, jobs.strategy(LINE2, 2), given)


@pytest.mark.parametrize(
    "change",
    [*CHANGES, *(pytest.param(change, marks=pytest.mark.slow) for change in MORE)],
    ids=lambda change: change.__name__,
)
def test_a_model_that_has_changed_is_captured_again(change: Change, counted: Counted) -> None:
    model = Net()
    before = said(planned(model))
    assert (said(planned(model)), counted.captures) == (before, 1)
    change(model)
    after = said(planned(model))
    assert counted.captures == 2
    assert after != before
    assert after == said(anew(lambda: planned(model)))


@pytest.mark.parametrize(
    "change",
    [hooked, *(pytest.param(c, marks=pytest.mark.slow) for c in (frozen, tied, evaluated))],
    ids=lambda change: change.__name__,
)
def test_a_change_that_is_taken_back_is_seen(change: Change, counted: Counted) -> None:
    model = Net()
    weight = model.b.weight
    handle = change(model)
    before = said(planned(model))
    if handle is not None:
        handle.remove()
    model.train()
    model.a.weight.requires_grad_(True)
    model.b.weight = weight
    after = said(planned(model))
    assert counted.captures == 2
    assert after != before
    assert after == said(anew(lambda: planned(model)))


FUNCTIONS: dict[str, tuple[Any, str, Any]] = {
    "a class's forward": (nn.Tanh, "forward", lambda self, x: x.sin()),
    "a class's function": (Net, "finish", lambda self, h: h.cos()),
    "an object's function": (Factor, "by", lambda self, value: value * 3.0),
    "an object's in a list": (Summand, "to", lambda self, value: value - 1.0),
    "a default": (Net.finish, "__defaults__", (False,)),
    "a named default": (Summand.to, "__kwdefaults__", {"is_more": False}),
}
QUICK = ("a class's function", "an object's function")


@pytest.mark.parametrize(
    "which",
    [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in FUNCTIONS],
)
def test_functions_of_classes_that_were_replaced_are_seen(
    which: str, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    before = said(planned(model))
    monkeypatch.setattr(*FUNCTIONS[which])
    after = said(planned(model))
    assert counted.captures == 2
    assert after != before
    assert after == said(anew(lambda: planned(model)))


class Slotted:
    """Callable, and nothing tells when it is gone."""

    __slots__ = ()

    def __call__(self, value: Tensor) -> Tensor:
        return value


def test_what_has_no_weak_references_does_not_capture_anew(counted: Counted) -> None:
    model = Net()
    model.called = Slotted()
    before = said(planned(model))
    assert (said(planned(model)), counted.captures) == (before, 1)
    model.called = Slotted()
    planned(model)
    assert counted.captures == 2


def test_a_global_function_that_was_replaced_is_seen(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    before = said(planned(model))
    monkeypatch.setitem(globals(), "scaled", lambda value: value.exp())
    after = said(planned(model))
    assert counted.captures == 2
    assert after != before
    assert after == said(anew(lambda: planned(model)))


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "a kernel": lambda: sdpa_kernel(SDPBackend.MATH),
}


@pytest.mark.parametrize(
    "name", ["autocast", "a kernel", pytest.param("no gradients", marks=pytest.mark.slow)]
)
def test_settings_that_change_a_trace_are_seen(name: str, counted: Counted) -> None:
    model, around = Net(), SETTINGS[name]
    before = said(planned(model))
    after = said(planned(model, around()))
    assert counted.captures == 2
    assert after != before
    assert said(planned(model)) == before
    assert counted.captures == 2  # both are kept
    assert after == said(anew(lambda: planned(model, around())))


@pytest.mark.slow
def test_the_default_dtype_is_seen(counted: Counted) -> None:
    model = Net()
    before = said(planned(model))
    torch.set_default_dtype(torch.float64)
    try:
        after = said(planned(model))
        assert counted.captures == 2
        assert after != before
        assert after == said(anew(lambda: planned(model)))
    finally:
        torch.set_default_dtype(torch.float32)


def test_sizes_of_inputs_that_are_not_split_are_seen(counted: Counted) -> None:
    """Another batch takes the capture, another width does not."""

    def of(rows: int, width: int) -> Plan:
        table = torch.zeros(width)
        inputs = {"table": "replicate"}
        split = piper.Split({}, num_microbatches=2, inputs=inputs)
        return piper.plan(model, piper.Strategy(split), (torch.zeros(rows, 4), table))

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return (self.layer(x) * table).square().mean()

    model = Table()
    sizes = [(8, 4), (16, 4), (8, 1)]
    plans = [of(*size) for size in sizes]
    assert counted.captures == 2
    for size, plan in zip(sizes, plans, strict=True):
        assert said(plan) == said(anew(lambda size=size: of(*size)))


def test_another_model_of_a_class_is_planned_by_what_it_holds(counted: Counted) -> None:
    one, other = Net(), Net()
    frozen(other)
    plans = [planned(one), planned(other)]
    assert said(plans[1]) == said(anew(lambda: planned(other))) != said(plans[0])


def test_without_looking_a_hook_would_be_missed(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: Dynamo's guards alone take what was captured without the hook."""
    monkeypatch.setattr(looking, "seen", lambda model: ())
    model = Net()
    before = said(planned(model))
    hooked(model)
    assert said(planned(model)) == before
    assert said(anew(lambda: planned(model))) != before


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, more: list[Tensor] | None) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.first(x + y)
        with piper.annotate("PP", 1):
            return (h if more is None else h + more[0]).square().mean()


def test_a_tensor_given_twice_where_another_is_no_longer_given() -> None:
    """Dynamo must trace it anew; torch fails to say why (pytorch issue 176211)."""
    model, (x, y, z) = Optional(), (torch.ones(4, 4) for _ in range(3))
    strategy = jobs.strategy(LINE2, 2)
    assert len(piper.plan(model, strategy, (x, y, [z]), 2).programs) == 2
    assert len(piper.plan(model, strategy, (x, x, None), 2).programs) == 2


class Scaled(nn.Module):
    def __init__(self, scale: float, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.scale = nn.Linear(4, 4), nn.Dropout(p), scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.first(x) * self.scale
        with piper.annotate("PP", 1):
            return (self.drop(h) - y).square().mean()


def test_models_of_a_class_may_have_other_numbers() -> None:
    """Dynamo makes an argument of a float that was another one before; it is each model's own."""
    batch = (torch.ones(4, 4), torch.zeros(4, 4))
    strategy = jobs.strategy(LINE2, 2)

    def loss(scale: float) -> Tensor:
        torch.manual_seed(0)
        return piper.compile(Scaled(scale), strategy, batch)(*batch).detach()  # type: ignore[no-any-return]

    one, two, three = (jobs.run_ranks(lambda k=k: loss(k), 2)[0] for k in (1.0, 2.0, 3.0))
    torch.testing.assert_close(torch.stack([two, three]), torch.stack([4 * one, 9 * one]))
    for p in (0.1, 0.2, 0.3):
        assert piper.plan(Scaled(1.0, p), strategy, batch, 2).programs
