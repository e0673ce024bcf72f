"""Drawing random jobs that Piper must take, or refuse by a rule that it documents.

What is drawn depends on the draws alone, so a seed gives the same jobs; of the ways to draw
something the simplest comes first, which is where hypothesis looks for smaller ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.drawn import CHANGING, DRAWING, Job, Layer, Task
from tests.layers import PIECES

# Layers whose result is another where a number is rounded otherwise.
CHOOSING = {"experts": "routed", "mask": "linear", "masked": "linear", "moe": "linear"}
CHOOSING |= {"checkpointed moe": "linear"}
EXPERTS = ("experts", "routed", "experts again", "moe", "checkpointed moe")
TRAINED = ("linear", "uneven")
# Layers that use another one's weight.
SHARING = ("tied", "part", "decay", "head", "experts again")
# Layers about which strategies have the most to decide.
OFTEN = (
    "linear",
    "tied",
    "experts",
    "linear",
    "tied",
    "experts",
    "part",
    "experts again",
    "uneven",
)


@st.composite
def drawn_jobs(
    draw: st.DrawFn, max_groups: int = 3, max_replicas: int = 4, max_ranks: int = 12
) -> Job:
    """A job that Piper must take."""
    stages = draw(st.sampled_from([1, 2, 2, 3, 4, 4]))
    layers = draw_layers(draw, stages)
    changes = any(layer.kind in CHANGING for layer in layers)
    on, schedule = draw_place(draw, stages, max_groups, changes)
    share = draw(st.sampled_from([0, 30, 70, 100]))
    if not schedule and not share and draw(st.integers(0, 2)) == 2:
        homes = draw(st.permutations([layer.stage for layer in layers]))
        layers = tuple(replace(x, stage=s) for x, s in zip(layers, homes, strict=True))
    groups = max(on) + 1
    counts = [d for d in (1, 2, 2, 3, 4, 4) if d <= max_replicas and d * groups <= max_ranks]
    replicas = draw(st.sampled_from(counts))
    microbatches = draw_count(draw, schedule, stages, groups)
    moved: tuple[tuple[int, int], ...] = ()
    if not schedule and groups > 1 and microbatches > 1 and not changes:
        moved = draw_moves(draw, on)
    precision = draw_precision(draw, layers, stages)
    if precision or any(PIECES[layer.kind].least < 64 for layer in layers):
        kept = [CHOOSING.get(layer.kind, layer.kind) for layer in layers]
        layers = tuple(replace(x, kind=kind) for x, kind in zip(layers, kept, strict=True))
    has_experts = any(layer.kind in EXPERTS for layer in layers)
    mesh = replicas == 4 and draw(st.booleans())
    options = draw_options(draw, mesh) if replicas > 1 else ()
    experts = ""
    if has_experts and replicas in (2, 4):
        shared = "ep" if mesh else "all"
        experts = draw(st.sampled_from(["", shared, shared]))
    has_norm = any(layer.kind == "norm" for layer in layers)  # its statistics need two rows
    style = draw(st.sampled_from(["args", "kwargs", "dict"]))
    job = Job(
        layers=layers,
        on=on,
        moved=moved,
        microbatches=microbatches,
        rows=draw(st.sampled_from([2, 3] if has_norm else [2, 3, 1])),
        replicas=replicas,
        mesh=mesh,
        zero=draw_levels(draw, layers, stages) if replicas > 1 else (0,) * stages,
        options=options,
        experts=experts,
        capacity=bool(experts) and draw(st.booleans()),
        combine=draw(st.sampled_from(["mean", "sum", *(["weigh"] * (style != "dict"))])),
        outputs=tuple(draw(st.sets(st.integers(0, len(layers)), max_size=2))),
        schedule=schedule,
        split=frozenset(draw(st.sets(st.integers(0, stages - 1)))) if not schedule else frozenset(),
        chosen=(draw(st.integers(0, 999)), share),
        merged=draw(st.sampled_from([0, 0, 30])),
        precision=precision,
        recompute=draw_budgets(draw, layers, stages),
        compile=draw(st.sampled_from(["aten", "aten", "inductor"])),
        everywhere=draw(st.booleans()),
        sync=draw(st.sampled_from([True, True, False])),
        style=style,
    )
    return job if job.sync else reduced_as_they_are(job)


def reduced_as_they_are(job: Job) -> Job:
    """The job where reductions are put off: these are in the parameter's own dtype."""
    kept = [(w, {n: d for n, d in dtypes.items() if n != "reduce"}) for w, dtypes in job.precision]
    return replace(job, precision=tuple((w, d) for w, d in kept if d))


@st.composite
def drawn_trainings(draw: st.DrawFn, inductor_every: int = 40, max_ranks: int = 6) -> Job:
    """A job with all that its training has beside the plan; few may be refused."""
    # Each rank captures and compiles: few have most of what can go wrong.
    ranks = draw(st.sampled_from([min(max_ranks, 4)] * 5 + [max_ranks]))
    job = draw(drawn_jobs(max_groups=min(3, ranks), max_ranks=ranks))
    if not job.is_comparable:
        kept = [replace(x, kind="linear") if x.kind in CHANGING else x for x in job.layers]
        job = replace(job, layers=tuple(kept))
    calls = draw(st.sampled_from([1, 1, 1, 2]))
    if calls > 1:
        job = reduced_as_they_are(job)
    checks = draw(
        st.sampled_from(
            [
                *([{}] * 4),
                {"nan_check": "raise"},
                {"nan_check": "skip", "loss_scale": "dynamic"},
                {"loss_scale": 8.0},
            ]
        )
    )
    is_compiled = job.stages <= 2 and draw(st.integers(1, inductor_every)) == inductor_every
    return replace(
        job,
        compile="inductor" if is_compiled else "aten",
        sync=True,
        checks=tuple(sorted(checks.items())),
        calls=calls,
        later=draw(st.sampled_from([job.rows, job.rows, 4, 2])),
        uneven=draw(st.sampled_from([0] * 40 + [1])) if job.microbatches > 1 else 0,
        adamw=draw(st.booleans()),
        norm=draw(st.sampled_from(["2", "2", "1", "inf"])),
        evaluates=not job.has(*DRAWING, *CHANGING) and draw(st.sampled_from([False] * 3 + [True])),
        # What comes in and goes out again is the caller's own value.
        spares=0 not in job.outputs and draw(st.booleans()),
        deferred=draw(st.sampled_from([False, False, False, True])),
        numbers=draw(st.integers(0, 9999)),
    )


