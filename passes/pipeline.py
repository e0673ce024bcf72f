"""The runner: applies the passes in order; it alone verifies, times, dumps and logs.

`PIPER_DUMP=folder` writes the DAG's text before the first pass and after each, for each program in
a folder of its own, such as `training_8x16`.
`PIPER_VERIFY=0|1|2|3` sets what is checked between passes: nothing; structure (default); also that
task names survive printing and parsing; also, while the DAG can still run on one process, that it
computes what the captured graph computes (see `check_values`).
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, PiperStrategyError
from piper_dynamo.ir.graph import Dag, is_pick, print_dag, producer, task_of
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.task import COLLECTIVE_KINDS, Kind, TaskName

_MOST_SIZES = 4  # of the inputs, in a folder's name
log = logging.getLogger("piper.passes")


class GraphPass(Protocol):
    """A rewrite of the DAG in place; options are bound when it is made."""

    name: str

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag`."""


def run_passes(
    dag: Dag,
    passes: Sequence[GraphPass],
    *,
    check_values: Callable[[Dag], None] | None = None,
    done: int = 0,
    total: int | None = None,
) -> None:
    """Apply `passes` in order.

    Args:
        dag: The one-microbatch DAG; rewritten in place.
        passes: What to apply.
        check_values: Called after each pass at level 3 until tasks have devices.
        done: How many passes ran before, where the list comes in parts.
        total: How many there are in all.
    """
    level = verify_level()
    folder = _dump_folder(dag)
    total = total or len(passes)
    if not done:
        _dump(folder, 0, "captured", dag)
    for number, one in enumerate(passes, start=done + 1):
        before = len(dag.graph.nodes)
        start = time.perf_counter()
        one(dag)
        spent = (time.perf_counter() - start) * 1e3
        log.info(
            "[%d/%d %s] %.1f ms  nodes %d -> %d",
            number,
            total,
            one.name,
            spent,
            before,
            len(dag.graph.nodes),
        )
        _dump(folder, number, one.name, dag)
        if level >= 1:
            check_structure(dag, one.name)
        if level >= 2:
            check_names(dag, one.name)
        if level >= 3 and check_values is not None and not _placed(dag):
            try:
                check_values(dag)
            except PiperPlanError as error:
                raise PiperPlanError(f"after {one.name}: {error}") from error


def verify_level() -> int:
    """The level of `PIPER_VERIFY`.

    Raises:
        PiperStrategyError: It is not 0, 1, 2 or 3.
    """
    text = os.environ.get("PIPER_VERIFY", "1")
    if text not in ("0", "1", "2", "3"):
        raise PiperStrategyError(f"PIPER_VERIFY is {text!r}; set it to 0, 1, 2 or 3")
    return int(text)


def _dump_folder(dag: Dag) -> Path | None:
    """A folder of its own for each program of a model: with or without a backward, by its sizes."""
    root = os.environ.get("PIPER_DUMP")
    if not root:
        return None
    sizes = [
        "x".join(map(str, arg.spec.shape))
        for arg in dag.args
        if arg.kind is ArgKind.DATA and arg.spec is not None and arg.spec.shape
    ]
    return Path(root, "_".join(["training" if dag.training else "forward", *sizes[:_MOST_SIZES]]))


def _dump(folder: Path | None, number: int, name: str, dag: Dag) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        text = print_dag(dag) + "\n"
        (folder / f"{number:02d}_{name}.txt").write_text(text, encoding="utf-8")


def _placed(dag: Dag) -> bool:
    return any(task_of(node).devices for node in dag.tasks())


def check_structure(dag: Dag, after: str) -> None:
    """Nodes read earlier nodes, have their records, and pick what tasks give; orders hold."""
    seen: set[Node] = set()
    names: set[TaskName] = set()
    for node in dag.graph.nodes:
        for source in node.all_input_nodes:
            assert source in seen, f"after {after}: {node} reads {source} before it is made"
        seen.add(node)
        if node.op in ("placeholder", "output"):
            continue
        if is_pick(node):
            kind = task_of(producer(node)).kind
            assert kind is Kind.COMPUTE or kind in COLLECTIVE_KINDS, (
                f"after {after}: {node} picks from no task"
            )
            continue
        task = node.meta.get("task")
        assert task is not None, f"after {after}: {node} has no record"
        if task.kind is Kind.COMPUTE:
            assert task.name not in names, f"after {after}: task {task.name} comes twice"
            names.add(task.name)
        if task.kind is Kind.RECV:
            sent = node.args[0]
            assert task_of(sent).kind is Kind.SEND, (
                f"after {after}: {node} receives what nobody sends"
            )
    for before, later, _ in dag.orders:
        assert {before, later} <= seen, f"after {after}: an order names a task that is gone"


def check_names(dag: Dag, after: str) -> None:
    """Task names survive printing and parsing."""
    for node in dag.tasks():
        name = task_of(node).name
        assert name is not None
        assert TaskName.parse(str(name)) == name, f"after {after}: {name}"
