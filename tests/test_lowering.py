"""Lowering: the programs of a small pipeline as text, and what holds for every program."""

# ruff: noqa: E501  (the texts are as they are printed)

import gc
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import planning
from piper_dynamo.binding import bind
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.ir.program import Instr, Op, RankProgram, Watch
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.lowering.channels import LOOK_AHEAD, post_receives
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.lowering.emit import emit
from piper_dynamo.lowering.lower import Draft
from piper_dynamo.lowering.memory import bytes_over_time
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.executor import Runtime, call_chunk
from piper_dynamo.runtime.local import LocalCommunicator, LocalWorld
from tests import jobs
from tests.jobs import LINE2, LINE4, LOOP2, ONE, V2
from tests.models import NormNet, Stack4, TiedLM, fill, rows, xin

CASES = {
    "1f1b": (lambda: Stack4(2), LINE2, "one_f_one_b", 2),
    "gpipe": (lambda: Stack4(4, skip="all"), LINE4, "gpipe", 4),
    "interleaved": (lambda: Stack4(4), LOOP2, "interleaved_1f1b", 4),
    "zbv": (lambda: Stack4(4, skip="last"), V2, "zbv", 4),
    "free": (lambda: Stack4(4), LINE4, "", 4),
    "tied": (TiedLM, LINE2, "zb_h1", 4),
    "buffers": (NormNet, LINE2, "one_f_one_b", 4),
    "alone": (lambda: Stack4(2), ONE, "", 4),
}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    found = {}
    for name, (model, placement, schedule, microbatches) in CASES.items():
        batch = TiedLM.batch() if model is TiedLM else rows(8)
        found[name] = piper.plan(model(), jobs.strategy(placement, microbatches, schedule), batch)
    return found


@pytest.fixture(params=CASES)
def plan(request: pytest.FixtureRequest, plans: dict[str, Plan]) -> Plan:
    return plans[request.param]


def text(plan: Plan, rank: int) -> str:
    """A program without its heading and the line numbers of tests/models.py."""
    _, code = str(plan.program(rank)).split("\n\n", 1)
    return re.sub(r"models\.py:\d+", "models.py", code)


def test_heading(plans: dict[str, Plan]):
    program = str(plans["interleaved"].program(1))
    assert program.startswith(
        "# rank 1 of 2 · PP=1,3 · 4 microbatches · streams: compute, recv, send · peak 936 B\n\n"
    )
    assert "· PP=0,1 · 4 microbatches · streams: compute · " in str(plans["alone"].program(0))


def test_summary(plans: dict[str, Plan]):
    """Nothing is replicated: no column speaks of shards, gathers or reductions."""
    assert_expected_inline(
        plans["buffers"].summary(),
        """\
plan of 2 ranks, 4 microbatches, training
rank  regions  parameters  absent  buffers  tasks      sends  step peak
   0  PP0           192 B   128 B     72 B      8  4 (256 B)      848 B
   1  PP1           128 B   192 B        -      8  5 (264 B)      464 B
4 parameters (320 B)
memory when each rank holds most; the optimizer's state, which a plan does not know, comes on top
rank  parameters  buffers  gradients  activations  communication  inside tasks      all
   0       192 B     72 B      256 B        328 B           72 B         320 B  1.2 KiB
   1       128 B        -      128 B        144 B          128 B         128 B    656 B
4 chunks to compile
messages of a step
from  to  value of   messages  each
   0   1  F.PP0     4 (256 B)  64 B
   1   0  B.PP1     4 (256 B)  64 B
   1   0  loss        1 (8 B)   8 B""",
    )
    assert_expected_inline(
        plans["alone"].summary(),
        """\
plan of 1 rank, 4 microbatches, training
rank  regions   parameters  tasks  step peak
   0  PP0, PP1       512 B     16      808 B
4 parameters (512 B)
memory when each rank holds most; the optimizer's state, which a plan does not know, comes on top
rank  parameters  gradients  activations  inside tasks      all
   0       512 B      512 B        216 B         128 B  1.3 KiB
4 chunks to compile""",
    )


