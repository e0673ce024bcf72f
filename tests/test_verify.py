"""The verifier: every real plan passes, every mutation is refused by the check it is meant for.

Deadlock is decided in two ways here: by `verify`, from the cycle of the happens-before graph, and
by `run`, which plays the programs instruction by instruction until nobody can go on.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import piper_dynamo as piper
from piper_dynamo.costs import Costs
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.ir.program import Instr, Op, RankProgram
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.simulate import simulate
from piper_dynamo.planning import Plan
from tests import jobs
from tests.jobs import LINE2, LINE4, LOOP2, V2
from tests.models import NormNet, Stack4, TiedLM, rows

Programs = list[RankProgram]
SCHEDULES = {
    "gpipe": LINE4,
    "one_f_one_b": LINE4,
    "zb_h1": LINE4,
    "interleaved_1f1b": LOOP2,
    "zbv": V2,
}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    model, batch = Stack4(4, skip="all"), rows(8)
    found = {
        name: piper.plan(model, jobs.strategy(placement, 4, name), batch)
        for name, placement in SCHEDULES.items()
    }
    found["two"] = piper.plan(Stack4(2), jobs.strategy(LINE2, 4, "one_f_one_b"), rows(8))
    found["both ways"] = piper.plan(Stack4(2), jobs.strategy(LINE2, 4, "dualpipe"), rows(8))
    # What inductor compiles does not add to sums: programs do.
    found["added"] = piper.plan(
        Stack4(2), jobs.strategy(LINE2, 4, "one_f_one_b"), rows(8), compile="inductor"
    )
    found["tied"] = piper.plan(TiedLM(), jobs.strategy(LINE2, 4, "gpipe"), TiedLM.batch())
    found["buffers"] = piper.plan(NormNet(), jobs.strategy(LINE2, 4, "gpipe"), rows(8))
    return found


@pytest.mark.parametrize("name", [*SCHEDULES, "two", "both ways", "added", "tied", "buffers"])
def test_real_plans_are_safe(plans: dict[str, Plan], name: str):
    plans[name].verify()
    assert run(plans[name].programs) == []


def refused(programs: Programs) -> str:
    with pytest.raises(PiperPlanError) as caught:
        verify(programs)
    return str(caught.value)


def lacks(text: str, fault: str, missing: str, other: str) -> None:
    """A fault names the end that is missing by the one that is there, with the user's line."""
    place = re.escape(f"\n    no {missing}, whose other end is rank {other}")
    place = place.replace("NUMBER", r"\d+")
    found = re.search(
        re.escape(f"  {fault}") + place + r" on stream '\w+' \[\S*models\.py:\d+\]", text
    )
    assert found, text


def edit(plan: Plan, rank: int, change: Callable[[list[Instr]], None]) -> Programs:
    """The plan's programs with one rank's instructions changed."""
    programs = list(plan.programs)
    instrs = list(programs[rank].instrs)
    change(instrs)
    programs[rank] = replace(programs[rank], instrs=tuple(instrs))
    return programs


def nth(instrs: list[Instr], op: Op, count: int = 0, peer: int | None = None) -> int:
    """Where the instruction `count` of this kind is."""
    found = [k for k, i in enumerate(instrs) if i.op is op and (peer is None or i.peer == peer)]
    return found[count]


def drop(op: Op, count: int = 0) -> Callable[[list[Instr]], None]:
    def change(instrs: list[Instr]) -> None:
        del instrs[nth(instrs, op, count)]

    return change


def swap(op: Op, first: int = 0, second: int = 1) -> Callable[[list[Instr]], None]:
    def change(instrs: list[Instr]) -> None:
        a, b = nth(instrs, op, first), nth(instrs, op, second)
        instrs[a], instrs[b] = instrs[b], instrs[a]

    return change


def vary(op: Op, count: int, **fields: object) -> Callable[[list[Instr]], None]:
    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, op, count)
        instrs[at] = replace(instrs[at], **fields)  # type: ignore[arg-type]

    return change


