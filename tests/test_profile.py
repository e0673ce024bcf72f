"""Costs: rooflines, profiles, sharing a machine; what they refuse, and the text of a profile."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.errors import PiperError, PiperStrategyError
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.work import work_by_operator
from piper_dynamo.predict import measuring
from piper_dynamo.predict.profile import FEATURES, ChunkTime, Profile, features_of, fitted
from tests import jobs
from tests.models import Stack4, rows


class Attending(nn.Module):
    """A product, an attention, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, 24))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, 8] -> 0-dim."""
        q, k, v = ((x @ self.w).unflatten(-1, (3, 2, 4)).transpose(1, 3)).unbind(2)
        return F.scaled_dot_product_attention(q, k, v).square().sum()


def plan_of(model: nn.Module, inputs: tuple[Tensor, ...], **options) -> piper.Plan:
    strategy = piper.strategies.pipeline("one_f_one_b", **{"ranks": 1, **options})
    return piper.plan(model, strategy, inputs)


# Work


def test_work_is_counted_by_formulas() -> None:
    """B 2, T 3, D 8, two heads of 4: x w takes 2*6*8*24 FLOPs, each of attention's products 288."""
    found = piper.plan(Attending(), piper.Strategy(), (torch.zeros(2, 3, 8),))
    total: dict[str, int] = {}
    for name, chunk in found.chunks.items():
        for work in work_by_operator(chunk.graph):
            key = f"{name[0]} {'attention' if 'scaled' in work.name else work.name}"
            total[key] = total.get(key, 0) + work.flops
    assert total["F mm"] == total["B mm"] == 2 * 6 * 8 * 24
    one = 2 * 2 * 2 * 3 * 3 * 4
    assert total["F attention"] == 2 * one
    assert total["B attention"] == 5 * one


def test_views_do_no_work() -> None:
    found = piper.plan(Stack4(1), piper.Strategy(), rows(4))
    names = {w.name for c in found.chunks.values() for w in work_by_operator(c.graph)}
    assert not names & {"t", "view", "detach", "expand", "permute"}
    assert {"mm", "tanh"} <= names


# Rooflines


def test_a_roofline_takes_what_limits_each_operator() -> None:
    """Arithmetic without end leaves traffic, and traffic without end arithmetic."""
    found = plan_of(Stack4(1), rows(4), num_microbatches=2)
    sums = {"flops": 0.0, "nbytes": 0.0}
    for program in found.programs:
        for instr in (i for i in program.instrs if i.op is Op.RUN):
            for work in work_by_operator(found.chunks[instr.target].graph):
                sums["flops"] += work.flops
                sums["nbytes"] += work.nbytes
    by_flops = piper.Costs.roofline(found.chunks, flops=10.0, memory_bandwidth=math.inf)
    by_bytes = piper.Costs.roofline(found.chunks, flops=math.inf, memory_bandwidth=10.0)
    assert found.simulate(by_flops).makespan == pytest.approx(sums["flops"] / 10)
    assert found.simulate(by_bytes).makespan == pytest.approx(sums["nbytes"] / 10)


def test_links_take_alpha_beta_and_skew() -> None:
    strategy = piper.strategies.pipeline("gpipe", ranks=2, num_microbatches=1)
    found = piper.plan(Stack4(2), strategy, rows(4))
    costs = piper.Costs.roofline(
        found.chunks, flops=math.inf, memory_bandwidth=math.inf, alpha=3.0, bandwidth=128.0
    )
    # There and back 4 x 4 numbers of 8 bytes, which take 1 each; before it comes back, the loss.
    assert found.simulate(costs).makespan == pytest.approx(3 + 1 + 3 + 1 + 8 / 128)
    summed = piper.strategies.pipeline("gpipe", ranks=1, num_microbatches=1, replicas=2)
    plan = piper.plan(Stack4(1), summed, rows(4))
    free = {"F": 0.0, "BI": 0.0, "BW": 0.0}
    assert plan.simulate(piper.Costs(**free, comm=1.0, skew=2.0)).makespan == 3.0
    # One reduction has the gradients of all four weights, and one, over the same link, the loss.
    assert plan.simulate(piper.Costs(**free, per_value=1.0)).makespan == 4.0 + 1.0
    ordered = piper.Costs(comm=1.0, bandwidth=1e3, skew=1.0, per_value=1.0)
    other = piper.plan(Stack4(1), summed, rows(4), costs=ordered)
    assert other.simulate(ordered).makespan > plan.simulate(piper.Costs()).makespan


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, -1.0)])
def test_rates_are_above_0(rates: tuple[float, float]) -> None:
    with pytest.raises(PiperStrategyError, match="above 0"):
        piper.Costs.roofline({}, flops=rates[0], memory_bandwidth=rates[1])


