"""Random jobs: a small model and a legal strategy for it, both as the code that makes them.

Terms: a *job* is a model's layers, where its stages are, and how its microbatches, replicas and
orders are; a *part* is all tasks of one pass of one stage for one microbatch, which is what an
order's filter names. A job prints as a script that runs alone (`Job.script`).
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import captured
from piper_dynamo.planning import Plan, make_plan
from tests import jobs
from tests.replicas import local

EXPERTS = 4
Task = dict[str, Any]

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

import piper_dynamo as piper


def fill(shape, key):
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (((3 * n + 5 * key) % 7 - 3) / 8).reshape(shape)


def data(rows, key=0):
    n = torch.arange(rows * 4, dtype=torch.float64).reshape(rows, 4)
    return ((5 * n + 3 * key) % 9 - 4) / 4, ((5 * n + 3 * key + 3) % 9 - 4) / 4
"""

# By kind: what `__init__` and `forward` do; `h` is the input, `k` the layer.
LAYERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (
        ("self.w{k} = nn.Parameter(fill([4, 4], {k}))",),
        ("h = torch.tanh(h @ self.w{k}.T)",),
    ),
    "frozen": (
        ("self.w{k} = nn.Parameter(fill([4, 4], {k}), requires_grad=False)",),
        ("h = torch.tanh(h @ self.w{k}.T)",),
    ),
    "uneven": (
        (
            "self.a{k}, self.b{k} = (nn.Parameter(fill(s, {k})) for s in ([7, 4], [4, 7]))",
            "self.s{k} = nn.Parameter(torch.tensor(0.75, dtype=torch.float64))",
        ),
        ("h = torch.tanh(torch.tanh(h @ self.a{k}.T) @ self.b{k}.T * self.s{k})",),
    ),
    "tied": ((), ("h = torch.tanh(h @ self.w{of}.T)",)),
    "target": ((), ("h = h + 0.5 * y",)),
    "views": ((), ("h = torch.cat(h.chunk(2, -1)[::-1], -1).t().t()",)),
    "inplace": ((), ("h = h.clone().mul_(1.5)",)),
    "dropout": ((), ("h = F.dropout(h, 0.25)",)),
    "norm": (
        ("self.norm{k} = nn.BatchNorm1d(4, dtype=torch.float64)",),
        ("h = h + self.norm{k}(h)",),
    ),
    "count": (
        ('self.register_buffer("n{k}", torch.zeros((), dtype=torch.float64))',),
        ("self.n{k}.add_(1)", "h = h * self.n{k}"),
    ),
    "experts": (
        (
            "self.g{k} = nn.Parameter(fill([4, 4], 20 + {k}))",
            "self.u{k} = nn.Parameter(fill([4, 4, 3], {k}))",
            "self.d{k} = nn.Parameter(fill([4, 3, 4], 10 + {k}))",
        ),
        (
            "p{k}, i{k} = (h @ self.g{k}).softmax(-1).topk(2)",
            "s{k}, r{k} = piper.moe.dispatch(h, i{k}, 4)",
            'with piper.annotate("EP"):',
            "    s{k} = torch.tanh(piper.moe.grouped_mm(s{k}, self.u{k}, r{k}))",
            "    s{k} = piper.moe.grouped_mm(s{k}, self.d{k}, r{k})",
            "h = torch.tanh(h + piper.moe.combine(s{k}, r{k}, p{k}))",
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer.

    Attributes:
        stage: Which region it is in.
        kind: Of LAYERS.
        of: Whose weight a tied one uses.
        skip: Which layer's input it adds to its own; None: none.
    """

    stage: int
    kind: str = "linear"
    of: int = 0
    skip: int | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and a strategy.

    Attributes:
        layers: In order. Where stages fall, a stage is visited more than once.
        on: The device group of each stage.
        microbatches: Into how many the batch is split.
        rows: Of one microbatch on one replica.
        replicas: How many ranks a group has.
        mesh: Whether two axes number the replicas; there are four then.
        zero: By stage.
        options: Of every Replicate.
        experts: How experts are sharded: "" not at all, "all" over all replicas, "ep" over an axis.
        capacity: Whether experts get a capacity, in which every row has room.
        combine: How the microbatches' losses combine.
        outputs: Of which layers the model also returns the input.
        schedule: A built-in schedule's name; "": see `chosen`.
        split: Of which stages the backward is split, where there is no schedule.
        chosen: A random order's seed, and which share of the passes it names, in percent.
        merged: Which share of an order's tasks are in one group with the one before.
        compile: How chunks would run.
        everywhere: Whether all ranks get the outputs.
        sync: Whether the step reduces gradients at level 0 and 1.
    """

    layers: tuple[Layer, ...]
    on: tuple[int, ...]
    microbatches: int = 1
    rows: int = 2
    replicas: int = 1
    mesh: bool = False
    zero: tuple[int, ...] = (0,)
    options: tuple[tuple[str, Any], ...] = ()
    experts: str = ""
    capacity: bool = False
    combine: str = "mean"
    outputs: tuple[int, ...] = ()
    schedule: str = ""
    split: frozenset[int] = frozenset()
    chosen: tuple[int, int] = (0, 0)
    merged: int = 0
    compile: str = "aten"
    everywhere: bool = False
    sync: bool = True

    @property
    def where(self) -> str:
        return "everywhere" if self.everywhere else "owner"

    @property
    def stages(self) -> int:
        return len(self.on)

    @property
    def placement(self) -> dict[int, list[int]]:
        d = self.replicas
        return {s: list(range(g * d, (g + 1) * d)) for s, g in enumerate(self.on)}

    @property
    def world(self) -> int:
        return (max(self.on) + 1) * self.replicas

    def has(self, *kinds: str) -> bool:
        return any(layer.kind in kinds for layer in self.layers)

    # The model.

    def source(self) -> str:
        """The model as Python; line numbers are its own."""
        made = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        for k, layer in enumerate(self.layers):
            made += [f"        {line.format(k=k)}" for line in LAYERS[layer.kind][0]]
        made += ["", "    def forward(self, x, y):", "        h = h0 = x"]
        for k, layer in enumerate(self.layers):
            made.append(f'        with piper.annotate("PP", {layer.stage}):')
            made += [f"            {line}" for line in self._layer(k, layer)]
        rest = "".join(f', "h{k}": h{k}' for k in self.outputs)
        made += [
            f'        with piper.annotate("PP", {self.stages - 1}):',
            "            loss = F.mse_loss(h, y)",
            f'            return {{"loss": loss{rest}}}' if rest else "            return loss",
        ]
        return "\n".join([HEAD, "", *made, ""])

    def _layer(self, k: int, layer: Layer) -> Iterator[str]:
        if layer.skip is not None:
            yield f"h = h + h{layer.skip}"
        for line in LAYERS[layer.kind][1]:
            yield line.format(k=k, of=layer.of)
        yield f"h{k + 1} = h"

    @cached_property
    def model_class(self) -> Callable[[], nn.Module]:
        """The model's class, from its source."""
        import linecache

        source = self.source()
        name = f"<drawn {abs(hash(source)):x}>.py"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        namespace: dict[str, Any] = {"__name__": "drawn"}
        exec(compile(source, name, "exec"), namespace)
        made: Callable[[], nn.Module] = namespace["Model"]
        return made

    def batch(self, step: int = 0, replicas: int | None = None) -> tuple[Tensor, Tensor]:
        """The batch of so many replicas; all of them by default."""
        count = self.rows * self.microbatches * (replicas or self.replicas)
        n = torch.arange(count * 4, dtype=torch.float64).reshape(count, 4)
        return ((5 * n + 3 * step) % 9 - 4) / 4, ((5 * n + 3 * step + 3) % 9 - 4) / 4

    # The strategy.

    def strategy(self) -> piper.Strategy:
        m, placement = self.microbatches, self.placement
        groups = max(self.on) + 1
        mesh = piper.Mesh((groups, 2, 2), ("pp", "dp", "ep")) if self.mesh else None
        how: list[Any] = []
        if self.replicas > 1:
            options = dict(self.options)
            if self.mesh:
                options.setdefault("axes", ("dp", "ep"))
            alike = len(set(self.zero)) == 1
            for stage in range(1 if alike else self.stages):
                which = {"PP": "*" if alike else stage}
                how.append(piper.Replicate(which, zero=self.zero[stage], **options))
        if self.experts or self.capacity:
            axes = ("ep",) if self.mesh else None
            room = 2 * self.rows if self.capacity else None
            how.append(piper.Shard({"EP": "*"}, axes=axes, capacity=room))
        return piper.Strategy(
            piper.Split({}, num_microbatches=m, loss=self.combine),
            *jobs.places(placement, self.schedule, m),
            *how,
            *(jobs.orders(self.schedule, placement, m) or self.orders()),
            mesh=mesh,
        )

    def orders(self) -> list[piper.Order]:
        """What the drawn share of the tasks has as its order: a part of one that a run can have."""
        seed, share = self.chosen
        draw = random.Random(seed)
        by_group: dict[int, list[Task]] = {}
        passes = [(which, s) for which in ("F", "B", "BI", "BW") for s in range(self.stages)]
        named = {one for one in passes if draw.randrange(100) < share}  # all microbatches or none
        for which, stage, mb in self.run(draw):
            if (which, stage) in named:
                task = {"PP": stage, "MB": mb, "PASS": which}
                by_group.setdefault(self.on[stage], []).append(task)
        return [piper.Order(self.grouped(tasks, draw)) for _, tasks in sorted(by_group.items())]

    def grouped(self, tasks: list[Task], draw: random.Random) -> list[Any]:
        groups: list[Any] = []
        for task in tasks:
            if groups and draw.randrange(100) < self.merged:
                before = groups[-1] if isinstance(groups[-1], list) else [groups[-1]]
                groups[-1] = [*before, task]
            else:
                groups.append(task)
        return groups

    def run(self, draw: random.Random) -> list[tuple[str, int, int]]:
        """All parts in an order that one rank could run them in."""
        left = [("F", s, k) for s in range(self.stages) for k in range(self.microbatches)]
        for _, s, k in list(left):
            halves = ("BI", "BW") if s in self.split else ("B",)
            left += [(which, s, k) for which in halves]
        done: list[tuple[str, int, int]] = []
        while left:
            ready = [task for task in left if not any(self.needs(task, one) for one in left)]
            done.append(draw.choice(ready))
            left.remove(done[-1])
        return done

    def needs(self, task: tuple[str, int, int], other: tuple[str, int, int]) -> bool:
        """Whether a part comes after another."""
        (which, stage, mb), (before, home, k) = task, other
        if which == "F":  # buffers are handed on from microbatch to microbatch
            later = stage == home and k < mb and self._changes(stage)
            return before == "F" and ((mb == k and home < stage) or later)
        if mb != k:
            return False
        if before == "F":
            return home == stage
        if which == "BW":
            return home == stage and before == "BI"
        return home > stage and before != "BW"

    def _changes(self, stage: int) -> bool:
        return any(x.stage == stage and x.kind in ("norm", "count") for x in self.layers)

    # Running it.

    def plan(self) -> Plan:
        batch = self.batch(replicas=1)
        model = self.model_class()
        make = functools.partial(_made, is_last=self.sync)
        with mock.patch.object(captured, "make_plan", make):
            return piper.plan(
                model, self.strategy(), batch, self.world, compile=self.compile, outputs=self.where
            )

    def script(self, check: str) -> str:
        """A file that makes the plan, and then runs `check`."""
        count = self.rows * self.microbatches
        later = [] if self.sync else ["# As of a step inside of piper.no_sync:"]
        return "\n".join(
            [
                self.source(),
                "",
                *later,
                f"strategy = {self.strategy()!r}",
                f"plan = piper.plan(Model(), strategy, data({count}), {self.world}, "
                f"compile={self.compile!r}, outputs={self.where!r})",
                check,
                "",
            ]
        )


def _made(*args: Any, is_last: bool, **named: Any) -> Plan:
    """A plan as of a step inside `piper.no_sync`, where it is not the last one of several."""
    return make_plan(*args, **{**named, "sync": named["sync"] and is_last})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a rank ends with: losses, norms, and its part of every parameter and buffer."""

    losses: list[float]
    norms: list[float]
    values: dict[str, Tensor]
    blocks: dict[str, tuple[tuple[int, int], ...]]


def trained(job: Job, steps: int = 2) -> list[Trained]:
    """The job on the ranks of this process: clipped steps of SGD with momentum."""
    strategy, build = job.strategy(), job.model_class

    def rank() -> Trained:
        place = next(
            ranks.index(piper.rank()) for ranks in job.placement.values() if piper.rank() in ranks
        )
        mine = [
            tuple(value.chunk(job.replicas)[place] for value in job.batch(k)) for k in range(steps)
        ]
        step = piper.compile(build(), strategy, mine[0], timeout_s=60.0)
        optimizer = torch.optim.SGD(piper.parameters(step), lr=0.5, momentum=0.9)
        losses, norms = [], []
        for batch in mine:
            loss = step(*batch)
            loss = loss["loss"] if isinstance(loss, dict) else loss
            loss.backward()
            losses.append(loss.item())
            norms.append(float(piper.clip_grad_norm_(step, 0.05)))
            optimizer.step()
            optimizer.zero_grad()
        plan = piper.explain(step)
        values = {n: local(p).clone() for n, p in piper.named_parameters(step) if p.numel()}
        return Trained(
            losses=losses, norms=norms, values=values, blocks=_blocks(plan, piper.rank())
        )

    return jobs.run_ranks(rank, job.world)


def _blocks(plan: Plan, rank: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Which block of which blocks of each parameter a rank has, from the plan."""
    names = {arg.position: arg.name for arg in plan.args}
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    program = plan.programs[rank]
    for position, group in (*program.experts, *program.shards):
        block = (group.index(rank), len(group))
        found[names[position]] = (*found.get(names[position], ()), block)
    return found


def reference(job: Job, steps: int = 2) -> Trained:
    """One process on the data of all replicas, microbatch by microbatch."""
    torch.manual_seed(0)
    copies = [job.model_class() for _ in range(job.replicas)]
    model = copies[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scale = 1.0 if job.combine == "sum" else 1.0 / (job.microbatches * job.replicas)
    losses, norms = [], []
    for k in range(steps):
        total = 0.0
        for copy, part in zip(copies, jobs.slices(job.batch(k), job.replicas), strict=True):
            for piece in jobs.slices(part, job.microbatches):
                loss = copy(*piece)
                loss = (loss["loss"] if isinstance(loss, dict) else loss) * scale
                loss.backward()
                total += loss.item()
        for copy in copies[1:]:
            for ours, theirs in zip(model.parameters(), copy.parameters(), strict=True):
                if theirs.grad is not None and ours.grad is not None:
                    ours.grad += theirs.grad
                theirs.grad = None
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
        for copy in copies[1:]:
            for ours, theirs in zip(model.parameters(), copy.parameters(), strict=True):
                theirs.data.copy_(ours.data)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(losses=losses, norms=norms, values=values, blocks={})


def compare(ranks: Sequence[Trained], want: Trained, tolerance: float = 1e-10) -> None:
    """Losses, norms and parameters are those of one process, and every one is held.

    Raises:
        AssertionError: Names what differs, and by how much.
    """
    held: set[str] = set()
    for rank, got in enumerate(ranks):
        jobs.close(got.losses, want.losses, f"rank {rank}: losses", tolerance)
        jobs.close(got.norms, want.norms, f"rank {rank}: gradient norms", tolerance)
        for name, value in got.values.items():
            whole = want.values[name]
            for index, count in got.blocks.get(name, ()):
                parts = whole.chunk(count)
                whole = parts[index] if index < len(parts) else whole[:0]
            jobs.close(value, whole, f"rank {rank}: parameter {name}", tolerance)
        held |= set(got.values)
    assert held == set(want.values), f"no rank holds {sorted(set(want.values) - held)}"


# Drawing.


@st.composite
def drawn_jobs(draw: st.DrawFn, max_groups: int = 3, max_replicas: int = 4) -> Job:
    """A job that Piper must take."""
    stages = draw(st.integers(1, 4))
    layers = draw_layers(draw, stages)
    changes = any(layer.kind in ("norm", "count") for layer in layers)
    on, schedule = draw_place(draw, stages, max_groups, changes)
    share = draw(st.sampled_from([0, 30, 70, 100]))
    if not schedule and not share and draw(st.integers(0, 2)) == 2:
        homes = draw(st.permutations([layer.stage for layer in layers]))
        layers = tuple(replace(x, stage=s) for x, s in zip(layers, homes, strict=True))
    replicas = draw(st.sampled_from([d for d in (1, 2, 3, 4) if d <= max_replicas]))
    microbatches = draw_count(draw, schedule, stages, max(on) + 1)
    has_experts = any(layer.kind == "experts" for layer in layers)
    mesh = replicas == 4 and draw(st.booleans())
    options = draw_options(draw, mesh) if replicas > 1 else ()
    experts = ""
    if has_experts and replicas in (2, 4):
        experts = (
            draw(st.sampled_from(["", "all"])) if not mesh else draw(st.sampled_from(["", "ep"]))
        )
    return Job(
        layers=layers,
        on=on,
        microbatches=microbatches,
        rows=draw(st.integers(2, 3)),
        replicas=replicas,
        mesh=mesh,
        zero=draw_levels(draw, layers, stages) if replicas > 1 else (0,) * stages,
        options=options,
        experts=experts,
        capacity=bool(experts) and draw(st.booleans()),
        combine=draw(st.sampled_from(["mean", "sum"])),
        outputs=tuple(draw(st.sets(st.integers(0, len(layers)), max_size=2))),
        schedule=schedule,
        split=frozenset(draw(st.sets(st.integers(0, stages - 1)))) if not schedule else frozenset(),
        chosen=(draw(st.integers(0, 999)), share),
        merged=draw(st.sampled_from([0, 0, 30])),
        compile=draw(st.sampled_from(["aten", "aten", "inductor"])),
        everywhere=draw(st.booleans()),
        sync=draw(st.sampled_from([True, True, False])),
    )


def draw_layers(draw: st.DrawFn, stages: int) -> tuple[Layer, ...]:
    """At least one trained layer in each stage but the last, which may only take the loss."""
    layers: list[Layer] = []
    for stage in range(stages):
        least = 0 if stage == stages - 1 and stages > 1 else 1
        for _ in range(draw(st.integers(least, 2))):
            kinds = [k for k in LAYERS if k != "tied" or any(x.kind == "linear" for x in layers)]
            kind = draw(st.sampled_from(kinds))
            weights = [k for k, layer in enumerate(layers) if layer.kind == "linear"]
            of = draw(st.sampled_from(weights)) if kind == "tied" else 0
            skips = st.none() | st.integers(0, len(layers) - 1) if layers else st.none()
            layers.append(Layer(stage=stage, kind=kind, of=of, skip=draw(skips)))
    if not any(layer.kind in ("linear", "uneven") for layer in layers):
        layers[-1] = Layer(stage=layers[-1].stage)
    return tuple(layers)


def draw_place(
    draw: st.DrawFn, stages: int, max_groups: int, changes: bool
) -> tuple[tuple[int, ...], str]:
    """Where the stages are, and a schedule that takes them; "" for orders of our own.

    Microbatches that change a buffer run one after the other, which `dualpipe` has not.
    """
    line = tuple(range(stages))
    shapes: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
    if stages <= max_groups:
        two_way = ("dualpipe",) if stages % 2 == 0 and not changes else ()
        shapes.append((line, ("gpipe", "one_f_one_b", "zb_h1", *two_way)))
    if stages == 4:
        shapes += [((0, 1, 0, 1), ("interleaved_1f1b", "gpipe"))]
        shapes += [((0, 1, 1, 0), ("zbv", "dualpipev", "gpipe"))]
    if shapes and draw(st.booleans()):
        on, schedules = draw(st.sampled_from(shapes))
        return on, draw(st.sampled_from(schedules))
    groups = draw(st.integers(1, min(stages, max_groups)))
    drawn = [draw(st.integers(0, groups - 1)) for _ in range(stages)]
    names = {group: place for place, group in enumerate(dict.fromkeys(drawn))}
    return tuple(names[group] for group in drawn), ""


def draw_count(draw: st.DrawFn, schedule: str, stages: int, groups: int) -> int:
    match schedule:
        case "dualpipev":
            return draw(st.integers(2 * groups, 2 * groups + 1))
        case "dualpipe":
            return draw(st.sampled_from([2 * stages, 2 * stages + 2]))
        case "interleaved_1f1b":
            return draw(st.sampled_from([1, 2, 3, 4]))
        case _:
            return draw(st.integers(1, 4))


def draw_options(draw: st.DrawFn, mesh: bool) -> tuple[tuple[str, Any], ...]:
    """What every Replicate is told."""
    found: dict[str, Any] = {}
    if draw(st.booleans()):
        found["bucket_mb"] = draw(st.sampled_from([0.0001, 0.0003]))
    found["prefetch"] = draw(st.integers(0, 2))
    found["keep"] = draw(st.sampled_from(["chunk", "step", 1, 2]))
    if mesh:
        axes = draw(st.sampled_from([None, ("dp",), ("dp", "ep")]))
        if axes is not None:
            found["shard_axes"] = axes
    return tuple(sorted(found.items()))


def draw_levels(draw: st.DrawFn, layers: Sequence[Layer], stages: int) -> tuple[int, ...]:
    """A ZeRO level by stage; stages that share a weight need one."""
    shared = any(layers[x.of].stage != x.stage for x in layers if x.kind == "tied")
    if shared or draw(st.booleans()):
        return (draw(st.integers(0, 3)),) * stages
    return tuple(draw(st.integers(0, 3)) for _ in range(stages))
