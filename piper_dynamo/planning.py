"""A plan: the whole job of one step, made without devices, weights or processes.

One capture serves many strategies: the template (the one-microbatch DAG and its chunks) is kept by
what was captured, and another strategy over the same model starts from it.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx
from torch.fx.node import Node

from piper_dynamo import _torch_compat as compat
from piper_dynamo import capture as capturing
from piper_dynamo.costs import Costs
from piper_dynamo.errors import PiperPlanError, PiperStrategyError, format_error
from piper_dynamo.footprint import Optimizer, RankMemory, at_peak, held_before
from piper_dynamo.garbage import collect, resting_collector
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.graph import Dag, Layout, print_dag, task_of
from piper_dynamo.ir.joint import Arg
from piper_dynamo.ir.meaning import Meaning, as_placed, meaning_of
from piper_dynamo.ir.program import Group, Instr, RankProgram, copy_groups
from piper_dynamo.ir.task import Pass, RegionId
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.apart import keep_apart
from piper_dynamo.lowering.channels import drain_sends, number_messages, post_receives
from piper_dynamo.lowering.emit import emit
from piper_dynamo.lowering.lower import finish, lower
from piper_dynamo.lowering.memory import free_dead, held_over_time, memory_curve, peak_bytes
from piper_dynamo.lowering.schedule import schedule
from piper_dynamo.lowering.simulate import Simulation, simulate
from piper_dynamo.lowering.sums import add_in_chunks
from piper_dynamo.measure import measured_costs, measured_step
from piper_dynamo.moe.capacity import Capacity
from piper_dynamo.passes.build import build
from piper_dynamo.passes.capacity import Bound, set_capacities
from piper_dynamo.passes.check import value_checker
from piper_dynamo.passes.cut import cut
from piper_dynamo.passes.gather import Gather
from piper_dynamo.passes.order import Order, named_halves
from piper_dynamo.passes.partition import Partitioner
from piper_dynamo.passes.pieces import Cuts
from piper_dynamo.passes.pipeline import GraphPass, run_passes, verify_level
from piper_dynamo.passes.place import Place, Placement
from piper_dynamo.passes.regions import find_regions
from piper_dynamo.passes.replicate import Replicate, Replication
from piper_dynamo.passes.shard import Shard, Sharding
from piper_dynamo.passes.split import Split
from piper_dynamo.passes.split_backward import SplitBackward
from piper_dynamo.passes.tie import Tie
from piper_dynamo.passes.transfer import Transfer
from piper_dynamo.pictures import save
from piper_dynamo.pictures.graph import draw_graph
from piper_dynamo.plan_checks import check_two_programs, check_weight_inputs
from piper_dynamo.runtime.comm import STATE
from piper_dynamo.strategy import Order as OrderDirective
from piper_dynamo.strategy import Place as PlaceDirective
from piper_dynamo.strategy import Replicate as ReplicateDirective
from piper_dynamo.strategy import Shard as ShardDirective
from piper_dynamo.strategy import Split as SplitDirective
from piper_dynamo.strategy import Strategy
from piper_dynamo.summary import summarize
from piper_dynamo.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A captured microbatch, cut and partitioned; every strategy starts from a copy of its DAG.

    The captured graph is not kept: its chunks say what is computed.

    Attributes:
        dag: The DAG of one microbatch, with its chunks.
        args: The captured call's arguments.
        changed: Positions of the buffers that the call changes.
        untagged: Forward nodes that carried no tag: user line and the region they joined.
        halves: For each region, whether it has input-gradient and weight-gradient work.
        check: Compares a DAG with the captured graph, at level 3 of PIPER_VERIFY; else None.
    """

    dag: Dag
    args: tuple[Arg, ...]
    changed: frozenset[int]
    untagged: tuple[tuple[str, RegionId], ...]
    halves: dict[str, tuple[bool, bool]]
    check: Callable[[Dag], None] | None


@dataclass(slots=True, kw_only=True)
class Program:
    """One rank's program, printed as the Python that runs."""

    rank_program: RankProgram

    @property
    def instrs(self) -> tuple[Instr, ...]:
        """The instructions, in host order."""
        return self.rank_program.instrs

    def __str__(self) -> str:
        return emit(self.rank_program).source