# Costs


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"skew": -1.0}, "skew is -1.0"),
        ({"call": math.inf}, "call is inf"),
        ({"host": {Op.SEND: -1.0}}, "host of send is -1.0"),
        ({"host": {"sned": 1.0}}, "host names 'sned'"),
        ({"host_byte": {Op.ALL_GATHER: -1.0}}, "host_byte of all_gather is -1.0"),
        ({"slowdown": (1.0, 0.5)}, "give factors of at least 1"),
        ({"chunks": {}, "of": lambda name: 1.0}, "give one"),
    ],
)
def test_costs_that_cannot_be(options: dict, text: str) -> None:
    with pytest.raises(PiperStrategyError, match=text):
        piper.Costs(**options)


def test_costs_by_chunk_know_all_chunks() -> None:
    with pytest.raises(PiperStrategyError, match=r"say nothing of some.*\n.*F\.PP0\.MB0"):
        plan_of(Stack4(1), rows(4), num_microbatches=1).simulate(piper.Costs(chunks={}))


def test_host_and_call_take_time() -> None:
    found = plan_of(Stack4(1), rows(4), num_microbatches=2)
    slices = sum(i.op is Op.SLICE for i in found.programs[0].instrs)
    costs = piper.Costs(F=0, BI=0, BW=0, host={Op.SLICE: 0.5}, call=2.0)
    assert found.simulate(costs).makespan == 2.0 + 0.5 * slices


def test_collectives_take_the_host_by_value_and_byte() -> None:
    strategy = piper.strategies.pipeline("gpipe", ranks=1, num_microbatches=1, replicas=2, zero=3)
    found = piper.plan(Stack4(1), strategy, rows(4))
    gathers = [i for i in found.programs[0].instrs if i.op is Op.ALL_GATHER]
    values = sum(len(i.specs) for i in gathers)
    nbytes = sum(spec.nbytes for i in gathers for spec in i.specs)
    assert values > len(gathers)
    free = {"F": 0.0, "BI": 0.0, "BW": 0.0}
    by_value = piper.Costs(**free, host={Op.ALL_GATHER: 1.0}, host_value={Op.ALL_GATHER: 0.5})
    assert found.simulate(by_value).makespan == len(gathers) + 0.5 * values
    by_byte = piper.Costs(**free, host_byte={Op.ALL_GATHER: 0.25})
    assert found.simulate(by_byte).makespan == 0.25 * nbytes
    handed_over = len(found.programs[0].grads)
    assert found.simulate(piper.Costs(**free, call=1.0, call_shard=0.5)).makespan == (
        1.0 + 0.5 * handed_over
    )


def test_messages_and_sums_take_the_host_by_byte(line: piper.Plan) -> None:
    free = {"F": 0.0, "BI": 0.0, "BW": 0.0}
    sent = [i.spec.nbytes for i in line.programs[0].instrs if i.op is Op.SEND]
    by_send = line.simulate(piper.Costs(**free, host_byte={Op.SEND: 0.5, Op.POST: 0.25}))
    assert by_send.starts_of(0)[-1] >= 0.5 * sum(sent)
    strategy = piper.strategies.pipeline("gpipe", ranks=1, num_microbatches=3, replicas=2, zero=2)
    shards = piper.plan(Stack4(1), strategy, rows(6))
    half = Stack4(1).w[0].nbytes // 2  # of four weights, each added twice
    added = shards.simulate(piper.Costs(**free, host_byte={Op.ACCUMULATE: 1.0})).makespan
    assert added == 2 * 4 * half


@pytest.fixture(scope="module")
def line() -> piper.Plan:
    strategy = piper.strategies.pipeline("one_f_one_b", ranks=2, num_microbatches=4)
    return piper.plan(Stack4(2), strategy, rows(8))


def test_a_slowdown_of_one_changes_nothing(line: piper.Plan) -> None:
    alone = line.simulate(piper.Costs(comm=0.25))
    shared = line.simulate(piper.Costs(comm=0.25, slowdown=(1.0, 1.0)))
    assert shared.makespan == alone.makespan
    assert sorted(map(repr, shared.timeline.events)) == sorted(map(repr, alone.timeline.events))
    assert shared.starts == alone.starts


def test_ranks_that_share_a_machine_slow_each_other_down(line: piper.Plan) -> None:
    """Stage 0's backward has no input gradient: F 1, B 1 there and B 2 after it.

    Alone: F0 0-1, 1F1B, makespan 14. Where two take twice as long as one, no time is won by
    computing at once: the makespan is the work of both, 4 * (1 + 1) + 4 * (1 + 2).
    """
    assert line.simulate(piper.Costs(slowdown=(1.0, 2.0))).makespan == pytest.approx(20.0)
    some = line.simulate(piper.Costs(slowdown=(1.0, 1.25))).makespan
    assert line.simulate(piper.Costs()).makespan < some < 20.0


# Profiles


def times_of(plan: piper.Plan, rates: tuple[float, ...]) -> tuple[ChunkTime, ...]:
    return tuple(
        ChunkTime(
            key=chunk.key,
            features=(found := features_of(chunk)),
            seconds=sum(a * r for a, r in zip(found, rates, strict=True)),
        )
        for chunk in plan.chunks.values()
    )


RATES = (2e-9, 0.0, 0.0, 3e-9, 1e-6)