def test_two_sends_swapped(plans: dict[str, Plan]):
    text = refused(edit(plans["two"], 1, swap(Op.SEND)))
    assert (
        "channel rank 1 -> rank 0: send has messages [1, 0, 2, 3, 4], expected 0-4 in order" in text
    )


def test_two_sends_swapped_and_renumbered(plans: dict[str, Plan]):
    """The right numbers on the wrong values."""

    def change(instrs: list[Instr]) -> None:
        a, b = nth(instrs, Op.SEND), nth(instrs, Op.SEND, 1)
        one, other = instrs[a], instrs[b]
        instrs[a] = replace(one, task=other.task, inputs=other.inputs)
        instrs[b] = replace(other, task=one.task, inputs=one.inputs)

    text = refused(edit(plans["two"], 1, change))
    assert "message 0 from rank 1 to rank 0 differs: sent B.PP1.MB1" in text
    assert "expected B.PP1.MB0" in text
    assert "is read before it is written" in text


def test_what_comes_is_laid_out_in_rows(plans: dict[str, Plan]):
    spec = next(i.spec for i in plans["two"].programs[1].instrs if i.op is Op.POST)
    assert spec is not None
    turned = replace(spec, stride=spec.stride[::-1])
    text = refused(edit(plans["two"], 1, vary(Op.POST, 0, spec=turned)))
    assert re.search(r"rank 1 #\d+ post \S+.*: what comes is laid out in rows, not with", text)


def test_a_send_dropped(plans: dict[str, Plan]):
    text = refused(edit(plans["two"], 0, drop(Op.SEND, 1)))
    lacks(
        text,
        "channel rank 0 -> rank 1: send has messages [0, 2, 3], expected 0-3 in order",
        "send of message 1",
        "1 #NUMBER post F.PP0.MB1",
    )


def test_the_last_send_dropped(plans: dict[str, Plan]):
    text = refused(edit(plans["two"], 0, drop(Op.SEND, -1)))
    lacks(
        text,
        "channel rank 0 -> rank 1: send has messages [0, 1, 2], expected 0-3 in order",
        "send of message 3",
        "1 #NUMBER post F.PP0.MB3",
    )
    assert "post has messages" not in text


def test_a_wait_dropped(plans: dict[str, Plan]):
    text = refused(edit(plans["two"], 1, drop(Op.WAIT, 2)))
    lacks(
        text,
        "channel rank 0 -> rank 1: wait has messages [0, 1, 3], expected each of 0-3 once",
        "wait of message 2",
        "1 #NUMBER post F.PP0.MB2",
    )
    assert "is read before it is written" in text


def test_a_drain_dropped(plans: dict[str, Plan]):
    text = refused(edit(plans["two"], 0, drop(Op.DRAIN, 1)))
    lacks(
        text,
        "channel rank 0 -> rank 1: drain has messages [0, 2, 3], expected each of 0-3 once",
        "drain of message 1",
        "0 #NUMBER send F.PP0.MB1",
    )


def test_a_post_dropped(plans: dict[str, Plan]):
    text = refused(edit(plans["two"], 0, drop(Op.POST, 0)))
    lacks(
        text,
        "channel rank 1 -> rank 0: post has messages [1, 2, 3, 4], expected 0-4 in order",
        "post of message 0",
        "1 #NUMBER send B.PP1.MB0",
    )


def test_a_message_that_three_ends_lack(plans: dict[str, Plan]):
    """One end too many: the others are missed by it."""

    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.SEND, -1)
        instrs.insert(at + 1, replace(instrs[at], message=4))

    text = refused(edit(plans["two"], 0, change))
    for op, each in (("post", ""), ("wait", "each of "), ("drain", "each of ")):
        rule = "once" if each else "in order"
        lacks(
            text,
            f"channel rank 0 -> rank 1: {op} has messages [0, 1, 2, 3], expected {each}0-4 {rule}",
            f"{op} of message 4",
            "0 #NUMBER send F.PP0.MB3",
        )


def test_posts_out_of_order(plans: dict[str, Plan]):
    text = refused(edit(plans["two"], 0, swap(Op.POST)))
    assert (
        "channel rank 1 -> rank 0: post has messages [1, 0, 2, 3, 4], expected 0-4 in order" in text
    )