def test_first_rank(plans: dict[str, Plan]):
    assert_expected_inline(
        text(plans["1f1b"], 0),
        """\
def step(rt, state, data, weights):
    w_0, w_1 = state
    [x] = data
    h_mm_7_MB0_on_0 = rt.post(1, 0, float64_4x4)  # B.PP1.MB0
    h_loss_on_0 = rt.post(1, 1, float64_scalar)  # loss
    x_MB0 = rt.slice(x, 0, 0, 2)
    tanh_1_MB0, bundle_PP0_MB0 = F_PP0([x_MB0, w_0, w_1])  # F  PP=0 MB=0  models.py
    rt.send(tanh_1_MB0, 1, 0)  # F.PP0.MB0
    x_MB1 = rt.slice(x, 0, 1, 2)
    tanh_1_MB1, bundle_PP0_MB1 = F_PP0([x_MB1, w_0, w_1])  # F  PP=0 MB=1  models.py
    rt.send(tanh_1_MB1, 1, 1)  # F.PP0.MB1
    mm_7_MB0_on_0 = rt.wait(h_mm_7_MB0_on_0)
    del h_mm_7_MB0_on_0
    rt.drain(1, 0)
    del tanh_1_MB0
    h_mm_7_MB1_on_0 = rt.post(1, 2, float64_4x4)  # B.PP1.MB1
    d_w_0_MB0, d_w_1_MB0 = B_PP0([x_MB0, w_1], bundle_PP0_MB0, [mm_7_MB0_on_0])  # B  PP=0 MB=0  models.py
    del x_MB0, bundle_PP0_MB0, mm_7_MB0_on_0
    grad_w_0 = d_w_0_MB0
    del d_w_0_MB0
    grad_w_1 = d_w_1_MB0
    del d_w_1_MB0
    mm_7_MB1_on_0 = rt.wait(h_mm_7_MB1_on_0)
    del h_mm_7_MB1_on_0
    grad_w_0, grad_w_1 = B_PP0([x_MB1, w_1], bundle_PP0_MB1, [mm_7_MB1_on_0], [grad_w_0, grad_w_1])  # B  PP=0 MB=1  models.py
    del x_MB1, bundle_PP0_MB1, mm_7_MB1_on_0
    loss_on_0 = rt.wait(h_loss_on_0)
    del h_loss_on_0
    rt.drain(1, 1)
    del tanh_1_MB1
    return loss_on_0, (), (grad_w_0, grad_w_1,), ()
""",
    )


def test_second_rank(plans: dict[str, Plan]):
    assert_expected_inline(
        text(plans["1f1b"], 1),
        """\
def step(rt, state, data, weights):
    w_2, w_3 = state
    [y] = data
    [weight] = weights
    h_tanh_1_MB0_on_1 = rt.post(0, 0, float64_4x4)  # F.PP0.MB0
    h_tanh_1_MB1_on_1 = rt.post(0, 1, float64_4x4)  # F.PP0.MB1
    tanh_1_MB0_on_1 = rt.wait(h_tanh_1_MB0_on_1)
    del h_tanh_1_MB0_on_1
    y_MB0 = rt.slice(y, 0, 0, 2)
    mse_loss_MB0, bundle_PP1_MB0 = F_PP1([tanh_1_MB0_on_1, w_2, w_3, y_MB0])  # F  PP=1 MB=0  models.py
    del tanh_1_MB0_on_1
    mm_7_MB0, d_w_2_MB0, d_w_3_MB0 = B_PP1([w_2, w_3, y_MB0], bundle_PP1_MB0, [weight])  # B  PP=1 MB=0  models.py
    del y_MB0, bundle_PP1_MB0
    rt.send(mm_7_MB0, 0, 0)  # B.PP1.MB0
    grad_w_2 = d_w_2_MB0
    del d_w_2_MB0
    grad_w_3 = d_w_3_MB0
    del d_w_3_MB0
    tanh_1_MB1_on_1 = rt.wait(h_tanh_1_MB1_on_1)
    del h_tanh_1_MB1_on_1
    y_MB1 = rt.slice(y, 0, 1, 2)
    mse_loss_MB1, bundle_PP1_MB1 = F_PP1([tanh_1_MB1_on_1, w_2, w_3, y_MB1])  # F  PP=1 MB=1  models.py
    del tanh_1_MB1_on_1
    loss = rt.loss(mse_loss_MB0, weight, mse_loss_MB1, weight)
    del mse_loss_MB0, mse_loss_MB1
    rt.send(loss, 0, 1)  # loss
    mm_7_MB1, grad_w_2, grad_w_3 = B_PP1([w_2, w_3, y_MB1], bundle_PP1_MB1, [weight], [grad_w_2, grad_w_3])  # B  PP=1 MB=1  models.py
    del y_MB1, bundle_PP1_MB1
    rt.send(mm_7_MB1, 0, 2)  # B.PP1.MB1
    rt.drain(0, 0)
    del mm_7_MB0
    rt.drain(0, 1)
    rt.drain(0, 2)
    del mm_7_MB1
    return loss, (), (grad_w_2, grad_w_3,), ()
""",
    )


