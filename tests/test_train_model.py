"""The training job's model against plainer arithmetic, its optimizer, and its comparison."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import piper_dynamo as piper
from piper_dynamo.train.compare import Reference, one_process, verdict
from piper_dynamo.train.config import Config
from piper_dynamo.train.data import Corpus
from piper_dynamo.train.model import (
    VOCAB,
    Attention,
    Llama,
    build,
    flops_per_token,
    rotary_table,
    rotate,
)
from piper_dynamo.train.optim import learning_rate, make_optimizer, set_learning_rate
from tests import jobs
from tests.test_train_data import counting

SMALL = Config(dim=16, layers=4, heads=4, kv_heads=2, seq=12, batch=4, dtype="float64")


def small(**changed: object) -> Config:
    options = {**SMALL.as_dict(), **changed}
    return Config(**options)  # type: ignore[arg-type]


def batch(config: Config = SMALL, step: int = 0) -> tuple[Tensor, Tensor]:
    return counting().batch("train", step, seed=0, rows=config.batch, seq=config.seq)


# Parts


def test_rotation_keeps_lengths_and_sees_distances_only():
    """The product of a turned query and a turned key depends on how far apart they are."""
    cos, sin = rotary_table(10, 8)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    turned_q = rotate(query.expand(1, 1, 10, 8), cos, sin)[0, 0]
    turned_k = rotate(key.expand(1, 1, 10, 8), cos, sin)[0, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), query.norm().expand(10))
    products = turned_q @ turned_k.T
    for distance in range(-9, 10):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    torch.testing.assert_close(turned_q[0], query)


def plain_attention(module: Attention, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Head by head, with the key and value head of its group and an explicit mask."""
    batch_, tokens, _ = x_BTD.shape
    width = module.head_dim
    outs = []
    for head in range(module.heads):
        group = head // (module.heads // module.kv_heads)
        mine, shared = (
            slice(head * width, (head + 1) * width),
            slice(group * width, (group + 1) * width),
        )
        q = rotate((x_BTD @ module.query.weight.T)[..., mine][:, None], cos, sin)[:, 0]
        k = rotate((x_BTD @ module.key.weight.T)[..., shared][:, None], cos, sin)[:, 0]
        v = (x_BTD @ module.value.weight.T)[..., shared]
        scores = q @ k.transpose(1, 2) / math.sqrt(width)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        outs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)
    assert outs[0].shape == (batch_, tokens, width)
    return torch.cat(outs, -1) @ module.out.weight.T


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_grouped_and_causal(kv_heads: int):
    module = Attention(16, 4, kv_heads).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    cos, sin = rotary_table(6, 4)
    torch.testing.assert_close(module(x, cos, sin), plain_attention(module, x, cos, sin))


# The model


def logits(model: Llama, tokens: Tensor) -> Tensor:
    """The model's predictions, caught on their way into the loss."""
    found: list[Tensor] = []
    hook = model.head.register_forward_hook(lambda _, __, output: found.append(output))
    model(tokens, tokens)
    hook.remove()
    return found[0]


def test_loss_is_the_mean_cross_entropy_in_nats():
    model = build(SMALL)
    tokens, targets = batch()
    want = F.cross_entropy(logits(model, tokens).reshape(-1, VOCAB), targets.reshape(-1))
    loss = model(tokens, targets)
    torch.testing.assert_close(loss, want)
    assert loss.dim() == 0
    assert loss.item() == pytest.approx(math.log(VOCAB), rel=0.05)


