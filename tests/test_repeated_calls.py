"""Calls again and again: memory stays flat, a new shape is planned once, on all ranks alike."""

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import step as stepping
from piper_dynamo.ir.program import Op
from tests import jobs
from tests.jobs import LINE2, ONE
from tests.models import Dropped, NormNet, Stack4, rows


def tensor_bytes() -> int:
    """Of all tensors that there are."""
    gc.collect()
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (Tensor, torch.nn.Parameter)
    }
    return sum(found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "budget"),
    list(itertools.product([Stack4, Dropped, NormNet], [None, 0.0])),
)
def test_memory_is_flat_from_the_second_step_on(model: Any, budget: float | None) -> None:
    wanted = jobs.strategy(ONE, 2)
    if budget is not None:
        wanted = piper.Strategy(*wanted.directives, piper.Recompute({}, budget=budget))

    def job() -> list[tuple[int, int]]:
        mine = model()
        step = piper.compile(mine, wanted, example_inputs=rows(8))
        optimizer = torch.optim.AdamW(piper.parameters(step), lr=0.01)
        found = []
        for _ in range(6):
            step(*rows(8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                step(*rows(8))
            found.append((tensor_bytes(), len(gc.get_objects())))
        return found

    (found,) = jobs.run_ranks(job, 1)
    assert len({tensors for tensors, _ in found[1:]}) == 1, found
    assert found[-1][1] - found[2][1] < 10, found


class Pair(nn.Module):
    """A linear layer per stage, of the same shape; the second may be the first."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if is_shared:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            x = self.first(x).relu()
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(x), y)


def test_a_model_with_shared_weights_is_no_match_for_one_without() -> None:
    """One class, once with and once without: a plan whose gradients are summed over both stages,
    whatever was planned before."""
    batch = (torch.ones(4, 4), torch.ones(4, 4))

    def gradients_sent(*, is_shared: bool) -> int:
        plan = piper.plan(Pair(is_shared=is_shared), jobs.strategy(LINE2, 2), batch)
        sent = [i for p in plan.programs for i in p.instrs if i.op is Op.SEND and i.spec]
        return sum(i.spec.shape == (4, 4) for i in sent if i.spec)

    torch._dynamo.reset()
    assert [gradients_sent(is_shared=flag) for flag in (False, True, False)] == [0, 2, 0]


def test_a_second_shape_is_planned_once_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train and evaluation, two sizes, in turn: one plan of each, whatever comes again.

    The first size is planned again when the ranks first let go of what others hold.
    """
    made: list[tuple[int, int, bool]] = []
    plan = stepping.CompiledStep._plan

    def counting(self: Any, values: Any, world_size: int) -> Any:
        before = len(self._plans)
        found = plan(self, values, world_size)
        if len(self._plans) > before:
            size = max(value.shape[0] for value in values if isinstance(value, Tensor))
            made.append((piper.rank(), size, found.dag.training))
        return found

    monkeypatch.setattr(stepping.CompiledStep, "_plan", counting)

    def job() -> list[float]:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 4), example_inputs=rows(8))
        found = []
        for size in (8, 16, 8, 16, 8):
            found.append(step(*rows(size)).item())
            with torch.no_grad():
                found.append(step(*rows(size)).item())
        return found

    ranks = jobs.run_ranks(job, 2)
    assert ranks[0] == ranks[1]
    for rank in (0, 1):
        mine = [(size, training) for who, size, training in made if who == rank]
        assert mine.count((16, True)) == mine.count((16, False)) == mine.count((8, False)) == 1
        assert mine.index((16, True)) > max(i for i, one in enumerate(mine) if one[0] == 8)
