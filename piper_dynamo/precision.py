"""Precision: casts in Dynamo's graph, at the borders of what computes in another dtype.

Terms: a parameter is *held* in the dtype that the model and the optimizer have it in, and
*computed* in the one that chunks see; `Precision(param=...)` makes the two differ. Casts come
before autograd looks, so the backward has theirs.

Signature: Dynamo's graph, its arguments, rules -> a copy with casts, and the dtype of each
parameter that is not computed as it is held.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from piper_dynamo.changes import Changes
from piper_dynamo.errors import PiperCaptureError, format_error
from piper_dynamo.filters import Filter
from piper_dynamo.ir.alias import operator_name
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.spec import short, shown_line, user_line
from piper_dynamo.ir.tags import adopt, number_entries, tags_of
from piper_dynamo.strategy import Precision, Strategy

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# In the joint graph: operators on floating-point values of one dtype; fake ones may have two.
_OF_ONE_DTYPE = frozenset(
    (
        *("mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "linear", "convolution"),
        *("grouped_mm", "_cdist_forward", "_embedding_bag", "grid_sampler_2d", "grid_sampler_3d"),
        *("index_add", "index_copy", "index_put", "index_reduce"),
        *("binary_cross_entropy", "nll_loss_forward", "nll_loss2d_forward"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
)
_HALF = (torch.bfloat16, torch.float16)
_WITH_STATISTICS = ("batch_norm", "instance_norm")
# Parts of the names that norms have in the joint graph.
_NORMS = ("batch_norm", "native_layer_norm", "native_group_norm")
_CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One Precision directive: what it matches, what it asks for, and its name in a message."""

    filter: Filter
    param: torch.dtype | None
    grad: torch.dtype | None
    reduce: torch.dtype | None
    label: str = field(compare=False)  # else another line would be another capture


def rules_of(strategy: Strategy) -> tuple[Rule, ...]:
    """The strategy's Precisions."""
    return tuple(
        Rule(
            filter=one.filter,
            param=DTYPES[one.param] if one.param else None,
            grad=DTYPES[one.grad] if one.grad else None,
            reduce=DTYPES[one.reduce] if one.reduce else None,
            label=one.label,
        )
        for one in strategy.of(Precision)
    )


def insert_casts(
    gm: fx.GraphModule, args: Sequence[Arg], rules: Sequence[Rule], fakes: Sequence[Any], mode: Any
) -> tuple[fx.GraphModule, dict[int, torch.dtype]]:
    """The graph in the precision asked for.

    rewrite:   y = linear(x, w)  ->  y = linear(x.to(param), w), for a `w` of that dtype
    requires:  regions that share a parameter agree on its dtype
    keeps:     values up to rounding; tags: a cast to fewer bits is made where the value is, one to
        more where it is used, so that few bytes are sent

    Args:
        gm: Dynamo's graph; it is not changed.
        args: Its arguments.
        rules: The strategy's.
        fakes: Values of the arguments, as the model is without casts.
        mode: Their fake mode.

    Returns:
        The new graph, and by position the dtype of each parameter that is computed in another one
        than it is held in.

    Raises:
        PiperCaptureError: A parameter would need two dtypes, or a value is changed in place beyond
            a border of dtypes.
    """
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    made = fx.GraphModule(gm, graph)
    caster = _Caster(made, args, rules, Changes(made, fakes, mode))
    computed = caster.parameters()
    caster.run()
    made.recompile()
    return made, computed


