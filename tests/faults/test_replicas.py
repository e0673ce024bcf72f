"""Section E: replicas and their shards under pipelines: what is gathered and reduced, and when."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from benchmarks.zero_counts import collectives
from piper_dynamo.ir.program import Op, RankProgram
from piper_dynamo.runtime import local
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, Lin53, about
from tests.models import Stack4, fill, rows
from tests.replicas import LINE, LOOP, PAIR, TRIPLE, VEE

QUAD: jobs.Placement = {0: [0, 1, 2, 3]}

# Every level.


@pytest.mark.parametrize("zero", replicas.levels(3))
@pytest.mark.parametrize(
    "schedule",
    ["one_f_one_b"]
    + [pytest.param(s, marks=pytest.mark.slow) for s in replicas.SCHEDULES if s != "one_f_one_b"],
)
def test_every_level_trains_as_one_process(zero: int, schedule: str) -> None:
    """R30, ZeRO under pipelines: three steps of SGD with the same losses at every level."""
    placement, microbatches = replicas.SCHEDULES[schedule]
    microbatches = min(microbatches, 4)
    wanted = replicas.strategy(placement, microbatches, schedule, zero=zero)
    batch = rows(8)
    if microbatches == 4:  # four rows a replica are one a microbatch
        assert len(batch[0]) // 2 == microbatches
    losses = fx.train(lambda: Stack4(len(placement)), wanted, fx.sgd, *[batch] * 3)
    for found in losses:
        assert found == about(list(F1.SGD))


def test_the_plan_states_reductions_and_their_memory() -> None:
    """R30, what it costs: reduce-scatters per microbatch from level 2 on, in the summary."""
    for zero, count in ((0, 1), (1, 1), (2, 2), (3, 2)):
        plan = piper.plan(Stack4(2), replicas.strategy(LINE, 2, zero=zero), EIGHT)
        assert {len(replicas.reductions(p)) for p in plan.programs} == {count}
        rows_ = plan.summary().splitlines()
        head = next(k for k, line in enumerate(rows_) if "reductions" in line)
        assert f" {count} (" in rows_[head + 2], rows_[head : head + 3]


def test_a_gradient_shard_is_all_that_a_rank_keeps() -> None:
    """R30, level 2: half of the rows of every gradient, between microbatches and after the step."""
    ranks = fx.run(lambda: Stack4(2), replicas.strategy(LINE, 2, zero=2), EIGHT)
    assert {tuple(g.shape) for found in ranks for g in found.grads.values()} == {(2, 4)}
    assert [found.norm for found in ranks] == [about(F1.NORM)] * 4
    for zero, shapes in ((0, {(4, 4)}), (1, {(4, 4)}), (2, {(2, 4)}), (3, {(2, 4)})):
        plan = piper.plan(Stack4(2), replicas.strategy(LINE, 2, zero=zero), EIGHT)
        for program in plan.programs:
            assert summed(program, plan) == shapes, (zero, program.rank)


def summed(program: RankProgram, plan: piper.Plan) -> set[tuple[int, ...]]:
    """Shapes of what microbatches' gradients are summed up in."""
    found: dict[str, tuple[int, ...]] = {}  # by register
    sums = set()
    for instr in program.instrs:
        if instr.op is Op.RUN:
            specs = plan.chunks[instr.target].outputs
            found |= {r: s.shape for r, s in zip(instr.outputs, specs, strict=False) if s}
            sums |= {found[instr.outputs[at]] for at in instr.adds}
        elif instr.op is Op.REDUCE_SCATTER:
            found |= {instr.outputs[0]: instr.specs[0].shape}
        elif instr.op is Op.WAIT and instr.inputs[0] in found:
            found |= {reg: found[instr.inputs[0]] for reg in instr.outputs}
        elif instr.op is Op.ACCUMULATE:
            found |= {reg: found[instr.inputs[-1]] for reg in instr.outputs}
            sums |= {found[reg] for reg in instr.sums}
    return sums


# When to gather.


