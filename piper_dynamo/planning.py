"""A plan: the whole job of one step, made without devices, weights or processes.

One capture serves many strategies (`looking.py`), and one template (the one-microbatch DAG and its
chunks) all that ask for the same of a microbatch: what differs is where and when things run.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from piper_dynamo import _torch_compat as compat
from piper_dynamo import capture as capturing
from piper_dynamo.budgets import Budget, budget_of, budgets_of
from piper_dynamo.costs import Costs
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.footprint import Optimizer, RankMemory, at_peak, held_before
from piper_dynamo.garbage import collect, resting_collector
from piper_dynamo.ir.alike import replicas_of
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.graph import Dag, Layout, print_dag, task_of
from piper_dynamo.ir.joint import Arg, ArgKind, Recomputed
from piper_dynamo.ir.meaning import Meaning, as_placed, meaning_of
from piper_dynamo.ir.program import Group, RankProgram, copy_groups
from piper_dynamo.ir.task import RegionId
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.memory import held_over_time, memory_curve
from piper_dynamo.lowering.schedule import schedule
from piper_dynamo.lowering.simulate import Simulation, simulate
from piper_dynamo.lowering.streams import on_streams
from piper_dynamo.measure import PREDICTED_FROM_RUN, measured_costs, measured_step
from piper_dynamo.passes.build import build
from piper_dynamo.passes.capacity import Bound, set_capacities
from piper_dynamo.passes.cast import Cast
from piper_dynamo.passes.check import value_checker
from piper_dynamo.passes.cut import cut
from piper_dynamo.passes.kernels import substitute
from piper_dynamo.passes.order import Halves, Order, named_halves
from piper_dynamo.passes.partition import Partitioner
from piper_dynamo.passes.pieces import Cuts
from piper_dynamo.passes.pipeline import GraphPass, run_passes, verify_level
from piper_dynamo.passes.place import Place, Placement
from piper_dynamo.passes.recompute import check_budgets
from piper_dynamo.passes.refusals import PlaceOrRefuse
from piper_dynamo.passes.regions import find_regions
from piper_dynamo.passes.replicate import Replicate
from piper_dynamo.passes.shard import Shard
from piper_dynamo.passes.split import Split
from piper_dynamo.passes.split_backward import SplitBackward
from piper_dynamo.passes.tie import Tie
from piper_dynamo.passes.transfer import Transfer
from piper_dynamo.pictures import save
from piper_dynamo.pictures.graph import draw_graph
from piper_dynamo.plan_checks import check_two_programs, find_weighers
from piper_dynamo.precision import Rule, rules_of
from piper_dynamo.predict.profile import Profile
from piper_dynamo.programs import (
    NUM_PASSES,
    AlikePrograms,
    Program,
    launched,
    on_cuda,
    pairs_of,
    programs_of,
    prove_on_streams,
)
from piper_dynamo.records import replications, shardings
from piper_dynamo.runtime.comm import STATE
from piper_dynamo.strategy import Order as OrderDirective
from piper_dynamo.strategy import Place as PlaceDirective
from piper_dynamo.strategy import Replicate as ReplicateDirective
from piper_dynamo.strategy import Split as SplitDirective
from piper_dynamo.strategy import Strategy
from piper_dynamo.summary import summarize
from piper_dynamo.timeline import Timeline
from piper_dynamo.topology import describe, in_blocks


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
        recomputed: Of regions that make something again, what that saves and costs.
        check: Compares a DAG with the captured graph, at level 3 of PIPER_VERIFY; else None.
    """

    dag: Dag
    args: tuple[Arg, ...]
    changed: frozenset[int]
    untagged: tuple[tuple[str, RegionId], ...]
    halves: dict[str, tuple[bool, bool]]
    recomputed: dict[RegionId, Recomputed]
    check: Callable[[Dag], None] | None


