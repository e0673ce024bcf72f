"""Section K: lengths that change from step to step, or between microbatches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import experts, jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import F2, about
from tests.jobs import LINE2
from tests.models import Stack4, TiedLM, rows, tok
from tests.replicas import PAIR, VEE

LENGTHS = (3, 5, 2, 3)


def batch_of(length: int) -> tuple[Tensor, Tensor]:
    ids = tok([4, length], 11)
    return ids, ids.roll(1, 0)


@pytest.mark.parametrize(
    "schedule",
    ["one_f_one_b", *fx.slowly("gpipe", "zb_h1")],
)
def test_lengths_may_change_from_step_to_step(schedule: str) -> None:
    """R54, sequence length per step: right each time, a program per length, alike on all ranks."""
    stats = torch._dynamo.utils.counters["stats"]

    def job() -> list[tuple[float, float, int, str]]:
        wanted = jobs.strategy(LINE2, 2, schedule)
        step = piper.compile(TiedLM(), wanted, example_inputs=batch_of(3))
        found = []
        for length in LENGTHS:
            loss = step(*batch_of(length))
            loss.backward()
            norm = float(piper.clip_grad_norm_(step, float("inf")))
            for p in piper.parameters(step):
                p.grad = None
            plan = piper.explain(step)
            found.append((loss.item(), norm, stats["unique_graphs"], plan.fingerprint()))
        return found

    ranks = jobs.run_ranks(job, 2)
    for number, length in enumerate(LENGTHS):
        model, losses = fx.eager(TiedLM, batch_of(length))
        want = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        for rank in ranks:
            loss, norm, _, _ = rank[number]
            assert (loss, norm) == (about(losses[0], 1e-12), about(want.item(), 1e-12))
        assert ranks[0][number][3] == ranks[1][number][3]
    assert ranks[0][0][0] == about(F2.LOSS)
    prints = [mark for *_, mark in ranks[0]]
    assert prints[0] == prints[3]
    assert len(set(prints)) == 3
    graphs = [count for *_, count, _ in ranks[0]]
    assert graphs[-1] - graphs[0] <= 2 * len(set(LENGTHS))  # at most one a length and a rank


def test_lengths_that_differ_within_a_step_are_arguments_of_their_own() -> None:
    """R54, lengths within a step: tensors of several lengths in lists, each of which is split."""
    wanted = jobs.strategy(LINE2, 2)

    class Listed(TiedLM):
        def forward(self, ids: Any, labels: Any, positions: Any = None) -> Tensor:
            first, second = (
                super(Listed, self).forward(i, o) for i, o in zip(ids, labels, strict=True)
            )
            return (first + second) / 2

    pieces = [batch_of(3), batch_of(5)]
    given = tuple([list(column) for column in zip(*pieces, strict=True)])
    plan = piper.plan(Listed(), wanted, given)
    # Every length is an argument of its own, split along its rows: no piece is cut or filled up.
    assert plan.dag.num_microbatches == 2

    def job() -> float:
        step = piper.compile(Listed(), wanted, example_inputs=given)
        loss = step(*given)
        loss.backward()
        return loss.item()

    want = Listed()(*given).item()
    assert jobs.run_ranks(job, 2) == [about(want, 1e-12)] * 2


def test_ranks_that_disagree_about_a_length_all_raise() -> None:
    """R54, a length that one rank has alone: all are told both, and nothing is cut."""

    def job() -> str:
        step = piper.compile(
            TiedLM(), jobs.strategy(LINE2, 2), example_inputs=batch_of(3), timeout_s=10.0
        )
        step(*batch_of(3)).backward()
        return jobs.refusal(lambda: step(*batch_of(3 if piper.rank() == 0 else 5)), Exception)

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "(4, 3)", "(4, 5)", "rank 0", "rank 1")


# More inputs of the kind.


@pytest.mark.slow
def test_batches_of_experts_may_change_their_size() -> None:
    """Another model and layout: experts over two ranks, 24 rows, then 12."""
    sizes = (24, 12)
    wanted = experts.strategy(PAIR, 2, "")

    def job() -> list[float]:
        given = [fx.part(rows(size), wanted) for size in sizes]
        step = piper.compile(experts.Mixture(1), wanted, example_inputs=given[0])
        found = []
        for batch in given:
            loss = step(*batch)
            loss.backward()
            found.append(loss.item())
        return found

    want = [experts.Mixture(1)(*rows(size)).item() for size in sizes]
    for losses in jobs.run_ranks(job, 2):
        assert losses == about(want, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
def test_sizes_change_under_a_v_in_float32(zero: int) -> None:
    """Another dtype: sixteen rows, then eight, of two stages on each rank."""
    wanted = replicas.strategy(VEE, 4, "zbv", zero=zero)
    sizes = (16, 8)

    def single() -> nn.Module:
        return Stack4(4).float()

    def job() -> list[float]:
        given = [fx.part(tuple(v.float() for v in rows(size)), wanted) for size in sizes]
        step = piper.compile(single(), wanted, example_inputs=given[0])
        return [step(*batch).item() for batch in given]

    want = [single()(*(v.float() for v in rows(size))).item() for size in sizes]
    for losses in jobs.run_ranks(job, 4):
        assert losses == pytest.approx(want, abs=1e-6)