def test_sees_no_later_tokens():
    model = build(SMALL)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 7:] = 255 - changed[:, 7:]
    before, after = logits(model, tokens), logits(model, changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_every_parameter_gets_a_gradient():
    model = build(SMALL)
    model(*batch()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_every_rank_builds_the_same_model():
    state = build(SMALL).state_dict()
    torch.rand(3)
    again = build(SMALL).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    other = build(small(seed=1)).state_dict()
    assert not torch.equal(state["head.weight"], other["head.weight"])


def test_tied_head_is_one_parameter():
    tied, untied = build(small(tied_head=True)), build(SMALL)
    assert tied.head.weight is tied.embedding.weight
    assert (
        sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
        == VOCAB * SMALL.dim
    )
    assert flops_per_token(tied, small(tied_head=True)) == flops_per_token(untied, SMALL)


def test_positions_are_no_state():
    assert not any("cos" in name or "sin" in name for name in build(SMALL).state_dict())
    assert build(SMALL).cos.dtype is torch.float64


def test_flops_of_a_token():
    """By hand: per layer q and out 16x16, k and v 16x8, the MLP three times 16x64; the head."""
    weights = 4 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 64) + 16 * 256
    attention = 4 * 6 * 16 * 12
    assert flops_per_token(build(SMALL), SMALL) == 6 * weights + attention


@pytest.mark.parametrize(
    ("layers", "schedule", "pp", "want"),
    [
        (4, "gpipe", 2, [0, 0, 1, 1]),
        (4, "zbv", 2, [0, 1, 2, 3]),
        (5, "gpipe", 2, [0, 0, 0, 1, 1]),
        (3, "gpipe", 1, [0, 0, 0]),
    ],
)
def test_layers_are_spread_over_the_stages(layers: int, schedule: str, pp: int, want: list[int]):
    config = small(layers=layers, schedule=schedule, pp=pp)
    assert build(config).stage_of == want
    assert config.stages == max(want) + 1


@pytest.mark.parametrize(
    ("schedule", "tied_head"),
    [
        ("gpipe", False),
        ("one_f_one_b", True),
        pytest.param("interleaved_1f1b", False, marks=pytest.mark.slow),
        ("zbv", False),
        ("dualpipe", False),
    ],
)
def test_pipelined_steps_equal_one_process(schedule: str, tied_head: bool):
    """The job's model, strategy, optimizer and clipping over in-process ranks."""
    config = small(schedule=schedule, tied_head=tied_head, steps=3, warmup=0, clip=0.1)
    corpus = counting()

    def rank() -> tuple[list[float], list[float]]:
        def rows(step: int) -> tuple[Tensor, Tensor]:
            return corpus.batch("train", step, seed=0, rows=config.batch, seq=config.seq)

        step = piper.compile(build(config), config.strategy(), rows(0))
        optimizer = make_optimizer(piper.parameters(step), config)
        losses, norms = [], []
        for number in range(config.steps):
            set_learning_rate(optimizer, number, config)
            loss = step(*rows(number))
            loss.backward()
            norms.append(float(piper.clip_grad_norm_(step, config.clip)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms

    want = one_process(config, corpus)
    assert want.losses[0] != want.losses[1] != want.losses[2]
    for losses, norms in jobs.run_ranks(rank, config.pp):
        assert want.max_relative_difference(losses, norms) < 1e-12


# Optimizer


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    config = Config(lr=1.0, warmup=10, steps=110)
    rates = [learning_rate(step, config) for step in range(110)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 20), (5, 5), (3, 2)])
def test_learning_rate_of_short_runs(steps: int, warmup: int):
    config = Config(lr=1.0, warmup=warmup, steps=steps)
    assert all(0 < learning_rate(step, config) <= 1 for step in range(steps))


def test_gains_are_not_decayed():
    model = build(SMALL)
    optimizer = make_optimizer(model.parameters(), SMALL)
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (SMALL.weight_decay, 0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
    assert set_learning_rate(optimizer, 0, SMALL) == optimizer.param_groups[1]["lr"]


def test_learns_what_is_easy():
    """The next byte is one more than this one: soon far below the first loss."""
    config = small(lr=1e-2, warmup=2, steps=60, dtype="float32")
    model = build(config)
    optimizer = make_optimizer(model.parameters(), config)
    losses = []
    for step in range(config.steps):
        set_learning_rate(optimizer, step, config)
        loss = model(*batch(config, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


# Comparison


def test_difference_is_the_largest_relative_one():
    reference = Reference(losses=(2.0, 4.0), norms=(1.0, 1.0))
    assert reference.max_relative_difference([2.0, 4.4], [1.0, 0.99]) == pytest.approx(0.1)
    assert reference.max_relative_difference([2.0, 4.0, 9.0], [1.0, 1.5, 9.0]) == 0.5


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_a_number_is_never_equal(place: int, wrong: float):
    values = [2.0, 4.0, 1.0, 1.0]
    reference = Reference(losses=(2.0, 4.0), norms=(1.0, 1.0))
    values[place] = wrong
    assert reference.max_relative_difference(values[:2], values[2:]) == math.inf


def test_a_reference_of_one_step():
    corpus: Corpus = counting()
    reference = one_process(small(steps=1), corpus)
    assert len(reference.losses) == len(reference.norms) == 1
    assert verdict(0.0, SMALL, 1) == "equal to one process: max difference 0.0e+00 over 1 step"


def test_verdict_says_what_rounding_explains():
    single = small(dtype="float32")
    assert verdict(3e-7, single, 3).startswith("equal to one process: max difference 3.0e-07")
    assert verdict(3e-6, single, 3).startswith("DIFFERS from one process")
    assert verdict(3e-6, small(dtype="float32", compile="inductor"), 3).startswith("equal")
    assert "DIFFERS" in verdict(math.inf, single, 3)
