"""Schedules: each order against the published ones, its idle time and its memory.

Everything here follows from the orders alone: `simulate` runs each rank's groups one after another,
a group's tasks as listed, as soon as the values they need exist, communication free.

Terms: F, I, W are the times of one rank's whole share of a microbatch; p ranks, m microbatches, v
stages per rank.
"""

import inspect
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import piper_dynamo as piper
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.strategies import placement, places

LINE2, LOOP2, VEE2 = (
    {0: [0], 1: [1]},
    {0: [0], 1: [1], 2: [0], 3: [1]},
    {0: [0], 1: [1], 2: [1], 3: [0]},
)
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 0.8, 1.2), (1.0, 1.5, 0.5)]
SIZES = [(4, 8), (8, 16)]

Task = tuple[str, int, int]  # pass, stage, microbatch


def tasks(order: piper.Order) -> list[Task]:
    """An order's tasks one after another."""
    found = [dict(one.items) for group in order.groups for one in group]
    assert all(set(tags) == {"PP", "MB", "PASS"} for tags in found)
    return [(tags["PASS"], tags["PP"], tags["MB"]) for tags in found]


def simulate(orders: list[piper.Order], cost: dict[str, float]) -> float:
    """Idle time: makespan less the work of the busiest rank. Fails if the orders deadlock."""
    rows = [tasks(order) for order in orders]
    halves = {(s, k) for row in rows for which, s, k in row if which == "BI"}
    last = max(s for row in rows for _, s, _ in row)

    def needs(task: Task) -> list[Task]:
        which, s, k = task
        if which == "F":
            return [("F", s - 1, k)] if s else []
        if which == "BW":
            return [("BI", s, k)]
        after = [("BI" if (s + 1, k) in halves else "B", s + 1, k)] if s < last else []
        return [("F", s, k), *after]

    end: dict[Task, float] = {}
    clock, position = [0.0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while position[r] < len(row):
                task = row[position[r]]
                if any(one not in end for one in needs(task)):
                    break
                start = max([clock[r], *(end[one] for one in needs(task))])
                clock[r] = end[task] = start + cost[task[0]]
                position[r] += 1
                moved = True
    stuck = [row[at] for row, at in zip(rows, position, strict=True) if at < len(row)]
    assert not stuck, f"deadlock: {stuck}"
    return max(clock) - max(sum(cost[which] for which, _, _ in row) for row in rows)


def idle(
    name: str, p: int, m: int, times: tuple[float, float, float], v: int | None = None
) -> float:
    where = placement(name, p, None if v is None else v * p)
    f, i, w = (time * p / len(where) for time in times)
    return simulate(SCHEDULES[name][0](where, m), {"F": f, "B": i + w, "BI": i, "BW": w})


def text(order: piper.Order) -> str:
    """An order in short: `F0.2` is the forward of stage 0, microbatch 2; pairs are in brackets."""
    words = []
    for group in order.groups:
        one = "+".join("{PASS}{PP}.{MB}".format(**dict(wanted.items)) for wanted in group)
        words.append(one if len(group) == 1 else f"[{one}]")
    return " ".join(words)


# ---- the orders themselves ----------------------------------------------------------------------


def test_gpipe_order():
    assert [text(order) for order in piper.schedules.gpipe(LINE2, 2)] == [
        "F0.0 F0.1 B0.0 B0.1",
        "F1.0 F1.1 B1.0 B1.1",
    ]


def test_gpipe_takes_any_placement():
    assert [text(order) for order in piper.schedules.gpipe(VEE2, 2)] == [
        "F0.0 F0.1 F3.0 F3.1 B3.0 B3.1 B0.0 B0.1",
        "F1.0 F1.1 F2.0 F2.1 B2.0 B2.1 B1.0 B1.1",
    ]


def test_one_f_one_b_is_the_published_order():
    assert [text(order) for order in piper.schedules.one_f_one_b(LINE2, 4)] == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3",
    ]


