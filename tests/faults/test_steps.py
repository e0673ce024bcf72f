"""Sections M, N and Q: split backwards, the loss on every rank, evaluation between steps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import binding
from piper_dynamo import step as step_module
from piper_dynamo.ir.chunk import Chunk, copied, is_matmul
from piper_dynamo.lowering.chunks import compile_chunks
from tests import experts, jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, Layout, about
from tests.jobs import LINE2, LINE4, V2, by_hand
from tests.models import BareLoss, Stack4, rows, weights
from tests.replicas import LINE, PAIR

# Split backwards.


def late_weights(placement: jobs.Placement) -> piper.Strategy:
    """A V whose weight gradients all come at the end."""
    first = "F0.0 F0.1 F0.2 F0.3 F3.0 I3.0 F3.1 I3.1 F3.2 I3.2 F3.3 I3.3 I0.0 I0.1 I0.2 I0.3"
    second = "F1.0 F1.1 F1.2 F1.3 F2.0 F2.1 F2.2 F2.3 I2.0 I2.1 I2.2 I2.3 I1.0 I1.1 I1.2 I1.3"
    texts = []
    for text, stages in ((first, (3, 0)), (second, (2, 1))):
        weights_ = " ".join(f"W{stage}.{k}" for stage in stages for k in range(4))
        texts.append(f"{text} {weights_}".replace("I", "BI").replace("W", "BW"))
    return piper.Strategy(
        piper.Split({}, num_microbatches=4), *jobs.places(placement), *by_hand(*texts)
    )


def test_late_weight_gradients_are_whole() -> None:
    """R59, weight gradients apart and last: stored and scaled, F1's norms."""
    fx.is_f1(fx.run(lambda: Stack4(4), late_weights(V2), EIGHT))


@fx.layouts("zbv")
def test_split_backwards_equal_whole_ones(layout: Layout) -> None:
    """R59, every schedule: F1's norms, whether it splits its backwards or not."""
    fx.is_f1(fx.run(fx.stack(layout), layout.strategy(), EIGHT))


def test_control_weight_gradients_that_are_not_scaled() -> None:
    """R59, signature: weight tasks that undo the factor of the microbatches, four times as much."""

    def unscaled(chunks: Mapping[str, Chunk], *args: Any, **named: Any) -> Any:
        found = {n: times_four(c) if n.startswith("BW") else c for n, c in chunks.items()}
        return compile_chunks(found, *args, **named)

    wanted = jobs.strategy(V2, 4, "zbv")
    with fx.patched(*((module, "compile_chunks", unscaled) for module in (binding, step_module))):
        ranks = fx.run(lambda: Stack4(4), wanted, EIGHT)
    for found in ranks:
        assert found.loss == about(F1.LOSS)
        assert found.norm == about(F1.SUMMED)


def times_four(chunk: Chunk) -> Chunk:
    """A chunk whose products, which are its results, are four times as large."""
    graph = copied(chunk.graph)
    products = [node for node in graph.nodes if is_matmul(node)]
    assert products
    for node in products:
        first, *rest = node.args
        with graph.inserting_before(node):
            large = graph.call_function(torch.ops.aten.mul.Tensor, (first, 4))
        large.meta = dict(first.meta)
        node.args = (large, *rest)
    return replace(chunk, graph=graph, key=f"{chunk.key}x4")


def test_control_weight_gradients_that_are_dropped() -> None:
    """R59, a weight pass that stores nothing: only the last microbatch's is left, over four."""
    with fx.keeping("last"):
        ranks = fx.run(lambda: Stack4(4), jobs.strategy(V2, 4, "zbv"), EIGHT)
    assert [found.norm for found in ranks] == [about(F1.ONLY_LAST)] * 2


# The loss.


@pytest.mark.filterwarnings("ignore:Converting a tensor:UserWarning")
@pytest.mark.parametrize(
    ("placement", "schedule"), [(LINE2, "one_f_one_b"), (V2, "zbv")], ids=["line", "v"]
)
def test_every_rank_prints_the_loss(placement: jobs.Placement, schedule: str) -> None:
    """R62, -1 or None printed as the loss: the true loss on every rank, as a plain number."""

    def job() -> str:
        wanted = jobs.strategy(placement, 4, schedule)
        step = piper.compile(Stack4(len(placement)), wanted, example_inputs=EIGHT)
        loss = step(*EIGHT)
        assert loss.dim() == 0
        assert loss.requires_grad
        return f"{float(loss):.11f}"

    assert jobs.run_ranks(job, 2) == [f"{F1.LOSS:.11f}"] * 2


@pytest.mark.parametrize("zero", replicas.levels(0))
def test_every_replica_has_the_loss_of_all(zero: int) -> None:
    """R62, with replicas, and on a rank without parameters: the loss over all rows."""
    wanted = replicas.strategy(LINE, 2, zero=zero)
    batch = rows(8)
    model, losses = fx.eager(BareLoss, batch)
    assert len(list(model.parameters())) == 2
    for found in fx.run(BareLoss, wanted, batch):
        assert found.loss == about(losses[0], 1e-12)


# Evaluation.


