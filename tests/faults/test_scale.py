"""Section A: what gradients and the loss are scaled by."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from piper_dynamo.runtime.executor import Runtime
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, F2, about
from tests.jobs import LINE2, LINE4, ONE
from tests.models import Stack4, TiedLM, fill, rows
from tests.replicas import LINE, PAIR

HALVES = tuple(tuple(value[4 * k : 4 * k + 4] for value in EIGHT) for k in range(2))


@pytest.mark.parametrize("placement", [LINE2, pytest.param(LINE4, marks=pytest.mark.slow)])
def test_two_calls_add_up(placement: jobs.Placement) -> None:
    """R01, outer accumulation over microbatches: the calls' gradients are summed as in eager."""
    wanted = jobs.strategy(placement, 2, "one_f_one_b")
    build = lambda: Stack4(len(placement))  # noqa: E731
    for scaled, norm in ((1.0, 0.14161562694), (0.5, F1.NORM)):
        for found in fx.run(build, wanted, *HALVES, scaled=scaled):
            assert found.norm == about(norm)


def test_control_a_first_call_that_is_divided_again() -> None:
    """R01, signature: the gradients of the first call fade."""

    def job() -> float:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=HALVES[0])
        for half in HALVES:
            for p in piper.parameters(step):
                if p.grad is not None:
                    p.grad /= 2
            step(*half).backward()
        return float(piper.clip_grad_norm_(step, float("inf")))

    assert jobs.run_ranks(job, 2) == [about(0.11762853830)] * 2


# Unequal microbatches.


class Ignoring(TiedLM):
    """F2 whose mean over no label at all is 0, not NaN."""

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.embedding(ids, self.e) @ self.a.T)
        with piper.annotate("PP", 1):
            logits, of = (h @ self.e.T).flatten(0, 1), labels.flatten()
            total = F.cross_entropy(logits, of, reduction="sum")
            return total / (of != -100).sum().clamp(min=1)


def by_tokens(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def weighted(
    microbatches: int, replicated: bool, reduction: Any, schedule: str = "one_f_one_b"
) -> piper.Strategy:
    if not replicated:
        return jobs.strategy(LINE2, microbatches, schedule, reduction=reduction)
    return replicas.strategy(LINE, microbatches, schedule, reduction=reduction)


@pytest.mark.parametrize(
    ("microbatches", "replicated", "schedule"),
    [
        pytest.param(1, False, "gpipe", marks=pytest.mark.slow),
        pytest.param(2, False, "gpipe", marks=pytest.mark.slow),
        (4, False, "zb_h1"),
        pytest.param(1, True, "one_f_one_b", marks=pytest.mark.slow),
        (2, True, "one_f_one_b"),
    ],
)
def test_unequal_microbatches_count_by_their_tokens(
    microbatches: int, replicated: bool, schedule: str
) -> None:
    """R03, uneven valid tokens: one loss whatever the microbatches, replicas and schedule."""
    wanted = weighted(microbatches, replicated, by_tokens, schedule)
    ranks = fx.run(Ignoring, wanted, F2.ignoring())
    for found in ranks:
        assert found.loss == about(F2.IGNORED_LOSS)
    assert fx.norms(ranks)["e"] == about(F2.IGNORED_NORM_E)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("model", [TiedLM, *fx.slowly(Ignoring)])
def test_a_microbatch_without_any_token_counts_nothing(
    model: type[TiedLM], replicated: bool
) -> None:
    """R03, a microbatch whose labels are all ignored: the mean over the others, no NaN.

    Its own plain mean is NaN, which is nobody's loss: `nan_check` finds nothing.
    """
    batch = F2.ignoring(whole=True)
    eager = model()
    eager(*batch).backward()
    wanted = weighted(2, replicated, by_tokens)
    for found in fx.run(model, wanted, batch, nan_check="raise"):
        assert found.loss == about(F2.TWO_ROWS_IGNORED)
        for name, grad in found.grads.items():
            jobs.close(grad, eager.get_parameter(name).grad, name)


@pytest.mark.parametrize("at", [0, 3])
def test_a_microbatch_without_any_token_is_none_where_its_loss_is_sent(at: int) -> None:
    """R03, two-way: each rank makes the losses of half of the microbatches, one sums them all."""
    ids, labels = (torch.cat([value] * 2) for value in TiedLM.batch())
    labels = labels.clone()
    labels[2 * at : 2 * at + 2] = -100
    eager = TiedLM()
    eager(ids, labels).backward()
    wanted = jobs.strategy(LINE2, 4, "dualpipe", reduction=by_tokens)
    plan = piper.plan(TiedLM(), wanted, (ids, labels))
    assert sum(instr.op is Op.LOSS for p in plan.programs for instr in p.instrs) == 1
    for found in fx.run(TiedLM, wanted, (ids, labels), nan_check="raise"):
        for name, grad in found.grads.items():
            jobs.close(grad, eager.get_parameter(name).grad, name)


def test_control_a_microbatch_that_is_nan_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """R03, signature: NaN, where zero times NaN is added; and where it weighs something."""
    batch = F2.ignoring(whole=True)
    for found in fx.run(TiedLM, weighted(2, False, "mean"), batch):
        assert math.isnan(found.loss)
    text = jobs.refusal(
        lambda: fx.run(TiedLM, weighted(2, False, "mean"), batch, nan_check="raise")
    )
    jobs.mentions(text, "not finite", "F.PP1.MB0")

    def plain(self: Runtime, *pairs: Tensor) -> Tensor:
        return sum((a * b for a, b in zip(pairs[::2], pairs[1::2], strict=True)), torch.zeros(()))

    monkeypatch.setattr(Runtime, "loss", plain)
    for found in fx.run(TiedLM, weighted(2, False, by_tokens), batch):
        assert math.isnan(found.loss)


def test_control_a_mean_of_means_is_another_loss() -> None:
    """R03, signature: tokens of unequal microbatches weigh unequally."""
    ranks = fx.run(TiedLM, weighted(2, False, "mean"), F2.ignoring())
    assert [found.loss for found in ranks] == [about(F2.MEAN_OF_MEANS)] * 2
    assert fx.norms(ranks)["e"] == about(F2.MEAN_OF_MEANS_NORM_E)


class Summing(TiedLM):
    """F2 whose loss is the sum over valid labels."""

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.embedding(ids, self.e) @ self.a.T)
        with piper.annotate("PP", 1):
            logits = (h @ self.e.T).flatten(0, 1)
            return F.cross_entropy(logits, labels.flatten(), reduction="sum")