def test_interleaved_is_the_published_order():
    first = piper.schedules.interleaved_1f1b(LOOP2, 4)[0]
    assert text(first) == (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    )


def test_zb_h1_is_the_published_order():
    second = piper.schedules.zb_h1(LINE2, 4)[1]
    assert text(second) == ("F1.0 BI1.0 F1.1 BI1.1 BW1.0 F1.2 BI1.2 BW1.1 F1.3 BI1.3 BW1.2 BW1.3")


def test_zbv_order():
    assert [text(order) for order in piper.schedules.zbv(VEE2, 3)] == [
        "F0.0 F0.1 F0.2 F3.0 BI3.0 BW3.0 F3.1 BI3.1 BW3.1 BI0.0 BW0.0 F3.2 BI3.2 BW3.2 "
        "BI0.1 BW0.1 BI0.2 BW0.2",
        "F1.0 F2.0 F1.1 F2.1 BI2.0 BW2.0 F1.2 BI1.0 BW1.0 F2.2 BI2.1 BW2.1 BI1.1 BI2.2 "
        "BI1.2 BW1.1 BW2.2 BW1.2",
    ]


def test_dualpipev_is_the_published_order():
    first = piper.schedules.dualpipev(VEE2, 4)[0]
    assert text(first) == (
        "F0.0 F0.1 F0.2 F3.0 BI3.0 BW3.0 F3.1 [F0.3+B3.1] [F3.2+B0.0] B3.2 [F3.3+B0.1] B3.3 "
        "BI0.2 [BW0.2+BI0.3] BW0.3"
    )


def test_dualpipev_turns_without_a_pair():
    second = piper.schedules.dualpipev(VEE2, 4)[1]
    assert text(second) == (
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 [F2.2+B1.0] [F1.3+B2.1] [F2.3+B1.1] B2.2 B1.2 BI2.3 BI1.3 "
        "BW2.3 BW1.3"
    )


def test_dualpipe_is_the_published_order():
    """Both ranks are in the middle: each starts what comes from the end that it is."""
    assert [text(order) for order in piper.schedules.dualpipe(LINE2, 4)] == [
        "F0.0 F1.2 F0.1 B1.2 [F1.3+B0.0] B1.3 BI0.1 BW0.1",
        "F0.2 F1.0 F0.3 B1.0 [F1.1+B0.2] B1.1 BI0.3 BW0.3",
    ]


def test_dualpipe_is_the_same_from_both_ends():
    """The last rank does what the first does, with the other half of the microbatches."""
    orders = piper.schedules.dualpipe(placement("dualpipe", 4), 8)
    assert text(orders[0]) == (
        "F0.0 F0.1 F0.2 F3.4 BI3.4 BW3.4 F3.5 [F0.3+B3.5] [F3.6+B0.0] B3.6 [F3.7+B0.1] B3.7 "
        "BI0.2 [BW0.2+BI0.3] BW0.3"
    )
    for near, far in ((0, 3), (1, 2)):
        mirrored = [(which, s, (k + 4) % 8) for which, s, k in tasks(orders[far])]
        assert mirrored == tasks(orders[near])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_are_short_and_say_what_they_need(name: str):
    build = SCHEDULES[name][0]
    assert build is getattr(piper.schedules, name)
    assert len(inspect.getsource(build).splitlines()) < 70
    assert build.__doc__ is not None
    for part in ("Idle:", "Memory:", "Least number of microbatches:", "Source:"):
        assert part in build.__doc__


def test_orders_name_the_callers_line():
    order = piper.schedules.zbv(VEE2, 1)[0]
    assert re.fullmatch(r".*test_schedules\.py:\d+", order.where)