def at(program: RankProgram, op: Op, peer: int | None = None) -> Iterator[tuple[int, Instr]]:
    for index, instr in enumerate(program.instrs):
        if instr.op is op and (instr.peer >= 0 if peer is None else instr.peer == peer):
            yield index, instr


def test_every_task_runs_once_where_it_was_placed(plans: dict[str, Plan]):
    for name, (_, placement, _, microbatches) in CASES.items():
        ran = Counter(
            (i.task.removesuffix(f".MB{mb}"), mb, program.rank)
            for program in plans[name].programs
            for i in program.instrs
            if i.op is Op.RUN
            for mb in [int(i.task.rsplit("MB", 1)[1])]
        )
        assert set(ran.values()) == {1}
        forwards = {(task, mb, rank) for task, mb, rank in ran if task.startswith("F")}
        assert forwards == {
            (f"F.PP{stage}", mb, ranks[0])
            for stage, ranks in placement.items()
            for mb in range(microbatches)
        }


def test_nothing_is_sent_inside_a_rank(plans: dict[str, Plan]):
    assert not any(i.peer >= 0 for i in plans["alone"].programs[0].instrs)
    for name in ("zbv", "interleaved"):
        for program in plans[name].programs:
            assert all(i.peer != program.rank for i in program.instrs)


def test_receives_are_posted_in_the_order_of_the_sends(plan: Plan):
    for program in plan.programs:
        for other in plan.programs:
            sent = [i.message for _, i in at(other, Op.SEND, program.rank)]
            posted = [i.message for _, i in at(program, Op.POST, other.rank)]
            assert sent == posted == list(range(len(sent)))


def test_receives_are_posted_a_little_ahead(plan: Plan):
    for program in plan.programs:
        open_by_peer: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for instr in program.instrs:
            if instr.op is Op.POST:
                open_by_peer[instr.peer] += 1
                most[instr.peer] = max(most[instr.peer], open_by_peer[instr.peer])
            elif instr.op is Op.WAIT and instr.peer >= 0:
                open_by_peer[instr.peer] -= 1
        assert not +open_by_peer
        for peer, count in most.items():
            messages = sum(1 for _ in at(program, Op.POST, peer))
            waits = [i.message for _, i in at(program, Op.WAIT, peer)]
            early = 0 if waits == sorted(waits) else messages
            assert min(LOOK_AHEAD, messages) <= count <= LOOK_AHEAD + early


@given(st.permutations(range(5)), st.integers(0, 4))
def test_posting_takes_any_order_of_waits(waits: list[int], look_ahead: int):
    """Posts stay in the order of the sends, and each is before its wait."""
    draft = Draft(rank=0, place=0, instrs=[wait(message) for message in waits])
    post_receives(draft, look_ahead)
    posts = [i.message for i in draft.instrs if i.op is Op.POST]
    assert posts == list(range(5))
    assert [i.message for i in draft.instrs if i.op is Op.WAIT] == waits
    done: set[str] = set()
    for instr in draft.instrs:
        assert instr.op is Op.POST or instr.inputs[0] in done
        done |= set(instr.outputs)


def wait(message: int) -> Instr:
    return Instr(
        op=Op.WAIT,
        inputs=(f"h{message}",),
        outputs=(f"x{message}",),
        peer=1,
        message=message,
        spec=TensorSpec(shape=(2,), dtype=torch.float32, stride=(1,)),
    )


def test_registers_are_freed_right_after_their_last_use(plan: Plan):
    for program in plan.programs:
        last: dict[str, int] = {}
        freed: dict[str, int] = {}
        for index, instr in enumerate(program.instrs):
            if instr.op is Op.FREE:
                for reg in instr.inputs:
                    assert reg not in freed, f"{reg} is freed twice"
                    freed[reg] = index
            else:
                last |= dict.fromkeys((*instr.reads(), *instr.writes()), index)
        keep = program.results() | program.sources() | {"_"}
        assert set(freed) == set(last) - keep
        assert all(freed[reg] == last[reg] + 1 for reg in freed)


