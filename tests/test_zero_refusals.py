"""Bad requests for replicas, replicas that disagree, and plans whose collectives are wrong.

Each test states the words the message must hold. The plans at the end are right ones that were
changed on every rank alike, so that registers and collectives still match: only what they mean is
wrong.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import piper_dynamo as piper
from piper_dynamo.errors import PiperPlanError, PiperStrategyError
from piper_dynamo.ir.program import Instr, Op, RankProgram
from piper_dynamo.ir.verify import verify
from piper_dynamo.planning import Plan
from tests import jobs, replicas
from tests.jobs import Placement, Trace, mentions, places, refusal
from tests.models import Stack4, TiedLM, rows
from tests.replicas import CASES, LINE, PAIR

PLAIN = CASES["plain"]


def refused(placement: Placement, *directives: Any, model: Any = None, **named: Any) -> str:
    """The message of the plan that these directives must not get."""
    batch = TiedLM.batch() if isinstance(model, TiedLM) else rows(8)

    def call() -> None:
        split = piper.Split({}, num_microbatches=2)
        strategy = piper.Strategy(split, *places(placement), *directives, **named)
        piper.plan(model or Stack4(len(placement)), strategy, batch)

    return refusal(call)


def everything(**options: Any) -> piper.Replicate:
    return piper.Replicate({"PP": "*"}, **options)


# Directives.


def test_control_what_the_refusals_start_from_is_accepted() -> None:
    split = piper.Split({}, num_microbatches=2)
    strategy = piper.Strategy(split, *places(LINE), everything(zero=3))
    piper.plan(Stack4(2), strategy, rows(8)).verify()


def test_axes_that_the_mesh_does_not_have() -> None:
    mesh = piper.Mesh((2, 2), ("pp", "dp"))
    for options in ({"axes": ("pd",)}, {"axes": ("dp", "pd"), "shard_axes": ("pd",)}):
        text = refusal(
            lambda o=options: piper.Strategy(*places(LINE), everything(**o), mesh=mesh),
            PiperStrategyError,
        )
        mentions(text, "Replicate", "pd", "pp, dp", __file__.rpartition("/")[2])


def test_axes_without_a_mesh() -> None:
    text = refused(LINE, everything(axes=("dp",)))
    mentions(text, "Replicate", "dp", "mesh")


def test_shard_axes_that_are_no_part_of_axes() -> None:
    text = refusal(lambda: everything(axes=("dp",), shard_axes=("ep",)), PiperStrategyError)
    mentions(text, "shard_axes", "ep", "dp")


def test_axes_that_do_not_number_a_regions_devices() -> None:
    """The region's devices lie along dp; the axis given leads to those of the other region."""
    mesh = piper.Mesh((2, 2), ("pp", "dp"))
    text = refused(LINE, everything(axes=("pp",)), mesh=mesh)
    mentions(text, "Replicate", "pp", "0, 1")


@pytest.mark.parametrize("directives", [(), (piper.Replicate({"PP": 0}, zero=1),)])
def test_several_devices_that_nothing_shares(directives: tuple[piper.Replicate, ...]) -> None:
    """Neither Replicate nor Shard is about stage 1."""
    text = refused(LINE, *directives)
    mentions(text, "PP1", "(2, 3)", "Replicate", "Shard")
    assert ("PP0" in text) is (not directives), text


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("placement", [{0: [0, 1], 1: [2]}, {0: [0], 1: [1, 2]}])
def test_regions_with_unlike_numbers_of_replicas(zero: int, placement: Placement) -> None:
    text = refused(placement, everything(zero=zero))
    mentions(text, "replica", *(str(tuple(ranks)) for ranks in placement.values()))


def test_a_region_under_two_replicates() -> None:
    """Both are named; their order does not matter."""
    first, second = piper.Replicate({"PP": 0}, zero=1), everything(zero=2)
    for pair in ((first, second), (second, first)):
        text = refused(LINE, *pair)
        mentions(text, "zero=1", "zero=2", "Replicate")


