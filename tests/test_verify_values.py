"""The proof of what is computed: well-formed programs that compute something else are refused."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import piper_dynamo as piper
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.ir.alike import replicas_of
from piper_dynamo.ir.program import Instr, Op, RankProgram
from piper_dynamo.ir.verify import verify
from piper_dynamo.planning import Plan
from tests import experts, jobs, replicas
from tests.experts import Mixture
from tests.jobs import LINE2
from tests.models import Dropped, NormNet, Stack4, rows

Change = Callable[[list[Instr]], None]


@pytest.fixture(scope="module")
def line() -> Plan:
    return piper.plan(Stack4(2, skip="all"), jobs.strategy(LINE2, 4, "one_f_one_b"), rows(8))


@pytest.fixture(scope="module")
def sharded() -> Plan:
    return piper.plan(Stack4(2), replicas.strategy(replicas.LINE, 2, "gpipe", zero=3), rows(8))


@pytest.fixture(scope="module")
def mixture() -> Plan:
    return piper.plan(Mixture(1), experts.strategy(replicas.PAIR, 2, ""), rows(12), 2)


def told(plan: Plan, change: Change, *ranks: int) -> str:
    """Why the plan with these ranks' instructions changed is refused."""
    programs = list(plan.programs)
    for rank in ranks or (0,):
        instrs = list(programs[rank].instrs)
        change(instrs)
        programs[rank] = replace(programs[rank], instrs=tuple(instrs))
    return refused(plan, programs)


def refused(plan: Plan, programs: list[RankProgram]) -> str:
    with pytest.raises(PiperPlanError) as caught:
        verify(programs, plan.meaning, replicas_of(plan.groups))
    return re.sub(r"\[[^ ]*(models|experts)\.py:\d+\]", "[line]", str(caught.value))


def nth(instrs: list[Instr], op: Op, count: int = 0) -> int:
    return [k for k, instr in enumerate(instrs) if instr.op is op][count]


def test_what_the_two_sends_of_a_channel_carry(line: Plan):
    """Shapes, tasks and order are right: only the values are not."""

    def change(instrs: list[Instr]) -> None:
        a, b = (k for k, i in enumerate(instrs) if i.op is Op.SEND and i.message in (0, 1))
        one, other = instrs[a], instrs[b]
        # Both values are there by then.
        instrs[b : b + 1] = [replace(one, inputs=other.inputs), replace(other, inputs=one.inputs)]
        del instrs[a]

    text = told(line, change)
    assert (
        "run F.PP1.MB0 [line]: its input 0 is result 0 of F.PP0.MB0, "
        "expected result 1 of F.PP0.MB0" in text
    ), text


def test_a_slice_of_another_microbatch(line: Plan):
    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.SLICE, 1)
        instrs[at] = replace(instrs[at], part=3)

    text = told(line, change)
    assert "is microbatch 3 of 4 of 'x', expected microbatch 1 of 4 of 'x'" in text
    assert "run F.PP0.MB1 [line]" in text
    assert "run B.PP0.MB1 [line]" in text


def test_another_register_of_the_same_shape(line: Plan):
    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.RUN)
        first, second, *rest = instrs[at].inputs
        assert {first, second} == {"x_MB0", "w_0"} or len(rest) > 0
        weights = [k for k, reg in enumerate(instrs[at].inputs) if reg.startswith("w_")]
        inputs = list(instrs[at].inputs)
        a, b = weights[:2]
        inputs[a], inputs[b] = inputs[b], inputs[a]
        instrs[at] = replace(instrs[at], inputs=tuple(inputs))

    assert "is 'w.1', expected 'w.0'" in told(line, change)


def test_a_chunk_a_name_and_primals_of_another_task(line: Plan):
    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.RUN)
        instrs[at] = replace(instrs[at], target="F_PP1", num_primals=1)
        last = nth(instrs, Op.RUN, -1)
        instrs[last] = replace(instrs[last], task="B.PP0.MB9")

    text = told(line, change)
    assert "it runs F_PP1 with seed None, expected F_PP0 with seed None" in text
    assert "1 inputs are primals, not" in text
    assert "B.PP0.MB9 [line]: the step has no such task" in text


def test_a_name_that_is_none_beside_experts(mixture: Plan):
    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.RUN)
        instrs[at] = replace(instrs[at], task="F.PP0.MB0.v1x")

    assert "F.PP0.MB0.v1x [line]: the step has no such task" in told(mixture, change)