def test_a_message_waited_for_twice(plans: dict[str, Plan]):
    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.WAIT)
        instrs.insert(at, replace(instrs[at], outputs=("twice",)))

    text = refused(edit(plans["two"], 1, change))
    twice = "wait has messages [0, 0, 1, 2, 3], expected each of 0-3 once"
    place = r"\n    rank 1 #\d+ wait F\.PP0\.MB0 on stream 'recv' \[\S*models\.py:\d+\]"
    assert re.search(re.escape(twice) + place * 2, text), text


@pytest.mark.parametrize("end", [Op.SEND, Op.POST])
@pytest.mark.parametrize("part", ["shape", "dtype"])
def test_a_message_of_another_form(plans: dict[str, Plan], end: Op, part: str):
    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, end, 1)
        spec = instrs[at].spec
        assert spec is not None
        other = {"shape": (4, 2), "dtype": torch.float16}[part]
        instrs[at] = replace(instrs[at], spec=replace(spec, **{part: other}))

    rank = 0 if end is Op.SEND else 1
    text = refused(edit(plans["two"], rank, change))
    assert "message 1 from rank 0 to rank 1 differs: sent F.PP0.MB1" in text
    assert {"shape": "float64[4, 2]", "dtype": "float16[2, 4]"}[part] in text


def test_a_message_to_nobody(plans: dict[str, Plan]):
    for peer in (0, 2):
        text = refused(edit(plans["two"], 0, vary(Op.SEND, 0, peer=peer)))
        assert f"rank {peer} cannot be its peer" in text


def test_a_read_after_the_free(plans: dict[str, Plan]):
    def change(instrs: list[Instr]) -> None:
        """The bundle of the first microbatch dies before its backward."""
        at = next(k for k, i in enumerate(instrs) if i.bundle_in)
        instrs.insert(at, Instr(op=Op.FREE, inputs=(instrs[at].bundle_in,)))

    text = refused(edit(plans["two"], 0, change))
    assert re.search(r"rank 0 #\d+ run B\.PP0\.MB0 \[.*models\.py:\d+\]: 'bundle_PP0_MB0' is", text)
    assert "is read before it is written, or after its free" in text


def test_a_sent_value_freed_before_it_has_left(plans: dict[str, Plan]):
    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.SEND)
        value = instrs[at].inputs[0]
        (freed,) = [k for k, i in enumerate(instrs) if i.op is Op.FREE and value in i.inputs]
        instrs.insert(at + 1, instrs.pop(freed))

    text = refused(edit(plans["two"], 0, change))
    assert re.search(r"#\d+ drain F\.PP0\.MB0 .*: '\w+' is read before it is written, or", text)


def test_a_free_of_nothing(plans: dict[str, Plan]):
    text = refused(
        edit(plans["two"], 0, lambda instrs: instrs.append(instrs[nth(instrs, Op.FREE)]))
    )
    assert "free" in text
    assert "or after its free" in text


def test_a_register_written_twice(plans: dict[str, Plan]):
    def change(instrs: list[Instr]) -> None:
        a, b = nth(instrs, Op.SLICE), nth(instrs, Op.SLICE, 1)
        instrs[b] = replace(instrs[b], outputs=instrs[a].outputs)

    text = refused(edit(plans["two"], 0, change))
    assert "'x_MB0' is written twice" in text


def test_an_input_overwritten(plans: dict[str, Plan]):
    text = refused(edit(plans["two"], 0, vary(Op.SLICE, 0, outputs=("w_0",))))
    assert "'w_0' is written twice" in text


def test_a_gradient_never_written(plans: dict[str, Plan]):
    def change(instrs: list[Instr]) -> None:
        for at, instr in enumerate(instrs):
            if "grad_w_1" in instr.outputs:
                outputs = tuple("_" if reg == "grad_w_1" else reg for reg in instr.outputs)
                instrs[at] = replace(instr, outputs=outputs, adds=())

    text = refused(edit(plans["two"], 0, change))
    assert "rank 0: results never written: grad_w_1\n" in text
    used = (
        r"'grad_w_1' is of what is read first at rank 0 #\d+ run F\.PP0\.MB0 \[.*models\.py:\d+\]"
    )
    assert re.search(used, text), text