class Dropping(Stack4):
    """F1 with dropout before the second stage."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x
        for k in range(4):
            with piper.annotate("PP", k * self.stages // 4):
                if k == 1:
                    h = F.dropout(h, 0.5, self.training)
                h = torch.tanh(h @ self.w[k].T)
        with piper.annotate("PP", self.stages - 1):
            return F.mse_loss(h, y), h


def alternating(evaluates: bool, layout: Layout) -> list[dict[str, Any]]:
    """Two steps of training, with evaluations before each, or without; by rank."""
    sizes = (8, 4)

    def job() -> dict[str, Any]:
        torch.manual_seed(3)
        model = Dropping(layout.stages)
        wanted = layout.strategy(loss=0)
        step = piper.compile(model, wanted, example_inputs=EIGHT, outputs="everywhere")
        optimizer = fx.sgd(piper.parameters(step))
        stats = torch._dynamo.utils.counters["stats"]
        losses, seen, before = [], [], stats["unique_graphs"]
        for size in sizes:
            if evaluates:
                model.eval()
                with torch.no_grad():
                    loss, out = step(*rows(size))
                assert not loss.requires_grad
                assert not out.requires_grad
                assert all(p.grad is None for p in piper.parameters(step))
                program = piper.explain(step).programs[piper.rank()]
                assert not any(i.bundle_out for i in program.instrs)  # nothing for a backward
                seen.append((loss.item(), out, piper.state_dict(step)))
                model.train()
            loss, _ = step(*EIGHT)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        text = ""
        if evaluates:
            model.eval()
            with torch.no_grad():
                text = jobs.refusal(lambda: step(*rows(3)), Exception)
        graphs = stats["unique_graphs"] - before
        return {"losses": losses, "seen": seen, "text": text, "graphs": graphs}

    return jobs.run_ranks(job, 1 + max(max(r) for r in layout.placement.values()))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(schedule="one_f_one_b", placement=LINE2),
        pytest.param(Layout(schedule="zbv", placement=V2), marks=pytest.mark.slow),
        pytest.param(Layout(schedule="gpipe", placement=LINE4), marks=pytest.mark.slow),
    ],
    ids=["line", "v", "four"],
)
def test_evaluation_between_steps_changes_nothing(layout: Layout) -> None:
    """R67, evaluation and training with one model: outputs in row order, the same masks."""
    quiet, evaluated = alternating(False, layout), alternating(True, layout)
    for without, found in zip(quiet, evaluated, strict=True):
        assert found["losses"] == without["losses"]
        jobs.mentions(found["text"], "3", "4", "x")
        for number, size in enumerate((8, 4)):
            value, seen, state = found["seen"][number]
            model = Dropping(1).eval()
            before = {n: p.clone() for n, p in model.state_dict().items()}
            model.load_state_dict(state)
            assert torch.equal(before["w.0"], state["w.0"]) == (number == 0)  # then it is trained
            loss, out = model(*rows(size))
            jobs.close(seen, out.detach(), f"output before step {number}")
            jobs.close(value, loss.item(), f"loss before step {number}")
        assert found["graphs"] <= 3 * len(evaluated)  # a mode and a size each


# More inputs of the kinds.


@pytest.mark.slow
def test_evaluation_of_experts_before_training() -> None:
    """Another model and layout: experts over two ranks, whose evaluation needs their exchanges."""
    wanted = experts.strategy(PAIR, 2, "")

    def job() -> list[float]:
        given = fx.part(rows(24), wanted)
        step = piper.compile(experts.Mixture(1), wanted, example_inputs=given)
        with torch.no_grad():
            before = step(*given).item()
        loss = step(*given)
        loss.backward()
        return [before, loss.item()]

    want = experts.Mixture(1)(*rows(24)).item()
    assert jobs.run_ranks(job, 2) == [about([want, want], 1e-12)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
def test_evaluation_of_shards_sees_the_last_update_in_float32(zero: int) -> None:
    """Another dtype: a step of training is seen by the evaluation after it."""
    wanted = replicas.strategy(LINE, 2, zero=zero)
    batch = tuple(value.float() for value in EIGHT)

    def job() -> list[float]:
        given = fx.part(batch, wanted)
        step = piper.compile(Stack4(2).float(), wanted, example_inputs=given)
        optimizer = fx.sgd(piper.parameters(step))
        found = []
        for _ in range(2):
            with torch.no_grad():
                found.append(step(*given).item())
            step(*given).backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert jobs.run_ranks(job, 4) == [pytest.approx(F1.SGD[:2], abs=1e-6)] * 4


class TwoUses(nn.Module):
    """A weight used twice in a stage: both parts of its gradient are its weight task's."""

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(torch.tanh(x @ self.w[0].T) @ self.w[0].T)
        with piper.annotate("PP", 1):
            return F.mse_loss(torch.tanh(torch.tanh(h @ self.w[1].T) @ self.w[1]), y)


@pytest.mark.parametrize("zero", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_weight_used_twice_under_a_split_backward(zero: int | None) -> None:
    """Split backwards of another model: sums inside of one weight task."""
    if zero is None:
        fx.equals_eager(TwoUses, jobs.strategy(LINE2, 4, "zb_h1"), EIGHT)
        return
    case = replicas.Case(build=TwoUses, batch=replicas.numbers)
    ranks = replicas.run(case, LINE, replicas.strategy(LINE, 2, "zb_h1", zero=zero), steps=2)
    replicas.compare(ranks, replicas.reference(case, steps=2), LINE, zero)


def test_layer_norms_split_their_backward_in_float32() -> None:
    """Split backwards of an operator that gives both gradients at once, in float32."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.norm = weights(2), nn.LayerNorm(4, dtype=torch.float64)
            self.float()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                h = torch.tanh(x @ self.w[0].T)
            with piper.annotate("PP", 1):
                return F.mse_loss(torch.tanh(self.norm(h) @ self.w[1].T), y)

    batch = tuple(value.float() for value in EIGHT)
    ranks = fx.run(Normed, jobs.strategy(LINE2, 4, "zb_h1"), batch)
    model, _ = fx.eager(Normed, batch)
    for found in ranks:
        for name, grad in found.grads.items():
            want = dict(model.named_parameters())[name].grad
            torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)