def test_control_a_sum_that_nobody_divides() -> None:
    """R03, signature: the sum over tokens, never divided by their number."""
    ranks = fx.run(Summing, weighted(2, False, "sum"), F2.ignoring())
    assert [found.loss for found in ranks] == [about(F2.SUM)] * 2
    assert fx.norms(ranks)["e"] == about(F2.SUM_NORM_E)


class Spread(Ignoring):
    """The same on as many stages as there are."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.embedding(ids, self.e)
        for k in range(1, self.stages):
            with piper.annotate("PP", k):
                h = torch.tanh(h @ self.a.T) if k == 1 else h * 1.0
        with piper.annotate("PP", self.stages - 1):
            logits, of = (h @ self.e.T).flatten(0, 1), labels.flatten()
            total = F.cross_entropy(logits, of, reduction="sum")
            return total / (of != -100).sum().clamp(min=1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", fx.LAYOUTS)
def test_every_schedule_counts_tokens_alike(schedule: str) -> None:
    """R03, every schedule: the same loss and gradients, on four stages or two."""
    stages = 4 if schedule in ("interleaved_1f1b", "zbv", "dualpipev") else 2
    placement = fx.LAYOUTS[schedule].placement if stages == 4 else LINE2
    wanted = jobs.strategy(placement, 4, schedule, reduction=by_tokens)
    ranks = fx.run(lambda: Spread(stages), wanted, F2.ignoring())
    for found in ranks:
        assert found.loss == about(F2.IGNORED_LOSS)
    assert fx.norms(ranks)["e"] == about(F2.IGNORED_NORM_E)


# The contract.


class Reduced(nn.Module):
    """F1 whose loss is the mean or the sum over all elements."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(fill([4, 4], k)) for k in range(4))
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k in range(4):
            with piper.annotate("PP", k // 2):
                h = torch.tanh(h @ self.w[k].T)
        with piper.annotate("PP", 1):
            return F.mse_loss(h, y, reduction=self.reduction)


def documented() -> dict[tuple[str, str, int], float]:
    """The norms that docs/numerics.md gives: of the model's loss, the rule, the microbatches."""
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    lines = re.findall(r'^\| (mean|sum) \| `"(mean|sum)"` \|(.*)\|$', text, re.MULTILINE)
    return {
        (loss, rule, microbatches): float(number)
        for loss, rule, numbers in lines
        for microbatches, number in zip((1, 2, 4), numbers.split("|"), strict=True)
    }


@pytest.mark.parametrize(
    "microbatches", [4, *(pytest.param(m, marks=pytest.mark.slow) for m in (1, 2))]
)
@pytest.mark.parametrize("rule", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_the_loss_means_what_the_documents_say(loss: str, rule: str, microbatches: int) -> None:
    """R05, loss per token or per microbatch: the table of docs/numerics.md."""
    want = F1.NORM * (32 if loss == "sum" else 1)
    if loss == "mean" and rule == "sum":
        want *= microbatches
    if loss == "sum" and rule == "mean":
        want /= microbatches
    wanted = jobs.strategy(LINE2, microbatches, reduction=rule)
    norm = fx.run(lambda: Reduced(loss), wanted, EIGHT)[0].norm
    assert norm == about(want, 1e-8)
    assert documented()[loss, rule, microbatches] == pytest.approx(norm, abs=5e-5)


def test_control_a_sum_over_microbatches_is_four_times_their_mean() -> None:
    """R05, signature: gradients are summed and not divided."""
    for found in fx.run(lambda: Stack4(4), jobs.strategy(LINE4, 4, reduction="sum"), EIGHT):
        assert found.norm == about(F1.SUMMED)


# Batches that do not divide.


@pytest.mark.parametrize(
    ("size", "microbatches", "divisors"),
    [(5, 2, "1, 5"), (8, 3, "1, 2, 4, 8"), (1, 2, "1")],
)
def test_a_batch_that_does_not_divide_is_refused(
    size: int, microbatches: int, divisors: str
) -> None:
    """R06, a batch not divisible by M: a ValueError on every rank before any of them sends."""

    def job() -> str:
        wanted = jobs.strategy(LINE2, microbatches)
        call = lambda: piper.compile(Stack4(2), wanted, example_inputs=rows(size))  # noqa: E731
        return jobs.refusal(call, ValueError)

    texts = jobs.run_ranks(job, 2)
    assert texts[0] == texts[1]
    told = f"argument 'x' has batch {size}, which {microbatches} microbatches do not divide"
    jobs.mentions(texts[0], told, f"numbers that do: [{divisors}]")


def test_no_microbatches_are_refused() -> None:
    """R06, M = 0: a ValueError where the split is written."""
    jobs.mentions(jobs.refusal(lambda: piper.Split({}, num_microbatches=0), ValueError), "0", "1")


def test_a_later_batch_that_does_not_divide_is_refused_by_all_ranks() -> None:
    """R06, a last batch of another size: no row is lost, and the next good batch is right."""

    def job() -> tuple[str, float]:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 4), example_inputs=EIGHT)
        text = jobs.refusal(lambda: step(*rows(5)), ValueError)
        return text, step(*EIGHT).item()

    for text, loss in jobs.run_ranks(job, 2):
        jobs.mentions(text, "argument 'x' has batch 5, which 4 microbatches do not divide")
        assert loss == about(F1.LOSS)