def test_a_result_freed(plans: dict[str, Plan]):
    text = refused(
        edit(plans["two"], 1, lambda instrs: instrs.append(Instr(op=Op.FREE, inputs=("loss",))))
    )
    assert "rank 1: results never written: loss\n    'loss' is freed at rank 1 #" in text


def test_a_microbatch_left_out_of_a_gradient(plans: dict[str, Plan]):
    """Each gradient contribution is added exactly once."""
    text = refused(edit(plans["added"], 0, drop(Op.ACCUMULATE, 2)))
    assert "B.PP0.MB1" in text


def test_a_microbatch_added_twice_to_a_gradient(plans: dict[str, Plan]):
    def change(instrs: list[Instr]) -> None:
        at = nth(instrs, Op.ACCUMULATE, 2)
        instrs.insert(at, instrs[at])

    assert "B.PP0.MB1" in refused(edit(plans["added"], 0, change))


def test_a_message_received_into_nothing(plans: dict[str, Plan]):
    """The received gradient is thrown away, and the loss's is used twice."""

    def change(instrs: list[Instr]) -> None:
        at = next(k for k, i in enumerate(instrs) if i.task == "B.PP0.MB1" and i.op is Op.RUN)
        earlier = next(i for i in instrs if i.task == "B.PP0.MB0" and i.op is Op.RUN)
        instrs[at] = replace(instrs[at], inputs=(*instrs[at].inputs[:-1], earlier.inputs[-1]))

    assert "is read before it is written, or after its free" in refused(
        edit(plans["two"], 0, change)
    )


def test_all_faults_at_once(plans: dict[str, Plan]):
    def change(instrs: list[Instr]) -> None:
        drop(Op.DRAIN)(instrs)
        vary(Op.SLICE, 0, outputs=("w_0",))(instrs)
        instrs.append(Instr(op=Op.FREE, inputs=("grad_w_1",)))

    text = refused(edit(plans["two"], 0, change))
    for part in ("the plan is unsafe", "written twice", "drain has", "never written: grad_w_1"):
        assert part in text


def test_every_part_is_asked_whatever_another_found():
    """A register, a channel and the specs of another, a gather, and a deadlock, all at once."""
    strategy = piper.strategies.pipeline(
        "one_f_one_b", ranks=3, num_microbatches=4, replicas=2, zero=3
    )
    plan = piper.plan(Stack4(3), strategy, rows(8), 6)
    programs = list(plan.programs)

    def changed(rank: int, *changes: Callable[[list[Instr]], None]) -> None:
        instrs = list(programs[rank].instrs)
        for change in changes:
            change(instrs)
        programs[rank] = replace(programs[rank], instrs=tuple(instrs))

    def early(instrs: list[Instr]) -> None:
        """Waits for the first gradient before it sends anything."""
        wait = next(k for k, i in enumerate(instrs) if i.op is Op.WAIT and i.task == "B.PP1.MB0")
        sends = [i for i in instrs[:wait] if i.op is Op.SEND]
        rest = [i for i in instrs[:wait] if i.op is not Op.SEND]
        instrs[: wait + 1] = [*rest, instrs[wait], *sends]

    def ungathered(instrs: list[Instr]) -> None:
        """A task reads its block itself."""
        gather = instrs[nth(instrs, Op.ALL_GATHER)]
        at = nth(instrs, Op.RUN)
        instrs[at] = replace(instrs[at], inputs=(gather.inputs[0], *instrs[at].inputs[1:]))

    first, second, third = sorted({plan.group(r) for r in range(6)})
    changed(first[0], early)
    changed(second[1], drop(Op.SEND), vary(Op.SEND, 0, task="other"))
    changed(third[0], ungathered, lambda instrs: instrs.append(Instr(op=Op.FREE, inputs=("no",))))
    text = refused(programs)
    title, *_ = text.splitlines()
    assert title == "the plan is unsafe"
    for part in (
        "'no' is read before it is written",
        "in order\n    no send of message 0, whose other end is rank",
        "differs: sent other",
        "is a block of a parameter, read before its gather",
        "the plan deadlocks: rank",
    ):
        assert part in text, f"{part}\n{text}"


