"""Section F: what is saved has the user's names, and any layout resumes it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import piper_dynamo as piper
from tests import jobs, replicas, resuming
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, Lin53, about
from tests.jobs import LINE2, ONE
from tests.models import Stack4, TiedLM, rows
from tests.replicas import LINE, PAIR, Case
from tests.resuming import Layout, layout

# Names.


@pytest.mark.parametrize("how", ["one device", "one rank", "two ranks"])
def test_a_compiled_model_has_the_plain_models_names(how: str) -> None:
    """R37, _orig_mod in state dicts: the same keys before the first call, after it, and a step."""
    batch = TiedLM.batch()

    def job() -> list[dict[str, torch.Tensor]]:
        if how == "one device":
            step = torch.compile(TiedLM(), backend="piper")
        else:
            placement = ONE if how == "one rank" else LINE2
            options = {"strategy": jobs.strategy(placement, 2)}
            step = torch.compile(TiedLM(), backend="piper", options=options)
        found = [piper.state_dict(step)]
        loss = step(*batch)
        found.append(piper.state_dict(step))
        loss.backward()
        params = step.parameters() if how == "one device" else piper.parameters(step)
        torch.optim.SGD(params, lr=0.5).step()
        return [*found, piper.state_dict(step)]

    plain = TiedLM()
    plain(*batch).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    for rank in jobs.run_ranks(job, 2 if how == "two ranks" else 1):
        for state in rank:
            assert list(state) == list(plain.state_dict())
        loaded = TiedLM()
        loaded.load_state_dict(rank[2])
        for name, value in plain.state_dict().items():
            jobs.close(loaded.state_dict()[name], value, name)


@pytest.mark.slow
def test_a_tied_weight_has_both_names() -> None:
    """R37, tied: under both names of the plain model, sharing memory; a plain one loads into it."""

    def job() -> tuple[dict[str, torch.Tensor], float]:
        case = resuming.MIXED
        step = replicas.compiled(case, LINE, replicas.strategy(LINE, 2, zero=3))
        state = piper.state_dict(step)
        piper.load_state_dict(step, {n: v * 2 for n, v in case.build(1).state_dict().items()})
        return state, piper.state_dict(step)["head"].norm().item()

    plain = resuming.Mixed(1)
    for state, doubled in jobs.run_ranks(job, 4):
        assert list(state) == list(plain.state_dict())
        assert state["a"].data_ptr() == state["head"].data_ptr()
        assert doubled == about(2 * plain.a.norm().item(), 1e-12)


# Layouts.

ALONE: jobs.Placement = {0: [0]}
CHAIN = [(LINE2, 0), (PAIR, 3), (LINE, 1), (ALONE, 0)]


def resumed(
    case: Case, legs: Sequence[tuple[jobs.Placement, int]], folder: Path, each: int
) -> list[float]:
    """The losses of a run that is saved and resumed under each layout in turn."""
    losses: list[float] = []

    def leg(where: Layout) -> Callable[[], list[float]]:
        def job() -> list[float]:
            step = replicas.compiled(case, where.placement, where.strategy)
            found = fx.adamw(piper.parameters(step))
            if losses:
                assert piper.load_checkpoint(folder, step, found) == {"steps": len(losses)}
            trace = []
            for _ in range(each):
                loss = step(*replicas.mine(case.batch(0), where.placement))
                loss.backward()
                found.step()
                found.zero_grad()
                trace.append(loss.item())
            piper.save_checkpoint(folder, step, found, extra={"steps": len(losses) + each})
            return trace

        return job

    for placement, zero in legs:
        where = layout(placement, zero)
        ranks = jobs.run_ranks(leg(where), where.ranks)
        assert all(rank == ranks[0] for rank in ranks)
        losses += ranks[0]
    return losses


def test_a_run_goes_on_under_any_layout(tmp_path: Path) -> None:
    """R38, resume under another layout: F1's losses through four layouts, a step in each."""
    losses = resumed(Case(build=Stack4, batch=lambda k: EIGHT), CHAIN, tmp_path, 1)
    assert losses == about(list(F1.ADAMW))


@pytest.mark.slow
@pytest.mark.parametrize("legs", [[CHAIN[0], CHAIN[1]], [CHAIN[1], CHAIN[2]], [CHAIN[2], CHAIN[3]]])
def test_two_steps_under_one_layout_and_two_under_another(
    legs: Sequence[tuple[jobs.Placement, int]], tmp_path: Path
) -> None:
    """R38, pair by pair, as the case has it."""
    losses = resumed(Case(build=Stack4, batch=lambda k: EIGHT), legs, tmp_path, 2)
    assert losses == about(list(F1.ADAMW))


