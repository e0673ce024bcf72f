"""Replicate: data parallelism and ZeRO 0-3, as far as gradients and the loss are concerned.

Terms: *replicas* are the ranks of a device group that run the same tasks on different data; a
*bucket* is the parameters that a region is the first to use, reduced and gathered as one; a *shard*
is a replica's block of a parameter's rows (as many for each, rounded up), a DTensor's `Shard(0)`.

Signature: placed DAG with one gradient per holder -> DAG with reductions, and the layout of every
replicated parameter. `gather.py` makes parameters whole again where they are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, format_error, join_faults
from piper_dynamo.ir import ops
from piper_dynamo.ir.graph import (
    Dag,
    Layout,
    collective,
    is_pick,
    producer,
    results_of,
    safe,
    task_of,
)
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.program import Groups, copy_groups
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind, RegionId, Task
from piper_dynamo.passes.select import along, region_misses

Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """One Replicate directive: what it matches, what it asks for, and its name in a message.

    `mesh` (anything with `names` and `shape`) numbers the ranks along its axes, the last fastest.
    """

    filter: Any
    zero: int
    label: str
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    prefetch: int = 1
    keep: str | int = "chunk"
    axes: tuple[str, ...] | None = None
    shard_axes: tuple[str, ...] | None = None
    mesh: Any = None

    def covers(self, devices: Devices) -> bool:
        """Whether its axes number all these ranks."""
        return self.axes is None or along(self.mesh, devices, self.axes) == (devices,)

    def shard_groups(self, devices: Devices) -> Groups:
        """The ranks that hold the blocks of one copy of a parameter, for each copy."""
        if self.shard_axes is None:
            return (devices,)
        return along(self.mesh, devices, self.shard_axes)


class Replicate:
    """Sum gradients and the loss over replicas; decide which parameters are sharded.

    rewrite:   g = accumulate(B.MB0, B.MB1)
               zero 0   ->  all_reduce([g]) once per bucket, in place
               zero 1   ->  reduce_scatter([g]) once per bucket
               zero 2+  ->  accumulate(reduce_scatter([B.MB0]), reduce_scatter([B.MB1]))
               experts  ->  the same among the ranks that hold the same ones: whole at level 0,
                   else a block of each rank's experts
               loss     ->  all_reduce([loss])
    requires:  tasks are placed; each holder has a gradient of its own (tie); a region on several
        ranks is matched by one Replicate, or all it holds are experts without copies; regions that
        share a parameter agree on how
    keeps:     values up to summation order, of one process on all replicas' data, where the loss
        weights count the replicas
    """

    name = "replicate"

    def __init__(self, replications: Sequence[Replication], *, sync: bool = True) -> None:
        """`sync=False` leaves the gradients of ZeRO 0 and 1 as they are, for a later step."""
        self._replications = replications
        self._sync = sync

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place."""
        faults = region_misses(self._replications, dag)
        buckets = [
            bucket
            for devices, readers in sorted(_readers(dag).items())
            for bucket in self._buckets(dag, devices, readers, faults)
        ]
        if faults:
            raise PiperPlanError(join_faults("the replication is not possible", faults))
        for bucket in buckets:
            for position in bucket.positions:
                spec = dag.args[position].spec
                assert spec is not None
                dag.layouts[position, bucket.devices] = bucket.layout(spec, sync=self._sync)
            for position in bucket.experts:
                layout = dag.layouts[position, bucket.devices]
                dag.layouts[position, bucket.devices] = bucket.expert_layout(
                    layout, sync=self._sync
                )
        if dag.training:
            gradients = _gradients(dag)
            for bucket in buckets:
                if self._sync or bucket.how.zero >= 2:
                    _reduce(dag, bucket, gradients)
                _reduce_experts(dag, bucket, gradients, sync=self._sync)
            _check_ties(dag)
        _reduce_loss(dag, buckets)

    def _buckets(
        self,
        dag: Dag,
        devices: Devices,
        readers: dict[RegionId, dict[int, None]],
        faults: list[str],
    ) -> "list[_Bucket]":
        """The parameters of a device group, by the first region that reads them."""
        found: list[_Bucket] = []
        home: dict[int, tuple[Replication, RegionId]] = {}
        for region in dag.regions:
            if region not in readers:
                continue
            mine = [r for r in self._replications if r.filter.matches(_tags(region))]
            if len(mine) > 1:
                labels = " and ".join(r.label for r in mine)
                faults.append(f"{region} is replicated twice: {labels}")
            if len(mine) != 1:
                continue  # `_unsummed` looks at those that nobody replicates
            (one,) = mine
            if not one.covers(devices):
                faults.append(
                    f"{one.label}: its axes do not number the ranks {devices} of {region}\n"
                    "  hint  name every axis along which the region's ranks differ"
                )
                continue
            positions: list[int] = []
            experts: list[int] = []
            for position in readers[region]:
                other, where = home.setdefault(position, (one, region))
                if where == region:  # `shard` has laid out experts
                    laid_out = (position, devices) in dag.layouts
                    (experts if laid_out else positions).append(position)
                elif _how(other) != _how(one):
                    faults.append(
                        f"parameter {dag.args[position].name!r} is used in {where} and {region}, "
                        f"which are replicated differently: {other.label} and {one.label}"
                    )
            found.append(
                _Bucket(
                    devices=devices,
                    region=region,
                    positions=tuple(positions),
                    experts=tuple(experts),
                    how=one,
                )
            )
            faults += _check_experts(dag, found[-1])
            if one.zero:
                faults += [
                    f"parameter {dag.args[p].name!r} is not contiguous and cannot be sharded\n"
                    "  hint  make it contiguous before compiling, or use zero=0"
                    for p in positions
                    if not dag.args[p].spec.is_contiguous  # type: ignore[union-attr]
                ]
        for region, read in readers.items():
            if not any(r.filter.matches(_tags(region)) for r in self._replications):
                left = [position for position in read if position not in home]
                faults += _unsummed(dag, devices, region, left)
        return found


