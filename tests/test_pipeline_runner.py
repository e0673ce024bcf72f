"""The runner of passes: what it writes, what it checks at each level, what it says."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.fx.node import Node

import piper_dynamo as piper
from piper_dynamo import planning
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.ir.graph import Dag, producer, results_of, task_of
from piper_dynamo.ir.task import Kind, RegionId, TaskName
from piper_dynamo.passes.check import value_checker
from piper_dynamo.passes.pipeline import run_passes
from piper_dynamo.passes.split import Split
from tests import jobs
from tests.jobs import LINE2
from tests.models import Dropped, Stack4, rows
from tests.tracing import Stages, capture

NAMES = (
    "split",
    "split_backward",
    "place",
    "tie",
    "shard",
    "replicate",
    "cast",
    "transfer",
    "order",
    "gather",
)


class Broken:
    """A pass that does `change`."""

    name = "broken"

    def __init__(self, change: Callable[[Dag], None]) -> None:
        self._change = change

    def __call__(self, dag: Dag) -> None:
        self._change(dag)


@pytest.fixture(scope="module")
def stages() -> Stages:
    return capture(Stack4(2), rows(4), 2).build()


@pytest.fixture
def split(stages: Stages) -> Dag:
    dag = stages.rebuilt()
    Split(2, stages.dims, weight_per_microbatch=False)(dag)
    return dag


@pytest.fixture(params=[0, 1, 2, 3])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("PIPER_VERIFY", str(request.param))
    return request.param


def run(stages: Stages, dag: Dag, change: Callable[[Dag], None]) -> None:
    check = value_checker(stages.capture, stages.regions, stages.dims)
    assert check is not None
    run_passes(dag, [Broken(change)], check_values=check)


def caught(level: int, from_level: int, call: Callable[[], None], *words: str) -> None:
    """From `from_level` on, the fault is found, and the message has the words."""
    if level < from_level:
        call()
        return
    with pytest.raises((AssertionError, PiperPlanError)) as error:
        call()
    for word in ("broken", *words):
        assert word in str(error.value)


def plan() -> piper.Plan:
    """A plan made anew, not the one that Dynamo's code of the last call holds."""
    torch._dynamo.reset()
    strategy = jobs.strategy(LINE2, 2, "zb_h1")
    return piper.plan(Stack4(2), strategy, rows(4))


def test_dump_writes_a_numbered_file_per_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIPER_DUMP", str(tmp_path / "made" / "here"))
    made = plan()
    (folder,) = (tmp_path / "made" / "here").iterdir()  # of the inputs' sizes
    assert folder.name == "training_" + "_".join("x".join(map(str, x.shape)) for x in rows(4))
    files = sorted(folder.iterdir())
    texts = [f.read_text() for f in files]
    assert [f.name for f in files] == [
        f"{i:02d}_{name}.txt" for i, name in enumerate(("captured", *NAMES))
    ]
    assert "MB0" not in texts[0]
    assert "F_PP0_MB1 = F_PP0(" in texts[1]
    assert ("BI_PP1_MB0" in texts[2]) > ("BI_PP1_MB0" in texts[1])
    assert (" on 1" in texts[3]) > (" on 1" in texts[2])
    assert ("recv(" in texts[8]) > ("recv(" in texts[7])
    assert ("after " in texts[9]) > ("after " in texts[8])
    assert texts[10] == made.graph + "\n"


def test_each_program_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIPER_DUMP", str(tmp_path))
    plan()
    with torch.no_grad():
        plan()
    assert [folder.name.split("_")[0] for folder in sorted(tmp_path.iterdir())] == [
        "forward",
        "training",
    ]


def test_nothing_is_written_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PIPER_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    plan()
    assert list(tmp_path.iterdir()) == []


def test_log_tells_each_pass_its_time_and_size(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="piper.passes"):
        plan()
    lines = [r.getMessage() for r in caplog.records if r.name == "piper.passes"]
    found = [
        re.fullmatch(r"\[(\d+)/(\d+) (\w+)\] [\d.]+ ms  nodes (\d+) -> (\d+)", x) for x in lines
    ]
    assert len(found) == len(NAMES)
    assert all(found)
    assert [m[3] for m in found if m] == list(NAMES)
    sizes = [(int(m[4]), int(m[5])) for m in found if m]
    assert sizes[0][1] > sizes[0][0]
    assert all(a[1] == b[0] for a, b in pairwise(sizes))


def test_a_good_pass_is_not_refused(level: int, stages: Stages, split: Dag):
    run(stages, split, lambda dag: None)


def test_a_node_without_a_record(level: int, stages: Stages, split: Dag):
    def change(dag: Dag) -> None:
        del next(iter(dag.tasks())).meta["task"]

    caught(level, 1, lambda: run(stages, split, change), "F_PP0_MB0", "has no record")


def test_a_task_that_comes_twice(level: int, stages: Stages, split: Dag):
    def change(dag: Dag) -> None:
        first, second = list(dag.tasks())[:2]
        second.meta["task"] = task_of(first)

    caught(level, 1, lambda: run(stages, split, change), "F.PP0.MB0", "comes twice")


def test_a_value_read_before_it_is_made(level: int, stages: Stages, split: Dag):
    def change(dag: Dag) -> None:
        first = next(iter(dag.tasks()))
        dag.graph.find_nodes(op="placeholder")[0].append(first)

    caught(level, 1, lambda: run(stages, split, change), "before it is made")