class Stack8(nn.Module):
    """F1 with eight weights, one per stage."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(fill([4, 4], k)) for k in range(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k in range(8):
            with piper.annotate("PP", k):
                h = torch.tanh(h @ self.w[k].T)
        with piper.annotate("PP", 7):
            return (h - y).square().mean()


LOOP8: jobs.Placement = {k: [[0, 1], [2, 3]][k % 2] for k in range(8)}


def of_eight(keep: Any) -> piper.Strategy:
    return replicas.strategy(LOOP8, 4, "interleaved_1f1b", zero=3, keep=keep, prefetch=0)


@pytest.mark.parametrize("keep", [1, *fx.slowly(2, 3, "step")])
def test_gathered_stages_stay_within_the_limit(keep: int | str) -> None:
    """R31, gather and free of four stages a rank: right, at most so many at once, none twice."""
    wanted = of_eight(keep)
    ranks = fx.run(Stack8, wanted, EIGHT)
    model, losses = fx.eager(Stack8, EIGHT)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in ranks:
        assert found.loss == about(losses[0], 1e-12)
        assert found.norm == about(norm.item(), 1e-12)
    plan = piper.plan(Stack8(), wanted, EIGHT)
    assert collectives(plan).peak_buckets <= (4 if keep == "step" else int(keep))
    for program in plan.programs:
        assert not gathered_twice(program)


def test_fewer_gathers_where_more_stays() -> None:
    """R31, the number of gathers is told, and falls with the limit; without one it is one each."""
    counts = {}
    for keep in ("chunk", 1, 2, 3, "step"):
        plan = piper.plan(Stack8(), of_eight(keep), EIGHT)
        counts[keep] = collectives(plan).gathers
        text = plan.summary()
        assert all(f" {len(replicas.gathers(p))} (" in text for p in plan.programs)
    assert counts["step"] == 4 * 4  # four stages on each of four ranks
    assert counts["step"] <= counts[3] <= counts[2] <= counts[1] <= counts["chunk"]


def gathered_twice(program: RankProgram) -> list[str]:
    """Registers gathered while their gathered value is still there."""
    held: dict[str, str] = {}
    handles: dict[str, str] = {}
    twice = []
    for instr in program.instrs:
        if instr.op is Op.ALL_GATHER:
            if instr.inputs[0] in held.values():
                twice.append(instr.inputs[0])
            handles[instr.outputs[0]] = instr.inputs[0]
        elif instr.op is Op.WAIT and instr.inputs[0] in handles:
            held[instr.outputs[0]] = handles.pop(instr.inputs[0])
        elif instr.op is Op.FREE:
            for reg in instr.inputs:
                held.pop(reg, None)
    return twice


# Which backward is the last.


def reduced(program: RankProgram) -> list[list[str]]:
    """Of each reduction, the backwards whose gradients are in it, by name."""
    found = []
    for at in replicas.reductions(program):
        wanted, tasks = set(program.instrs[at].reads()), []
        for instr in reversed(program.instrs[:at]):
            if instr.op is Op.FREE or not wanted & set(instr.writes()):
                continue
            if instr.op is Op.RUN and instr.task.startswith("B"):
                tasks.append(instr.task)
                wanted |= set(instr.sums)
            else:
                wanted |= set(instr.reads())
        found.append(sorted(tasks))
    return found


REVERSED = [
    piper.Order(
        [{"PP": s, "MB": k, "PASS": "F"} for k in range(4)]
        + [{"PP": s, "MB": k, "PASS": "B"} for k in (3, 2, 1, 0)]
    )
    for s in range(2)
]


@pytest.mark.parametrize(
    ("placement", "schedule"),
    [
        pytest.param(LINE, "one_f_one_b", marks=pytest.mark.slow),
        (LOOP, "interleaved_1f1b"),
        (LINE, "last microbatch first"),
    ],
)
def test_one_reduction_after_the_last_backward(placement: jobs.Placement, schedule: str) -> None:
    """R32, last-backward detection: each bucket once a step, when its own last backward is done."""
    if schedule == "last microbatch first":
        wanted = piper.Strategy(
            piper.Split({}, num_microbatches=4),
            *jobs.places(placement),
            piper.Replicate({"PP": "*"}),
            *REVERSED,
        )
    else:
        wanted = replicas.strategy(placement, 4, schedule)
    stages = len(placement)
    ranks = fx.run(lambda: Stack4(stages), wanted, EIGHT)
    assert [found.norm for found in ranks] == [about(F1.NORM)] * 4
    for first, second in ((0, 1), (2, 3)):
        for name, grad in ranks[first].grads.items():
            assert torch.equal(grad, ranks[second].grads[name])
    plan = piper.plan(Stack4(stages), wanted, EIGHT)
    for program in plan.programs:
        mine = [stage for stage, ranks_ in placement.items() if program.rank in ranks_]
        assert sorted(reduced(program)) == [[f"B.PP{s}.MB{k}" for k in range(4)] for s in mine]


def test_control_reductions_of_every_microbatch() -> None:
    """R32, control: where each microbatch is reduced, a reduction has its gradients alone."""
    plan = piper.plan(Stack4(2), replicas.strategy(LINE, 4, zero=2), EIGHT)
    for program in plan.programs:
        stage = 0 if program.rank in LINE[0] else 1
        assert sorted(reduced(program)) == [[f"B.PP{stage}.MB{k}"] for k in range(4)]


def not_reduced(op: Op, parts: list[Tensor], place: int, like: Any) -> Tensor:
    """Each rank takes its own part for that of all."""
    return parts[place] * len(parts)


def test_control_replicas_that_are_not_reduced() -> None:
    """R32, signature: each replica has the gradient of its own rows."""
    with fx.patched((local, "combine", not_reduced)):
        ranks = fx.run(lambda: Stack4(1), replicas.strategy(PAIR, 2), EIGHT)
    own = [torch.stack([g.norm() for g in found.grads.values()]).norm().item() for found in ranks]
    assert own == [about(value) for value in F1.NOT_REDUCED]


# A microbatch's gradient lost.


@pytest.mark.parametrize("zero", replicas.levels(1))
def test_every_microbatch_counts(zero: int) -> None:
    """R33, a gradient lost: the norm of F1 at every level; the loss alone would not show it."""
    for found in fx.run(lambda: Stack4(2), replicas.strategy(LINE, 4, zero=zero), EIGHT):
        assert found.norm == about(F1.NORM)


@pytest.mark.parametrize(("which", "norm"), [("last", F1.ONLY_LAST), ("first", F1.ONLY_FIRST)])
def test_control_a_microbatch_alone(which: str, norm: float) -> None:
    """R33, signatures: only the last or the first microbatch is kept, and the loss is right."""
    with fx.keeping(which):
        ranks = fx.run(lambda: Stack4(4), jobs.strategy(jobs.LINE4, 4), EIGHT)
    for found in ranks:
        assert found.loss == about(F1.LOSS)
        assert found.norm == about(norm)


OTHER_SIZE = (rows(8), rows(4, 2), rows(8, 1))


def test_another_size_between_two_calls_keeps_what_was_summed() -> None:
    """R33, another length in between: a program of other sizes wipes no gradient."""
    fx.equals_eager(lambda: Stack4(2), jobs.strategy(jobs.LINE2, 4), *OTHER_SIZE)


@pytest.mark.parametrize("zero", replicas.levels(2))
def test_another_size_between_two_calls_of_replicas(zero: int) -> None:
    """R33, another length in between, at every level: each rank has its shard of the sum."""
    ranks = fx.run(lambda: Stack4(2), replicas.strategy(LINE, 2, zero=zero), *OTHER_SIZE)
    model, losses = fx.eager(lambda: Stack4(2), *OTHER_SIZE)
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.get_total_norm(list(want.values()))
    for rank, found in enumerate(ranks):
        assert found.losses == about(losses, 1e-12)
        assert found.norm == about(norm.item(), 1e-12)
        assert found.grads.keys() == {name for name in want if rank // 2 == int(name[2]) // 2}
        for name, grad in found.grads.items():
            part = replicas.part_of(want[name], rank, LINE, zero)
            jobs.close(grad, part, f"rank {rank}: {name}")


# Mean, not sum.


class One(nn.Module):
    """A weight whose gradient on each rank is what it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return (self.w * x).float().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", replicas.levels(0))
