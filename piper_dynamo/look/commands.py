"""`piper plan`, `check`, `plot`, `compare` and `explain`.

All take the same target; `command.py` says what they exit with.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from piper_dynamo.errors import PiperError
from piper_dynamo.look.bench import bench
from piper_dynamo.look.command import REFUSED, Command, show_json
from piper_dynamo.look.convert import convert
from piper_dynamo.look.dumps import debug
from piper_dynamo.look.options import option_of
from piper_dynamo.schedules import schedule_name
from piper_dynamo.train.config import Config
from piper_dynamo.train.progress import waiting_for

if TYPE_CHECKING:  # importing torch takes seconds
    from piper_dynamo.costs import Costs
    from piper_dynamo.look.target import Target
    from piper_dynamo.planning import Plan

# Of the training job's options those that say what is planned.
ASKED = (
    *(
        "model",
        "pp",
        "dp",
        "ep",
        "order",
        "schedule",
        "microbatches",
        "zero",
        "bucket_mb",
        "prefetch",
    ),
    *("keep", "capacity", "recompute", "precision", "dim", "layers", "heads", "kv_heads", "seq"),
    *("batch", "experts", "top_k", "tied_head", "dtype", "seed", "compile"),
)
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")  # of footprint.py, which imports torch
_COSTS = ("F", "BI", "BW", "comm", "bandwidth")
# Options of a job on one rank.
ALONE: Mapping[str, Any] = {
    **{"pp": 1, "dp": 1, "ep": 1, "order": None, "zero": 0, "microbatches": 1, "schedule": "gpipe"},
    **{"bucket_mb": None, "prefetch": 1, "keep": "chunk", "capacity": None},
    "recompute": None,
}


def _planned(target: "Target", ranks: int | None) -> "Plan":
    """The target's plan; large ones take seconds."""
    with waiting_for("planning"):
        return target.plan(ranks)


def takes_target(command: Callable[..., Any], *, searches: bool = False) -> Callable[..., Any]:
    """The argument and options that name a target; the command gets it made, and its plan's ranks.

    The function is called with the context, the target, for how many ranks, and its own options.

    Args:
        command: The function.
        searches: Whether it looks for a strategy: then the target needs none, and is the job of
            one rank.
    """

    @functools.wraps(command)
    @click.pass_context
    def called(ctx: click.Context, /, **options: Any) -> Any:
        from piper_dynamo.look.target import load_target

        own = {name: options.pop(name) for name in list(options) if name not in _SHARED}
        given = {
            name for name in ASKED if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
        }
        options["schedule"] = schedule_name(options["schedule"])
        ranks, path = options.pop("ranks"), options.pop("target")
        is_meta = options.pop("is_meta")
        del options["as_json"]
        needs_strategy = None if is_examined(ctx) else not searches
        if is_examined(ctx):
            if path is not None:
                raise click.UsageError(f"TARGET {path} and --model {options['model']}: give one")
            path = options["model"]
            given.discard("model")
        if searches:  # the strategy is what is looked for: these options narrow it
            options |= ALONE
        target = load_target(path, options, given, is_meta=is_meta, needs_strategy=needs_strategy)
        return command(ctx, target, ranks, **own)

    wrapped: Callable[..., Any] = called
    for field in reversed([one for one in fields(Config) if one.name in ASKED]):
        wrapped = option_of(field)(wrapped)
    wrapped = click.option("--json", "as_json", is_flag=True, help="A last line as JSON.")(wrapped)
    wrapped = click.option(
        "--meta",
        "is_meta",
        is_flag=True,
        help="Build a Python file's model on torch's meta device, without memory.",
    )(wrapped)
    wrapped = click.option(
        "--ranks",
        type=click.IntRange(min=1),
        help="Ranks of the job.  [default: those that the strategy places something on]",
    )(wrapped)
    return click.argument("target", required=False, type=click.Path())(wrapped)


def is_examined(ctx: click.Context) -> bool:
    """Whether `check` is asked about a file's model, whatever its strategy."""
    return ctx.info_name == "check" and str(ctx.params["model"]).endswith(".py")


_SHARED = {*ASKED, "target", "ranks", "is_meta", "as_json"}


_names_optimizer = click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    help="Count this optimizer's state to what ranks hold.  [default: it is left out]",
)


def is_json(ctx: click.Context) -> bool:
    """Whether the last line is to be for machines."""
    return bool(ctx.params["as_json"])


