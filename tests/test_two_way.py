"""A stage on several device groups, each for its own microbatches: bidirectional pipelines.

As in `test_parity.py`, ranks get NaN, or an illegal index, for the inputs that their stages do not
use, and equal the eager model on one process over clipped SGD and AdamW steps, in float64. The
copies of a stage are bit-equal at the end. `test_zero.py` and `test_experts.py` have the same with
replicas and experts.
"""

from collections import Counter as Counts
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import planning
from piper_dynamo.ir.contributions import check_reductions
from piper_dynamo.ir.graph import Dag, results_of, task_of
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.task import Kind, Pass, TaskName
from piper_dynamo.ir.verify import verify
from piper_dynamo.passes.tie import Tie
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.executor import Runtime
from tests import jobs, replicas
from tests.jobs import LINE2, LINE4, Placement, Trace, mentions, refusal
from tests.models import Counter, NormNet, Stack4, TiedLM, rows
from tests.replicas import CASES

Build = Callable[[], nn.Module]
FOUR_BY_TWO: Placement = {s: [2 * s, 2 * s + 1] for s in range(4)}


def dualpipe(placement: Placement, microbatches: int) -> piper.Strategy:
    return jobs.strategy(placement, microbatches, "dualpipe")


def unordered(placement: Placement, microbatches: int) -> piper.Strategy:
    """The same places; dataflow alone says who runs what when."""
    places = jobs.places(placement, "dualpipe", microbatches)
    return piper.Strategy(piper.Split({}, num_microbatches=microbatches), *places)


def check(case: str, placement: Placement, wanted: piper.Strategy, zero: int = 0) -> None:
    ranks = replicas.run(CASES[case], placement, wanted)
    want = replicas.reference(CASES[case], len(placement))
    replicas.compare(ranks, want, placement, zero)


# Parity.


@pytest.mark.parametrize(
    ("case", "placement", "microbatches"),
    [
        ("tied", LINE2, 4),
        ("frozen", LINE2, 6),
        ("skip", LINE4, 8),
        pytest.param("tied", LINE4, 12, marks=pytest.mark.slow),
        pytest.param("frozen", LINE4, 8, marks=pytest.mark.slow),
        pytest.param("uneven", LINE2, 4, marks=pytest.mark.slow),
    ],
)
def test_dualpipe(case: str, placement: Placement, microbatches: int) -> None:
    check(case, placement, dualpipe(placement, microbatches))


@pytest.mark.parametrize("zero", replicas.levels(3))
def test_replicas_of_four_stages(zero: int) -> None:
    """Ranks 0 and 1 share a stage's copy, ranks 6 and 7 the other."""
    wanted = replicas.strategy(FOUR_BY_TWO, 8, "dualpipe", zero=zero)
    batch = CASES["plain"].batch
    case = replace(CASES["plain"], batch=lambda step: tuple(v[:16] for v in batch(step)))
    want = replicas.reference(case, 4)
    replicas.compare(replicas.run(case, FOUR_BY_TWO, wanted), want, FOUR_BY_TWO, zero)


def test_without_an_order() -> None:
    check("skip", LINE4, unordered(LINE4, 8))


def test_without_an_order_each_rank_has_the_memory_of_1f1b() -> None:
    """Of each of its stages, as many microbatches as there are stages from it to the end."""
    found = piper.plan(Stack4(4), unordered(LINE4, 16), rows(16))
    for program in found.programs:
        held, most = Counts[int](), Counts[int]()
        for task in [TaskName.parse(i.task) for i in program.instrs if i.op is Op.RUN]:
            stage = int(task.tags["PP"])
            held[stage] += 1 if task.which is Pass.F else -1
            most[stage] = max(most[stage], held[stage])
        assert set(most) == {program.rank, 3 - program.rank}
        assert all(count <= 4 - stage for stage, count in most.items()), most


def test_any_microbatches_on_any_number_of_ranks() -> None:
    """Three ranks have the first stage, for unlike numbers of microbatches; one has the second."""
    where = {0: [0, 3], 1: 2, 2: 1}
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=4),
        *(piper.Place({"PP": 0, "MB": mb}, devices=[rank]) for rank, mb in where.items()),
        piper.Place({"PP": 1}, devices=[3]),
    )

    def job() -> Trace:
        mine = jobs.given_to(piper.rank(), rows(8), ((0,), (1,)), jobs.uses(wanted))
        step = piper.compile(Stack4(2), wanted, example_inputs=mine)
        return jobs.train(step, [mine] * jobs.STEPS)

    jobs.compare(jobs.run_ranks(job, 4), jobs.reference(Stack4(2), [rows(8)] * jobs.STEPS, 4))


