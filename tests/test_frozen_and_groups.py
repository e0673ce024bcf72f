"""Frozen weights, adapters and parameter groups keep what they are under every layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs, replicas
from tests.jobs import LINE4
from tests.models import Pair, Stack4, fill, rows
from tests.replicas import LINE, Case


class Adapted(nn.Module):
    """Two layers whose weights are frozen, the second with an adapter of rank 1 beside it."""

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.w = nn.ParameterList(
            nn.Parameter(fill([4, 4], k), requires_grad=False) for k in range(2)
        )
        self.down = nn.Parameter(fill([1, 4], 5))
        self.up = nn.Parameter(fill([4, 1], 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
        with piper.annotate("PP", 1):
            h = torch.tanh(h @ self.w[1].T + h @ self.down.T @ self.up.T)
            return F.mse_loss(h, y)


@pytest.mark.parametrize("zero", [0, 3])
def test_an_adapter_beside_a_frozen_weight(zero: int) -> None:
    """Case R52: only the adapter trains, has optimizer state, and is reduced."""
    case = Case(build=Adapted, batch=replicas.numbers)
    wanted = replicas.strategy(LINE, 2, "one_f_one_b", zero=zero)
    ranks = replicas.run(case, LINE, wanted)
    replicas.compare(ranks, replicas.reference(case), LINE, zero)
    before = Adapted()
    for rank, trace in enumerate(ranks):
        for name, value in trace.params.items():
            if name.startswith("w."):
                whole = before.get_parameter(name).detach()
                assert torch.equal(value, replicas.part_of(whole, rank, LINE, zero))
    plan = piper.plan(Adapted(), wanted, rows(12), 4)
    given = {plan.args[position].name for p in plan.programs for position, _ in p.grads}
    assert given == {"down", "up"}


def test_a_model_that_is_frozen_whole_runs_forward_only() -> None:
    """Case R53 d: a loss, and autograd's own error at its backward."""

    def job() -> tuple[float, str, bool]:
        model = Stack4(4)
        model.requires_grad_(False)
        step = piper.compile(model, jobs.strategy(LINE4, 4, ""), example_inputs=rows(8))
        loss = step(*rows(8))
        text = jobs.refusal(loss.backward, RuntimeError)
        return loss.item(), text, piper.explain(step).dag.training

    for loss, text, training in jobs.run_ranks(job, 4):
        assert loss == pytest.approx(Stack4.LOSS, abs=1e-12)
        assert "does not require grad" in text
        assert not training


def groups(named: Any) -> list[dict[str, Any]]:
    """Weight decay for w alone; on a rank without one of them its group is empty."""
    found = dict(named)
    return [
        {"params": [p for n, p in found.items() if n == "w"], "weight_decay": 0.5},
        {"params": [p for n, p in found.items() if n == "b"], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_groups_and_a_schedule_by_hand(zero: int) -> None:
    """Case R78: SGD, lr .1, halved after the first step."""
    ones = torch.ones(8, 4, dtype=torch.float64)

    def job() -> list[tuple[str, list[float]]]:
        wanted = replicas.strategy(LINE, 2, "one_f_one_b", zero=zero)
        step = piper.compile(Pair(), wanted, example_inputs=(ones[:4], ones[:4]))
        optimizer = torch.optim.SGD(groups(piper.named_parameters(step)), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        held = {id(p) for p in piper.parameters(step) if p.numel()}
        in_groups = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert set(in_groups) >= held
        assert len(in_groups) == len(set(in_groups))
        found = []
        for _ in range(2):
            step(ones[:4], ones[:4]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            for name, value in replicas.held(step).items():
                found.append((name, value.tolist()))
        return found

    want = {"w": [1.8, 1.705], "b": [1.9, 1.85]}
    for found in jobs.run_ranks(job, 4):
        for number, (name, values) in enumerate(found):
            assert values == pytest.approx([want[name][number]] * len(values), abs=1e-12)


def test_control_a_group_without_its_decay_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flattened into one group, w would not decay: 1.9, not 1.8."""
    plain: Callable[[Any], list[dict[str, Any]]] = lambda named: [  # noqa: E731
        {"params": [p for n, p in named if n in ("w", "b")]}
    ]
    monkeypatch.setattr("tests.test_frozen_and_groups.groups", plain)
    with pytest.raises(AssertionError):
        test_groups_and_a_schedule_by_hand(0)
