"""What forward assigns to attributes of modules: `self.calls += 1`, `self.ema = f(self.ema, x)`.

Of a registered buffer that forward reads, an assignment is a change in place: the buffer keeps its
memory, and every microbatch sees the value that the last one left. Anything else would be a tensor
of one microbatch that outlives the step, which is refused; so are tensors that are left in lists,
dicts and other objects of the module, `self.losses.append(loss)`. Numbers that are left there are
told: they change once in a step.

Signature: Dynamo's graph of a call -> the same with the buffers changed in place.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo.errors import PiperCaptureError, format_error
from piper_dynamo.ir.alias import called
from piper_dynamo.ir.spec import user_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What a call does beside computing.

    Attributes:
        stores: The argument that each output stands for which forward assigns to a buffer.
        changed: What it changes of Python's objects, of those that are still there.
    """

    stores: Mapping[int, int] = field(default_factory=dict)
    changed: tuple[Callable[[], dynamo.Change | None], ...] = ()


_ASSIGNED = (
    "assign to registered buffers alone, values without a gradient (.detach()), "
    "or change them in place: self.last.copy_(...); return what you want to see"
)
_NORMED = (
    "in the place of torch.nn.utils.weight_norm take torch.nn.utils.parametrizations.weight_norm"
)


def take_effects(gm: fx.GraphModule) -> Effects:
    """Make of assigned buffers changes in place.

    rewrite:   return (..., new)  ->  buffer.copy_(new) ; return (..., None)
    requires:  the buffer is an argument of the graph; `new` has its shape and dtype and no gradient
    keeps:     what forward computes; the caller puts the buffer itself in the place of None

    Raises:
        PiperCaptureError: Something else is assigned.
    """
    graph = gm.graph
    nodes = {node.name: node for node in graph.nodes}
    arguments: dict[int, Node] = {}  # by the id of the tensor; of one that is given twice the first
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(given := compat.example_of(node), Tensor):
            arguments.setdefault(id(given), node)
    stores = [
        _Store(name=name, new=nodes.get(of), buffer=arguments.get(id((buffers or {}).get(name))))
        for buffers, name, of in dynamo.attribute_stores()
    ]
    _refuse(stores, {where: nodes.get(of) for where, of in dynamo.kept_tensors()})
    found = _make_in_place(graph, stores)
    gm.recompile()
    return Effects(stores=found, changed=_told())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Store:
    """An assignment: to which attribute, the value, and the buffer's argument, if it is one's."""

    name: str
    new: Node | None
    buffer: Node | None


def _refuse(stores: list[_Store], kept: Mapping[str, Node | None]) -> None:
    """Refuse what would be no change of a buffer, and tensors that are left elsewhere.

    Raises:
        PiperCaptureError: All of them, each with its line.
    """
    faults = {where: f"is given a tensor{_made_at(new)}" for where, new in kept.items()}
    for one in stores:
        if fault := _fault(one):
            faults[f"self.{one.name}"] = f"{fault}{_made_at(one.new)}"
    if not faults:
        return
    normed = any(one.new is not None and "weight_norm" in called(one.new) for one in stores)
    raise PiperCaptureError(
        format_error(
            "forward assigns a new tensor to an attribute of the module",
            faults,
            hint=_NORMED if normed else _ASSIGNED,
        )
    )


def _make_in_place(graph: fx.Graph, stores: list[_Store]) -> dict[int, int]:
    """Copy each value into its buffer, and leave it out of the outputs.

    Returns:
        The position of the buffer's argument, by that of the output.
    """
    (end,) = graph.find_nodes(op="output")
    outputs = list(end.args[0])
    positions = {node: k for k, node in enumerate(graph.find_nodes(op="placeholder"))}
    found: dict[int, int] = {}
    for one in stores:
        assert one.new is not None, one
        assert one.buffer is not None, one
        if not _is_in_place(one.new, one.buffer):
            with graph.inserting_before(end):
                change = graph.call_method("copy_", (one.buffer, one.new))
                change.meta = dict(one.new.meta)
        for index, output in enumerate(outputs):
            if output is one.new:
                found[index], outputs[index] = positions[one.buffer], None
    end.args = (tuple(outputs),)
    return found


def _told() -> tuple[Callable[[], dynamo.Change | None], ...]:
    """What forward changes of Python's objects; says what becomes of that, at forward's line."""
    changed = dynamo.changes()
    names = dict.fromkeys(name for one in changed for name in one.told)
    if names:
        file, line, variables = dynamo.traced_place()
        warnings.warn_explicit(
            f"forward changes {', '.join(names)}: once in a step, not for each "
            "microbatch, and the model is captured again where it reads another value; count in a "
            "buffer, self.count.add_(1)",
            UserWarning,
            file,
            line,
            module=variables.get("__name__"),
            registry=variables.setdefault("__warningregistry__", {}),  # said once for a line
        )
    return tuple(one.lasting() for one in changed)


def _made_at(node: Node | None) -> str:
    line = user_line(node) if node is not None else ""
    return f" at {line}" if line else ""


def _fault(one: _Store) -> str:
    """Why an assignment is no change of a buffer in place; empty where it is."""
    value: Any = one.new.meta.get("example_value") if one.new is not None else None
    if not isinstance(value, Tensor):
        return "is no tensor of this call"
    if one.buffer is None:
        return "is no registered buffer that forward reads"
    old = one.buffer.meta["example_value"]
    if value.shape != old.shape or value.dtype != old.dtype:
        was = f"{str(old.dtype).removeprefix('torch.')}{tuple(old.shape)}"
        return f"is given {str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}, was {was}"
    return "is given a value with a gradient" if value.requires_grad else ""


def _is_in_place(node: Node, buffer: Node) -> bool:
    """Whether a value is the buffer itself after changes in place: what `+=` and `add_` give."""
    while node is not buffer:
        name = called(node)
        changes = (node.op == "call_method" and name.endswith("_")) or (
            node.op == "call_function" and name in _IN_PLACE
        )
        if not changes or not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return True


_IN_PLACE = {
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "imatmul"),
}