def test_the_gradient_of_an_input_comes_to_all_that_use_it() -> None:
    def given() -> tuple[Tensor, Tensor]:
        x, y = rows(8)
        return x.requires_grad_(), y

    batch, model = given(), Stack4(2)
    model(*batch).backward()

    def job() -> Tensor | None:
        mine = given()
        step = piper.compile(Stack4(2), dualpipe(LINE2, 4), example_inputs=mine)
        step(*mine).backward()
        return mine[0].grad

    for rank, grad in enumerate(jobs.run_ranks(job, 2)):
        jobs.close(grad, batch[0].grad, f"gradient of x on rank {rank}")


def test_a_loss_with_weights() -> None:
    """Both ends make losses; each weighs its own microbatches by the whole batch's weights."""

    def weigh(y: Tensor) -> Tensor:
        return y.square().sum()

    model, batch = Stack4(2), rows(8)
    pieces = jobs.slices(batch, 4)
    weights = [weigh(y) for _, y in pieces]
    loss = sum((model(*p) * w for p, w in zip(pieces, weights, strict=True)), torch.zeros(()))
    (loss / sum(weights)).backward()
    wanted = jobs.strategy(LINE2, 4, "dualpipe", reduction=weigh)

    def job() -> tuple[float, dict[str, Tensor]]:
        step = piper.compile(Stack4(2), wanted, example_inputs=batch)
        found = step(*batch)
        found.backward()
        return found.item(), jobs.grads(step)

    ranks = jobs.run_ranks(job, 2)
    for value, _ in ranks:
        jobs.close(value, (loss / sum(weights)).item(), "loss")
    jobs.check_grads([grads for _, grads in ranks], model)


# Buffers.


@pytest.mark.parametrize("build", [NormNet, Counter])
def test_a_buffer_goes_from_microbatch_to_microbatch(build: Build) -> None:
    """From one rank to the other, too; then all that read it have its last value."""
    wanted, batch = unordered(LINE2, 4), rows(8)

    def job() -> tuple[Trace, float]:
        model = build()
        step = piper.compile(model, wanted, example_inputs=batch)
        trace = jobs.train(step, [batch] * jobs.STEPS)
        trace.buffers.update({n: b.clone() for n, b in model.named_buffers()})
        model.eval()
        with torch.no_grad():
            return trace, step(*batch).item()

    model = build()
    want = jobs.reference(model, [batch] * jobs.STEPS, 4)
    ranks = jobs.run_ranks(job, 2)
    jobs.compare([trace for trace, _ in ranks], want)
    with torch.no_grad():
        evaluated = jobs.accumulate(model.eval(), batch, 4)
    for _, loss in ranks:
        jobs.close(loss, evaluated, "loss in eval mode")


@pytest.mark.parametrize(("build", "buffer"), [(NormNet, "norm.running_"), (Counter, "count")])
def test_directions_that_a_buffer_ties_together_are_refused(build: Build, buffer: str) -> None:
    text = refusal(lambda: piper.plan(build(), dualpipe(LINE2, 4), rows(8)), piper.PiperPlanError)
    mentions(text, "deadlock", f"the new value of buffer '{buffer}", "eval mode")


# How the copies start.


@pytest.mark.parametrize("build", [lambda: Stack4(2), TiedLM], ids=["two ways", "tied"])
def test_copies_that_differ_at_the_start(build: Build) -> None:
    """A tied parameter is on two ranks, too, in any schedule."""
    tied = build is TiedLM
    batch = TiedLM.batch() if tied else rows(8)
    wanted = jobs.strategy(LINE2, 2) if tied else dualpipe(LINE2, 4)
    name = "e" if tied else "w.2"

    def job() -> str:
        model = build()
        if piper.rank() == 1:
            with torch.no_grad():
                model.get_parameter(name)[1, 1] += 2.0**-40
        return refusal(
            lambda: piper.compile(model, wanted, example_inputs=batch, timeout_s=10.0),
            piper.PiperRuntimeError,
        )

    for rank, text in enumerate(jobs.run_ranks(job, 2)):
        mentions(text, f"rank {rank} starts from other", f"{name} on rank {1 - rank}", "seed")
        assert "w.1" not in text


def test_copies_take_the_first_ones_values_on_request() -> None:
    wanted, batch = dualpipe(LINE4, 8), rows(8)

    def job() -> Trace:
        model = Stack4(4)
        if piper.rank() > 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        step = piper.compile(model, wanted, example_inputs=batch, start="broadcast")
        return jobs.train(step, [batch] * jobs.STEPS)

    jobs.compare(jobs.run_ranks(job, 4), jobs.reference(Stack4(4), [batch] * jobs.STEPS, 8))


