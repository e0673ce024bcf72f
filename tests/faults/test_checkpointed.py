"""Section U: activation checkpoints and other operators with a graph of their own inside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from piper_dynamo.ir.program import EXCHANGES
from tests import experts, jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT
from tests.jobs import LINE2
from tests.models import Custom, rows, weights
from tests.replicas import LINE, PAIR

again: Callable[..., Any] = checkpoint


class Stages(nn.Module):
    """F1 on two stages, whose bodies are checkpointed or not, apart or both at once."""

    def __init__(self, how: str, drop: float = 0.0) -> None:
        super().__init__()
        self.w, self.how, self.drop = weights(4), how, drop

    def body(self, h: Tensor, k: int) -> Tensor:
        for number in (k, k + 1):
            h = torch.tanh(h @ self.w[number].T)
            h = F.dropout(h, self.drop, self.training) if self.drop else h
        return h

    def both(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.body(x, 0)
        with piper.annotate("PP", 1):
            return self.body(h, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.how == "across":
            h = again(self.both, x, use_reentrant=False)
        else:
            call = again if self.how == "apart" else (lambda f, *a, use_reentrant: f(*a))
            with piper.annotate("PP", 0):
                h = call(self.body, x, 0, use_reentrant=False)
            with piper.annotate("PP", 1):
                h = call(self.body, h, 2, use_reentrant=False)
        with piper.annotate("PP", 1):
            return F.mse_loss(h, y)


@pytest.mark.parametrize("schedule", ["one_f_one_b", pytest.param("zb_h1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["apart", "across"])
def test_checkpointed_stages_are_right(how: str, schedule: str) -> None:
    """R73, checkpoints in the captured graph: F1's numbers, around a stage or across the cut."""
    fx.is_f1(fx.run(lambda: Stages(how), jobs.strategy(LINE2, 4, schedule), EIGHT))


class Deep(Stages):
    """Many pointwise operators, whose values a checkpoint need not keep."""

    def body(self, h: Tensor, k: int) -> Tensor:
        h = super().body(h, k)
        for _ in range(4):
            h = torch.sin(h) * torch.cos(h)
        return h


def test_less_is_kept_and_it_is_made_again_on_its_rank() -> None:
    """R73, what it is for: fewer bytes are kept on both ranks, and the backward runs more."""
    batch = rows(64)
    plans = {
        how: piper.plan(Deep(how), jobs.strategy(LINE2, 4, "one_f_one_b"), batch)
        for how in ("plain", "apart", "across")
    }
    peaks = {how: [p.peak_bytes for p in plan.programs] for how, plan in plans.items()}
    for how in ("apart", "across"):
        assert all(a < b for a, b in zip(peaks[how], peaks["plain"], strict=True)), peaks
        for rank in range(2):
            assert operators(plans[how], rank, "F.") == operators(plans["plain"], rank, "F.")
            assert operators(plans[how], rank, "B.") > operators(plans["plain"], rank, "B.")


def operators(plan: piper.Plan, rank: int, which: str) -> int:
    """How many a rank runs in its forwards or backwards."""
    names = [i.target for i in plan.programs[rank].instrs if i.task.startswith(which) and i.target]
    return sum(node.op == "call_function" for n in names for node in plan.chunks[n].graph.nodes)


@pytest.mark.slow
def test_masks_are_drawn_again_alike() -> None:
    """R73, with dropout: the loss and gradients of the same model without a checkpoint."""

    def run(how: str) -> list[fx.Found]:
        def seeded() -> nn.Module:
            torch.manual_seed(7)
            return Stages(how, 0.5)

        return fx.run(seeded, jobs.strategy(LINE2, 4), EIGHT)

    plain = run("plain")
    assert abs(plain[0].loss - fx.F1.LOSS) > 1e-3  # something was dropped
    for how in ("apart", "across"):
        for first, second in zip(plain, run(how), strict=True):
            assert first.loss == second.loss
            assert first.grads.keys() == second.grads.keys()
            for name, grad in first.grads.items():
                jobs.close(grad, second.grads[name], f"{how}: {name}")


class Counts(Stages):
    """The first body counts its calls, in place or by assignment; the count is a factor."""

    seen: Tensor

    def __init__(self, how: str, *, assigns: bool = False) -> None:
        super().__init__(how)
        self.assigns = assigns
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def body(self, h: Tensor, k: int) -> Tensor:
        if k == 0 and self.assigns:
            self.seen += 1  # the assignment
        elif k == 0:
            self.seen.add_(1)
        return super().body(h * self.seen if k == 0 else h, k)