def draw_layers(draw: st.DrawFn, stages: int) -> tuple[Layer, ...]:
    """At least one trained layer in each stage but the last, which may only take the loss."""
    layers: list[Layer] = []
    for stage in range(stages):
        least = 0 if stage == stages - 1 and stages > 1 else 1
        for _ in range(draw(st.sampled_from([least, 1, 2, 2, 3]))):
            there = {x.kind for x in layers}
            kinds = [k for k, piece in PIECES.items() if not piece.of or piece.of in there]
            usual = [*OFTEN, *(k for k in kinds if k not in OFTEN)]
            kind = draw(st.sampled_from([k for k in usual if k in kinds and k != "routed"]))
            of = [k for k, layer in enumerate(layers) if layer.kind == PIECES[kind].of]
            skips = st.none() | st.integers(0, len(layers) - 1) if layers else st.none()
            used = draw(st.sampled_from(of)) if of else 0
            tag = draw(st.sampled_from([None, None, None, 0, 1]))
            layers.append(Layer(stage=stage, kind=kind, of=used, skip=draw(skips), tag=tag))
    if not any(layer.kind in TRAINED for layer in layers):
        layers.append(Layer(stage=layers[-1].stage))
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
        shapes += [((0, 1, 1, 0), ("zbv", "dualpipev", "gpipe"))] * 2
    if shapes and draw(st.sampled_from([False, True, True])):
        on, schedules = draw(st.sampled_from(shapes))
        return on, draw(st.sampled_from(schedules))
    groups = draw(st.integers(1, min(stages, max_groups)))
    drawn = [draw(st.integers(0, groups - 1)) for _ in range(stages)]
    names = {group: place for place, group in enumerate(dict.fromkeys(drawn))}
    return tuple(names[group] for group in drawn), ""


def draw_moves(draw: st.DrawFn, on: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Stages of which half of the microbatches runs on another group of those that there are."""
    moves = []
    for stage, group in enumerate(on):
        other = draw(st.sampled_from([None, None, *sorted(set(on) - {group})]))
        if other is not None:
            moves.append((stage, other))
    return tuple(moves)


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
    for stream in ("reduce_stream", "gather_stream"):
        name = draw(st.sampled_from([None, "dp", "other"]))
        if name is not None:
            found[stream] = name
    if mesh:
        axes = draw(st.sampled_from([None, ("dp",), ("dp", "ep")]))
        if axes is not None:
            found["shard_axes"] = axes
    return tuple(sorted(found.items()))


def draw_levels(draw: st.DrawFn, layers: Sequence[Layer], stages: int) -> tuple[int, ...]:
    """A ZeRO level by stage; stages that share a weight need one."""
    if shares(layers, stages) or draw(st.booleans()):
        return (draw(st.integers(0, 3)),) * stages
    return tuple(draw(st.integers(0, 3)) for _ in range(stages))


def shares(layers: Sequence[Layer], stages: int) -> bool:
    """Whether stages share a weight; what the loss has of one is in the last stage."""
    uses = [(x, stages - 1 if x.kind == "decay" else x.stage) for x in layers]
    return any(layers[x.of].stage != stage for x, stage in uses if x.kind in SHARING)


def draw_precision(
    draw: st.DrawFn, layers: Sequence[Layer], stages: int
) -> tuple[tuple[Task, dict[str, str]], ...]:
    """No Precision mostly, or one of all stages, or of some; those that share a weight agree."""
    choices: list[list[Task]] = [*([[]] * 6), [{"PP": "*"}]]
    if not shares(layers, stages):
        choices += [[{"PP": s}] for s in range(stages)]
    tags = sorted({layer.tag for layer in layers if layer.tag is not None})
    if not any(layer.kind in SHARING for layer in layers):
        choices += [[{"SUB": tag}] for tag in tags]
    filters = draw(st.sampled_from(choices))
    found = []
    for which in filters:
        dtypes = {
            "param": draw(st.sampled_from(["fp32", "bf16", None])),
            "grad": draw(st.sampled_from([None, None, "fp64", "fp32"])),
            "reduce": draw(st.sampled_from([None, None, "fp32", "bf16"])),
        }
        named = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
        if named:
            found.append((which, named))
    return tuple(found)


def draw_budgets(
    draw: st.DrawFn, layers: Sequence[Layer], stages: int
) -> tuple[tuple[Task, float], ...]:
    """No Recompute mostly, or one of all stages, or of some."""
    filters: list[Task | None] = [None, None, None, {"PP": "*"}]
    filters += [{"PP": draw(st.integers(0, stages - 1))}]
    filters += [{"SUB": tag} for tag in sorted({x.tag for x in layers if x.tag is not None})]
    which = draw(st.sampled_from(filters))
    return () if which is None else ((which, draw(st.sampled_from([0.0, 0.3, 1.0]))),)
