"""Section G: weights that several stages hold, that nobody uses, or that get no gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from piper_dynamo.runtime.executor import Runtime
from piper_dynamo.runtime.local import LocalCommunicator
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import F2, about
from tests.jobs import LINE2, LINE4, LOOP2, V2
from tests.models import Odd, TiedLM
from tests.replicas import LINE

# On two ranks.


def trained(
    wanted: piper.Strategy, placement: jobs.Placement, build: type[nn.Module] = TiedLM
) -> list[list[dict[str, Tensor]]]:
    """The parameters on each rank after each of two steps of SGD."""

    def job() -> list[dict[str, Tensor]]:
        mine = fx.part(TiedLM.batch(), wanted)
        step = piper.compile(build(), wanted, example_inputs=mine)
        optimizer = torch.optim.SGD(piper.parameters(step), lr=0.5)
        found = []
        for _ in range(2):
            step(*mine).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(replicas.held(step))
        return found

    return jobs.run_ranks(job, jobs.world(placement))


def eagerly_trained(build: type[nn.Module] = TiedLM) -> list[dict[str, Tensor]]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for _ in range(2):
        model(*TiedLM.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("schedule", ["one_f_one_b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_a_tied_weight_has_the_whole_gradient_on_both_ranks(schedule: str) -> None:
    """R43, tied weights: the gradient of both uses, equal bits, once in the norm."""
    ranks = fx.run(TiedLM, jobs.strategy(LINE2, 2, schedule), TiedLM.batch())
    first, second = (found.grads["e"] for found in ranks)
    assert torch.equal(first, second)
    assert first.norm().item() == about(F2.NORM_E)
    for found in ranks:
        assert found.loss == about(F2.LOSS)
        assert found.norm == about((F2.NORM_E**2 + F2.NORM_A**2) ** 0.5)


@pytest.mark.parametrize("zero", replicas.levels(3))
def test_copies_of_a_tied_weight_stay_equal(zero: int) -> None:
    """R43, with replicas: after each step copies are bit-equal, and equal one process."""
    check_trained(TiedLM, zero, "one_f_one_b", 1e-12)


def check_trained(build: type[nn.Module], zero: int, schedule: str, tolerance: float) -> None:
    """Copies are bit-equal after each step, and parts of what one process has."""
    ranks = trained(replicas.strategy(LINE, 2, schedule, zero=zero), LINE, build)
    for number, want in enumerate(eagerly_trained(build)):
        params = [rank[number] for rank in ranks]
        replicas.check_copies(params, LINE)
        for rank, held in enumerate(params):
            for name, value in held.items():
                part = replicas.part_of(want[name], rank, LINE, zero)
                jobs.close(value, part, f"step {number}, rank {rank}: {name}", tolerance)


class Ends(TiedLM):
    """F2 on four stages of which the middle two do nothing of weight."""

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        with piper.annotate("PP", 0):
            h = nn.functional.embedding(ids, self.e)
        with piper.annotate("PP", 1):
            h = h @ self.a.T
        with piper.annotate("PP", 2):
            h = torch.tanh(h)
        with piper.annotate("PP", 3):
            logits = (h @ self.e.T).flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels.flatten())


@pytest.mark.slow
def test_both_uses_on_one_rank_are_one_copy() -> None:
    """R43, a V: one copy where both uses share a rank, and no message for it."""
    ranks = fx.run(Ends, jobs.strategy(V2, 2, "gpipe"), TiedLM.batch())
    assert [sorted(found.grads) for found in ranks] == [["e"], ["a"]]
    assert ranks[0].grads["e"].norm().item() == about(F2.NORM_E)
    plan = piper.plan(Ends(), jobs.strategy(V2, 2, "gpipe"), TiedLM.batch())
    sent = [i.spec for p in plan.programs for i in p.instrs if i.op is Op.SEND]
    assert all(spec is not None and spec.shape != (11, 4) for spec in sent)


@pytest.mark.parametrize(
    ("lost", "norm"),
    [
        pytest.param(1, F2.ONLY_LOOKUP, marks=pytest.mark.slow),
        (0, F2.ONLY_HEAD),
    ],
)
def test_control_a_part_of_a_tied_gradient_that_is_lost(
    lost: int, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R43, signatures: the part of one rank comes to nothing."""
    send = LocalCommunicator.send

    def losing(self: Any, value: Tensor, target: int, message: int) -> None:
        is_part = value.shape == (11, 4) and self.rank == lost
        send(self, torch.zeros_like(value) if is_part else value, target, message)

    monkeypatch.setattr(LocalCommunicator, "send", losing)
    ranks = fx.run(TiedLM, jobs.strategy(LINE2, 2), TiedLM.batch())
    assert ranks[1 - lost].grads["e"].norm().item() == about(norm)


