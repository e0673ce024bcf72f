"""Section P: values that stages further on use."""

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, Layout, about
from tests.jobs import LINE4, LOOP2, V2
from tests.models import Stack4, fill, rows
from tests.replicas import LOOP


def skipping(layout: Layout) -> Stack4:
    """F1-skip on the layout's stages."""
    return Stack4(layout.stages, "last")


@fx.layouts("zbv")
def test_a_value_of_the_first_stage_reaches_the_last(layout: Layout) -> None:
    """R66, skip connections: F1-skip's loss and norms, direct or through a loop or V."""
    if layout.stages < 4:
        fx.equals_eager(lambda: skipping(layout), layout.strategy(), EIGHT)
        return
    ranks = fx.run(lambda: skipping(layout), layout.strategy(), EIGHT)
    assert [found.loss for found in ranks] == [about(F1.SKIP_LOSS)] * len(ranks)
    each = fx.norms(ranks)
    assert [each[f"w.{k}"] for k in range(4)] == about(list(F1.SKIP_NORMS))


@fx.layouts("zb_h1")
def test_a_value_of_the_first_stage_reaches_all(layout: Layout) -> None:
    """R66, from the first stage to every later one at once."""
    fx.equals_eager(lambda: Stack4(layout.stages, "all"), layout.strategy(), EIGHT)


@pytest.mark.parametrize(
    ("placement", "targets"),
    [(LINE4, [1, 2, 3]), (LOOP2, [1]), (V2, [1])],
    ids=["line", "loop", "v"],
)
def test_it_is_sent_once_to_each_rank(placement: jobs.Placement, targets: list[int]) -> None:
    """R66, one send per destination rank and not per use; straight there."""
    plan = piper.plan(Stack4(4, "all"), jobs.strategy(placement, 2, "gpipe"), EIGHT)
    first = [i for i in plan.programs[0].instrs if i.op is Op.SEND and i.task == "F.PP0.MB0"]
    assert sorted(i.peer for i in first) == targets


def test_its_gradients_meet_where_it_was_made() -> None:
    """R66, the gradient over the skip goes straight back, and is added on the first stage's rank.

    What its forward kept is there until both have come.
    """
    plan = piper.plan(Stack4(4, "last"), jobs.strategy(LINE4, 2, "one_f_one_b"), EIGHT)
    adds = {
        name
        for name, chunk in plan.chunks.items()
        if chunk.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    }
    assert adds & {name for name in plan.chunks if name.startswith("B")} == {"B_PP0"}
    back = [i for i in plan.programs[3].instrs if i.op is Op.SEND and i.task == "B.PP3.MB0"]
    assert sorted(i.peer for i in back) == [0, 2]
    instrs = plan.programs[0].instrs
    (backward,) = (i for i in instrs if i.op is Op.RUN and i.task == "B.PP0.MB0")
    came = [i for i in instrs if i.op is Op.WAIT and set(i.outputs) & set(backward.inputs)]
    freed = [i for i in instrs if i.op is Op.FREE and backward.bundle_in in i.inputs]
    assert [i.peer for i in came] == [3, 1]
    assert instrs.index(came[-1]) < instrs.index(backward) < instrs.index(freed[0])


class Lost(Stack4):
    """F1-skip whose gradient over the skip is lost."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = first = x
        for k in range(4):
            with piper.annotate("PP", k):
                h = torch.tanh((h + first.detach() if k == 3 else h) @ self.w[k].T)
                if k == 0:
                    first = h
        with piper.annotate("PP", 3):
            return (h - y).square().mean()


def test_control_a_gradient_over_the_skip_that_is_lost() -> None:
    """R66, signature: the first weight's gradient is that of the main way alone."""
    ranks = fx.run(lambda: Lost(4), jobs.strategy(LINE4, 4), EIGHT)
    assert fx.norms(ranks)["w.0"] == about(F1.SKIP_LOST, 1e-9)
    assert ranks[0].loss == about(F1.SKIP_LOSS)


# More inputs of the kind.


class Ladder(nn.Module):
    """A U: each stage of the way down is used by its twin on the way up, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(fill([4, 4], k).float()) for k in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = []
        for k in range(3):
            with piper.annotate("PP", k):
                x = torch.tanh(x @ self.w[k].T)
                kept.append(x)
        for k in range(3, 6):
            with piper.annotate("PP", k):
                x = torch.tanh((x + kept[5 - k]) @ self.w[k].T)
        with piper.annotate("PP", 5):
            return (x - y).square().mean()


@pytest.mark.parametrize(
    ("placement", "schedule"),
    [
        ({0: [0], 1: [1], 2: [2], 3: [2], 4: [1], 5: [0]}, "zbv"),
        pytest.param({k: [k % 2] for k in range(6)}, "interleaved_1f1b", marks=pytest.mark.slow),
    ],
)
def test_a_u_in_float32(placement: jobs.Placement, schedule: str) -> None:
    """Another model, layout and dtype: in a V the twins are on one rank and send nothing."""
    batch = tuple(value.float() for value in rows(8))
    wanted = jobs.strategy(placement, 4, schedule)
    ranks = fx.run(Ladder, wanted, batch)
    model, losses = fx.eager(Ladder, batch)
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        for name, grad in found.grads.items():
            want = dict(model.named_parameters())[name].grad
            torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)
    if schedule == "zbv":
        plan = piper.plan(Ladder(), wanted, batch)
        # Four borders, both ways, four microbatches.
        sends = [i.task for p in plan.programs for i in p.instrs if i.op is Op.SEND]
        assert sum(task[0] in "FB" for task in sends) == 4 * 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
def test_skips_between_replicas(zero: int) -> None:
    """Another layout: two replicas of a loop, at every level."""
    case = replicas.CASES["skip"]
    wanted = replicas.strategy(LOOP, 4, "interleaved_1f1b", zero=zero)
    ranks = replicas.run(case, LOOP, wanted, steps=1)
    replicas.compare(ranks, replicas.reference(case, steps=1), LOOP, zero)
