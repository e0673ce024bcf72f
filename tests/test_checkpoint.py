"""Resumed runs equal the unbroken one, under many layouts; what a checkpoint holds, by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import piper_dynamo as piper
from piper_dynamo.checkpoint import load, optimizers
from tests import experts, jobs, replicas, resuming
from tests.jobs import LINE2
from tests.models import Dropped, Stack4, rows
from tests.replicas import LINE, PAIR, TRIPLE, Case
from tests.resuming import MIXED, Alone, Layout, Mixed, Run, layout

ONE: jobs.Placement = {0: [0]}
CHAIN = [layout(LINE2), layout(PAIR, 3), layout(LINE, 1), layout(TRIPLE, 2), layout(ONE)]
MIXTURE = experts.case(top=2)


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests execute the graphs of such plans between passes."""
    monkeypatch.setenv("PIPER_VERIFY", "1")


def shared(placement: jobs.Placement, zero: int = 0) -> Layout:
    """Experts split among the ranks of a stage."""
    wanted = experts.strategy(placement, 2, "one_f_one_b", zero=zero)
    return Layout(placement=placement, strategy=wanted)


def test_a_chain_of_layouts_equals_the_unbroken_run(tmp_path: Path) -> None:
    resuming.chain(MIXED, CHAIN, tmp_path)


@pytest.mark.slow
def test_a_chain_of_layouts_with_experts(tmp_path: Path) -> None:
    layouts = [shared(LINE), shared(PAIR, 1), Layout(placement=ONE, strategy=jobs.strategy(ONE, 2))]
    resuming.chain(MIXTURE, layouts, tmp_path)