def test_sums_are_not_freed_between_parts(plans: dict[str, Plan]):
    for program in plans["tied"].programs:
        parts = Counter(i.outputs[0] for i in program.instrs if i.op is Op.ACCUMULATE)
        parts.update(i.outputs[k] for i in program.instrs for k in i.adds)
        assert set(parts.values()) == {4}
        assert {r for _, r in program.grads} <= {
            *parts,
            *(i.outputs[0] for i in program.instrs if i.op is Op.ADD),
        }


def test_tied_gradients_are_added_in_one_order_on_both_ranks(plans: dict[str, Plan]):
    sums = [i for program in plans["tied"].programs for i in program.instrs if i.op is Op.ADD]
    origins = [[name.split("_on_")[1] for name in i.inputs] for i in sums]
    assert origins == [["0", "1"], ["0", "1"]]


def test_a_drain_is_where_the_send_has_left(plan: Plan):
    """Right after an answer that was sent after the message had been taken, or at the end."""
    for program in plan.programs:
        for index, send in at(program, Op.SEND):
            ((drained, drain),) = [
                (k, d) for k, d in at(program, Op.DRAIN, send.peer) if d.message == send.message
            ]
            assert drained > index
            assert drain.inputs == send.inputs
            before = drained - 1
            while program.instrs[before].op in (Op.DRAIN, Op.FREE):
                before -= 1
            answer = program.instrs[before]
            rest = {i.op for i in program.instrs[drained:]}
            if rest <= {Op.DRAIN, Op.FREE}:
                continue
            assert answer.op is Op.WAIT
            assert answer.peer == send.peer
            other = plan.programs[send.peer]
            (taken,) = [k for k, i in at(other, Op.WAIT, program.rank) if i.message == send.message]
            (sent,) = [
                k for k, i in at(other, Op.SEND, program.rank) if i.message == answer.message
            ]
            assert taken < sent


def test_some_drains_are_before_the_end(plans: dict[str, Plan]):
    instrs = plans["1f1b"].programs[0].instrs
    first = next(k for k, i in enumerate(instrs) if i.op is Op.DRAIN)
    assert any(i.op is Op.RUN for i in instrs[first:])


def test_without_orders_a_stage_holds_as_many_microbatches_as_are_stages_behind_it(
    plans: dict[str, Plan],
):
    for program in plans["free"].programs:
        flying = most = 0
        for instr in program.instrs:
            if instr.op is Op.RUN:
                flying += 1 if instr.task.startswith("F") else -1
                most = max(most, flying)
        assert most == 4 - program.rank


def test_a_rank_takes_only_what_it_needs(plans: dict[str, Plan]):
    plan = plans["1f1b"]
    held = [{plan.args[p].name for _, p in program.state} for program in plan.programs]
    data = [{plan.args[p].name for _, p in program.data} for program in plan.programs]
    assert held == [{"w.0", "w.1"}, {"w.2", "w.3"}]
    assert data == [{"x"}, {"y"}]
    assert [program.weights for program in plan.programs] == [(), ("weight",)]


