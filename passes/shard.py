"""Shard: experts split over ranks, rows exchanged at the borders of their regions.

Terms: an *expert region* lies between `piper.moe.dispatch` and `combine`; *rows* are its tokens'
activations, as many as come; a *border* is a value that enters or leaves it (`meta["border"]` says
which exchange it passes, and by which routing); a chunk is *local* once it is made for the experts
of one rank, and for any number of rows; a *static* region has a capacity (`capacity.py`), so as
many rows come from every rank, and nobody has to be told.

Signature: placed DAG -> DAG with exchanges, local expert chunks, and the layout of every expert
parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir import ops
from piper_dynamo.ir.alias import operator_name
from piper_dynamo.ir.graph import (
    Dag,
    Layout,
    border_of,
    collective,
    is_pick,
    producer,
    results_of,
    safe,
    task_of,
)
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.program import Groups
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind, RegionId, Task
from piper_dynamo.passes.localize import Localizer
from piper_dynamo.passes.rows import COMES_BACK
from piper_dynamo.passes.select import along, region_misses

Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """One Shard directive: what it matches, over which axes, and its name in a message.

    `is_static` says that it has a capacity, which `capacity.py` has put into the graph.
    """

    filter: Any
    label: str
    is_static: bool = False
    stream: str = "ep"
    axes: tuple[str, ...] | None = None
    mesh: Any = None

    def groups(self, devices: Devices) -> Groups:
        """The ranks that hold one copy of the experts together, for each copy."""
        return (devices,) if self.axes is None else along(self.mesh, devices, self.axes)


@dataclass(slots=True, kw_only=True)
class _Expert:
    """A task of an expert region, and how its ranks share it."""

    node: Node
    how: Sharding
    groups: Groups

    @property
    def devices(self) -> Devices:
        return task_of(self.node).devices

    @property
    def size(self) -> int:
        """Among how many ranks the experts are split."""
        return len(self.groups[0])

    @property
    def shares(self) -> Groups:
        """Its groups by place among its devices: alike, these hold the same experts anywhere."""
        return tuple(tuple(self.devices.index(rank) for rank in group) for group in self.groups)

    @property
    def place(self) -> str:
        name = task_of(self.node).name
        assert name is not None
        return f"{name.region} ({task_of(self.node).where or 'no source line'})"

    @property
    def where(self) -> str:
        return f"{_name(self.node)} ({task_of(self.node).where or 'no source line'})"


def _name(node: Node) -> str:
    """A task's name for a message: without its microbatch, so that a fault is told once."""
    name = task_of(node).name
    return str(replace(name, mb=None)) if name is not None else str(task_of(node))


