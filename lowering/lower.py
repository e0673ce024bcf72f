"""Lower: from the placed DAG and a task order to one instruction list per rank.

Terms: *early* nodes (sends, accumulation, joins of local values) run as soon as their inputs exist;
*late* nodes are those that need a value of another rank but are no compute task (the loss on other
ranks, the sum of a tied gradient): they run last.

Signature: DAG + order -> rank programs without posts, drains and frees, which `channels.py` and
`memory.py` add.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx.node import Node

from piper_dynamo.ir.graph import Dag, is_pick, producer, results_of, task_of
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.ops import block_spec
from piper_dynamo.ir.program import Groups, Instr, Op, RankProgram
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import COLLECTIVE_KINDS, ROW_EXCHANGES, Kind, Task

_COLLECTIVES = {kind: Op(kind.value) for kind in COLLECTIVE_KINDS}


@dataclass(slots=True, kw_only=True)
class Draft:
    """A rank's program while it is being lowered.

    Attributes:
        rank: Which rank.
        place: Which of its device group.
        instrs: Instructions so far.
        received: Handle of each message this rank receives -> name of the node that sends it.
    """

    rank: int
    place: int
    instrs: list[Instr] = field(default_factory=list)
    received: dict[str, str] = field(default_factory=dict)


def lower(
    dag: Dag, order: Mapping[tuple[int, ...], list[Node]], place: int | None = None
) -> list[Draft]:
    """One draft per rank, in rank order.

    Args:
        dag: The distributed DAG.
        order: Every device group's tasks in the order they run.
        place: Only of the ranks at this place of their groups; None: of all.
    """
    position = {node: i for i, node in enumerate(dag.graph.nodes)}
    by_group: dict[tuple[int, ...], list[Node]] = {devices: [] for devices in order}
    for node in dag.graph.nodes:
        task = node.meta.get("task")
        if task is not None and task.kind is not Kind.COMPUTE:
            by_group.setdefault(task.devices, []).append(node)
    edges = _order_edges(dag)
    drafts: dict[int, Draft] = {}
    for devices, tasks in order.items():
        for at, rank in enumerate(devices):
            if place not in (None, at):
                continue
            lowering = _Lowering(dag, rank, at, position, edges)
            lowering.run(tasks, by_group[devices])
            drafts[rank] = lowering.draft
    return [drafts[rank] for rank in sorted(drafts)]


def finish(dag: Dag, draft: Draft, world_size: int) -> RankProgram:
    """The program of a draft: its registers bound to the call's arguments and results."""
    rank, place = draft.rank, draft.place
    used = {reg for i in draft.instrs for reg in i.reads()}
    results = results_of(dag.graph)
    state, data, weights, tangents = [], [], [], []
    wanted_buffers = {
        key for key, nodes in results["buffers"].items() if any(_mine(n, rank) for n in nodes)
    }
    for node in dag.graph.find_nodes(op="placeholder"):
        position = node.meta.get("arg")
        if "tangent" in node.meta:
            tangents.append((node.meta["tangent"], node.name))
        elif position is None:
            if node.name in used:
                weights.append(node.name)
        elif dag.args[position].kind is ArgKind.DATA:
            if node.name in used:
                data.append((node.name, position))
        elif node.name in used or str(position) in wanted_buffers:
            state.append((node.name, position))
    held = {position for _, position in state}
    loss = [n.name for n in results["loss"] or [] if _mine(n, rank)]
    layouts = {p: (d, layout) for (p, d), layout in dag.layouts.items() if rank in d}
    chunks = {i.target: dag.chunks[i.target].key for i in draft.instrs if i.op is Op.RUN}
    grads = [
        (int(key), n.name)
        for key, nodes in results["grads"].items()
        for n in nodes
        if _mine(n, rank) and (int(key) in held or dag.args[int(key)].kind is ArgKind.DATA)
    ]
    return RankProgram(
        rank=rank,
        world_size=world_size,
        instrs=tuple(draft.instrs),
        state=tuple(state),
        data=tuple(data),
        weights=tuple(weights),
        tangents=tuple(tangents),
        loss=loss[0] if loss else "",
        outputs=tuple(
            (i, n.name)
            for i, ns in enumerate(results["outputs"])
            for n in ns or ()
            if _mine(n, rank)
        ),
        grads=tuple(grads),
        buffers=tuple(
            (int(key), n.name)
            for key, nodes in results["buffers"].items()
            for n in nodes
            if _mine(n, rank)
        ),
        chunks=tuple(sorted(chunks.items())),
        contributors=tuple(
            (p, ranks)
            for p in dict(grads)
            if (ranks := dag.contributors(p, place) or (rank,)) != (rank,)
        ),
        shards=_blocks(state, {p: one.shard_groups for p, (_, one) in layouts.items()}, rank),
        experts=_blocks(state, {p: one.expert_groups for p, (_, one) in layouts.items()}, rank),
    )


