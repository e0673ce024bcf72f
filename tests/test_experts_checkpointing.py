"""Experts under checkpointing: computed again in the backward, but chosen and sent for once."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from piper_dynamo import planning
from piper_dynamo.ir.alias import operator_name
from piper_dynamo.ir.program import EXCHANGES
from piper_dynamo.passes import recompute
from tests import experts, jobs, replicas
from tests.experts import EXPERTS, Mixture
from tests.models import fill, rows
from tests.replicas import PAIR


class Checkpointed(Mixture):
    """Every mixture is computed again in the backward, its exchanges are not."""

    def mix(self, h: Tensor, layer: int) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            return super(Checkpointed, self).mix(h, layer)

        out: Tensor = checkpoint(inner, h, use_reentrant=False)
        return out


@pytest.mark.slow
def test_rows_do_not_travel_again_under_checkpointing() -> None:
    one, wanted = experts.case(), experts.strategy(PAIR, 2, "gpipe")
    again = replicas.Case(build=Checkpointed, batch=one.batch)
    replicas.compare(
        replicas.run(again, PAIR, wanted),
        replicas.reference(one),
        PAIR,
        0,
        part=experts.part_of(2),
    )
    plans = [piper.plan(kind(1), wanted, rows(12, 0), 2) for kind in (Mixture, Checkpointed)]
    kept, remade = ([i.op for i in p.programs[0].instrs if i.op in EXCHANGES] for p in plans)
    assert kept == remade
    products = [sum(chunk.matmuls for chunk in plan.chunks.values()) for plan in plans]
    assert products[0] < products[1]


def choosing(plan: piper.Plan) -> set[str]:
    """The operators in backward chunks that choose places, or sort by them."""
    return {
        operator_name(node)
        for name, chunk in plan.chunks.items()
        for node in chunk.graph.nodes
        if name.startswith("B") and operator_name(node) in ("topk", "sort", "argmax", "route")
    }


def decide_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: checkpoints compute choices again; nothing is known of what was captured before."""
    monkeypatch.setattr(recompute, "_decisions", lambda graph: set())
    monkeypatch.setattr(planning, "_templates", {})
    torch._dynamo.reset()


def test_experts_are_chosen_once_under_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen again where scores are nearly equal, they would not be those that had the rows."""
    wanted, batch = experts.strategy(PAIR, 2, "gpipe"), rows(12, 0)
    assert choosing(piper.plan(Checkpointed(1), wanted, batch, 2)) == set()
    decide_again(monkeypatch)
    assert choosing(piper.plan(Checkpointed(1), wanted, batch, 2)) == {"topk", "route"}


_calls = [0]


@torch.library.custom_op("piper_tests::tilted", mutates_args=())
def tilted(x: Tensor) -> Tensor:
    """As a kernel that is fused otherwise in the backward: last bits differ from call to call."""
    _calls[0] += 1
    tilt = torch.arange(x.shape[1], dtype=x.dtype) * 1e-15
    return x + (tilt if _calls[0] % 2 else tilt.flip(0))


tilted.register_fake(torch.empty_like)
tilted.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)


class Undecided(nn.Module):
    """One checkpointed mixture, whose gate finds all experts equally good."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(4, EXPERTS, dtype=torch.float64))
        self.up = nn.Parameter(fill([EXPERTS, 4, 4], 1))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            out: Tensor = checkpoint(self.mix, x, use_reentrant=False)
            return out.square().mean()

    def mix(self, x: Tensor) -> Tensor:
        weights, index = tilted(x @ self.gate).softmax(-1).topk(2)
        sent, routing = piper.moe.dispatch(x, index, EXPERTS)
        with piper.annotate("EP"):
            out = torch.tanh(piper.moe.grouped_mm(sent, self.up, routing))
        return piper.moe.combine(out, routing, weights)


def gradient_at_a_tie() -> tuple[Tensor, Tensor]:
    """The gate's gradient under Piper, and that of a process that keeps what it computed."""
    (x, _), found = rows(12, 0), []
    alone = Undecided()
    _calls[0] = 0
    alone.mix(x).square().mean().backward()
    step = piper.compile(Undecided(), experts.strategy({0: [0]}, 1, ""), (x,))
    _calls[0] = 0
    step(x).backward()
    for params in (dict(piper.named_parameters(step)), dict(alone.named_parameters())):
        assert params["gate"].grad is not None
        found.append(params["gate"].grad)
    return found[0], found[1]


def test_a_tie_that_a_checkpoint_would_decide_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.close(*gradient_at_a_tie(), "gate")
    decide_again(monkeypatch)
    got, want = gradient_at_a_tie()
    assert (got - want).abs().max() > 1e-3
