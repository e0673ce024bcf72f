"""Split: one copy of every task per microbatch.

Signature: one-microbatch DAG -> DAG over the whole batch.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.fx.node import Node

from piper_dynamo.directives import Split as SplitDirective
from piper_dynamo.errors import PiperPlanError, format_error
from piper_dynamo.ir import ops
from piper_dynamo.ir.graph import (
    WEIGHT,
    Dag,
    call,
    producer,
    results_of,
    safe,
    task_of,
)
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind, Task

Shapes = Mapping[str, tuple[int, ...]]


def data_dims(args: Sequence[Arg], split: SplitDirective) -> dict[int, int]:
    """Batch dim of each sliced argument, as a directive says it; see `batch_dims`."""
    return batch_dims(tuple(args), split.num_microbatches, split.inputs, split.where)


def batch_dims(
    args: tuple[Arg, ...], num_microbatches: int, inputs: Mapping[str, int | str] | None, where: str
) -> dict[int, int]:
    """The dim along which each data argument is sliced, by position; the others are replicated.

    By default every data tensor of at least one dim is sliced along dim 0, and all must agree on
    its size. A 0-dim tensor and a number go to every microbatch as they are.

    Raises:
        PiperPlanError: Sizes disagree or do not divide, or `inputs` names an argument that is
            not there.
    """
    data = [a for a in args if a.kind is ArgKind.DATA and a.spec is not None]
    given = dict(inputs or {})
    known = {a.name for a in data} | {_root(a.name) for a in data}
    faults = []
    for name in sorted(set(given) - known):
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        faults.append(
            f"Split(inputs=...) names {name!r}, which is no tensor argument of the model{meant} "
            f"(there are: {', '.join(sorted(known))})"
        )
    dims: dict[int, int] = {}
    for arg in data:
        assert arg.spec is not None
        rule = given.get(arg.name, given.get(_root(arg.name)))
        if rule == "replicate" or (rule is None and not arg.spec.shape):
            continue
        dim = 0 if rule is None else int(rule)
        if not -len(arg.spec.shape) <= dim < len(arg.spec.shape):
            faults.append(f"argument {arg.name!r} of shape {arg.spec.shape} has no dim {dim}")
            continue
        dims[arg.position] = dim % len(arg.spec.shape)
    sizes = {a.name: a.spec.shape[dims[a.position]] for a in data if a.spec and a.position in dims}
    if len(set(sizes.values())) > 1:
        faults.append(
            "the arguments' batch sizes disagree: "
            + ", ".join(f"{name} has {size}" for name, size in sizes.items())
            + '; say which are not sliced, Split(..., inputs={name: "replicate"}), or which dim is'
        )
    for name, size in sizes.items():
        if size == 0 or size % num_microbatches:
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            faults.append(
                f"argument {name!r} has batch {size}, "
                f"which {num_microbatches} microbatches do not divide; "
                f"numbers that do: {divisors or 'none'}"
            )
    if faults:
        raise PiperPlanError(
            format_error(
                "the batch cannot be split",
                {"asked": where, "why": "\n".join(faults)},
                hint="change the batch, num_microbatches or inputs= of piper.Split",
            )
        )
    return dims


def _root(name: str) -> str:
    return name.split("[")[0].split(".")[0]


class Split:
    """Copy every task once per microbatch.

    rewrite:   F.PP0 ; B.PP0  ->  F.PP0.MB0 ; F.PP0.MB1 ; B.PP0.MB0 ; B.PP0.MB1
               gradients summed over microbatches, losses weighted and summed, outputs joined,
               buffers handed on in order
    requires:  every sliced argument's size divides by the number of microbatches
    keeps:     values up to summation order, of the model run on each microbatch in turn
    """

    name = "split"

    def __init__(
        self, num_microbatches: int, dims: dict[int, int], *, weight_per_microbatch: bool
    ) -> None:
        self._parts = num_microbatches
        self._dims = dims
        self._many_weights = weight_per_microbatch

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place."""
        graph = fx.Graph()
        template = dag.graph
        shared: dict[Node, Node] = {}
        for node in template.find_nodes(op="placeholder"):
            if not _is_weight(node):
                shared[node] = _copy_placeholder(graph, node, self._whole(dag, node))
        weights = self._weights(graph, template)
        copies: list[dict[Node, Node]] = []
        results = results_of(template)
        carried = {int(p): node for p, node in results["buffers"].items()}
        state = {n: shared[n] for n in shared if n.meta.get("arg") in carried}
        for mb in range(self._parts):
            values = dict(shared)
            values.update(state)
            for node in template.find_nodes(op="placeholder"):
                if _is_weight(node):
                    values[node] = weights[mb]
                elif self._parts > 1 and ("tangent" in node.meta or node.meta["arg"] in self._dims):
                    values[node] = self._slice(graph, dag, node, shared[node], mb)
            for node in template.nodes:
                if node.op not in ("placeholder", "output"):
                    values[node] = _copy_task(graph, node, values.__getitem__, mb)
            copies.append(values)
            for node in state:
                state[node] = values[carried[node.meta["arg"]]]
                state[node].meta["buffer"] = node.meta["arg"]
        graph.output(self._results(graph, dag, results, copies, weights, carried))
        dag.graph = graph
        dag.num_microbatches = self._parts

    def _whole(self, dag: Dag, node: Node) -> TensorSpec:
        spec: TensorSpec = node.meta["spec"]
        if "tangent" in node.meta:
            return joined_spec(spec, dag.outputs[node.meta["tangent"]].batch_dim, self._parts)
        dim = self._dims.get(node.meta["arg"])
        if dim is None or self._parts == 1:
            return spec
        arg: Arg = dag.args[node.meta["arg"]]
        assert arg.spec is not None
        return arg.spec.contiguous()

    def _weights(self, graph: fx.Graph, template: fx.Graph) -> list[Node]:
        old = [n for n in template.find_nodes(op="placeholder") if _is_weight(n)]
        if not old:
            return []
        count = self._parts if self._many_weights else 1
        made = []
        for mb in range(count):
            node = graph.placeholder(f"{WEIGHT}_{mb}" if self._many_weights else WEIGHT)
            node.meta["spec"] = old[0].meta["spec"]
            made.append(node)
        return made if self._many_weights else made * self._parts

    def _slice(self, graph: fx.Graph, dag: Dag, node: Node, whole: Node, mb: int) -> Node:
        if "tangent" in node.meta:
            dim, label = dag.outputs[node.meta["tangent"]].batch_dim, node.name
        else:
            dim, label = self._dims[node.meta["arg"]], dag.args[node.meta["arg"]].name
        return call(
            graph,
            Task(kind=Kind.SLICE, label=f"{label}.MB{mb}"),
            ops.slice_batch,
            (whole, dim, mb, self._parts),
            name=f"{node.name}_MB{mb}",
            spec=node.meta["spec"],
        )

    def _results(
        self,
        graph: fx.Graph,
        dag: Dag,
        results: dict[str, Any],
        copies: list[dict[Node, Node]],
        weights: list[Node],
        carried: dict[int, Node],
    ) -> dict[str, Any]:
        loss = None
        if results["loss"] is not None:
            losses = [values[results["loss"]] for values in copies]
            where = task_of(producer(results["loss"])).where
            loss = call(
                graph,
                Task(kind=Kind.LOSS, label="loss", where=where),
                ops.weighted_loss,
                (losses, weights),
                name="loss",
                spec=results["loss"].meta["spec"],
            )
        outputs: list[Node | None] = []
        for index, out in enumerate(results["outputs"]):
            if out is None:
                outputs.append(None)
                continue
            outputs.append(self._join(graph, dag, index, [values[out] for values in copies]))
        grads = {}
        for key, partials in results["grads"].items():
            parts = [values[p] for values in copies for p in partials]
            grads[key] = self._gradient(graph, dag.args[int(key)], parts, copies, partials)
        return {
            "loss": loss,
            "outputs": outputs,
            "grads": grads,
            "buffers": {str(p): copies[-1][node] for p, node in carried.items()},
        }

    def _join(self, graph: fx.Graph, dag: Dag, index: int, parts: list[Node]) -> Node:
        if len(parts) == 1:
            return parts[0]
        dim = dag.outputs[index].batch_dim
        return call(
            graph,
            Task(kind=Kind.CONCAT, label=f"output{index}"),
            ops.concat,
            (parts, dim),
            name=f"output_{index}",
            spec=joined_spec(parts[0].meta["spec"], dim, len(parts)),
        )

    def _gradient(
        self,
        graph: fx.Graph,
        arg: Arg,
        parts: list[Node],
        copies: list[dict[Node, Node]],
        partials: list[Node],
    ) -> Node:
        """A parameter's gradient is a sum; a sliced input's is joined from its slices."""
        name = f"grad_{safe(arg.name)}"
        spec = partials[0].meta["spec"]
        if arg.position in self._dims and self._parts > 1:
            dim = self._dims[arg.position]
            per_slice = [
                values[partials[0]]
                if len(partials) == 1
                else call(
                    graph,
                    Task(kind=Kind.SUM, label=arg.name),
                    ops.add,
                    tuple(values[p] for p in partials),
                    name=f"{name}_MB{mb}",
                    spec=spec,
                )
                for mb, values in enumerate(copies)
            ]
            assert arg.spec is not None
            return call(
                graph,
                Task(kind=Kind.CONCAT, label=name),
                ops.concat,
                (per_slice, dim),
                name=name,
                spec=arg.spec.contiguous(),
            )
        return call(
            graph,
            Task(kind=Kind.ACCUMULATE, label=arg.name),
            ops.accumulate,
            tuple(parts),
            name=name,
            spec=spec,
        )