def test_channels_that_do_not_match_make_no_cycle(plans: dict[str, Plan]):
    """Who waits for whom is not known of them; nothing else is wrong."""
    text = refused(edit(plans["two"], 0, drop(Op.POST, 0)))
    assert "deadlocks" not in text


def test_a_cycle_names_both_ranks_and_the_users_lines(plans: dict[str, Plan]):
    """Rank 0 waits for the first gradient before it sends what rank 1 needs for it."""

    def change(instrs: list[Instr]) -> None:
        wait = nth(instrs, Op.WAIT)
        sends = [i for i in instrs[:wait] if i.op is Op.SEND]
        rest = [i for i in instrs[:wait] if i.op is not Op.SEND]
        instrs[: wait + 1] = [*rest, instrs[wait], *sends]

    programs = edit(plans["two"], 0, change)
    text = refused(programs)
    title, *lines = text.splitlines()
    assert title == "the plan deadlocks: rank 0, rank 1 wait for one another"
    shown = [re.sub(r" \[[^ ]*models\.py:\d+\]$", " [line]", line) for line in lines]
    assert shown == [
        "  cycle  ┌> rank 1 #10 send B.PP1.MB0 on stream 'send' [line]",
        "         │    comes after, on its rank (8 instructions later),",
        "         │  rank 1 #2 wait F.PP0.MB0 on stream 'recv' [line]",
        "         │    waits for the end of",
        "         │  rank 1 #0 post F.PP0.MB0 on stream 'recv' [line]",
        "         │    needs its other end,",
        "         │  rank 0 #7 send F.PP0.MB0 on stream 'send' [line]",
        "         │    comes after, on its rank (1 instruction later),",
        "         │  rank 0 #6 wait B.PP1.MB0 on stream 'recv' [line]",
        "         │    waits for the end of",
        "         └─ rank 0 #0 post B.PP1.MB0 on stream 'recv' [line]",
        "              needs its other end, the first",
        "  hint   change the order of one of these tasks",
    ]
    assert re.fullmatch(r" +hint +change the order of one of these tasks", lines[-1])
    assert run(programs) == [0, 1]


