"""Replicas that are alike: one lowered, two proved, one simulated, as if it were all of them."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import piper_dynamo as piper
from piper_dynamo import captured
from piper_dynamo.debug.dump import read_dump
from piper_dynamo.debug.find import wanted
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.ir.alike import are_alike, replicas_of
from piper_dynamo.ir.program import Op, RankProgram
from piper_dynamo.ir.verify import verify
from piper_dynamo.look.explain import explain
from piper_dynamo.planning import Plan, make_plan
from piper_dynamo.programs import AlikePrograms
from tests import experts, jobs
from tests.models import Stack4, TiedLM, rows

Mutation = Callable[[RankProgram], RankProgram]
COSTS = piper.Costs(F=1.0, BI=1.3, BW=0.6, comm=0.2, bandwidth=1e4)


@contextmanager
def told(alike: bool, sync: bool = True) -> Iterator[None]:
    def make(*args, **options) -> Plan:
        return make_plan(*args, **{**options, "alike": alike, "sync": sync})

    torch._dynamo.reset()
    with mock.patch.object(captured, "make_plan", make):
        yield


def both(model, strategy, batch, world: int, *, sync: bool = True) -> tuple[Plan, Plan]:
    """The plan with all programs, and the one that lowers a replica at a time."""
    plans = []
    for alike in (False, True):
        with told(alike, sync):
            plans.append(piper.plan(model, strategy, batch, world))
    return plans[0], plans[1]


CASES = {
    "zero 0": ("one_f_one_b", 2, {"zero": 0}),
    "zero 1": ("zb_h1", 2, {"zero": 1}),
    "zero 2": ("interleaved_1f1b", 2, {"zero": 2}),
    "zero 3": ("one_f_one_b", 4, {"zero": 3, "bucket_mb": 1e-4}),
    "kept": ("dualpipev", 2, {"zero": 3, "keep": "step"}),
    "two-way": ("dualpipe", 4, {"zero": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_one_replica_is_like_all(case: str) -> None:
    schedule, ranks, options = CASES[case]
    stages = len(piper.strategies.placement(schedule, ranks))
    strategy = piper.strategies.pipeline(
        schedule, ranks=ranks, num_microbatches=8, replicas=3, **options
    )
    same_job(*both(Stack4(stages), strategy, rows(8), ranks * 3))


@pytest.mark.parametrize(("zero", "sync"), [(0, True), (2, True), (0, False)])
def test_tied_parameters_are_like_all(zero: int, sync: bool) -> None:
    strategy = piper.strategies.pipeline(
        "one_f_one_b", ranks=2, num_microbatches=2, replicas=4, zero=zero
    )
    same_job(*both(TiedLM(), strategy, TiedLM.batch(), 8, sync=sync))


def same_job(full: Plan, alike: Plan) -> None:
    assert isinstance(full.programs, tuple)
    assert isinstance(alike.programs, AlikePrograms)
    assert len(alike.distinct) * len(full.groups[0]) == len(alike.programs) == full.world_size
    assert list(alike.programs) == list(full.programs)
    assert alike.programs[1:3] == full.programs[1:3]
    assert alike.holders() == full.holders()
    assert alike.communicators() == full.communicators()
    alike.verify()
    one, other = full.simulate(COSTS), alike.simulate(COSTS)
    assert one.makespan == other.makespan
    for rank in range(full.world_size):
        assert one.starts_of(rank) == other.starts_of(rank)
        assert one.busy(rank) == other.busy(rank)
        assert one.peak_bytes(rank) == other.peak_bytes(rank)
        assert one.communication(rank) == other.communication(rank)
    shown = {program.rank for program in alike.distinct}
    events = [e for e in one.timeline.events if e.rank in shown]
    assert sorted(map(repr, other.timeline.events)) == sorted(map(repr, events))
    assert f"one of {len(full.groups[0])} replicas is shown" in alike.summary()


# Faults


def without(op: Op, task: str = "") -> Mutation:
    """The first instruction of a kind is dropped on every rank that has one."""

    def mutation(program: RankProgram) -> RankProgram:
        found = [i for i in program.instrs if i.op is op and task in i.task]
        return replace(program, instrs=tuple(i for i in program.instrs if i not in found[:1]))

    return mutation


def swapped(program: RankProgram) -> RankProgram:
    """The last rank of the pipeline sends only once it has had the next microbatch."""
    instrs = list(program.instrs)
    sends = [k for k, i in enumerate(instrs) if i.op is Op.SEND]
    if not program.loss or program.rank < 3 or len(sends) < 2:
        return program
    instrs.insert(sends[1], instrs.pop(sends[0]))
    return replace(program, instrs=tuple(instrs))


MUTATIONS = {
    "a reduction": without(Op.REDUCE_SCATTER),
    "a gather": without(Op.ALL_GATHER),
    "a sum": without(Op.ACCUMULATE),
    "a message": without(Op.SEND),
    "a wait": without(Op.WAIT),
    "a drain": without(Op.DRAIN),
    "a free": without(Op.FREE),
    "the loss's sum": without(Op.ALL_REDUCE, "loss"),
    "order": swapped,
}


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    strategy = piper.strategies.pipeline(
        "one_f_one_b", ranks=2, num_microbatches=4, replicas=3, zero=2
    )
    return both(Stack4(2), strategy, rows(8), 6)


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_wrong_everywhere_is_refused_by_both(name: str, plans: tuple[Plan, Plan]) -> None:
    full, alike = plans
    change = MUTATIONS[name]
    changed = [change(program) for program in full.programs]
    assert changed != list(full.programs)
    with pytest.raises(PiperPlanError) as refused:
        verify(changed, full.meaning, replicas_of(full.groups))
    assert isinstance(alike.programs, AlikePrograms)
    lowered = alike.programs
    wrong = AlikePrograms(full.groups, lambda place: tuple(map(change, lowered.replica(place))))
    with pytest.raises(PiperPlanError) as found:
        wrong.verify(alike.meaning)
    assert str(found.value).splitlines()[0] == str(refused.value).splitlines()[0]


def changed_at(place: int, change: Mutation, plan: Plan) -> AlikePrograms:
    assert isinstance(plan.programs, AlikePrograms)
    lowered = plan.programs
    return AlikePrograms(
        plan.groups,
        lambda at: tuple(change(p) if at == place else p for p in lowered.replica(at)),
    )


def test_replicas_that_differ_are_no_replicas(plans: tuple[Plan, Plan]) -> None:
    with pytest.raises(PiperPlanError, match="rank 1 does not do what rank 0 does") as refused:
        changed_at(1, without(Op.ACCUMULATE), plans[1]).verify(plans[1].meaning)
    one, two, differ = str(refused.value).splitlines()[2:5]
    assert re.fullmatch(r" +rank 0 #\d+ accumulate \S+.* \[\S*models\.py:\d+\]", one)
    assert re.fullmatch(r" +rank 1 #\d+ \w+ .* \[\S*models\.py:\d+\]", two)
    assert "they differ in " in differ


def shorter(program: RankProgram) -> RankProgram:
    return replace(program, instrs=program.instrs[:-1])


def of_another_loss(program: RankProgram) -> RankProgram:
    return replace(program, loss=program.loss and "other")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shorter, r"rank 0 #\d+ \w+ .*\n +rank 1 has no instruction #\d+"),
        (of_another_loss, "all instructions are alike, but not loss"),
    ],
)
def test_what_differs_between_replicas_is_told(
    change: Mutation, text: str, plans: tuple[Plan, Plan]
) -> None:
    with pytest.raises(PiperPlanError, match=text):
        changed_at(1, change, plans[1]).verify(plans[1].meaning)


def narrower(program: RankProgram) -> RankProgram:
    instrs = (replace(i, group=i.group[:2]) if i.group else i for i in program.instrs)
    return replace(program, instrs=tuple(instrs))


def crossing(program: RankProgram) -> RankProgram:
    instrs = (replace(i, peer=i.peer + 2) if i.peer >= 0 else i for i in program.instrs)
    return replace(program, instrs=tuple(instrs))


def partly(program: RankProgram) -> RankProgram:
    return replace(program, shards=tuple((p, ranks[:2]) for p, ranks in program.shards))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (narrower, "its ranks are not a device group"),
        (crossing, "is of another replica"),
        (partly, "are on a part of a device group"),
    ],
)
def test_what_tells_replicas_apart_is_refused(
    change: Mutation, text: str, plans: tuple[Plan, Plan]
) -> None:
    with pytest.raises(PiperPlanError, match=text):
        changed_at(0, change, plans[1]).verify(plans[1].meaning)


def test_experts_are_not_alike() -> None:
    strategy = experts.strategy({0: [0, 1, 2, 3]}, 2, "gpipe")
    with told(alike=True):
        plan = piper.plan(experts.Mixture(1), strategy, rows(12), 4)
    assert not are_alike(plan.dag, plan.groups)
    assert isinstance(plan.programs, tuple)


def test_copies_of_shards_are_not_alike() -> None:
    strategy = piper.Strategy(
        piper.Place({"PP": 0}, devices=[0, 1, 2, 3]),
        piper.Replicate({"PP": 0}, axes=("copy", "shard"), shard_axes=("shard",), zero=3),
        mesh=piper.Mesh((2, 2), ("copy", "shard")),
    )
    with told(alike=True):
        plan = piper.plan(Stack4(1), strategy, rows(4), 4)
    assert isinstance(plan.programs, tuple)


def test_many_ranks_are_lowered_by_the_replica() -> None:
    strategy = piper.strategies.pipeline(
        "one_f_one_b", ranks=2, num_microbatches=2, replicas=32, zero=3
    )
    plan = piper.plan(Stack4(2), strategy, rows(4), 64)
    assert isinstance(plan.programs, AlikePrograms)
    assert "one replica is shown" in explain(plan, "w.1")
    with pytest.raises(piper.PiperError, match="no task matches"):
        wanted(plan, {"PP": 7})
    assert set(plan.programs._replicas) == {0, 1}  # no look lowered another
    assert explain(plan, "62").startswith("rank 62 of 64")
    assert plan.program(63).rank_program == plan.programs[-1]
    assert "# rank 63 of 64" in str(plan.program(63))


def test_steps_of_every_replica_are_looked_into(tmp_path: Path) -> None:
    """One is simulated: the times of all others are its own."""
    strategy = piper.strategies.pipeline(
        "one_f_one_b", ranks=2, num_microbatches=2, replicas=3, zero=0
    )

    def job() -> str:
        step = piper.compile(Stack4(2), strategy, example_inputs=rows(4), nan_check="raise")
        assert isinstance(piper.explain(step).programs, AlikePrograms)
        piper.debug.dump(step, {}, tmp_path)
        x, y = rows(4, piper.data_rank(step))
        step(x, y)
        return jobs.refusal(lambda: step(x * torch.nan, y), piper.PiperRuntimeError)

    with told(alike=True):
        texts = jobs.run_ranks(job, 6)
    for text in texts:
        jobs.mentions(text, "F.PP0.MB0 (stage PP=0, microbatch 0) on rank 0")
    starts: dict[str, set[float]] = {}
    dumped = read_dump(tmp_path)
    for one in dumped:
        starts.setdefault(one.task, set()).add(one.start)
    assert {one.rank for one in dumped} == set(range(6))
    assert all(len(times) == 1 for times in starts.values())