@click.command(cls=Command)
@takes_target
@click.option("--graph", "with_graph", is_flag=True, help="Show the distributed graph, too.")
@click.option("--tasks", "with_tasks", is_flag=True, help="Show each rank's order of tasks, too.")
@click.option("--rank", type=click.IntRange(min=0), help="Show this rank's program, too.")
@click.option(
    "--hosts",
    type=click.IntRange(min=1),
    help="Show what so many hosts, which share the ranks in order, would send each other, too.",
)
@_names_optimizer
def plan(
    ctx: click.Context,
    target: "Target",
    ranks: int | None,
    with_graph: bool,
    with_tasks: bool,
    rank: int | None,
    hosts: int | None,
    optimizer: str | None,
) -> None:
    """Show what a step holds, runs and sends on every rank, without running it.

    TARGET is a Python file that defines model(), inputs() and strategy(), a strategy as JSON, for a
    model of piper train, or a run folder; without one the options describe a job of piper train.
    """
    from piper_dynamo.summary import legend

    found = _planned(target, ranks)
    summary = found.summary(optimizer=optimizer)
    click.echo(f"{summary}\n\n{legend(summary)}")
    if hosts is not None:
        click.echo(f"\n{found.topology(hosts)}")
    if with_graph:
        click.echo(f"\n{found.graph}")
    if with_tasks:
        from piper_dynamo.summary import tasks

        click.echo(f"\n{tasks(found.distinct)}")
    if rank is not None:
        click.echo(f"\n{found.program(rank)}")
    if is_json(ctx):
        show_json(ctx, is_fine=True, **_facts(found, optimizer))


def _facts(found: "Plan", optimizer: str | None) -> Mapping[str, Any]:
    """A plan's figures; sizes in bytes."""
    from piper_dynamo.summary import edges, facts, uses

    return {
        "world_size": found.world_size,
        "microbatches": found.dag.num_microbatches,
        "replicas": max(map(len, found.groups), default=1),
        "chunks": len({key for program in found.distinct for _, key in program.chunks}),
        "ranks": [asdict(facts(program, found.args)) for program in found.distinct],
        "memory": [
            {"rank": one.rank, "all": one.total, **one.held} for one in found.memory(optimizer)
        ],
        "messages": [asdict(edge) for edge in edges(found.distinct)],
        "communicators": [asdict(use) for use in uses(found.distinct, found.communicators())],
    }


@click.command(cls=Command)
@takes_target
def check(ctx: click.Context, target: "Target", ranks: int | None) -> None:
    """Prove a step safe: no deadlock, matched messages, every gradient reduced once.

    All faults are listed, with rank, task and the line of the model. TARGET is as for `piper plan`.

    `--model FILE.py` looks at the file's model instead, which needs no strategy: what of it works
    under one and what does not, with lines and remedies.
    """
    if is_examined(ctx):
        _examine(ctx, target)
        return
    from piper_dynamo.ir.program import COLLECTIVES, Op

    found = _planned(target, ranks)
    found.verify()
    instrs = [i for program in found.distinct for i in program.instrs]
    replicas = found.world_size // len(found.distinct)  # that one of them stands for
    counts = {
        "instructions": replicas * len(instrs),
        "tasks": replicas * sum(i.op is Op.RUN for i in instrs),
        "messages": replicas * sum(i.op is Op.SEND for i in instrs),
        "collectives": sum(
            i.op in COLLECTIVES and program.rank == i.group[0]
            for program in found.distinct
            for i in program.instrs
        ),
    }
    shown = ", ".join(f"{number} {name}" for name, number in counts.items())
    click.echo(f"{target.name} is safe on {found.world_size} ranks: {shown}")
    if is_json(ctx):
        show_json(ctx, is_fine=True, world_size=found.world_size, **counts)


def _examine(ctx: click.Context, target: "Target") -> None:
    from piper_dynamo.examination import doctor
    from piper_dynamo.strategy import Strategy

    strategy = None if target.strategy == Strategy() else target.strategy
    found = doctor(target.looked_at(), target.inputs(), strategy=strategy)
    click.echo(str(found))
    if is_json(ctx):
        show_json(
            ctx,
            is_fine=found.is_fine,
            graphs=found.graphs,
            operators=found.operators,
            findings=[asdict(one) for one in found.findings],
        )
    if not found.is_fine:
        ctx.exit(REFUSED)


@click.command(cls=Command)
@takes_target
@click.option(
    "--out",
    "-o",
    type=click.Path(),
    help="Where to: .html has zoom and hover, .png and .svg are for papers, .json is a trace for "
    "Perfetto.  [default: timeline.html, with --graph graph.dot]",
)
@click.option(
    "--costs",
    help="What a stage's passes and messages take, e.g. F=1,BI=1,BW=1,comm=0.1; bandwidth is in "
    "bytes per unit.  [default: 1 a pass, messages nothing]",
)
@click.option(
    "--costs-from",
    "profile",
    type=click.Path(),
    help="A profile of the machine that chunks and messages run on, by piper profile; in seconds.",
)
@click.option("--unit", help="The unit of the costs; s for seconds.")
@click.option("--run", type=click.Path(), help="A run folder, to draw its measured step below.")
@click.option(
    "--graph", "is_graph", is_flag=True, help="Draw the distributed graph instead: .dot or .svg."
)
@_names_optimizer
def plot(  # noqa: PLR0913  (an option each)
    ctx: click.Context,
    target: "Target",
    ranks: int | None,
    out: str | None,
    costs: str | None,
    profile: str | None,
    unit: str | None,
    run: str | None,
    is_graph: bool,
    optimizer: str | None,
) -> None:
    """Draw who computes what when, or the distributed graph.

    TARGET is as for `piper plan`; of a run folder, its measured step is drawn, too.
    """
    from piper_dynamo.look.target import Misuse
    from piper_dynamo.predict.profile import Profile

    if is_graph and (costs or profile or unit or run or optimizer):
        raise Misuse(
            "--costs, --costs-from, --unit, --run and --optimizer are about steps over time, "
            "not --graph"
        )
    if profile and (costs or unit not in (None, "s")):
        raise Misuse("--costs-from gives the costs, in seconds; leave out --costs and --unit")
    chosen = _costs(costs) if profile is None else Profile.load(profile)
    out = out or ("graph.dot" if is_graph else "timeline.html")
    found = _planned(target, ranks)
    if is_graph:
        found.draw(out)
    else:
        folder = run if run is not None else target.folder
        found.plot(out, chosen, unit=unit, run=folder, optimizer=optimizer)
    click.echo(f"wrote {out}")
    if is_json(ctx):
        step = {} if is_graph else {"makespan": found.simulate(chosen).makespan}
        show_json(ctx, is_fine=True, path=out, **step)


