"""Kernels of users in the place of operators: where they go, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
import tests
from piper_dynamo.errors import PiperRuntimeError, PiperStrategyError
from tests import jobs
from tests.jobs import LINE2, mentions, refusal
from tests.models import fill

CALLS: list[tuple[int, ...]] = []
X = torch.empty(2, 4, dtype=torch.float64)
W = torch.empty(4, dtype=torch.float64)


def plain(x: Tensor, w: Tensor) -> Tensor:
    """A gate: the sigmoid of x, scaled."""
    return torch.sigmoid(x) * w


def by_hand(x: Tensor, w: Tensor) -> Tensor:
    CALLS.append(tuple(x.shape))
    return torch.sigmoid(x) * w


def wrong(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x) * w + 1.0


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return by_hand(x, w).t().contiguous().t()


class Gated(nn.Module):
    """Two stages with a gate each."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.ParameterList(fill([4, 4], k) for k in range(2))
        self.w = nn.ParameterList(fill([4], 5 + k) for k in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage in range(2):
            with piper.annotate("PP", stage):
                x = plain(x @ self.m[stage], self.w[stage])
        with piper.annotate("PP", 1):
            return x.square().mean()


BATCH = (fill([8, 4], 3).detach(),)


def strategy(kernel: Any, **options: Any) -> piper.Strategy:
    given = piper.Kernel(plain, kernel, example=(X, W))
    return jobs.strategy(LINE2, 4, "one_f_one_b", kernels=[given], **options)


def grads_with(kernel: Any, **options: Any) -> dict[str, Tensor]:
    def job() -> dict[str, Tensor]:
        step = piper.compile(Gated(), strategy(kernel), BATCH, **options)
        step(*BATCH).backward()
        return jobs.grads(step)

    first, second = jobs.run_ranks(job, 2)
    return first | second


def wanted() -> dict[str, Tensor | None]:
    model = Gated()
    model(*BATCH).backward()
    return jobs.gradients(model)


@pytest.mark.parametrize("mode", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_kernel_takes_the_place_of_its_pattern(mode: str):
    CALLS.clear()
    found = grads_with(by_hand, compile=mode)
    for name, want in wanted().items():
        jobs.close(found[name], want, name)
    # Four microbatches of two forwards, and of a backward that makes its result again.
    assert CALLS == [(2, 4)] * 12


def test_control_a_wrong_kernel_is_run():
    assert any(not torch.allclose(grad, wanted()[name]) for name, grad in grads_with(wrong).items())


def test_equal_chunks_stay_equal_and_differ_from_plain_ones():
    plans = [piper.plan(Gated(), strategy(by_hand), BATCH) for _ in range(2)]
    bare = piper.plan(Gated(), jobs.strategy(LINE2, 4, "one_f_one_b"), BATCH)
    keys = [{name: chunk.key for name, chunk in plan.chunks.items()} for plan in (*plans, bare)]
    assert keys[0] == keys[1]
    changed = {name for name in keys[0] if keys[0][name] != keys[2][name]}
    assert changed == {"F_PP0", "F_PP1", "B_PP1"}  # the last backward makes its result again


def test_what_something_else_needs_stays():
    """The backward asks for the sigmoid: it is made beside the kernel's result."""
    plan = piper.plan(Gated(), strategy(by_hand), BATCH)
    (outputs,) = {len(plan.chunks[name].outputs) for name in ("F_PP0",)}
    bare = piper.plan(Gated(), jobs.strategy(LINE2, 4, "one_f_one_b"), BATCH)
    assert outputs == len(bare.chunks["F_PP0"].outputs)
    assert "by_hand" in str(plan.chunks["F_PP0"].graph)


def test_other_shapes_and_numbers_do_not_match():
    for example in ((X[:1], W), (X.float(), W.float())):
        given = piper.Kernel(plain, by_hand, example=example)
        wanted = jobs.strategy(LINE2, 4, "gpipe", kernels=[given])
        text = refusal(lambda wanted=wanted: piper.plan(Gated(), wanted, BATCH))
        mentions(text, "found in no task", "plain", "sigmoid", "none of these")
        mentions(text, "one microbatch", "test_user_kernels.py:")


def test_operators_that_are_nowhere_are_named():
    given = piper.Kernel(lambda x: x.cos().relu(), lambda x: x, example=(X,))
    text = refusal(
        lambda: piper.plan(Gated(), jobs.strategy(LINE2, 4, "gpipe", kernels=[given]), BATCH)
    )
    mentions(text, "in no task", "cos, relu")


def test_a_kernel_that_gives_something_else_is_refused():
    for kernel in (transposed, lambda x, w: x[:1]):
        text = refusal(lambda kernel=kernel: grads_with(kernel), PiperRuntimeError)
        mentions(text, "does not give what its pattern does", "plain")


def test_a_pattern_that_makes_nothing_is_refused():
    for pattern in (lambda x: x, lambda x: (x + 1, x + 2)):
        given = piper.Kernel(pattern, by_hand, example=(X,))
        wanted = jobs.strategy(LINE2, 4, "gpipe", kernels=[given])
        mentions(
            refusal(lambda wanted=wanted: piper.plan(Gated(), wanted, BATCH)),
            "makes no tensor of its own",
        )


def test_kernels_of_a_strategy():
    one, other = strategy(by_hand), strategy(by_hand)
    assert one == other
    assert hash(one) == hash(other)
    assert one != strategy(wrong)
    mentions(repr(one), "kernels=[piper.Kernel(", "by_hand", "torch.empty((2, 4), dtype=")
    assert eval(repr(one), {"piper": piper, "torch": torch, "tests": tests}) == one
    turned = piper.Strategy(kernels=[piper.Kernel(plain, by_hand, example=(X.T, W))])
    assert eval(repr(turned), {"piper": piper, "torch": torch, "tests": tests}) == turned
    mentions(refusal(one.to_json, PiperStrategyError), "JSON", "functions")
    mentions(refusal(lambda: piper.Strategy(kernels=[by_hand])), "kernels", "piper.Kernel")
    text = refusal(lambda: piper.Kernel(plain, 3, example=()))  # type: ignore[arg-type]
    mentions(text, "kernel=3", "example", "one or more tensors")
