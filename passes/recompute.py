"""Recompute: what a region keeps from its forward for its backward, and what it computes again.

Terms: a *policy* tells torch's min-cut partitioner of one operator that its results are kept
(MUST_SAVE), or made again (MUST_RECOMPUTE); *held* are a region's inputs that the rank has in the
backward anyway (parameters, buffers, data); a *draw* is an operator that takes random numbers.

Signature: a region's joint graph and what is asked -> policies; what is kept as it is, and a budget
-> what stays.

Torch has a budget of its own (`activation_memory_budget`), in parts of what a graph keeps beyond
all of its inputs. Parameters are inputs there, so that a region whose weights are large and used in
the forward alone, such as an embedding, would keep everything whatever the budget. Here what is
held costs nothing, and what stays is chosen by torch's knapsack solver in bytes.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import ceil, prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo.budgets import Budget
from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir.alias import is_random, operator_name
from piper_dynamo.ir.chunk import spec_of
from piper_dynamo.ir.flops import flops_of
from piper_dynamo.ir.graph import Dag, is_pick
from piper_dynamo.passes.select import region_misses

Policy = compat.CheckpointPolicy
_MADE_AGAIN = (Policy.MUST_RECOMPUTE, Policy.PREFER_RECOMPUTE)
_LAST = 2**62  # above every number that torch gives a checkpoint
_PARTS = 10_000  # torch's solver rounds weights to such parts of 1


def check_budgets(budgets: Sequence[Budget], dag: Dag) -> None:
    """Every budget is for some region, and no region has two.

    Raises:
        PiperPlanError: Lists every fault.
    """
    faults = region_misses(budgets, dag)
    for region in dag.regions:
        found = {one.budget: one.label for one in budgets if one.covers(region)}
        if len(found) > 1:
            faults.append(f"region {region} has several budgets:\n  " + "\n  ".join(found.values()))
    if faults:
        raise PiperPlanError(join_faults("regions have no budget to recompute by", faults))


def is_checkpointed(graph: fx.Graph) -> bool:
    """Whether the model asks by itself, with torch.utils.checkpoint, to compute something again."""
    return any(node.meta.get("recompute") in _MADE_AGAIN for node in graph.nodes)


def forward_of(graph: fx.Graph) -> list[Node]:
    """The operators of a region's joint graph that can run before any gradient is there."""
    late: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_tangent or any(given in late for given in node.all_input_nodes):
            late.add(node)
    return [n for n in graph.nodes if n.op == "call_function" and n not in late]


def policies(
    graph: fx.Graph,
    held: AbstractSet[Node],
    *,
    kept: AbstractSet[Node] | None = None,
    checkpoints: bool = True,
) -> dict[Node, Policy]:
    """What the partitioner is told of each operator; it decides of the others.

    Args:
        graph: A region's joint graph.
        held: Its inputs that the rank has in the backward anyway.
        kept: Of the forward's values those that stay, and all others are made again; None: as the
            partitioner finds best.
        checkpoints: Whether the model's own checkpoints are followed, where `kept` is None.
    """
    decisions = _decisions(graph)
    forward = set(forward_of(graph)) if kept is not None else set()
    found: dict[Node, Policy] = {}

    def asked(node: Node) -> Policy | None:
        tag = node.meta.get("recompute") if checkpoints else None
        if kept is None or node not in forward or tag is Policy.MUST_SAVE:
            return tag
        return Policy.MUST_SAVE if node in kept else Policy.MUST_RECOMPUTE

    def stays(node: Node) -> bool:
        # Left to itself the partitioner would draw again from a copy of the generator's state.
        masks = [n for n in (node, *node.all_input_nodes) if is_random(n)]
        is_drawn_once = any(asked(n) not in _MADE_AGAIN for n in masks)
        return is_drawn_once or node in decisions or (is_pick(node) and node.args[0] in decisions)

    for node in graph.nodes:
        # A lookup copies rows, no more: made again it costs what reading the kept rows would.
        looks_up = node.target is torch.ops.aten.embedding.default
        if node.meta.get("piper_free") or (looks_up and held >= set(node.all_input_nodes)):
            found[node] = Policy.MUST_RECOMPUTE
        elif stays(node):
            found[node] = Policy.MUST_SAVE
        elif (policy := asked(node)) is not None:
            found[node] = policy
    return found


