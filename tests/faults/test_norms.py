"""Section H: one gradient norm, over all ranks and everything that they hold."""

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.runtime.local import LocalCommunicator
from tests import experts, jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, Layout, about
from tests.jobs import LINE2, V2
from tests.models import Fixed, Stack4
from tests.replicas import PAIR, TRIPLE

F64 = torch.float64
FACTOR = 0.14122735204


def clipped(
    wanted: piper.Strategy, most: float, build: "type[nn.Module] | None" = None, *batch: Tensor
) -> list[tuple[float, dict[str, Tensor]]]:
    """The norm before clipping and the gradients after it, by rank."""
    stages = len({p.filter.tags["PP"] for p in wanted.of(piper.Place)})

    def job() -> tuple[float, dict[str, Tensor]]:
        mine = fx.part(batch or EIGHT, wanted)
        model = build() if build is not None else Stack4(stages)
        step = piper.compile(model, wanted, example_inputs=mine)
        step(*mine).backward()
        norm = float(piper.clip_grad_norm_(step, most))
        return norm, replicas.grads(step)

    return jobs.run_ranks(job, fx.world(wanted))


@fx.layouts("zbv")
def test_every_stage_is_clipped_by_the_norm_of_all(layout: Layout) -> None:
    """R47, norm of one stage only: reported and applied alike, stages of a rank together."""
    found = clipped(layout.strategy(), 0.01)
    assert [norm for norm, _ in found] == [about(F1.NORM)] * len(found)
    after = {n: g.norm().item() for _, grads in found for n, g in grads.items()}
    # torch adds 1e-6 to the norm before it divides by it.
    assert after["w.0"] == pytest.approx(0.00397684561, rel=2e-5)
    wanted = [FACTOR * value for value in F1.NORMS]
    assert [after[f"w.{k}"] for k in range(4)] == pytest.approx(wanted, rel=2e-5)


def test_control_a_rank_that_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """R47, signature: the first stage is clipped by its own norm, to 0.01."""
    monkeypatch.setattr(LocalCommunicator, "reduce_now", lambda self, value: value.clone())
    found = clipped(jobs.strategy(jobs.LINE4, 4), 0.01)
    assert found[0][1]["w.0"].norm().item() == pytest.approx(0.01, rel=1e-4)


def test_three_and_four_make_five() -> None:
    """R47, the toy: 5, and 0.6 and 0.8 after it."""
    (one, first), (two, second) = clipped(
        jobs.strategy(LINE2, 2), 1.0, Fixed, torch.ones(2, dtype=F64)
    )
    assert (one, two) == (about(5.0), about(5.0))
    assert first["a"].item() == pytest.approx(0.6, abs=1e-6)
    assert second["b"].item() == pytest.approx(0.8, abs=1e-6)


# Experts and shards.


class Dozen(nn.Module):
    """A dense gradient of norm 3, and experts' of 4 and 12; without `both` the last has none."""

    both = True

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(1, dtype=F64))
        self.experts = nn.Parameter(torch.ones(2, 1, 1, dtype=F64))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Two tokens, 8 and 24, one for each expert: means of them are 4 and 12."""
        with piper.annotate("PP", 0):
            sent, routing = piper.moe.dispatch(x, chosen if self.both else chosen * 0, 2)
            with piper.annotate("EP"):
                out = piper.moe.grouped_mm(sent, self.experts, routing)
            total = piper.moe.combine(out, routing).mean()
            return total + 3 * self.dense.sum()


class Single(Dozen):
    """No token goes to the last expert."""

    both = False


TOKENS = torch.tensor([[8.0], [24.0]], dtype=F64), torch.tensor([[0], [1]])


def test_experts_of_every_rank_count_once() -> None:
    """R48, norms over expert shards: 3, 4 and 12 make 13 on both ranks."""
    for norm, _ in clipped(experts.strategy(PAIR, 1, ""), float("inf"), Dozen, *TOKENS):
        assert norm == about(13.0)


def test_a_rank_without_expert_gradients_takes_part() -> None:
    """R48, an idle expert: 3 and what the other expert has make 5, on both ranks."""
    given = torch.tensor([[8.0], [0.0]], dtype=F64), TOKENS[1]
    for norm, _ in clipped(experts.strategy(PAIR, 1, ""), float("inf"), Single, *given):
        assert norm == about(5.0)


@pytest.mark.parametrize(
    ("wrong", "norms"),
    [("own part only", (5.0, 153**0.5)), ("dense twice", (178**0.5, 178**0.5))],
)
def test_control_parts_that_are_missing_or_counted_twice(
    wrong: str, norms: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R48, signatures: 5 and 12.369 where ranks have their own part, 13.342 with dense twice."""
    if wrong == "own part only":
        monkeypatch.setattr(LocalCommunicator, "reduce_now", lambda self, value: value.clone())
    monkeypatch.setattr(piper.Plan, "counting", lambda self, position, rank: (0, 1))
    found = clipped(experts.strategy(PAIR, 1, ""), float("inf"), Dozen, *TOKENS)
    assert [norm for norm, _ in found] == [about(value) for value in norms]
    assert norms[0] == pytest.approx(13.342, abs=1e-3) or norms[1] == pytest.approx(
        12.369, abs=1e-3
    )


# More inputs of the kind.


@pytest.mark.parametrize("zero", replicas.levels(3))
def test_norms_of_shards_of_which_some_are_empty(zero: int) -> None:
    """Another model and layout: three replicas, of which the last has no row of most weights."""
    case = replicas.CASES["uneven"]
    ranks = fx.run(lambda: case.build(1), replicas.strategy(TRIPLE, 1, zero=zero), case.batch(0))
    model, _ = fx.eager(lambda: case.build(1), case.batch(0))
    want = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert [found.norm for found in ranks] == [about(want.item(), 1e-12)] * 3


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_other_norms_in_float32(norm_type: float) -> None:
    """Another norm and dtype, of a V: torch's own number in one process."""

    class Narrow(Stack4):
        def __init__(self) -> None:
            super().__init__(4)
            self.float()

    batch = tuple(value.float() for value in EIGHT)

    def job() -> float:
        step = piper.compile(Narrow(), jobs.strategy(V2, 4, "zbv"), example_inputs=batch)
        step(*batch).backward()
        return float(piper.clip_grad_norm_(step, 0.01, norm_type))

    model, _ = fx.eager(Narrow, batch)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    want = nn.utils.get_total_norm(grads, norm_type).item()
    assert jobs.run_ranks(job, 2) == [pytest.approx(want, rel=1e-5)] * 2