def profile_of(plan: piper.Plan) -> Profile:
    return Profile(
        machine={"processor": "one"},
        compile="aten",
        chunks=times_of(plan, RATES),
        alpha=1e-5,
        bandwidth=1e9,
        host={"send": 1e-6},
        host_value={"all_gather": 1e-6},
        slowdown=(1.0, 1.5),
    )


def test_chunks_that_were_not_measured_follow_the_rates(line: piper.Plan) -> None:
    other = piper.plan(
        Stack4(2), piper.strategies.pipeline("zb_h1", ranks=2, num_microbatches=2), rows(64)
    )
    given = profile_of(line).costs(other.chunks).chunks
    want = {time.key: time.seconds for time in times_of(other, RATES)}
    assert given == pytest.approx(want, rel=1e-6)
    assert len(want) > len(line.chunks) // 2


def test_measured_chunks_take_what_they_took(line: piper.Plan) -> None:
    found = profile_of(line)
    key = found.chunks[0].key
    changed = Profile.from_json(found.to_json().replace(str(found.chunks[0].seconds), "7.5"))
    assert changed.costs(line.chunks).chunks[key] == 7.5
    assert line.simulate(changed).makespan > 7.5


def test_fitted_rates_are_not_below_0() -> None:
    features = ((1.0, 0, 0, 2.0, 1.0), (2.0, 0, 0, 1.0, 1.0), (4.0, 0, 0, 1.0, 9.0))
    rates = fitted(features, (1.0, 3.0, 5.0))
    assert min(rates) >= 0
    assert fitted((), ()) == (0.0,) * len(FEATURES)


def test_a_profile_is_written_and_read(line: piper.Plan, tmp_path) -> None:
    found = profile_of(line)
    found.save(tmp_path / "profile.json")
    assert piper.Profile.load(tmp_path / "profile.json") == found
    assert "x 1.00, 1.50" in str(found)
    with pytest.raises(PiperError, match="the profile cannot be written"):
        found.save(tmp_path / "none" / "profile.json")


def broken(change) -> str:
    plan = piper.plan(Stack4(1), piper.Strategy(), rows(4))
    found = json.loads(profile_of(plan).to_json())
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(version=1),
        lambda f: f.pop("call"),
        lambda f: f.update(more=1),
        lambda f: f.update(alpha=-1),
        lambda f: f.update(alpha=True),
        lambda f: f.update(bandwidth="fast"),
        lambda f: f["host"].update(fly=1.0),
        lambda f: f["chunks"][0].update(features=[1, 2]),
        lambda f: f["chunks"][0].pop("key"),
        lambda f: f["machine"].update(processor=3),
        lambda f: f.update(slowdown=[None]),
    ],
)
def test_what_is_no_profile_is_refused(change) -> None:
    with pytest.raises(PiperError, match="this is no profile"):
        Profile.from_json(broken(change))


def test_files_that_hold_no_profile_are_refused(tmp_path) -> None:
    with pytest.raises(PiperError, match="no profile can be read"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(PiperError, match="this is no profile"):
        Profile.from_json("[]")


# Measuring


@pytest.mark.slow
def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, for messages and the host; few runs of small chunks."""
    keys = {c.key for c in piper.plan(Stack4(2), piper.Strategy(), rows(4)).chunks.values()}
    monkeypatch.setattr(measuring, "ENOUGH_S", 0.0)
    found = piper.profile(Stack4(2), None, rows(4), ranks=1)
    assert {chunk.key for chunk in found.chunks} == keys
    assert all(0 < chunk.seconds < 1 for chunk in found.chunks)
    assert found.bandwidth is not None
    assert found.bandwidth > 1e6
    assert 0 < found.alpha < 0.1
    assert {"send", "post", "slice", "all_gather"} <= set(found.host)
    assert min(found.host_value.values()) >= 0
    assert set(found.host_value) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert found.call > 0
    assert Profile.from_json(found.to_json()) == found
    plan = plan_of(Stack4(1), rows(8), num_microbatches=2)
    assert plan.simulate(found).makespan > 0


def test_other_devices_than_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on a GPU return before they are done: nothing is measured, and no process started."""
    made = piper.plan(Stack4(2), jobs.strategy(jobs.LINE2, 2), rows(4))
    name, chunk = next((n, c) for n, c in made.chunks.items() if n.startswith("B_PP1"))
    moved = tuple(s and replace(s, device="cuda:1") for s in chunk.inputs)
    chunks = {**made.chunks, name: replace(chunk, inputs=moved)}
    elsewhere = SimpleNamespace(chunks=chunks, world_size=2)
    monkeypatch.setattr(measuring, "plan", lambda *_, **__: elsewhere)
    monkeypatch.setattr(measuring, "compile_chunks", None)
    monkeypatch.setattr(measuring, "launch", None)
    with pytest.raises(PiperError, match="ranks compute on the CPU") as refused:
        piper.profile(Stack4(2), None, rows(4))
    jobs.mentions(str(refused.value), "cuda:1", f"chunk {name}", "piper.Costs.roofline")


def test_ranks_of_a_profile_are_a_number() -> None:
    with pytest.raises(PiperError, match="ranks is 0"):
        piper.profile(Stack4(2), None, rows(4), ranks=0)