@pytest.mark.parametrize(
    ("placement", "levels"),
    [({0: [0, 1], 1: [0, 1]}, (1, 3)), ({0: [0, 1], 1: [0, 1]}, (0, 1)), (LINE, (0, 3))],
    ids=["reduced in two ways", "whole and sharded", "whole and sharded on other ranks"],
)
def test_a_shared_parameter_under_two_replicates(
    placement: Placement, levels: tuple[int, int]
) -> None:
    """On ranks of their own its stages may reduce it in two ways, but not hold it in two."""
    pair = [piper.Replicate({"PP": k}, zero=zero) for k, zero in enumerate(levels)]
    text = refused(placement, *pair, model=TiedLM())
    mentions(text, *map(repr, pair))
    assert re.search(r"\be\b", text), f"the parameter e is not named:\n{text}"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"PP": 7}, ("7", "0", "1")), ({"pp": "*"}, ("pp", "PP")), ({"EP": 0}, ("EP", "PP"))],
    ids=["index", "case", "name"],
)
def test_a_filter_that_matches_nothing(wrong: dict[str, Any], words: tuple[str, ...]) -> None:
    """Near misses are listed, although another Replicate covers everything."""
    text = refused(LINE, everything(), piper.Replicate(wrong))
    mentions(text, "Replicate", *words)


def test_every_fault_of_the_directives_at_once() -> None:
    text = refused(LINE, piper.Replicate({"PP": 0}, zero=1), piper.Replicate({"PP": 7}))
    mentions(text, "PP1", "7")


def test_every_fault_of_the_replicates_at_once() -> None:
    twice = (piper.Replicate({"PP": 0}, zero=1), everything(zero=2))
    text = refused(LINE, *twice, piper.Replicate({"PP": 7}))
    mentions(text, "zero=1", "zero=2", "7")


def test_refused_alike_on_every_rank() -> None:
    def job() -> str:
        wanted = piper.Strategy(piper.Split({}, num_microbatches=2), *places(LINE))
        batch = replicas.mine(PLAIN.batch(0), LINE)
        return refusal(lambda: piper.compile(Stack4(2), wanted, example_inputs=batch))

    assert len(set(jobs.run_ranks(job, 4))) == 1


# Replicas that disagree.


@pytest.mark.parametrize("placement", [PAIR, LINE], ids=["one stage", "two stages"])
@pytest.mark.parametrize("prepared", [False, True])
def test_replicas_with_batches_of_unlike_size(prepared: bool, placement: Placement) -> None:
    """Both sizes divide into microbatches; every rank raises, and none waits for another."""

    def job() -> str:
        wanted = replicas.strategy(placement, 2, zero=1)
        at = replicas.replica_of(piper.rank(), placement)

        def run() -> None:
            batch = rows(8) if prepared else rows(8 - 4 * at)
            model = Stack4(len(placement))
            step = piper.compile(model, wanted, example_inputs=batch, timeout_s=10.0)
            if prepared:
                step(*batch).backward()
            step(*rows(8 - 4 * at))

        return refusal(run, Exception)

    for text in jobs.run_ranks(job, jobs.world(placement)):
        mentions(text, "rank", "8", "4")


def tells_replicas_apart(text: str, parameter: str, rank: int, other: int) -> None:
    """The parameter, the rank that says so, and the rank that has other values."""
    mentions(text, parameter, f"{parameter} on rank {other}")
    assert re.search(rf"\brank\s+{rank}\b", text), f"rank {rank} is not named:\n{text}"


@pytest.mark.parametrize("zero", range(4))
def test_replicas_whose_parameters_differ_at_the_start(zero: int) -> None:
    """By the last bits of one element: it is named."""

    def job() -> str:
        model = Stack4(1)
        if piper.rank() == 1:
            with torch.no_grad():
                model.w[2][3, 1] += 2.0**-50
        wanted = replicas.strategy(PAIR, 2, zero=zero)

        def run() -> None:
            step = piper.compile(model, wanted, example_inputs=rows(8), timeout_s=10.0)
            step(*rows(8))

        return refusal(run, Exception)

    for rank, text in enumerate(jobs.run_ranks(job, 2)):
        tells_replicas_apart(text, "w.2", rank, 1 - rank)
        assert "w.1" not in text, f"w.1 is the same on both replicas:\n{text}"