def _unsummed(dag: Dag, devices: Devices, region: RegionId, positions: Sequence[int]) -> list[str]:
    """Parameters of a region without a Replicate whose gradients nobody would sum.

    Legal iff  each that gets a gradient is split by experts, and no two ranks have the same ones
    """
    trained = {int(key) for key in results_of(dag.graph)["grads"]}
    odd = []
    for position in positions:
        layout = dag.layouts.get((position, devices))
        if position in trained and (layout is None or copy_groups(layout.expert_groups)):
            odd.append(repr(dag.args[position].name))
    if not odd:
        return []
    return [
        f"ranks {devices} hold copies of {region}'s parameters ({', '.join(odd)}) and nobody sums "
        f"their gradients ({dag.regions[region] or 'no source line'})\n"
        f"  hint  add piper.Replicate({_tags(region)}, axes=...), with all axes along which the "
        "ranks differ"
    ]


def _how(one: Replication) -> tuple[Any, ...]:
    return (min(one.zero, 1), one.zero >= 2, one.axes, one.shard_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """The parameters that a region is the first to use on one device group.

    Attributes:
        devices: The group.
        region: The region.
        positions: Those that the group's ranks hold alike.
        experts: Those of which each rank holds its own experts.
        how: The directive.
    """

    devices: Devices
    region: RegionId
    positions: tuple[int, ...]
    experts: tuple[int, ...]
    how: Replication

    def layout(self, spec: TensorSpec, *, sync: bool) -> Layout:
        """How the ranks hold a parameter that they all use whole."""
        groups = self.how.shard_groups(self.devices)
        is_sharded = self.how.zero > 0 and len(groups[0]) > 1 and bool(spec.shape)
        return self._layout(str(self.region), groups if is_sharded else (), sync=sync)

    def expert_layout(self, found: Layout, *, sync: bool) -> Layout:
        """The layout of experts, as `shard` found it, with what this directive adds."""
        shards = self.expert_shards(found)
        if not shards:
            return replace(found, reduced=sync)
        made = self._layout(f"{self.region}.experts", shards, sync=sync)
        return replace(made, expert_groups=found.expert_groups)

    def _layout(self, name: str, shards: Groups, *, sync: bool) -> Layout:
        return Layout(
            bucket=name,
            shard_groups=shards,
            stream=self.how.gather_stream,
            prefetch=self.how.prefetch,
            keep=self.how.keep if self.how.zero == 3 else "step",
            reduced=sync or self.how.zero >= 2,
            where=self.how.label,
        )

    def expert_shards(self, found: Layout) -> Groups | None:
        """The ranks that hold the blocks of one rank's experts; None where that is not possible."""
        copies = copy_groups(found.expert_groups)
        if not self.how.zero or not copies:
            return ()
        sets = [set(group) for group in self.how.shard_groups(self.devices)]
        shared = {len(set(group) & one) for group in copies for one in sets} - {0}
        if shared == {len(copies[0])}:
            return copies
        return () if shared == {1} else None


def _tags(region: RegionId) -> dict[str, int | str]:
    return dict(region.tags)


def _readers(dag: Dag) -> dict[Devices, dict[RegionId, dict[int, None]]]:
    """Where several ranks run a region's tasks: the parameters that these read, in order of use."""
    found: dict[Devices, dict[RegionId, dict[int, None]]] = {}
    for node in dag.tasks():
        task = task_of(node)
        if len(task.devices) == 1 or task.name is None:
            continue
        mine = found.setdefault(task.devices, {}).setdefault(task.name.region, {})
        for source in node.all_input_nodes:
            position = source.meta.get("arg")
            if position is not None and dag.args[position].kind is ArgKind.PARAMETER:
                mine[position] = None
    return found


def _gradients(dag: Dag) -> dict[tuple[int, Devices], Node]:
    """The accumulation of every parameter's gradient on each of its holders."""
    found: dict[tuple[int, Devices], Node] = {}
    for key, nodes in results_of(dag.graph)["grads"].items():
        if dag.args[int(key)].kind is not ArgKind.PARAMETER:
            continue
        for node in nodes:
            parts = [node] if task_of(node).kind is Kind.ACCUMULATE else node.all_input_nodes
            for part in parts:
                found[int(key), task_of(part).devices] = part
    return found


def _reduce(dag: Dag, bucket: _Bucket, gradients: dict[tuple[int, Devices], Node]) -> None:
    """Insert a bucket's reductions."""
    sums = _those_of(bucket.positions, bucket, gradients)
    if not sums:
        return
    reduced = _reduce_sums(dag, bucket, sums, (bucket.devices,), str(bucket.region))
    copies = copy_groups(bucket.how.shard_groups(bucket.devices))
    if copies:
        shards = {p: n for p, n in reduced.items() if dag.layouts[p, bucket.devices].shard_groups}
        _all_reduce(dag, bucket, shards, copies, f"grads.{bucket.region}.copies")


def _those_of(
    positions: Sequence[int], bucket: _Bucket, gradients: dict[tuple[int, Devices], Node]
) -> dict[int, Node]:
    keys = {position: (position, bucket.devices) for position in positions}
    return {position: gradients[key] for position, key in keys.items() if key in gradients}


def _reduce_sums(
    dag: Dag, bucket: _Bucket, sums: dict[int, Node], everyone: Groups, name: str
) -> dict[int, Node]:
    """Reduce sums of gradients once, or each of their parts; `everyone` adds those kept whole."""
    if bucket.how.zero < 2:
        return _collect(dag, bucket, sums, everyone, f"grads.{name}")
    by_task: dict[Node, dict[int, Node]] = {}
    for position, node in sums.items():
        for part in node.all_input_nodes:
            by_task.setdefault(producer(part), {})[position] = part
    for made, values in by_task.items():
        _collect(dag, bucket, values, everyone, f"grads.{task_of(made).name}")
    for node in sums.values():  # the sums are of shards now
        node.meta["spec"] = node.all_input_nodes[0].meta["spec"]
    return sums


def _check_experts(dag: Dag, bucket: _Bucket) -> list[str]:
    """Copies of experts are sharded over all that hold the same ones, or over none of them."""
    odd = [
        dag.args[p].name
        for p in bucket.experts
        if bucket.expert_shards(dag.layouts[p, bucket.devices]) is None
    ]
    if not odd:
        return []
    return [
        f"{bucket.how.label}: shard_axes={bucket.how.shard_axes} shard experts ({', '.join(odd)}) "
        "over some of the ranks that hold the same ones, which is not supported\n"
        "  hint  name all axes along which experts are copied, or none of them"
    ]


def _reduce_experts(
    dag: Dag, bucket: _Bucket, gradients: dict[tuple[int, Devices], Node], *, sync: bool
) -> None:
    """Sum experts' gradients over the ranks that hold the same experts, and over no others."""
    name = f"{bucket.region}.experts"
    by_copies: dict[Groups, dict[int, Node]] = {}
    for position, node in _those_of(bucket.experts, bucket, gradients).items():
        copies = copy_groups(dag.layouts[position, bucket.devices].expert_groups)
        if copies:
            by_copies.setdefault(copies, {})[position] = node
    for copies, sums in by_copies.items():
        layouts = {p: dag.layouts[p, bucket.devices] for p in sums}
        whole = {p: n for p, n in sums.items() if not layouts[p].shard_groups}
        sharded = {p: n for p, n in sums.items() if layouts[p].shard_groups}
        if sync:
            _all_reduce(dag, bucket, whole, copies, f"grads.{name}")
        if sharded and (sync or bucket.how.zero >= 2):
            _reduce_sums(dag, bucket, sharded, copies, name)


def _collect(
    dag: Dag, bucket: _Bucket, values: dict[int, Node], everyone: Groups, label: str
) -> dict[int, Node]:
    """Reduce these gradients: those of sharded parameters to shards, the others whole."""
    layouts = {p: dag.layouts[p, bucket.devices] for p in values}
    whole = {p: n for p, n in values.items() if not layouts[p].shard_groups}
    sharded = {p: n for p, n in values.items() if layouts[p].shard_groups}
    made = _all_reduce(dag, bucket, whole, everyone, label)
    if not sharded:
        return made
    groups = layouts[next(iter(sharded))].shard_groups
    results = [
        (f"{n.name}_shard", ops.block_spec(n.meta["spec"], len(groups[0])))
        for n in sharded.values()
    ]
    return made | _insert(dag, bucket, Kind.REDUCE_SCATTER, sharded, groups, label, results)


def _all_reduce(
    dag: Dag, bucket: _Bucket, values: dict[int, Node], groups: Groups, label: str
) -> dict[int, Node]:
    if not values:
        return {}
    results = [(f"{n.name}_sum", n.meta["spec"]) for n in values.values()]
    return _insert(dag, bucket, Kind.ALL_REDUCE, values, groups, label, results)


def _insert(
    dag: Dag,
    bucket: _Bucket,
    kind: Kind,
    values: dict[int, Node],
    groups: Groups,
    label: str,
    results: Sequence[tuple[str, TensorSpec]],
) -> dict[int, Node]:
    """One reduction over a bucket's values, behind the last of them; users take its results."""
    nodes = list(values.values())
    users = [list(n.users) for n in nodes]
    last = max(nodes)
    while is_pick(last.next):
        last = last.next
    task = Task(
        kind=kind,
        label=label,
        devices=bucket.devices,
        stream=bucket.how.reduce_stream,
        where=task_of(producer(nodes[0])).where,
    )
    with dag.graph.inserting_after(last):
        made = collective(
            dag.graph,
            task,
            getattr(ops, kind.value),
            nodes,
            groups,
            name=f"{kind.value}_{safe(label)}_on_{bucket.devices[0]}",
            results=results,
        )
    for node, result, old in zip(nodes, made, users, strict=True):
        for user in old:
            user.replace_input_with(node, result)
            if user < made[-1]:  # the sum of a tied parameter's gradients
                made[-1].append(user)
    return dict(zip(values, made, strict=True))


def _check_ties(dag: Dag) -> None:
    """A gradient that several groups add must be laid out alike on all of them."""
    for key, nodes in results_of(dag.graph)["grads"].items():
        for node in nodes:
            if producer(node).meta.get("task") is None or task_of(producer(node)).kind != Kind.SUM:
                continue
            specs = {source.meta["spec"] for source in node.all_input_nodes}
            if len({spec.shape for spec in specs}) > 1:
                found = {layout.where for (p, _), layout in dag.layouts.items() if p == int(key)}
                raise PiperPlanError(
                    format_error(
                        f"parameter {dag.args[int(key)].name!r} is whole on one device group and "
                        "sharded on another, so their gradients cannot be added",
                        {"directives": "\n".join(sorted(found))},
                        hint="give the regions that share it Replicates that agree on zero=0 or "
                        "not, and on axes",
                    )
                )
            node.meta["spec"] = node.all_input_nodes[0].meta["spec"]


def _reduce_loss(dag: Dag, buckets: list[_Bucket]) -> None:
    loss = results_of(dag.graph)["loss"]
    if loss is None or producer(loss).meta.get("task") is None:
        return
    task = task_of(producer(loss))
    stream = next((b.how.reduce_stream for b in buckets if b.devices == task.devices), None)
    if stream is None:
        if len(task.devices) > 1:
            raise PiperPlanError(
                format_error(
                    f"ranks {task.devices} each make the loss of their own data, and no directive "
                    "says that it is the mean of theirs",
                    {"made by": task.where or "no source line"},
                    hint="add piper.Replicate(...) for the region that makes the loss",
                )
            )
        return
    with dag.graph.inserting_after(loss):
        (total,) = collective(
            dag.graph,
            Task(
                kind=Kind.ALL_REDUCE,
                label="loss",
                devices=task.devices,
                stream=stream,
                where=task.where,
            ),
            ops.all_reduce,
            [loss],
            (task.devices,),
            name="all_reduce_loss",
            results=[("loss_sum", loss.meta["spec"])],
        )
    loss.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total.args[0])