def test_replicas_are_averaged(zero: int, dtype: torch.dtype) -> None:
    """R35, sum instead of mean: gradients 1 and 3 make 2."""
    wanted = replicas.strategy(PAIR, 1, zero=zero)
    ranks = fx.run(lambda: One(dtype), wanted, (torch.tensor([[1.0], [3.0]], dtype=dtype),))
    found = [value for one in ranks for g in one.grads.values() for value in g.tolist()]
    assert found == ([2.0] if zero else [2.0, 2.0])


def test_control_replicas_that_are_summed() -> None:
    """R35, signature: gradients twice as large."""

    def doubled(name: str, rank: int, value: Tensor) -> Tensor:
        return value * 2 if name == "all_reduce" and value.numel() > 1 else value

    with fx.collectives(doubled):
        ranks = fx.run(lambda: Stack4(1), replicas.strategy(PAIR, 2), EIGHT)
    assert [found.norm for found in ranks] == [about(F1.DP_SUMMED)] * 2


# Sizes that do not divide.


class Scalars(nn.Module):
    """A parameter without dims and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.75, dtype=torch.float64))
        self.one = nn.Parameter(fill([1], 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return (torch.tanh(x * self.scale + self.one) - y).square().mean()


@pytest.mark.parametrize("zero", replicas.levels(3)[1:])
@pytest.mark.parametrize(
    "placement",
    [
        QUAD,
        pytest.param(PAIR, marks=pytest.mark.slow),
        pytest.param(TRIPLE, marks=pytest.mark.slow),
    ],
    ids=["four", "two", "three"],
)
def test_sizes_that_ranks_do_not_divide(placement: jobs.Placement, zero: int) -> None:
    """R36, uneven shards: F4's numbers, empty shards, whole shapes in the state dict."""
    count = len(placement[0])
    wanted = replicas.strategy(placement, 1, zero=zero)
    batch = Lin53.batch()
    if len(batch[0]) % count:  # three ranks: each row three times, so that replicas are equal
        batch = tuple(value.repeat(3, 1) for value in batch)

    def job() -> tuple[float, float, dict[str, Tensor]]:
        mine = fx.part(batch, wanted)
        step = piper.compile(Lin53(), wanted, example_inputs=mine)
        optimizer = torch.optim.SGD(piper.parameters(step), lr=0.1)
        loss = step(*mine)
        loss.backward()
        norm = float(piper.clip_grad_norm_(step, float("inf")))
        optimizer.step()
        return loss.item(), norm, piper.state_dict(step)

    want = (Lin53.NORM_W**2 + Lin53.NORM_B**2) ** 0.5
    for loss, norm, state in jobs.run_ranks(job, count):
        assert loss == about(Lin53.LOSS)
        assert norm == about(want)
        assert {n: tuple(v.shape) for n, v in state.items()} == {"w": (5, 3), "b": (5,)}
        assert state["w"].sum().item() == about(Lin53.SUM_AFTER)


