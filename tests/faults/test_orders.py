"""Section S: an order that is no legal schedule is refused before anything runs, on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT
from tests.jobs import V2, by_hand
from tests.models import Stack4, rows
from tests.replicas import LINE

GOOD = (
    "F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1",
    "F1.0 F1.1 F2.0 F2.1 B2.0 B1.0 B2.1 B1.1",
)


def strategy(*texts: str, places: Any = None) -> piper.Strategy:
    return piper.Strategy(
        piper.Split({}, num_microbatches=2), *(places or jobs.places(V2)), *by_hand(*texts)
    )


def refused(*texts: str, places: Any = None) -> str:
    """What both ranks are told, which must be the same, where they compile."""

    def job() -> str:
        def call() -> None:
            wanted = strategy(*texts, places=places)
            piper.compile(Stack4(4), wanted, example_inputs=EIGHT)

        return jobs.refusal(call, ValueError)

    first, second = jobs.run_ranks(job, 2)
    assert first == second
    return first


def test_the_good_order_is_run() -> None:
    """R69, control: the order that the others are made from."""
    fx.is_f1(fx.run(lambda: Stack4(4), strategy(*GOOD), EIGHT))


FAULTS: dict[str, tuple[tuple[str, str], tuple[str, ...]]] = {
    "left out": ((GOOD[0], GOOD[1].replace(" B2.1", "")), ("leaves out B.PP2.MB1",)),
    "doubled": (
        (GOOD[0].replace("F0.0", "F0.0 F0.0"), GOOD[1]),
        ("F.PP0.MB0 comes twice", "groups[0] and groups[1]"),
    ),
    "backward first": (
        (GOOD[0].replace("F3.0 B3.0", "B3.0 F3.0"), GOOD[1]),
        ("rank 0", "B.PP3.MB0", "waits for", "F.PP3.MB0"),
    ),
    "unknown stage": ((GOOD[0] + " F7.0", GOOD[1]), ("PP", "7", "0", "3")),
    "stage of both": (
        (GOOD[0].replace("F3.0", "F1.0 F3.0"), GOOD[1]),
        ("several device groups", "F.PP1.MB0"),
    ),
    "cycle": (
        (GOOD[0], "F1.0 F2.1 F1.1 F2.0 B2.0 B1.0 B2.1 B1.1"),
        ("F.PP2.MB1", "waits for", "F.PP1.MB1", "rank 1"),
    ),
    "cycle of two ranks": (
        ("F0.0 F3.0 F0.1 F3.1 B3.0 B3.1 B0.0 B0.1", "F1.0 F1.1 F2.0 F2.1 B2.0 B1.0 B2.1 B1.1"),
        ("rank 0", "rank 1", "waits for", "F.PP1.MB1", "F.PP0.MB1"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_illegal_order_is_refused_with_its_place(fault: str) -> None:
    """R69, illegal schedules: a ValueError at compile time, alike on all ranks, naming the task."""
    texts, words = FAULTS[fault]
    jobs.mentions(refused(*texts), *words)


def test_a_stage_on_both_ranks_is_refused() -> None:
    """R69, a stage that is placed on two ranks."""
    places = [piper.Place({"PP": k}, [0] if k in (0, 3) else [1]) for k in range(4)]
    places.append(piper.Place({"PP": 1}, [0]))
    jobs.mentions(refused(*GOOD, places=places), "PP1", "[0]", "[1]", "twice")


def test_all_faults_are_told_at_once() -> None:
    """R69, not just the first: a task left out, one doubled, and one of no stage."""
    first = GOOD[0].replace("F0.0", "F0.0 F0.0") + " F7.0"
    text = refused(first, GOOD[1].replace(" B2.1", ""))
    jobs.mentions(text, "comes twice", "7", "leaves out B.PP2.MB1")


TWICE = (*jobs.places(V2), piper.Place({"PP": 1}, [0]))
HALVED = GOOD[1].replace("B2.0", "BI2.0 BW2.0")


def test_faults_of_placements_and_orders_are_told_together() -> None:
    """R69, (a) a task left out, (b) one doubled, (d) one of no stage, (e) a stage of both ranks."""
    first = GOOD[0].replace("F0.0", "F0.0 F0.0") + " F7.0"
    text = refused(first, GOOD[1].replace(" B2.1", ""), places=TWICE)
    jobs.mentions(text, "PP1 is placed twice", "[0]", "[1]", "test_orders.py")
    jobs.mentions(text, "comes twice", "PP=7", "leaves out B.PP2.MB1")
    assert "F.PP1" not in text, text  # which rank's it is, is not known
    assert "B.PP1" not in text, text


def test_tasks_that_are_nowhere_make_no_order_incomplete() -> None:
    """R69, (e) alone: an order of some microbatches of a stage whose rank is not known."""
    places = (*jobs.places(V2), piper.Place({"PP": 0}, [1]))
    text = refused("F0.0 B0.0", "F1.0 F1.1 B1.0 B1.1", places=places)
    jobs.mentions(text, "PP0 is placed twice")
    assert "leaves out" not in text, text


def test_a_cycle_is_told_with_other_faults() -> None:
    """R69, (f) with (a) and (e): orders that wait for one another, beside what else is wrong."""
    second = "F1.0 F2.1 F1.1 F2.0 B2.0 B1.0 B1.1"
    text = refused(GOOD[0], second, places=TWICE)
    jobs.mentions(text, "PP1 is placed twice", "leaves out B.PP2.MB1")
    jobs.mentions(text, "F.PP2.MB1", "waits for", "F.PP1.MB1", "rank 1")
    alone = refused(GOOD[0], second)
    jobs.mentions(alone, "an order cannot be kept", "leaves out B.PP2.MB1", "waits for")
    assert "placed twice" not in alone


def test_a_backward_named_whole_and_split_is_told_with_other_faults() -> None:
    """R69, halves and wholes of one backward, with (a) and (e)."""
    second = HALVED.replace(" B1.1", "") + " B2.0"
    text = refused(GOOD[0], second, places=TWICE)
    jobs.mentions(text, "a backward is ordered both whole and split", "B.PP2.MB0")
    jobs.mentions(text, "PP1 is placed twice")
    assert "matches nothing" not in text, text
    alone = refused(GOOD[0], second.replace(" B2.1", ""))
    jobs.mentions(alone, "both whole and split", "B.PP2.MB0", "leaves out B.PP1.MB1")
    assert "placed twice" not in alone
    assert "matches nothing" not in alone, alone


# More inputs of the kind.


@pytest.mark.parametrize(
    ("schedule", "placement", "words"),
    [
        ("zbv", {0: [0], 1: [1], 2: [0], 3: [1]}, ("zbv", "V")),
        ("interleaved_1f1b", {0: [0], 1: [1], 2: [1], 3: [0]}, ("interleaved_1f1b",)),
        ("one_f_one_b", {0: [0], 2: [1]}, ("one_f_one_b", "0", "2")),
    ],
    ids=["loop for a v", "v for a loop", "a hole"],
)
def test_a_placement_that_a_schedule_does_not_take(
    schedule: str, placement: jobs.Placement, words: tuple[str, ...]
) -> None:
    """Another layout: a placement of the wrong shape is refused where the schedule is made."""
    text = jobs.refusal(lambda: jobs.orders(schedule, placement, 4), ValueError)
    jobs.mentions(text, *words)


class Sides(nn.Module):
    """Two branches of one stage's values, which a third stage joins."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.eye(4)) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0])
        with piper.annotate("PP", 1):
            left = torch.tanh(h @ self.w[1])
        with piper.annotate("PP", 2):
            return ((left + h) @ self.w[2] - y).square().mean()


@pytest.mark.parametrize("zero", replicas.levels(0))
def test_an_order_of_branches_that_waits_for_itself(zero: int) -> None:
    """Another model, in float32 and with replicas: the cycle goes through a branch."""
    placement = {0: LINE[0], 1: LINE[1], 2: LINE[0]}
    texts = ("F0.0 F2.0 F0.1 F2.1 B2.0 B2.1 B0.0 B0.1", "F1.1 F1.0 B1.0 B1.1")
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        *jobs.places(placement),
        piper.Replicate({"PP": "*"}, zero=zero),
        *by_hand(*texts),
    )
    batch = tuple(value.float() for value in rows(8))
    text = jobs.refusal(lambda: piper.plan(Sides(), wanted, batch), piper.PiperPlanError)
    jobs.mentions(text, "F.PP1.MB0", "F.PP1.MB1", "F.PP0.MB1", "waits for", "test_orders.py")