def test_five_rows_in_as_many_microbatches_are_exact() -> None:
    """R06, a size that the refusal names as working: every row weighs the same."""
    five = tuple(value[:5] for value in EIGHT)
    ranks = fx.run(lambda: Stack4(2), jobs.strategy(LINE2, 5), five)
    for found in ranks:
        assert found.loss == about(F1.FIVE_LOSS)
    assert fx.norms(ranks)["w.0"] == about(F1.FIVE_NORM0)


def test_control_a_mean_over_unequal_pieces() -> None:
    """R06, signature: pieces of 3 and 2 rows that weigh the same."""
    model = Stack4(2)
    total = 0.0
    for cut in (slice(0, 3), slice(3, 5)):
        loss = model(*(value[cut] for value in EIGHT)) / 2
        loss.backward()
        total += loss.item()
    assert total == about(F1.FIVE_MEAN_OF_MEANS)
    assert model.w[0].grad is not None
    assert model.w[0].grad.norm().item() == about(F1.FIVE_WRONG_NORM0)


# More inputs of the kind.


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
def test_calls_add_up_over_replicas_with_tied_weights(zero: int) -> None:
    """Outer accumulation on another model and layout: ZeRO shards of two replicas in a V."""
    case = replicas.CASES["tied"]
    wanted = replicas.strategy(replicas.VEE, 4, "zbv", zero=zero)
    batches = [case.batch(k) for k in range(2)]
    ranks = fx.run(lambda: case.build(4), wanted, *batches)
    model, losses = fx.eager(lambda: case.build(1), *batches)
    want = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in ranks:
        jobs.close(found.losses, losses, "losses")
        assert found.norm == about(want.item(), 1e-12)


def test_a_weight_of_a_microbatch_in_float32() -> None:
    """Uneven tokens on another model and dtype: replicas that hold everything, in float32."""

    def weigh(mask: Tensor) -> Tensor:
        return mask.sum()

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(fill([4, 4], 1).float())

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                row = torch.tanh(x @ self.w).square().sum(1)
                return (row * mask).sum() / mask.sum().clamp(min=1)

    x, mask = rows(8)[0].float(), torch.tensor([1, 0, 0, 0, 1, 1, 1, 0.0])
    wanted = replicas.strategy(PAIR, 2, "", reduction=weigh)
    ranks = fx.run(Masked, wanted, (x, mask))
    model, losses = fx.eager(Masked, (x, mask))
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        grad = dict(model.named_parameters())["w"].grad
        torch.testing.assert_close(found.grads["w"], grad)


def test_one_rank_scales_as_many_do() -> None:
    """The rule does not depend on where stages are."""
    fx.is_f1(fx.run(lambda: Stack4(2), jobs.strategy(ONE, 4), EIGHT))
