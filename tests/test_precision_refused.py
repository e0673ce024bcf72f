"""What no precision can be made of is refused before the first step, with the user's line."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from tests import jobs, mixed, replicas
from tests.jobs import LINE2
from tests.replicas import PAIR
from tests.test_precision import ALL, plan, strategy


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            (piper.Precision({"PP": 0}, param="bf16"), piper.Precision({}, grad="fp32")),
            ("PP0", "two precisions", 'param="bf16"', 'grad="fp32"'),
        ),
        ((piper.Precision({"PP": 7}, param="bf16"),), ("matches nothing", "PP=7")),
    ],
)
def test_contradictions_are_refused(more: tuple[Any, ...], words: tuple[str, ...]) -> None:
    text = jobs.refusal(lambda: plan(0, *more), piper.PiperPlanError)
    jobs.mentions(text, *words)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (piper.Precision({"PP": 0}, param="bf16"), ("'e'", "two precisions", "float64")),
        (piper.Precision({"PP": 0}, grad="fp32"), ("'e'", "PP0", "PP1", "differ")),
    ],
)
def test_regions_that_share_a_parameter_agree(rule: Any, words: tuple[str, ...]) -> None:
    wanted = strategy(LINE2, rule)
    text = jobs.refusal(lambda: piper.plan(mixed.Tied(), wanted, replicas.tokens(0)))
    jobs.mentions(text, *words)
    both = [piper.Precision({"PP": stage}, param="bf16") for stage in (0, 1)]
    assert piper.plan(mixed.Tied(), strategy(LINE2, *both), replicas.tokens(0)).dag.computed


def test_what_no_sync_puts_off_is_reduced_as_it_is_held() -> None:
    def job() -> str:
        wanted = strategy(PAIR, piper.Precision({}, param="bf16", reduce="bf16"), zero=0)
        given = replicas.mine(replicas.numbers(0), PAIR)
        step = piper.compile(mixed.Net(1), wanted, example_inputs=given)
        with piper.no_sync(step):
            return jobs.refusal(lambda: step(*given), Exception)

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "no_sync", "bfloat16", "float64")


class Changes(nn.Module):
    """A value of the first stage is changed in place by the second, or where `late` beside it."""

    def __init__(self, change: Callable[[Tensor], Any], *, late: bool = False) -> None:
        super().__init__()
        self.w = mixed.weights(2)
        self.change, self.late = change, late

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.linear(x, self.w[0])
        with piper.annotate("PP", 1):
            view = h.view(-1)
            if not self.late:
                self.change(h)
        with piper.annotate("PP", 0):
            if self.late:
                self.change(h)
        with piper.annotate("PP", 1):
            return F.mse_loss(F.linear(view.view(h.shape), self.w[1]), y)


def first_blank(h: Tensor) -> None:
    h[0] = 0.0


@pytest.mark.parametrize(
    ("change", "late"),
    [
        (lambda h: operator.iadd(h, 1), False),
        (lambda h: operator.iadd(h, 1), True),
        (lambda h: h.view(-1).mul_(2), False),
        (first_blank, False),
        (lambda h: F.dropout(h, 0.5, True, True), False),
    ],
    ids=["iadd", "late", "of a view", "setitem", "an argument"],
)
def test_a_change_in_place_beyond_a_border_is_refused(
    change: Callable[[Tensor], Any], late: bool
) -> None:
    wanted = strategy(LINE2, piper.Precision({"PP": 0}, param="bf16"))
    model = Changes(change, late=late)
    text = jobs.refusal(lambda: piper.plan(model, wanted, replicas.numbers(0)))
    jobs.mentions(text, "in place", "test_precision_refused.py")


class Written(nn.Module):
    """The same in two ways of writing: `by_statement` changes values in place, and slices."""

    def __init__(self, *, by_statement: bool) -> None:
        super().__init__()
        self.w = mixed.weights(2)
        self.by_statement = by_statement

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.linear(x[:, :4] if self.by_statement else x, self.w[0])
            if self.by_statement:
                h.add_(1)
                h.tanh_()
            else:
                h = torch.tanh(h + 1)
        with piper.annotate("PP", 1):
            return F.mse_loss(F.linear(h, self.w[1]).double(), y.double())


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_cast_is_what_the_user_sees(stage: int) -> None:
    """A change in place comes before the cast; a slice of an input is cast like the input."""
    wanted = strategy(LINE2, piper.Precision({"PP": stage}, param="bf16"))
    one, other = (
        mixed.run(lambda how=how: Written(by_statement=how), replicas.numbers, LINE2, wanted)
        for how in (True, False)
    )
    for rank in range(2):
        assert one[rank].losses == other[rank].losses
        assert one[rank].norms == other[rank].norms


class Baked(nn.Module):
    """A dtype read from a tensor is a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.w = mixed.weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.linear(x, self.w[0])
        with piper.annotate("PP", 1):
            h = h.square().to(h.dtype)
            return F.mse_loss(F.linear(h, self.w[1]), y)