@pytest.mark.slow
def test_copies_of_experts_in_blocks_of_blocks(tmp_path: Path) -> None:
    """Three copies of two ranks' experts share their rows again: some blocks are empty."""
    placement = {0: [0, 1, 2, 3, 4, 5]}
    wanted = experts.copies(2, placement, "gpipe", 3, zero=3)
    layouts = [Layout(placement=placement, strategy=wanted), shared(PAIR)]
    resuming.chain(MIXTURE, layouts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("name", ["tied", "uneven"])
def test_every_level_to_one_process_and_back(name: str, zero: int, tmp_path: Path) -> None:
    case = replicas.CASES[name]
    one = Layout(placement=ONE, strategy=jobs.strategy(ONE, 2))
    resuming.chain(case, [layout(LINE, zero), one, layout(TRIPLE, zero)], tmp_path)


@pytest.mark.slow
def test_a_stack_has_the_losses_of_the_unbroken_run_whatever_the_layouts(tmp_path: Path) -> None:
    """Against numbers that were worked out in one process, not by this code."""
    legs = [(LINE2, 0), (PAIR, 3), (LINE, 1), (ONE, 0)]
    losses: list[float] = []

    def job() -> list[float]:
        where = layout(*legs[len(losses) // 2])
        case = Case(build=Stack4, batch=lambda k: rows(8))
        step = replicas.compiled(case, where.placement, where.strategy)
        found = torch.optim.AdamW(piper.parameters(step), lr=0.01, weight_decay=0.1)
        if losses:
            piper.load_checkpoint(tmp_path, step, found)
        trace = []
        for _ in range(2):
            loss = step(*replicas.mine(case.batch(0), where.placement))
            loss.backward()
            found.step()
            found.zero_grad()
            trace.append(loss.item())
        piper.save_checkpoint(tmp_path, step, found)
        return trace

    for placement, _ in legs:
        losses += jobs.run_ranks(job, jobs.world(placement))[0]
    want = [0.42402861536, 0.41997611239, 0.41608348506, 0.41227111562]
    want += [0.40845241057, 0.40453657683, 0.40045280138, 0.39616418384]
    jobs.close(losses, want, "losses", 1e-10)


@pytest.mark.parametrize("broken", ["moments", "settings", "schedule"])
def test_a_run_resumed_without_a_part_of_its_state_is_found_out(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison with the unbroken run sees each part that is left out."""
    want = resuming.unbroken(MIXED, 5)
    first = Alone.start(MIXED)
    first.train(0, 2)
    first.save(tmp_path)
    whole, partial = Alone.start(MIXED), Alone.start(MIXED)
    whole.load(tmp_path)
    jobs.close(whole.train(2, 3), want[2:], "resumed", 1e-12)
    if broken == "moments":
        monkeypatch.setattr(load, "_state_targets", lambda *args: {})
    elif broken == "settings":
        monkeypatch.setattr(optimizers, "apply_settings", lambda *args: None)
    else:
        monkeypatch.setattr(optimizers, "join_scheduler", lambda rest, lists, mine, names: mine)
    partial.load(tmp_path)
    found = partial.train(2, 3)
    assert found[0][0] == pytest.approx(want[2][0], abs=1e-12)  # the model is there
    assert abs(found[2][0] - want[4][0]) > 1e-9


def test_randomness_goes_on_where_it_was(tmp_path: Path) -> None:
    """Dropout draws a seed per step, which is torch's next random number, on every rank."""
    case = Case(build=lambda stages: Dropped(), batch=lambda k: rows(8))

    def draws(steps: int, start: bool) -> list[float]:
        torch.manual_seed(3)
        where = layout(LINE2)
        step = replicas.compiled(case, where.placement, where.strategy)
        if not start:
            torch.manual_seed(4)
            piper.load_checkpoint(tmp_path, step)
        found = []
        for number in range(steps):
            found.append(step(*replicas.mine(case.batch(0), where.placement)).item())
            if start and number == 1:
                piper.save_checkpoint(tmp_path, step)
        return found

    whole = jobs.run_ranks(lambda: draws(4, start=True), 2)
    resumed = jobs.run_ranks(lambda: draws(2, start=False), 2)
    assert resumed == [one[2:] for one in whole]
    assert len(set(whole[0])) == 4


# What is in it


def test_keys_are_the_users_names_and_tied_ones_share_their_bytes(tmp_path: Path) -> None:
    run = Alone.start(MIXED)
    run.train(0, 1)
    run.save(tmp_path, extra={"steps": 1})
    metadata = FileSystemReader(tmp_path).read_metadata()
    keys = set(metadata.state_dict_metadata)
    names = {*Mixed().state_dict()}
    assert {k.removeprefix("model.") for k in keys if k.startswith("model.")} == names
    moments = {f"optim.state.{n}.exp_avg" for n in names - {"frozen", "calls"}}
    assert moments <= keys
    assert not any("_orig_mod" in key or "frozen." in key for key in keys)
    places = {index.fqn: place for index, place in metadata.storage_data.items()}
    assert places["model.a"] == places["model.head"]
    assert places["optim.state.a.exp_avg"] == places["optim.state.head.exp_avg"]


def test_torch_reads_it_with_its_own_tools(tmp_path: Path) -> None:
    run = Alone.start(MIXED)
    run.train(0, 2)
    run.save(tmp_path / "run")
    dcp_to_torch_save(tmp_path / "run", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    want = run.model.state_dict()
    assert set(found["model"]) == set(want)
    for name, value in want.items():
        assert torch.equal(found["model"][name], value), name
    moment = run.optimizer.state[run.model.get_parameter("b")]["exp_avg"]
    assert torch.equal(found["optim"]["state"]["b"]["exp_avg"], moment)


def test_each_element_is_written_once(tmp_path: Path) -> None:
    """Replicas of a whole parameter do not write it again, nor do tied names."""

    def job() -> None:
        run = Run.start(MIXED, layout(PAIR))
        run.train(0, 1)
        run.save(tmp_path, 1)

    jobs.run_ranks(job, 2)
    elements = sum(p.numel() for p in Mixed().parameters())
    free = elements - Mixed().frozen.numel()
    metadata = FileSystemReader(tmp_path).read_metadata()
    places = {(p.relative_path, p.offset, p.length) for p in metadata.storage_data.values()}
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert sum(length for *_, length in places) == on_disk
    chunks = {
        key: sum(chunk.sizes.numel() for chunk in entry.chunks)
        for key, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks") and key.split(".")[-1] != "step"
    }
    written = {
        k: n for k, n in chunks.items() if "head" not in k and k not in ("rng", "model.calls")
    }
    assert sum(written.values()) == elements + 2 * free


# Optimizers


def test_several_optimizers_and_settings_of_every_kind(tmp_path: Path) -> None:
    """A learning rate that is a tensor, counters, a parameter without dims, and none at all."""

    def start() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = Mixed(1)
        rate = torch.tensor(0.01, dtype=torch.float64)
        first = torch.optim.NAdam([model.a, model.scale], lr=0.02, betas=(0.8, 0.9))
        second = torch.optim.AdamW([model.b, model.c], lr=rate, foreach=False)
        third = torch.optim.SGD([model.bias], lr=0.1)  # keeps no state
        return model, [first, second, third]

    def train(model: nn.Module, found: list[torch.optim.Optimizer]) -> float:
        loss = model(*MIXED.batch(0))
        loss.backward()
        for one in found:
            one.step()
            one.zero_grad()
        return loss.item()

    model, found = start()
    train(model, found)
    piper.save_checkpoint(tmp_path, model, found)
    want = [train(model, found) for _ in range(2)]
    model, found = start()
    rate = found[1].param_groups[0]["lr"]
    found[0].param_groups[0]["betas"] = (0.1, 0.1)
    rate.fill_(7.0)
    piper.load_checkpoint(tmp_path, model, found)
    assert found[0].param_groups[0]["betas"] == (0.8, 0.9)
    assert found[1].param_groups[0]["lr"] is rate
    jobs.close([train(model, found) for _ in range(2)], want, "losses", 0.0)


def test_groups_and_schedules_over_ranks_without_some_groups(tmp_path: Path) -> None:
    """Each rank has other groups; schedules with a list by group are put together by names."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
            self.b = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP", 0):
                h = x.sum() * self.w
            with piper.annotate("PP", 1):
                return h + self.b

    def start(named: Any, *, both: bool) -> tuple[Any, Any]:
        groups = [
            {"params": [p for n, p in named if n == name], "lr": 0.1, "weight_decay": decay}
            for name, decay in (("w", 0.5), ("b", 0.0))
        ]
        groups = [group for group in groups if both or group["params"]]
        found = torch.optim.SGD(groups)
        inner = [torch.optim.lr_scheduler.StepLR(found, 1, 0.5) for _ in range(2)]
        return found, torch.optim.lr_scheduler.SequentialLR(found, inner, [2])

    def train(step: Any, found: Any, schedule: Any) -> None:
        step(torch.ones(1, dtype=torch.float64)).backward()
        found.step()
        schedule.step()
        found.zero_grad()

    model = Two()
    found, schedule = start(list(model.named_parameters()), both=True)
    train(model, found, schedule)
    jobs.close([model.w.item(), model.b.item()], [1.8, 1.9], "after a step")
    piper.save_checkpoint(tmp_path, model, found, scheduler=schedule)

    def job() -> list[tuple[str, float]]:
        example = (torch.ones(1, dtype=torch.float64),)
        step = piper.compile(Two(), jobs.strategy(LINE2, 1), example_inputs=example)
        found, schedule = start(list(piper.named_parameters(step)), both=False)
        piper.load_checkpoint(tmp_path, step, found, scheduler=schedule)
        train(step, found, schedule)
        piper.save_checkpoint(tmp_path, step, found, scheduler=schedule)
        return [(name, p.item()) for name, p in piper.named_parameters(step)]

    first, second = jobs.run_ranks(job, 2)
    assert first == [("w", pytest.approx(1.705, abs=1e-12))]
    assert second == [("b", pytest.approx(1.85, abs=1e-12))]
    found, schedule = start(list(model.named_parameters()), both=True)
    piper.load_checkpoint(tmp_path, model, found, scheduler=schedule)
    assert schedule.last_epoch == 2
    assert [group["weight_decay"] for group in found.param_groups] == [0.5, 0.0]