def test_random_numbers_of_another_microbatch():
    plan = piper.plan(Dropped(), jobs.strategy(LINE2, 2, "gpipe"), rows(8))
    rank = next(p.rank for p in plan.programs if any(i.seed for i in p.instrs))

    def change(instrs: list[Instr]) -> None:
        at = next(k for k, i in enumerate(instrs) if i.seed is not None)
        instrs[at] = replace(instrs[at], seed=(1, *instrs[at].seed[1:]))

    assert re.search(
        r"with seed \(1, \d\), expected F_PP\d with seed \(0, ", told(plan, change, rank)
    )


def test_a_buffer_of_another_microbatch():
    """The running mean that the step leaves is the one after the first microbatch."""
    plan = piper.plan(NormNet(), jobs.strategy(LINE2, 2, "gpipe"), rows(8))
    program = plan.programs[0]
    earlier = {reg: reg.replace("MB1", "MB0") for _, reg in program.buffers}
    instrs = []
    for instr in program.instrs:  # kept to the end instead of freed
        left = tuple(r for r in instr.inputs if r not in earlier.values())
        if instr.op is not Op.FREE or left:
            instrs.append(replace(instr, inputs=left) if instr.op is Op.FREE else instr)
    instrs.append(Instr(op=Op.FREE, inputs=tuple(earlier)))
    buffers = tuple((p, earlier[reg]) for p, reg in program.buffers)
    changed = replace(program, buffers=buffers, instrs=tuple(instrs))
    text = refused(plan, [changed, *plan.programs[1:]])
    assert "'add_MB1' is made and never used" in text
    quiet = replace(changed, instrs=tuple(_unnamed(i, program) for i in changed.instrs[:-1]))
    text = refused(plan, [quiet, *plan.programs[1:]])
    assert re.search(r"the buffer '\w+_MB0' is result \d of F\.PP0\.MB0, expected result", text)


def _unnamed(instr: Instr, program: RankProgram) -> Instr:
    """The last microbatch's buffers are thrown away."""
    last = {reg for _, reg in program.buffers}
    return replace(instr, outputs=tuple("_" if r in last else r for r in instr.outputs))


def test_gradients_given_for_one_another(line: Plan):
    first, second = line.programs
    (p, a), (q, b), *rest = first.grads
    text = refused(line, [replace(first, grads=((p, b), (q, a), *rest)), second])
    assert f"the gradient {b!r} lacks result" in text
    assert "; has too much result" in text


def test_gradients_given_twice_and_not_at_all(line: Plan):
    first, second = line.programs
    one, _, *rest = first.grads
    programs = [replace(first, grads=(one, one, *rest)), second]
    with pytest.raises(PiperPlanError) as caught:
        verify(programs, line.meaning, replicas_of(line.groups))
    text = str(caught.value)
    assert "is given 2 times" in text or "made and never used" in text


def test_a_microbatch_that_two_sums_exchange(sharded: Plan):
    """Each gradient has two parts of equal shape, of all replicas; one is the other's."""

    def change(instrs: list[Instr]) -> None:
        frees = [i for i in instrs if i.op is Op.FREE]
        instrs[:] = [*(i for i in instrs if i.op is not Op.FREE), *frees]
        a, b = [k for k, i in enumerate(instrs) if i.op is Op.ACCUMULATE and len(i.inputs) == 2][:2]
        instrs.insert(b - 1, instrs.pop(a))  # where both parts are there
        a = b - 1
        (s, x), (t, y) = instrs[a].inputs, instrs[b].inputs
        instrs[a], instrs[b] = replace(instrs[a], inputs=(s, y)), replace(instrs[b], inputs=(t, x))

    text = told(sharded, change)
    assert re.search(r"the gradient '\w+' lacks result \d of B\.PP0\.MB1 of replica 0, ", text), (
        text
    )
    assert "; has too much result" in text


def test_blocks_gathered_for_one_another(sharded: Plan):
    """Every member gathers the blocks of two parameters into each other's places."""

    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.ALL_GATHER)
        first, second, *rest = instrs[at].inputs
        instrs[at] = replace(instrs[at], inputs=(second, first, *rest))

    assert "is 'w.1' of replica 0, expected 'w.0' of replica 0" in told(sharded, change, 0, 1)
    text = told(sharded, change, 1)
    assert "rank 1 gives block 1 of 2 of 'w.1'" in text
    assert "expected block 1 of 2 of 'w.0'" in text


