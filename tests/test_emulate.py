"""Emulated devices: chunks that only wait, with real messages between real processes."""

import math
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import piper_dynamo as piper
from piper_dynamo.costs import durations, tasks_run
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.lowering.emit import emit
from piper_dynamo.lowering.emulate import zeros
from tests import jobs
from tests.jobs import LINE2, ONE, V2, mentions, refusal
from tests.models import NormNet, Stack4, TiedLM, rows
from tests.pool import Pool

UNIT_S = 0.005
COSTS = piper.Costs(F=UNIT_S, BI=UNIT_S, BW=UNIT_S)
MICROBATCHES = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def emulated(stages: int, placement: jobs.Placement, schedule: str, **options: Any) -> Any:
    options = {"compile": "emulate", "costs": COSTS} | options
    strategy = jobs.strategy(placement, MICROBATCHES, schedule)
    return piper.compile(Stack4(stages), strategy, rows(8), timeout_s=30.0, **options)


# Time.


def step_times(stages: int, placement: jobs.Placement, schedule: str) -> tuple[list[float], float]:
    """Seconds per step, and what the simulation says."""
    step = emulated(stages, placement, schedule)
    times = []
    for _ in range(30):  # one of them at a quiet moment
        dist.barrier()
        start = time.perf_counter()
        step(*rows(8)).backward()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return times, piper.explain(step).simulate(COSTS).makespan


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("stages", "placement", "schedule"), [(2, LINE2, "one_f_one_b"), (4, V2, "zbv")]
)
def test_steps_take_the_simulated_time(
    pool: Pool, stages: int, placement: jobs.Placement, schedule: str
) -> None:
    found = pool.values(step_times, stages, placement, schedule)
    # Of the slowest rank: one that leaves a barrier late begins late.
    best = min(map(max, zip(*(times for times, _ in found), strict=True)))
    for _, simulated in found:
        assert simulated <= best <= 1.15 * simulated  # the best of several: the machine may be busy


def test_the_chunks_of_a_task_share_its_cost() -> None:
    """A rank's waits are those that the simulation charges, instruction by instruction."""
    model = Stack4(4, "all")
    plan = piper.plan(model, jobs.strategy(V2, MICROBATCHES, "zbv"), rows(8), world_size=2)
    costs = piper.Costs(F=1.0, BI=2.0, BW=3.0)
    seconds = durations(tasks_run(plan.programs), costs, plan.halves)
    events = plan.simulate(costs).timeline.events
    charged = {e.name: e.end_s - e.start_s for e in events if e.stream == "compute"}
    assert charged == pytest.approx(seconds)
    for program in plan.programs:
        source = emit(program, seconds=seconds).source
        runs = [i for i in program.instrs if i.op is Op.RUN]
        begun = [
            float(line.strip().removeprefix("rt.begin(").rstrip(")"))
            for line in source.splitlines()
            if "rt.begin" in line
        ]
        assert begun == [seconds[i.task] for i in runs]
        assert source.count("rt.finish()") == len(runs)
        assert "rt.begin" not in emit(program).source


# What comes out.


def count_messages(mode: str) -> tuple[int, int]:
    """Messages that a rank sends in two steps, and those of its program."""
    options = {} if mode == "emulate" else {"compile": mode, "costs": None}
    step = emulated(4, V2, "dualpipev", **options)
    with mock.patch.object(dist, "isend", wraps=dist.isend) as sends:
        for _ in range(2):
            step(*rows(8)).backward()
    program = piper.explain(step).programs[piper.rank()]
    return sends.call_count, sum(i.op is Op.SEND for i in program.instrs)


@pytest.mark.dist(2)
def test_messages_are_those_of_a_real_run(pool: Pool) -> None:
    found = pool.values(count_messages, "emulate")
    assert found == pool.values(count_messages, "aten")
    assert all(sent == 2 * planned > 0 for sent, planned in found)


def test_loss_outputs_and_gradients_are_zeros() -> None:
    costs = piper.Costs(F=0.0, BI=0.0, BW=0.0)
    for model, batch in ((TiedLM(), TiedLM.batch()), (NormNet(), rows(8))):
        step = piper.compile(model, jobs.strategy(ONE, 2), batch, compile="emulate", costs=costs)
        before = dict(piper.named_parameters(step))
        loss = step(*batch)
        loss.backward()
        assert loss.item() == 0.0
        for name, parameter in before.items():
            assert parameter.grad is not None, name
            assert parameter.grad.shape == parameter.shape
            assert not parameter.grad.any(), name
            parameter.grad.fill_(7.0)  # the user's own: the next step's gradient is another
            parameter.grad = None
        step(*batch).backward()
        assert all(p.grad is not None and not p.grad.any() for p in before.values())


@pytest.mark.parametrize(
    ("shape", "stride"), [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((4, 3), (0, 1)), ((0, 3), (3, 1))]
)
def test_zeros_have_the_layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    spec = TensorSpec(shape=shape, dtype=torch.float32, stride=stride)
    made = zeros(spec)
    assert made is not None
    assert (made.shape, made.stride(), made.dtype) == (shape, stride, torch.float32)
    assert not made.any()


# Refusals.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "emulate"}, ("costs", "emulate", "seconds")),
        ({"compile": "aten", "costs": 0.005}, ("costs", "float", "piper.Costs")),
        ({"compile": "emulate", "costs": 0.005}, ("costs", "float", "piper.Costs")),
    ],
)
def test_costs_that_are_none(options: dict[str, Any], words: tuple[str, ...]) -> None:
    for call in (piper.plan, piper.compile):
        text = refusal(
            lambda call=call: call(Stack4(2), jobs.strategy(ONE, 2), rows(8), **options),
            piper.PiperStrategyError,
        )
        mentions(text, *words)


def test_emulation_needs_a_strategy() -> None:
    step = torch.compile(
        torch.nn.Linear(4, 4), backend="piper", options={"compile": "emulate", "costs": COSTS}
    )
    mentions(refusal(lambda: step(torch.ones(2, 4)), Exception), "emulate", "strategy")
    step = torch.compile(torch.nn.Linear(4, 4), backend="piper", options={"costs": COSTS})
    mentions(refusal(lambda: step(torch.ones(2, 4)), Exception), "costs", "strategy")


@pytest.mark.parametrize("cost", [-1.0, math.inf, math.nan])
def test_times_that_cannot_be_waited(cost: float) -> None:
    strategy = jobs.strategy(ONE, 2)
    costs = piper.Costs(of=lambda task: cost if task.which == "F" else 0.0)
    text = refusal(
        lambda: piper.compile(Stack4(2), strategy, rows(8), compile="emulate", costs=costs),
        piper.PiperStrategyError,
    )
    mentions(text, "F.PP0.MB0", str(cost), "seconds")
