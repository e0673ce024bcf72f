"""How a step runs on its device: what is recorded, what is refused, what profilers see."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import piper_dynamo as piper
from docs.programs import cuda_program
from piper_dynamo import _torch_compat as compat
from piper_dynamo import _torch_inductor as inductor
from piper_dynamo import planning, programs, version
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.lowering.capturable import why_not_captured
from piper_dynamo.lowering.happens_before import check_launches
from piper_dynamo.lowering.streams import on_streams
from piper_dynamo.on_device import recorder_of
from piper_dynamo.options import Options
from piper_dynamo.runtime import nccl
from piper_dynamo.runtime.graphs import StepGraph
from piper_dynamo.runtime.local import LocalCommunicator, LocalWorld
from tests import experts, jobs
from tests.jobs import LINE2, mentions, refusal
from tests.models import Dropped, Stack4, rows
from tests.replicas import PAIR
from tests.source_tree import ROOT


class Tape:
    """Records by keeping the function; a replay writes what it returns into the first results."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, fn: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        results = tuple(torch.zeros_like(value) for value in fn())

        def replay() -> None:
            self.replays += 1
            for room, value in zip(results, fn(), strict=True):
                room.copy_(value)

        return results, replay


def times(state: Any, data: Any, weights: Any) -> tuple[Tensor, ...]:
    return (state[0] * data[0], data[0] + weights[0])


def test_a_recorded_step_reads_what_it_is_given():
    tape = Tape()
    graph = StepGraph(times, tape)
    state = [torch.tensor([2.0, 3.0])]
    kept = []
    for k in range(4):
        data, weights = [torch.full((2,), float(k))], [torch.tensor(10.0 * k)]
        kept.append(graph(state, data, weights))
        state[0].add_(1.0)  # an optimizer's step, in place
    assert (graph.recorded, tape.replays) == (1, 3)
    for k, (product, total) in enumerate(kept):  # no later step has written over these
        assert product.tolist() == [k * (2.0 + k), k * (3.0 + k)]
        assert total.tolist() == [11.0 * k] * 2


def test_a_step_is_recorded_again_where_parameters_have_moved():
    tape = Tape()
    graph = StepGraph(times, tape)
    data, weights = [torch.ones(2)], [torch.tensor(0.0)]
    for value in (1.0, 2.0):
        state = [torch.full((2,), value)]
        for _ in range(3):
            assert graph(state, data, weights)[0].tolist() == [value] * 2
    assert (graph.recorded, tape.replays) == (2, 4)


# What cannot be recorded


def why_not(plan: Any, rank: int = 0) -> list[str]:
    return why_not_captured(plan.programs[rank], plan.chunks)


def test_static_plans_can_be_recorded():
    plan = piper.plan(Stack4(), jobs.strategy(LINE2, 4, "one_f_one_b"), rows(8))
    assert [why_not(plan, rank) for rank in (0, 1)] == [[], []]
    capacity = experts.strategy(PAIR, 2, "gpipe", capacity=1.5)
    assert not why_not(piper.plan(experts.Mixture(1), capacity, rows(8)))


def test_experts_without_a_capacity_are_named():
    found = why_not(piper.plan(experts.Mixture(1), experts.strategy(PAIR, 2, "gpipe"), rows(8)))
    text = "\n".join(found)
    mentions(text, "the host reads how many rows", "exchange_counts", "experts.py:")
    mentions(text, "as many rows as come")


def test_random_numbers_are_named():
    found = why_not(piper.plan(Dropped(), jobs.strategy(LINE2, 2, "gpipe"), rows(8)))
    mentions("\n".join(found), "draws random numbers", "models.py:")


def test_a_model_without_a_loss_is_named():
    plan = piper.plan(torch.nn.Linear(4, 4).double(), piper.Strategy(), rows(8)[:1])
    mentions("\n".join(why_not(plan)), "no output is the loss")


def test_options_that_cannot_be_recorded_are_named():
    plan = piper.plan(experts.Mixture(1), experts.strategy(PAIR, 2, "gpipe"), rows(8))
    comm = LocalCommunicator(LocalWorld(2), 0)
    options = Options(strategy=plan.strategy, graph=True, nan_check="skip")
    text = refusal(lambda: recorder_of(plan, comm, options))
    mentions(text, "graph=True", "not on CUDA", "threads of one process", "nan_check", "more")
    assert recorder_of(plan, comm, Options(strategy=plan.strategy)) is None


def test_graph_is_refused_where_a_step_is_compiled():
    text = refusal(lambda: piper.compile(Stack4(), piper.Strategy(), rows(8), graph=True))
    mentions(text, "the step cannot be recorded", "not on CUDA")
    mentions(refusal(lambda: Options(graph="yes")), "option 'graph'", "True or False")  # type: ignore[arg-type]


# Plans