class Shard:
    """Let each rank of a group compute its own experts.

    rewrite:   y = F.EP0(w, x, counts)
               ->  counts, s = exchange_counts(counts) ; x = exchange(x, s)
                   y = F.EP0(this rank's rows of w, x, counts) ; y = unexchange(y, s)
               and the same, from y to x, in the backward; static regions need no counts
    requires:  rows enter by `dispatch` and leave by `combine`; parameters are weights of
        `grouped_mm`, whose experts the group divides; nothing depends on how many rows there are
    keeps:     values, row by row; each expert's gradient is that of all ranks' rows
    """

    name = "shard"

    def __init__(self, shardings: Sequence[Sharding]) -> None:
        self._shardings = shardings

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place."""
        if not self._shardings:
            return
        faults = region_misses(self._shardings, dag)
        experts = self._find(dag, faults)
        faults += _without_dispatch(experts)
        if not faults:  # one microbatch stands for all on the same ranks
            alike = {(str(o.node.target), o.devices): o for o in reversed(experts.values())}
            given = _returned(dag)
            faults += [f for one in alike.values() for f in _check(dag, one, experts, given)]
        if not faults:
            local = Localizer(dag)
            for one in experts.values():
                local(one.node, one.size, one.where, is_static=one.how.is_static)
            faults += local.faults
        if faults:
            raise PiperPlanError(
                join_faults("the experts cannot be sharded", list(dict.fromkeys(faults)))
            )
        shared = {node: one for node, one in experts.items() if one.size > 1}
        _Exchanges(dag, shared).insert()
        for one in shared.values():
            _note_layouts(dag, one)

    def _find(self, dag: Dag, faults: list[str]) -> dict[Node, _Expert]:
        """The tasks that several ranks share as experts, and those of static regions."""
        found: dict[Node, _Expert] = {}
        doubly: set[RegionId] = set()
        for node in dag.tasks():
            task = task_of(node)
            assert task.name is not None
            region = task.name.region
            mine = [s for s in self._shardings if s.filter.matches(dict(region.tags))]
            if len(mine) > 1 and region not in doubly:
                doubly.add(region)
                faults.append(f"{region} is sharded twice: {' and '.join(s.label for s in mine)}")
            if len(mine) != 1:
                continue
            groups = mine[0].groups(task.devices)
            if len({len(g) for g in groups}) > 1 or sum(map(len, groups)) != len(task.devices):
                faults.append(f"{mine[0].label}: its axes do not divide the ranks {task.devices}")
            is_one = len(groups[0]) > 1 or mine[0].is_static
            if is_one and node.meta.get("phase") is not None:
                found[node] = _Expert(node=node, how=mine[0], groups=groups)
        return found


def _without_dispatch(experts: dict[Node, _Expert]) -> list[str]:
    """Regions that no tokens are dispatched to hold no experts, so no weight is split there."""
    entered = {
        _tags(node)
        for node in experts
        if any(border_of(source, Kind.EXCHANGE) for source in node.all_input_nodes)
    }
    first = {_tags(node): one for node, one in reversed(experts.items())}
    return [
        f"{one.how.label}: {one.where} is not entered by piper.moe.dispatch, so it has no experts; "
        "splitting other weights over ranks (tensor parallelism) is not built\n"
        "  hint  let Shard match expert regions alone; piper.Replicate(zero=3) splits what ranks "
        "hold of any weight"
        for tags, one in first.items()
        if tags not in entered
    ]


def _tags(node: Node) -> tuple[tuple[str, int], ...]:
    name = task_of(node).name
    assert name is not None
    return name.region.tags


def _check(dag: Dag, one: _Expert, experts: dict[Node, _Expert], returned: set[Node]) -> list[str]:
    """What enters and leaves does so by the exchanges, and parameters are experts' matrices."""
    faults = []
    phase = one.node.meta["phase"]
    inputs = phase.chunk.graph.find_nodes(op="placeholder")
    for source, inside in _with_placeholders(one.node, inputs):
        made = producer(source).meta.get("task")
        whole = source.args[0] if made is not None and made.kind is Kind.SLICE else source
        assert isinstance(whole, Node)
        position = whole.meta.get("arg")
        if position is not None:
            faults += _check_argument(one, dag.args[position], inside)
            if one.size > 1:
                faults += _check_other_uses(dag, one, source, experts)
        elif source.op == "placeholder":
            faults.append(
                f"{one.where} makes the loss, which needs all ranks' rows\n"
                "  hint  make it outside of the expert region, from what piper.moe.combine gives"
            )
        elif producer(source) in experts:
            if experts[producer(source)].groups != one.groups:
                made_by = _name(producer(source))
                faults.append(f"{one.where} reads a value of {made_by}, sharded in another way")
        elif not (border_of(source, Kind.EXCHANGE) or border_of(source, Kind.EXCHANGE_COUNTS)):
            faults.append(
                f"{one.where} reads a value of {_name(producer(source))} that piper.moe.dispatch "
                "did not send there: its experts are elsewhere\n"
                "  hint  make it before dispatch, or inside of the expert region from its rows"
            )
    for value in one.node.users:
        outside = [u for u in value.users if _is_other_task(u, experts)]
        if outside and not border_of(value, Kind.UNEXCHANGE):
            faults.append(f"{one.where} gives {_name(outside[0])} a value that {COMES_BACK}")
        if value in returned or any(_is_joined(user) for user in value.users):
            faults.append(f"{one.where} gives an output or a buffer a value that {COMES_BACK}")
    return faults


def _is_joined(user: Node) -> bool:
    """Whether a task makes an output of all microbatches' values."""
    task = user.meta.get("task")
    return task is not None and task.kind is Kind.CONCAT


def _returned(dag: Dag) -> set[Node]:
    """What a step gives back beside gradients: outputs, and new values of buffers."""
    results = results_of(dag.graph)
    buffers = results["buffers"].values()
    return {node for node in (*results["outputs"], *buffers) if isinstance(node, Node)}


def _is_other_task(user: Node, experts: dict[Node, _Expert]) -> bool:
    task = user.meta.get("task")
    return task is not None and task.kind is Kind.COMPUTE and user not in experts


