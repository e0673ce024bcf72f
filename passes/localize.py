"""Localize: expert chunks made for the experts of one rank, and for any number of rows.

Terms: *rows* are as in `rows.py`; a chunk is *local* once its parameters are one rank's experts.
Its captured number of rows, the even share, stays in its specs. A *static* chunk always gets the
captured number, as many of each expert and rank: `static.py` does the rest for it.

Signature: a task's chunk -> a local chunk, or why there cannot be one. A graph is traced twice,
with the captured rows and with others: what changes is rows, what breaks is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from piper_dynamo import _torch_compat as compat
from piper_dynamo.ir import ops
from piper_dynamo.ir.chunk import Chunk, copied, make_chunk, runnable, spec_of
from piper_dynamo.ir.graph import Border, Dag, border_of, producer
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.spec import TensorSpec, user_line
from piper_dynamo.ir.task import Kind
from piper_dynamo.passes.rows import ONLY_ROWS, Unfit, free_views, mixing, sizes_refused
from piper_dynamo.passes.static import multiply_in_batches, share_experts, sort_by_expert


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A value's spec with the rows that were captured, and with another number of them."""

    usual: TensorSpec
    other: TensorSpec

    @property
    def is_rows(self) -> bool:
        return self.usual != self.other


@dataclass(slots=True)
class _Local:
    """A local chunk and what is known of its outputs."""

    chunk: Chunk
    outputs: list[_Seen | None] = field(default_factory=list)


class Localizer:
    """Makes expert chunks for the experts of one rank and for any number of rows."""

    def __init__(self, dag: Dag) -> None:
        self.faults: list[str] = []
        self._dag = dag
        self._made: dict[tuple[str, int], _Local | None] = {}
        self._of: dict[Node, _Local | None] = {}

    def __call__(self, node: Node, size: int, where: str, *, is_static: bool = False) -> None:
        """Replace a task's chunk.

        Args:
            node: The task.
            size: Among how many ranks its experts are split.
            where: The task, for a message.
            is_static: Whether it is in a static region.
        """
        key = (str(node.target), size)
        if key not in self._made:
            self._made[key] = self._localize(node, size, where, is_static=is_static)
        local = self._made[key]
        self._of[node] = local
        if local is None:
            return
        name = f"{node.target}_of_{size}"
        self._dag.chunks[name] = local.chunk
        node.target = name
        node.meta["phase"] = replace(node.meta["phase"], chunk=local.chunk)
        for value in node.users:
            slot = int(str(value.args[1]))
            seen = local.outputs[slot] if slot < local.chunk.num_results else None
            if seen is None:
                continue
            value.meta["spec"] = seen.usual
            for user in value.users:
                task = user.meta.get("task")
                if task is not None and task.kind in (Kind.ACCUMULATE, Kind.SUM):
                    user.meta["spec"] = seen.usual

    def _localize(self, node: Node, size: int, where: str, *, is_static: bool) -> _Local | None:
        chunk = node.meta["phase"].chunk
        inputs = self._inputs(node, size)
        if inputs is None:
            return None
        graph = copied(chunk.graph)
        rows = [i.usual.shape[0] for i in inputs if i.is_rows]
        if rows:
            free_views(graph, rows[0])
        if is_static:
            share_experts(graph, size)
        try:
            other = _propagate(graph, [i.other for i in inputs])
            shapes = {n: _shape(n) for n in graph.nodes}
            usual = _propagate(graph, [i.usual for i in inputs])
            _check_rows(graph, shapes, rows[0] if rows else 0)
            if is_static:
                multiply_in_batches(graph)
                sort_by_expert(graph, *_arriving(node), size=size)
                usual = _propagate(graph, [i.usual for i in inputs])
        except Unfit as error:
            what = "be computed by several ranks" if size > 1 else "have a capacity"
            self.faults.append(f"{where} cannot {what}: {error}\n  hint  {ONLY_ROWS}")
            return None
        outputs = [
            _Seen(usual=a, other=b) if a is not None and b is not None else None
            for a, b in zip(usual, other, strict=True)
        ]
        made = make_chunk(graph, chunk.num_results)
        return _Local(replace(made, is_ragged=not is_static), outputs)

    def _inputs(self, node: Node, size: int) -> list[_Seen] | None:
        """What the chunk's placeholders are on one rank; None where a task before has failed."""
        phase = node.meta["phase"]
        found: list[_Seen] = []
        for place, source in enumerate(node.args):
            assert isinstance(source, Node)
            if phase.takes_bundle and place == len(phase.primals):
                before = self._of.get(producer(source))
                if before is None:
                    return None
                bundle = before.outputs[before.chunk.num_results :]
                for seen in bundle:
                    assert seen is not None, f"{node} keeps something that is no tensor"
                    found.append(seen)
                continue
            found.append(self._input(source, size))
        return found

    def _input(self, source: Node, size: int) -> _Seen:
        spec: TensorSpec = source.meta["spec"]
        position = source.meta.get("arg")
        if position is not None:
            if self._dag.args[position].kind is ArgKind.PARAMETER:
                spec = ops.block_spec(spec, size)
            return _Seen(usual=spec, other=spec)
        local = self._of.get(producer(source))
        if local is not None:
            seen = local.outputs[int(str(source.args[1]))]
            assert seen is not None
            return seen
        border = source.meta["border"]
        if border.kind is Kind.EXCHANGE_COUNTS:
            spec = ops.block_spec(spec, size)
            return _Seen(usual=spec, other=spec)
        rows = 2 * spec.shape[0] + (border.experts or 1)
        return _Seen(usual=spec, other=replace(spec, shape=(rows, *spec.shape[1:])).contiguous())


