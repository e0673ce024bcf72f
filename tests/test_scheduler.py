"""The order that the scheduler gives where Orders leave it open."""

import pytest
import torch
from torch import nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.task import Pass, TaskName
from piper_dynamo.lowering.schedule import _RULES as RULES


class Stages(nn.Module):
    def __init__(self, stages: int, frozen: int = 0) -> None:
        """The first `frozen` stages have no backward, where the input needs no gradient."""
        super().__init__()
        self.w = nn.ParameterList(torch.full((2, 2), 0.1 * (i + 1)) for i in range(stages))
        for weight in self.w[:frozen]:
            weight.requires_grad_(False)

    def forward(self, x):
        for stage, weight in enumerate(self.w):
            with piper.annotate("PP", stage):
                x = torch.tanh(x @ weight)
                if stage == len(self.w) - 1:
                    x = x.square().mean()
        return x


def plan(
    placement: dict[int, list[int]], microbatches: int, orders=(), frozen: int = 0
) -> piper.Plan:
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=microbatches),
        *(piper.Place({"PP": s}, devices=d) for s, d in placement.items()),
        *orders,
    )
    world = 1 + max(d for devices in placement.values() for d in devices)
    x = torch.zeros(2 * microbatches, 2, requires_grad=not frozen)
    return piper.plan(Stages(len(placement), frozen), strategy, (x,), world_size=world)


def live_forwards(found: piper.Plan, rank: int) -> int:
    """The most microbatches whose backward is yet to come, over all regions of a rank."""
    live = most = 0
    for instr in found.programs[rank].instrs:
        if instr.op is Op.RUN:
            live += 1 if TaskName.parse(instr.task).which is Pass.F else -1
            most = max(most, live)
    return most


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8])
def test_without_orders_a_line_runs_as_one_forward_one_backward(ranks: int, microbatches: int):
    found = plan({s: [s] for s in range(ranks)}, microbatches)
    # Narayanan et al. 2021: m (F + B) of work and (p - 1)(F + B) idle.
    assert found.simulate().makespan == 3 * (microbatches + ranks - 1)
    for rank in range(ranks):
        assert live_forwards(found, rank) == min(microbatches, ranks - rank)


LOOP = {0: [0], 1: [1], 2: [2], 3: [0], 4: [1], 5: [2]}
V = {0: [0], 1: [1], 2: [2], 3: [2], 4: [1], 5: [0]}


def idle(found: piper.Plan, microbatches: int) -> float:
    """Of the last rank to end, in units of a chunk's forward: each rank has two chunks."""
    return found.simulate().makespan - 2 * 3 * microbatches


IDLE = {  # by microbatches: of the rule by microbatches, of that by the critical path
    "loop": (LOOP, {2: (9, 9), 4: (14, 6), 8: (13, 8), 20: (21, 8)}),
    "v": (V, {2: (10, 11), 4: (15, 10), 8: (16, 10), 20: (28, 10)}),
}


@pytest.mark.parametrize(("placement", "rules"), IDLE.values(), ids=IDLE)
def test_without_orders_idle_time_does_not_grow_with_the_microbatches(
    placement, rules, monkeypatch
):
    """Where stages come back to a rank; the better rule's order is taken for each number."""
    for microbatches, each in rules.items():
        asked = zip([RULES[:1], RULES[1:], RULES], [*each, min(each)], strict=True)
        for only, expected in asked:
            monkeypatch.setattr("piper_dynamo.lowering.schedule._RULES", only)
            assert idle(plan(placement, microbatches), microbatches) == expected


class Branches(nn.Module):
    """Rank 0 makes what the chains on ranks 1 and 2 begin with, and adds up what they end with."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.full((2, 2), 0.1 * (i + 1)) for i in range(5))

    def forward(self, x):
        with piper.annotate("LEFT", 0):
            left = torch.tanh(x @ self.w[0])
        with piper.annotate("RIGHT", 0):
            right = torch.sigmoid(x @ self.w[1])
        with piper.annotate("LEFT", 1):
            left = torch.relu(left @ self.w[2])
        with piper.annotate("RIGHT", 1):
            right = torch.cos(right @ self.w[3])
        with piper.annotate("END", 0):
            return ((left + right) @ self.w[4]).square().mean()


@pytest.mark.parametrize("longer", ["LEFT", "RIGHT"])
def test_the_branch_with_the_longer_way_goes_first(longer: str):
    places = {"LEFT": [0, 1], "RIGHT": [0, 2]}
    strategy = piper.Strategy(
        *(piper.Place({t: i}, devices=[d]) for t, ds in places.items() for i, d in enumerate(ds)),
        piper.Place({"END": 0}, devices=[0]),
    )
    costs = piper.Costs(of=lambda task: 9.0 if task.tags.get(longer) == 1 else 1.0)
    x = torch.zeros(2, 2, requires_grad=True)
    found = piper.plan(Branches(), strategy, (x,), world_size=3, costs=costs)
    ran = [i.task for i in found.programs[0].instrs if i.op is Op.RUN]
    assert longer in ran[0]


def test_stages_inside_another_tag_are_stages():
    """Only regions on the devices of the one around them, such as experts, are no stages."""

    class Trunk(Stages):
        def forward(self, x):
            with piper.annotate("TRUNK", 0):
                return super().forward(x)

    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=8),
        *(piper.Place({"PP": s}, devices=[s]) for s in range(4)),
    )
    found = piper.plan(Trunk(4), strategy, (torch.zeros(16, 2, requires_grad=True),), 4)
    assert found.simulate().makespan == 3 * (8 + 4 - 1)


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_an_order_of_one_group_alone(group: int, name: str):
    """The others follow it: no slower than with the whole schedule."""
    line = {s: [s] for s in range(3)}
    whole = getattr(piper.schedules, name)(line, 6)
    found = plan(line, 6, [whole[group]])
    assert found.simulate().makespan <= plan(line, 6, whole).simulate().makespan


def test_a_bound_gives_way_to_an_order_that_needs_more():
    """All forwards of rank 0's second stage come first, and with them those of rank 1's first."""
    loop = {0: [0], 1: [1], 2: [0], 3: [1]}
    first = [o for o in piper.schedules.gpipe(loop, 6) if "0" in repr(o)][:1]
    found = plan(loop, 6, first)
    assert live_forwards(found, 1) > 2
    assert found.simulate().makespan > 0


def test_a_stage_without_a_backward_keeps_nothing_and_is_not_held_back():
    """A bound on its microbatches in flight would never be lifted: none of them comes back."""
    found = plan({0: [0], 1: [0], 2: [1]}, 12, frozen=1).simulate()
    assert found.makespan < 1.3 * max(found.busy(0), found.busy(1))


def test_it_is_deterministic():
    loop = {0: [0], 1: [1], 2: [0], 3: [1]}
    one, other = plan(loop, 4), plan(loop, 4)
    assert [p.text() for p in one.programs] == [p.text() for p in other.programs]
