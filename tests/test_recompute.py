"""Recompute: less is kept, the same comes out, and what is done again is what the plan says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from piper_dynamo.ir.program import EXCHANGES, Op
from piper_dynamo.look.explain import explain
from piper_dynamo.lowering import aten, chunks
from piper_dynamo.runtime.executor import Executor
from tests import experts, jobs, replicas
from tests.jobs import LINE2, ONE, Placement
from tests.models import Counter, Dropped, NormNet, Stack4, rows, weights
from tests.replicas import CASES, Case

BUDGETS = (0.0, 0.5)


def recomputed(wanted: piper.Strategy, budget: float, **tags: Any) -> piper.Strategy:
    """The strategy with a budget for all stages, or for some."""
    extra = piper.Recompute({"PP": "*"} | tags, budget=budget)
    return piper.Strategy(*wanted.directives, extra, mesh=wanted.mesh)


class DroppedStack(Stack4):
    """Dropout after every layer."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k in range(4):
            with piper.annotate("PP", k * self.stages // 4):
                h = F.dropout(torch.tanh(h @ self.w[k].T), 0.25, self.training)
        with piper.annotate("PP", self.stages - 1):
            return F.mse_loss(h, y)


SUBJECTS = {
    "plain": CASES["plain"],
    "tied": CASES["tied"],
    "experts": experts.case(),
    "dropout": Case(build=DroppedStack, batch=replicas.numbers),
}


def seeded(case: Case) -> Case:
    """The same, whose models start from one state of the generator."""

    def build(stages: int) -> nn.Module:
        torch.manual_seed(7)
        return case.build(stages)

    return replace(case, build=build)


def check(subject: str, schedule: str, zero: int, budget: float) -> None:
    """Equal to one process: in eager mode, or where masks are Piper's own, without recomputation.

    That one runs as many microbatches as all replicas together.
    """
    case, (placement, count) = SUBJECTS[subject], replicas.SCHEDULES[schedule]
    part = replicas.part_of
    if subject == "experts":
        wanted = experts.strategy(placement, count, schedule, zero=zero)
        part = experts.part_of(replicas.replicas(placement))
    else:
        wanted = replicas.strategy(placement, count, schedule, zero=zero)
    if subject == "dropout":
        case = seeded(case)
        alone: Placement = {stage: [0] for stage in placement}
        whole = jobs.strategy(alone, count * replicas.replicas(placement), "")
        (want,) = replicas.run(case, alone, whole)
    else:
        want = replicas.reference(case)
    ranks = replicas.run(case, placement, recomputed(wanted, budget))
    replicas.compare(ranks, want, placement, zero, part=part)


QUICK = [
    ("plain", "one_f_one_b", 0, 0.0),
    ("tied", "zbv", 3, 0.5),
    pytest.param("experts", "one_f_one_b", 3, 0.0, marks=pytest.mark.slow),
    ("dropout", "one_f_one_b", 3, 0.0),
    ("dropout", "zbv", 0, 0.0),
    ("dropout", "dualpipev", 3, 0.5),
]


@pytest.mark.parametrize(("subject", "schedule", "zero", "budget"), QUICK)
def test_parity(subject: str, schedule: str, zero: int, budget: float) -> None:
    check(subject, schedule, zero, budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zbv", "dualpipev"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_sweep(subject: str, schedule: str, zero: int, budget: float) -> None:
    check(subject, schedule, zero, budget)


@contextmanager
def other_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Control: backward chunks number their draws otherwise than forward chunks do."""
    seed = aten.seed_draws

    def shifted(graph: torch.fx.Graph) -> None:
        given = graph.find_nodes(op="placeholder")
        if any(str(node.target).startswith("tangents") for node in given):
            for node in graph.nodes:
                if "draw" in node.meta:
                    node.meta["draw"] += 1000
        seed(graph)

    with monkeypatch.context() as patched:
        patched.setattr(aten, "seed_draws", shifted)
        patched.setattr(chunks, "_compiled", {})
        yield


def test_control_another_mask_in_the_backward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with other_masks(monkeypatch), pytest.raises(AssertionError, match="off by"):
        check("dropout", "one_f_one_b", 0, 0.0)


# What is done again, by count.


def matmuls(plan: piper.Plan) -> int:
    """Of a step, all ranks together."""
    runs = [i for program in plan.programs for i in program.instrs if i.op is Op.RUN]
    return sum(plan.chunks[i.target].matmuls for i in runs)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_matmuls_are_what_the_plan_says(budget: float, schedule: str) -> None:
    plain = jobs.strategy(LINE2, 4, schedule)
    before = piper.plan(Stack4(2), plain, rows(8), 2)
    after = piper.plan(Stack4(2), recomputed(plain, budget), rows(8), 2)
    said = sum(one.matmuls for one in after.recomputed.values())
    assert said > 0
    assert not before.recomputed
    assert matmuls(after) == matmuls(before) + 4 * said


class _Counted(TorchDispatchMode):
    """Counts matrix products as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("budget", [None, *BUDGETS])
def test_matmuls_that_run_are_those_of_the_plan(
    budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, run = _Counted(), Executor.run

    def counting(self: Executor, *args: Any, **kwargs: Any) -> Any:
        with counted:
            return run(self, *args, **kwargs)

    monkeypatch.setattr(Executor, "run", counting)
    wanted = jobs.strategy(ONE, 2)
    wanted = wanted if budget is None else recomputed(wanted, budget)

    def job() -> int:
        step = piper.compile(Stack4(2), wanted, example_inputs=rows(8))
        step(*rows(8))
        return matmuls(piper.explain(step))

    assert jobs.run_ranks(job, 1) == [counted.count]


def bundles(plan: piper.Plan) -> int:
    """Bytes that forwards of one microbatch keep: what their chunks give beside results."""
    found = 0
    for name, chunk in plan.chunks.items():
        if name.startswith("F_"):
            kept = chunk.outputs[chunk.num_results :]
            found += sum(spec.nbytes for spec in kept if spec is not None)
    return found


@pytest.mark.parametrize("model", [Stack4, DroppedStack])
def test_kept_bytes_are_within_the_budget(model: type[Stack4]) -> None:
    wanted = jobs.strategy(LINE2, 2)
    plans = {b: piper.plan(model(2), recomputed(wanted, b), rows(8), 2) for b in (0, 0.3, 0.6, 1)}
    kept = {b: sum(one.kept_bytes for one in p.recomputed.values()) for b, p in plans.items()}
    for budget, plan in plans.items():
        assert kept[budget] <= kept[0] + budget * (kept[1] - kept[0])
        assert {one.kept_without for one in plan.recomputed.values()} == {
            one.kept_bytes for one in plans[1].recomputed.values()
        }
    assert kept[0] < kept[0.6] < kept[1]
    # The first stage's input is data; the second gets one value of [4 rows, 4] from it.
    assert kept[0] == 4 * 4 * 8
    work = [sum(one.flops for one in plan.recomputed.values()) for plan in plans.values()]
    assert work == sorted(work, reverse=True)
    assert work[-1] == 0


def test_flops_are_those_of_the_products() -> None:
    plan = piper.plan(Stack4(2), recomputed(jobs.strategy(LINE2, 2), 0.0), rows(8), 2)
    for one in plan.recomputed.values():
        assert one.flops == one.matmuls * 2 * 4 * 4 * 4  # [4 rows, 4] times [4, 4]


def test_budgets_are_per_region() -> None:
    wanted = recomputed(jobs.strategy(LINE2, 2), 0.0, PP=1)
    plan = piper.plan(Stack4(2), wanted, rows(8), 2)
    assert [str(region) for region in plan.recomputed] == ["PP1"]
    both = "region PP1 has several budgets"
    text = jobs.refusal(
        lambda: piper.plan(Stack4(2), recomputed(wanted, 0.5), rows(8), 2), piper.PiperPlanError
    )
    jobs.mentions(text, both, "budget=0.5", 'piper.Recompute({"PP": 1})', "test_recompute.py")


def test_a_filter_that_matches_nothing_is_refused() -> None:
    wanted = recomputed(jobs.strategy(LINE2, 2), 0.0, PP=7)
    text = jobs.refusal(lambda: piper.plan(Stack4(2), wanted, rows(8), 2), piper.PiperPlanError)
    jobs.mentions(text, 'piper.Recompute({"PP": 7})', "no task has PP=7", "0, 1")


def test_the_summary_says_what_is_saved_and_added() -> None:
    plan = piper.plan(Stack4(2), recomputed(jobs.strategy(LINE2, 2), 0.0), rows(8), 2)
    table = plan.summary().split("recomputation")[1].splitlines()
    jobs.mentions(table[1], "region", "kept", "without", "saved", "added")
    assert table[2].split()[0] == "PP0"
    assert (
        "recomputation" not in piper.plan(Stack4(2), jobs.strategy(LINE2, 2), rows(8), 2).summary()
    )


def test_a_task_is_explained_with_what_it_keeps_and_does_again() -> None:
    plan = piper.plan(Stack4(2), recomputed(jobs.strategy(LINE2, 2), 0.0), rows(8), 2)
    jobs.mentions(explain(plan, "F.PP1.MB0"), "recompute   keeps 128 B of 384 B")
    jobs.mentions(explain(plan, "B.PP1.MB0"), "recompute   does 2 products again, 256 FLOP")


def test_rows_travel_once() -> None:
    wanted = experts.strategy(replicas.PAIR, 2, "gpipe")
    plans = [
        piper.plan(experts.Mixture(1), one, rows(12, 0), 2)
        for one in (wanted, recomputed(wanted, 0))
    ]
    first, second = ([i.op for i in p.programs[0].instrs if i.op in EXCHANGES] for p in plans)
    assert first == second
    assert bundles(plans[1]) < bundles(plans[0])


def test_gathers_serve_what_is_done_again() -> None:
    """Under ZeRO-3 a backward uses, for the forward too, what was gathered for it."""
    wanted = replicas.strategy(replicas.PAIR, 2, "gpipe", zero=3)
    plans = [piper.plan(Stack4(1), one, rows(12), 2) for one in (wanted, recomputed(wanted, 0))]
    assert [len(replicas.gathers(p.programs[0])) for p in plans] == [4, 4]


# Buffers under recomputation.


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("model", [NormNet, Counter])
def test_buffers_change_once_per_microbatch(model: type[nn.Module], schedule: str) -> None:
    want = model()
    losses = [jobs.accumulate(want, rows(8), 4) for _ in range(2)]

    def job() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        mine = model()
        wanted = recomputed(jobs.strategy(LINE2, 4, schedule), 0.0)
        step = piper.compile(mine, wanted, example_inputs=rows(8))
        got = []
        for _ in range(2):
            loss = step(*rows(8))
            loss.backward()
            got.append(loss.item())
        return got, {n: b.clone() for n, b in mine.named_buffers()}, jobs.grads(step)

    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([found for _, _, found in ranks], want)
    stage = 0 if model is NormNet else 1
    for name, value in want.named_buffers():
        jobs.close(ranks[stage][1][name], value, name)
    for got, _, _ in ranks:
        jobs.close(got, losses, "losses")


# torch.utils.checkpoint.


class Across(nn.Module):
    """One checkpoint around both stages: it crosses the cut."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.w, self.rate = weights(4), rate

    def layers(self, h: Tensor) -> Tensor:
        for k in range(4):
            with piper.annotate("PP", k // 2):
                h = F.dropout(torch.tanh(h @ self.w[k].T), self.rate, self.training)
        return h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        with piper.annotate("PP", 1):
            return F.mse_loss(out, y)


def test_a_checkpoint_across_the_cut() -> None:
    """Each stage computes its own part again, on its own rank, from what came into it."""
    wanted = jobs.strategy(LINE2, 4, "one_f_one_b")
    want = jobs.reference(Across(), [rows(8)] * jobs.STEPS, 4)

    def job() -> jobs.Trace:
        step = piper.compile(Across(), wanted, example_inputs=rows(8))
        return jobs.train(step, [rows(8)] * jobs.STEPS)

    jobs.compare(jobs.run_ranks(job, 2), want)
    plan = piper.plan(Across(), wanted, rows(8), 2)
    assert [str(region) for region in plan.recomputed] == ["PP0", "PP1"]
    kept = [one.kept_bytes for one in plan.recomputed.values()]
    assert kept[0] == 0  # its input is data
    assert kept[1] < next(iter(plan.recomputed.values())).kept_without
    first, second = plan.recomputed.values()
    assert (first.matmuls, second.matmuls) == (2, 2)


@pytest.mark.slow
def test_masks_do_not_depend_on_checkpoints() -> None:
    """Dropout in a checkpoint, in a region with a budget, or in neither: one and the same run."""

    def losses(
        build: Callable[[], nn.Module], budget: float | None, placement: Placement
    ) -> list[float]:
        wanted = jobs.strategy(placement, 4)
        wanted = wanted if budget is None else recomputed(wanted, budget)

        def job() -> list[float]:
            torch.manual_seed(3)
            step = piper.compile(build(), wanted, example_inputs=rows(8))
            return jobs.train(step, [rows(8)] * jobs.STEPS).losses

        return list(jobs.run_ranks(job, jobs.world(placement))[0])

    want = losses(lambda: DroppedStack(2), None, ONE)
    for build in (lambda: DroppedStack(2), lambda: Across(0.25)):
        for budget, placement in ((None, LINE2), (0.0, LINE2), (0.5, ONE)):
            jobs.close(losses(build, budget, placement), want, "losses")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.inner(F.dropout(torch.tanh(self.inner(h)), 0.25, self.training)))


class Blocks(nn.Module):
    """Four layers with dropout in blocks, which a budget cuts apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k, layer in enumerate(self.layers):
            with piper.annotate("PP", k // 2):
                h = layer(h)
        with piper.annotate("PP", 1):
            return F.mse_loss(h, y)


def test_blocks_are_computed_again_one_by_one_with_the_same_masks() -> None:
    wanted = jobs.strategy(LINE2, 4, "one_f_one_b")

    def job(budget: float) -> jobs.Trace:
        torch.manual_seed(3)
        step = piper.compile(Blocks(), recomputed(wanted, budget), example_inputs=rows(8))
        return jobs.train(step, [rows(8)] * jobs.STEPS)

    whole, cut = (jobs.run_ranks(lambda b=b: job(b), 2) for b in (1.0, 0.0))
    for one, other in zip(whole, cut, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(one.params[n], other.params[n]) for n in one.params)
    plan = piper.plan(Blocks(), recomputed(wanted, 0.0), rows(8), 2)
    regions = [str(region) for region in plan.recomputed]
    assert regions == ["PP0", "PP0.v1", "PP1", "PP1.v1"]
    assert "PP0 x2" in plan.summary()


class Scaled(nn.Module):
    """dropout(x w), elementwise; the loss is a sum, so the gradient of x is the mask times w."""

    def __init__(self, attention: bool = False) -> None:
        super().__init__()
        self.w, self.attention = nn.Parameter(torch.ones(4, dtype=torch.float64)), attention

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with piper.annotate("PP", 0):
            h = x * 1.0
        with piper.annotate("PP", 1):
            y = checkpoint(self.drop, h, use_reentrant=False)
            return y.sum(), y

    def drop(self, h: Tensor) -> Tensor:
        if not self.attention:
            return F.dropout(h * self.w, 0.5, self.training)
        # Every row attends to itself alone, by a probability that dropout keeps or drops.
        q = (h * self.w).unflatten(-1, (4, 1)).unsqueeze(2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).flatten(1)


@pytest.mark.parametrize("attention", [False, True])
def test_a_gradient_is_zero_where_the_output_is(attention: bool) -> None:
    """Case R56: the mask of the backward is that of the forward, per microbatch and step."""
    jobs.check_masks(lambda: Scaled(attention), "one_f_one_b")


def test_evaluation_takes_no_seed_from_training() -> None:
    """Dropped's second step draws the same masks whether an evaluation came between or not."""

    def job(evaluates: bool) -> list[float]:
        torch.manual_seed(3)
        model = Dropped()
        step = piper.compile(model, recomputed(jobs.strategy(ONE, 2), 0.0), example_inputs=rows(8))
        losses = []
        for _ in range(2):
            losses.append(step(*rows(8)).item())
            if evaluates:
                model.eval()
                with torch.no_grad():
                    step(*rows(8))
                model.train()
        return losses

    ((plain,), (between,)) = (jobs.run_ranks(lambda e=e: job(e), 1) for e in (False, True))
    assert plain == between


class Unfinished(nn.Module):
    """Its loss is made outside; each stage draws."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([torch.ones(8, dtype=torch.float64) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for k in range(2):
            with piper.annotate("PP", k):
                x = torch.tanh(F.dropout(x * self.w[k], 0.5, self.training).square())
        return x


@pytest.mark.parametrize("microbatches", [1, 2])
def test_outstanding_forwards_draw_their_own_masks_again(microbatches: int) -> None:
    """The first's backward comes after the second's forward, which drew others."""
    x = torch.linspace(0.5, 1.5, 64, dtype=torch.float64).reshape(8, 8)

    def job(outstanding: bool) -> list[dict[str, Tensor]]:
        model = Unfinished()
        step = piper.compile(
            model, recomputed(jobs.strategy(ONE, microbatches), 0.0), example_inputs=(x,)
        )
        found = []

        def finish(output: Tensor) -> None:
            model.zero_grad()
            output.sum().backward()
            found.append(jobs.grads(step))

        torch.manual_seed(5)
        first = step(x)
        if not outstanding:
            finish(first)
        second = step(x)
        if outstanding:
            finish(first)
        finish(second)
        return found

    ((want,), (got,)) = (jobs.run_ranks(lambda o=o: job(o), 1) for o in (False, True))
    assert want[0]["w.0"].ne(want[1]["w.0"]).any()
    for one, other in zip(got, want, strict=True):
        for name, grad in one.items():
            jobs.close(grad, other[name], name)
