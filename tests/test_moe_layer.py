"""The ready mixture-of-experts layer against the sum it stands for."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import piper_dynamo as piper
from piper_dynamo.moe import MoELayer


def layer(**options: Any) -> MoELayer:
    torch.manual_seed(3)
    shape = {"dim": 6, "hidden": 5, "num_experts": 4, "top_k": 2, "dtype": torch.float64}
    return MoELayer(**{**shape, **options})


def by_hand(moe: MoELayer, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for token in x.flatten(0, -2):
        logits = moe.gate(token)
        score = torch.sigmoid(logits) if "sigmoid" in str(moe._score) else logits.softmax(-1)
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