def test_a_dtype_that_is_baked_in_is_refused() -> None:
    text = jobs.refusal(lambda: piper.plan(Baked(), strategy(LINE2, ALL), replicas.numbers(0)))
    jobs.mentions(text, "in this precision", "test_precision_refused.py", "dtype", "type_as")


class Apart(nn.Module):
    """The second stage does something with a value in float32, and with others."""

    def __init__(self, what: Callable[..., Tensor]) -> None:
        super().__init__()
        self.what, self.w = what, mixed.weights(2)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.linear(x, self.w[0])
        with piper.annotate("PP", 1):
            h = self.what(h, self.w[1], self.norm)
            return h.double().square().mean() + y.double().mean()


@pytest.mark.parametrize(
    ("what", "operator"),
    [
        (lambda h, w, norm: torch.mv(h.float(), w[0]), "mv"),
        (lambda h, w, norm: F.layer_norm(h.float(), (4,), w[0]), "native_layer_norm"),
        (lambda h, w, norm: torch.zeros(4, 4).index_add(0, torch.arange(2), (h @ w)[:2]), "index"),
        (lambda h, w, norm: torch.cdist(h.float(), w), "_cdist_forward"),
        (lambda h, w, norm: checkpoint(norm, h @ w, use_reentrant=False), "batch_norm"),
    ],
    ids=["mv", "layer norm", "index add", "cdist", "checkpointed norm"],
)
def test_operands_of_two_dtypes_are_refused(what: Callable[..., Tensor], operator: str) -> None:
    """Where torch fails in the midst of the first step, since fake tensors let them pass."""
    text = jobs.refusal(lambda: piper.plan(Apart(what), strategy(LINE2, ALL), replicas.numbers(0)))
    jobs.mentions(text, "in this precision", "test_precision_refused.py", operator)


def test_what_takes_two_dtypes_is_not_refused() -> None:
    """A norm in float32, say, of a value in bfloat16."""
    both = Apart(lambda h, w, norm: F.layer_norm(h @ w, (4,), w[0].float()))
    assert piper.plan(both, strategy(LINE2, ALL), replicas.numbers(0)).programs


class Table(nn.Module):
    """The first stage has no parameters, but a matrix that it is not to change."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = mixed.weights(1)
        self.register_buffer("table", self.w[0].detach().clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.linear(x, self.table)
        with piper.annotate("PP", 1):
            return F.mse_loss(F.linear(h, self.w[0]), y)


def test_a_buffer_of_another_dtype_is_refused() -> None:
    wanted = strategy(LINE2, piper.Precision({"PP": 0}, param="bf16"))
    text = jobs.refusal(lambda: piper.plan(Table(), wanted, replicas.numbers(0)))
    jobs.mentions(text, "in this precision", "test_precision_refused.py", "buffer")