def test_rows_that_travel_by_the_counts_of_another_microbatch(mixture: Plan):
    """Microbatches have as many rows, but other experts get them."""

    def change(instrs: list[Instr]) -> None:
        exchanges = [k for k, i in enumerate(instrs) if i.op is Op.EXCHANGE]
        splits = {instrs[k].inputs[1]: k for k in exchanges}
        (_, first), (_, second) = list(splits.items())[:2]
        early, late = sorted((first, second))
        by = instrs[early].inputs[1]  # which is still there for the later exchange
        instrs[late] = replace(instrs[late], inputs=(instrs[late].inputs[0], by))
        frees = [i for i in instrs if i.op is Op.FREE]
        instrs[:] = [*(i for i in instrs if i.op is not Op.FREE), *frees]

    text = told(mixture, change, 0, 1)
    assert re.search(r"rows travel by the counts '\w+' of microbatch \d at part 0", text), text


def test_a_wait_by_another_handle(line: Plan):
    def change(instrs: list[Instr]) -> None:
        a, b = nth(instrs, Op.WAIT), nth(instrs, Op.WAIT, 1)
        one, other = instrs[a].inputs, instrs[b].inputs
        instrs[a] = replace(instrs[a], inputs=other)
        instrs[b] = replace(instrs[b], inputs=one)

    text = told(line, change)
    assert "which is not the handle of message 0 from rank 1" in text


def test_a_collective_waited_for_twice(sharded: Plan):
    def change(instrs: list[Instr]) -> None:
        at = next(k for k, i in enumerate(instrs) if i.op is Op.WAIT and i.peer < 0)
        instrs.insert(at + 1, replace(instrs[at], outputs=("_",) * len(instrs[at].outputs)))

    assert ", again" in told(sharded, change)


def test_a_sum_that_changes_while_it_is_on_its_way():
    """Replicas reduce a sum to which they still add."""
    plan = piper.plan(
        Stack4(1),
        replicas.strategy(replicas.PAIR, 2, "", zero=0),
        rows(8),
        compile="inductor",
    )

    def change(instrs: list[Instr]) -> None:
        start = next(k for k, i in enumerate(instrs) if i.op is Op.ALL_REDUCE and "grads" in i.task)
        last = max(k for k, i in enumerate(instrs[:start]) if i.op is Op.ACCUMULATE)
        one = instrs.pop(start)
        instrs.insert(last, one)

    text = told(plan, change, 0, 1)
    assert "while it is on its way" in text
    assert re.search(r"adds to '\w+' while it is on its way\n +since rank 0 #\d+ all_reduce", text)


def test_a_sum_read_while_it_is_reduced_in_place():
    plan = piper.plan(Stack4(1), replicas.strategy(replicas.PAIR, 1, "", zero=0), rows(8))

    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.ALL_REDUCE)
        reg = instrs[at].inputs[0]
        instrs.insert(at + 1, Instr(op=Op.ADD, task="x", inputs=(reg,), outputs=("x",)))

    assert "while it is summed in place" in told(plan, change, 0, 1)


def test_what_is_never_freed_and_never_used(line: Plan):
    def change(instrs: list[Instr]) -> None:
        del instrs[nth(instrs, Op.FREE)]

    assert "is never freed" in told(line, change)
    first, second = line.programs
    more = replace(first, data=(*first.data, ("spare", 99)))
    assert "'spare' is given to the step, which never uses it" in refused(line, [more, second])


def test_a_deadlock_is_listed_beside_other_faults(line: Plan):
    def change(instrs: list[Instr]) -> None:
        wait = nth(instrs, Op.WAIT)
        sends = [i for i in instrs[:wait] if i.op is Op.SEND]
        rest = [i for i in instrs[:wait] if i.op is not Op.SEND]
        instrs[: wait + 1] = [*rest, instrs[wait], *sends]
        instrs.append(Instr(op=Op.FREE, inputs=("nothing",)))

    text = told(line, change)
    assert text.startswith("the plan is unsafe")
    assert "'nothing' is read before it is written" in text
    assert "the plan deadlocks: rank 0, rank 1 wait for one another" in text