def _with_placeholders(node: Node, inputs: Sequence[Node]) -> list[tuple[Node, Node]]:
    """Each input of a task with its placeholder in the chunk; bundles left out."""
    phase = node.meta["phase"]
    sources = list(node.args)
    first, last = len(phase.primals), len(phase.tangents)
    placeholders = [*inputs[:first], *inputs[len(inputs) - last :]]
    if phase.takes_bundle:
        sources.pop(first)
    return [(s, p) for s, p in zip(sources, placeholders, strict=True) if isinstance(s, Node)]


def _check_argument(one: _Expert, arg: Arg, inside: Node) -> list[str]:
    """What an expert region may read of the call's arguments; `inside` is its placeholder there."""
    match arg.kind:
        case ArgKind.DATA:
            return [
                f"{one.where} reads the batch's {arg.name!r}, whose rows are not those of its "
                "tokens\n  hint  give what experts need to piper.moe.dispatch"
            ]
        case ArgKind.BUFFER:
            if one.size == 1 or not _is_matrix_somewhere(inside):
                return []
            return [
                f"{one.where} multiplies by buffer {arg.name!r} expert by expert, but only "
                f"parameters are split by experts ({one.how.label}): each rank has all of it\n"
                "  hint  make it a parameter; one with requires_grad=False is not trained"
            ]
        case ArgKind.NUMBER:
            return []
        case ArgKind.PARAMETER:
            return _check_matrix(one, arg, inside)
        case _:
            assert_never(arg.kind)


def _check_matrix(one: _Expert, arg: Arg, inside: Node) -> list[str]:
    """A parameter is a matrix for each expert, and ranks divide them."""
    if not _is_matrix_only(inside):
        return [
            f"{one.where} uses parameter {arg.name!r} otherwise than as a weight of "
            "piper.moe.grouped_mm, so it cannot be split by experts\n"
            "  hint  a weight must be the parameter itself, [E, d, h], cast or turned at most; use "
            "others outside of the expert region"
        ]
    assert arg.spec is not None
    experts, size = arg.spec.shape[0], one.size
    if experts % size:
        divisors = [d for d in range(1, experts + 1) if experts % d == 0]
        return [
            f"parameter {arg.name!r} has {experts} experts, which {size} ranks do not "
            f"divide ({one.how.label})\n  hint  numbers that do: {divisors}"
        ]
    return []


def _check_other_uses(
    dag: Dag, one: _Expert, source: Node, experts: dict[Node, _Expert]
) -> list[str]:
    """A rank has its own experts only: nobody, on whatever ranks, may ask for all of them.

    Legal iff  every task that reads the parameter is in an expert region, and these are split alike
    """
    arg = dag.args[source.meta["arg"]] if "arg" in source.meta else None
    if arg is None or arg.kind is not ArgKind.PARAMETER:
        return []
    others = [
        user
        for user in source.users
        if _is_other_task(user, experts) or (user in experts and experts[user].shares != one.shares)
    ]
    if not others:
        return []
    other = task_of(others[0])
    return [
        f"parameter {arg.name!r} of {one.place} is used by {_name(others[0])} on ranks "
        f"{other.devices} too ({other.where or 'no source line'}), where all experts, or others, "
        "would be needed\n"
        "  hint  use it in expert regions alone, all of them sharded alike"
    ]


def _is_product(node: Node) -> bool:
    return operator_name(node) in ("grouped_mm", "even_mm")


def _is_matrix_only(node: Node) -> bool:
    return all(
        (_is_product(user) and node not in (user.args[0], user.args[2]))
        or (_keeps_first_dim(user) and _is_matrix_only(user))
        for user in node.users
    )


def _is_matrix_somewhere(node: Node) -> bool:
    return any(
        (_is_product(user) and node is user.args[1])
        or (_keeps_first_dim(user) and _is_matrix_somewhere(user))
        for user in node.users
    )


def _keeps_first_dim(node: Node) -> bool:
    """Whether a node only casts a matrix or exchanges its rows and columns, expert by expert."""
    if operator_name(node) == "_to_copy":
        return True
    if operator_name(node) == "transpose":
        return all(isinstance(d, int) and d % 3 for d in node.args[1:])
    dims = node.args[1] if len(node.args) > 1 else None
    return operator_name(node) == "permute" and isinstance(dims, list | tuple) and dims[0] == 0