def test_a_program_is_shown_for_a_device():
    plan = piper.plan(Stack4(), jobs.strategy(LINE2, 2, "one_f_one_b"), rows(8))
    on_cuda = str(plan.program(1, device="cuda"))
    mentions(on_cuda, "rt.streams", "recv_from_0.record_event", "compute.wait_event", "on compute")
    assert str(plan.program(1)) == str(plan.program(1, device="cpu"))
    assert "wait_event" not in str(plan.program(1))
    mentions(refusal(lambda: plan.program(0, device="tpu")), "tpu", "cuda")


def test_the_emitted_program_is_that_of_the_documents():
    """1F1B, ZeRO-3 and experts; `make docs` writes it again."""
    assert cuda_program() == (ROOT / "docs" / "cuda-program.txt").read_text(encoding="utf-8")


def test_many_replicas_have_one_launch_order():
    strategy = jobs.strategy({0: [*range(64)], 1: [*range(64, 128)]}, 2, "one_f_one_b")
    wanted = piper.Strategy(*strategy.directives, piper.Replicate({"PP": "*"}, zero=2))
    plan = piper.plan(Stack4(), wanted, rows(4))
    first, other = (str(plan.program(rank, device="cuda")) for rank in (0, 7))
    moved = first.replace("_64", "_71").replace(", 64,", ", 71,")
    assert moved.splitlines()[2:] == other.splitlines()[2:]


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made as if the model were on CUDA."""
    torch._dynamo.reset()  # equal strategies share their plans
    monkeypatch.setattr(planning, "on_cuda", lambda args: True)


@pytest.mark.usefixtures("as_on_cuda")
def test_a_plan_on_cuda_runs_in_launch_order_with_its_communicators():
    plan = piper.plan(Stack4(), jobs.strategy(LINE2, 4, "one_f_one_b"), rows(8))
    assert not check_launches(plan.programs)
    assert plan.launched is plan.programs
    pairs = {group for group in plan.communicators() if group[0] == nccl.PAIR}
    assert pairs == {(nccl.PAIR, (0, 1)), (nccl.PAIR, (1, 0))}
    mentions(str(plan.program(0)), "rt.streams", "send_to_1.wait_event")


@pytest.mark.usefixtures("as_on_cuda")
def test_many_replicas_on_cuda_have_a_pair_each():
    strategy = jobs.strategy({0: [*range(64)], 1: [*range(64, 128)]}, 2, "one_f_one_b")
    wanted = piper.Strategy(*strategy.directives, piper.Replicate({"PP": "*"}))
    plan = piper.plan(Stack4(), wanted, rows(4))
    pairs = {group[1] for group in plan.communicators() if group[0] == nccl.PAIR}
    assert pairs == {pair for r in range(64) for pair in ((r, r + 64), (r + 64, r))}


@pytest.mark.usefixtures("as_on_cuda")
def test_control_a_plan_on_cuda_with_a_race_is_refused(monkeypatch: pytest.MonkeyPatch):
    def careless(program: Any, chunks: Any) -> Any:
        given = on_streams(program, chunks)
        steps = tuple(replace(s, waits=()) if s.stream else s for s in given.steps)
        return replace(given, steps=steps)

    monkeypatch.setattr(programs, "on_streams", careless)
    strategy = jobs.strategy(LINE2, 2, "gpipe")
    text = refusal(lambda: piper.plan(Stack4(), strategy, rows(8)), piper.PiperPlanError)
    mentions(text, "the plan's streams are unsafe", "rank 0", "send", "models.py:")


# Profilers, settings


def test_profilers_see_tasks():
    step = piper.compile(Stack4(), piper.Strategy(piper.Split({}, num_microbatches=2)), rows(8))
    step(*rows(8))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(*rows(8))
    assert {"F.PP0.MB0", "B.PP1.MB1"} <= {event.key for event in profiled.key_averages()}
    assert not compat.is_profiling()


def test_inductor_moves_no_communication():
    settings = inductor.inductor_settings(tuned=True)
    assert settings["max_autotune"] is True
    assert settings["triton.cudagraphs"] is False
    assert not any(value for name, value in settings.items() if "overlap" in name)
    assert any("overlap" in name for name in settings)


@pytest.mark.slow
def test_what_is_kept_on_disk_is_of_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph = fx.symbolic_trace(lambda x: (x.cos(),))
    specs = [torch.empty(5, 7)]

    def is_found() -> bool:
        before = counters["inductor"]["fxgraph_cache_hit"]
        inductor.compile_with_inductor(graph, [TensorSpec.of(s) for s in specs])
        return counters["inductor"]["fxgraph_cache_hit"] > before

    assert [is_found(), is_found()] == [False, True]
    monkeypatch.setattr(version, "__version__", "0.0.0")
    assert [is_found(), is_found()] == [False, True]


@pytest.mark.slow
def test_chunks_tuned_by_measuring_are_right():
    results = []
    for mode in ("inductor", "max-autotune"):
        model = Stack4()
        step = piper.compile(model, piper.Strategy(), rows(8), compile=mode)
        step(*rows(8)).backward()
        results.append([p.grad for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_ranks_without_gpus_of_their_own_meet_over_gloo(monkeypatch: pytest.MonkeyPatch):
    assert nccl.own_gpu() is None
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert nccl.own_gpu() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert nccl.own_gpu() is None