def _arriving(node: Node) -> tuple[dict[int, int], dict[int, int]]:
    """Which inputs and results of a task's chunk pass a border, and how many experts there are."""
    phase = node.meta["phase"]
    inputs: dict[int, int] = {}
    late = len(phase.chunk.inputs) - len(node.args)  # a bundle is one argument, and many inputs
    for place, source in enumerate(node.args):
        border = source.meta.get("border") if isinstance(source, Node) else None
        if isinstance(border, Border) and border.experts is not None:
            is_first = place < len(phase.primals)
            inputs[place if is_first else place + late] = border.experts
    results: dict[int, int] = {}
    for value in node.users:
        border = border_of(value, Kind.UNEXCHANGE)
        if border is not None and border.experts is not None:
            results[int(str(value.args[1]))] = border.experts
    return inputs, results


class _Propagation(FakeTensorProp):
    """Says which operator cannot take the sizes it is given."""

    def run_node(self, n: Node) -> Any:
        """Compute one node."""
        with sizes_refused(n):
            return super().run_node(n)


def _propagate(graph: fx.Graph, specs: Sequence[TensorSpec]) -> list[TensorSpec | None]:
    """The outputs' specs for inputs of these; every node's value in `meta` is for them.

    Raises:
        Unfit: An operator cannot take these sizes.
    """
    mode = compat.FakeTensorMode()
    with mode:
        values = [
            torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device) for s in specs
        ]
    prop = _Propagation(runnable(graph), mode)
    prop.extra_traceback = False  # it would add to messages, and change the type of some errors
    prop.propagate_dont_convert_inputs(*values)
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    return [spec_of(n) if isinstance(n, Node) else None for n in outputs]


def _shape(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in value]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _dims(node: Node) -> int:
    shape = _shape(node)
    return len(shape) if isinstance(shape, tuple) else 0


def _check_rows(graph: fx.Graph, other: dict[Node, Any], rows: int) -> None:
    """Operators on rows treat every row alike.

    Args:
        graph: With values for the usual number of rows.
        other: Every node's shape for another number.
        rows: The usual number.

    Raises:
        Unfit: One may not, or moves the rows to another dim.
    """

    def changes(value: Any) -> bool:
        return isinstance(value, Node) and _shape(value) != other[value]

    for node in graph.nodes:
        operands = [n for n in node.all_input_nodes if changes(n)]
        if node.op != "call_function" or not operands:
            continue
        why = mixing(node, changes, _dims(operands[0]))
        if not why and changes(node) and isinstance(_shape(node), tuple):
            usual, now = _shape(node), other[node]
            moved = usual[1:] != now[1:] or usual[0] != rows
            why = f"{node} moves the rows" if moved else ""
        if why:
            raise Unfit(f"{user_line(node)} {why}")
