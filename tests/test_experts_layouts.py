"""Who holds which experts: what no directive sums, and what some group would need all of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import REDUCTIONS, Op
from piper_dynamo.passes import replicate
from tests import experts, jobs, replicas
from tests.experts import EXPERTS
from tests.models import fill, rows


class OneLayer(nn.Module):
    """A gate and experts of one matrix; subclasses say what lies in which region."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(fill([4, EXPERTS], 20))
        self.up = nn.Parameter(fill([EXPERTS, 4, 4], 1))

    def sent(self, x: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Rows for the experts, their routing, and what each counts."""
        weights, index = (x @ self.gate).softmax(-1).topk(2)
        return (*piper.moe.dispatch(x, index, EXPERTS), weights)

    def worked(self, rows: Tensor, routing: Any) -> Tensor:
        """What the experts make of their rows."""
        return torch.tanh(piper.moe.grouped_mm(rows, self.up, routing))

    def mixed(self, x: Tensor) -> Tensor:
        """The layer, its experts a region within the caller's."""
        rows, routing, weights = self.sent(x)
        with piper.annotate("EP"):
            out = self.worked(rows, routing)
        return piper.moe.combine(out, routing, weights)


class Apart(OneLayer):
    """Experts that are no part of a stage: `EP` lies between `PP` 0 and 1, not inside."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            sent, routing, weights = self.sent(x)
        with piper.annotate("EP"):
            out = self.worked(sent, routing)
        with piper.annotate("PP", 1):
            return (piper.moe.combine(out, routing, weights) - y).square().mean()


def frozen() -> Apart:
    model = Apart()
    model.up.requires_grad_(False)
    return model


def meshed(shape: tuple[int, int], *replicated: str, zero: int = 0) -> piper.Strategy:
    """All ranks of a mesh of copies by experts run everything; these tags have a Replicate."""
    ranks = list(range(shape[0] * shape[1]))
    return piper.Strategy(
        piper.Split({}, num_microbatches=2),
        *(piper.Place({tag: "*"}, devices=ranks) for tag in ("PP", "EP")),
        *(piper.Replicate({tag: "*"}, axes=("dp", "ep"), zero=zero) for tag in replicated),
        piper.Shard({"EP": "*"}, axes=("ep",)),
        mesh=piper.Mesh(shape, ("dp", "ep")),
    )


def planned(shape: tuple[int, int], *replicated: str) -> piper.Plan:
    world = shape[0] * shape[1]
    return piper.plan(Apart(), meshed(shape, *replicated), rows(8 * world, 0), world)


COPIED = [(2, 1), (2, 2)]


@pytest.mark.parametrize("shape", COPIED)
def test_copies_that_only_a_shard_speaks_of_are_refused(shape: tuple[int, int]) -> None:
    ranks = tuple(range(shape[0] * shape[1]))
    with pytest.raises(piper.PiperPlanError) as caught:
        planned(shape, "PP")
    text = str(caught.value)
    assert f"ranks {ranks} hold copies of EP0's parameters ('up') and nobody sums" in text
    assert "hint  add piper.Replicate({'EP': 0}, axes=...)" in text
    assert "test_experts_layouts.py:" in text


@pytest.mark.parametrize("shape", COPIED)
def test_control_the_proof_sees_copies_that_nobody_sums(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pass lets through: here all of it."""
    monkeypatch.setattr(replicate, "_unsummed", lambda *args: [])
    with pytest.raises(piper.PiperPlanError, match="the gradient 'grad_up' is not reduced over"):
        planned(shape, "PP")


def test_the_proof_sees_a_gradient_whose_reduction_is_gone() -> None:
    """One copy's experts that are whole on every rank, as any parameter."""
    plan = planned((2, 1), "PP", "EP")
    for program in plan.programs:
        ups = [i for i in program.instrs if i.op in REDUCTIONS and "EP0" in i.task]
        assert [(i.op, i.group) for i in ups] == [(Op.ALL_REDUCE, (0, 1))]
        assert [ranks for _, ranks in program.contributors] == [(0, 1)] * 2


@pytest.mark.parametrize(
    ("build", "shape", "replicated", "zero"),
    [
        (Apart, (2, 1), ("PP", "EP"), 0),
        (Apart, (2, 2), ("PP", "EP"), 1),
        (Apart, (1, 2), ("PP",), 0),
        (frozen, (1, 2), ("PP",), 0),
    ],
)
def test_experts_outside_of_stages_equal_one_process(
    build: Callable[[], Apart], shape: tuple[int, int], replicated: tuple[str, ...], zero: int
) -> None:
    """Without copies a Shard says all there is to say: each expert is on one rank."""
    one = replicas.Case(build=lambda stages: build(), batch=experts.case().batch)
    everywhere = {0: list(range(shape[0] * shape[1]))}

    def job() -> Any:
        # Every rank has all of its part of the batch: each runs both stages.
        mine = [
            tuple(v.chunk(len(everywhere[0]))[piper.rank()] for v in one.batch(k)) for k in range(3)
        ]
        step = piper.compile(build(), meshed(shape, *replicated, zero=zero), mine[0])
        return replicas.train(step, mine)

    ranks = jobs.run_ranks(job, len(everywhere[0]))
    part = experts.part_of(shape[1]) if shape[1] > 1 else replicas.part_of
    replicas.compare(ranks, replicas.reference(one), everywhere, zero, part=part)


class Early(Apart):
    """The loss is made by a region of its own, which has no parameters."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = x @ self.gate
        with piper.annotate("EP"):
            return (h - y).square().mean()


def test_a_loss_that_nobody_sums_is_refused() -> None:
    wanted = piper.Strategy(
        piper.Place({"PP": 0}, devices=[0, 1]),
        piper.Place({"EP": 0}, devices=[2, 3]),
        piper.Replicate({"PP": 0}),
        piper.Shard({"EP": 0}, axes=("ep",)),
        mesh=piper.Mesh((4, 1), ("dp", "ep")),
    )
    with pytest.raises(piper.PiperPlanError, match=r"ranks \(2, 3\) each make the loss of their"):
        piper.plan(Early(), wanted, rows(16, 0), 4)


# Some group would need all experts.


class Whole(OneLayer):
    """The experts of `EP` are used as whole matrices by the stage behind them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            mixed = self.mixed(x)
        with piper.annotate("PP", 1):
            return (mixed - y).square().mean() + self.up.square().mean()


@pytest.mark.parametrize("zero", [0, 1])
def test_experts_that_another_group_uses_whole_are_refused(zero: int) -> None:
    """It is the Shard's doing, whatever the Replicates say."""
    wanted = experts.strategy(replicas.LINE, 2, "gpipe", zero=zero)
    with pytest.raises(piper.PiperPlanError) as caught:
        piper.plan(Whole(), wanted, rows(12, 0), 4)
    text = str(caught.value)
    assert "parameter 'up' of PP0.EP0 (" in text
    assert text.count("is used by F.PP1 on ranks (2, 3) too (") == 1
    assert "use it in expert regions alone" in text


def by_microbatch(*places: tuple[int, int], **shard: Any) -> piper.Strategy:
    """Each microbatch's stage on its own ranks."""
    return piper.Strategy(
        piper.Split({}, num_microbatches=len(places)),
        *(piper.Place({"PP": 0, "MB": k}, devices=ranks) for k, ranks in enumerate(places)),
        piper.Replicate({"PP": "*"}, axes=("dp", "ep")),
        piper.Shard({"EP": "*"}, axes=("ep",), **shard),
        mesh=piper.Mesh((2, 3), ("dp", "ep")),
    )


class OneStage(OneLayer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return (self.mixed(x) - y).square().mean()


@pytest.mark.parametrize("places", [((0, 3), (1, 2), (4, 5)), ((1, 2), (4, 5), (0, 3))])
@pytest.mark.parametrize("capacity", [None, 2])
def test_microbatches_whose_ranks_share_in_unlike_ways_are_refused(
    places: tuple[tuple[int, int], ...], capacity: int | None
) -> None:
    """Ranks 0 and 3 have all experts each, 1 and 2 have half of them."""
    with pytest.raises(piper.PiperPlanError, match="where all experts, or others, would be needed"):
        piper.plan(OneStage(), by_microbatch(*places, capacity=capacity), rows(12, 0), 6)


def test_experts_that_the_second_microbatchs_ranks_use_whole_are_refused() -> None:
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        piper.Place({"PP": 0, "MB": 0}, devices=[0, 1]),
        piper.Place({"PP": 0, "MB": 1}, devices=[2, 3]),
        piper.Place({"PP": 1}, devices=[2, 3]),
        piper.Replicate({"PP": "*"}),
        piper.Shard({"EP": "*"}),
    )
    with pytest.raises(piper.PiperPlanError, match=r"used by F.PP1 on ranks \(2, 3\) too"):
        piper.plan(Whole(), wanted, rows(12, 0), 4)
