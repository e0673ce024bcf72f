"""Communication in simulated steps: how long it takes, and what of it is hidden."""

import pytest
import torch

import piper_dynamo as piper
from benchmarks.experts_sides import one_by_one
from piper_dynamo import programs
from piper_dynamo.ir.program import REDUCTIONS, Instr, Op
from piper_dynamo.lowering.apart import keep_apart
from piper_dynamo.lowering.lower import Draft
from tests import experts, jobs
from tests.jobs import LINE2, mentions, refusal
from tests.models import Stack4, rows

MICROBATCHES = 8
REPLICATED_V = {0: [0, 1], 1: [2, 3], 2: [2, 3], 3: [0, 1]}


def mixture(strategy: piper.Strategy, world: int) -> piper.Plan:
    return piper.plan(experts.Mixture(4), strategy, rows(32), world_size=world)


def test_a_message_arrives_after_its_link_and_its_latency():
    """Two stages, two microbatches: the second message waits for the first to leave the link."""
    plan = piper.plan(Stack4(2), jobs.strategy(LINE2, 2), rows(8), world_size=2)
    (size,) = {i.spec.nbytes for i in plan.programs[0].instrs if i.op is Op.SEND and i.spec}
    step = plan.simulate(piper.Costs(F=1, BI=0, BW=0, comm=0.5, bandwidth=size / 2))
    sends = [e for e in step.timeline.events if e.stream == "send" and e.rank == 0]
    # Forwards end at 1 and 2; each message takes its link for 2 and arrives 0.5 later.
    assert [(e.start_s, e.end_s) for e in sends] == [(1, 3.5), (3, 5.5)]
    forwards = [e for e in step.timeline.events if e.rank == 1 and e.kind == "F"]
    assert [e.start_s for e in forwards] == [3.5, 5.5]


def test_waiting_for_a_peer_is_not_communication():
    """Rank 1 waits 1 for rank 0 to compute, then 0.25 for the message: that alone is exposed."""
    plan = piper.plan(Stack4(2), jobs.strategy(LINE2, 1), rows(8), world_size=2)
    step = plan.simulate(piper.Costs(F=1, BI=1, BW=1, comm=0.25))
    found = step.communication(1, "recv")
    assert (found.total, found.exposed, found.hidden_share) == (0.25, 0.25, 0.0)
    assert step.communication(1, "nothing of that name").hidden_share == 1.0
    mentions(str(step), "rank 1", "recv 0.25, 0% hidden")


def test_collectives_start_when_the_last_rank_has_come():
    """One reduction of 2 (n-1)/n of its bytes, after both replicas' backwards."""
    strategy = piper.Strategy(
        piper.Place({"PP": 0}, devices=[0, 1]), piper.Replicate({"PP": "*"}, reduce_stream="dp")
    )
    plan = piper.plan(Stack4(1), strategy, rows(8), world_size=2)
    (reduction,) = [
        i for i in plan.programs[0].instrs if i.op is Op.ALL_REDUCE and i.task != "loss"
    ]
    nbytes = sum(spec.nbytes for spec in reduction.specs)
    step = plan.simulate(piper.Costs(bandwidth=nbytes))
    events = [e for e in step.timeline.events if e.kind == "reduce" and e.name == reduction.task]
    assert {(e.rank, e.stream) for e in events} == {(0, "dp"), (1, "dp")}
    assert [e.duration_s for e in events] == pytest.approx([1.0, 1.0])


def test_pairs_hide_exchanges_under_the_other_microbatch():
    """DualPipeV: in a group of F and B, chunks of one run while the other's rows travel."""
    together = experts.strategy(REPLICATED_V, MICROBATCHES, "dualpipev")
    plans = [mixture(s, 4) for s in (together, one_by_one(together))]
    rows_sent = {sum(i.op is Op.EXCHANGE for i in p.programs[0].instrs) for p in plans}
    assert len(rows_sent) == 1
    (one, *_) = [i for i in plans[0].programs[0].instrs if i.op is Op.EXCHANGE]
    # An exchange takes as long as a forward chunk of an expert region.
    chunk, nbytes = 0.5 / 3, sum(spec.nbytes for spec in one.specs) / 2
    costs = piper.Costs(F=0.5, BI=0.5, BW=0.5, bandwidth=nbytes / chunk)
    steps = [plan.simulate(costs) for plan in plans]
    for rank in range(4):
        paired, single = (step.communication(rank, "ep") for step in steps)
        assert paired.total == pytest.approx(single.total)
        assert paired.exposed <= 0.4 * single.exposed
    assert steps[0].makespan < 0.8 * steps[1].makespan
    free = [plan.simulate().makespan for plan in plans]
    assert free[0] == pytest.approx(free[1])


def test_pairs_alternate_chunk_by_chunk():
    """Every exchange of one microbatch lets in a chunk of the other; backwards are longer."""
    strategy = experts.strategy(REPLICATED_V, MICROBATCHES, "dualpipev")
    runs = [i.task for i in mixture(strategy, 4).programs[0].instrs if i.op is Op.RUN]
    start = runs.index("B.PP3.MB2.v1")
    assert runs[start : start + 6] == [
        *("B.PP3.MB2.v1", "F.PP0.MB4", "B.PP3.EP3.MB2"),
        *("F.PP0.EP0.MB4", "B.PP3.MB2", "F.PP0.MB4.v1"),
    ]


