"""Cast: parameters in the dtype that chunks compute in, gradients in those they are summed in.

Terms: a parameter is *held* in one dtype and *computed* in another (`piper_dynamo/precision.py`);
its gradient comes from chunks as computed, is summed over microbatches in a second and reduced in a
third, and is handed over as held.

Signature: DAG with reductions -> the same with a cast wherever the dtype changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir import ops
from piper_dynamo.ir.graph import Dag, call, is_pick, producer, results_of, task_of
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.spec import short
from piper_dynamo.ir.task import COLLECTIVE_KINDS, Kind, RegionId, Task
from piper_dynamo.passes.select import region_misses


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dtypes:
    """Of one parameter's gradient: as it is held, summed over microbatches, and reduced."""

    held: torch.dtype
    summed: torch.dtype
    reduced: torch.dtype


class Cast:
    """Insert casts of parameters and gradients.

    rewrite:   F(w) ; B(w)              ->  c = cast(w) on each device group ; F(c) ; B(c)
               g = accumulate(B.MB0, B.MB1)  ->  the same, in its own dtype
               all_reduce([g])          ->  all_reduce([cast(g)])
               the step's gradients     ->  cast to the parameters' dtypes
    requires:  gradients have their reductions (replicate); a region is matched by one rule at most;
        regions that share a parameter agree
    keeps:     values up to rounding
    """

    name = "cast"

    def __init__(self, rules: Sequence[Any]) -> None:
        """`rules` as in `piper_dynamo.precision`."""
        self._rules = rules

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place."""
        faults = region_misses(self._rules, dag)
        chosen = {region: self._rule_of(region, faults) for region in dag.regions}
        found = self._parameters(dag, chosen, faults)
        if faults:
            raise PiperPlanError(join_faults("the precision is not possible", faults))
        _cast_parameters(dag)
        results = results_of(dag.graph)
        grads = dict(results["grads"])
        for position, dtypes in found.items():
            if str(position) in grads:
                way = _Gradient(dag, dtypes)
                nodes = grads[str(position)]
                grads[str(position)] = [way.cast(way.visit(n), dtypes.held) for n in nodes]
        (output,) = dag.graph.find_nodes(op="output")
        output.args = ({**results, "grads": grads},)

    def _rule_of(self, region: RegionId, faults: list[str]) -> Any:
        mine = [rule for rule in self._rules if rule.filter.matches(dict(region.tags))]
        if len(mine) > 1:
            faults.append(f"{region} has two precisions: {' and '.join(r.label for r in mine)}")
        return mine[0] if mine else None

    def _parameters(
        self, dag: Dag, chosen: dict[RegionId, Any], faults: list[str]
    ) -> dict[int, _Dtypes]:
        """By position, the dtypes of each parameter's gradient, where a rule says something."""
        rule_of: dict[int, tuple[Any, RegionId]] = {}
        kept = {position for (position, _), one in dag.layouts.items() if not one.reduced}
        for node in dag.tasks():
            name = task_of(node).name
            assert name is not None
            rule = chosen[name.region]
            for source in node.all_input_nodes:
                position = source.meta.get("arg")
                if position is None or dag.args[position].kind is not ArgKind.PARAMETER:
                    continue
                other, region = rule_of.setdefault(position, (rule, name.region))
                if _asked(other) != _asked(rule):
                    labels = " and ".join(r.label for r in (other, rule) if r is not None)
                    fault = (
                        f"parameter {dag.args[position].name!r} is used in {region} and "
                        f"{name.region}, whose precisions differ: {labels}"
                    )
                    if fault not in faults:
                        faults.append(fault)
        found = {}
        for position, (rule, region) in rule_of.items():
            spec = dag.args[position].spec
            if rule is None or spec is None or not spec.dtype.is_floating_point:
                continue
            summed = rule.grad or spec.dtype
            dtypes = _Dtypes(held=spec.dtype, summed=summed, reduced=rule.reduce or summed)
            found[position] = dtypes
            is_kept = position in kept
            faults += self._check(dag, position, rule, region, dtypes, is_kept=is_kept)
        return found

    def _check(
        self,
        dag: Dag,
        position: int,
        rule: Any,
        region: RegionId,
        dtypes: _Dtypes,
        *,
        is_kept: bool,
    ) -> list[str]:
        name = dag.args[position].name
        computed = dag.computed.get(position, dtypes.held)
        if rule.param is not None and computed != rule.param:
            return [
                f"{rule.label} matches {region}, but what uses its parameter {name!r} carries no "
                f"tag of that region and computes in {short(computed)}\n"
                "  hint  tag the operators that use it"
            ]
        if is_kept and rule.reduce not in (None, dtypes.held):
            return [
                f"{rule.label} reduces {name!r} in {short(dtypes.reduced)}, but what piper.no_sync "
                f"puts off is reduced as it is held, in {short(dtypes.held)}\n"
                "  hint  leave reduce= out, or do not use piper.no_sync"
            ]
        return []