def test_what_was_captured_is_freed(monkeypatch: pytest.MonkeyPatch):
    """Only level 3 compares with it later."""
    found: list[Any] = []
    trace = planning.capturing.trace

    def traced(*args: Any, **kwargs: Any) -> Any:
        found.append(trace(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(planning.capturing, "trace", traced)
    model, placement, schedule, microbatches = CASES["zbv"]
    for level in ("1", "3"):
        monkeypatch.setattr(planning, "_templates", {})
        monkeypatch.setenv("PIPER_VERIFY", level)
        torch._dynamo.reset()
        piper.plan(model(), jobs.strategy(placement, microbatches, schedule), rows(8))
    plain, compared = (len(one.graph.nodes) for one in found)
    assert plain == 0
    assert compared > 0


def test_two_builds_are_one_plan(plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch):
    """From the model up: nothing of the first build is used for the second."""
    monkeypatch.setattr(planning, "_templates", {})
    torch._dynamo.reset()
    for name in ("zbv", "tied"):
        model, placement, schedule, microbatches = CASES[name]
        batch = TiedLM.batch() if model is TiedLM else rows(8)
        again = piper.plan(model(), jobs.strategy(placement, microbatches, schedule), batch)
        assert again is not plans[name]
        assert again.fingerprint() == plans[name].fingerprint()
        assert [p.peak_bytes for p in again.programs] == [
            p.peak_bytes for p in plans[name].programs
        ]
        assert again.graph == plans[name].graph


def test_fingerprints_tell_plans_apart(plans: dict[str, Plan]):
    assert len({plan.fingerprint() for plan in plans.values()}) == len(plans)


def test_a_rank_outside_the_world_has_no_program(plans: dict[str, Plan]):
    for rank in (-1, 2):
        with pytest.raises(PiperPlanError, match=f"rank {rank} is outside the world of 2 ranks"):
            plans["1f1b"].program(rank)


def test_peaks_follow_what_schedules_hold(plans: dict[str, Plan]):
    """GPipe keeps every microbatch's activations, 1F1B a stage's distance to the end."""
    model, batch = Stack4(2), rows(64)

    def peaks(schedule: str) -> list[int]:
        plan = piper.plan(model, jobs.strategy(LINE2, 8, schedule), batch)
        return [plan.simulate().peak_bytes(rank) for rank in range(2)]

    gpipe, one_f = peaks("gpipe"), peaks("one_f_one_b")
    assert one_f[0] < gpipe[0]
    assert one_f[1] < gpipe[1]
    # One microbatch keeps at least its border value and its two tanh: 8 rows of 4 float64 each.
    assert gpipe[0] >= 8 * 2 * 8 * 4 * 8
    assert one_f[1] < 8 * 2 * 8 * 4 * 8


class Watched(Runtime):
    """Notes after each instruction how many bytes of tensors there are beside those of before."""

    def __init__(self) -> None:
        super().__init__(LocalCommunicator(LocalWorld(1), 0))
        self.before: set[int] = set()
        self.alive: dict[int, int] = {}

    def mark(self, index: int) -> None:
        storages = {}
        for found in gc.get_objects():  # without what gc.freeze() has put aside
            if type(found) is Tensor:
                storage = found.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        self.alive[index] = sum(size for at, size in storages.items() if at not in self.before)


class Plain(nn.Module):
    """Without mse_loss, whose result keeps the memory of all its terms in torch 2.13."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v, self.b = (nn.Parameter(fill([4, n], n)) for n in (4, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w)
        with piper.annotate("PP", 1):
            return (torch.tanh(h + self.b.view(4)) @ self.v).square().mean()


@pytest.mark.parametrize("case", ["whole", "halves"])
def test_predicted_bytes_are_those_of_a_run(case: str):
    """One rank, no messages: after every instruction, exactly the predicted bytes are alive."""
    model, x = Plain(), xin([64, 4], 0)
    halves = [piper.Order([{"PP": 1, "PASS": "BI"}, {"PP": 1, "PASS": "BW"}])]
    plan = piper.plan(
        model,
        piper.Strategy(
            piper.Split({}, num_microbatches=4),
            *jobs.places(ONE),
            *(halves if case == "halves" else []),
        ),
        (x,),
    )
    (program,) = plan.programs
    functions = compile_chunks(plan.chunks, "aten")
    bound = bind(program, plan.chunks, functions)
    assert any(chunk.adding for chunk in bound.values())
    chunks = {name: call_chunk(chunk) for name, chunk in bound.items()}
    module = emit(program, Watch(timed=True))
    namespace = {**chunks, **module.specs}
    exec(compile(module.source, "<program>", "exec"), namespace)
    state = dict(model.named_parameters())
    weight = torch.tensor(0.25, dtype=torch.float64)
    given = (
        [state[plan.args[p].name].detach() for _, p in program.state],
        [x for _ in program.data],
        [weight for _ in program.weights],
    )
    watched = Watched()
    watched.before = {t.untyped_storage().data_ptr() for values in given for t in values}
    gc.collect()
    gc.freeze()
    try:
        with torch.no_grad():
            results = namespace["step"](watched, *given)
    finally:
        gc.unfreeze()
    predicted = bytes_over_time(program, plan.chunks)
    assert len(results[2]) == 3
    assert len(watched.alive) > 20
    assert watched.alive == {index: predicted[index] for index in watched.alive}
    assert max(predicted) == program.peak_bytes > 3 * 16 * 4 * 8
