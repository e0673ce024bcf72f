"""The ready mixture-of-experts layer against the sum it stands for."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.moe import MoELayer
from tests import experts, replicas
from tests.replicas import PAIR


def layer(**options: Any) -> MoELayer:
    torch.manual_seed(3)
    shape = {"dim": 6, "hidden": 5, "num_experts": 4, "top_k": 2, "dtype": torch.float64}
    return MoELayer(**{**shape, **options})


def by_hand(moe: MoELayer, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for token in x.flatten(0, -2):
        logits = moe.gate(token)
        score = torch.sigmoid(logits) if moe.scoring == "sigmoid" else logits.softmax(-1)
        best = (score + moe.bias).topk(moe.top_k).indices
        weight = score[best]
        if moe.normalize:
            weight = weight / weight.sum()
        total = torch.zeros_like(token)
        for w, e in zip(weight, best, strict=True):
            inner = F.silu(token @ moe.w_gate[e]) * (token @ moe.w_up[e])
            total = total + moe.scale * w * (inner @ moe.w_down[e])
        if moe.shared is not None:
            gate, up, down = moe.shared
            total = total + down(F.silu(gate(token)) * up(token))
        rows.append(total)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": "sigmoid", "shared_hidden": 3},
        {"top_k": 1, "normalize": False},
        {"gate": "sigmoid", "scale": 2.5, "top_k": 4},
    ],
    ids=str,
)
def test_a_layer_is_the_sum_over_its_experts(options: dict[str, Any]) -> None:
    moe = layer(**options)
    moe.bias += torch.tensor([0.0, 0.1, 0.0, -0.2], dtype=torch.float64)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(moe(x), by_hand(moe, x))


def test_every_parameter_gets_a_gradient_and_the_bias_none() -> None:
    moe = layer(shared_hidden=3)
    moe.bias.requires_grad_()  # it would get one if results depended on it
    routed = moe.routed(torch.randn(40, 6, dtype=torch.float64))
    (routed.y.sum() + routed.balance_loss).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in moe.parameters())
    assert moe.bias.grad is None


def test_the_balancing_loss_is_one_where_experts_are_used_evenly() -> None:
    moe = layer(top_k=4)  # every token goes to all experts
    even = moe.routed(torch.randn(10, 6, dtype=torch.float64))
    assert even.load.tolist() == [10] * 4
    assert even.balance_loss.item() == pytest.approx(1.0)
    one = layer(top_k=1)
    with torch.no_grad():
        one.gate.weight.zero_()
        one.gate.weight[0] = 50.0
    lone = one.routed(torch.rand(10, 6, dtype=torch.float64) + 1)
    assert lone.load.tolist() == [10, 0, 0, 0]
    assert lone.balance_loss.item() == pytest.approx(4.0)


def test_the_balancing_loss_may_be_below_one() -> None:
    """Nine tokens choose the first expert by a hair, one the second for sure."""
    moe = layer(dim=2, num_experts=2, top_k=1)
    with torch.no_grad():
        moe.gate.weight.copy_(torch.eye(2))
    scores = torch.tensor([[0.51, 0.49]] * 9 + [[1e-9, 1.0]], dtype=torch.float64)
    routed = moe.routed(scores.log())
    assert routed.load.tolist() == [9, 1]
    assert routed.balance_loss.item() == pytest.approx(2 * (0.9 * 0.459 + 0.1 * 0.541))


def test_the_balancing_loss_of_float64_is_float64() -> None:
    moe, x = layer(), torch.randn(7, 6, dtype=torch.float64)
    routed = moe.routed(x)
    mean = moe.gate(x).softmax(-1).mean(0)
    want = 4 * sum(n / 14 * m for n, m in zip(routed.load.tolist(), mean.tolist(), strict=True))
    assert routed.balance_loss.item() == pytest.approx(want, rel=1e-14)


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "made",
    [lambda dtype: layer(dtype=dtype), lambda dtype: layer().to(dtype), lambda dtype: layer()],
    ids=["made", "moved", "double"],
)
@pytest.mark.parametrize("dtype", HALF)
def test_the_bias_keeps_its_precision(made: Any, dtype: torch.dtype) -> None:
    moe = made(dtype)
    moe.bias.fill_(0.5)
    moe.balance(torch.tensor([2**40, 2**40 + 1, 2**40, 2**40 + 3]))
    want = [0.501, 0.5, 0.501, 0.499]
    assert moe.bias.tolist() == pytest.approx(want, abs=1e-7)
    assert moe.to(dtype).bias.tolist() == pytest.approx(want, abs=1e-7)
    assert moe.w_up.dtype == dtype


@pytest.mark.parametrize("dtype", HALF)
def test_experts_of_a_small_dtype_are_chosen_by_small_differences(dtype: torch.dtype) -> None:
    """Where scores are 0.5 that dtype has no number between 0.5 and 0.5 + 2^-9."""
    moe = layer(dtype=dtype, gate="sigmoid")
    with torch.no_grad():
        moe.gate.weight.zero_()
        moe.bias.copy_(torch.tensor([0.0, 0.001, 0.0, 0.002]))
    routed = moe.routed(torch.randn(300, 6, dtype=dtype))
    assert routed.load.tolist() == [0, 300, 0, 300]
    assert (routed.y.dtype, routed.balance_loss.dtype) == (dtype, torch.float32)
    assert routed.balance_loss.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_scores_that_vanish_make_no_nan(dtype: torch.dtype) -> None:
    moe = layer(dtype=dtype, gate="sigmoid")
    with torch.no_grad():
        moe.gate.weight.fill_(-50.0)
    routed = moe.routed(torch.ones(3, 6, dtype=dtype))
    (routed.y.sum() + routed.balance_loss).backward()
    assert not routed.y.any()
    assert not routed.balance_loss.any()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in moe.parameters())


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_a_layer_can_be_written_and_read(gate: str, tmp_path: Path) -> None:
    moe, x = layer(gate=gate), torch.randn(5, 6, dtype=torch.float64)
    torch.save(moe, tmp_path / "layer.pt")
    again = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(again(x), moe(x))


class Balanced(nn.Module):
    """A layer with its balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.moe = MoELayer(4, 5, 4, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            routed = self.moe.routed(x)
            return (routed.y - y).square().mean() + routed.balance_loss


class InParts(Balanced):
    """The mean over what microbatches and replicas are given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        return torch.stack([super(InParts, self).forward(*part) for part in parts]).mean()


def test_the_balancing_loss_is_the_mean_over_microbatches_and_replicas() -> None:
    one = replicas.Case(build=lambda stages: Balanced(), batch=experts.case().batch)
    ranks = replicas.run(one, PAIR, experts.strategy(PAIR, 2, "gpipe"))
    want = replicas.reference(replace(one, build=lambda stages: InParts()))
    replicas.compare(ranks, want, PAIR, 0, part=experts.part_of(2))
    with pytest.raises(AssertionError, match="losses"):  # it is not that of the whole batch
        replicas.compare(ranks, replicas.reference(one), PAIR, 0, part=experts.part_of(2))


def test_balancing_moves_tokens_to_idle_experts() -> None:
    moe = layer(top_k=1, gate="sigmoid")
    moe.bias[0] = 0.5
    x = torch.randn(200, 6, dtype=torch.float64)
    first = moe.routed(x).load
    for _ in range(200):
        moe.balance(moe.routed(x).load, rate=0.005)
    last = moe.routed(x).load
    assert first.max() > 150
    assert last.max() < 80
    assert last.sum() == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gate": "relu"}, "choose from softmax, sigmoid"),
        ({"top_k": 5}, "at most to all"),
        ({"top_k": 0}, "at least"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(piper.PiperStrategyError, match=re.escape(words)):
        layer(**options)


def test_loads_of_several_microbatches_are_added() -> None:
    moe = layer()
    moe.balance(torch.tensor([[3, 0, 1, 0], [0, 1, 3, 0]]), rate=0.25)
    assert moe.bias.tolist() == [-0.25, 0.25, -0.25, 0.25]


@pytest.mark.parametrize("load", [torch.ones(3).long(), torch.ones(4), torch.tensor(4)], ids=str)
def test_a_load_of_something_else_is_refused(load: Tensor) -> None:
    with pytest.raises(piper.PiperStrategyError, match="each of 4 experts"):
        layer().balance(load)