@pytest.mark.slow
def test_uneven_shards_go_on_under_any_layout(tmp_path: Path) -> None:
    """R38, uneven shards: F4, whose sizes no number of ranks divides."""

    class OnStages(Lin53):
        """The bias is added on the last stage."""

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP", 0):
                h = x @ self.w.T
            with piper.annotate("PP", self.last):
                return ((h + self.b - y) ** 2).mean()

        def __init__(self, stages: int = 2) -> None:
            super().__init__()
            self.last = stages - 1

    case = Case(build=OnStages, batch=lambda k: Lin53.batch())
    model = OnStages(1)
    found = fx.adamw(model.parameters())
    want = []
    for _ in range(4):
        loss = model(*Lin53.batch())
        loss.backward()
        found.step()
        found.zero_grad()
        want.append(loss.item())
    assert want[0] == about(Lin53.LOSS)
    legs = [(PAIR, 3), (LINE, 1), (ALONE, 0)]
    losses = resumed(case, legs, tmp_path, 1)
    assert losses == about(want[:3])


@pytest.mark.slow
def test_control_a_run_that_forgets_its_moments(tmp_path: Path) -> None:
    """R38, signature: the optimizer starts anew, and the loss is another one."""
    case = Case(build=Stack4, batch=lambda k: EIGHT)
    resumed(case, [(LINE2, 0)], tmp_path, 2)

    def job() -> float:
        where = layout(PAIR, 3)
        step = replicas.compiled(case, where.placement, where.strategy)
        piper.load_checkpoint(tmp_path, step)  # the model alone
        found = fx.adamw(piper.parameters(step))
        for _ in range(2):
            loss = step(*replicas.mine(case.batch(0), where.placement))
            loss.backward()
            found.step()
            found.zero_grad()
        return loss.item()

    for loss in jobs.run_ranks(job, 2):
        assert abs(loss - F1.ADAMW[3]) > 1e-6


# On one rank only.


def test_a_save_on_one_rank_only_is_told_at_once(tmp_path: Path) -> None:
    """R40, saving inside `if rank == 0`: an error that names the rank that did not call it."""

    def job() -> str:
        wanted = replicas.strategy(PAIR, 1, zero=3)
        mine = fx.part(Lin53.batch(), wanted)
        step = piper.compile(Lin53(), wanted, example_inputs=mine)
        step(*mine).backward()
        text = ""
        if piper.rank() == 0:
            text = jobs.refusal(lambda: piper.save_checkpoint(tmp_path, step))
        step(*mine)
        return text

    jobs.mentions(jobs.run_ranks(job, 2)[0], "all ranks together", "rank 1", "save_checkpoint")


def test_a_state_dict_on_one_rank_only_is_told_at_once() -> None:
    """R40, the same of a state dict."""

    def job() -> str:
        wanted = replicas.strategy(PAIR, 1, zero=3)
        mine = fx.part(Lin53.batch(), wanted)
        step = piper.compile(Lin53(), wanted, example_inputs=mine)
        text = jobs.refusal(lambda: piper.state_dict(step)) if piper.rank() == 0 else ""
        step(*mine)
        return text

    jobs.mentions(jobs.run_ranks(job, 2)[0], "all ranks together", "rank 1", "state_dict")


# More inputs of the kind.


@pytest.mark.parametrize("zero", replicas.levels(2))
def test_a_v_in_bfloat16_goes_on_in_one_process(zero: int, tmp_path: Path) -> None:
    """Another dtype and layout: what is saved in bfloat16 is loaded bit by bit."""

    class Half(Stack4):
        def __init__(self, stages: int = 4) -> None:
            super().__init__(stages)
            self.to(torch.bfloat16)

    def half(batch: fx.Batch) -> fx.Batch:
        return tuple(value.to(torch.bfloat16) for value in batch)

    case = Case(build=Half, batch=lambda k: half(rows(8)))  # type: ignore[arg-type, return-value]

    def save() -> dict[str, torch.Tensor]:
        wanted = replicas.strategy(replicas.VEE, 4, "zbv", zero=zero)
        step = replicas.compiled(case, replicas.VEE, wanted)
        found = fx.adamw(piper.parameters(step))
        step(*replicas.mine(case.batch(0), replicas.VEE)).backward()
        found.step()
        piper.save_checkpoint(tmp_path, step, found)
        return piper.state_dict(step)

    want = jobs.run_ranks(save, 4)[0]
    model = Half(4)
    piper.load_checkpoint(tmp_path, model, fx.adamw(model.parameters()))
    for name, value in model.state_dict().items():
        assert value.dtype is torch.bfloat16
        assert torch.equal(value, want[name])
    assert nn.utils.get_total_norm(list(want.values())) > 0
