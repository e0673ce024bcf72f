"""Random jobs: a small model and a legal strategy for it, both as the code that makes them.

Terms: a *job* is a model's layers, where its stages are, and how its microbatches, replicas and
orders are; a *part* is all tasks of one pass of one stage for one microbatch, which is what an
order's filter names. A job prints as a script that runs alone: `Job.script` plans it,
`Job.training_script` trains it and compares. `tests/drawing.py` draws jobs.
"""

import functools
import linecache
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import piper_dynamo as piper
from piper_dynamo import captured
from piper_dynamo.planning import Plan, make_plan
from tests import jobs, layers, trial
from tests.layers import INPUTS, PIECES
from tests.trial import Trial

EXPERTS = 4
BITS = {"bf16": 16, "fp32": 32, "fp64": 64}
NEAR = {16: 3e-2, 32: 2e-5, 64: 1e-9}  # results of so few bits
DRAWING = ("dropout", "checkpointed dropout")
CHANGING = ("norm", "count", "average")  # microbatches that change a buffer run one after the other
Task = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer.

    Attributes:
        stage: Which region it is in.
        kind: Of PIECES.
        of: The layer whose weight or value it uses, where its kind does.
        skip: Which layer's input it adds to its own; None: none.
        tag: The number of a region of its own inside of the stage; None: none.
    """

    stage: int
    kind: str = "linear"
    of: int = 0
    skip: int | None = None
    tag: int | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and a strategy, and how it is trained.

    Attributes:
        layers: In order. Where stages fall, a stage is visited more than once.
        on: The device group of each stage.
        moved: Stages whose later half of the microbatches is on another group, and that group.
        microbatches: Into how many the batch is split.
        rows: Of one microbatch on one replica.
        replicas: How many ranks a group has.
        mesh: Whether two axes number the replicas; there are four then.
        zero: By stage.
        options: Of every Replicate.
        experts: How experts are sharded: "" not at all, "all" over all replicas, "ep" over an axis.
        capacity: Whether experts get a capacity, in which every row has room.
        combine: How the microbatches' losses combine: "mean", "sum", or "weigh" by their targets.
        outputs: Of which layers the model also returns the input.
        schedule: A built-in schedule's name; "": see `chosen`.
        split: Of which stages the backward is split, where there is no schedule.
        chosen: A random order's seed, and which share of the passes it names, in percent.
        merged: Which share of an order's tasks are in one group with the one before.
        precision: Filters of Precisions and their dtypes.
        recompute: Filters of Recomputes and their budgets.
        compile: How chunks would run.
        everywhere: Whether all ranks get the outputs.
        sync: Whether the step reduces gradients at level 0 and 1.
        style: How the model takes its inputs: as "args", "kwargs" or one "dict".
        checks: The options nan_check and loss_scale.
        calls: Of the step before an update.
        later: Rows of a microbatch in the second update.
        uneven: Rows too many, so that the batch cannot be split.
        adamw: Whether it is trained by AdamW; else by SGD with momentum.
        norm: Of the gradients that are clipped by it: "2", "1" or "inf".
        evaluates: Whether a call without gradients follows.
        spares: Whether ranks get nothing of the inputs that they do not use.
        deferred: Whether the model is built under `piper.deferred_init`.
        numbers: Which ones the batches are made of.
    """

    layers: tuple[Layer, ...]
    on: tuple[int, ...]
    moved: tuple[tuple[int, int], ...] = ()
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
    precision: tuple[tuple[Task, dict[str, str]], ...] = ()
    recompute: tuple[tuple[Task, float], ...] = ()
    compile: str = "aten"
    everywhere: bool = False
    sync: bool = True
    style: str = "args"
    checks: tuple[tuple[str, Any], ...] = ()
    calls: int = 1
    later: int = 2
    uneven: int = 0
    adamw: bool = False
    norm: str = "2"
    evaluates: bool = False
    spares: bool = False
    deferred: bool = False
    numbers: int = 0

    @property
    def where(self) -> str:
        return "everywhere" if self.everywhere else "owner"

    @property
    def stages(self) -> int:
        return len(self.on)

    @property
    def placement(self) -> dict[int, list[int]]:
        return {s: self.ranks(g) for s, g in enumerate(self.on)}

    @property
    def world(self) -> int:
        return (max((*self.on, *(group for _, group in self.moved))) + 1) * self.replicas

    def ranks(self, group: int) -> list[int]:
        return list(range(group * self.replicas, (group + 1) * self.replicas))

    def has(self, *kinds: str) -> bool:
        return any(layer.kind in kinds for layer in self.layers)

    @property
    def _numbered(self) -> list[tuple[int, Layer]]:
        return list(enumerate(self.layers))

    @property
    def exact(self) -> bool:
        """Whether everything is computed in float64."""
        return self.least == 64 and not self.precision

    @property
    def inputs(self) -> dict[str, tuple[str, int | None]]:
        """What the model takes, in order."""
        asked = {"x", "y", *(PIECES[layer.kind].asks for layer in self.layers)}
        return {name: how for name, how in INPUTS.items() if name in asked}

    # The model.

    def source(self) -> str:
        """The model and its data as Python; line numbers are its own."""
        names = list(self.inputs)
        made = [layers.CUSTOM] if self.has("custom") else []
        made += [layers.WEIGH] if self.combine == "weigh" else []
        made += ["", "", "def data(rows, key=0):"]
        made += [f"    g = torch.Generator().manual_seed({99 + 1000 * self.numbers} + key)"]
        made += ["    return {"]
        made += [f'        "{name}": {how},' for name, (how, _) in self.inputs.items()]
        made += ["    }", "", "", "class Model(nn.Module):", "    def __init__(self):"]
        made += ["        super().__init__()"]
        for k, layer in self._numbered:
            made += [f"        {line.format(k=k)}" for line in PIECES[layer.kind].made]
        taken = "batch" if self.style == "dict" else ", ".join(names)
        made += ["", f"    def forward(self, {taken}):"]
        if self.style == "dict":
            made += [f'        {name} = batch["{name}"]' for name in names]
        made += ["        h = h0 = x"]
        for k, layer in self._numbered:
            made.append(f'        with piper.annotate("PP", {layer.stage}):')
            made += [f"            {line}" for line in self._layer(k, layer)]
        rest = "".join(f', "h{k}": h{k}' for k in self.outputs)
        rest += ', "mean": h.mean().detach(), "many": 3, "none": None' if rest else ""
        rest += ', "best": y.argmax(-1)' if rest and self.exact else ""
        added = [PIECES[layer.kind].adds.format(k=k, of=layer.of) for k, layer in self._numbered]
        loss = " + ".join(["F.mse_loss(h.double(), y.double())", *filter(None, added)])
        made += [
            f'        with piper.annotate("PP", {self.stages - 1}):',
            f"            loss = {loss}",
            f'            return {{"loss": loss{rest}}}' if rest else "            return loss",
        ]
        return "\n".join([layers.HEAD, *made, ""])

    def _layer(self, k: int, layer: Layer) -> Iterator[str]:
        if layer.skip is not None:
            yield f"h = h + h{layer.skip}"
        inner = "" if layer.tag is None else "    "
        if inner:
            yield f'with piper.annotate("SUB", {layer.tag}):'
        for line in PIECES[layer.kind].run:
            yield inner + line.format(k=k, of=layer.of)
        yield f"h{k + 1} = h"

    @cached_property
    def names(self) -> dict[str, Any]:
        """What the source defines."""
        source = self.source()
        name = f"<drawn {abs(hash(source)):x}>.py"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        namespace: dict[str, Any] = {"__name__": "drawn"}
        exec(compile(source, name, "exec"), namespace)
        return namespace

    # The strategy.

    def strategy(self) -> piper.Strategy:
        m, placement = self.microbatches, self.placement
        groups = self.world // self.replicas
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
            room = 2 * max(self.rows, self.later) if self.capacity else None
            how.append(piper.Shard({"EP": "*"}, axes=axes, capacity=room))
        how += [piper.Precision(which, **dtypes) for which, dtypes in self.precision]
        how += [piper.Recompute(which, budget=budget) for which, budget in self.recompute]
        return piper.Strategy(
            piper.Split({}, num_microbatches=m, loss=self._combine(), inputs=self._sliced()),
            *(self._places() or jobs.places(placement, self.schedule, m)),
            *how,
            *(jobs.orders(self.schedule, placement, m) or self.orders()),
            mesh=mesh,
            loss="loss" if self.outputs else None,
        )

    def _combine(self) -> Any:
        return self.names["weigh"] if self.combine == "weigh" else self.combine

    def _sliced(self) -> dict[str, Any] | None:
        """What must be said of inputs that are not sliced along their first dim."""
        rules = {"turned": 1, "table": "replicate"}
        shown = "batch['{}']" if self.style == "dict" else "{}"
        return {shown.format(n): rules[n] for n in self.inputs if n in rules} or None

    def _places(self) -> list[piper.Place]:
        """A Place per stage and group, where some stages are on two."""
        if not self.moved:
            return []
        found, half = [], self.microbatches // 2
        other = dict(self.moved)
        for stage, group in enumerate(self.on):
            if stage not in other:
                found.append(piper.Place({"PP": stage}, devices=self.ranks(group)))
                continue
            for some, where in (
                (range(half), group),
                (range(half, self.microbatches), other[stage]),
            ):
                found.append(piper.Place({"PP": stage, "MB": some}, devices=self.ranks(where)))
        return found

    def home(self, stage: int, mb: int) -> int:
        """The group that runs a stage for a microbatch."""
        other = dict(self.moved)
        return other.get(stage, self.on[stage]) if mb >= self.microbatches // 2 else self.on[stage]

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
                by_group.setdefault(self.home(stage, mb), []).append(task)
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
        return any(x.stage == stage and x.kind in CHANGING for x in self.layers)

    # Planning it.

    def plan(self) -> Plan:
        model, batch = self.names["Model"](), self.names["data"](self.rows * self.microbatches)
        make = functools.partial(_made, is_last=self.sync)
        example: Any = (batch,) if self.style == "dict" else batch
        options = {"compile": self.compile, "outputs": self.where}
        with mock.patch.object(captured, "make_plan", make):
            return piper.plan(model, self.strategy(), example, self.world, **options)

    def script(self, check: str) -> str:
        """A file that makes the plan, and then runs `check`."""
        count = self.rows * self.microbatches
        later = [] if self.sync else ["# As of a step inside of piper.no_sync:"]
        example = f"(data({count}),)" if self.style == "dict" else f"data({count})"
        return "\n".join(
            [
                self.source(),
                "",
                *later,
                f"strategy = {self._printed()}",
                f"plan = piper.plan(Model(), strategy, {example}, {self.world}, "
                f"compile={self.compile!r}, outputs={self.where!r})",
                check,
                "",
            ]
        )

    def _printed(self) -> str:
        """The strategy as code; what the source defines has no module there."""
        return repr(self.strategy()).replace("drawn.", "")

    # Training it.

    @property
    def least(self) -> int:
        """The fewest bits that the model itself computes or holds something in."""
        return min(PIECES[layer.kind].least for layer in self.layers)

    def _settings(self) -> dict[str, Any]:
        """What a Trial has beside the model, its data and its strategy."""
        rounded = [BITS[d] for _, dtypes in self.precision for d in dtypes.values()]
        near = NEAR[min(self.least, *rounded, 64)]
        has_twin = bool(self.precision) or self.has(*DRAWING)
        share = self.microbatches * self.replicas
        options = {"compile": self.compile, "outputs": self.where, **dict(self.checks)}
        return {
            "world": self.world,
            "replicas": self.replicas,
            "dims": {name: dim for name, (_, dim) in self.inputs.items() if dim is not None},
            "rows": (self.rows * share + self.uneven, self.later * share),
            "calls": self.calls,
            "style": self.style,
            "optimizer": "adamw" if self.adamw else "sgd",
            "norm": float(self.norm),
            "evaluates": self.evaluates,
            "spares": self.spares,
            "deferred": self.deferred,
            "options": options,
            "eager": None if self.has(*DRAWING) else near * (3 if self.precision else 1),
            "twin": near if has_twin else None,
        }

    @property
    def is_comparable(self) -> bool:
        """Whether there is something to compare with: a twin has one set of buffers."""
        rounds = bool(self.precision) or self.has(*DRAWING)
        return not (rounds and self.replicas > 1 and self.has(*CHANGING))

    def trial(self) -> Trial:
        """Its training."""
        names = self.names
        return Trial(
            build=names["Model"], data=names["data"], strategy=self.strategy(), **self._settings()
        )

    def training_script(self) -> str:
        """A file that trains it and compares, with all that it needs but torch and piper."""
        made = [
            Path(trial.__file__).read_text(encoding="utf-8"),
            "",
            self.source().partition("import piper_dynamo as piper\n")[2].strip("\n"),
            "",
            "",
            f"strategy = {self._printed()}",
            "trial = Trial(",
            "    build=Model,",
            "    data=data,",
            "    strategy=strategy,",
            *(f"    {name}={value!r}," for name, value in self._settings().items()),
            ")",
            "check(trial)",
            "",
        ]
        text = "\n".join(made)
        return text.replace("from torch import Tensor, nn\n", _IMPORTS, 1)


_IMPORTS = "import torch.nn.functional as F\nfrom torch import Tensor, nn\n"


def _made(*args: Any, is_last: bool, **named: Any) -> Plan:
    """A plan as of a step inside `piper.no_sync`, where it is not the last one of several."""
    return make_plan(*args, **{**named, "sync": named["sync"] and is_last})