def test_a_pick_from_no_task(level: int, stages: Stages, split: Dag):
    def change(dag: Dag) -> None:
        pick = next(n for n in dag.graph.nodes if producer(n) is not n)
        (loss,) = [n for n in dag.graph.nodes if n.name == "loss"]
        with dag.graph.inserting_after(loss):
            dag.graph.call_function(pick.target, (loss, 0))

    caught(level, 1, lambda: run(stages, split, change), "picks from no task")


def test_a_receive_of_what_nobody_sends(stages: Stages, split: Dag, monkeypatch):
    monkeypatch.setenv("PIPER_VERIFY", "1")

    def change(dag: Dag) -> None:
        (loss,) = [n for n in dag.graph.nodes if n.name == "loss"]
        with dag.graph.inserting_after(loss):
            received = dag.graph.call_function(len, (loss,))
        received.meta["task"] = replace(task_of(loss), kind=Kind.RECV)

    caught(1, 1, lambda: run(stages, split, change), "receives what nobody sends")


def test_an_order_of_a_task_that_is_gone(level: int, stages: Stages, split: Dag):
    def change(dag: Dag) -> None:
        other = stages.rebuilt()
        dag.orders.append((next(iter(dag.tasks())), next(iter(other.tasks())), "train.py:3"))

    caught(level, 1, lambda: run(stages, split, change), "an order names a task that is gone")


def test_a_name_that_does_not_parse(level: int, stages: Stages, split: Dag):
    def change(dag: Dag) -> None:
        first = next(iter(dag.tasks()))
        task = task_of(first)
        assert task.name is not None
        odd = TaskName(which=task.name.which, region=RegionId(tags=(("P.P", 0),)), mb=0)
        first.meta["task"] = replace(task, name=odd)

    if level < 2:
        run(stages, split, change)
    else:
        with pytest.raises(Exception, match=r"P\.P0"):
            run(stages, split, change)


def lose_a_gradient(dag: Dag) -> None:
    """One microbatch's part of one gradient is not added."""
    grad = next(iter(results_of(dag.graph)["grads"].values()))
    assert task_of(grad).kind is Kind.ACCUMULATE
    grad.args = grad.args[1:]


def test_a_lost_gradient(level: int, stages: Stages, split: Dag):
    caught(level, 3, lambda: run(stages, split, lose_a_gradient), "captured gradient of w.0")


def test_a_gradient_counted_twice(level: int, stages: Stages, split: Dag):
    def change(dag: Dag) -> None:
        grad = list(results_of(dag.graph)["grads"].values())[-1]
        grad.args = (*grad.args, grad.args[0])

    caught(level, 3, lambda: run(stages, split, change), "captured gradient of w.3")


def test_microbatches_swapped(level: int, stages: Stages, split: Dag):
    """The second stage pairs the first microbatch's activations with the second's targets."""

    def change(dag: Dag) -> None:
        first, second = (
            n for n in dag.graph.nodes if n.op == "call_function" and n.name in ("y_MB0", "y_MB1")
        )
        first.args, second.args = second.args, first.args

    caught(level, 3, lambda: run(stages, split, change), "captured loss")


def test_a_broken_pass_of_a_plan_is_caught_and_named(monkeypatch: pytest.MonkeyPatch):
    """Through the public front door."""

    class Lossy(Split):
        def __call__(self, dag: Dag) -> None:
            super().__call__(dag)
            lose_a_gradient(dag)

    monkeypatch.setattr(planning, "Split", Lossy)
    for level in ("0", "1", "2"):
        monkeypatch.setenv("PIPER_VERIFY", level)
        plan()
    monkeypatch.setenv("PIPER_VERIFY", "3")
    with pytest.raises(PiperPlanError) as error:
        plan()
    assert "captured gradient of w.0" in str(error.value)
    assert "split" in str(error.value)


def test_values_are_not_compared_where_they_cannot_be(stages: Stages):
    """Random draws are another chunk's on each run, and a model without a loss has nothing."""
    dropped = capture(Dropped().train(), rows(4)).build()
    assert value_checker(dropped.capture, dropped.regions, dropped.dims) is None
    forward = capture(Stack4(2), rows(4), training=False).build()
    assert value_checker(stages.capture, stages.regions, stages.dims) is not None
    check = value_checker(forward.capture, forward.regions, forward.dims)
    if check is not None:
        check(forward.dag)


@pytest.mark.parametrize("text", ["4", "-1", "high", ""])
def test_a_level_that_is_none_is_refused(stages: Stages, split: Dag, monkeypatch, text: str):
    monkeypatch.setenv("PIPER_VERIFY", text)
    with pytest.raises(piper.PiperError, match="PIPER_VERIFY") as error:
        run(stages, split, lambda dag: None)
    assert "0, 1, 2" in str(error.value)


def test_placed_tasks_are_not_run(stages: Stages, split: Dag, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIPER_VERIFY", "3")
    checked: list[Node] = []

    def note(dag: Dag) -> None:
        checked.append(next(iter(dag.tasks())))

    def place(dag: Dag) -> None:
        for node in dag.tasks():
            node.meta["task"] = replace(task_of(node), devices=(0,))

    run_passes(split, [Broken(lambda dag: None)], check_values=note)
    assert len(checked) == 1
    run_passes(split, [Broken(place)], check_values=note)
    assert len(checked) == 1