@dataclass(slots=True, kw_only=True)
class Plan:
    """Everything a step of a strategy will do on every rank.

    Attributes:
        strategy: What was asked for.
        world_size: How many ranks.
        programs: Every rank's program, in rank order; where there are many alike replicas, lowered
            when they are asked for.
        dag: The distributed DAG.
        args: The captured call's arguments.
        changed: Positions of the buffers that a step changes.
        dims: The dim along which each data argument is split, by position.
        untagged: Forward nodes that carried no tag: user line and the region they joined.
        halves: For each region, whether it has input-gradient and weight-gradient work.
        recomputed: Of regions that make something again, what that saves and costs in a microbatch.
        groups: The device groups.
        meaning: What the step has to compute, for the proof.
        weighers: The ranks that weigh microbatches for all, by replica; none where each rank that
            needs their weights can.
    """

    strategy: Strategy
    world_size: int
    programs: Sequence[RankProgram]
    dag: Dag
    args: tuple[Arg, ...]
    changed: frozenset[int]
    dims: dict[int, int]
    untagged: tuple[tuple[str, RegionId], ...]
    halves: dict[str, tuple[bool, bool]]
    recomputed: Mapping[RegionId, Recomputed]
    groups: tuple[tuple[int, ...], ...]
    meaning: Meaning
    weighers: tuple[int, ...] = ()
    _fingerprint: str = field(default="")

    @property
    def graph(self) -> str:
        """The distributed DAG, one node per line."""
        return print_dag(self.dag)

    @property
    def chunks(self) -> Mapping[str, Chunk]:
        """The chunks that programs run, by name."""
        return self.dag.chunks

    def program(self, rank: int, device: str | None = None) -> Program:
        """One rank's program; `str()` of it is the emitted Python.

        Args:
            rank: Whose.
            device: As which device runs it: "cpu", or "cuda" with streams, events and buffers;
                None: as that of the model.
        """
        if not 0 <= rank < self.world_size:
            last = self.world_size - 1
            raise PiperPlanError(
                f"rank {rank} is outside the world of {self.world_size} ranks: they are 0 to {last}"
            )
        if device not in (None, "cpu", "cuda"):
            raise PiperPlanError(f"a program for device {device!r}: choose 'cpu' or 'cuda'")
        if device == "cpu" or (device is None and not self.on_cuda):
            return Program(rank_program=self.programs[rank])
        found = on_streams(self.launched[rank], self.chunks)
        return Program(rank_program=found.program, on_streams=found)

    @property
    def on_cuda(self) -> bool:
        """Whether the model is on CUDA, where programs run on streams."""
        return on_cuda(self.args)

    @property
    def launched(self) -> Sequence[RankProgram]:
        """The programs in the order in which devices start what ranks do together."""
        return self.programs if self.on_cuda else launched(self.programs, self.chunks)

    @property
    def distinct(self) -> Sequence[RankProgram]:
        """The programs that say it all: of one replica, if many are alike, or of all ranks."""
        if isinstance(self.programs, AlikePrograms):
            return self.programs.replica(0)
        return self.programs

    @property
    def stands_for(self) -> Mapping[int, int]:
        """For each rank, the one that does the same in `distinct`."""
        if isinstance(self.programs, AlikePrograms):
            return self.programs.stands_for
        return {rank: rank for rank in range(self.world_size)}

    def verify(self) -> None:
        """Prove the programs safe and right; raises PiperPlanError listing every fault."""
        if isinstance(self.programs, AlikePrograms):
            self.programs.verify(self.meaning)
        else:
            verify(self.programs, self.meaning, replicas_of(self.groups))
        if self.on_cuda:
            prove_on_streams(self.distinct, self.chunks)

    def simulate(self, costs: Costs | Profile | None = None) -> Simulation:
        """The step on an ideal machine with the given costs, or on a measured one.

        Of many alike replicas one is simulated: all do the same at the same time.
        """
        found = costs.costs(self.chunks) if isinstance(costs, Profile) else costs or Costs()
        return simulate(self.distinct, found, self.halves, self.stands_for)

    def timeline(
        self, costs: Costs | Profile | None = None, *, optimizer: Optimizer = None
    ) -> Timeline:
        """The simulated step, with what each rank holds over time, by category.

        Args:
            costs: What things cost, or a profile; None: every pass of a region 1.
            optimizer: Whose state is counted, as in `memory`.
        """
        found = self.simulate(costs)
        for program, starts in zip(self.distinct, found.starts, strict=True):
            before = held_before(program, self.args, optimizer)
            curve = memory_curve(program, self.dag.chunks, starts, before)
            found.timeline.memory[program.rank] = curve
        return found.timeline

    def memory(self, optimizer: Optimizer = None) -> tuple[RankMemory, ...]:
        """What each rank holds at its peak, by category, with what a task needs while it runs.

        Args:
            optimizer: Whose state is counted: "sgd", "momentum", "adam", "adamw", or how many
                values it keeps of each parameter's element, in its dtype. None: it is left out.

        Raises:
            PiperError: It is not known.
        """
        found = []
        for program in self.distinct:
            highest: list[int] = []
            history = held_over_time(program, self.dag.chunks, highest)
            found.append(at_peak(program, self.args, history, highest, optimizer))
        return tuple(found)

    def plot(
        self,
        path: str | Path,
        costs: Costs | Profile | None = None,
        *,
        unit: str | None = None,
        run: str | Path | None = None,
        optimizer: Optimizer = None,
    ) -> None:
        """Draw the simulated step, rank by time.

        Args:
            path: .png, .svg, .html (with zoom and hover) or .json (a trace for Perfetto).
            costs: What things cost, or a profile, whose unit is seconds; None: every pass of a
                region 1, or what it took in `run`.
            unit: The unit of the costs; None: units of cost. A profile's and a run's are seconds,
                whatever is said here.
            run: A run folder, whose measured step is drawn below the predicted one.
            optimizer: Whose state is drawn with what ranks hold, as in `memory`.
        """
        heading, timelines = "predicted", {}
        if run is not None:
            measured = measured_step(run, self.programs)
            timelines = {"measured": measured}
            if costs is None:
                heading, costs = PREDICTED_FROM_RUN, measured_costs(measured)
        predicted = {heading: self.timeline(costs, optimizer=optimizer)}
        if run is not None or isinstance(costs, Profile):
            unit = "s"
        save(predicted | timelines, path, unit=unit or "units of cost")

    def draw(self, path: str | Path) -> None:
        """Draw the distributed DAG, if it is small: .dot, or .svg where graphviz is installed."""
        draw_graph(self.dag, path)

    def holders(self) -> dict[int, tuple[int, ...]]:
        """The ranks that hold each parameter and buffer, by argument position."""
        alike: dict[int, list[int]] = {}
        for rank, first in self.stands_for.items():
            alike.setdefault(first, []).append(rank)
        found: dict[int, list[int]] = {}
        for program in self.distinct:
            for _, position in program.state:
                found.setdefault(position, []).extend(alike[program.rank])
        return {position: tuple(sorted(ranks)) for position, ranks in found.items()}

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
        found = {i.communicator for p in self.distinct for i in p.instrs if i.group}
        if self.on_cuda:
            found |= pairs_of(self.distinct, self.groups)
        for (_, devices), layout in self.dag.layouts.items():
            groups = layout.groups
            found.update((STATE, ranks) for ranks in (devices, *groups, *copy_groups(groups)))
        return sorted(found)

    def fingerprint(self) -> str:
        """A hash of all ranks' programs: ranks may run a step together iff theirs are equal."""
        if not self._fingerprint:
            text = "\n".join([repr(self.groups), *map(self._identity, self.distinct)])
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
            self.distinct,
            self.args,
            world_size=self.world_size,
            replicas=max(map(len, self.groups), default=1),
            num_microbatches=self.dag.num_microbatches,
            training=self.dag.training,
            untagged=self.untagged,
            communicators=self.communicators(),
            recomputed=self.recomputed,
            memories=self.memory(optimizer),
            shared=self._shared(),
            replicated=[repr(one) for one in self.strategy.of(ReplicateDirective)],
        )

    def topology(self, hosts: int | Sequence[str]) -> str:
        """Which ranks and regions sit on which host, and what a step sends between hosts.

        Args:
            hosts: How many hosts share the ranks, in order; or the name of each rank's host.

        Raises:
            PiperError: The ranks do not divide among so many hosts.
        """
        names = in_blocks(self.world_size, hosts) if isinstance(hosts, int) else hosts
        return describe(self.programs, names)

    def _shared(self) -> dict[str, list[tuple[int, ...]]]:
        """Parameters that several device groups hold, and these groups."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for position, ranks in sorted(self.holders().items()):
            groups = [group for group in self.groups if set(group) & set(ranks)]
            if self.args[position].kind is ArgKind.PARAMETER and len(groups) > 1:
                found[self.args[position].name] = groups
        return found

    def __str__(self) -> str:
        return self.summary()


MANY_RANKS = 64  # from so many on, one replica stands for all that are alike

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
    budgets: tuple[Budget, ...] = (),
    rules: tuple[Rule, ...] = (),
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
        budgets: What bounds how much regions keep for their backward.
        rules: What is computed in another dtype than it is held in.
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
        budgets,
        rules,
        checks_values,
    )
    if key is not None and full in _templates:
        return _templates[full]
    captured = capturing.trace(
        gm,
        args,
        numbers,
        dims,
        num_microbatches,
        loss=loss,
        training=training,
        paths=paths,
        rules=rules,
    )
    collect()
    with compat.no_autocast():  # from here on operators have the casts they were traced with
        regions = find_regions(captured, cuts)
        set_capacities(captured, regions, capacities)
        graphs = cut(captured, regions)
        kept = {captured.placeholders[a.position] for a in args}
        partitioner = Partitioner(captured.mode)
        partitions = {}
        for region, graph in graphs.items():
            keeps = tuple(name in kept for name in graph.primals)
            partitions[region] = partitioner(graph, keeps, budget_of(budgets, region))
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
            recomputed={r: p.recomputed for r, p in partitions.items() if p.recomputed is not None},
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


@compat.no_autocast()
@resting_collector()
def make_plan(  # noqa: PLR0913
    template: Template,
    strategy: Strategy,
    world_size: int,
    dims: dict[int, int],
    *,
    compile_mode: str,
    costs: Costs | None = None,
    outputs_everywhere: bool = False,
    sync: bool = True,
    alike: bool | None = None,
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
        alike: Whether one replica stands for all where they are alike, which takes less time and
            memory; None: from 64 ranks on.

    Raises:
        PiperPlanError: The strategy cannot be applied, or the plan is unsafe.
    """
    split = split_of(strategy)
    orders = strategy.of(OrderDirective)
    dag = replace(template.dag, chunks=dict(template.dag.chunks), orders=[], layouts={}, makers={})
    check_budgets(budgets_of(strategy), dag)
    per_microbatch = callable(split.loss)
    first: list[GraphPass] = [
        Split(split.num_microbatches, dims, weight_per_microbatch=per_microbatch)
    ]
    run_passes(dag, first, check_values=template.check, total=NUM_PASSES)
    placements = [
        Placement(filter=p.filter, devices=tuple(p.devices), label=p.label, maker=p.maker)
        for p in strategy.of(PlaceDirective)
    ]
    copies, experts = replications(strategy), shardings(strategy)
    halves = named_halves(orders, dag) if dag.training else Halves()
    split_up: list[GraphPass] = [SplitBackward(halves.split)]
    run_passes(dag, split_up, check_values=template.check, done=len(first), total=NUM_PASSES)
    meaning = meaning_of(dag)
    place = Place(placements, world_size, sharers=[*copies, *experts])
    ordering = Order(orders, halves.undecided)
    rest: list[GraphPass] = [
        PlaceOrRefuse(place, halves, ordering),
        Tie(),
        Shard(experts),
        Replicate(copies, sync=sync),
        Cast(rules_of(strategy)),
        Transfer(outputs_everywhere=outputs_everywhere),
        ordering,
    ]
    done = len(first) + len(split_up)
    run_passes(dag, rest, check_values=template.check, done=done, total=NUM_PASSES)
    meaning = as_placed(meaning, dag)
    if dag.training and dag.loss is None:
        check_two_programs(dag, world_size)
    dag.chunks.update(substitute(dag.chunks, strategy.kernels))
    order = schedule(dag, costs, template.halves)
    groups = tuple(sorted({task_of(node).devices for node in dag.tasks()}))
    programs = programs_of(
        dag,
        world_size,
        order,
        groups,
        adding=compile_mode == "aten",
        alike=world_size >= MANY_RANKS if alike is None else alike,
        starts_alike=on_cuda(template.args),
    )
    plan = Plan(
        strategy=strategy,
        world_size=world_size,
        programs=programs,
        dag=dag,
        args=template.args,
        changed=template.changed,
        dims=dims,
        untagged=template.untagged,
        halves=template.halves,
        recomputed=template.recomputed,
        groups=groups,
        meaning=meaning,
    )
    if callable(split.loss):
        plan.weighers = find_weighers(split.loss, plan.distinct, template.args, groups)
    plan.verify()
    return plan
