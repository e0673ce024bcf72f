"""What goes with what: pairs of features, trained beside one process or refused.

`docs/what-works-with-what.md` is written from this table, and `test_combinations.py` tries every
pair of it, so that the page says what is so.

Terms: a *feature* changes a `Setup`; two features of one *axis* exclude each other. Without a
feature of the axis "schedule" a pair is tried on two stages of 1F1B.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from tests import jobs
from tests.jobs import CLIP, LINE2, LOOP2, V2, Placement
from tests.models import fill, rows, weights

EXPERTS, ROWS, STEPS = 4, 16, 2
# Absolute, of losses, norms and state. An update of an element is about 0.005 to 0.02 here; without
# the rounding of Precision losses and state would be 5e-5 off, norms 1e-4.
EXACT, ROUNDED = 1e-11, 2e-5
LINE, LOOP = {0: [0, 1], 1: [2, 3]}, {0: [0, 1], 1: [2, 3], 2: [0, 1], 3: [2, 3]}
VEE = {0: [0, 1], 1: [2, 3], 2: [2, 3], 3: [0, 1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is built and trained.

    Attributes:
        schedule: Its name.
        zero: The level of two replicas; None without them.
        parts: What the model has.
        directives: Beside the split, places, replicas and orders.
        reduction: How microbatches' losses combine.
        options: Of piper.compile.
        how: What the training loop does.
    """

    schedule: str = "one_f_one_b"
    zero: int | None = None
    parts: frozenset[str] = frozenset()
    directives: tuple[Any, ...] = ()
    reduction: Any = "mean"
    options: Mapping[str, Any] = field(default_factory=dict)
    how: frozenset[str] = frozenset()

    @property
    def replicas(self) -> int:
        return 1 if self.zero is None else 2

    @property
    def microbatches(self) -> int:
        return 4

    @property
    def placement(self) -> Placement:
        alone: dict[str, Placement] = {"interleaved_1f1b": LOOP2, "zbv": V2}
        copied: dict[str, Placement] = {"interleaved_1f1b": LOOP, "zbv": VEE}
        if self.zero is None:
            return alone.get(self.schedule, LINE2)
        return copied.get(self.schedule, LINE)

    def strategy(self) -> piper.Strategy:
        shared = [] if self.zero is None else [piper.Replicate({"PP": "*"}, zero=self.zero)]
        return piper.Strategy(
            piper.Split({}, num_microbatches=self.microbatches, loss=self.reduction),
            *jobs.places(self.placement, self.schedule, self.microbatches),
            *shared,
            *self.directives,
            *jobs.orders(self.schedule, self.placement, self.microbatches),
        )

    def alone(self) -> piper.Strategy:
        """The same on one rank, whose microbatches are those of all replicas."""
        count = self.microbatches * self.replicas
        kept = [d for d in self.directives if not isinstance(d, piper.Shard)]
        return piper.Strategy(
            piper.Split({}, num_microbatches=count, loss=self.reduction),
            *jobs.places({stage: [0] for stage in self.placement}),
            *kept,
        )