def test_what_orders_leave_open_follows_the_costs():
    """Without an Order, rows that take long leave time for a second microbatch's chunk; others not.

    On the first of two stages two microbatches may be in flight. Where rows travel for long, the
    second comes in between; where they take nothing, the first goes on.
    """
    strategy = experts.strategy({0: [0, 1], 1: [2, 3]}, 2, "")
    model = experts.Mixture(2)

    def order(costs: piper.Costs) -> list[str]:
        plan = piper.plan(model, strategy, rows(8), costs=costs)
        return [i.task for i in plan.programs[0].instrs if i.op is Op.RUN]

    free, dear = order(piper.Costs()), order(piper.Costs(comm=5.0))
    assert sorted(free) == sorted(dear)
    assert [task.split(".MB")[1][0] for task in free[:4]] == ["0"] * 4
    assert [task.split(".MB")[1][0] for task in dear[:4]] == ["0", "1", "0", "1"]


def beside_exchanges(plan: piper.Plan, rank: int) -> list[str]:
    """Reductions that a rank starts while rows travel, or right before they do."""
    found, travelling = [], set()
    instrs = [i for i in plan.programs[rank].instrs if i.op is not Op.FREE]
    for at, instr in enumerate(instrs):
        if instr.op in (Op.EXCHANGE, Op.UNEXCHANGE):
            travelling.add(instr.outputs[0])
        elif instr.op is Op.WAIT:
            travelling.discard(instr.inputs[0])
        elif instr.op in REDUCTIONS:
            later = (i for i in instrs[at:] if i.op in (Op.RUN, Op.EXCHANGE, Op.UNEXCHANGE))
            following = next(later, None)
            if travelling or (following is not None and following.op is not Op.RUN):
                found.append(instr.task)
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_reduced_while_no_rows_travel(
    monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    """The last microbatch's exchanges have the links for themselves."""
    strategy = experts.strategy({0: [0, 1], 1: [2, 3]}, 4, "one_f_one_b", zero=zero)
    plan = piper.plan(experts.Mixture(2), strategy, rows(16), world_size=4)
    apart = [beside_exchanges(plan, rank) for rank in range(4)]
    assert zero >= 2 or apart == [[]] * 4
    monkeypatch.setattr(programs, "keep_apart", lambda draft: None)
    torch._dynamo.reset()  # an equal call would be given the same plan
    plan = piper.plan(experts.Mixture(2), strategy, rows(16), world_size=4)
    crowded = [beside_exchanges(plan, rank) for rank in range(4)]
    assert sum(map(len, apart)) < sum(map(len, crowded))


def moved(*words: str) -> str:
    """Instructions by short names after `keep_apart`: R1 and W1 a reduction and the wait for it,
    X1 and Y1 the same of an exchange, M a message's wait, C a chunk."""
    ops = {"R": Op.ALL_REDUCE, "X": Op.EXCHANGE, "W": Op.WAIT, "Y": Op.WAIT, "M": Op.WAIT}
    draft = Draft(rank=0, place=0)
    for word in words:
        kind, handle = word[0], word.replace("W", "R").replace("Y", "X")
        op = ops.get(kind, Op.RUN)
        named = {"inputs": (handle,)} if op is Op.WAIT else {"outputs": (handle,)}
        draft.instrs.append(Instr(op=op, task=word, **named))
    keep_apart(draft)
    return " ".join(instr.task for instr in draft.instrs)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("R1 X1 Y1 C W1", "X1 Y1 R1 C W1"),
        ("X1 R1 C Y1 M C W1", "X1 C Y1 R1 M C W1"),  # not after the message's wait
        ("R1 M C X1 Y1 C W1", "R1 M C X1 Y1 C W1"),  # no rows travel yet
        ("R1 X1 Y1 W1 C", "R1 X1 Y1 W1 C"),  # its wait comes first
        ("R1 R2 X1 Y1 C X2 Y2 C W1 W2", "X1 Y1 R1 C X2 Y2 R2 C W1 W2"),
        ("R1 R2 X1 Y1 C W1 W2", "X1 Y1 R1 R2 C W1 W2"),  # one chunk for both
        ("C R1 C W1", "C R1 C W1"),
    ],
)
def test_where_reductions_go(before: str, after: str) -> None:
    assert moved(*before.split()) == after


def test_the_listing_of_orders_decides_nothing() -> None:
    """Directives reversed, the programs are the same."""
    whole = experts.strategy(REPLICATED_V, MICROBATCHES, "dualpipev")
    texts = []
    for directives in (whole.directives, tuple(reversed(whole.directives))):
        torch._dynamo.reset()
        plan = mixture(piper.Strategy(*directives, mesh=whole.mesh), 4)
        texts.append([program.text() for program in plan.programs])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("wrong", "word"), [({"bandwidth": 0}, "bandwidth"), ({"comm": -1.0}, "comm")]
)
def test_links_that_carry_nothing(wrong: dict[str, float], word: str):
    mentions(refusal(lambda: piper.Costs(**wrong), piper.PiperStrategyError), word)
