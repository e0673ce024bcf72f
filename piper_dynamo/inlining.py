"""Regions that are traced once, put in place of their calls.

`torch.compiler.nested_compile_region` lets Dynamo trace a part of a model once and call it again
with other parameters. Here every call is to be placed by itself, so each gets a copy of the body,
which says of what modules and tags *its* operators are; equal chunks are compiled once anyway.

Signature: Dynamo's graph -> the same without `invoke_subgraph`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.node import Node, map_arg

from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo.ir.alias import operator_name
from piper_dynamo.ir.joint import ENTRY
from piper_dynamo.ir.spec import ROOT, paths_in
from piper_dynamo.naming import is_module_state, user_name

_NEXT = 2**32  # annotations without an index are numbered anew in every call


def inline_regions(gm: fx.GraphModule) -> None:
    """Rewrite Dynamo's graph, and those inside of it, in place.

    rewrite:   y = invoke_subgraph(body, name, w, x)  ->  the body's operators, on w and x
    keeps:     values; every node's meta, with the modules and tags of its own call
    """
    for one in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        while calls := [n for n in one.graph.nodes if operator_name(n) == "invoke_subgraph"]:
            alike: dict[str, list[Node]] = {}
            for call in calls:
                body = call.args[0]
                assert isinstance(body, Node)
                alike.setdefault(str(body.target), []).append(call)
                _inline(one, call, body, alike[str(body.target)])
            for call in calls:
                one.graph.erase_node(call)
            one.recompile()


def _inline(gm: fx.GraphModule, call: Node, body: Node, alike: Sequence[Node]) -> None:
    """Copy a body before a call of it, whose results are then the copies'."""
    inner = getattr(gm, str(body.target))
    operands = call.args[2:]
    values: dict[Node, Any] = {}
    moved = _moved(alike[0].args[2:], operands)
    number = len(alike) - 1
    result: Any = None
    with gm.graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                values[node] = operands[len(values)]
            elif node.op == "output":
                result = map_arg(node.args[0], values.__getitem__)
            elif node.op == "get_attr":
                name = f"{str(body.target).replace('.', '_')}_{str(node.target).replace('.', '_')}"
                setattr(gm, name, getattr(inner, str(node.target)))
                values[node] = gm.graph.get_attr(name)
                values[node].meta = dict(node.meta)
            else:
                copy = gm.graph.node_copy(node, values.__getitem__)
                copy.meta = {
                    **node.meta,
                    "nn_module_stack": _stack(node, call, moved),
                    "custom": _custom(node, call, alike[0], number),
                }
                values[node] = copy
    for user in list(call.users):  # Dynamo picks each result
        user.replace_all_uses_with(result[user.args[1]])
        gm.graph.erase_node(user)


def _moved(first: Sequence[Any], now: Sequence[Any]) -> dict[str, str]:
    """Where the modules of the traced call are in this one, by what both are given."""
    found: dict[str, str] = {}
    for one, other in zip(first, now, strict=True):
        names = [_state_name(node) for node in (one, other)]
        if not all(names):
            continue
        here, there = (name.split(".")[:-1] for name in names)
        while here and there:
            found.setdefault(".".join(here), ".".join(there))
            if here.pop() != there.pop():
                break
    return found


def _state_name(node: Any) -> str:
    source = dynamo.source_of(node) if isinstance(node, Node) else None
    return user_name(source, "") if source is not None and is_module_state(source) else ""


def _stack(node: Node, call: Node, moved: Mapping[str, str]) -> dict[str, Any]:
    """The modules that an operator is in, of this call; the call's own where they are unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    found: dict[str, Any] = {}
    for (key, (_, kind)), path in zip(stack.items(), paths_in(stack), strict=True):
        parts = path.split(".")
        rest: list[str] = []
        while parts and ".".join(parts) not in moved:
            rest.insert(0, parts.pop())
        if path and not parts and moved:
            found[key] = (f"{ROOT}.{path}", kind)  # an outer module, which all calls are in
        elif path and not parts:
            return dict(call.meta.get("nn_module_stack") or {})
        else:
            inside = ".".join([moved[".".join(parts)], *rest]) if parts else ""
            found[key] = (f"{ROOT}.{inside}".rstrip("."), kind)
    return found


def _custom(node: Node, call: Node, first: Node, number: int) -> dict[str, Any]:
    """Its tags: those that were around the traced call become those around this one."""
    mine, theirs = call.meta.get("custom") or {}, first.meta.get("custom") or {}
    found = {
        key: value + number * _NEXT if key.endswith(ENTRY) and key not in mine else value
        for key, value in (node.meta.get("custom") or {}).items()
        if key not in theirs or theirs[key] != value
    }
    return {**mine, **found}