def test_control_a_tied_gradient_that_is_averaged() -> None:
    """R43, signature: the holders' parts are averaged; what one rank has alone is right."""

    def averaged(self: Runtime, *parts: Tensor) -> Tensor:
        return torch.stack(parts).mean(0)

    with fx.patched((Runtime, "add", averaged)):
        ranks = fx.run(TiedLM, jobs.strategy(LINE2, 2), TiedLM.batch())
    for found in ranks:
        assert found.grads["e"].norm().item() == about(F2.AVERAGED)
    assert fx.norms(ranks)["a"] == about(F2.NORM_A)


# Unused and detached.


@pytest.mark.parametrize("zero", [None, *replicas.levels()])
def test_parameters_without_a_gradient_stay_as_they_are(zero: int | None) -> None:
    """R45, unused and detached parameters: no gradient, no decay, a name, a rank that has them."""
    wanted = jobs.strategy(LINE2, 2) if zero is None else replicas.strategy(LINE, 2, zero=zero)

    def job() -> tuple[set[str], set[str], bool, list[str]]:
        model = Odd()
        mine = fx.part(TiedLM.batch(), wanted)
        step = piper.compile(model, wanted, example_inputs=mine)
        before = replicas.held(step)
        step(*mine).backward()
        optimizer = fx.adamw(piper.parameters(step))
        optimizer.step()
        after, grads = replicas.held(step), replicas.grads(step)
        same = {n for n in before if torch.equal(before[n], after[n])}
        moved = set(before) - same
        return same, moved, set(grads) <= moved, list(piper.state_dict(step))

    ranks = jobs.run_ranks(job, fx.world(wanted))
    still = {"detached", "frozen", "unused.weight", "unused.bias"}
    assert set().union(*(same for same, *_ in ranks)) >= still
    assert set().union(*(moved for _, moved, *_ in ranks)) == {"e", "a"}
    for _, _, only, names in ranks:
        assert only
        assert names == list(Odd().state_dict())


# More inputs of the kind.


@pytest.mark.parametrize(
    ("placement", "schedule"),
    [
        (LOOP2, "interleaved_1f1b"),
        pytest.param(LINE4, "zb_h1", marks=pytest.mark.slow),
        pytest.param(V2, "zbv", marks=pytest.mark.slow),
        pytest.param(V2, "dualpipev", marks=pytest.mark.slow),
    ],
)
def test_two_tied_weights_on_four_stages(placement: jobs.Placement, schedule: str) -> None:
    """Another model and layout: one weight of neighbours, one of the ends."""
    build = lambda: replicas.Tied(4)  # noqa: E731
    ids, labels = replicas.tokens(0)
    fx.equals_eager(build, jobs.strategy(placement, 4, schedule), (ids[:8], labels[:8]))


@pytest.mark.parametrize("zero", replicas.levels(1))
def test_tied_weights_in_float32_over_replicas(zero: int) -> None:
    """Another dtype: copies are bit-equal in float32, too, and near one process."""

    class Single(TiedLM):
        def __init__(self) -> None:
            super().__init__()
            self.float()

    check_trained(Single, zero, "gpipe", 1e-6)
