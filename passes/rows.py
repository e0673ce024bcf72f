"""Rows: which operators treat every row of an expert region alike, whatever their number.

Terms: a value is *rows* when its first dim is the rows of an expert region, as many as come. Under
`Shard` a rank has other rows than one process would, so no operator may let one row see another.

Signature: a node and which of its operands are rows -> why it may not be there, or nothing; graph
-> the same for any number of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tag, fx, ops
from torch._ops import OpOverload
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo.ir.alias import draws, operator_name
from piper_dynamo.ir.spec import source_meta, user_line

aten = ops.aten
ONLY_ROWS = (
    "an expert region may only use operators that treat every row alike, and "
    "piper.moe.grouped_mm; make the rest before dispatch or after combine"
)
COMES_BACK = (
    "piper.moe.combine does not bring back\n"
    "  hint  let only combine's result leave the expert region, and give the rows of one dispatch "
    "to one region"
)
# Where each operator says along which dims it works; none of these may be dim 0.
_DIM_ARGUMENT = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "_softmax", "_log_softmax", "cumsum"), 1),
    **dict.fromkeys(("slice", "select", "unsqueeze", "squeeze", "split", "split_with_sizes"), 1),
    **dict.fromkeys(("cat", "stack", "unbind", "linalg_vector_norm", "var_mean", "argmax"), 1),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 2),
    **dict.fromkeys(("slice_backward", "select_backward"), 2),
}
_DIM_PLACE = {"split": 2, "split_with_sizes": 2, "linalg_vector_norm": 2}
_KEEPS_ROWS = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "expand", "clone", "_to_copy", "detach", "alias"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "lift_fresh_copy"),
    )
)
_BY_EXPERT = frozenset(("grouped_mm", "grouped_outer", "even_mm", "even_outer", "getitem"))
_SIZED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)


class Unfit(Exception):
    """A graph does not work with other sizes; the text says where, and why."""


@contextmanager
def sizes_refused(node: Node) -> Iterator[None]:
    """What an operator raises because it cannot take the sizes it is given becomes `Unfit`.

    Operators alone refuse sizes, and never by a TypeError: whatever else is raised is a mistake of
    ours, and passes as it is.
    """
    try:
        with compat.quiet_fake_tensors():
            yield
    except (RuntimeError, ValueError, IndexError) as error:
        if not isinstance(node.target, OpOverload):
            raise
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise Unfit(f"{user_line(node)} {node}: {why}") from error


def mixing(node: Node, is_rows: Callable[[Any], bool], dims: int) -> str:
    """Why an operator on rows may let one row see another; empty where it cannot.

    Args:
        node: It has an operand that is rows.
        is_rows: Whether a node's value is rows.
        dims: How many dims its first rows operand has.
    """
    name = operator_name(node)
    if draws(node):
        return f"{name} draws random numbers, which would differ from one process's"
    if name in _BY_EXPERT:
        return ""
    is_pointwise = isinstance(node.target, OpOverload) and Tag.pointwise in node.target.tags
    if is_pointwise or name in _KEEPS_ROWS:
        return "" if is_rows(node) else f"{name} does not keep the rows apart"
    if name in ("mm", "addmm"):
        first, second = node.args[-2:]
        return "" if is_rows(first) and not is_rows(second) else f"{name} adds up rows"
    along = _along(node, name, dims)
    if along is None:
        return f"{name} is not known to treat every row alike"
    return f"{name} works along the rows" if along else ""


def _along(node: Node, name: str, dims: int) -> bool | None:
    """Whether an operator that works along some dims works along the rows; None for others."""
    if name in ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm"):
        shape = node.args[2 if name.endswith("backward") else 1]
        return not (isinstance(shape, list | tuple) and len(shape) < dims)
    if name == "constant_pad_nd":  # pairs of sizes, the last dim first
        pads = node.args[1]
        return not (isinstance(pads, list | tuple) and len(pads) < 2 * dims)
    if name not in _DIM_ARGUMENT:
        return None
    place = _DIM_PLACE.get(name, _DIM_ARGUMENT[name])
    found = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    listed = found if isinstance(found, list | tuple) else [found]
    dims += name in ("unsqueeze", "stack")  # they count the new dim, too
    return not listed or any(not isinstance(d, int) or d % max(dims, 1) == 0 for d in listed)


def free_views(
    graph: fx.Graph,
    rows: int,
    nodes: Sequence[Node] | None = None,
    made: Callable[[Node, Node], None] = lambda new, old: None,
) -> None:
    """Let operators that were told the number of rows find out how many there are.

    Args:
        graph: Where they are.
        rows: The number.
        nodes: Which; None: all.
        made: Called with every new node and the one in whose place it is.
    """
    for node in list(graph.nodes if nodes is None else nodes):
        if node.target in (aten.slice_backward.default, aten.select_backward.default):
            _pad_instead(graph, node, made)
            continue
        if node.target not in _SIZED:
            continue
        source, sizes = node.args
        if sizes[0] == rows and source.meta["val"].shape[:1] == (rows,):
            node.args = (source, [-1, *sizes[1:]])


def _pad_instead(graph: fx.Graph, node: Node, made: Callable[[Node, Node], None]) -> None:
    """The gradient of a part, surrounded by zeros, without the whole's number of rows.

    rewrite:   slice_backward(g, [rows, d], 1, a, b, 1)  ->  pad(g, a zeros before, d - b after)
    """
    grad, sizes, dim, start = node.args[:4]
    assert isinstance(grad, Node)
    assert isinstance(sizes, list | tuple)
    assert isinstance(dim, int)
    assert isinstance(start, int)
    dim %= len(sizes)
    is_slice = node.target is aten.slice_backward.default
    if dim == 0 or (is_slice and node.args[5] != 1):
        return  # mixes rows, or has gaps: left to be refused
    size = int(str(sizes[dim]))
    first = min(start % size if start < 0 else start, size)
    last = min(int(str(node.args[4])), size) if is_slice else first + 1
    last += size if last < 0 else 0
    before = [0] * (2 * (len(sizes) - 1 - dim))
    with graph.inserting_before(node):
        part = grad if is_slice else graph.call_function(aten.unsqueeze.default, (grad, dim))
        padded = graph.call_function(
            aten.constant_pad_nd.default, (part, [*before, first, size - last])
        )
    for new in (padded,) if is_slice else (part, padded):
        new.meta = source_meta(node)
        made(new, node)
    padded.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(padded)
    graph.erase_node(node)