@dataclass(slots=True, kw_only=True)
class Plan:
    """Everything a step of a strategy will do on every rank.

    Attributes:
        strategy: What was asked for.
        world_size: How many ranks.
        programs: Every rank's program, in rank order.
        dag: The distributed DAG.
        args: The captured call's arguments.
        changed: Positions of the buffers that a step changes.
        dims: The dim along which each data argument is split, by position.
        untagged: Forward nodes that carried no tag: user line and the region they joined.
        halves: For each region, whether it has input-gradient and weight-gradient work.
        groups: The device groups.
        meaning: What the step has to compute, for the proof.
    """

    strategy: Strategy
    world_size: int
    programs: tuple[RankProgram, ...]
    dag: Dag
    args: tuple[Arg, ...]
    changed: frozenset[int]
    dims: dict[int, int]
    untagged: tuple[tuple[str, RegionId], ...]
    halves: dict[str, tuple[bool, bool]]
    groups: tuple[tuple[int, ...], ...]
    meaning: Meaning
    _fingerprint: str = field(default="")

    @property
    def graph(self) -> str:
        """The distributed DAG, one node per line."""
        return print_dag(self.dag)

    @property
    def chunks(self) -> Mapping[str, Chunk]:
        """The chunks that programs run, by name."""
        return self.dag.chunks

    def program(self, rank: int) -> Program:
        """One rank's program; `str()` of it is the emitted Python."""
        if not 0 <= rank < self.world_size:
            raise PiperPlanError(f"rank {rank} is outside the world of {self.world_size} ranks")
        return Program(rank_program=self.programs[rank])

    def verify(self) -> None:
        """Prove the programs safe and right; raises PiperPlanError listing every fault."""
        verify(self.programs, self.meaning, replicas_of(self.groups))

    def simulate(self, costs: Costs | None = None) -> Simulation:
        """The step on an ideal machine with the given costs."""
        return simulate(self.programs, costs or Costs(), self.halves)

    def timeline(self, costs: Costs | None = None, *, optimizer: Optimizer = None) -> Timeline:
        """The simulated step, with what each rank holds over time, by category.

        Args:
            costs: What things cost; None: every pass of a region 1.
            optimizer: Whose state is counted, as in `memory`.
        """
        found = self.simulate(costs)
        for program, starts in zip(self.programs, found.starts, strict=True):
            before = held_before(program, self.args, optimizer)
            curve = memory_curve(program, self.dag.chunks, starts, before)
            found.timeline.memory[program.rank] = curve
        return found.timeline

    def memory(self, optimizer: Optimizer = None) -> tuple[RankMemory, ...]:
        """What each rank holds at its peak, by category; temporaries inside chunks not counted.

        Args:
            optimizer: Whose state is counted: "sgd", "momentum", "adam", "adamw", or how many
                values it keeps of each parameter's element, in its dtype. None: it is left out.

        Raises:
            PiperError: It is not known.
        """
        return tuple(
            at_peak(p, self.args, held_over_time(p, self.dag.chunks), optimizer)
            for p in self.programs
        )

    def plot(
        self,
        path: str | Path,
        costs: Costs | None = None,
        *,
        unit: str = "units of cost",
        run: str | Path | None = None,
        optimizer: Optimizer = None,
    ) -> None:
        """Draw the simulated step, rank by time.

        Args:
            path: .png, .svg, .html (with zoom and hover) or .json (a trace for Perfetto).
            costs: What things cost; None: every pass of a region 1, or what it took in `run`.
            unit: The unit of the costs; "s" where they are seconds, as beside a run they must be.
            run: A run folder, whose measured step is drawn below the predicted one.
            optimizer: Whose state is drawn with what ranks hold, as in `memory`.
        """
        timelines = {}
        if run is not None:
            unit, measured = "s", measured_step(run, self.programs)
            timelines = {"measured": measured}
            costs = costs or measured_costs(measured)
        heading = "predicted, from the mean time of each task" if run and costs else "predicted"
        predicted = {heading: self.timeline(costs, optimizer=optimizer)}
        save(predicted | timelines, path, unit=unit)

    def draw(self, path: str | Path) -> None:
        """Draw the distributed DAG, if it is small: .dot, or .svg where graphviz is installed."""
        draw_graph(self.dag, path)

    def holders(self) -> dict[int, tuple[int, ...]]:
        """The ranks that hold each parameter and buffer, by argument position."""
        found: dict[int, list[int]] = {}
        for program in self.programs:
            for _, position in program.state:
                found.setdefault(position, []).append(program.rank)
        return {position: tuple(ranks) for position, ranks in found.items()}

    def layouts(self, rank: int) -> dict[int, Layout]:
        """How a rank holds each replicated parameter, by argument position."""
        return {p: layout for (p, devices), layout in self.dag.layouts.items() if rank in devices}

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks that run the same tasks as this one, on other data; itself included."""
        return next(d for d in self.groups if rank in d)

    def replica(self, rank: int) -> tuple[int, int]:
        """Which replica a rank belongs to, and of how many."""
        group = self.group(rank)
        return group.index(rank), len(group)

    def counting(self, position: int, first: int) -> tuple[int, ...]:
        """The ranks that together count a parameter once: its first holder, or those of a copy."""
        layout = self.dag.layouts.get((position, self.group(first)))
        if layout is None:
            return (first,)
        if layout.expert_groups and layout.shard_groups:  # blocks of blocks: there is one copy
            return tuple(rank for group in layout.shard_groups for rank in group)
        return next((g for g in layout.groups if first in g), (first,))

    def communicators(self) -> list[Group]:
        """What ranks must create before the first step, in one order."""
        found = {i.communicator for p in self.programs for i in p.instrs if i.group}
        for (_, devices), layout in self.dag.layouts.items():
            groups = layout.groups
            found.update((STATE, ranks) for ranks in (devices, *groups, *copy_groups(groups)))
        return sorted(found)

    def fingerprint(self) -> str:
        """A hash of all ranks' programs: ranks may run a step together iff theirs are equal."""
        if not self._fingerprint:
            text = "\n".join(self._identity(p) for p in self.programs)
            self._fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._fingerprint

    def _identity(self, program: RankProgram) -> str:
        """A program's text without what may differ between ranks that run the same job.

        Dynamo numbers the arguments, and adds one where an input is a view into a larger tensor;
        the source may lie in another folder.
        """
        names = {arg.position: arg.name for arg in self.args}
        places = [
            *((names[p], reg) for reg, p in (*program.state, *program.data)),
            *((names[p], reg) for p, reg in (*program.grads, *program.buffers)),
        ]
        held = (*program.contributors, *program.shards, *program.experts)
        ranks = [(names[p], group) for p, group in held]
        rest = (program.loss, program.outputs, program.weights, program.tangents, program.chunks)
        instrs = (replace(i, where=os.path.basename(i.where)) for i in program.instrs)
        return "\n".join([repr((places, ranks, rest)), *map(str, instrs)])

    def summary(self, *, optimizer: Optimizer = None) -> str:
        """Ranks, what they hold, run and exchange, and predicted memory, as tables.

        Args:
            optimizer: Whose state is counted, as in `memory`.
        """
        return summarize(
            self.programs,
            self.args,
            replicas=max(map(len, self.groups), default=1),
            num_microbatches=self.dag.num_microbatches,
            training=self.dag.training,
            untagged=self.untagged,
            communicators=self.communicators(),
            memories=self.memory(optimizer),
        )

    def __str__(self) -> str:
        return self.summary()