def test_ranks_may_be_any_devices():
    orders = piper.schedules.one_f_one_b({0: [5, 7], 1: [1, 0]}, 2)
    assert [tasks(order)[0] for order in orders] == [("F", 0, 0), ("F", 1, 0)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """(schedule, ranks, stages, microbatches), as the schedule allows."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p, m = draw(st.integers(1, 7)), draw(st.integers(1, 20))
    v = {"gpipe": draw(st.integers(1, 4)), "interleaved_1f1b": draw(st.integers(2, 4))}.get(name)
    if name == "interleaved_1f1b":
        assume(m % max(1, m // p) == 0)
    if name in ("dualpipev", "dualpipe"):
        assume(m >= 2 * p)
    if name == "dualpipe":
        assume(p % 2 == m % 2 == 0)
    stages = len(placement(name, p)) if v is None else v * p
    return name, p, stages, m


@given(cases())
def test_every_task_once_in_order_and_no_deadlock(case: tuple[str, int, int, int]):
    name, p, stages, m = case
    where = placement(name, p, stages)
    orders = SCHEDULES[name][0](where, m)
    assert len(orders) == p
    simulate(orders, {"F": 1.0, "B": 2.0, "BI": 1.0, "BW": 1.0})

    homes = {
        (s, k): one.devices
        for one in places(name, where, m)
        for s in range(stages)
        for k in range(m)
        if one.filter.matches({"PP": s, "MB": k})
    }
    for order in orders:
        row = tasks(order)
        (devices,) = {homes[s, k] for _, s, k in row}  # an order names tasks of one rank
        for s in {s for _, s, _ in row}:
            mine = [k for k in range(m) if homes[s, k] == devices]
            for passes in (("F",), ("B", "BI"), ("B", "BW")):
                got = [k for which, stage, k in row if stage == s and which in passes]
                assert got == mine, (s, passes)
            assert {k for w, stage, k in row if stage == s and w == "BI"} == {
                k for w, stage, k in row if stage == s and w == "BW"
            }
    firsts = [s for order in orders for which, s, k in tasks(order) if (which, k) == ("F", 0)]
    assert sorted(firsts) == list(range(stages))


@given(cases())
def test_pairs_are_a_forward_and_a_backward(case: tuple[str, int, int, int]):
    """At the end, a weight gradient that waits and an input gradient of another microbatch."""
    name, p, stages, m = case
    groups = [
        g for order in SCHEDULES[name][0](placement(name, p, stages), m) for g in order.groups
    ]
    pairs = [[one.tags for one in group] for group in groups if len(group) > 1]
    assert bool(pairs) == (name in ("dualpipev", "dualpipe"))
    for first, second in pairs:
        if (first["PASS"], second["PASS"]) == ("BW", "BI"):
            assert (first["PP"], first["MB"]) != (second["PP"], second["MB"])
            continue
        assert (first["PASS"], second["PASS"]) == ("F", "B")
        assert first["PP"] != second["PP"]


# ---- idle times ---------------------------------------------------------------------------------


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_closed_forms(p: int, m: int, times: tuple[float, float, float]):
    f, i, w = times
    assert idle("gpipe", p, m, times) == pytest.approx((p - 1) * (f + i + w))
    assert idle("gpipe", p, m, times, v=2) == pytest.approx((p - 1) * (f + i + w) / 2)
    assert idle("one_f_one_b", p, m, times) == pytest.approx((p - 1) * (f + i + w))
    for v in (2, 4):
        assert idle("interleaved_1f1b", p, m, times, v) == pytest.approx((p - 1) * (f + i + w) / v)
    assert idle("zb_h1", p, m, times) == pytest.approx((p - 1) * max(f, f + i - w))


@pytest.mark.parametrize(
    ("name", "p", "m", "want"),
    [
        ("zb_h1", 4, 8, (3, 4.2, 3, 6)),
        ("zb_h1", 8, 16, (7, 9.8, 7, 14)),
        ("zbv", 4, 8, (1.5, 1.8, 1.7, 3)),
        ("zbv", 8, 16, (3.5, 4.2, 4.1, 7)),
        ("zbv", 8, 32, (3.5, 4.2, 4.1, 7)),
        ("dualpipev", 4, 8, (1.5, 2.1, 1.5, 3.25)),
        ("dualpipev", 8, 16, (3.5, 5.1, 3.5, 8.25)),
        ("dualpipev", 8, 32, (3.5, 5.1, 3.5, 8.25)),
        ("dualpipe", 4, 8, (1, 1.4, 1, 2)),
        ("dualpipe", 8, 16, (3, 4.2, 3, 6.5)),
        ("dualpipe", 8, 32, (3, 4.2, 3, 6.5)),
    ],
)
def test_idle_tables(name: str, p: int, m: int, want: tuple[float, ...]):
    assert [idle(name, p, m, times) for times in TIMES] == pytest.approx(list(want))


@pytest.mark.parametrize("p", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_a_v_of_equal_times_only_waits_for_the_fill(name: str, p: int):
    for m in range(2 * p, 4 * p):
        assert idle(name, p, m, (1, 1, 1)) == pytest.approx((p - 1) / 2)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_two_ways_are_two_v_of_half_the_ranks(p: int, times: tuple[float, float, float]):
    """A rank and its mirror image wait as one rank of dualpipev, whose stages are as long."""
    for m in range(2 * p, 4 * p, 2):
        found = idle("dualpipe", p, m, times)
        assert found == pytest.approx(2 * idle("dualpipev", p // 2, m // 2, times))
        if times == (1, 1, 1):
            assert found == pytest.approx(p / 2 - 1)


_time = st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])


@given(st.integers(1, 8), st.integers(1, 4), st.tuples(_time, _time, _time))
def test_closed_forms_for_any_times(p: int, rounds: int, times: tuple[float, float, float]):
    f, i, w = times
    m = p * rounds
    for name, v in (("gpipe", 1), ("one_f_one_b", None), ("gpipe", 3), ("interleaved_1f1b", 3)):
        want = (p - 1) * (f + i + w) / (v or 1)
        assert idle(name, p, m, times, v) == pytest.approx(want), name
    want = (p - 1) * max(f, i, f + i - w)
    assert idle("zb_h1", p, m, times) == pytest.approx(want)


@given(st.integers(1, 6), st.integers(1, 5))
def test_fewer_microbatches_than_stages(p: int, m: int):
    assume(m < p)
    assert idle("gpipe", p, m, (1, 1, 1)) == idle("one_f_one_b", p, m, (1, 1, 1)) == 3 * (p - 1)
    for name in ("interleaved_1f1b", "zb_h1", "zbv"):
        # Never worse than one microbatch after another through the whole pipeline.
        assert idle(name, p, m, (1, 1, 1)) <= 3 * m * (p - 1) + 1e-9, name


# ---- memory -------------------------------------------------------------------------------------


def peaks(name: str, p: int, m: int) -> list[int]:
    """Per rank, the most stage activations that wait for the end of their backward."""
    found = []
    for order in SCHEDULES[name][0](placement(name, p), m):
        held = most = 0
        for which, _, _ in tasks(order):
            held += {"F": 1, "B": -1, "BI": 0, "BW": -1}[which]
            most = max(most, held)
        found.append(most)
    return found


def test_peak_activations():
    assert peaks("gpipe", 4, 8) == [8, 8, 8, 8]
    assert peaks("one_f_one_b", 4, 8) == [4, 3, 2, 1]
    assert peaks("zb_h1", 4, 8) == [4, 4, 4, 4]
    assert peaks("interleaved_1f1b", 4, 8) == [11, 9, 7, 5]  # of half shares, as the next two
    assert peaks("zbv", 4, 8) == [8, 8, 8, 8]
    assert peaks("dualpipev", 4, 8) == [9, 9, 9, 9]
    assert peaks("dualpipe", 4, 8) == [5, 5, 5, 5]
    assert peaks("dualpipe", 8, 20) == [9] * 8


# ---- refusals -----------------------------------------------------------------------------------

KEYS = "its keys are stages, its values their ranks, such as {0: [0], 1: [1]}"
BAD: list[tuple[str, Any, Any, str]] = [
    ("gpipe", LINE2, 0, "num_microbatches=0: must be a whole number of at least 1"),
    ("gpipe", LINE2, True, "num_microbatches=True"),
    ("gpipe", {}, 1, f"placement={{}}: must be a dict; {KEYS}"),
    ("gpipe", [[0], [1]], 1, f"placement=[[0], [1]]: must be a dict; {KEYS}"),
    ("gpipe", {0: [0], 2: [1]}, 1, f"has 2 stages; they must be 0 to 1; {KEYS}"),
    ("gpipe", {"PP0": [0], "PP1": [1]}, 1, f"has 2 stages; they must be 0 to 1; {KEYS}"),
    ("gpipe", {True: [0], 0: [1]}, 1, "has 2 stages; they must be 0 to 1"),
    ("gpipe", {0: 0}, 1, "0]=0: must be a list of different ranks: [0], those of stage 0"),
    ("gpipe", {0: [0, 0]}, 1, "placement[0]=[0, 0]: must be a list of different ranks"),
    ("gpipe", {0: []}, 1, "placement[0]=[]: must be a list of different ranks"),
    ("gpipe", {0: "0"}, 1, "placement[0]='0': must be a list of different ranks"),
    ("gpipe", {0: [-1]}, 1, "placement[0]=[-1]: must be a list of different ranks"),
    (
        "gpipe",
        {0: [0, 1], 1: [1, 2]},
        1,
        f"two stages share some devices; let them share all, in one order, or none; {KEYS}",
    ),
    ("gpipe", {0: [0, 1], 1: [1, 0]}, 1, "two stages share some devices"),
    ("one_f_one_b", LOOP2, 4, "must be a line"),
    ("zb_h1", VEE2, 4, "must be a line"),
    ("interleaved_1f1b", LINE2, 4, "must be a loop"),
    ("interleaved_1f1b", VEE2, 4, "must be a loop"),
    ("interleaved_1f1b", {0: [0], 1: [1], 2: [0]}, 4, "must be a loop"),
    (
        "interleaved_1f1b",
        LOOP2,
        5,
        "num_microbatches=5: 2 rounds of 2 ranks do not divide it; 4 or 6 do",
    ),
    ("zbv", LINE2, 4, "must be a V"),
    ("zbv", LOOP2, 4, "must be a V"),
    ("dualpipev", {s: [0] for s in range(4)}, 4, "must be a V"),
    ("dualpipev", VEE2, 3, "num_microbatches=3: must be a whole number of at least 4"),
    ("dualpipe", LINE2, 2, "num_microbatches=2: must be a whole number of at least 4"),
    ("dualpipe", LINE2, 5, "num_microbatches=5: must be even: each direction takes half of them"),
    ("dualpipe", {0: [0], 1: [1], 2: [2]}, 6, "must be a line of an even number of stages"),
    ("dualpipe", {0: [0]}, 2, "must be a line of an even number of stages"),
    ("dualpipe", LOOP2, 8, "must be a line of an even number of stages"),
    ("dualpipe", VEE2, 8, "must be a line of an even number of stages"),
]


@pytest.mark.parametrize(("name", "where", "m", "message"), BAD)
def test_refuses(name: str, where: Any, m: Any, message: str):
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)) as caught:
        getattr(piper.schedules, name)(where, m)
    first = str(caught.value).splitlines()[0]
    assert re.fullmatch(rf"piper\.schedules\.{name} at .*test_schedules\.py:\d+ is refused", first)


def test_refusal_lists_every_fault():
    with pytest.raises(piper.PiperStrategyError) as caught:
        piper.schedules.zbv({0: [], 1: [1, 1]}, 0)
    assert len(str(caught.value).splitlines()) == 4


@given(st.integers(2, 9), st.integers(1, 60))
def test_numbers_that_a_refusal_offers_are_allowed(p: int, m: int):
    where = placement("interleaved_1f1b", p)
    try:
        piper.schedules.interleaved_1f1b(where, m)
    except piper.PiperStrategyError as error:
        below, above = map(int, re.findall(r"(\d+) or (\d+) do", str(error))[0])
        assert below < m < above
        for other in (below, above):
            piper.schedules.interleaved_1f1b(where, other)


# ---- whole strategies ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("gpipe", LINE2),
        ("one_f_one_b", LINE2),
        ("zb_h1", LINE2),
        ("interleaved_1f1b", LOOP2),
        ("zbv", VEE2),
        ("dualpipev", VEE2),
    ],
)
def test_pipeline_places_as_the_schedule_needs(name: str, want: dict[int, list[int]]):
    made = piper.strategies.pipeline(name, ranks=2, num_microbatches=4)
    assert made == piper.Strategy(
        piper.Split({}, num_microbatches=4),
        *(piper.Place({"PP": s}, devices=devices) for s, devices in want.items()),
        *getattr(piper.schedules, name)(want, 4),
    )
    assert made == eval(repr(made))
    assert all("test_schedules.py" in directive.where for directive in made.directives)


def test_pipeline_places_stages_on_two_ranks():
    """The second half of the microbatches goes the other way."""
    made = piper.strategies.pipeline("dualpipe", ranks=2, num_microbatches=6, replicas=2, zero=1)
    where = {0: [0, 1], 1: [2, 3]}
    assert made == piper.Strategy(
        piper.Split({}, num_microbatches=6),
        piper.Place({"PP": 0, "MB": range(3)}, devices=[0, 1]),
        piper.Place({"PP": 0, "MB": range(3, 6)}, devices=[2, 3]),
        piper.Place({"PP": 1, "MB": range(3)}, devices=[2, 3]),
        piper.Place({"PP": 1, "MB": range(3, 6)}, devices=[0, 1]),
        piper.Replicate({"PP": "*"}, zero=1),
        *piper.schedules.dualpipe(where, 6),
    )
    assert made == eval(repr(made)) == piper.Strategy.from_json(made.to_json())
    assert "range(3, 6)" in repr(made)
    assert all("test_schedules.py" in directive.where for directive in made.directives)


@pytest.mark.parametrize(
    ("name", "where", "m", "message"),
    [
        ("dualpip", LINE2, 4, "schedule='dualpip': did you mean 'dualpipe'? there are: gpipe"),
        ("dualpipe", LINE2, 3, "num_microbatches=3: must be even"),
        ("zbv", LINE2, 4, "must be a V"),
        ("gpipe", {0: []}, 1, "placement[0]=[]"),
    ],
)
def test_places_refuses(name: str, where: Any, m: int, message: str):
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)) as caught:
        piper.strategies.places(name, where, m)
    assert "test_schedules.py:" in str(caught.value)


def test_pipeline_with_everything():
    made = piper.strategies.pipeline(
        "interleaved_1f1b",
        ranks=2,
        num_microbatches=2,
        stages=6,
        replicas=2,
        zero=3,
        bucket_mb=25,
        prefetch=2,
        keep="step",
        inputs={"mask": "replicate"},
        combine="sum",
        loss="loss",
        regions={"layers.0": {"PP": 0}},
    )
    assert made.of(piper.Split)[0].inputs == {"mask": "replicate"}
    assert made.of(piper.Split)[0].loss == "sum"
    assert [place.devices for place in made.of(piper.Place)] == [(0, 1), (2, 3)] * 3
    assert made.of(piper.Replicate) == (
        piper.Replicate({"PP": "*"}, zero=3, bucket_mb=25, prefetch=2, keep="step"),
    )
    assert Counter(which for order in made.of(piper.Order) for which, _, _ in tasks(order)) == {
        "F": 12,
        "B": 12,
    }
    assert made.loss == "loss"
    assert made.regions == {"layers.0": {"PP": 0}}


def test_gpipe_and_interleaved_take_more_stages():
    assert placement("gpipe", 2, 6) == {0: [0], 1: [1], 2: [0], 3: [1], 4: [0], 5: [1]}
    assert placement("interleaved_1f1b", 1, 3, replicas=2) == {s: [0, 1] for s in range(3)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "zbw"}, "schedule='zbw': did you mean 'zbv'? there are: gpipe, one_f_one_b"),
        ({"schedule": 3}, "schedule=3: there are: gpipe, one_f_one_b"),
        ({"ranks": 0}, "ranks=0: must be a whole number of at least 1"),
        ({"replicas": 0}, "replicas=0: must be a whole number of at least 1"),
        ({"stages": 0}, "stages=0: must be a whole number of at least 1"),
        ({"stages": 4}, "stages=4: must be 2, one per rank, for one_f_one_b"),
        ({"schedule": "zbv", "stages": 2}, "stages=2: must be 4, two per rank, for zbv"),
        (
            {"schedule": "interleaved_1f1b", "stages": 2},
            "stages=2: must be a multiple of ranks=2, at least 4, for interleaved_1f1b",
        ),
        ({"schedule": "gpipe", "stages": 3}, "stages=3: must be a multiple of ranks=2, for gpipe"),
        ({"zero": 1}, "zero=1: needs replicas to shard over"),
        ({"prefetch": 2}, "prefetch=2: needs replicas, which gather and reduce"),
        ({"keep": "step"}, "keep='step': needs replicas, which gather and reduce"),
        ({"bucket_mb": 1}, "bucket_mb=1: needs replicas, which gather and reduce"),
        ({"zero": 4, "replicas": 2}, "zero=4: must be 0, 1, 2 or 3"),
        ({"keep": 0, "replicas": 2}, 'keep=0: must be "chunk", "step", or how many buckets'),
        ({"schedule": "dualpipev", "num_microbatches": 3}, "must be a whole number of at least 4"),
        ({"schedule": "dualpipe", "num_microbatches": 7}, "num_microbatches=7: must be even"),
        ({"schedule": "1F1B"}, "schedule='1F1B': did you mean 'one_f_one_b'?"),
        ({"schedule": Counter}, "is none of piper.schedules; piper.strategies.from_orders makes"),
        ({"schedule": "dualpipe", "ranks": 3}, "ranks=3: must be even, for dualpipe"),
        ({"schedule": "dualpipe", "stages": 4}, "stages=4: must be 2, one per rank, for dualpipe"),
    ],
)
def test_pipeline_refuses(arguments: dict[str, Any], message: str):
    given_arguments = {"schedule": "one_f_one_b", "ranks": 2, "num_microbatches": 4, **arguments}
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)) as caught:
        piper.strategies.pipeline(**given_arguments)
    first = str(caught.value).splitlines()[0]
    called = r"(piper\.[\w.]+, called by )?piper\.strategies\.pipeline,? at .*test_schedules\.py:"
    assert re.fullmatch(called + r"\d+ is refused", first)


def test_a_schedule_is_given_by_its_name_or_as_the_function():
    zbv, where = piper.schedules.zbv, placement("zbv", 2)
    assert placement(zbv, 2) == where
    assert piper.strategies.places(zbv, where, 4) == piper.strategies.places("zbv", where, 4)
    named = piper.strategies.pipeline("zbv", ranks=2, num_microbatches=4)
    assert piper.strategies.pipeline(zbv, ranks=2, num_microbatches=4) == named


def test_what_was_called_is_told_where_that_was_not_the_directive():
    made = piper.strategies.pipeline(ranks=2, num_microbatches=4)
    split, *_ = made.directives
    assert split.maker == "piper.strategies.pipeline"
    assert re.fullmatch(
        r"piper\.Split\(.*\) at .*test_schedules\.py:\d+, made by piper\.strategies\.pipeline",
        split.label,
    )
    (order,) = piper.schedules.gpipe({0: [0]}, 1)
    assert order.maker == "piper.schedules.gpipe"
    by_hand = piper.Split({}, num_microbatches=4)
    assert by_hand.maker == ""
    assert by_hand == split
    with pytest.raises(piper.PiperStrategyError, match=r"^piper\.strategies\.placement at "):
        placement("zbw", 2)
