"""Stages of about equal work: where models are cut, and that nothing of them is left uncounted."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.errors import PiperStrategyError
from piper_dynamo.ir.flops import total_flops
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.task import Pass, TaskName
from piper_dynamo.planning import Plan
from piper_dynamo.predict.stages import Stages, Unit, balanced, weight_of, work_of
from tests import jobs, zoo_models
from tests.models import Stack4, rows
from tests.test_search import Net, batch
from tests.zoo_models import Checkpointed, ResNet, TextLSTM, Translator, UNet


def test_stages_have_about_equal_work() -> None:
    regions = piper.auto_stages(Net(), batch(), 2)
    # 8x32 and 32x8 weigh 256 each, 8x16 and 16x8 128.
    assert regions == {f"layers.{i}": {"PP": int(i > 0)} for i in range(4)} or regions == {
        f"layers.{i}": {"PP": int(i > 1)} for i in range(4)
    }
    strategy = piper.strategies.pipeline("gpipe", ranks=2, num_microbatches=2, regions=regions)
    assert piper.plan(Net(), strategy, batch()).world_size == 2


class Nested(nn.Module):
    """All work is in modules of a module; what lies between has none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def test_a_module_with_more_than_its_share_is_taken_apart() -> None:
    regions = piper.auto_stages(Nested(), (torch.randn(2, 4),), 3)
    assert [regions[f"body.{i}"]["PP"] for i in (0, 2, 3)] == [0, 1, 2]


class Lopsided(nn.Module):
    """A large embedding without FLOPs before equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(40))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean()


def test_stages_weigh_parameters_where_work_is_about_equal() -> None:
    """The stage with the embedding has fewer layers, by at most 5 % of the work of the others."""
    ids = (torch.arange(8).view(2, 4),)
    stages = piper.auto_stages(Lopsided(), ids, 2)
    assert [len(found) for found in stages.units] == [20, 21]  # the embedding and 19 layers
    assert stages["layers.19"] == {"PP": 1}
    heads, first, second = str(stages).splitlines()
    assert heads.split() == ["stage", "modules", "count", "FLOPs", "share", "parameters"]
    assert first.startswith("PP 0   embed ... layers.18")
    assert (first.split()[-4:], second.split()[-4:]) == (
        ["48", "%", "36.6", "KiB"],
        ["52", "%", "5.9", "KiB"],
    )


@pytest.mark.parametrize("stages", [0, True, "2"])
def test_a_number_of_stages_is_asked_for(stages: object) -> None:
    with pytest.raises(PiperStrategyError, match="num_stages is"):
        piper.auto_stages(Net(), batch(), stages)


def test_more_stages_than_modules_are_refused() -> None:
    with pytest.raises(PiperStrategyError, match="cannot be cut into 5 stages"):
        piper.auto_stages(Net(), batch(), 5)


class Entries(nn.Module):
    """Its stages are numbered in order of entry."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


@pytest.mark.parametrize("model", [lambda: Stack4(2), Entries])
def test_stages_of_a_model_that_says_its_own_are_refused(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(PiperStrategyError, match=r"says itself what its stages are\s+stages  2"):
        piper.auto_stages(model(), rows(4), 2)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_parts_are_balanced(weights: list[int], parts: int) -> None:
    parts = min(parts, len(weights))
    units = [Unit(path=str(k), work=weight, params={}) for k, weight in enumerate(weights)]
    sizes = balanced(units, parts)
    assert sizes is not None
    assert sum(sizes) == len(weights)
    assert min(sizes) > 0

    def heaviest(cuts: tuple[int, ...]) -> int:
        return max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))

    cuts = tuple(itertools.accumulate(sizes))[:-1]
    every = itertools.combinations(range(1, len(weights)), parts - 1)
    assert heaviest(cuts) == min(map(heaviest, every))