NUM_PASSES = 9  # of the table in docs/how-it-works.md; the second part needs the split DAG

_templates: dict[tuple[Any, ...], Template] = {}


@resting_collector()
def template_of(  # noqa: PLR0913
    key: str | None,
    gm: fx.GraphModule,
    args: tuple[Arg, ...],
    numbers: dict[int, Any],
    dims: dict[int, int],
    num_microbatches: int,
    *,
    loss: int | None,
    training: bool,
    paths: Mapping[int, str] | None = None,
    cuts: Cuts | None = None,
    capacities: tuple[Bound, ...] = (),
) -> Template:
    """Capture, cut and partition, or reuse what was captured before.

    Args:
        key: A text that is equal for equal Dynamo graphs; None where equality cannot be told.
        gm: Dynamo's graph.
        args: Its arguments at the whole batch's sizes.
        numbers: Values of its number arguments, by position.
        dims: Batch dim of each sliced argument, by position.
        num_microbatches: Into how many slices.
        loss: Which output is the loss, or None to find it.
        training: With the backward.
        paths: The user's path of each output, for messages, where it is known.
        cuts: What cuts regions into pieces.
        capacities: What bounds how many rows experts take.
    """
    checks_values = verify_level() >= 3
    full = (
        key,
        args,
        tuple(sorted(numbers.items())),
        tuple(sorted(dims.items())),
        num_microbatches,
        loss,
        training,
        cuts,
        capacities,
        checks_values,
    )
    if key is not None and full in _templates:
        return _templates[full]
    captured = capturing.trace(
        gm, args, numbers, dims, num_microbatches, loss=loss, training=training, paths=paths
    )
    collect()
    regions = find_regions(captured, cuts)
    set_capacities(captured, regions, capacities)
    graphs = cut(captured, regions)
    kept = {captured.placeholders[a.position] for a in args}
    partitioner = Partitioner(captured.mode)
    partitions = {}
    for region, graph in graphs.items():
        partitions[region] = partitioner(graph, tuple(name in kept for name in graph.primals))
        compat.drop_graph(graph.graph)
        collect()
    template = Template(
        dag=build(captured, regions, graphs, partitions),
        args=captured.args,
        changed=frozenset(captured.buffers),
        untagged=regions.untagged,
        halves={
            str(region): (p.input_grad is not None, p.weight_grad is not None)
            for region, p in partitions.items()
        },
        check=value_checker(captured, regions, dims) if checks_values else None,
    )
    if template.check is None:
        compat.drop_graph(captured.graph)
    if key is not None:
        _templates[full] = template
    return template