@pytest.mark.parametrize("zero", replicas.levels(3)[1:])
def test_parameters_smaller_than_the_number_of_ranks(zero: int) -> None:
    """R36, a parameter without dims, and one element over four ranks."""
    wanted = replicas.strategy(QUAD, 1, zero=zero)
    ranks = fx.run(Scalars, wanted, EIGHT)
    model, losses = fx.eager(Scalars, EIGHT)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in ranks:
        assert found.loss == about(losses[0], 1e-12)
        assert found.norm == about(norm.item(), 1e-12)


# More inputs of the kinds.


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
def test_uneven_parameters_under_a_v(zero: int) -> None:
    """Uneven shards of another model and layout, over clipped steps of two optimizers."""
    case = replace(replicas.CASES["uneven"], batch=lambda step: rows(16, 2 * step))
    wanted = replicas.strategy(VEE, 4, "zbv", zero=zero)
    ranks = replicas.run(case, VEE, wanted, steps=2)
    replicas.compare(ranks, replicas.reference(case, steps=2), VEE, zero)


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
def test_tied_weights_are_reduced_once(zero: int) -> None:
    """The last backward of a weight that two stages hold, in a V, in float32."""

    class Single(replicas.Tied):
        def __init__(self) -> None:
            super().__init__(4)
            self.float()

    case = replicas.CASES["tied"]
    wanted = replicas.strategy(VEE, 4, "zbv", zero=zero)
    ranks = fx.run(Single, wanted, case.batch(0))
    model, losses = fx.eager(Single, case.batch(0))
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        assert found.norm == pytest.approx(norm.item(), abs=1e-6)
