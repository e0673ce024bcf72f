"""What experts with a capacity cannot be, and plans in which rows would get lost."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.verify import verify
from piper_dynamo.runtime.exchange import pack
from tests import experts, jobs
from tests.experts import EXPERTS, Mixture
from tests.models import rows
from tests.replicas import PAIR
from tests.test_experts_refusals import Odd, changed

ALONE = {0: [0]}


# Mutated plans.


@pytest.fixture(scope="module")
def even() -> piper.Plan:
    return piper.plan(Mixture(1), experts.strategy(PAIR, 1, "", capacity=2), rows(12, 0), 2)


def narrower(plan: piper.Plan, op: Op, by: int) -> list[Any]:
    """The first exchange of that kind with fewer rows, on every rank."""

    def specs(instr: Any) -> Any:
        (spec,) = instr.specs
        shape = (spec.shape[0] - by, *spec.shape[1:])
        return (type(spec)(shape=shape, dtype=spec.dtype, stride=spec.stride),)

    return changed(plan, op, specs=specs)


@pytest.mark.parametrize("op", [Op.EXCHANGE, Op.UNEXCHANGE])
def test_rows_come_back_as_they_went(even: piper.Plan, op: Op) -> None:
    verify(even.programs)
    with pytest.raises(piper.PiperPlanError, match="evenly, 8 rows, over") as caught:
        verify(narrower(even, op, 2))
    assert "evenly, 6 rows, over" in str(caught.value)


def test_ranks_agree_on_how_many_rows_there_are(even: piper.Plan) -> None:
    wrong = narrower(even, Op.EXCHANGE, 2)
    with pytest.raises(piper.PiperPlanError, match="collective 0 differs between rank 0"):
        verify([even.programs[0], wrong[1]])


def test_rows_that_ranks_do_not_divide_are_refused(even: piper.Plan) -> None:
    with pytest.raises(piper.PiperPlanError, match="7 rows cannot go evenly to 2 ranks"):
        verify(narrower(even, Op.EXCHANGE, 1))


def test_rows_that_come_back_another_way_are_refused(even: piper.Plan) -> None:
    with pytest.raises(piper.PiperPlanError, match="rows are exchanged evenly, 8 rows, over"):
        verify(changed(even, Op.UNEXCHANGE, stream="other"))


def test_rows_that_go_by_counts_come_back_by_counts() -> None:
    plan = piper.plan(Mixture(1), experts.strategy(PAIR, 1, ""), rows(12, 0), 2)
    with pytest.raises(piper.PiperPlanError, match=r"PP0[.]EP0, microbatch 0, by counts"):
        verify(changed(plan, Op.UNEXCHANGE, inputs=lambda instr: instr.inputs[:1]))


# Refusals.


def test_a_capacity_is_a_number_above_zero() -> None:
    for wrong in (0, -1, 0.0, True, float("nan"), float("inf"), "2", (2,)):
        with pytest.raises(piper.PiperStrategyError, match=r"rows \(int\) or a factor \(float\)"):
            piper.Shard({"EP": "*"}, capacity=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", [ALONE, PAIR], ids=["alone", "pair"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("bias", "parameter 'bias' otherwise than as a weight of piper.moe.grouped_mm"),
        ("reads", "piper.moe.dispatch did not send there"),
        ("leaves", "piper.moe.combine does not bring back"),
        ("alone", "_softmax works along the rows"),
        ("random", "draws random numbers"),
        ("added up", "treat every row alike"),
        ("baked", "treat every row alike"),
    ],
)
def test_what_experts_with_a_capacity_cannot_be(
    what: str, words: str, placement: jobs.Placement
) -> None:
    """On one rank too, so that what works there works on several."""
    wanted = experts.strategy(placement, 2, "gpipe", capacity=2)
    with pytest.raises(piper.PiperPlanError, match=re.escape(words)) as caught:
        piper.plan(Odd(what), wanted, rows(12, 0), len(placement[0]))
    assert "test_experts_refusals.py:" in str(caught.value)


def test_a_buffer_of_all_experts_is_refused() -> None:
    wanted = experts.strategy(PAIR, 2, "gpipe", capacity=2)
    with pytest.raises(piper.PiperPlanError, match="buffer 'fixed' expert by expert"):
        piper.plan(Odd("buffer"), wanted, rows(12, 0), 2)


class Peeks(Mixture):
    """Looks at rows, or at how many come, where a capacity decides."""

    def __init__(self, what: str) -> None:
        super().__init__(1)
        self.what = what

    def mix(self, h: Tensor, layer: int) -> Tensor:
        weights, index = (h @ self.gate[layer]).softmax(-1).topk(2)
        sent, routing = piper.moe.dispatch(h, index, EXPERTS)
        if self.what == "rows":
            weights = weights + sent.sum()
        with piper.annotate("EP"):
            inner = piper.moe.grouped_mm(sent, self.up[layer], routing)
            if self.what == "counts":
                inner = inner * routing.arrived.sum()
            out = piper.moe.grouped_mm(inner, self.down[layer], routing)
        if self.what == "results":
            weights = weights + nn.functional.relu(out).sum()
        return piper.moe.combine(out, routing, weights)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("rows", "works on rows that experts take by piper.Shard"),
        ("counts", "reads how many rows an expert gets"),
        ("results", "piper.moe.combine does not bring back"),
    ],
)
def test_slots_are_no_one_elses(what: str, words: str) -> None:
    wanted = experts.strategy(ALONE, 1, "", capacity=2)
    with pytest.raises(piper.PiperPlanError, match=re.escape(words)) as caught:
        piper.plan(Peeks(what), wanted, rows(12, 0), 1)
    assert "test_experts_capacity_refusals.py:" in str(caught.value)


def test_a_capacity_without_experts_is_refused() -> None:
    wanted = piper.Strategy(*jobs.places(ALONE), piper.Shard({"PP": 0}, capacity=2))
    with pytest.raises(piper.PiperPlanError, match="cannot be sharded"):
        piper.plan(Mixture(1), wanted, rows(12, 0), 1)


def test_experts_that_do_not_divide_are_refused() -> None:
    wanted = experts.strategy({0: [0, 1, 2]}, 1, "", capacity=2)
    with pytest.raises(piper.PiperPlanError, match=r"4 experts, which 3 ranks do not divide"):
        piper.plan(Mixture(1), wanted, rows(12, 0), 3)


def test_messages_are_divided_or_refused() -> None:
    with pytest.raises(piper.PiperRuntimeError, match=r"rows cannot go evenly(.|\n)*7\n"):
        pack(Op.EXCHANGE, [torch.zeros(7, 4)], 2)


def test_two_shards_of_one_region_are_refused() -> None:
    wanted = experts.strategy(PAIR, 1, "", capacity=2)
    twice = piper.Strategy(*wanted.directives, piper.Shard({"EP": 0}))
    with pytest.raises(piper.PiperPlanError, match="sharded twice"):
        piper.plan(Mixture(1), twice, rows(12, 0), 2)