def _decisions(graph: fx.Graph) -> set[Node]:
    """What turns real numbers into whole ones, and experts' routings.

    Computed again, a score may differ in its last bit, and where two are nearly equal so would the
    places chosen by them, while values that were moved by the first choice have left the chunk. A
    pooling's places serve its own backward alone: both neighbours are right there.
    """
    found: set[Node] = set()
    from_reals: set[Node] = set()  # comparisons
    for node in graph.nodes:
        name = operator_name(node)
        if node.op != "call_function" or "pool" in name or name.endswith("_like"):
            continue
        dtypes = _dtypes(node)
        given = node.all_input_nodes
        is_real = any(n in from_reals or any(map(_is_real, _dtypes(n))) for n in given)
        if node.target is torch.ops.piper.route.default:
            found.add(node)
        elif is_real and torch.bool in dtypes:
            from_reals.add(node)
        elif is_real and not is_pick(node) and not all(map(_is_real, dtypes)):
            found.add(node)
    return found


def _dtypes(node: Node) -> list[torch.dtype]:
    return [value.dtype for value in _tensors(node)]


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    parts = value if isinstance(value, tuple | list) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def advise(graph: fx.Graph, wanted: Mapping[Node, Policy], *, apart: bool) -> None:
    """Write policies where the partitioner looks for them; draws that are made again as stand-ins.

    The partitioner would keep the generator's whole state for a draw that it makes again.

    Args:
        graph: A region's joint graph.
        wanted: By operator.
        apart: Whether what one checkpoint of the model gives to a later one is kept between them.
    """
    for node in graph.nodes:
        node.meta.pop("recompute", None)
        policy = wanted.get(node)
        if policy is None:
            continue
        node.meta["recompute"] = policy
        # What belongs to no checkpoint counts as the last, so that nothing of it is kept for one.
        node.meta["ac_graph_id"] = node.meta.get("ac_graph_id", _LAST) if apart else 0
        if policy in _MADE_AGAIN and is_random(node):
            node.meta["stands_for"] = node.target
            node.target = drawn
            node.args = (node.meta.get("draw"), *node.args)


def drawn(number: int | None, *args: Any, **kwargs: Any) -> Any:
    """Stands for a draw while the partitioner works."""
    raise AssertionError("a draw's stand-in was run")


def restore_draws(graph: fx.Graph) -> None:
    """Put draws in the place of their stand-ins."""
    for node in graph.find_nodes(op="call_function", target=drawn):
        node.target = node.meta.pop("stands_for")
        node.args = node.args[1:]


def choose(values: Sequence[Node], fixed: AbstractSet[Node], most_bytes: int) -> set[Node]:
    """Of the values that a forward keeps, those that save the most work in so many bytes.

    Args:
        values: What it keeps now, and may drop.
        fixed: What stays or is there in any case.
        most_bytes: Of those of `values` that stay.
    """
    sizes = [_nbytes(node) for node in values]
    total = sum(sizes)
    if not total:
        return set(values)
    stays = {*values, *fixed}
    # Rounded so that the solver's own rounding changes nothing and never exceeds what is allowed.
    weights = [ceil(size / total * _PARTS) / _PARTS for size in sizes]
    most = min(int(most_bytes / total * _PARTS) / _PARTS, 1.0)
    work = [float(_work_again(node, stays)) for node in values]
    return {values[i] for i in compat.knapsack(weights, work, most)}


def _work_again(node: Node, stays: AbstractSet[Node]) -> int:
    """FLOPs to compute a value from others that stay; an element of a pointwise result is one."""
    seen, stack, found = {node}, [node], 0
    while stack:
        one = stack.pop()
        found += flops_of(one) or sum(prod(v.shape) for v in _tensors(one))
        for given in one.all_input_nodes:
            if given.op == "call_function" and given not in stays and given not in seen:
                seen.add(given)
                stack.append(given)
    return found


def _nbytes(node: Node) -> int:
    spec = spec_of(node)
    return spec.nbytes if spec is not None else 0
