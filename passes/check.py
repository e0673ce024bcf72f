"""Level 3 of `PIPER_VERIFY`: run the DAG on one process, compare it with the captured graph.

Signature: DAG before placement, captured graph -> nothing, or a refusal that names what differs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.ir.alias import draws
from piper_dynamo.ir.graph import Dag
from piper_dynamo.ir.joint import ArgKind, Capture
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.passes.regions import Regions

# What crosses a border was made contiguous after what views it was traced: see `cut.py`.
_VIEWS: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


def value_checker(
    capture: Capture, regions: Regions, dims: dict[int, int]
) -> Callable[[Dag], None] | None:
    """A check that a DAG computes the captured loss and gradients.

    None where there is nothing to compare: the graph draws random numbers, or has no loss.
    """
    if capture.loss is None or any(map(draws, capture.graph.nodes)):
        return None

    def check(dag: Dag) -> None:
        parts = dag.num_microbatches
        inputs = _inputs(capture, dims, parts)
        with compat.no_autocast():  # operators were traced with their casts
            have = _run_dag(dag, inputs, 1.0 / parts)
            want = _run_capture(capture, regions, inputs, dims, parts)
        for name, value in want.items():
            rtol, atol = _tolerances(value)
            if not torch.allclose(have[name], value, rtol=rtol, atol=atol, equal_nan=True):
                gap = (have[name] - value).abs().max().item()
                raise PiperPlanError(
                    f"the DAG does not compute the captured {name}: largest difference {gap:.3g}"
                )

    return check


def _inputs(capture: Capture, dims: dict[int, int], parts: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for arg in capture.args:
        if arg.kind is ArgKind.NUMBER:
            continue
        node = next(n for n in capture.graph.nodes if n.name == capture.placeholders[arg.position])
        spec = TensorSpec.of(node.meta["val"])
        shape = list(spec.shape)
        if arg.position in dims:
            shape[dims[arg.position]] *= parts
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(spec.dtype)
        else:
            value = torch.zeros(shape, dtype=spec.dtype)
        found[arg.position] = value
    return found


def _run_dag(dag: Dag, inputs: dict[int, Tensor], weight: float) -> dict[str, Tensor]:
    values: list[Any] = []
    for node in dag.graph.find_nodes(op="placeholder"):
        position = node.meta.get("arg")
        spec = node.meta["spec"]
        values.append(
            torch.tensor(weight, dtype=spec.dtype) if position is None else inputs[position]
        )
    with torch.no_grad():
        results = dag.module()(*values)
    found = {"loss": results["loss"]}
    for key, grad in results["grads"].items():
        total = sum(grad[1:], grad[0]) if isinstance(grad, list | tuple) else grad
        found[f"gradient of {dag.args[int(key)].name}"] = total
    return found


def _run_capture(
    capture: Capture, regions: Regions, inputs: dict[int, Tensor], dims: dict[int, int], parts: int
) -> dict[str, Tensor]:
    position_of = {name: p for p, name in capture.placeholders.items()}
    carried = dict(inputs)
    losses: list[Tensor] = []
    grads: dict[int, list[Tensor]] = {}
    for part in range(parts):
        values: dict[Node, Any] = {}
        for node in capture.graph.nodes:
            if node.op == "placeholder":
                values[node] = _microbatch(node, position_of, carried, dims, part, parts)
            elif node.op == "get_attr":
                values[node] = node.meta["constant"]
            elif node.op == "call_function":
                args = fx.node.map_arg(node.args, values.__getitem__)
                kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
                with torch.no_grad():
                    values[node] = _VIEWS.get(node.target, node.target)(*args, **kwargs)
        by_name = {n.name: v for n, v in values.items()}
        assert capture.loss is not None
        loss_node = capture.outputs[capture.loss].node
        assert loss_node is not None
        losses.append(by_name[loss_node] / parts)
        for position, partials in regions.partials.items():
            total = sum(values[n] for n in partials.values())
            assert isinstance(total, Tensor)
            grads.setdefault(position, []).append(total)
        carried.update({p: by_name[n] for p, n in capture.buffers.items()})
    found = {"loss": torch.stack(losses).sum()}
    for position, partial in grads.items():
        sliced = position in dims and parts > 1
        found[f"gradient of {capture.args[position].name}"] = (
            torch.cat(partial, dims[position]) if sliced else torch.stack(partial).sum(0)
        )
    return found


def _microbatch(
    node: Node,
    position_of: dict[str, int],
    inputs: dict[int, Tensor],
    dims: dict[int, int],
    part: int,
    parts: int,
) -> Any:
    position = position_of.get(node.name)
    if position is None:
        return torch.tensor(1.0 / parts, dtype=node.meta["val"].dtype)
    value = inputs.get(position)
    if value is None:  # a number: burnt into the graph when it was traced
        return 0
    if position in dims:
        return value.chunk(parts, dims[position])[part].contiguous()
    return value


def _tolerances(value: Tensor) -> tuple[float, float]:
    """Relative and absolute: in few bits, a sum in another order differs by some of the last."""
    step = 4 * torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
    finite = value[torch.isfinite(value)]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return max(step, 1e-4), max(step * largest, 1e-5)
