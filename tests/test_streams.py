"""Programs on streams: proved free of races, and the same numbers whatever the timing.

The device is made up (`runtime/fake_device.py`): streams are queues, and who goes on is drawn.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import pytest

import piper_dynamo as piper
from piper_dynamo.errors import PiperError, PiperPlanError
from piper_dynamo.ir.alike import replicas_of
from piper_dynamo.ir.program import EXCHANGES, Op
from piper_dynamo.ir.streams import COMPUTE, OWN, Step, StreamProgram
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.happens_before import check_launches, verify_streams
from piper_dynamo.lowering.launches import in_launch_order
from piper_dynamo.lowering.streams import on_streams as assigned
from piper_dynamo.lowering.touches import touches_of
from piper_dynamo.planning import Plan
from tests import experts, jobs, mutants, on_streams, replicas
from tests.models import Dropped, Stack4, rows
from tests.replicas import CASES, SCHEDULES

PAIRS = {0: [0, 1], 1: [2, 3]}


@cache
def plan_of(kind: str) -> Plan:
    """A small plan of each kind of thing that is done between ranks."""
    zeros = {f"zero {zero}": zero for zero in range(4)}
    if kind == "pipeline":
        return piper.plan(Stack4(), jobs.strategy(jobs.LINE2, 4, "one_f_one_b"), rows(8))
    if kind == "skips":
        wanted = jobs.strategy(jobs.LINE4, 4, "one_f_one_b")
        return piper.plan(Stack4(4, "all"), wanted, rows(8))
    if kind in zeros:
        options = {"bucket_mb": 0.00005, "zero": zeros[kind]}
        wanted = replicas.strategy(PAIRS, 4, "one_f_one_b", **options)
        return piper.plan(Stack4(), wanted, rows(8))
    if kind == "experts":
        wanted = experts.strategy(PAIRS, 2, "one_f_one_b", zero=3)
        return piper.plan(experts.Mixture(2), wanted, rows(8))
    assert kind == "capacity"
    wanted = experts.copies(2, {0: [0, 1, 2, 3]}, "gpipe", zero=1, capacity=1.5)
    return piper.plan(experts.Mixture(1), wanted, rows(8))


OTHERS = ("skips", "zero 0", "zero 1", "zero 2")
KINDS = [
    *("pipeline", "zero 3", "experts", "capacity"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS),
]


def refused(programs: tuple[StreamProgram, ...], plan: Plan) -> str:
    """What the proof says of programs that are wrong; nothing where it finds nothing."""
    try:
        verify_streams(programs, plan.chunks)
    except PiperPlanError as error:
        return str(error)
    return ""


def changed(
    programs: tuple[StreamProgram, ...], rank: int, at: int, **fields: object
) -> tuple[StreamProgram, ...]:
    """The programs with other fields of one step."""
    one = programs[rank]
    steps = list(one.steps)
    steps[at] = replace(steps[at], **fields)
    return (*programs[:rank], replace(one, steps=tuple(steps)), *programs[rank + 1 :])


# Numbers


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_whatever_the_timing(kind: str):
    plan = plan_of(kind)
    programs = on_streams.proved(plan)
    want = mutants.run(plan, plan.programs)
    for seed in (None, *range(3)):
        assert on_streams.are_equal(on_streams.run(plan, programs, seed), want), f"seed {seed}"


def check_schedule(case: str, schedule: str, zero: int, seeds: int) -> None:
    """A model under a schedule and a ZeRO level, on two replicas."""
    placement, microbatches = SCHEDULES[schedule]
    wanted = replicas.strategy(placement, microbatches, schedule, zero=zero, bucket_mb=0.00005)
    batch = tuple(value.chunk(2)[0] for value in CASES[case].batch(0))
    plan = piper.plan(CASES[case].build(len(placement)), wanted, batch)
    programs = on_streams.proved(plan)
    want = mutants.run(plan, plan.programs)
    for seed in range(seeds):
        assert on_streams.are_equal(on_streams.run(plan, programs, seed), want)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_on_streams(schedule: str):
    check_schedule("plain", schedule, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_and_level_on_streams(schedule: str, case: str, zero: int):
    check_schedule(case, schedule, zero, 12)


def test_draws_are_the_same_on_streams():
    plan = piper.plan(Dropped(), jobs.strategy(jobs.LINE2, 2, "gpipe"), rows(8))
    programs = on_streams.proved(plan)
    want = mutants.run(plan, plan.programs)
    for seed in range(4):
        assert on_streams.are_equal(on_streams.run(plan, programs, seed), want)


# The order of launches


@pytest.mark.parametrize("kind", KINDS)
def test_programs_in_launch_order_are_the_same_job(kind: str):
    plan = plan_of(kind)
    ordered = in_launch_order(tuple(plan.programs))
    verify(ordered, plan.meaning, replicas_of(plan.groups))
    assert not check_launches(ordered)
    for mine, theirs in zip(ordered, plan.programs, strict=True):
        kept = [str(i) for i in theirs.instrs if i.op is not Op.FREE]
        assert sorted(kept) == sorted(str(i) for i in mine.instrs if i.op is not Op.FREE)
        assert [i.task for i in mine.instrs if i.op is Op.RUN] == [
            i.task for i in theirs.instrs if i.op is Op.RUN
        ]


def test_programs_of_the_host_start_messages_in_unlike_orders():
    """Control: each rank of a pipeline posts what comes back before it sends."""
    (fault,) = check_launches(plan_of("pipeline").programs)
    assert "in different orders" in fault
    assert "rank 0" in fault
    assert "rank 1" in fault


def test_control_two_launches_exchanged():
    ordered = list(in_launch_order(tuple(plan_of("pipeline").programs)))
    instrs = list(ordered[0].instrs)
    starts = [k for k, i in enumerate(instrs) if i.op in (Op.SEND, Op.POST)]
    at = next(
        (a, b) for a, b in pairwise(starts) if instrs[a].op is Op.SEND and instrs[b].op is Op.POST
    )
    instrs[at[0]], instrs[at[1]] = instrs[at[1]], instrs[at[0]]
    ordered[0] = replace(ordered[0], instrs=tuple(instrs))
    assert check_launches(ordered)


def test_ranks_that_wait_for_one_another_have_no_order():
    plan = plan_of("pipeline")
    programs = list(plan.programs)
    instrs = list(programs[0].instrs)
    back = next(k for k, i in enumerate(instrs) if i.op is Op.WAIT)
    there = next(k for k, i in enumerate(instrs) if i.op is Op.SEND)
    instrs.insert(there, instrs.pop(back))
    programs[0] = replace(programs[0], instrs=tuple(instrs))
    assert "proved free of deadlocks" in jobs.refusal(
        lambda: in_launch_order(programs), AssertionError
    )


# The proof refuses


@pytest.mark.parametrize("kind", KINDS)
def test_every_wait_is_needed(kind: str):
    """Each event that is not waited for is refused: so none is waited for in vain, too."""
    plan = plan_of(kind)
    programs = on_streams.proved(plan)
    count = 0
    for rank in range(0, len(programs), 3 if kind != "capacity" else 4):
        for at, step in enumerate(programs[rank].steps):
            for event in step.waits:
                rest = tuple(e for e in step.waits if e != event)
                wrong = changed(programs, rank, at, waits=rest)
                assert refused(wrong[rank : rank + 1], plan), (rank, at, event)
                count += 1
    assert count > 10


def mutated(
    kind: str, change: Callable[[StreamProgram, int, Step], dict[str, object] | None]
) -> list[str]:
    """What the proof says of each step that can be changed so."""
    plan = plan_of(kind)
    programs = on_streams.lowered(plan)
    found = []
    for rank, program in enumerate(programs):
        for at, step in enumerate(program.steps):
            fields = change(program, at, step)
            if fields is not None:
                wrong = changed(programs, rank, at, **fields)
                found.append(refused(wrong[rank : rank + 1], plan))
    assert found, "there is no such step"
    return found


def test_an_event_that_is_not_recorded_is_refused():
    said = mutated("zero 3", lambda p, at, step: {"record": -1} if step.record >= 0 else None)
    assert all(said)


def test_an_event_that_does_not_exist_is_refused():
    said = mutated(
        "pipeline", lambda p, at, step: {"waits": (p.num_events,)} if step.waits else None
    )
    assert all("before it is recorded" in text for text in said)


def test_a_wait_that_comes_late_is_refused():
    plan = plan_of("zero 3")
    programs = on_streams.lowered(plan)
    for at, step in enumerate(programs[0].steps):
        later = [k for k, s in enumerate(programs[0].steps) if k > at and s.stream == step.stream]
        if step.waits and later:
            moved = changed(programs, 0, at, waits=())
            next_waits = (*step.waits, *programs[0].steps[later[0]].waits)
            assert refused(changed(moved, 0, later[0], waits=next_waits)[:1], plan)


def test_a_buffer_that_is_used_again_early_is_refused():
    def first_of_its_size(program: StreamProgram, at: int, step: Step) -> dict[str, object] | None:
        if not step.room or step.room[0] == OWN:
            return None
        size = program.buffers[step.room[0]]
        first = program.buffers.index(size)
        return {"room": (first, *step.room[1:])} if step.room[0] != first else None

    said = mutated("zero 3", first_of_its_size)
    assert any("still holds another value" in text for text in said)
    assert any("may still be at work" in text for text in said)
    assert all(said)


def test_a_buffer_that_does_not_fit_is_refused():
    def unlike(program: StreamProgram, at: int, step: Step) -> dict[str, object] | None:
        if not step.room or step.room[0] == OWN:
            return None
        size = program.buffers[step.room[0]]
        other = [k for k, n in enumerate(program.buffers) if n != size]
        return {"room": (other[0], *step.room[1:])} if other else None

    assert all("size" in text for text in mutated("experts", unlike))


def test_results_and_rows_of_unknown_number_lie_in_no_buffer():
    def planned(program: StreamProgram, at: int, step: Step) -> dict[str, object] | None:
        instr = program.instr(step)
        if instr is None or instr.op not in EXCHANGES or step.room != (OWN,):
            return None
        return {"room": (0,)}

    assert all("cannot lie there" in text for text in mutated("experts", planned))


def test_the_host_does_not_read_counts_early():
    def at_once(program: StreamProgram, at: int, step: Step) -> dict[str, object] | None:
        return {"synchronizes": -1} if step.synchronizes >= 0 else None

    said = mutated("experts", at_once)
    assert all("the host reads counts that may not have come" in text for text in said)


def test_a_step_on_another_stream_is_refused():
    def elsewhere(program: StreamProgram, at: int, step: Step) -> dict[str, object] | None:
        return {"stream": COMPUTE} if step.stream != COMPUTE else None

    assert all("runs on stream 'compute'" in text for text in mutated("pipeline", elsewhere))


def test_steps_that_are_left_out_are_refused():
    plan = plan_of("pipeline")
    one, *rest = on_streams.lowered(plan)
    short = replace(one, steps=one.steps[:3] + one.steps[4:])
    assert "not one step per instruction" in refused((short, *rest), plan)


def test_events_and_buffers_serve_again():
    """As many as are needed at once, however many microbatches there are."""
    needed = {}
    for microbatches in (8, 12):
        wanted = replicas.strategy(PAIRS, microbatches, "one_f_one_b", zero=3)
        programs = on_streams.proved(piper.plan(Stack4(), wanted, rows(microbatches)))
        needed[microbatches] = [(p.num_events, p.buffers) for p in programs]
    assert needed[8] == needed[12]


# The made-up device


@pytest.mark.parametrize("kind", ["pipeline", "zero 3", "experts"])
def test_control_the_device_shows_what_the_proof_refuses(kind: str):
    """Most programs that do not wait for an event end with wrong numbers, or fail, some times."""
    plan = plan_of(kind)
    programs = on_streams.proved(plan)
    want = mutants.run(plan, plan.programs)
    drawn = Random(0)
    places = [
        (rank, at)
        for rank, program in enumerate(programs)
        for at, step in enumerate(program.steps[:-1])
        if len(step.waits) == 1 and program.instr(step) is not None
    ]
    shown = tried = 0
    for rank, at in drawn.sample(places, 8):
        wrong = changed(programs, rank, at, waits=())
        tried += 1
        shown += any(not is_right(plan, wrong, seed, want) for seed in range(10))
    assert shown >= tried // 2, f"{shown} of {tried}"


def is_right(plan: Plan, programs: tuple[StreamProgram, ...], seed: int, want: object) -> bool:
    try:
        return on_streams.are_equal(on_streams.run(plan, programs, seed), want)
    except PiperError:
        return False


def test_times_are_those_of_the_device():
    """A task ends after what it waits for, and the host's order says nothing of other streams."""
    plan = plan_of("pipeline")
    programs = on_streams.proved(plan)
    for seed in range(3):
        for program, marks in zip(programs, on_streams.times(plan, programs, seed), strict=True):
            at = dict(marks)
            runs = [at[k] for k, i in enumerate(program.program.instrs) if i.op is Op.RUN]
            assert runs == sorted(runs)
            assert at[-1] <= min(at.values())
            comes = {
                i.outputs[0]: at[k] for k, i in enumerate(program.program.instrs) if i.op is Op.POST
            }
            for instr in program.program.instrs:
                if instr.op is Op.WAIT:
                    users = [
                        at[n]
                        for n, i in enumerate(program.program.instrs)
                        if i.op is Op.RUN and instr.outputs[0] in i.inputs
                    ]
                    assert all(comes[instr.inputs[0]] <= one for one in users)


def test_what_waits_for_itself_is_told():
    """Control: a receive put before the send that it waits for, on both ranks, ends at once."""
    plan = plan_of("pipeline")
    programs = [assigned(p, plan.chunks) for p in plan.programs]  # in the host's order
    with pytest.raises(PiperError, match="deadlock"):
        on_streams.run(plan, programs, None)


def test_blocks_are_followed_through_views_and_bundles():
    plan = plan_of("pipeline")
    program = plan.programs[1]
    found = touches_of(program, plan.chunks)
    dead = [block for touch in found.of for block in touch.dead]
    born = [block for touch in found.of for block in touch.born]
    assert len(dead) == len(set(dead))
    assert sorted({*dead, *found.kept} - found.given) == sorted(born)