def test_each_parameter_counts_once() -> None:
    """On the first of its ranks, by which its norm is one process's."""
    found = plan()
    weights = [a for a in found.args if a.kind is ArgKind.PARAMETER]
    holders = {a.name: found.holders()[a.position] for a in weights}
    assert holders == {"w.0": (0, 3), "w.1": (1, 2), "w.2": (1, 2), "w.3": (0, 3)}
    for a in weights:
        first = holders[a.name][0]
        assert found.counting(a.position, first) == (first,)


# Refusals and the proof.


def test_microbatches_that_are_placed_nowhere_or_twice() -> None:
    def places(first: Any, second: Any) -> str:
        wanted = piper.Strategy(
            piper.Split({}, num_microbatches=4),
            piper.Place({"PP": 0, "MB": first}, devices=[0]),
            piper.Place({"PP": 0, "MB": second}, devices=[1]),
            piper.Place({"PP": 1}, devices=[1]),
        )
        return refusal(lambda: piper.plan(Stack4(2), wanted, rows(8)), piper.PiperPlanError)

    mentions(places([0], [3]), "PP0 is placed nowhere for microbatches 1, 2")
    mentions(places(range(3), [2, 3]), "PP0 is placed twice for microbatch 2")
    mentions(places(range(4), range(4, 8)), "matches nothing", "no task has MB=")


class Forgetful(Tie):
    """Each holder ends with its own part alone, so that programs are well-formed."""

    def __call__(self, dag: Dag) -> None:
        super().__call__(dag)
        for nodes in results_of(dag.graph)["grads"].values():
            for node in nodes:
                if task_of(node).kind is Kind.SUM:
                    home = task_of(node).devices
                    node.args = tuple(p for p in node.args if task_of(p).devices == home)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_plan_without_the_other_holders_part(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "Tie", Forgetful)
    wanted = replicas.strategy(replicas.LINE, 4, "dualpipe", zero=zero)
    text = refusal(lambda: piper.plan(Stack4(2), wanted, rows(8)), piper.PiperPlanError)
    mentions(
        text,
        "the plan is unsafe",
        "rank 0 #",
        ": the gradient 'grad_w_0",
        "is not reduced over ranks [0, 1, 2, 3], which make parts of it",
        "without [2, 3]",
    )


def plan() -> Plan:
    return piper.plan(Stack4(4), dualpipe(LINE4, 8), rows(8))


def test_a_program_without_the_other_holders_part() -> None:
    programs = list(plan().programs)
    assert check_reductions(programs) == []
    instrs = list(programs[3].instrs)
    at = next(k for k, instr in enumerate(instrs) if instr.op is Op.ADD)
    lost, kept = instrs[at].inputs
    for inputs, faults in (
        ((kept,), ["[3] without [0]"]),
        ((kept, kept), ["is reduced again", "[3] without [0]"]),
    ):
        instrs[at] = replace(instrs[at], inputs=inputs)
        programs[3] = replace(programs[3], instrs=tuple(instrs))
        found = check_reductions(programs)
        assert len(found) == len(faults)
        for fault, words in zip(found, faults, strict=True):
            mentions(fault, "rank 3", words)
        text = refusal(lambda: verify(programs), piper.PiperPlanError)
        mentions(text, f"{lost!r} is made and never used")


# Controls: what the comparison must notice.


def first_part(runtime: Runtime, *parts: Tensor) -> Tensor:
    return parts[0].clone()


def last_part(runtime: Runtime, *parts: Tensor) -> Tensor:
    return parts[-1].clone()


def twice(runtime: Runtime, *parts: Tensor) -> Tensor:
    return parts[0] + parts[0]


@pytest.mark.parametrize("broken", [first_part, last_part, twice])
def test_control_a_sum_over_holders_that_is_wrong(
    broken: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runtime, "add", broken)
    with pytest.raises(AssertionError, match="off by"):
        check("plain", LINE2, dualpipe(LINE2, 4))


def test_control_a_sum_in_another_order_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last bits differ: copies are compared bit by bit."""
    real = Runtime.add

    def nudged(runtime: Runtime, *parts: Tensor) -> Tensor:
        return real(runtime, *parts) * (1 + 2.0**-50 * piper.rank())

    monkeypatch.setattr(Runtime, "add", nudged)
    with pytest.raises(AssertionError, match=r"copies of|norms are not"):
        check("plain", LINE2, dualpipe(LINE2, 4))