def test_stages_have_no_more_parameters_than_memory() -> None:
    ids = (torch.arange(8).view(2, 4),)
    stages = piper.auto_stages(Lopsided(), ids, 2, memory=33 * 1024)
    assert [len(found) for found in stages.units] == [6, 35]  # 288 bytes a layer
    with pytest.raises(PiperStrategyError, match="no cut into 2 stages has so few parameters"):
        piper.auto_stages(Lopsided(), ids, 2, memory=30 * 1024)
    with pytest.raises(PiperStrategyError, match="no cut into 1 stages has so few parameters"):
        piper.auto_stages(Lopsided(), ids, 1, memory=33 * 1024)
    assert piper.auto_stages(Lopsided(), ids, 1, memory=44 * 1024) == {"*": {"PP": 0}}


class Late(nn.Module):
    """All products are in the layers, and all time is in what comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sorted(), Sorted()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x))
        for layer in self.layers:
            h = layer(h)
        return h.square().mean()


class Sorted(nn.Module):
    """Takes long without a product."""

    def forward(self, x: Tensor) -> Tensor:
        spread = x.repeat(256, 1)
        for _ in range(4):
            spread = spread.sort(0).values + spread.sort(0, descending=True).values
        return x + spread[: x.shape[0]]


def test_measured_time_moves_the_cut() -> None:
    x = (torch.randn(16, 64),)
    by_flops = piper.auto_stages(Late(), x, 2)
    assert [by_flops[f"layers.{k}"]["PP"] for k in range(4)] == [0, 0, 1, 1]
    by_time = piper.auto_stages(Late(), x, 2, measure=True)
    assert [[one.path for one in found] for found in by_time.units] == [
        ["first"],
        ["second", *(f"layers.{k}" for k in range(4))],
    ]
    assert str(by_time).splitlines()[0].split()[3] == "seconds"


# Nothing is left uncounted: what a stage is said to have is what its rank runs and holds.


class Head(nn.Module):
    """A head by a tied weight, in the model's own forward, with the work of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.cross_entropy((h @ self.words.weight.T).flatten(0, 1), ids.flatten())


class Between(nn.Module):
    """A module with more than a share, which also multiplies by itself, before and between."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.one(x @ self.w))
            return self.two(torch.tanh(h @ self.v))

    def __init__(self) -> None:
        super().__init__()
        self.body = self.Body()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class Again(nn.Module):
    """A product of parameters alone, which each stage that uses it computes again; dead code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 8))
        self.one, self.two, self.idle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        w = self.a @ self.b
        h = torch.tanh(self.one(x) @ w)
        return (self.two(h) @ w).square().mean()


class Written(nn.Module):
    """Results are written into one tensor, which is read after the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(16, 32))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], 16)
        one = self.one(x)
        out[:, :8] = one
        out[:, 8:] = self.two(one)
        return (out @ self.w).square().mean()


class Lent(nn.Module):
    """A module that fits a stage holds one that the model calls, too."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.inner(x))

    def __init__(self) -> None:
        super().__init__()
        self.start, self.holder, self.end = nn.Linear(8, 64), self.Holder(), nn.Linear(8, 64)
        self.back = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.holder.inner(self.back(self.start(x)))
        return self.end(self.holder(h)).square().mean()