class _Exchanges:
    """Inserts the exchanges on the edges between expert tasks and others."""

    def __init__(self, dag: Dag, experts: dict[Node, _Expert]) -> None:
        self._dag, self._experts = dag, experts
        self._asked = {
            (border.routing, _microbatch(node)): node
            for node in dag.graph.nodes
            if (border := border_of(node, Kind.EXCHANGE_COUNTS))
        }
        # By the name of a routing's counts, the microbatch, and the ranks: what the exchange gives.
        self._counts: dict[tuple[str, int | None, Groups], tuple[Node, Node]] = {}

    def insert(self) -> None:
        """All of them."""
        nodes = list(self._experts)
        entering: dict[tuple[Node, Groups], list[_Expert]] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                if "border" in source.meta and producer(source) not in self._experts:
                    one = self._experts[node]
                    entering.setdefault((source, one.groups), []).append(one)
        counts = {k: v for k, v in entering.items() if border_of(k[0], Kind.EXCHANGE_COUNTS)}
        for (value, _), users in counts.items():
            self._exchange_counts(value, users)
        for (value, groups), users in entering.items():
            if (value, groups) not in counts:
                self._enter(value, users)
        for node in nodes:
            for value in list(node.users):
                if any(_is_other_task(user, self._experts) for user in value.users):
                    self._leave(value, self._experts[node])

    def _exchange_counts(self, value: Node, users: list[_Expert]) -> None:
        one = users[0]
        spec = value.meta["spec"]
        local, splits = self._insert(
            Kind.EXCHANGE_COUNTS,
            [value],
            one,
            [
                (f"{value.name}_here", ops.block_spec(spec, one.size)),
                (f"{value.name}_splits", replace(spec, shape=(2, *spec.shape)).contiguous()),
            ],
        )
        self._counts[value.meta["border"].routing, _microbatch(value), one.groups] = local, splits
        for user in users:
            if value in user.node.all_input_nodes:
                user.node.replace_input_with(value, local)

    def _enter(self, value: Node, users: list[_Expert]) -> None:
        one = users[0]
        results = [(f"{value.name}_here", value.meta["spec"])]
        (here,) = self._insert(Kind.EXCHANGE, [value, *self._splits(value, one)], one, results)
        for user in users:
            user.node.replace_input_with(value, here)

    def _leave(self, value: Node, one: _Expert) -> None:
        users = [u for u in value.users if _is_other_task(u, self._experts)]
        results = [(f"{value.name}_back", value.meta["spec"])]
        (back,) = self._insert(Kind.UNEXCHANGE, [value, *self._splits(value, one)], one, results)
        for user in users:
            user.replace_input_with(value, back)

    def _splits(self, value: Node, one: _Expert) -> list[Node]:
        """What says how many rows go and come; nothing where they are as many for every rank."""
        border = value.meta["border"]
        if border.experts is not None:
            return []
        routing, microbatch = border.routing, _microbatch(value)
        if (routing, microbatch, one.groups) not in self._counts:  # no expert asks how many come
            self._exchange_counts(self._asked[routing, microbatch], [one])
        return [self._counts[routing, microbatch, one.groups][1]]

    def _insert(
        self,
        kind: Kind,
        values: list[Node],
        one: _Expert,
        results: Sequence[tuple[str, TensorSpec]],
    ) -> tuple[Node, ...]:
        last = max(values)
        while is_pick(last.next):
            last = last.next
        made_by = task_of(producer(values[0]))
        task = Task(
            kind=kind,
            label=f"{values[0].name}.{made_by.name}",
            devices=one.devices,
            stream=one.how.stream,
            where=made_by.where,
        )
        with self._dag.graph.inserting_after(last):
            return collective(
                self._dag.graph,
                task,
                getattr(ops, kind.value),
                values,
                one.groups,
                name=f"{kind.value}_{safe(task.label)}_on_{one.devices[0]}",
                results=results,
            )


def _microbatch(value: Node) -> int | None:
    name = task_of(producer(value)).name
    return name.mb if name is not None else None


def _note_layouts(dag: Dag, one: _Expert) -> None:
    task = task_of(one.node)
    assert task.name is not None
    for source in one.node.all_input_nodes:
        position = source.meta.get("arg")
        if position is not None and dag.args[position].kind is ArgKind.PARAMETER:
            dag.layouts[position, one.devices] = Layout(
                bucket=str(task.name.region),
                expert_groups=one.groups,
                shard_groups=(),
                stream=one.how.stream,
                prefetch=0,
                keep="step",
                reduced=True,
                where=one.how.label,
            )