def _is_weight(node: Node) -> bool:
    return "arg" not in node.meta and "tangent" not in node.meta


def joined_spec(spec: TensorSpec, dim: int | None, parts: int) -> TensorSpec:
    """What `ops.concat` makes of `parts` values like this one."""
    if parts == 1:
        return spec
    if dim is None:
        return replace(spec, shape=(parts, *spec.shape)).contiguous()
    shape = (*spec.shape[:dim], spec.shape[dim] * parts, *spec.shape[dim + 1 :])
    return replace(spec, shape=shape).contiguous()


def _copy_placeholder(graph: fx.Graph, node: Node, spec: TensorSpec) -> Node:
    copy = graph.placeholder(node.name)
    copy.meta = {**node.meta, "spec": spec}
    return copy  # its value is the whole batch; one microbatch's spec stays on the slices


def _copy_task(graph: fx.Graph, node: Node, lookup: Callable[[Node], Node], mb: int) -> Node:
    copy = graph.node_copy(node, lookup)
    task = node.meta.get("task")
    if task is not None:
        assert task.name is not None
        name = replace(task.name, mb=mb)
        copy.meta["task"] = replace(task, name=name)
        copy._rename(safe(str(name)))
    else:
        copy._rename(f"{node.name}_MB{mb}")
    return copy
