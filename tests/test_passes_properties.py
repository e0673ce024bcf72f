"""What each pass keeps, whatever it is asked: on random splits, halves, placements and orders.

Values are those of one process: until tasks are placed the DAG runs as one module. From there on
tests/test_parity.py compares whole runs with the eager model.
"""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.filters import Filter
from piper_dynamo.ir.cycle import find_cycle
from piper_dynamo.ir.graph import Dag, producer, results_of, task_of
from piper_dynamo.ir.task import Kind, Pass, TaskName
from piper_dynamo.passes.order import Order
from piper_dynamo.passes.place import Place, Placement
from piper_dynamo.passes.split import Split
from piper_dynamo.passes.split_backward import SplitBackward
from piper_dynamo.passes.tie import Tie
from piper_dynamo.passes.transfer import Transfer
from tests.models import Stack4, TiedLM, rows
from tests.tracing import Stages, capture, run, same_as_eager

BATCH = 12
STAGES = 4
MODELS = {
    "stack": lambda: (Stack4(STAGES, skip="all"), rows(BATCH)),
    "tied": lambda: (TiedLM(), TiedLM.batch()),
}


class Cached:
    """A capture per model and number of microbatches; every call builds its DAG anew."""

    def __init__(self) -> None:
        self._captured: dict[tuple[str, int], tuple[nn.Module, tuple[Tensor, ...], Stages]] = {}

    def __call__(self, name: str, parts: int) -> tuple[nn.Module, tuple[Tensor, ...], Stages]:
        if (name, parts) not in self._captured:
            model, batch = MODELS[name]()
            stages = capture(model, batch, parts).build()
            self._captured[name, parts] = model, batch, stages
        model, batch, stages = self._captured[name, parts]
        return model, batch, stages

    def split(self, name: str, parts: int) -> Dag:
        _, _, stages = self(name, parts)
        dag = stages.rebuilt()
        Split(parts, stages.dims, weight_per_microbatch=False)(dag)
        return dag


@pytest.fixture(scope="module")
def cached() -> Cached:
    return Cached()


@pytest.mark.parametrize(("name", "parts"), [("stack", 1), ("stack", 3), ("stack", 6), ("tied", 2)])
def test_split_keeps_values(cached: Cached, name: str, parts: int):
    model, batch, _ = cached(name, parts)
    same_as_eager(cached.split(name, parts), model, batch)