def split_of(strategy: Strategy) -> SplitDirective:
    """The strategy's Split; one microbatch where it has none."""
    found = strategy.of(SplitDirective)
    return found[0] if found else SplitDirective({}, num_microbatches=1)


def cuts_of(strategy: Strategy, compile_mode: str) -> Cuts:
    """What cuts the strategy's regions: buckets, and blocks where compiling each once pays."""
    buckets = tuple(
        (one.filter, int(one.bucket_mb * 2**20))
        for one in strategy.of(ReplicateDirective)
        if one.bucket_mb is not None
    )
    return Cuts(buckets=buckets, blocks=compile_mode == "inductor")


def replications(strategy: Strategy) -> list[Replication]:
    """The strategy's Replicates, with what they leave to Piper decided."""
    found = []
    for one in strategy.of(ReplicateDirective):
        axes = one.axes
        if axes is None and one.shard_axes is not None and strategy.mesh is not None:
            axes = strategy.mesh.names
        found.append(
            Replication(
                filter=one.filter,
                zero=one.zero,
                label=f"{one!r} at {one.where}",
                reduce_stream=one.reduce_stream or "reduce",
                gather_stream=one.gather_stream or "gather",
                prefetch=one.prefetch,
                keep=one.keep,
                axes=axes,
                shard_axes=one.shard_axes or one.axes,
                mesh=strategy.mesh,
            )
        )
    return found


def shardings(strategy: Strategy) -> list[Sharding]:
    """The strategy's Shards, with what they leave to Piper decided."""
    return [
        Sharding(
            filter=one.filter,
            label=f"{one!r} at {one.where}",
            is_static=one.capacity is not None,
            stream=one.stream or "ep",
            axes=one.axes,
            mesh=strategy.mesh,
        )
        for one in strategy.of(ShardDirective)
    ]


def capacities_of(strategy: Strategy) -> tuple[Bound, ...]:
    """Which of the strategy's Shards bound what an expert takes, and to how many rows."""
    return tuple(
        Bound(
            filter=one.filter,
            capacity=Capacity.of(one.capacity),
            label=f"{one!r} at {one.where}",
        )
        for one in strategy.of(ShardDirective)
        if one.capacity is not None
    )


def refuse_unsupported(strategy: Strategy) -> None:
    """Refuse directives that this version does not apply, rather than ignore them."""
    faults = []
    for directive in strategy.directives:
        if isinstance(directive, OrderDirective) and directive.stream is not None:
            faults.append(f"Order(stream={directive.stream!r}) at {directive.where}")
    split = split_of(strategy)
    if split.dim != "MB":
        faults.append(f"Split(dim={split.dim!r}): the microbatch tag is 'MB' for now")
    if split.filter.items:
        faults.append(
            f"Split({split.filter!r}): only the whole model can be split for now; "
            "use Split({}, ...)"
        )
    if faults:
        raise PiperStrategyError(
            format_error(
                "the strategy asks for what this version does not do",
                {"directives": "\n".join(faults)},
                hint="supported: Split({}), Place, Replicate, Shard, Order",
            )
        )


