"""The Global Training DAG: one step of the whole job as an FX graph.

Nodes: placeholders (parameters, buffers, data, loss weights), `call_module` for chunks,
`call_function` for slices, accumulation, communication and the pick of one result
(`operator.getitem`). Every node but placeholders and picks has a frozen `Task` in `meta["task"]`;
every value has a `TensorSpec` in `meta["spec"]`, messages and collectives say in `meta["ranks"]`
between which ranks they are, and what a microbatch leaves of a buffer to the
next has that buffer's position in `meta["buffer"]`; orders are kept beside the graph as pairs of
nodes, the only edges that carry no value. The output node names what a step gives back.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, Node

from piper_dynamo.ir.chunk import Chunk, runnable
from piper_dynamo.ir.joint import Arg, ArgKind, Output
from piper_dynamo.ir.ops import block_spec
from piper_dynamo.ir.program import Groups, copy_groups
from piper_dynamo.ir.spec import Source, TensorSpec
from piper_dynamo.ir.task import Kind, Pass, RegionId, Task, TaskName

WEIGHT = "weight"  # name of the placeholder(s) that scale a microbatch's loss and tangent


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks of a device group hold a replicated parameter.

    Attributes:
        bucket: Parameters of one bucket are gathered and reduced as one.
        expert_groups: Each group's ranks share the experts of one copy, and their tasks use a
            rank's own alone; none where tasks use the whole parameter.
        shard_groups: Each group's ranks hold a block of rows each of what their tasks use, which
            is gathered for these; none where they hold it.
        stream: Logical stream of its gathers.
        prefetch: How many uses ahead it is gathered.
        keep: How long it stays: "chunk", "step", or how many buckets do.
        reduced: Whether the step reduces its gradient.
        where: The directive that says so.
    """

    bucket: str
    shard_groups: Groups
    stream: str
    prefetch: int
    keep: str | int
    reduced: bool
    where: str
    expert_groups: Groups = ()

    @property
    def groups(self) -> Groups:
        """Rows of ranks that hold a block each: of copies, or of each rank's experts."""
        return self.shard_groups or self.expert_groups

    def used(self, spec: TensorSpec) -> TensorSpec:
        """What a rank's tasks use of a parameter."""
        return block_spec(spec, len(self.expert_groups[0])) if self.expert_groups else spec

    def held(self, spec: TensorSpec) -> TensorSpec:
        """The block of a parameter that a rank holds."""
        used = self.used(spec)
        return block_spec(used, len(self.shard_groups[0])) if self.shard_groups else used

    def users(self, devices: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The ranks whose tasks use what this one's use: the gradient is the sum of theirs."""
        if not self.expert_groups:
            return devices
        return next((g for g in copy_groups(self.expert_groups) if rank in g), (rank,))

    def reduced_over(self, devices: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
        """The ranks over which the gradient is summed, by the collective that does it."""
        users = self.users(devices, rank)
        if not self.shard_groups:
            return {"all_reduce": users} if len(users) > 1 else {}
        found = {"reduce_scatter": next(g for g in self.shard_groups if rank in g)}
        if self.expert_groups:  # the blocks of one rank's experts have no copies
            return found
        copies = [g for g in copy_groups(self.shard_groups) if rank in g]
        return found | ({"all_reduce": copies[0]} if copies else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """What a value that experts get or give passes on its way; in `meta["border"]`.

    Attributes:
        kind: EXCHANGE or UNEXCHANGE; EXCHANGE_COUNTS of the counts themselves.
        routing: The counts by which rows are exchanged.
        experts: Where these take as many rows each, whatever the counts: how many there are.
    """

    kind: Kind
    routing: str
    experts: int | None = None


@dataclass(slots=True, kw_only=True)
class Dag:
    """The DAG and what its names mean.

    Attributes:
        graph: The FX graph.
        chunks: Code of each `call_module` target.
        args: The captured call's arguments; a placeholder's `meta["arg"]` is one's position.
        outputs: The captured call's outputs.
        loss: Which of them is the loss.
        regions: Regions in forward order, with the first user line of each.
        sources: The modules and user lines that each region comes from.
        num_microbatches: 1 before the batch is split.
        orders: Pairs (before, after) of task nodes; with the directive's own line.
        training: Whether there is a backward.
        layouts: How each replicated parameter is held, by position and device group.
        makers: The device groups that make parts of each gradient, by the argument's position.
        draws: The number of each region's first operator that draws random numbers, of all of the
            model's.
        computed: The dtype in which chunks take a parameter, by position, where it is not the one
            that it is held in.
    """

    graph: fx.Graph
    chunks: dict[str, Chunk]
    args: tuple[Arg, ...]
    outputs: tuple[Output, ...]
    loss: int | None
    regions: dict[RegionId, str]
    num_microbatches: int = 1
    orders: list[tuple[Node, Node, str]] = field(default_factory=list)
    training: bool = True
    layouts: dict[tuple[int, tuple[int, ...]], Layout] = field(default_factory=dict)
    makers: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    draws: dict[RegionId, int] = field(default_factory=dict)
    computed: Mapping[int, torch.dtype] = field(default_factory=dict)
    sources: Mapping[RegionId, tuple[Source, ...]] = field(default_factory=dict)

    def tasks(self) -> Iterator[Node]:
        """Compute nodes, empty phases included, in graph order."""
        for node in self.graph.nodes:
            task = node.meta.get("task")
            if task is not None and task.kind is Kind.COMPUTE:
                yield node

    def seed(self, name: TaskName) -> tuple[int, int]:
        """What a task's random numbers depend on: the microbatch, and which draws they are.

        Draws are numbered over the whole model, so that they are the same however it is cut.
        """
        return name.mb or 0, self.draws.get(name.region, 0)

    def contributors(self, position: int, place: int) -> tuple[int, ...]:
        """The ranks whose parts a gradient is the sum of.

        Args:
            position: The argument's.
            place: Of the rank that ends with the gradient, in its device group.
        """
        found: set[int] = set()
        is_held = self.args[position].kind is ArgKind.PARAMETER
        for devices in self.makers.get(position, ()):
            layout = self.layouts.get((position, devices))
            own = devices[place]
            if layout is None:  # copies of a parameter, whatever passes made of them
                found.update(devices if is_held else (own,))
            elif layout.reduced:
                found.update(layout.users(devices, own))
            else:
                found.add(own)
        return tuple(sorted(found))

    def module(self) -> fx.GraphModule:
        """A module that runs the DAG on one process; only before placement."""
        root = torch.nn.Module()
        for target, chunk in self.chunks.items():
            root.add_module(target, _ChunkModule(chunk))
        return fx.GraphModule(root, self.graph)


class _ChunkModule(torch.nn.Module):
    """Runs a chunk operator by operator; bundles travel as tuples."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self._run = runnable(chunk.graph)
        self._num_results = chunk.num_results

    def forward(self, *args: Any) -> tuple[Any, ...]:
        flat: list[Any] = []
        for arg in args:
            flat.extend(arg) if isinstance(arg, tuple) else flat.append(arg)
        results = self._run(*flat)
        bundle = tuple(results[self._num_results :])
        return (*results[: self._num_results], bundle)


def task_of(node: Node) -> Task:
    """The record of a node that has one."""
    task = node.meta["task"]
    assert isinstance(task, Task)
    return task


def border_of(node: Node, kind: Kind) -> Border | None:
    """The border of this kind that a value passes, if it does."""
    border = node.meta.get("border")
    return border if isinstance(border, Border) and border.kind is kind else None


def pick(graph: fx.Graph, node: Node, index: int, name: str, spec: TensorSpec | None) -> Node:
    """The node of one result of a task."""
    picked = graph.create_node("call_function", operator.getitem, (node, index), name=name)
    if spec is not None:
        picked.meta["spec"] = spec
    return picked


def is_pick(node: Node) -> bool:
    """Whether a node only picks one result of a task."""
    return node.target is operator.getitem


def producer(node: Node) -> Node:
    """The node that does the work behind a value: the task of a pick, else the node itself."""
    if is_pick(node):
        source = node.args[0]
        assert isinstance(source, Node)
        return source
    return node


def call(
    graph: fx.Graph,
    task: Task,
    target: Any,
    args: tuple[Argument, ...],
    ranks: Mapping[str, Any] | None = None,
    *,
    name: str,
    spec: TensorSpec | None = None,
) -> Node:
    """A new node with its record.

    Args:
        graph: Where.
        task: Its record.
        target: A chunk's name, or a function of `ops.py`.
        args: What it reads.
        ranks: Of a message its `source` and `target`, of a collective its `groups`. In `meta`, not
            among the arguments, which FX would walk one by one for each node.
        name: The node's.
        spec: Of its value, if it is one.
    """
    op = "call_module" if isinstance(target, str) else "call_function"
    node = graph.create_node(op, target, args, {}, name=name)
    node.meta["task"] = task
    if ranks is not None:
        node.meta["ranks"] = ranks
    if spec is not None:
        node.meta["spec"] = spec
    return node


def collective(
    graph: fx.Graph,
    task: Task,
    target: Any,
    values: Sequence[Node],
    groups: tuple[tuple[int, ...], ...],
    *,
    name: str,
    results: Sequence[tuple[str, TensorSpec]],
) -> tuple[Node, ...]:
    """One collective over several values: a pick per value, with the names and specs given."""
    node = call(graph, task, target, (list(values),), {"groups": groups}, name=name)
    picks: list[Node] = []
    for index, (label, spec) in enumerate(results):
        with graph.inserting_after(picks[-1] if picks else node):
            picks.append(pick(graph, node, index, label, spec))
    return tuple(picks)


def safe(text: str) -> str:
    """An identifier made of a task's or value's text."""
    return "".join(c if c.isalnum() else "_" for c in text)


def chunk_name(which: Pass, region: RegionId) -> str:
    """The identifier of a region's chunk, `F_PP0_EP1`.

    Underscores of tags are doubled: the regions `A1.B2` and, of a tag `A1_B`, `A1_B2` are two.
    """
    return safe(f"{which}.{region}".replace("_", "__"))


def results_of(graph: fx.Graph) -> dict[str, Any]:
    """What the step gives back: `loss`, `outputs`, `grads` and `buffers`, by argument position."""
    (output,) = graph.find_nodes(op="output")
    found = output.args[0]
    assert isinstance(found, dict)
    return found


def print_dag(dag: Dag, *, specs: bool = True) -> str:
    """A stable text: one line per node, its task first.

    F.PP0.MB0     F_PP0_MB0 = F_PP0(w_0, x_0)                  on 0
    """
    lines: list[str] = []
    after: dict[Node, list[str]] = {}
    for before, later, _ in dag.orders:
        after.setdefault(later, []).append(before.name)
    for node in dag.graph.nodes:
        if node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
            continue
        task = node.meta.get("task")
        spec = node.meta.get("spec")
        call = "input" if node.op == "placeholder" else _call_text(node)
        line = f"{node.name} = {call}"
        notes = []
        if specs and spec is not None:
            notes.append(str(spec))
        if task is not None:
            if task.devices:
                notes.append("on " + ",".join(map(str, task.devices)))
            if task.stream != "compute":
                notes.append(f"stream {task.stream}")
        if node in after:
            notes.append("after " + ", ".join(after[node]))
        lines.append(line + (f"    # {'; '.join(notes)}" if notes else ""))
    return "\n".join(lines)


def _call_text(node: Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if is_pick(node):
        return f"{node.args[0]}[{node.args[1]}]"
    named = {**node.kwargs, **node.meta.get("ranks", {})}
    parts = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in named.items()]
    return f"{target}({', '.join(parts)})"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_text(v) for v in value) + "]"
    return str(value)