@pytest.mark.parametrize("zero", [0, 3])
def test_replicas_take_the_first_ones_values_on_request(zero: int) -> None:
    """All parameters differ; both ranks train from the first rank's."""

    def job() -> Trace:
        model = Stack4(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(piper.rank())
        wanted = replicas.strategy(PAIR, 2, zero=zero)
        batches = [replicas.mine(PLAIN.batch(k), PAIR) for k in range(jobs.STEPS)]
        step = piper.compile(model, wanted, example_inputs=batches[0], start="broadcast")
        return replicas.train(step, batches)

    replicas.compare(jobs.run_ranks(job, 2), replicas.reference(PLAIN), PAIR, zero)


def test_replicas_that_ask_for_different_starts() -> None:
    def job() -> str:
        start = ("equal", "broadcast")[piper.rank()]

        def run() -> None:
            wanted = replicas.strategy(PAIR, 2)
            step = piper.compile(Stack4(1), wanted, example_inputs=rows(8), start=start)
            step(*rows(8))

        return refusal(run, Exception)

    for text in jobs.run_ranks(job, 2):
        assert "'broadcast'" in text
        assert "'equal'" in text


def test_replicas_of_one_stage_that_differ() -> None:
    """Every rank raises, those too that hold another stage."""

    def job() -> str:
        model = Stack4(2)
        if piper.rank() == 3:
            with torch.no_grad():
                model.w[3].add_(1.0)
        batch = replicas.mine(PLAIN.batch(0), LINE)

        def run() -> None:
            wanted = replicas.strategy(LINE, 2, zero=3)
            step = piper.compile(model, wanted, example_inputs=batch, timeout_s=10.0)
            step(*batch)

        return refusal(run, Exception)

    texts = jobs.run_ranks(job, 4)
    for rank in (2, 3):
        tells_replicas_apart(texts[rank], "w.3", rank, 5 - rank)


def test_control_stages_may_differ_where_they_are_absent() -> None:
    """What a rank does not hold is not compared."""

    def job() -> float:
        model = Stack4(2)
        other = model.w[3 if piper.rank() < 2 else 0]
        with torch.no_grad():
            other.add_(piper.rank())
        batch = replicas.mine(PLAIN.batch(0), LINE)
        wanted = replicas.strategy(LINE, 2, zero=1)
        return piper.compile(model, wanted, example_inputs=batch)(*batch).item()

    want = Stack4(1)(*PLAIN.batch(0)).item()
    for loss in jobs.run_ranks(job, 4):
        assert loss == pytest.approx(want, abs=1e-12)


def test_replicas_with_unlike_strategies() -> None:
    def job() -> str:
        wanted = replicas.strategy(PAIR, 2, zero=1 + piper.rank())

        def run() -> None:
            step = piper.compile(Stack4(1), wanted, example_inputs=rows(8), timeout_s=10.0)
            step(*rows(8))

        return refusal(run)

    for text in jobs.run_ranks(job, 2):
        mentions(text, "rank 0", "rank 1", "strateg")


# Plans that are wrong.


@cache
def plan(zero: int, model: type = Stack4, schedule: str = "one_f_one_b") -> Plan:
    batch = rows(8) if model is Stack4 else TiedLM.batch()
    options = {"keep": "chunk", "prefetch": 0} if zero == 3 else {}
    return piper.plan(model(), replicas.strategy(LINE, 2, schedule, zero=zero, **options), batch)


Change = Callable[[RankProgram], RankProgram]


def names(text: str, *parameters: str) -> None:
    """Parameters by name, or by a register made of it."""
    mentions(text.replace("_", "."), *parameters)


def told(programs: Sequence[RankProgram], change: Change, ranks: Sequence[int] = range(4)) -> str:
    """Why the changed programs are refused; not because a register or a message is missing."""
    changed = [change(p) if p.rank in ranks else p for p in programs]
    assert changed != list(programs)
    with pytest.raises(PiperPlanError) as caught:
        verify(changed)
    text = str(caught.value)
    assert "is read before it is written" not in text, f"the change itself is wrong:\n{text}"
    return text


def renamed(instr: Instr, new: Mapping[str, str]) -> Instr:
    def swap(regs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new.get(reg, reg) for reg in regs)

    return replace(instr, inputs=swap(instr.inputs), outputs=swap(instr.outputs))


def bypass(program: RankProgram, start: int) -> RankProgram:
    """Uses what the collective is given where its results should be, and frees it when they die."""
    end, given = replicas.end_of(program, start), program.instrs[start].inputs
    (handle,) = program.instrs[start].outputs
    pairs = zip(program.instrs[end].outputs, given, strict=True)
    instead = {result: value for result, value in pairs if result != "_"}
    instrs: list[Instr] = []
    for k, instr in enumerate(program.instrs):
        if k in (start, end):
            continue
        if k > start and instr.op is Op.FREE:
            late = {handle, *instead.values()}
            left = [instead.get(reg, reg) for reg in instr.inputs if reg not in late]
            left = [reg for reg in left if reg not in program.sources()]
            instrs += [replace(instr, inputs=tuple(left))] if left else []
        else:
            instrs.append(renamed(instr, instead) if k > end else instr)
    grads = tuple((at, instead.get(reg, reg)) for at, reg in program.grads)
    return replace(program, instrs=tuple(instrs), grads=grads)


def repeat(program: RankProgram, start: int) -> RankProgram:
    """Issues the collective twice and uses the sums of the results."""
    end = replicas.end_of(program, start)
    first, last = program.instrs[start], program.instrs[end]
    (handle,) = first.outputs
    results = [reg for reg in last.outputs if reg != "_"]
    again, totals = f"{handle}_again", {reg: f"{reg}_twice" for reg in results}
    extra = {reg: f"{reg}_again" for reg in results}
    instrs = [
        *program.instrs[: start + 1],
        replace(first, outputs=(again,)),
        *program.instrs[start + 1 : end + 1],
        replace(renamed(last, extra), inputs=(again,)),
        *(
            Instr(op=Op.ADD, task=first.task, inputs=(reg, extra[reg]), outputs=(totals[reg],))
            for reg in results
        ),
        Instr(op=Op.FREE, inputs=(again, *extra.values(), *results)),
        *(renamed(instr, totals) for instr in program.instrs[end + 1 :]),
    ]
    grads = tuple((at, totals.get(reg, reg)) for at, reg in program.grads)
    return replace(program, instrs=tuple(instrs), grads=grads)


def regroup(
    program: RankProgram, start: int, group: tuple[int, ...], task: str = ""
) -> RankProgram:
    instrs = list(program.instrs)
    one = instrs[start]
    instrs[start] = replace(one, group=group, task=task or one.task)
    return replace(program, instrs=tuple(instrs))


def kept(program: RankProgram) -> RankProgram:
    """Never frees what was gathered last."""
    start = replicas.gathers(program)[-1]
    full, instrs = set(program.instrs[start].outputs), list(program.instrs[:start])
    for instr in program.instrs[start:]:
        if instr.op not in (Op.RUN, Op.FREE) and full & set(instr.inputs):
            full |= set(instr.outputs)
        left = tuple(r for r in instr.inputs if r not in full or instr.op is not Op.FREE)
        if left or instr.op is not Op.FREE:
            instrs.append(replace(instr, inputs=left))
    return replace(program, instrs=tuple(instrs))


def first(program: RankProgram) -> int:
    return replicas.reductions(program)[0]


def last(program: RankProgram) -> int:
    return replicas.reductions(program)[-1]


@pytest.mark.parametrize("zero", range(4))
def test_right_plans_are_safe(zero: int) -> None:
    verify(plan(zero).programs)
    assert all(replicas.reductions(p) for p in plan(zero).programs)


@pytest.mark.parametrize("which", [first, last])
@pytest.mark.parametrize("zero", range(4))
def test_gradients_that_are_not_reduced(zero: int, which: Callable[[RankProgram], int]) -> None:
    """Each replica would keep the gradients of its own data."""
    text = told(plan(zero).programs, lambda p: bypass(p, which(p)))
    mentions(text, "reduc")
    names(text, "w.0", "w.1", "w.2", "w.3")


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_of_one_stage_that_are_not_reduced(zero: int) -> None:
    text = told(plan(zero).programs, lambda p: bypass(p, last(p)), ranks=(2, 3))
    mentions(text, "reduc")
    names(text, "w.2", "w.3")
    assert "w.0" not in text.replace("_", "."), text


@pytest.mark.parametrize("which", [first, last])
@pytest.mark.parametrize("zero", range(4))
def test_gradients_that_are_reduced_twice(zero: int, which: Callable[[RankProgram], int]) -> None:
    text = told(plan(zero).programs, lambda p: repeat(p, which(p)))
    mentions(text, "reduc")
    names(text, "w.0", "w.3")


@pytest.mark.parametrize("zero", range(4))
def test_gradients_that_are_reduced_over_this_rank_alone(zero: int) -> None:
    text = told(plan(zero).programs, lambda p: regroup(p, first(p), (p.rank,)))
    mentions(text, "reduc")


@pytest.mark.parametrize("zero", range(4))
def test_gradients_that_are_reduced_over_another_group(zero: int) -> None:
    """Over the two stages of a replica instead of the replicas of a stage."""
    text = told(
        plan(zero).programs,
        lambda p: regroup(p, first(p), (p.rank % 2, p.rank % 2 + 2), task="together"),
    )
    mentions(text, "which it is not to be reduced over")
    # From level 2 on other microbatches bring the parts that are missing.
    mentions(text, "adds what is reduced and what is not" if zero > 1 else "is not reduced over")


@pytest.mark.parametrize("zero", range(4))
def test_gradients_that_are_reduced_over_more_ranks_too(zero: int) -> None:
    """The stages of all replicas together: nobody's part is missing."""
    text = told(plan(zero).programs, lambda p: regroup(p, first(p), (0, 1, 2, 3), task="together"))
    mentions(text, "has the contributions of ranks [2, 3], which it is not to be reduced over")
    mentions(text, "has the contributions of ranks [0, 1], which it is not to be reduced over")
    assert "is not reduced over ranks" not in text


def test_a_reduction_on_some_ranks_only() -> None:
    text = told(plan(0).programs, lambda p: bypass(p, first(p)), ranks=(1,))
    mentions(text, "rank 0", "rank 1")


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_of_a_microbatch_that_are_lost(zero: int) -> None:
    """The second shard is reduced and then not added."""

    def change(program: RankProgram) -> RankProgram:
        result = program.instrs[replicas.end_of(program, last(program))].outputs[0]
        instrs = list(program.instrs)
        at = next(k for k, i in enumerate(instrs) if i.op is Op.ACCUMULATE and result in i.inputs)
        del instrs[at]
        return replace(program, instrs=tuple(instrs))

    told(plan(zero).programs, change)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parameters_that_are_not_gathered(zero: int) -> None:
    """Chunks would compute with a shard."""
    text = told(plan(zero).programs, lambda p: bypass(p, replicas.gathers(p)[0]))
    mentions(text, "gather")
    names(text, "w.0", "w.2")


def test_parameters_that_are_gathered_from_this_rank_alone() -> None:
    text = told(plan(1).programs, lambda p: regroup(p, replicas.gathers(p)[0], (p.rank,)))
    mentions(text, "gather")


def test_gathered_parameters_that_are_never_freed() -> None:
    """The last backward of the first stage reads its second weight only."""
    text = told(plan(3).programs, kept)
    mentions(text, "free")
    names(text, "w.1")


@pytest.mark.parametrize("zero", [0, 1])
def test_a_shared_gradient_that_is_not_reduced(zero: int) -> None:
    found = plan(zero, TiedLM, "gpipe").programs
    mentions(told(found, lambda p: bypass(p, last(p))), "reduc")


def test_two_reductions_swapped_on_one_rank() -> None:
    """Members of a group would meet in unlike collectives."""

    def change(program: RankProgram) -> RankProgram:
        a, b = replicas.reductions(program)[:2]
        instrs = list(program.instrs)
        one, other = instrs[a], instrs[b]
        instrs[a], instrs[b] = (
            replace(one, task=other.task, specs=other.specs),
            replace(other, task=one.task, specs=one.specs),
        )
        return replace(program, instrs=tuple(instrs))

    text = told(plan(2).programs, change, ranks=(1,))
    mentions(text, "(0, 1)", "rank 0", "rank 1")