class Masked(nn.Module):
    """Positions and a mask that are made of sizes alone; attention in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, 16), nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        size = ids.shape[1]
        h = self.words(ids) + self.places(torch.arange(size, device=ids.device))
        mask = torch.ones(size, size, dtype=torch.bool, device=ids.device).tril()
        for layer in self.layers:
            q, k, v = layer(h).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            h = h + found.transpose(1, 2).flatten(2)
        return h.square().mean()


class Recurrent(nn.Module):
    """LSTMs in float32, which a CPU runs as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.first, self.second = (nn.LSTM(8, 8, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.first(self.start(x))
        h, _ = self.second(h)
        return h.square().mean()


class Experts(nn.Module):
    """Experts by Piper's vocabulary, a module a layer."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.randn(8, 4))
            self.up, self.down = (nn.Parameter(torch.randn(4, 8, 8)) for _ in range(2))

        def forward(self, h: Tensor) -> Tensor:
            weights, index = (h @ self.gate).softmax(-1).topk(2)
            sent, routing = piper.moe.dispatch(h, index, 4)
            inner = torch.tanh(piper.moe.grouped_mm(sent, self.up, routing))
            out = piper.moe.grouped_mm(inner, self.down, routing)
            return h + piper.moe.combine(out, routing, weights)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = self.Layer(), self.Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)).square().mean()


def planned(model: nn.Module, inputs: Any, stages: Stages) -> Plan:
    """Each stage on a rank of its own, one microbatch."""
    strategy = piper.strategies.pipeline(
        "gpipe",
        ranks=len(stages.units),
        num_microbatches=1,
        regions=stages,
        loss="loss" if isinstance(model, UNet) else None,
    )
    return piper.plan(model, strategy, inputs)


def run_and_held(plan: Plan, rank: int) -> tuple[int, set[str]]:
    """FLOPs of the forwards that a rank runs, and the parameters that it holds."""
    program = plan.programs[rank]
    forwards = [
        plan.chunks[i.target]
        for i in program.instrs
        if i.op is Op.RUN and TaskName.parse(i.task).which is Pass.F
    ]
    held = {plan.args[position] for _, position in program.state}
    return (
        sum(total_flops(n for n in c.graph.nodes if n.op == "call_function") for c in forwards),
        {arg.name for arg in held if arg.kind is ArgKind.PARAMETER},
    )


def subject(model: type[nn.Module]) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (zoo_models.subject(model).build(), zoo_models.subject(model).batch(0, 0))


def of_floats(model: type[nn.Module], *shape: int) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (model(), (torch.randn(*shape),))


def of_words(model: type[nn.Module]) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (model(), (torch.arange(24).view(4, 6) % 16,))


COUNTED: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "tied head": of_words(Head),
    "between": of_floats(Between, 4, 8),
    "again": of_floats(Again, 4, 8),
    "written": of_floats(Written, 4, 8),
    "lent": of_floats(Lent, 4, 8),
    "masked": of_words(Masked),
    "recurrent": of_floats(Recurrent, 4, 5, 8),
    "experts": of_floats(Experts, 8, 8),
    "LSTM": subject(TextLSTM),
}
KINDS = (ResNet, UNet, Translator, Checkpointed, zoo_models.Nested)
SLOW = {one.__name__: subject(one) for one in KINDS}
THREE = ("tied head", "lent", "masked")  # those of three modules or more


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 2) for name in COUNTED),
        *((name, 3) for name in THREE),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name in SLOW for n in (2, 3)),
    ],
)
def test_stages_have_what_ranks_run_and_hold(name: str, count: int) -> None:
    """FLOPs and parameters of each stage, wherever in the model they are."""
    model, inputs = (COUNTED | SLOW)[name]()
    stages = piper.auto_stages(model, inputs, count)
    plan = planned(model, inputs, stages)
    for rank, units in enumerate(stages.units):
        flops, held = run_and_held(plan, rank)
        assert work_of(units) == flops, f"stage {rank}\n{stages}"
        assert {name for one in units for name in one.params} == held


def test_work_outside_of_modules_moves_the_cut() -> None:
    model, ids = COUNTED["tied head"]()
    stages = piper.auto_stages(model, ids, 2)
    assert [stages[f"layers.{k}"]["PP"] for k in range(4)] == [0, 0, 0, 1]
    assert work_of(stages.units[0]) == work_of(stages.units[1])
    words, layer = 4 * 16 * 8, 4 * (8 * 8 + 8)
    assert [weight_of(units) for units in stages.units] == [words + 3 * layer, words + layer]
    # Both stages hold the tied weight: no other cut has less than two layers beside it.
    less = piper.auto_stages(model, ids, 2, memory=words + 2 * layer)
    assert [less[f"layers.{k}"]["PP"] for k in range(4)] == [0, 0, 1, 1]
    with pytest.raises(PiperStrategyError, match="no cut into 2 stages"):
        piper.auto_stages(model, ids, 2, memory=words + 2 * layer - 1)


def test_what_each_stage_computes_again_counts_in_each() -> None:
    model, x = COUNTED["again"]()
    stages = piper.auto_stages(model, x, 2)
    again = [set(one.again) for units in stages.units for one in units]
    assert again[0] == again[1] != set()
    assert sum(map(work_of, stages.units)) == 2 * (4 * 4 * 8 * 8 + 2 * 8 * 4 * 8)
    assert "idle" not in stages
    assert piper.auto_stages(model, x, 1).units[0][0].work == 2 * (4 * 4 * 8 * 8 + 8 * 4 * 8)


class Looped(nn.Module):
    """Blocks of two layers, of which all are calls of one, as in ALBERT; or not."""

    def __init__(self, loops: int, *, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act = nn.GELU()  # of all layers
        self.shared = shared
        self.into = nn.Linear(4, 4)
        self.a = nn.ModuleList(nn.Linear(4, 4) for _ in range(1 if shared else loops))
        self.b = nn.ModuleList(nn.Linear(4, 4) for _ in range(1 if shared else loops))
        self.out = nn.Linear(4, 4)
        self.loops = loops
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.act(self.into(x))
        for k in range(self.loops):
            at = 0 if self.shared else k
            h = self.act(self.b[at](self.act(self.a[at](h))))
        return (self.out(h) - y).square().mean()


def looped_strategy(stages: Any, ranks: int) -> piper.Strategy:
    return piper.strategies.pipeline("one_f_one_b", ranks=ranks, num_microbatches=4, regions=stages)


def test_an_activation_that_layers_share_is_no_stage_of_its_own() -> None:
    """It would bring every forward back to the first stage."""
    model, batch = Looped(3, shared=False), rows(8)
    stages = piper.auto_stages(model, batch, 4)
    assert "act" not in stages
    assert {len(found) for found in stages.units} == {2}
    plan = piper.plan(model, looped_strategy(stages, 4), batch)
    assert all(region.visit == 0 for region in plan.dag.regions)


def test_a_module_that_is_used_again_is_in_one_stage_with_what_is_between() -> None:
    model, batch = Looped(3, shared=True), rows(8)
    stages = piper.auto_stages(model, batch, 3)
    assert stages == {"into": {"PP": 0}, "a.0": {"PP": 1}, "b.0": {"PP": 1}, "out": {"PP": 2}}
    plan = piper.plan(model, looped_strategy(stages, 3), batch)
    assert all(region.visit == 0 for region in plan.dag.regions)
    text = jobs.refusal(lambda: piper.auto_stages(model, batch, 4), piper.PiperStrategyError)
    jobs.mentions(text, "into; a.0, b.0; out", "used again", "piper.annotate")


def test_a_deadlock_of_a_stage_that_runs_again_says_so() -> None:
    """As patterns bring it about that match too little: `[6-11]` is one letter."""
    model, batch = Looped(3, shared=True), rows(8)
    regions = {"into": {"PP": 0}, "a.*": {"PP": 0}, "b.*": {"PP": 1}, "out": {"PP": 1}}
    text = jobs.refusal(lambda: piper.plan(model, looped_strategy(regions, 2), batch))
    jobs.mentions(text, "again", "F.PP0.MB1.v", "part 2 of its region", "test_stages.py:", "gpipe")
    by_gpipe = piper.strategies.pipeline("gpipe", ranks=2, num_microbatches=4, regions=regions)
    assert piper.plan(model, by_gpipe, batch).programs
