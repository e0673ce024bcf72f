"""Section R: activations are kept as long as a backward needs them, and no longer."""

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op, RankProgram
from piper_dynamo.runtime import executor
from tests import experts, jobs
from tests.faults import fixtures as fx
from tests.jobs import LINE2, LINE4
from tests.models import Stack4, fill, rows
from tests.replicas import PAIR

WIDTH, ROWS, MICROBATCHES = 4096, 32, 8  # a microbatch's activation is 1 MiB in float64
LARGE = 2**20


class Wide(nn.Module):
    """F1 with rows of width 4096, element by element; two layers on each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(fill([WIDTH], k)) for k in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k in range(4):
            with piper.annotate("PP", k // 2):
                h = torch.tanh(h * self.w[k])
        with piper.annotate("PP", 1):
            return (h - y).square().mean()


def alive() -> int:
    """Large tensors that nobody has let go; the batches themselves are in a frozen generation."""
    real = (o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter))
    return len({o.untyped_storage().data_ptr() for o in real if o.nbytes >= LARGE})


def watched(schedule: str, steps: int) -> tuple[list[int], int]:
    """Large tensors after each step, and the most after any task, on both ranks together."""
    batch = tuple(torch.zeros(ROWS * MICROBATCHES, WIDTH, dtype=torch.float64) for _ in range(2))
    during: list[int] = []
    plain = executor.call_chunk

    def counting(chunk: Any) -> Callable[..., Any]:
        call = plain(chunk)

        def counted(*args: Any) -> Any:
            results = call(*args)
            during.append(alive())
            return results

        return counted

    def job() -> list[int]:
        wanted = jobs.strategy(LINE2, MICROBATCHES, schedule)
        step = piper.compile(Wide(), wanted, example_inputs=batch)
        found = []
        for _ in range(steps):
            step(*batch).backward()
            for p in piper.parameters(step):
                p.grad = None
            piper.clip_grad_norm_(step, math.inf)  # nobody is in its step while others count
            found.append(alive())
            piper.clip_grad_norm_(step, math.inf)
        return found

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with fx.patched((executor, "call_chunk", counting)):
            first, second = jobs.run_ranks(job, 2)
    finally:
        gc.enable()
        gc.unfreeze()
    return [max(pair) for pair in zip(first, second, strict=True)], max(during)


@pytest.mark.parametrize("steps", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_nothing_is_kept_from_step_to_step(steps: int) -> None:
    """R68, activations kept too long: as many tensors after each step, without the collector."""
    after, during = watched("one_f_one_b", steps)
    assert len(set(after[1:])) == 1
    _, longest = watched("gpipe", 1)
    assert during + 2 * (MICROBATCHES - 2) <= longest  # five or more microbatches fewer on each


def in_flight(program: RankProgram) -> int:
    """The most microbatches whose forward a rank has run and whose backward it has not."""
    now = most = 0
    for instr in program.instrs:
        if instr.op is Op.RUN:
            now += 1 if instr.task.startswith("F") else -1 if instr.task.startswith("B.") else 0
            most = max(most, now)
    return most


def test_1f1b_keeps_as_many_microbatches_as_stages_are_left() -> None:
    """R68, 1F1B keeps S - s microbatches of activations on stage s, GPipe all."""
    for schedule, want in (("one_f_one_b", [4, 3, 2, 1]), ("gpipe", [8] * 4)):
        plan = piper.plan(Stack4(4), jobs.strategy(LINE4, 8, schedule), rows(8))
        assert [in_flight(p) for p in plan.programs] == want


class Returning(Stack4):
    """F1 whose last activation is an output, too."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x
        for k in range(4):
            with piper.annotate("PP", k):
                h = torch.tanh(h @ self.w[k].T)
        with piper.annotate("PP", 3):
            return (h - y).square().mean(), h


@pytest.mark.parametrize("where", [None, "owner", "everywhere"])
def test_outputs_are_joined_only_where_they_are_asked_for(where: str | None) -> None:
    """R68, outputs: on their rank alone unless all ask for them; joined once, and sent then."""
    wanted = jobs.strategy(LINE4, 4, "one_f_one_b", loss=0)
    options = {} if where is None else {"outputs": where}
    plan = piper.plan(Returning(4), wanted, rows(8), **options)
    having = [0, 1, 2, 3] if where == "everywhere" else [3]
    joined = [[i for i in p.instrs if i.op is Op.CONCAT] for p in plan.programs]
    assert [p.rank for p in plan.programs if p.outputs] == having
    assert [len(found) for found in joined] == [0, 0, 0, 1]


# More inputs of the kind.


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
def test_gathered_weights_are_let_go(zero: int) -> None:
    """Another model and layout: experts and shards over two ranks keep nothing between steps."""
    wanted = experts.strategy(PAIR, 2, "", zero=zero)

    def everything() -> int:
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    def job() -> list[int]:
        given = fx.part(rows(24), wanted)
        step = piper.compile(experts.Mixture(1), wanted, example_inputs=given)
        found = []
        for _ in range(4):
            step(*given).backward()
            for p in piper.parameters(step):
                p.grad = None
            gc.collect()
            found.append(everything())
        return found

    gc.freeze()
    try:
        counts = jobs.run_ranks(job, 2)[0]
    finally:
        gc.unfreeze()
    assert counts[3] - counts[1] < 2 * 3  # one a step would be a gradient of each kind


@pytest.mark.parametrize("schedule", ["zb_h1", "zbv"])
def test_the_predicted_peak_does_not_grow_with_microbatches(schedule: str) -> None:
    """Another schedule, in float32: twice the microbatches, no more of the activations."""
    layout = fx.LAYOUTS[schedule]

    def peak(microbatches: int) -> list[int]:
        wanted = jobs.strategy(layout.placement, microbatches, schedule)
        batch = tuple(v.float() for v in rows(2 * microbatches))
        plan = piper.plan(fx.stack(layout)().float(), wanted, batch)
        step = plan.simulate()
        return [step.peak_bytes(rank) for rank in range(plan.world_size)]

    for more, less in zip(peak(16), peak(8), strict=True):
        assert more - less <= 8 * 4  # the losses of eight microbatches, until they are summed
