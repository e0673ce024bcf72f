"""What ranks hold, by category: predicted from the program, with and without an optimizer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import piper_dynamo as piper
from benchmarks.allocated import Allocated, allocated
from benchmarks.steady import peaks
from piper_dynamo.cli import main
from piper_dynamo.footprint import STATES, held_before, states_of
from piper_dynamo.ir.program import Op
from piper_dynamo.look.commands import OPTIMIZERS
from piper_dynamo.lowering.memory import bytes_over_time, held_over_time
from piper_dynamo.pictures import read_chrome_trace, to_chrome_trace
from piper_dynamo.timeline import BEFORE, CATEGORIES, INSIDE, STEP, Timeline
from tests import jobs, replicas
from tests.jobs import LINE2, ONE, V2
from tests.models import Counter, Stack4, TiedLM, rows
from tests.replicas import PAIR, numbers

WEIGHT = 4 * 4 * 8  # bytes of one of Stack4's weights
HIDDEN = 4 * 8  # of a row of what passes between them


def named(held: tuple[int, ...]) -> dict[str, int]:
    return {name: n for name, n in zip(STEP, held, strict=True) if n}


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIPER_VERIFY", "1")


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_categories_add_up_to_what_is_held(schedule: str):
    plan = piper.plan(Stack4(4), jobs.strategy(V2, 4, schedule), rows(8))
    for program in plan.programs:
        history = held_over_time(program, plan.chunks)
        assert [sum(held) for held in history] == bytes_over_time(program, plan.chunks)
        assert max(map(sum, history)) == program.peak_bytes
        # At the end the gradients are left, and the loss.
        assert named(history[-1]) == {"gradients": 2 * WEIGHT, "activations": 8}


def test_activations_and_messages_by_hand():
    """GPipe of two microbatches of four rows: after both forwards the first rank keeps both."""
    plan = piper.plan(Stack4(2), jobs.strategy(LINE2, 2, "gpipe"), rows(8))
    program = plan.programs[0]
    runs = [i for i, instr in enumerate(program.instrs) if instr.op is Op.RUN]
    held = dict(zip(STEP, held_over_time(program, plan.chunks)[runs[1]], strict=True))
    assert held["gradients"] == held["gathered parameters"] == 0
    assert held["activations"] >= 2 * 2 * 4 * HIDDEN  # two tanh of each microbatch are kept
    assert held["communication"] == 4 * HIDDEN + 8  # posted: a gradient, and the loss


def test_gathered_parameters_come_and_go():
    def held(zero: int) -> list[dict[str, int]]:
        strategy = replicas.strategy(PAIR, 2, "gpipe", zero=zero, bucket_mb=WEIGHT / 2**20)
        plan = piper.plan(Stack4(1), strategy, numbers(0))
        history = held_over_time(plan.programs[0], plan.chunks)
        return [dict(zip(STEP, one, strict=True)) for one in history]

    whole, sharded = held(0), held(3)
    assert {one["gathered parameters"] for one in whole} == {0}
    gathered = [one["gathered parameters"] for one in sharded]
    assert (max(gathered), gathered[-1]) == (WEIGHT, 0)  # a bucket; the next is on its way
    assert max(one["communication"] for one in sharded) >= WEIGHT
    assert whole[-1]["gradients"] == 2 * sharded[-1]["gradients"] == 4 * WEIGHT


@pytest.mark.parametrize("microbatches", [1, 2])
def test_casts_are_of_parameters_and_of_gradients(microbatches: int):
    half = piper.Precision({}, param="bf16")
    line = jobs.strategy(LINE2, microbatches, "gpipe")
    plan = piper.plan(Stack4(2), piper.Strategy(*line.directives, half), rows(8))
    program = plan.programs[0]
    history = [named(held) for held in held_over_time(program, plan.chunks)]
    casts = [i for i, instr in enumerate(program.instrs) if instr.op is Op.CAST]
    assert history[casts[1]].get("activations", 0) == 0
    assert max(one.get("gathered parameters", 0) for one in history) == 2 * WEIGHT // 4
    assert history[-1]["gradients"] == 2 * WEIGHT
    assert history[casts[2]]["gradients"] >= WEIGHT // 4 + WEIGHT  # a chunk's, and its cast


def test_parts_of_a_tied_parameter_are_gradients():
    plan = piper.plan(TiedLM(), jobs.strategy(LINE2, 2, "one_f_one_b"), TiedLM.batch())
    nbytes = 11 * 4 * 8
    for program in plan.programs:
        history = held_over_time(program, plan.chunks)
        assert max(held[STEP.index("gradients")] for held in history) >= nbytes


@pytest.mark.parametrize(("optimizer", "states"), [*STATES.items(), ("AdamW", 2), (3, 3)])
def test_state_of_an_optimizer(optimizer: Any, states: int):
    strategy = replicas.strategy(PAIR, 2, "gpipe", zero=1)
    plan = piper.plan(Stack4(1), strategy, numbers(0))
    for one in plan.memory(optimizer):
        assert one.held["parameters"] == 2 * WEIGHT  # half of four
        assert one.held["optimizer state"] == 2 * states * WEIGHT
        assert one.total == sum(one.held.values())
        assert list(one.held) == [*CATEGORIES, INSIDE]


def test_torchs_optimizers_keep_as_much():
    param = torch.nn.Parameter(torch.ones(64, 64))
    made: dict[str, torch.optim.Optimizer] = {
        "sgd": torch.optim.SGD([param]),
        "momentum": torch.optim.SGD([param], momentum=0.9),
        "adam": torch.optim.Adam([param]),
        "adamw": torch.optim.AdamW([param]),
    }
    for name, optimizer in made.items():
        param.grad = torch.ones_like(param)
        optimizer.step()
        kept = [v for v in optimizer.state[param].values() if torch.is_tensor(v) and v.dim()]
        assert sum(v.nbytes for v in kept) == states_of(name) * param.nbytes  # type: ignore[operator]
    assert tuple(STATES) == OPTIMIZERS


class Wide(nn.Module):
    """Blocks whose backward, when all is computed again, needs more than what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(4)
        )
        self.head = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            with piper.annotate("PP", number // 2):
                x = x + nn.functional.dropout(block(x), 0.1)
        with piper.annotate("PP", 1):
            return nn.functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("case", ["whole", "halves", "recomputed", "autocast"])
def test_a_peak_is_what_the_allocator_gives_out(case: str):
    """Between tasks exactly; inside them but for what operators need for themselves.

    Products in bfloat16 need most, since kernels copy what they multiply: much of so small a model.
    """
    batch = torch.randn(512, 64), torch.arange(512) % 32
    given = jobs.strategy(ONE, 4, "")
    more: list[Any] = []
    if case == "halves":
        more = [piper.Order([{"PP": 1, "PASS": "BI"}, {"PP": 1, "PASS": "BW"}])]
    elif case == "recomputed":
        more = [piper.Recompute({"PP": "*"})]

    def job() -> tuple[Allocated, int, piper.Plan]:
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            step = piper.compile(
                Wide(), piper.Strategy(*given.directives, *more), example_inputs=batch
            )
            for _ in range(2):
                with piper.record(step):
                    step(*batch)
            with piper.record(step):
                found = allocated(lambda: step(*batch))
        plan = piper.explain(step)
        highest: list[int] = []
        held_over_time(plan.programs[0], plan.chunks, highest)
        return found, max(highest), plan

    ((found, most, plan),) = jobs.run_ranks(job, 1)
    small = 8 * 2**10  # bytes: the state of the generator, and a few numbers
    assert abs(found.between - plan.programs[0].peak_bytes) <= small
    assert abs(found.ever - most) <= (0.1 if case == "autocast" else 0.01) * most
    (memory,) = plan.memory()
    before = memory.held["parameters"] + memory.held["buffers"]
    assert memory.total == before + most
    if case == "recomputed":  # else nearly everything is held when the first backward begins
        assert memory.held[INSIDE] > 0.3 * most


def test_every_run_and_step_allocates_the_same():
    batch = torch.randn(64, 64), torch.arange(64) % 32

    def job() -> dict[int, Allocated]:
        step = piper.compile(Wide(), jobs.strategy(ONE, 4), example_inputs=batch)
        optimizer = torch.optim.AdamW(piper.parameters(step), lr=0.01)

        def once() -> None:
            step(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return peaks(once)

    first, second = (jobs.run_ranks(job, 1)[0] for _ in range(2))
    assert set(first) == {3, 10}
    (found,) = {*first.values(), *second.values()}
    assert found.ever > 0
    assert found.left == 0


def test_control_a_step_that_keeps_something():
    kept: list[torch.Tensor] = []
    found = peaks(lambda: kept.append(torch.zeros(1024 + len(kept))))
    assert {number: one.left for number, one in found.items()} == {3: 4 * 1026, 10: 4 * 1033}
    assert found[3].ever < found[10].ever


def test_without_an_optimizer_its_state_is_left_out_and_said_so():
    plan = piper.plan(Counter(), jobs.strategy(LINE2, 2), rows(8))
    assert "optimizer state" not in plan.memory()[0].held
    assert "the optimizer's state, which a plan does not know, comes on top" in plan.summary()
    assert "comes on top" not in plan.summary(optimizer="sgd")
    assert any(one.held["buffers"] for one in plan.memory())
    assert plan.timeline().memory[0][0][1][BEFORE.index("optimizer state")] == 0
    with pytest.raises(piper.PiperError, match="optimizer='lion' is not known"):
        plan.memory("lion")


def test_frozen_parameters_have_no_state():
    model = Stack4(2)
    model.w[0].requires_grad_(False)
    plan = piper.plan(model, jobs.strategy(LINE2, 2), rows(8))
    assert [one.held["optimizer state"] for one in plan.memory("adam")] == [2 * WEIGHT, 4 * WEIGHT]


def test_a_recorded_step_has_memory(tmp_path: Path):
    def job() -> tuple[Timeline, int, list[int]]:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        with piper.record(step) as timeline:
            step(*rows(8))
        program = piper.explain(step).programs[piper.rank()]
        before = held_before(program, piper.explain(step).args)
        return timeline, program.peak_bytes, list(before)

    for rank, (timeline, peak, before) in enumerate(jobs.run_ranks(job, 2)):
        curve = timeline.memory[rank]
        assert max(sum(held[len(BEFORE) :]) for _, held in curve) == peak
        assert all(list(held[: len(BEFORE)]) == before for _, held in curve)
        times = [at for at, _ in curve]
        assert times == sorted(times)
        assert min(e.start_s for e in timeline.events) <= times[0]
        assert times[-1] <= max(e.end_s for e in timeline.events)
        path = tmp_path / f"{rank}.json"
        to_chrome_trace(timeline, path)
        again = read_chrome_trace(path).memory[rank]
        assert [held for _, held in again] == [held for _, held in curve]


def test_the_command_says_it():
    words = ["plan", "--pp", "2", "--layers", "2", "--dim", "16", "--heads", "2", "--kv-heads", "1"]
    words += ["--seq", "8", "--batch", "4", "--microbatches", "2", "--optimizer", "adamw", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    last = json.loads(done.output.splitlines()[-1])
    first = last["memory"][0]
    assert first["optimizer state"] == 2 * first["parameters"]
    assert first["all"] == sum(n for name, n in first.items() if name not in ("rank", "all"))
    assert "memory when each rank holds most" in done.output