def _asked(rule: Any) -> tuple[Any, ...]:
    """What a rule asks for, whichever directive says it."""
    return (rule.param, rule.grad, rule.reduce) if rule is not None else (None, None, None)


def _cast_parameters(dag: Dag) -> None:
    """A cast on each device group whose tasks read a parameter that is computed otherwise."""
    first = next(n for n in dag.graph.nodes if n.op != "placeholder")
    for node in dag.graph.find_nodes(op="placeholder"):
        position = node.meta.get("arg")
        if position not in dag.computed:
            continue
        held = dag.args[position].spec
        assert held is not None
        seen = node.meta["spec"]
        node.meta["spec"] = replace(seen, dtype=held.dtype)
        by_group: dict[tuple[int, ...], list[Node]] = {}
        for user in node.users:
            by_group.setdefault(task_of(user).devices, []).append(user)
        for devices, users in sorted(by_group.items()):
            on = f"_on_{devices[0]}" if len(by_group) > 1 else ""
            task = Task(kind=Kind.CAST, label=dag.args[position].name, devices=devices)
            with dag.graph.inserting_before(first):
                cast = call(
                    dag.graph,
                    task,
                    ops.cast,
                    (node, seen.dtype),
                    name=f"{node.name}_{short(seen.dtype)}{on}",
                    spec=seen,
                )
            cast.meta["arg"] = position  # passes and programs take it for the parameter
            for user in users:
                user.replace_input_with(node, cast)


class _Gradient:
    """The way of one parameter's gradient, from the chunks that make its parts to the result."""

    def __init__(self, dag: Dag, dtypes: _Dtypes) -> None:
        self._graph, self._dtypes = dag.graph, dtypes
        self._done: set[Node] = set()

    def visit(self, node: Node) -> Node:
        """Give a node's value, and all that it is made of, the dtype it is to have."""
        task = producer(node).meta.get("task")
        if node in self._done or task is None or task.kind is Kind.COMPUTE:
            return node
        self._done.add(node)
        if task.kind is Kind.ACCUMULATE:  # it adds in its own dtype, whatever its parts have
            for part in node.all_input_nodes:
                self.visit(part)
            self._set(node, self._dtypes.summed)
        elif task.kind is Kind.SUM:
            for part in node.all_input_nodes:
                self.visit(part)
                node.replace_input_with(part, self.cast(part, self._dtypes.summed))
            self._set(node, self._dtypes.summed)
        elif task.kind in COLLECTIVE_KINDS and is_pick(node):
            start = producer(node)
            values, index = start.args[0], node.args[1]
            assert isinstance(values, list | tuple)
            assert isinstance(index, int)
            source = values[index]
            assert isinstance(source, Node)
            self.visit(source)
            start.replace_input_with(source, self.cast(source, self._dtypes.reduced))
            self._set(node, self._dtypes.reduced)
        return node

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """The value in this dtype: itself, or a cast of it."""
        spec = node.meta["spec"]
        if spec.dtype == dtype:
            return node
        task = task_of(producer(node))
        after = node
        while is_pick(after.next):
            after = after.next
        with self._graph.inserting_after(after):
            return call(
                self._graph,
                replace(task, kind=Kind.CAST, stream="compute"),
                ops.cast,
                (node, dtype),
                name=f"{node.name}_{short(dtype)}",
                spec=replace(spec, dtype=dtype),
            )

    def _set(self, node: Node, dtype: torch.dtype) -> None:
        node.meta["spec"] = replace(node.meta["spec"], dtype=dtype)
