"""Section J: frozen weights stay frozen, and stages without gradients ask for none."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, about
from tests.jobs import LINE4
from tests.models import Stack4, fill, rows
from tests.replicas import LINE, LOOP

# requires_grad.


def without(*frozen: int, stages: int = 4) -> Callable[[], Stack4]:
    """F1 with some weights frozen."""

    def build() -> Stack4:
        model = Stack4(stages)
        for k in frozen:
            model.w[k].requires_grad_(False)
        return model

    return build


@pytest.mark.parametrize("zero", [None, *replicas.levels(3)])
def test_frozen_weights_stay_as_they_are(zero: int | None) -> None:
    """R52, requires_grad lost by a rewrite: flags, bits, no gradient, state or reduction."""
    if zero is None:
        wanted = jobs.strategy(LINE4, 4, "one_f_one_b")
    else:
        wanted = replicas.strategy(LOOP, 4, "interleaved_1f1b", zero=zero)

    def job() -> tuple[dict[str, bool], set[str], set[str], set[str]]:
        mine = fx.part(EIGHT, wanted)
        step = piper.compile(without(0, 2)(), wanted, example_inputs=mine)
        named = dict(piper.named_parameters(step))
        flags = {n: p.requires_grad for n, p in named.items() if n.startswith("w")}
        before = replicas.held(step)
        optimizer = fx.adamw(named.values())
        with_grad: set[str] = set()
        for _ in range(3):
            step(*mine).backward()
            with_grad |= set(replicas.grads(step))
            optimizer.step()
            optimizer.zero_grad()
        after = replicas.held(step)
        kept = {n for n in before if torch.equal(before[n], after[n])}
        with_state = {n for n, p in named.items() if p in optimizer.state and n in before}
        return flags, with_grad, kept, with_state

    for flags, with_grad, kept, with_state in jobs.run_ranks(job, fx.world(wanted)):
        assert flags == {name: name in ("w.1", "w.3") for name in flags}
        assert with_grad == {name for name in flags if flags[name]}
        assert kept == {name for name in flags if not flags[name]}
        assert with_state == {name for name in flags if flags[name]}
    plan = piper.plan(without(0, 2)(), wanted, EIGHT)
    given = {plan.args[position].name for p in plan.programs for position, _ in p.grads}
    assert given == {"w.1", "w.3"}
    if zero is not None:
        reduced = sum(len(replicas.reductions(p)) for p in plan.programs)
        assert reduced == (4 if zero < 2 else 16)  # of two stages on two ranks each


class Adapted(nn.Module):
    """F1's first two layers, the second frozen with an adapter of rank 1 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(fill([4, 4], k)) for k in range(2))
        self.w[1].requires_grad_(False)
        self.down, self.up = nn.Parameter(fill([1, 4], 5)), nn.Parameter(fill([4, 1], 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
        with piper.annotate("PP", 1):
            return F.mse_loss(torch.tanh(h @ self.w[1].T + h @ self.down.T @ self.up.T), y)


@pytest.mark.parametrize("zero", replicas.levels(0))
def test_an_adapter_trains_beside_a_frozen_weight(zero: int) -> None:
    """R52, a rank-1 adapter: parity with one process over clipped steps of two optimizers."""
    case = replicas.Case(build=lambda stages: Adapted(), batch=replicas.numbers)
    ranks = replicas.run(case, LINE, replicas.strategy(LINE, 2, "zb_h1", zero=zero), steps=2)
    replicas.compare(ranks, replicas.reference(case, steps=2), LINE, zero)


# Whole stages.


@pytest.mark.parametrize("schedule", ["zb_h1", *fx.slowly("one_f_one_b")])
@pytest.mark.parametrize(
    "frozen",
    [(0,), pytest.param((3,), marks=pytest.mark.slow), (0, 1, 3)],
    ids=["first", "last", "all but one"],
)
def test_stages_without_gradients_run(frozen: tuple[int, ...], schedule: str) -> None:
    """R53, a whole stage without gradient: the others' are F1's, in split backwards, too."""
    wanted = jobs.strategy(LINE4, 4, schedule)
    ranks = fx.run(without(*frozen), wanted, EIGHT)
    left = [k for k in range(4) if k not in frozen]
    each = fx.norms(ranks)
    assert each == {f"w.{k}": about(F1.NORMS[k]) for k in left}
    for found in ranks:
        assert found.loss == about(F1.LOSS)
        assert found.norm == about(sum(F1.NORMS[k] ** 2 for k in left) ** 0.5)
        if frozen == (0,):
            assert found.norm == about(0.06496774089)


def test_no_gradient_is_sent_to_a_stage_that_needs_none() -> None:
    """R53, the first stage frozen: the second sends no gradient to it, and it receives none."""
    plan = piper.plan(without(0)(), jobs.strategy(LINE4, 4, "one_f_one_b"), EIGHT)
    back = [i for i in plan.programs[1].instrs if i.op is Op.SEND and i.peer == 0]
    assert back == [] or all(i.task == "loss" for i in back)
    assert not [i for i in plan.programs[0].instrs if i.op is Op.POST and i.task.startswith("B")]
    plan = piper.plan(Stack4(4), jobs.strategy(LINE4, 4, "one_f_one_b"), EIGHT)  # control
    assert len([i for i in plan.programs[1].instrs if i.op is Op.SEND and i.peer == 0]) >= 4


def test_a_frozen_model_runs_forward_only() -> None:
    """R53, all frozen: the loss, and at its backward the error that eager gives."""

    def job() -> tuple[float, str]:
        step = piper.compile(
            without(0, 1, 2, 3)(), jobs.strategy(LINE4, 4, ""), example_inputs=EIGHT
        )
        loss = step(*EIGHT)
        return loss.item(), jobs.refusal(loss.backward, RuntimeError)

    for loss, text in jobs.run_ranks(job, 4):
        assert loss == about(F1.LOSS)
        assert "does not require grad" in text


# More inputs of the kind.


@pytest.mark.slow
def test_a_frozen_embedding_of_a_tied_model() -> None:
    """Another model: a shared weight that is frozen, of which no gradient is sent."""

    def build() -> nn.Module:
        model = replicas.Tied(4)
        model.e.requires_grad_(False)
        return model

    ids, labels = replicas.tokens(0)
    ranks = fx.equals_eager(build, jobs.strategy(LINE4, 4, "zb_h1"), (ids[:8], labels[:8]))
    assert "e" not in {name for found in ranks for name in found.grads}


@pytest.mark.parametrize("zero", replicas.levels(2))
def test_a_frozen_stage_of_replicas_in_float32(zero: int) -> None:
    """Another dtype and layout: nothing is reduced for the first stage of two replicas."""

    def build() -> nn.Module:
        return without(0, 1, stages=2)().float()

    batch = tuple(value.float() for value in rows(8))
    wanted = replicas.strategy(LINE, 2, zero=zero)
    ranks = fx.run(build, wanted, batch)
    model, losses = fx.eager(build, batch)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        assert found.norm == pytest.approx(norm.item(), abs=1e-6)
    plan = piper.plan(build(), wanted, batch)
    assert [len(replicas.reductions(p)) > 0 for p in plan.programs] == [False] * 2 + [True] * 2
