"""Section C: experts over ranks: one gradient for every layout, and no token is no hang."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from piper_dynamo.runtime import exchange
from tests import experts, jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, Layout, Moe2, about
from tests.jobs import LINE4, LOOP2
from tests.models import rows, weights
from tests.replicas import PAIR

QUAD: jobs.Placement = {0: [0, 1, 2, 3]}


def expert_gradients(
    wanted: piper.Strategy, *batches: fx.Batch, clear: bool = True
) -> list[list[float]]:
    """The gradients of the experts that each rank holds, after each batch."""

    def job() -> list[list[float]]:
        mine = [fx.part(batch, wanted) for batch in batches]
        step = piper.compile(Moe2(), wanted, example_inputs=mine[0])
        found = []
        for given in mine:
            step(*given).backward()
            found.append(replicas.grads(step)["experts"].flatten().tolist())
            for p in piper.parameters(step):
                p.grad = None
        return found

    return jobs.run_ranks(job, fx.world(wanted))


def pair(microbatches: int = 1, zero: int = 0) -> piper.Strategy:
    """Two ranks with an expert and half of the tokens each."""
    return experts.strategy(PAIR, microbatches, "", zero=zero)


# Scale.


@pytest.mark.parametrize("zero", replicas.levels(0))
def test_expert_gradients_are_those_of_one_process(zero: int) -> None:
    """R15, gradients EP times too large: 1.0 and 1.5 with an expert on each of two ranks."""
    assert expert_gradients(pair(zero=zero), Moe2.batch()) == [[[about(1.0)]], [[about(1.5)]]]


@pytest.mark.parametrize("zero", replicas.levels(3))
def test_experts_that_two_ranks_hold_have_one_gradient(zero: int) -> None:
    """R15, EP = 2 and two copies of each expert: the mean over all eight tokens."""
    wanted = experts.copies(1, QUAD, "", zero=zero)
    model, _ = fx.eager(Moe2, Moe2.batch(8))
    want = dict(model.named_parameters())["experts"].grad
    assert want is not None
    assert want.flatten().tolist() == [2.0, 2.5]
    found = [rank[0] for rank in expert_gradients(wanted, Moe2.batch(8))]
    if zero:  # of two copies of one expert's row, the first holds it and the second an empty block
        assert found == [[about(2.0)], [about(2.5)], [], []]
    else:
        assert found == [[about(2.0)], [about(2.5)]] * 2


@pytest.mark.parametrize(("factor", "want"), [(2.0, [2.0, 3.0]), (0.5, [0.5, 0.75])])
def test_control_expert_gradients_not_divided_or_twice(factor: float, want: list[float]) -> None:
    """R15, signatures: what the backward's exchange sends, scaled too little or too often."""

    def scaled(name: str, rank: int, value: Tensor) -> Tensor:
        return value * factor if name == "exchange" and (value < 0.9).all() else value

    with fx.collectives(scaled):  # tokens are 1 and more, what flows back is 1/4 of a weight
        found = expert_gradients(pair(), Moe2.batch())
    assert [rank[0] for rank in found] == [[about(w)] for w in want]


