"""What operators do beside computing: share memory, draw random numbers, exchange rows."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from piper_dynamo.ir.task import Kind

# Views by behaviour whose schema does not say so.
_HIDDEN_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.unsafe_chunk.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}
# The even ones bring rows into slots, too, and back (`moe/slots.py`).
_EXCHANGES = {
    "piper::exchange_counts": Kind.EXCHANGE_COUNTS,
    "piper::exchange": Kind.EXCHANGE,
    "piper::unexchange": Kind.UNEXCHANGE,
    "piper::pad": Kind.EXCHANGE,
    "piper::unpad": Kind.UNEXCHANGE,
}
_COPIES_OF_NOTHING = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def viewed(node: Node) -> Node | None:
    """The argument that `node` is a view of, or None."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, Node)
        return viewed(source)
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if node.target in _HIDDEN_VIEWS:
        return first
    for result in node.target._schema.returns:
        if result.alias_info is not None and not result.alias_info.is_write:
            return first
    return None


def is_random(node: Node) -> bool:
    """Whether an operator can draw random numbers: torch's mark, whatever it is called with."""
    return _is_random(node.target)


def _is_random(target: Any) -> bool:
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def draws(node: Node) -> bool:
    """Whether a call draws random numbers: a dropout of rate 0, as attention has one, does not."""
    return call_draws(node.target, node.args, node.kwargs)


def call_draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The same of an operator and its arguments."""
    if not _is_random(target):
        return False
    arguments = target._schema.arguments
    given = {one.name: one.default_value for one in arguments}
    given |= dict(zip((one.name for one in arguments), args, strict=False))
    given |= kwargs
    return given.get("dropout_p", given.get("p")) != 0


def operator_name(node: Node) -> str:
    """What a node calls, without namespace and overload: `mm`, `getitem`; empty where nothing."""
    return str(getattr(getattr(node.target, "overloadpacket", node.target), "__name__", ""))


def called(node: Node) -> str:
    """The name of the method or function that a node of Dynamo's graph calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def exchange_of(node: Node) -> Kind | None:
    """Which of the experts' exchanges a captured node stands for; None for any other."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return _EXCHANGES.get(name)


def is_even_exchange(node: Node) -> bool:
    """Whether a captured node stands for an exchange of slots, which are as many for every rank."""
    return exchange_of(node) is not None and operator_name(node) in ("pad", "unpad")


def root(node: Node) -> Node:
    """The node whose memory `node` shares, following views."""
    while (base := viewed(node)) is not None:
        node = base
    return node


def drop_aliases(graph: fx.Graph) -> None:
    """Replace `detach` and `alias` by what they alias: it would be saved twice."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _COPIES_OF_NOTHING:
            source = node.args[0]
            assert isinstance(source, Node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    drop_dead(graph)


def drop_dead(graph: fx.Graph) -> None:
    """Remove what nothing uses, random draws too: each has a seed of its own."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure(impure_random=False))