def run(programs: Programs | tuple[RankProgram, ...]) -> list[int]:
    """Play the programs: sends and posts are at once, waits and drains need both ends issued.

    Returns:
        The ranks that cannot go on; none where all end.
    """
    position = [0] * len(programs)
    sent: set[tuple[int, int, int]] = set()
    posted: set[tuple[int, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for program in programs:
            while position[program.rank] < len(program.instrs):
                instr = program.instrs[position[program.rank]]
                out = (program.rank, instr.peer, instr.message)
                into = (instr.peer, program.rank, instr.message)
                if instr.op is Op.SEND:
                    sent.add(out)
                elif instr.op is Op.POST:
                    posted.add(into)
                elif instr.op is Op.WAIT and instr.peer >= 0:
                    if not _arrived(into, sent, posted):
                        break
                elif instr.op is Op.DRAIN and not _arrived(out, sent, posted):
                    break
                position[program.rank] += 1
                moved = True
    return [p.rank for p in programs if position[p.rank] < len(p.instrs)]


def _arrived(
    message: tuple[int, int, int],
    sent: set[tuple[int, int, int]],
    posted: set[tuple[int, int, int]],
) -> bool:
    """A message ends after both its ends are issued, and after those before it in its channel."""
    source, target, number = message
    return all((source, target, k) in sent & posted for k in range(number + 1))


def shuffled(program: RankProgram, draw: Callable[[int], int]) -> RankProgram:
    """Other host orders of the same program: registers and the order in each channel are kept.

    Drawn by taking, again and again, one of the instructions whose predecessors have been taken:
    who writes what it reads, who reads what it overwrites or frees, the send or post before it in
    its channel, and for a drain its send.
    """
    after: list[set[int]] = [set() for _ in program.instrs]
    users: dict[str, list[int]] = {}
    writers: dict[str, list[int]] = {}
    last: dict[tuple[Op, int], int] = {}
    for index, instr in enumerate(program.instrs):
        ends = {*instr.writes(), instr.bundle_in, *(instr.inputs if instr.op is Op.FREE else ())}
        for reg in {*instr.reads(), *instr.writes()} - {"_"}:
            before = users if reg in ends else writers
            after[index] |= set(before.setdefault(reg, []))
            users.setdefault(reg, []).append(index)
            if reg in ends:
                writers.setdefault(reg, []).append(index)
        if instr.peer >= 0 and instr.op in (Op.SEND, Op.POST):
            key = (instr.op, instr.peer)
            if key in last:
                after[index].add(last[key])
            last[key] = index
        if instr.op is Op.DRAIN:
            after[index] |= {
                k
                for k, i in enumerate(program.instrs[:index])
                if i.op is Op.SEND and (i.peer, i.message) == (instr.peer, instr.message)
            }
    taken: list[int] = []
    left = list(range(len(program.instrs)))
    while left:
        done = set(taken)
        ready = [k for k in left if after[k] <= done]
        one = ready[draw(len(ready))]
        taken.append(one)
        left.remove(one)
    return replace(program, instrs=tuple(program.instrs[k] for k in taken))


@settings(max_examples=max(60, settings.default.max_examples))
@given(st.sampled_from(["two", "both ways", "gpipe", "zbv"]), st.data())
def test_verify_finds_exactly_the_deadlocks(plans: dict[str, Plan], name: str, data: st.DataObject):
    """Random host orders: what the graph says is what happens."""
    plan = plans[name]
    random = data.draw(st.randoms(use_true_random=False))
    steady = data.draw(st.sampled_from([0.0, 0.5, 0.9, 0.99]))  # 1: the order as it is

    def draw(count: int) -> int:
        return 0 if random.random() < steady else random.randrange(count)

    programs = [shuffled(program, draw) for program in plan.programs]
    stuck = run(programs)
    if stuck:
        text = refused(programs)
        assert text.startswith("the plan deadlocks: ")
        named = {int(r) for r in re.findall(r"\d+", text.splitlines()[0])}
        assert named <= set(stuck)
        assert len(named) >= 1
    else:
        verify(programs)
        simulate(programs, Costs(), plan.halves)


@given(st.data())
def test_simulation_and_proof_agree_on_orders(data: st.DataObject):
    """Two ranks, random orders of forwards and backwards: refused iff the tasks cannot be run.

    Plans that deadlock are refused by the order pass, before there are programs, so the reference
    here plays the tasks themselves.
    """
    count = 3
    chains = []
    for stage in range(2):
        tasks = [("F", stage, mb) for mb in range(count)] + [
            ("B", stage, mb) for mb in range(count)
        ]
        chains.append(list(data.draw(st.permutations(tasks))))
    orders = [
        piper.Order([{"PASS": which, "PP": stage, "MB": mb} for which, stage, mb in chain])
        for chain in chains
    ]
    strategy = piper.Strategy(piper.Split({}, num_microbatches=count), *jobs.places(LINE2), *orders)
    if can_run(chains):
        plan = piper.plan(MODEL, strategy, rows(6))
        ran = [[i.task for i in program.instrs if i.op is Op.RUN] for program in plan.programs]
        assert ran == [[f"{w}.PP{s}.MB{m}" for w, s, m in chain] for chain in chains]
        plan.verify()
        assert plan.simulate().makespan > 0
    else:
        with pytest.raises(PiperPlanError, match="cycle"):
            piper.plan(MODEL, strategy, rows(6))


MODEL = Stack4(2)


def can_run(chains: list[list[tuple[str, int, int]]]) -> bool:
    done: set[tuple[str, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for chain in chains:
            left = [task for task in chain if task not in done]
            if left and needs(left[0]) <= done:
                done.add(left[0])
                moved = True
    return len(done) == sum(map(len, chains))


def needs(task: tuple[str, int, int]) -> set[tuple[str, int, int]]:
    which, stage, mb = task
    if which == "F":
        return {("F", 0, mb)} if stage else set()
    return {("F", stage, mb)} | (set() if stage else {("B", 1, mb)})