def _costs(text: str | None) -> "Costs | None":
    """Costs as they are written on the command line."""
    from piper_dynamo.costs import Costs
    from piper_dynamo.look.target import Misuse

    if text is None:
        return None
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError as error:
            raise Misuse(f"--costs {text}: {part!r} is not name=number") from error
    unknown = [name for name in values if name not in _COSTS]
    if unknown:
        raise Misuse(f"--costs {text}: there is no {unknown[0]!r}; known: {', '.join(_COSTS)}")
    try:
        return Costs(**values)
    except PiperError as error:
        raise Misuse(f"--costs {text}: {error}") from error


@click.command(cls=Command)
@takes_target
@click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1), help="Steps.")
@click.option("--float64", is_flag=True, help="Compute both in float64, where rounding is small.")
def compare(
    ctx: click.Context, target: "Target", ranks: int | None, steps: int, float64: bool
) -> None:
    """Train under the plan and in one process on the same batches, and compare every parameter.

    Ranks run as threads of this process, with clipping and SGD with momentum. A difference is
    relative to the largest value of the parameter or gradient. TARGET is as for `piper plan`.
    """
    from piper_dynamo.look.compare import compare as compared
    from piper_dynamo.look.target import Misuse
    from piper_dynamo.tables import table

    if ranks is not None:
        raise Misuse("--ranks: a comparison has the ranks that its strategy uses")
    with waiting_for("planning, and training under the plan and in one process"):
        found = compared(target, steps=steps, float64=float64)
    rows = [
        [
            one.name,
            "x".join(map(str, one.shape)) or "number",
            ", ".join(map(str, one.ranks)) or "-",
            f"{one.gradient:.1e}",
            f"{one.value:.1e}",
            "" if one.is_equal else f"DIFFERS, rounding explains {one.allowed:.0e}",
        ]
        for one in found.differences
    ]
    heads = ["parameter", "shape", "ranks", "gradient", f"after {steps} steps", ""]
    for line in table(heads, rows, left=("parameter", "ranks", "")):
        click.echo(line)
    verdict = "equal to one process" if found.is_equal else "DIFFERS from one process"
    click.echo(f"{verdict}: loss {found.loss:.1e}, gradient norm {found.norm:.1e}")
    if is_json(ctx):
        show_json(
            ctx,
            is_fine=found.is_equal,
            loss=_finite(found.loss),
            gradient_norm=_finite(found.norm),
            parameters={
                one.name: {"gradient": _finite(one.gradient), "value": _finite(one.value)}
                for one in found.differences
            },
        )
    if not found.is_equal:
        ctx.exit(REFUSED)


def _subject(ctx: click.Context, _: click.Parameter, given: str | None) -> str:
    """The subject; where there is one argument alone, click takes it for the target."""
    if given is None:
        only = ctx.params.get("target")
        is_target = only is not None and Path(only).exists()
        target = only if is_target else "example.py"
        task = "F.PP0.MB0" if is_target or only is None else only
        raise click.UsageError(
            "explain needs a target and a subject, which is a task (F.PP0.MB0), a parameter or a "
            f"rank, as in: piper explain {target} {task}; of a job of piper train that the "
            f"options describe: piper explain - {task}"
        )
    return given


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if abs(value) < float("inf") else None


@click.command(cls=Command)
@takes_target
@click.argument("subject", required=False, metavar="SUBJECT", callback=_subject)
def explain(ctx: click.Context, target: "Target", ranks: int | None, subject: str) -> None:
    """Explain a task (F.PP0.MB0), a parameter, or a rank (its number) of a plan.

    TARGET is as for `piper plan`, and "-" for the options alone.
    """
    from piper_dynamo.look.explain import explain as explained

    text = explained(_planned(target, ranks), subject)
    click.echo(text)
    if is_json(ctx):
        show_json(ctx, is_fine=True, subject=subject, text=text.splitlines())


COMMANDS = (plan, check, plot, compare, explain, convert, debug, bench)