def test_a_buffer_in_a_checkpoint_changes_once() -> None:
    """R73, with a buffer that changes inside: once a microbatch, as without a checkpoint."""
    want = Counts("plain")
    loss = jobs.accumulate(want, EIGHT, 4)

    def job() -> tuple[float, float, dict[str, Tensor]]:
        model = Counts("apart")
        step = piper.compile(model, jobs.strategy(LINE2, 4), example_inputs=EIGHT)
        value = step(*EIGHT)
        value.backward()
        return value.item(), float(model.seen), replicas.grads(step)

    ranks = jobs.run_ranks(job, 2)
    assert ranks[0][1] == want.seen.item() == 4.0
    assert [value for value, *_ in ranks] == [fx.about(loss, 1e-12)] * 2
    jobs.check_grads([grads for *_, grads in ranks], want)


def test_an_assignment_in_a_checkpoint_is_refused() -> None:
    """R73, with a side effect that the backward would repeat: its line, and what to write."""
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(k for k, text in enumerate(lines) if text.endswith("# the assignment"))
    build = Counts("apart", assigns=True)
    text = jobs.refusal(lambda: piper.plan(build, jobs.strategy(LINE2, 4), EIGHT))
    jobs.mentions(text, f"test_checkpointed.py:{line}", "self.count.add_(1)", "side effect")


class Around(experts.Mixture):
    """Every layer of experts is checkpointed, its exchanges of rows with it."""

    def mix(self, h: Tensor, layer: int) -> Tensor:
        found: Tensor = again(super().mix, h, layer, use_reentrant=False)
        return found


@pytest.mark.slow
def test_collectives_inside_are_alike_on_all_ranks() -> None:
    """R73, an all-to-all inside: parity, and as many exchanges on every rank, saved or repeated."""
    case = replicas.Case(build=lambda stages: Around(stages), batch=lambda k: rows(24, 2 * k))
    wanted = experts.strategy(PAIR, 2, "")
    ranks = replicas.run(case, PAIR, wanted, steps=1)
    want = replicas.reference(experts.case(), steps=1)
    replicas.compare(ranks, want, PAIR, 0, part=experts.part_of(2))
    plan = piper.plan(Around(1), wanted, rows(12))
    counts = [[i.op for i in p.instrs if i.op in EXCHANGES] for p in plan.programs]
    assert counts[0] == counts[1]


def test_flex_attention_is_supported_or_named() -> None:
    """R73, other higher-order operators: flex attention runs, or is refused by its name."""
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weights(1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                q = (x @ self.w[0].T).unflatten(-1, (1, 4)).unsqueeze(0).transpose(1, 2)
                h = flex_attention(q, q, q).squeeze(0).squeeze(0)
                return F.mse_loss(h, y)

    wanted = piper.Strategy(piper.Split({}, num_microbatches=1), *jobs.places({0: [0]}))
    try:
        fx.equals_eager(Flexible, wanted, EIGHT)
    except piper.PiperError as error:
        jobs.mentions(str(error), "FlexAttention", "test_checkpointed.py", "hint")


# More inputs of the kinds: checkpoints of other models, and custom autograd functions.


@pytest.mark.parametrize("zero", replicas.levels(3))
def test_checkpoints_of_replicas_in_float32(zero: int) -> None:
    """Another layout and dtype: a checkpointed pipeline of two replicas."""
    batch = tuple(value.float() for value in EIGHT)
    build = lambda: Stages("apart").float()  # noqa: E731
    ranks = fx.run(build, replicas.strategy(LINE, 2, zero=zero), batch)
    model, losses = fx.eager(build, batch)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        assert found.norm == pytest.approx(norm.item(), abs=1e-6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("schedule", ["zb_h1", *fx.slowly("one_f_one_b")])
def test_custom_functions_keep_their_backward(schedule: str) -> None:
    """Custom autograd.Function, in both stages: its own backward, whole or split."""
    fx.equals_eager(Custom, jobs.strategy(LINE2, 4, schedule), EIGHT)


class _Scaled(torch.autograd.Function):
    """Two inputs, two outputs, of which one has no gradient; the backward is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        sign = (x > 0).to(torch.int64)
        ctx.mark_non_differentiable(sign)
        return x * w, sign

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return 2 * grad * w, 3 * (grad * x).sum(0)


class TwoOutputs(nn.Module):
    """The function's outputs are used by the next stage, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, 1.0, -0.5, 2.0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h, sign = _Scaled.apply(torch.tanh(x), self.w)
        with piper.annotate("PP", 1):
            return F.mse_loss(torch.tanh(h) * sign, y)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("zero", [None, *replicas.levels()])
def test_custom_functions_of_several_values(zero: int | None) -> None:
    """Custom autograd.Function of another form, dtype and layout."""
    batch = tuple(value.float() for value in EIGHT)
    wanted = jobs.strategy(LINE2, 4) if zero is None else replicas.strategy(LINE, 2, zero=zero)
    ranks = fx.run(TwoOutputs, wanted, batch)
    model, losses = fx.eager(TwoOutputs, batch)
    grad = dict(model.named_parameters())["w"].grad
    assert grad is not None
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        assert found.norm == pytest.approx(grad.norm().item(), abs=1e-6)