class Model(nn.Module):
    """Four tanh layers with whatever `parts` names."""

    def __init__(self, parts: frozenset[str], stages: int) -> None:
        super().__init__()
        self.parts, self.stages = parts, stages
        self.w = weights(4)
        if "tied" in parts:
            self.w[3] = self.w[0]
        if "frozen" in parts:
            self.w[1].requires_grad_(False)
        if "buffers" in parts:
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        if "experts" in parts:
            self.gate, self.up = fill_([4, EXPERTS], 20), fill_([EXPERTS, 4, 4], 5)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        h = first = x
        for k in range(4):
            with piper.annotate("PP", k * self.stages // 4):
                if "skip" in self.parts and k == 3:
                    h = h + first
                if "checkpoint" in self.parts:
                    h = checkpoint(self.layer, h, k, use_reentrant=False)
                else:
                    h = self.layer(h, k)
                if "experts" in self.parts and k == 1:
                    h = torch.tanh(h + self.mix(h))
                first = h if k == 0 else first
        with piper.annotate("PP", self.stages - 1):
            each = (h.double() - y.double()).square().mean(1)
            if "weights" in self.parts:
                return (each * mask).sum() / mask.sum().clamp(min=1)
            return each.mean()

    def layer(self, h: Tensor, k: int) -> Tensor:
        h = torch.tanh(nn.functional.linear(h, self.w[k]))
        if "dropout" in self.parts and k in (0, 2):
            h = nn.functional.dropout(h, 0.25, self.training)
        if "buffers" in self.parts and k == 2:
            self.count.add_(1)  # not +=, which Dynamo does not take in a checkpointed function
            h = h * (1 + self.count / 8)
        return h

    def mix(self, h: Tensor) -> Tensor:
        chances, index = (h @ self.gate).softmax(-1).topk(2)
        sent, routing = piper.moe.dispatch(h, index, EXPERTS)
        with piper.annotate("EP"):
            out = torch.tanh(piper.moe.grouped_mm(sent, self.up, routing))
        return piper.moe.combine(out, routing, chances)


def fill_(shape: list[int], key: int) -> nn.Parameter:
    return nn.Parameter(fill(shape, key).detach().clone())


def count_labels(mask: Tensor) -> Tensor:
    return mask.sum()


def part(name: str) -> Callable[[Setup], Setup]:
    return lambda setup: replace(setup, parts=setup.parts | {name})


def loop(name: str) -> Callable[[Setup], Setup]:
    return lambda setup: replace(setup, how=setup.how | {name})


def option(**given: Any) -> Callable[[Setup], Setup]:
    return lambda setup: replace(setup, options={**setup.options, **given})


def with_directive(made: Callable[[], Any]) -> Callable[[Setup], Setup]:
    return lambda setup: replace(setup, directives=(*setup.directives, made()))


def with_experts(capacity: int | None = None) -> Callable[[Setup], Setup]:
    """Experts over two ranks, which are replicas of the rest."""

    def change(setup: Setup) -> Setup:
        found = with_directive(lambda: piper.Shard({"EP": "*"}, capacity=capacity))(setup)
        return replace(part("experts")(found), zero=setup.zero or 0)

    return change


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that can be combined, what it is called in the documents, and where it is there."""

    axis: str
    page: str
    change: Callable[[Setup], Setup]


def schedule(name: str) -> Feature:
    return Feature(axis="schedule", page="schedules.md", change=lambda s: replace(s, schedule=name))


def level(zero: int) -> Feature:
    return Feature(axis="replicas", page="zero.md", change=lambda s: replace(s, zero=zero))


def own(page: str, change: Callable[[Setup], Setup], axis: str = "") -> Feature:
    return Feature(axis=axis, page=page, change=change)


# The order of the table: what changes a setup only where it is not set yet comes later.
FEATURES: dict[str, Feature] = {
    "1F1B": schedule("one_f_one_b"),
    "interleaved": schedule("interleaved_1f1b"),
    "split backward": schedule("zbv"),
    "both directions": schedule("dualpipe"),
    "ZeRO 0": level(0),
    "ZeRO 1": level(1),
    "ZeRO 2": level(2),
    "ZeRO 3": level(3),
    "experts": own("experts.md", with_experts(), "experts"),
    "capacity": own("experts.md", with_experts(2 * ROWS), "experts"),
    "tied weights": own("how-it-works.md", part("tied")),
    "skips": own("how-it-works.md", part("skip")),
    "frozen": own("state.md", part("frozen")),
    "buffers": own("numerics.md", part("buffers")),
    "dropout": own("numerics.md", part("dropout")),
    "checkpoint": own("memory.md", part("checkpoint")),
    "Recompute": own("memory.md", with_directive(lambda: piper.Recompute({"PP": "*"}, budget=0.0))),
    "Precision": own("numerics.md", with_directive(lambda: piper.Precision({}, param="bf16"))),
    "loss weights": own("loss.md", lambda s: replace(part("weights")(s), reduction=count_labels)),
    "loss scale": own("numerics.md", option(loss_scale=1024.0)),
    "nan check": own("numerics.md", option(nan_check="raise")),
    "no_sync": own("zero.md", loop("no_sync")),
    "evaluation": own("numerics.md", loop("evaluation")),
    "deferred init": own("initial-values.md", loop("deferred")),
    "resume": own("state.md", loop("resume")),
}
PAIRS = [
    (a, b)
    for a, b in combinations(FEATURES, 2)
    if not FEATURES[a].axis or FEATURES[a].axis != FEATURES[b].axis
]

# Pairs that are refused: why, for the page, and words of the refusal.
REFUSED: dict[tuple[str, str], tuple[str, ...]] = {
    ("both directions", "buffers"): (
        "a buffer that every microbatch changes would tie the two directions together",
        "the orders deadlock",
        "the new value of buffer 'count'",
        "eval mode",
    ),
}
# What the model of a pair has to keep to, for the page.
NOTES: dict[tuple[str, str], str] = {
    ("buffers", "checkpoint"): (
        "a buffer that a checkpointed function changes is changed in place (`add_`; Dynamo refuses "
        "`+=` there), and once per microbatch, as eager does without the checkpoint"
    ),
}
# What is not built, and the page that says so: with everything, it is refused by its name.
NOT_BUILT = {"tensor parallelism": "migration.md"}
SPLIT_WORDS = ("the experts cannot be sharded", "tensor parallelism", "is not built")


def split_weights(setup: Setup) -> Setup:
    """Asks for tensor parallelism beside it: of the last stage, which has no experts."""
    last = piper.Shard({"PP": len(setup.placement) - 1})
    return replace(setup, zero=setup.zero or 0, directives=(*setup.directives, last))


def setup_of(first: str, second: str) -> Setup:
    setup = Setup()
    for name in FEATURES:
        if name in (first, second):
            setup = FEATURES[name].change(setup)
    if "no_sync" in setup.how and setup.zero is None:
        setup = replace(setup, zero=0)
    return setup


# What only the training loop does: a plan knows nothing of it.
OF_THE_LOOP = {name for name in FEATURES if setup_of(name, name).how}


@cache
def _model(parts: frozenset[str], stages: int) -> nn.Module:
    """One model for all its plans, which share its capture."""
    return Model(parts, stages)


def plan(setup: Setup) -> piper.Plan:
    """The plan of a setup, proved.

    Raises:
        PiperError: It is refused.
        ValueError: The setup has what is only of the loop.
    """
    if setup.how:
        raise ValueError(f"no plan has {sorted(setup.how)}: the training loop does")
    model = _model(setup.parts, len(setup.placement))
    example = tuple(v[: ROWS // setup.replicas] for v in batch(0))
    return piper.plan(
        model, setup.strategy(), example, jobs.world(setup.placement), **setup.options
    )


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, targets, and a mask with unlike numbers of ones in microbatches and replicas."""
    x, y = rows(ROWS, 2 * step)
    mask = (torch.arange(ROWS) % 5 != 0).double()
    return x, y, mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What is compared."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def leg(
    setup: Setup, wanted: piper.Strategy, ranks: int, steps: range, folder: Path | None
) -> list[Trained]:
    """Some steps under a strategy, from a checkpoint unless they are the first; by rank."""

    def job() -> Trained:
        torch.manual_seed(3)
        stages = len(setup.placement)
        if "deferred" in setup.how:
            with piper.deferred_init():
                model = Model(setup.parts, stages)
        else:
            model = Model(setup.parts, stages)

        def given(number: int) -> tuple[Tensor, ...]:
            copies = setup.replicas if ranks > 1 else 1
            at = piper.data_rank(step) if copies > 1 else 0
            return tuple(v.chunk(copies)[at] for v in batch(number))

        shape = tuple(v[: ROWS // (setup.replicas if ranks > 1 else 1)] for v in batch(0))
        step = piper.compile(model, wanted, example_inputs=shape, **setup.options)
        optimizer = torch.optim.SGD(piper.parameters(step), lr=0.5, momentum=0.9)
        torch.manual_seed(3 if not steps.start else 4)
        if steps.start:
            assert folder is not None
            piper.load_checkpoint(folder, step, optimizer)
        losses, norms = [], []
        for number in steps:
            if "no_sync" in setup.how:
                with piper.no_sync(step):
                    step(*given(number + 5)).backward()
            if "evaluation" in setup.how:
                with torch.no_grad():
                    losses.append(step(*given(number + 7)).item())
            loss = step(*given(number))
            loss.backward()
            losses.append(loss.item())
            norms.append(float(piper.clip_grad_norm_(step, CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None and steps.stop < STEPS:
            piper.save_checkpoint(folder, step, optimizer)
        return Trained(losses=losses, norms=norms, state=piper.state_dict(step))

    return jobs.run_ranks(job, ranks)


def run(setup: Setup, folder: Path) -> list[Trained]:
    """The training of a setup, by rank."""
    ranks = jobs.world(setup.placement)
    if "resume" not in setup.how:
        return leg(setup, setup.strategy(), ranks, range(STEPS), None)
    first = leg(setup, setup.strategy(), ranks, range(1), folder)[0]
    rest = leg(setup, setup.alone(), 1, range(1, STEPS), folder)
    return [
        Trained(losses=first.losses + r.losses, norms=first.norms + r.norms, state=r.state)
        for r in rest
    ]


def reference(setup: Setup) -> Trained:
    """The same in one process.

    In eager mode, replica by replica, where buffers are a replica's own. Where masks or roundings
    are Piper's, it is Piper on one rank, with all microbatches.
    """
    is_ours = "dropout" in setup.parts or any(
        isinstance(d, piper.Precision) for d in setup.directives
    )
    if is_ours:
        quiet = replace(setup, how=setup.how - {"resume", "no_sync"}, options={})
        if "no_sync" in setup.how:
            quiet = replace(quiet, how=quiet.how | {"twice"})
        return _by_one_rank(quiet)
    return _by_eager(setup)


def _by_one_rank(setup: Setup) -> Trained:
    wanted = setup.alone()

    def job() -> Trained:
        torch.manual_seed(3)
        step = piper.compile(
            Model(setup.parts, len(setup.placement)), wanted, example_inputs=batch(0)
        )
        optimizer = torch.optim.SGD(piper.parameters(step), lr=0.5, momentum=0.9)
        torch.manual_seed(3)
        losses, norms = [], []
        for number in range(STEPS):
            if "twice" in setup.how:
                step(*batch(number + 5)).backward()
            if "evaluation" in setup.how:
                with torch.no_grad():
                    losses.append(step(*batch(number + 7)).item())
            loss = step(*batch(number))
            loss.backward()
            losses.append(loss.item())
            norms.append(float(piper.clip_grad_norm_(step, CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        return Trained(losses=losses, norms=norms, state=piper.state_dict(step))

    return jobs.run_ranks(job, 1)[0]


def _by_eager(setup: Setup) -> Trained:
    parts = setup.parts
    if "buffers" in parts:  # which eager checkpoints change again when they compute again
        parts = parts - {"checkpoint"}
    model = Model(parts, 1)
    buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(setup.replicas)]
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9
    )

    def whole(given: tuple[Tensor, ...], copies: int, backward: bool) -> float:
        """The mean over replicas and microbatches; gradients are added."""
        total, all_weight = 0.0, float(given[2].sum()) if "weights" in setup.parts else None
        share = setup.microbatches * setup.replicas // copies
        for replica in range(copies):
            for name, value in model.named_buffers():
                value.copy_(buffers[replica][name])
            mine = [v.chunk(copies)[replica] for v in given]
            for piece in zip(*(v.chunk(share) for v in mine), strict=True):
                scale = 1 / (share * copies)
                if all_weight is not None:
                    scale = float(piece[2].sum()) / all_weight
                with torch.set_grad_enabled(backward):
                    loss = model(*piece) * scale
                if backward:
                    loss.backward()
                total += loss.item()
            buffers[replica] = {n: b.clone() for n, b in model.named_buffers()}
        return total

    losses, norms = [], []
    for number in range(STEPS):
        copies = 1 if "resume" in setup.how and number else setup.replicas
        if "no_sync" in setup.how:
            whole(batch(number + 5), copies, True)
        if "evaluation" in setup.how:
            losses.append(whole(batch(number + 7), copies, False))
        losses.append(whole(batch(number), copies, True))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_buffers():
        value.copy_(buffers[0][name])
    return Trained(losses=losses, norms=norms, state=model.state_dict())


def compare(setup: Setup, ranks: list[Trained], want: Trained) -> None:
    """Losses, norms and the whole state on every rank.

    Raises:
        AssertionError: They differ by more than rounding.
    """
    rounds = any(isinstance(d, piper.Precision) for d in setup.directives)
    tolerance = ROUNDED if rounds else EXACT
    for rank, got in enumerate(ranks):
        jobs.close(got.losses, want.losses, f"rank {rank}: losses", tolerance)
        jobs.close(got.norms, want.norms, f"rank {rank}: norms", tolerance)
        assert got.state.keys() == want.state.keys()
        for name, value in want.state.items():
            jobs.close(got.state[name], value, f"rank {rank}: {name}", tolerance)


# The page


def text() -> str:
    """The page's table and the list of what is refused."""
    names = [*FEATURES, *NOT_BUILT]
    pages = {name: feature.page for name, feature in FEATURES.items()} | NOT_BUILT
    marks = {}
    for a, b in PAIRS:
        marks[a, b] = marks[b, a] = "no" if (a, b) in REFUSED else "yes"
    for missing in NOT_BUILT:
        for name in names:
            marks[missing, name] = marks[name, missing] = "no"
    lines = ["| with | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for name in names:
        cells = [marks.get((name, other), "") for other in names]
        lines.append(f"| [{name}]({pages[name]}) | " + " | ".join(cells) + " |")
    lines.append("")
    for (a, b), (why, *_) in REFUSED.items():
        lines.append(f"- *{a}* with *{b}* is refused: {why}.")
    lines += [f"- *{a}* with *{b}*: {note}." for (a, b), note in NOTES.items()]
    lines += [f"- *{name}* is not built: it is refused by name." for name in NOT_BUILT]
    return "\n".join(lines) + "\n"
