"""Section X and what is left of the ranking: groups and schedules, hooks and sparse gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, about
from tests.jobs import LINE2, LINE4
from tests.models import Pair, Stack4, fill, rows, tok
from tests.replicas import LINE, PAIR

# Groups.


ONES = torch.ones(8, 4, dtype=torch.float64)


def stepped(decay: float, wanted: piper.Strategy) -> list[list[tuple[str, list[float]]]]:
    """Names and values after each of two steps: SGD, halved after the first, decay for w alone."""

    def job() -> list[tuple[str, list[float]]]:
        mine = fx.part((ONES, ONES), wanted)
        step = piper.compile(Pair(), wanted, example_inputs=mine)
        named = dict(piper.named_parameters(step))
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in named.items() if n == "w"], "weight_decay": decay},
            {"params": [p for n, p in named.items() if n == "b"], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        in_groups = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert len(in_groups) == len(set(in_groups))
        assert set(in_groups) >= {id(p) for p in named.values() if p.numel()}
        found = []
        for _ in range(2):
            step(*mine).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found += [(n, v.tolist()) for n, v in replicas.held(step).items()]
        return found

    return jobs.run_ranks(job, fx.world(wanted))


@pytest.mark.parametrize("zero", [*fx.slowly(None), *replicas.levels(3)])
def test_groups_and_schedules_are_as_in_one_process(zero: int | None) -> None:
    """R78, groups after sharding: decay for w alone; groups that are empty on a rank."""
    wanted = jobs.strategy(LINE2, 4) if zero is None else replicas.strategy(LINE, 2, zero=zero)
    want = {"w": [1.8, 1.705], "b": [1.9, 1.85]}
    for found in stepped(0.5, wanted):
        names = [name for name, _ in found]
        for number, name in enumerate(dict.fromkeys(names)):
            values = [v for n, v in found if n == name]
            assert number == 0
            assert values == [[about(w)] * len(v) for w, v in zip(want[name], values, strict=True)]


def test_control_a_group_that_lost_its_decay() -> None:
    """R78, signature: w is stepped as b is."""
    found = stepped(0.0, jobs.strategy(LINE2, 4))
    assert found[0][0] == ("w", [about(1.9)] * 4)


@pytest.mark.parametrize("zero", replicas.levels(1))
def test_groups_by_shape_in_float32(zero: int) -> None:
    """Another model and dtype: AdamW that decays matrices alone, over uneven shards."""
    case = replicas.CASES["uneven"]

    def groups(named: Any) -> list[dict[str, Any]]:
        found = [p for _, p in named]
        return [
            {"params": [p for p in found if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in found if p.dim() <= 1], "weight_decay": 0.0},
        ]

    def build(stages: int) -> nn.Module:
        return case.build(stages).float()

    def batch() -> fx.Batch:
        return tuple(v.float() for v in case.batch(0))

    wanted = replicas.strategy(LINE, 2, zero=zero)

    def job() -> dict[str, Tensor]:
        mine = fx.part(batch(), wanted)
        step = piper.compile(build(2), wanted, example_inputs=mine)
        optimizer = torch.optim.AdamW(groups(piper.named_parameters(step)), lr=0.01, foreach=True)
        for _ in range(2):
            step(*mine).backward()
            optimizer.step()
            optimizer.zero_grad()
        return piper.state_dict(step)

    model = build(1)
    optimizer = torch.optim.AdamW(groups(model.named_parameters()), lr=0.01)
    for _ in range(2):
        model(*batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in jobs.run_ranks(job, 4):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_one_optimizer_per_stage_equals_one_for_all() -> None:
    """Another layout: four stages, each rank's schedule its own object; F1's losses of AdamW."""
    losses = fx.train(lambda: Stack4(4), jobs.strategy(LINE4, 4, "zb_h1"), fx.adamw, *[EIGHT] * 4)
    assert losses == [about(list(fx.F1.ADAMW))] * 4


# Hooks, and gradients that are sparse.


@pytest.mark.parametrize("zero", [None, *replicas.levels()])
def test_hooks_of_parameters_run_once_a_step(zero: int | None) -> None:
    """Hooks: each once per backward, not per microbatch, with the whole gradient to change."""
    wanted = jobs.strategy(LINE2, 4) if zero is None else replicas.strategy(LINE, 2, zero=zero)

    def job() -> tuple[list[int], float]:
        mine = fx.part(EIGHT, wanted)
        step = piper.compile(Stack4(2), wanted, example_inputs=mine)
        calls: list[int] = []
        held = [p for p in piper.parameters(step) if p.numel()]
        for number, p in enumerate(held):
            p.register_hook(lambda g: 2 * g)
            p.register_post_accumulate_grad_hook(lambda _, n=number: calls.append(n))
        step(*mine).backward()
        return sorted(calls), float(piper.clip_grad_norm_(step, float("inf")))

    for calls, norm in jobs.run_ranks(job, fx.world(wanted)):
        assert calls == list(range(2))
        assert norm == about(2 * Stack4.NORM)


class Looking(nn.Module):
    """An embedding whose gradient eager makes sparse, or not."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.e = nn.Embedding(11, 4, sparse=sparse, dtype=torch.float64)
        with torch.no_grad():
            self.e.weight.copy_(fill([11, 4], 2))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.e(ids))
        with piper.annotate("PP", 1):
            return F.mse_loss(h, y)


def test_sparse_gradients_are_refused() -> None:
    """Sparse gradients: refused when planned, by name and line; dense ones of the same run."""
    batch = tok([8], 11), rows(8)[1]
    wanted = jobs.strategy(LINE2, 2)
    text = jobs.refusal(lambda: piper.plan(Looking(True), wanted, batch), piper.PiperCaptureError)
    jobs.mentions(text, "sparse gradient", "test_optimizers.py", "sparse=False")
    fx.equals_eager(lambda: Looking(False), wanted, batch)


@pytest.mark.parametrize("place", [LINE2, *fx.slowly(PAIR)])
def test_hooks_of_modules_see_what_they_would(place: jobs.Placement) -> None:
    """Hooks of modules are part of forward: what they return is used, once for each microbatch."""

    def build() -> nn.Module:
        model = Looking(False).float()
        model.e.register_forward_hook(lambda module, args, out: out * 2)
        return model

    batch = tok([8], 11), rows(8)[1].float()
    if place is PAIR:
        wanted = replicas.strategy({0: [0, 1], 1: [0, 1]}, 2, "")
    else:
        wanted = jobs.strategy(place, 4, "one_f_one_b")
    ranks = fx.run(build, wanted, batch)
    model, losses = fx.eager(build, batch)
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        for name, grad in found.grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad)