class _Caster:
    """A copy of Dynamo's graph, and in which dtype each of its nodes computes."""

    def __init__(
        self, gm: fx.GraphModule, args: Sequence[Arg], rules: Sequence[Rule], changes: Changes
    ) -> None:
        self.graph, self.rules, self.changes = gm.graph, rules, changes
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.arg_of = dict(zip(placeholders, args, strict=True))
        self.calls = [n for n in gm.graph.nodes if n.op in _CALLS]
        self.tags, inner = _tags(gm, self.calls)
        self.asked: dict[Node, torch.dtype | None] = {}  # and so its parameters'
        self.dtype: dict[Node, torch.dtype | None] = {}
        for node in self.calls:
            if _is_pick(node):
                source = node.args[0]
                assert isinstance(source, Node)
                self.asked[node], self.dtype[node] = self.asked[source], self.dtype[source]
                continue
            found = {self._rule(tags) for tags in inner[node]} or {self._rule(self.tags[node])}
            if len(found) > 1:
                raise PiperCaptureError(
                    format_error(
                        "a checkpointed block computes in two precisions",
                        {"at": user_line(node) or node.name},
                        hint="let a piper.Precision match all of the block, or checkpoint its "
                        "parts apart",
                    )
                )
            (self.asked[node],) = found
            self.dtype[node] = None if self._has_statistics(node) else self.asked[node]
        self.casts: dict[tuple[object, ...], Node] = {}

    def _has_statistics(self, node: Node) -> bool:
        """Whether it is a norm with buffers, which stay as they are: torch has it in one dtype."""
        args = [self.arg_of.get(i) for i in node.all_input_nodes]
        is_norm = getattr(node.target, "__name__", None) in _WITH_STATISTICS
        return is_norm and any(arg is not None and arg.kind is ArgKind.BUFFER for arg in args)

    def _rule(self, tags: dict[str, int]) -> torch.dtype | None:
        return next((r.param for r in self.rules if r.filter.matches(tags)), None)

    def parameters(self) -> dict[int, torch.dtype]:
        """The dtype of each parameter that is not computed as it is held."""
        found: dict[int, torch.dtype] = {}
        for node, arg in self.arg_of.items():
            if arg.kind is not ArgKind.PARAMETER or not _is_floating(node):
                continue
            assert arg.spec is not None
            users = {self.asked[u]: u for u in node.users if u in self.asked}
            if len(users) > 1:
                raise PiperCaptureError(
                    format_error(
                        f"parameter {arg.name!r} is used in two precisions",
                        {
                            str(dtype or arg.spec.dtype).removeprefix("torch."): user_line(user)
                            or user.name
                            for dtype, user in users.items()
                        },
                        hint="give all regions that use it the same piper.Precision(param=...)",
                    )
                )
            dtype = next(iter(users), None)
            if dtype is not None and dtype != arg.spec.dtype:
                found[arg.position] = dtype
        return found

    def run(self) -> None:
        """Cast what comes into each call from where another dtype is computed in."""
        for node in self.calls:
            if _is_pick(node):
                continue
            self._refuse_in_place(node)
            for source in node.all_input_nodes:
                dtype = self._wanted(source, node)
                if dtype is not None:
                    node.replace_input_with(source, self._cast(source, dtype, node))

    def _wanted(self, source: Node, node: Node) -> torch.dtype | None:
        """What a value is to be cast to; None where it stays."""
        arg, mine = self.arg_of.get(source), self.dtype[node]
        if arg is not None and arg.kind is ArgKind.PARAMETER:
            is_kept = mine == self.asked[node] or not _is_floating(source)
        else:
            is_kept = not self._is_cast(source) or mine == self.dtype.get(source)
        if is_kept:
            return None
        captured: torch.dtype = source.meta["example_value"].dtype
        return mine or captured

    def _is_cast(self, source: Node) -> bool:
        """Whether a value is cast where another dtype is computed in: not parameters, buffers."""
        arg = self.arg_of.get(source)
        is_input = arg is not None and arg.kind is ArgKind.DATA
        return (is_input or source in self.dtype) and _is_floating(source)

    def _cast(self, source: Node, dtype: torch.dtype, user: Node) -> Node:
        captured: torch.dtype = source.meta["example_value"].dtype
        has = self.dtype.get(source) or captured
        stays = source in self.dtype and dtype.itemsize < has.itemsize
        final = self.changes.last_before(source, user)  # only then is it what the user sees
        made = final or source
        owner = made if stays else user
        key = (source, final, dtype, None if stays else tuple(self.tags[user].items()))
        if key not in self.casts:
            with self.graph.inserting_after(made) if stays else self.graph.inserting_before(user):
                cast = self.graph.call_method("to", (source, dtype))
            kept = ("custom", "stack_trace", "nn_module_stack")
            cast.meta = {k: owner.meta[k] for k in kept if k in owner.meta}
            self.casts[key] = cast
        return self.casts[key]

    def _refuse_in_place(self, node: Node) -> None:
        """A cast is a copy: who changes it does not change what others see, nor its views."""
        found = [(maker, self.dtype[node]) for maker in self.changes.changed_by(node)]
        found += [
            (self.changes.maker[view], self.dtype[view])
            for view in node.all_input_nodes
            if view in self.dtype and self.changes.is_stale(view, node)
        ]
        for maker, dtype in found:
            if self._is_cast(maker) and self.dtype.get(maker) != dtype:
                raise PiperCaptureError(
                    format_error(
                        "a value is changed in place where another precision begins",
                        {
                            "at": user_line(node) or node.name,
                            "made at": user_line(maker) or maker.name,
                        },
                        hint="write x = x + y instead of x += y there, or move the border",
                    )
                )