@given(st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_split_copies_every_task_once_per_microbatch(cached: Cached, parts: int):
    _, _, stages = cached("stack", parts)
    before = [task_of(n).name for n in stages.dag.tasks()]
    dag = cached.split("stack", parts)
    after = [task_of(n).name for n in dag.tasks()]
    wanted = {(n.which, n.region, mb) for n, mb in product(before, range(parts)) if n is not None}
    assert sorted((n.which, str(n.region), n.mb) for n in after) == sorted(
        (which, str(region), mb) for which, region, mb in wanted
    )
    for grad in results_of(dag.graph)["grads"].values():
        assert len(set(grad.args)) == parts
        assert {task_of(producer(p)).name.mb for p in grad.args} == set(range(parts))


@given(st.sets(st.tuples(st.integers(0, STAGES - 1), st.integers(0, 2))))
def test_split_backward_keeps_values_bitwise(cached: Cached, chosen: set[tuple[int, int]]):
    model, batch, _ = cached("stack", 3)
    whole = cached.split("stack", 3)
    want = run(whole, model, batch)
    halves = cached.split("stack", 3)
    SplitBackward({TaskName.parse(f"B.PP{stage}.MB{mb}") for stage, mb in chosen})(halves)
    halves.graph.lint()
    loss, grads = run(halves, model, batch)
    assert torch.equal(loss, want[0])
    assert all(torch.equal(grads[key], grad) for key, grad in want[1].items())
    names = {str(task_of(n)) for n in halves.tasks()}
    for stage, mb in product(range(STAGES), range(3)):
        task = f".PP{stage}.MB{mb}"
        both = {"BI" + task, "BW" + task}
        assert names & {"B" + task, *both} == (both if (stage, mb) in chosen else {"B" + task})


ranks = st.lists(st.integers(0, 2), min_size=STAGES, max_size=STAGES)


def placed(cached: Cached, devices: list[int], name: str = "stack", parts: int = 3) -> Dag:
    """Stages on ranks, numbered so that no rank of the world is idle."""
    number = {rank: i for i, rank in enumerate(sorted(set(devices)))}
    dag = cached.split(name, parts)
    placements = [
        Placement(filter=Filter({"PP": stage}), devices=(number[rank],), label="")
        for stage, rank in enumerate(devices)
    ]
    Place(placements, len(number), sharers=[])(dag)
    return dag


@given(ranks)
def test_place_gives_each_task_its_devices(cached: Cached, devices: list[int]):
    dag = placed(cached, devices)
    number = {rank: i for i, rank in enumerate(sorted(set(devices)))}
    for node in dag.tasks():
        stage = task_of(node).name.tags["PP"]
        assert task_of(node).devices == (number[devices[stage]],)


@pytest.mark.parametrize("devices", [[0, 0], [0, 1], [1, 0]])
def test_tie_counts_every_part_once(cached: Cached, devices: list[int]):
    dag = placed(cached, devices, "tied", 2)
    (key,) = [k for k in results_of(dag.graph)["grads"] if dag.args[int(k)].name == "e"]
    before = results_of(dag.graph)["grads"][key]
    parts = list(before.args)
    Tie()(dag)
    dag.graph.lint()
    totals = results_of(dag.graph)["grads"][key]
    holders = sorted({task_of(producer(p)).devices for p in parts})
    assert [task_of(t).devices for t in totals] == holders
    sums = totals if len(holders) == 1 else list(totals[0].args)
    assert all(list(t.args) == sums for t in totals if task_of(t).kind is Kind.SUM)
    assert sorted(p.name for s in sums for p in s.args) == sorted(p.name for p in parts)
    for one in sums:
        assert {task_of(producer(p)).devices for p in one.args} == {task_of(one).devices}


@given(ranks)
def test_transfer_leaves_every_value_where_it_is_used(cached: Cached, devices: list[int]):
    dag = placed(cached, devices)
    Tie()(dag)
    Transfer()(dag)
    dag.graph.lint()
    pairs = []
    for node in dag.graph.nodes:
        if "task" not in node.meta:
            continue
        task = task_of(node)
        assert task.devices, f"{node} is nowhere"
        if task.kind is Kind.RECV:
            sent = node.args[0]
            assert sent.meta["ranks"]["target"] == task.devices
            pairs.append((sent.args[0].name, task.devices))
            continue
        for source in node.all_input_nodes:
            made = producer(source)
            assert made.op == "placeholder" or task_of(made).devices == task.devices
        if task.kind is Kind.SEND:
            ranks = node.meta["ranks"]
            assert ranks["source"] == task.devices != ranks["target"]
    assert len(set(pairs)) == len(pairs), "a value is sent twice to one group"
    sends = [n for n in dag.graph.nodes if "task" in n.meta and task_of(n).kind is Kind.SEND]
    assert sorted(s.args[0].name for s in sends) == sorted(name for name, _ in pairs)


@given(st.data())
def test_order_accepts_iff_there_is_no_cycle(cached: Cached, data: st.DataObject):
    """A random total order of each stage's six tasks, on a rank of its own."""
    dag = placed(cached, [0, 1, 2, 2])
    Tie()(dag)
    Transfer()(dag)
    orders = []
    chains: list[list[TaskName]] = []
    for stage in range(STAGES):
        names = [task_of(n).name for n in dag.tasks() if task_of(n).name.tags["PP"] == stage]
        forward = [n for n in names if n.which is Pass.F]
        backward = [n for n in names if n.which is Pass.B]
        chain = data.draw(st.permutations(forward)) + data.draw(st.permutations(backward))
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(chain) - 2))
            chain[at], chain[at + 1] = chain[at + 1], chain[at]
        chains.append(chain)
        orders.append(piper.Order([dict(name.tags) for name in chain]))
    if _has_cycle(dag, chains):
        with pytest.raises(PiperPlanError, match="cycle"):
            Order(orders)(dag)
    else:
        before = str(dag.graph)
        Order(orders)(dag)
        assert str(dag.graph) == before
        assert len(dag.orders) == sum(len(chain) - 1 for chain in chains)


def _has_cycle(dag: Dag, chains: list[list[TaskName]]) -> bool:
    """By definition: over names alone, F(s) -> F(s+1), F -> B, B(s+1) -> B(s) and the chains."""
    names = [name for chain in chains for name in chain]
    index = {str(name): i for i, name in enumerate(names)}
    successors: list[list[int]] = [[] for _ in names]
    for name in names:
        stage, mb = name.tags["PP"], name.mb
        me = index[str(name)]
        if name.which is Pass.F:
            successors[me].append(index[f"B.PP{stage}.MB{mb}"])
            if stage + 1 < STAGES:
                successors[me].append(index[f"F.PP{stage + 1}.MB{mb}"])
        elif stage:
            successors[me].append(index[f"B.PP{stage - 1}.MB{mb}"])
    for chain in chains:
        for one, other in pairwise(chain):
            successors[index[str(one)]].append(index[str(other)])
    return bool(find_cycle(successors))