@resting_collector()
def make_plan(
    template: Template,
    strategy: Strategy,
    world_size: int,
    dims: dict[int, int],
    *,
    compile_mode: str,
    costs: Costs | None = None,
    outputs_everywhere: bool = False,
    sync: bool = True,
) -> Plan:
    """Apply a strategy to a captured model, lower it and prove the result safe.

    Args:
        template: The captured model.
        strategy: What to apply.
        world_size: To how many ranks.
        dims: Batch dim of each sliced argument, by position.
        compile_mode: How chunks will run: those run operator by operator add gradients themselves.
        costs: What tasks and messages take, where what Orders leave open is to be filled by it.
        outputs_everywhere: Whether every rank gets the outputs.
        sync: Whether gradients are reduced over replicas in this step.

    Raises:
        PiperPlanError: The strategy cannot be applied, or the plan is unsafe.
    """
    split = split_of(strategy)
    orders = strategy.of(OrderDirective)
    dag = replace(template.dag, chunks=dict(template.dag.chunks), orders=[], layouts={}, makers={})
    per_microbatch = callable(split.loss)
    first: list[GraphPass] = [
        Split(split.num_microbatches, dims, weight_per_microbatch=per_microbatch)
    ]
    run_passes(dag, first, check_values=template.check, total=NUM_PASSES)
    placements = [
        Placement(filter=p.filter, devices=tuple(p.devices), label=f"{p!r} at {p.where}")
        for p in strategy.of(PlaceDirective)
    ]
    copies, experts = replications(strategy), shardings(strategy)
    halves: list[GraphPass] = [SplitBackward(named_halves(orders, dag) if dag.training else set())]
    run_passes(dag, halves, check_values=template.check, done=len(first), total=NUM_PASSES)
    meaning = meaning_of(dag)
    rest: list[GraphPass] = [
        Place(placements, world_size, sharers=[*copies, *experts]),
        Tie(),
        Shard(experts),
        Replicate(copies, sync=sync),
        Transfer(outputs_everywhere=outputs_everywhere),
        Order(orders),
    ]
    done = len(first) + len(halves)
    run_passes(dag, rest, check_values=template.check, done=done, total=NUM_PASSES)
    meaning = as_placed(meaning, dag)
    if dag.training and dag.loss is None:
        check_two_programs(dag, world_size)
    order = schedule(dag, costs, template.halves)
    programs = lower_all(dag, world_size, order, adding=compile_mode == "aten")
    if callable(split.loss):
        check_weight_inputs(split.loss, programs, template.args)
    groups = tuple(sorted({task_of(node).devices for node in dag.tasks()}))
    verify(programs, meaning, replicas_of(groups))
    return Plan(
        strategy=strategy,
        world_size=world_size,
        programs=programs,
        dag=dag,
        args=template.args,
        changed=template.changed,
        dims=dims,
        untagged=template.untagged,
        halves=template.halves,
        groups=groups,
        meaning=meaning,
    )


def replicas_of(groups: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Which replica each rank belongs to."""
    return {rank: place for devices in groups for place, rank in enumerate(devices)}


def lower_all(
    dag: Dag,
    world_size: int,
    order: dict[tuple[int, ...], list[Node]] | None = None,
    *,
    adding: bool = False,
) -> tuple[RankProgram, ...]:
    """Lower a distributed DAG to every rank's program.

    Args:
        dag: The DAG.
        world_size: How many ranks.
        order: Every device group's tasks in the order they run; None: as `schedule` finds it.
        adding: Whether chunks may add gradients to their sums.
    """
    order = schedule(dag) if order is None else order
    if dag.training and dag.loss is None:
        order = {devices: _forward_first(tasks) for devices, tasks in order.items()}
    run_passes(dag, [Gather(order)], done=NUM_PASSES - 1, total=NUM_PASSES)
    drafts = lower(dag, order)
    for draft in drafts:
        keep_apart(draft)
    number_messages(drafts)
    for draft in drafts:
        post_receives(draft)
    drain_sends(drafts)
    programs = []
    for draft in drafts:
        program = finish(dag, draft, world_size)
        program = free_dead(add_in_chunks(program, dag.chunks) if adding else program)
        programs.append(replace(program, peak_bytes=peak_bytes(program, dag.chunks)))
    return tuple(programs)


def _forward_first(tasks: list[Node]) -> list[Node]:
    names = [(task_of(node).name, node) for node in tasks]
    forward = [node for name, node in names if name is not None and name.which is Pass.F]
    return forward + [node for name, node in names if name is None or name.which is not Pass.F]