def _blocks(
    state: list[tuple[str, int]], groups: Mapping[int, Groups], rank: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The parameters of which a rank has a block, and the ranks that have the others."""
    return tuple((p, group) for _, p in state for group in groups.get(p, ()) if rank in group)


def _order_edges(dag: Dag) -> tuple[dict[Node, list[Node]], dict[Node, list[Node]]]:
    """Orders of nodes that are no compute tasks: what follows a task, what precedes a node."""
    after: dict[Node, list[Node]] = {}
    before: dict[Node, list[Node]] = {}
    for first, second, _ in dag.orders:
        if task_of(second).kind is not Kind.COMPUTE:
            before.setdefault(second, []).append(first)
            if task_of(first).kind is Kind.COMPUTE:
                after.setdefault(first, []).append(second)
    return after, before


def _mine(node: Node, rank: int) -> bool:
    task = producer(node).meta.get("task")
    return task is not None and rank in task.devices


class _Lowering:
    """One rank."""

    def __init__(
        self,
        dag: Dag,
        rank: int,
        place: int,
        position: dict[Node, int],
        edges: tuple[dict[Node, list[Node]], dict[Node, list[Node]]],
    ) -> None:
        self.dag, self.rank, self.place = dag, rank, place
        self.position = position
        self.draft = Draft(rank=rank, place=place)
        self.known: set[Node] = set()
        self.waiting: dict[Node, int] = {}
        self.sums: set[Node] = set()
        self.issued: set[Node] = set()
        self.finished: set[Node] = set()
        self.after, self.before = edges

    def run(self, tasks: list[Node], others: list[Node]) -> None:
        """Emit the compute tasks in order, everything else around them."""
        late = self._late(others)
        early = [n for n in others if n not in late]
        self.waiting = {
            n: sum(1 for i in n.all_input_nodes if not _is_there(i))
            + sum(1 for i in self.before.get(n, ()) if task_of(i).kind is Kind.COMPUTE)
            for n in early
        }
        for node in early:
            if self.waiting[node] == 0 and task_of(node).kind in _COLLECTIVES:
                self._other(node)
        for node in tasks:
            self._compute(node)
            for follower in self.after.get(node, ()):
                self._release(follower)
        for node in sorted(late, key=self.position.__getitem__):
            for source in node.all_input_nodes:
                self._ensure(source)
            if node not in self.issued and node not in self.known:
                self._other(node)
        for node in _result_nodes(self.dag):
            task = producer(node).meta.get("task")
            if task is not None and self.rank in task.devices:
                self._ensure(node)

    def _late(self, others: list[Node]) -> set[Node]:
        """Nodes that need what comes from other ranks. Sums add their parts as these come."""
        waits: set[Node] = set()
        for node in others:
            if task_of(node).kind in (Kind.RECV, Kind.SLICE):
                continue
            for source in node.all_input_nodes:
                made = producer(source).meta.get("task")
                if made is None or _is_there(source):
                    continue
                comes = made.kind is Kind.RECV or made.kind in _COLLECTIVES
                if comes or producer(source) in waits:
                    waits.add(node)
        at_once = ROW_EXCHANGES | {Kind.ACCUMULATE}
        return {node for node in waits if task_of(node).kind not in at_once}

    def _compute(self, node: Node) -> None:
        task = task_of(node)
        phase = node.meta.get("phase")
        if phase is None:
            return
        assert task.name is not None
        picks = {}
        bundle_out = "_" if phase.gives_bundle else ""
        for user in node.users:
            slot = user.args[1]
            assert is_pick(user)
            assert isinstance(slot, int)
            if phase.gives_bundle and slot == len(phase.results):
                bundle_out = user.name if user.users else "_"
            elif user.users:
                picks[slot] = user
        inputs, bundle_in, num_primals = [], "", len(phase.primals)
        for place, source in enumerate(node.args):
            assert isinstance(source, Node)
            if phase.takes_bundle and place == num_primals:
                bundle_in = source.name
                continue
            self._ensure(source)
            inputs.append(source.name)
        self.draft.instrs.append(
            Instr(
                op=Op.RUN,
                task=str(task.name),
                outputs=tuple(
                    picks[i].name if i in picks else "_" for i in range(len(phase.results))
                ),
                inputs=tuple(inputs),
                target=str(node.target),
                bundle_in=bundle_in,
                bundle_out=bundle_out,
                num_primals=num_primals,
                seed=self.dag.seed(task.name) if phase.chunk.is_random else None,
                where=task.where,
            )
        )
        for pick in picks.values():
            self._made(pick)

    def _made(self, value: Node) -> None:
        """A value exists: run the early nodes it was the last input of; partial sums at once."""
        self.known.add(value)
        for user in sorted(value.users, key=self.position.__getitem__):
            if user not in self.waiting or _is_there(value):
                continue
            if task_of(user).kind is Kind.ACCUMULATE:
                self._accumulate(user, value)
            self._release(user)

    def _release(self, node: Node) -> None:
        """One thing less that an early node waits for."""
        self.waiting[node] -= 1
        if self.waiting[node] > 0:
            return
        if task_of(node).kind is Kind.ACCUMULATE:
            self._made(node)
            return
        for other in self.before.get(node, ()):  # a collective that must have ended
            if task_of(other).kind is not Kind.COMPUTE:
                self._finish_collective(other, task_of(other))
        self._other(node)

    def _accumulate(self, node: Node, part: Node) -> None:
        first = node not in self.sums
        self.sums.add(node)
        spec, task = node.meta["spec"], task_of(producer(part))
        casts = spec.dtype != part.meta["spec"].dtype
        self.draft.instrs.append(
            Instr(
                op=Op.CAST if first and casts else Op.ACCUMULATE,
                task=str(task.name),
                outputs=(node.name,),
                inputs=(part.name,) if first else (node.name, part.name),
                spec=spec if casts else None,
                nbytes=(spec.nbytes,) if first and casts else (),
                where=task.where,
            )
        )

    def _ensure(self, value: Node) -> None:
        """Make an input that no local task makes: wait for it, or slice it off the batch."""
        if value.op == "placeholder" or value in self.known:
            return
        task = producer(value).meta.get("task")
        if task is None or task.kind is Kind.COMPUTE:
            return
        if task.kind is Kind.SLICE:
            self._slice(value, task)
        elif task.kind is Kind.RECV:
            self._wait(value, task)
        elif task.kind in _COLLECTIVES:
            self._finish_collective(producer(value), task)
            return
        elif task.kind in (Kind.ACCUMULATE, Kind.CAST):  # its last parts may be on their way
            for source in value.all_input_nodes:
                self._ensure(source)
            if task.kind is Kind.CAST and value not in self.known:
                self._other(value)
            return
        else:
            return
        self._made(value)

    def _slice(self, node: Node, task: Task) -> None:
        source, dim, part, parts = node.args
        assert isinstance(source, Node)
        assert dim is None or isinstance(dim, int)
        assert isinstance(part, int)
        assert isinstance(parts, int)
        spec: TensorSpec = node.meta["spec"]
        self.draft.instrs.append(
            Instr(
                op=Op.SLICE,
                task=task.label,
                outputs=(node.name,),
                inputs=(source.name,),
                dim=dim,
                part=part,
                parts=parts,
                nbytes=(spec.nbytes if dim else 0,),
            )
        )

    def _wait(self, node: Node, task: Task) -> None:
        sent = node.args[0]
        assert isinstance(sent, Node)
        source = sent.meta["ranks"]["source"]
        handle = f"h_{node.name}"
        self.draft.received[handle] = sent.name
        self.draft.instrs.append(
            Instr(
                op=Op.WAIT,
                task=str(task.name or task.label),
                outputs=(node.name,),
                inputs=(handle,),
                peer=source[self.place],
                spec=node.meta["spec"],
                nbytes=(0,),
                stream=task.stream,
                where=task.where,
            )
        )

    def _other(self, node: Node) -> None:
        """A node that is neither compute, slice, receive nor accumulation."""
        task = task_of(node)
        spec: TensorSpec | None = node.meta.get("spec")
        inputs = [n.name for n in node.all_input_nodes]
        common: dict[str, Any] = {"task": str(task.name or task.label), "where": task.where}
        new = (spec.nbytes,) if spec is not None else ()
        match task.kind:
            case Kind.SEND:
                target = node.meta["ranks"]["target"]
                instr = Instr(
                    op=Op.SEND,
                    inputs=(inputs[0],),
                    peer=target[self.place],
                    spec=spec,
                    target=node.name,  # becomes the position in the channel
                    stream=task.stream,
                    **common,
                )
            case Kind.CAST:
                assert spec is not None
                held = self._held(node, spec)
                instr = Instr(
                    op=Op.CAST,
                    outputs=(node.name,),
                    inputs=tuple(inputs),
                    spec=held,
                    nbytes=(held.nbytes,),
                    **common,
                )
            case Kind.SUM:
                instr = Instr(
                    op=Op.ADD, outputs=(node.name,), inputs=tuple(inputs), nbytes=new, **common
                )
            case Kind.ACCUMULATE:
                for source in node.all_input_nodes:
                    self._accumulate(node, source)
                self._made(node)
                return
            case Kind.LOSS:
                losses, weights = node.args
                assert isinstance(losses, tuple | list)
                assert isinstance(weights, tuple | list)
                pairs = [str(n) for pair in zip(losses, weights, strict=True) for n in pair]
                instr = Instr(
                    op=Op.LOSS, outputs=(node.name,), inputs=tuple(pairs), nbytes=new, **common
                )
            case Kind.CONCAT:
                parts, dim = node.args
                assert isinstance(parts, tuple | list)
                instr = Instr(
                    op=Op.CONCAT,
                    outputs=(node.name,),
                    inputs=tuple(str(p) for p in parts),
                    dim=dim if isinstance(dim, int) else None,
                    nbytes=new,
                    **common,
                )
            case _ if task.kind in COLLECTIVE_KINDS:
                self._collective(node, task)
                return
            case _:
                raise AssertionError(f"{task.kind} is lowered elsewhere")
        self.draft.instrs.append(instr)
        if instr.outputs:
            self._made(node)

    def _held(self, node: Node, spec: TensorSpec) -> TensorSpec:
        """What a cast makes: of a parameter, what the rank holds of it."""
        layout = self.dag.layouts.get((node.meta.get("arg", -1), task_of(node).devices))
        return spec if layout is None else layout.held(spec)

    def _collective(self, node: Node, task: Task) -> None:
        """Start a collective; whoever uses its values first waits for it."""
        groups, sources = node.meta["ranks"]["groups"], node.args[0]
        assert isinstance(sources, tuple | list)
        (group,) = [g for g in groups if self.rank in g]
        for source in node.all_input_nodes:
            self._ensure(source)
        if node in self.issued:  # its last input set it off
            return
        self.issued.add(node)
        specs = tuple(pick.meta["spec"] for pick in _picks(node))
        self.draft.instrs.append(
            Instr(
                op=_COLLECTIVES[task.kind],
                task=task.label,
                outputs=(f"h_{node.name}",),
                inputs=tuple(str(s) for s in sources),
                group=group,
                specs=specs,
                nbytes=tuple(self._new_bytes(task.kind, spec, len(group)) for spec in specs),
                stream=task.stream,
                where=task.where,
            )
        )

    def _new_bytes(self, kind: Kind, spec: TensorSpec, size: int) -> int:
        """What a result takes: rows are gathered in equal blocks, the last one filled up."""
        if kind is Kind.ALL_REDUCE:
            return 0
        return size * block_spec(spec, size).nbytes if kind is Kind.ALL_GATHER else spec.nbytes

    def _finish_collective(self, node: Node, task: Task) -> None:
        """Wait for a collective, started now if it was not before; all its values are there."""
        if node in self.finished:
            return
        self.finished.add(node)
        if node not in self.issued:
            self._collective(node, task)
        picks = _picks(node)
        self.draft.instrs.append(
            Instr(
                op=Op.WAIT,
                task=task.label,
                outputs=tuple(pick.name if pick.users else "_" for pick in picks),
                inputs=(f"h_{node.name}",),
                specs=tuple(pick.meta["spec"] for pick in picks),
                nbytes=(0,) * len(picks),
                stream=task.stream,
                where=task.where,
            )
        )
        for pick in picks:
            if pick.users:
                self._made(pick)


def _is_there(value: Node) -> bool:
    """Whether nobody waits for a value before it is used: what the call gives, and casts of it.

    So is what an exchange of counts tells the exchanges of rows: these start as soon as their rows
    exist, and wait for it themselves.
    """
    if value.op == "placeholder" or "arg" in value.meta:
        return True
    if not is_pick(value) or value.args[1] != 1:
        return False
    return task_of(producer(value)).kind is Kind.EXCHANGE_COUNTS


def _picks(node: Node) -> list[Node]:
    """The picks of a collective, by index; it has one for every value."""
    return sorted(node.users, key=lambda user: int(str(user.args[1])))


def _result_nodes(dag: Dag) -> list[Node]:
    results = results_of(dag.graph)
    nodes = list(results["loss"] or [])
    for key in ("grads", "buffers"):
        nodes += [n for found in results[key].values() for n in found]
    return [*nodes, *(n for found in results["outputs"] for n in found or ())]