@pytest.mark.parametrize(
    ("placement", "copied"), [(PAIR, False), pytest.param(QUAD, True, marks=pytest.mark.slow)]
)
def test_an_update_has_no_factor_of_the_axes(placement: jobs.Placement, copied: bool) -> None:
    """R16, an axis carved out of replicas: SGD of 1 gives 0.0 and 0.5 in every layout."""
    wanted = experts.copies(1, placement, "") if copied else pair()

    def job() -> list[float]:
        batch = Moe2.batch(4)
        mine = fx.part(batch, wanted)
        step = piper.compile(Moe2(), wanted, example_inputs=mine)
        optimizer = fx.sgd(piper.parameters(step))
        step(*mine).backward()
        optimizer.step()
        return [v for p in piper.parameters(step) for v in replicas.local(p).flatten().tolist()]

    want = [[about(0.0)], [about(0.5)]] * (len(placement[0]) // 2)
    assert jobs.run_ranks(job, fx.world(wanted)) == want


# No tokens.


@pytest.mark.parametrize("zero", replicas.levels(0, 3))
def test_an_expert_without_tokens_has_a_zero_gradient(zero: int) -> None:
    """R18, an idle rank: all tokens to one expert, then to the other; nothing hangs."""
    wanted = pair(2, zero)
    first, second = expert_gradients(
        wanted, Moe2.batch(experts=(0,)), Moe2.batch(experts=(1,)), Moe2.batch(experts=(0, 0, 1))
    )
    assert first[:2] == [[about(2.5)], [0.0]]
    assert second[:2] == [[0.0], [about(2.5)]]
    assert first[2] == [about((1 + 2 + 4) / 4)]  # of one microbatch no token is for expert 1
    assert second[2] == [about(3 / 4)]


def test_every_rank_issues_every_exchange() -> None:
    """R18, collectives of an idle rank: the program does not depend on the tokens."""
    plan = piper.plan(Moe2(), pair(2), Moe2.batch())
    counts = [[i.op for i in p.instrs if i.op in exchange.EXCHANGES] for p in plan.programs]
    assert counts[0] == counts[1]
    # Of each of two microbatches: there and back, and the backward's own way back of gradients.
    assert counts[0].count(Op.EXCHANGE) == counts[0].count(Op.UNEXCHANGE) + 2
    assert counts[0].count(Op.EXCHANGE_COUNTS) == 2


# Counts that depend on data.


@pytest.mark.slow
def test_new_counts_compile_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """R19, data-dependent splits: one graph for three steps, of fewer tokens and of none."""
    seen: set[tuple[int, ...]] = set()
    real = exchange._splits

    def watched(asked: Tensor, arrived: Tensor) -> exchange.Splits:
        seen.add(tuple(arrived.flatten().tolist()))
        return real(asked, arrived)

    monkeypatch.setattr(exchange, "_splits", watched)
    shift = (0.3, 0.0, 0.0, -9.0)  # nobody chooses the last expert
    model = lambda: experts.Mixture(1, shift=shift)  # noqa: E731
    want = [model()(*rows(24, 2 * k)).item() for k in range(3)]
    stats = torch._dynamo.utils.counters["stats"]

    def job() -> tuple[list[float], int]:
        wanted = experts.strategy(PAIR, 2, "gpipe")
        batches = [fx.part(rows(24, 2 * k), wanted) for k in range(3)]
        step = piper.compile(model(), wanted, example_inputs=batches[0])
        losses, graphs = [], []
        for batch in batches:
            loss = step(*batch)
            loss.backward()
            losses.append(loss.item())
            graphs.append(stats["unique_graphs"])  # of both ranks, which have compiled by now
        return losses, graphs[-1] - graphs[0]

    for losses, graphs in jobs.run_ranks(job, 2):
        assert losses == pytest.approx(want, abs=1e-12)
        assert graphs == 0
    assert any(0 in counts for counts in seen)
    assert len(seen) > 3


# A balancing loss.


class Balanced(nn.Module):
    """F1 with 0.01 mean(h1 ** 2) of the second stage in the loss."""

    def __init__(self, stages: int = 4) -> None:
        super().__init__()
        self.w, self.stages = weights(4), stages

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = x
        for k in range(4):
            with piper.annotate("PP", k * self.stages // 4):
                h = torch.tanh(h @ self.w[k].T)
                if k == 1:
                    aux = 0.01 * h.square().mean()
        with piper.annotate("PP", self.stages - 1):
            mse = F.mse_loss(h, y)
            return {"loss": mse + aux, "mse": mse.detach(), "aux": aux.detach()}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(schedule="one_f_one_b", placement=LINE4),
        pytest.param(Layout(schedule="interleaved_1f1b", placement=LOOP2), marks=pytest.mark.slow),
        Layout(schedule="zb_h1", placement=LINE4),
    ],
    ids=lambda layout: layout.schedule,
)
def test_a_loss_of_an_early_stage_has_its_gradient(layout: Layout) -> None:
    """R21, an auxiliary loss of a stage that is not the last: the same mean, both told apart."""

    def job() -> tuple[float, dict[str, float], dict[str, Tensor]]:
        wanted = layout.strategy(loss="loss")
        step = piper.compile(
            Balanced(layout.stages), wanted, example_inputs=EIGHT, outputs="everywhere"
        )
        out = step(*EIGHT)
        out["loss"].backward()
        parts = {name: out[name].mean().item() for name in ("mse", "aux")}
        return out["loss"].item(), parts, replicas.grads(step)

    model = Balanced(4)
    want = model(*EIGHT)
    want["loss"].backward()
    ranks = jobs.run_ranks(job, 1 + max(max(r) for r in layout.placement.values()))
    jobs.check_grads([grads for *_, grads in ranks], model)
    for loss, parts, _ in ranks:
        assert loss == about(want["loss"].item(), 1e-12)
        assert parts["mse"] == about(want["mse"].item(), 1e-12)
        assert parts["aux"] == about(want["aux"].item(), 1e-12)


# More inputs of the kind.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("top", "shift"),
    [(2, (9.0, 0.0, -9.0, -9.0)), (1, (9.0, 0.0, 0.0, 0.0))],
)
def test_idle_experts_under_a_pipeline(top: int, shift: Sequence[float]) -> None:
    """Another model and layout: a V whose experts are on two ranks each, most of them idle."""
    wanted = experts.strategy(replicas.VEE, 4, "zbv")
    options: dict[str, Any] = {"top": top, "shift": tuple(shift)}
    experts.check(wanted, replicas.VEE, **options)


def test_expert_gradients_in_float32() -> None:
    """Another dtype: as above, to float32's precision."""

    class Single(Moe2):
        def __init__(self) -> None:
            super().__init__()
            self.float()

    x, chosen = Moe2.batch()
    ranks = fx.run(Single, pair(2), (x.float(), chosen))
    assert [found.grads["experts"].flatten().tolist() for found in ranks] == [
        [pytest.approx(1.0, abs=1e-6)],
        [pytest.approx(1.5, abs=1e-6)],
    ]