def refuse_mixed(graph: fx.Graph) -> None:
    """What torch computes in one dtype only has operands of one, which fake tensors do not see to.

    Args:
        graph: The joint graph.

    Raises:
        PiperCaptureError: An operator has operands of two dtypes; names the user's line.
    """
    for node in graph.nodes:
        name = operator_name(node)
        is_norm = "backward" not in name and any(norm in name for norm in _NORMS)
        if not is_norm and name not in _OF_ONE_DTYPE:
            continue
        values = [i.meta.get("val") for i in node.all_input_nodes]
        has = [v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if is_norm and has[0] in _HALF and set(has[1:]) == {torch.float32}:
            continue  # which norms take
        if len(set(has)) > 1:
            raise PiperCaptureError(
                format_error(
                    "the model cannot run in this precision: an operator gets two dtypes",
                    {
                        "at": shown_line(node),
                        "operator": name,
                        "dtypes": ", ".join(sorted(map(short, set(has)))),
                    },
                    hint="a dtype is baked into the graph, or a buffer has another one: write "
                    "x.type_as(y) for x.to(y.dtype), and cast buffers where they are used",
                )
            )


def _tags(
    gm: fx.GraphModule, calls: list[Node]
) -> tuple[dict[Node, dict[str, int]], dict[Node, list[dict[str, int]]]]:
    """Tags of the calls, and of what is tagged in the nested graphs (checkpoints) that they run."""
    nested = {n: _nested(gm, n) for n in calls}
    every = [m for found in nested.values() for m in found]
    tags = number_entries({n: tags_of(n) for n in (*calls, *every)})
    inner = {n: [tags[m] for m in found if tags[m]] for n, found in nested.items()}
    found = {n: tags[n] or next(iter(inner[n]), {}) for n in calls}
    adopt(calls, found)
    return found, inner


def _nested(gm: fx.GraphModule, node: Node) -> list[Node]:
    """What computes inside of what a higher-order operator runs, however deep it is."""
    found: list[Node] = []
    for given in node.all_input_nodes:
        graph = getattr(gm, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(graph, fx.GraphModule):
            for inner in graph.graph.nodes:
                if inner.op in _CALLS and not _is_pick(inner):
                    found += _nested(graph, inner) or [inner]
    return found


def _is_pick(node: Node) -> bool:
    """Whether a call picks one of several results; `x[0]` of a tensor computes."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, Node) and isinstance(source.meta.get("example_value"), tuple | list)


def _is_floating(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
