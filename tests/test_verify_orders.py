"""Random task orders: the order pass, the verifier and the simulator decide alike.

Terms: a *base* is a plan that is made once, of a model whose first stage's output every later stage
reads; an *order* is another order of the tasks on each of its ranks, in which every task comes
after the tasks of its own rank that it needs. What it needs from other ranks may come too late:
then the order deadlocks. Such orders are lowered all the same, past the pass that refuses them.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
from torch.fx.node import Node

import piper_dynamo as piper
from piper_dynamo.errors import PiperError, PiperPlanError
from piper_dynamo.ir.graph import producer, task_of
from piper_dynamo.ir.program import Op, RankProgram
from piper_dynamo.ir.task import Kind
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.simulate import Costs, simulate
from piper_dynamo.passes.order import find_contradiction
from piper_dynamo.planning import Plan
from piper_dynamo.programs import lower_all
from tests import jobs
from tests.models import Stack4, rows

LINES = [{stage: [stage] for stage in range(p)} for p in range(1, 5)]
BASES = [
    (placement, m, split)
    for placement in (*LINES, jobs.LOOP2, jobs.V2)
    for m in range(1, 5)
    for split in (False, True)
]
Order = dict[tuple[int, ...], list[Node]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A plan, its tasks, and the tasks that each of them needs."""

    plan: Plan
    needs: dict[Node, frozenset[Node]]


@cache
def base(which: int) -> Base:
    placement, m, split = BASES[which]
    halves = [
        piper.Order(
            [{"PP": stage, "MB": mb, "PASS": half} for mb in range(m) for half in ("BI", "BW")]
        )
        for stage in placement
    ]
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=m), *jobs.places(placement), *(halves if split else [])
    )
    plan = piper.plan(Stack4(len(placement), skip="all"), strategy, rows(2 * m))
    return Base(plan=plan, needs={task: frozenset(_needs(task)) for task in plan.dag.tasks()})


def _needs(task: Node) -> Iterator[Node]:
    """The tasks that make what a task reads, through transfers and sums."""
    left = list(task.all_input_nodes)
    while left:
        made = producer(left.pop())
        if made.meta.get("task") is None:
            continue
        if task_of(made).kind is Kind.COMPUTE:
            yield made
        else:
            left += made.all_input_nodes


def drawn(of: Base, swaps: int, draw: random.Random) -> Order:
    """The order of some run, with neighbours swapped where a task does not need the other."""
    order: Order = {task_of(task).devices: [] for task in of.needs}
    done: set[Node] = set()
    while len(done) < len(of.needs):
        ready = [task for task in of.needs if task not in done and of.needs[task] <= done]
        task = draw.choice(ready)
        done.add(task)
        order[task_of(task).devices].append(task)
    for tasks in order.values():
        for _ in range(swaps if len(tasks) > 1 else 0):
            at = draw.randrange(len(tasks) - 1)
            first, second = tasks[at : at + 2]
            if first not in of.needs[second]:
                tasks[at : at + 2] = second, first
    return order


def check(of: Base, order: Order) -> bool:
    """All three decide alike about an order; returns whether it can be run."""
    plan = of.plan
    programs = lower_all(replace(plan.dag, orders=[]), plan.world_size, order)
    for program, tasks in zip(programs, order.values(), strict=True):
        names = [str(task_of(t).name) for t in tasks if t.meta.get("phase") is not None]
        assert [i.task for i in program.instrs if i.op is Op.RUN] == names
    cycle = cycle_of(plan, order)
    if cycle:
        assert " waits for " in cycle
        with pytest.raises(PiperPlanError):
            verify(programs)
        with pytest.raises(PiperPlanError, match="the plan deadlocks"):
            verify([drained_last(program) for program in programs])
        with pytest.raises(PiperError, match="deadlocks in simulation"):
            simulate(programs, Costs(), plan.halves)
    else:
        verify(programs)
        ran = [e.name for e in simulate(programs, Costs(), plan.halves).timeline.events]
        assert sorted(ran) == sorted(i.task for p in programs for i in p.instrs if i.op is Op.RUN)
    return not cycle


def cycle_of(plan: Plan, order: Order) -> str:
    """What the order pass says; nothing if it takes the order."""
    edges = [(a, b, "here") for tasks in order.values() for a, b in pairwise(tasks)]
    return find_contradiction(replace(plan.dag, orders=edges))


def drained_last(program: RankProgram) -> RankProgram:
    """All drains at the end, where they hold nothing back.

    A drain is put where a reply says that its message has arrived. In an order that deadlocks a
    rank can wait for the reply before it sends, and `verify` finds the drain's register missing
    before it looks for cycles.
    """
    last = (Op.DRAIN, Op.FREE)
    first = [i for i in program.instrs if i.op not in last]
    ends = [i for op in last for i in program.instrs if i.op is op]
    return replace(program, instrs=(*first, *ends))


def check_many(count: int, bases: Sequence[int]) -> None:
    """Orders of each base in turn, from ones that a run has had to ones that are all but random."""
    outcomes = {True: 0, False: 0}
    for number in range(count):
        swaps = (0, 2, 8, 200)[number // len(bases) % 4]
        which = bases[number % len(bases)]
        of = base(which)
        order = drawn(of, swaps, random.Random(number))
        try:
            can_run = check(of, order)
        except (AssertionError, PiperError, pytest.fail.Exception) as error:
            shown = "\n".join(
                f"{d}: {' '.join(str(task_of(t).name) for t in ts)}" for d, ts in order.items()
            )
            raise AssertionError(f"order {number} of {BASES[which]}\n{shown}") from error
        assert can_run or swaps, "a run has had this order"
        outcomes[can_run] += 1
    assert min(outcomes.values()) > count / 6, outcomes


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch):
    """The bases are plain plans, of which other tests compute every pass's values."""
    monkeypatch.setenv("PIPER_VERIFY", "1")


def test_order_pass_verifier_and_simulator_agree():
    check_many(300, [which for which, (_, m, _) in enumerate(BASES) if m == 3])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_order_pass_verifier_and_simulator_agree_on_all_bases():
    check_many(3000, range(len(BASES)))
