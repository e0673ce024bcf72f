"""`piper profile` and `piper search`: measuring a machine, and looking for the best strategy.

Exit codes as of the commands that look at plans: 0 fine, 1 refused or nothing found, 2 asked
wrongly.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from piper_dynamo.look.command import REFUSED, Command, show_json
from piper_dynamo.look.commands import is_json, takes_target
from piper_dynamo.schedules import schedule_name
from piper_dynamo.train.config import budget_of

if TYPE_CHECKING:  # importing torch's compiler takes seconds
    from piper_dynamo.look.target import Target
    from piper_dynamo.predict.search import CostsOf

# Options of a training job that narrow a search; others say how, which the search decides.
NARROWING = ("pp", "dp", "schedule", "microbatches", "zero", "recompute")
_DECIDED = ("ep", "bucket_mb", "prefetch", "keep", "capacity", "precision")
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@click.command(cls=Command)
@takes_target
@click.option(
    "--out", "-o", default="profile.json", show_default=True, type=click.Path(), help="Where to."
)
def profile(ctx: click.Context, target: "Target", ranks: int | None, out: str) -> None:
    """Measure this machine: the chunks of a plan, messages between processes, and the host.

    `piper plot --costs-from` and `piper search --profile` take what it writes. The machine should
    be idle. TARGET is as for `piper plan`; --ranks says how many processes will share the machine.
    """
    from pathlib import Path

    from piper_dynamo.look.target import Misuse
    from piper_dynamo.predict.measuring import profile as measured

    if not Path(out).absolute().parent.is_dir():  # said before it is measured
        raise Misuse(f"{out} cannot be written: there is no such folder")
    model = target.model()
    found = measured(model, target.strategy, target.inputs(), ranks=ranks, compile=target.compile)
    found.save(out)
    click.echo(f"{found}\nwrote {out}")
    if is_json(ctx):
        show_json(ctx, is_fine=True, path=out, **asdict(found))


@click.command(cls=Command)
@functools.partial(takes_target, searches=True)
@click.option("--devices", type=click.IntRange(min=1), required=True, help="Ranks to use, all.")
@click.option("--memory", help="What a rank may hold, as 4GiB or a number of bytes.")
@click.option("--profile", "path", type=click.Path(), help="What piper profile wrote.")
@click.option("--flops", type=float, help="Instead: operations per second of a device,")
@click.option("--memory-bandwidth", type=float, help="bytes per second of its memory,")
@click.option("--bandwidth", type=float, help="and of a link,")
@click.option("--alpha", type=float, help="and seconds that a message takes beside.")
@click.option("--top", default=10, show_default=True, type=click.IntRange(min=1), help="How many.")
@click.option("--exhaustive", is_flag=True, help="Plan every strategy, not only promising ones.")
@click.option("--out", "-o", type=click.Path(), help="Draw the best: .png or .svg.")
@click.option("--strategy-to", type=click.Path(), help="Write the best as JSON.")
def search(  # noqa: PLR0913  (an option each)
    ctx: click.Context,
    target: "Target",
    ranks: int | None,
    devices: int,
    memory: str | None,
    path: str | None,
    flops: float | None,
    memory_bandwidth: float | None,
    bandwidth: float | None,
    alpha: float | None,
    top: int,
    exhaustive: bool,
    out: str | None,
    strategy_to: str | None,
) -> None:
    """Look for the strategies with the fastest predicted step among those that fit.

    TARGET is a Python file that defines model() and inputs(), here of all replicas together, or
    nothing: then the options describe a model of piper train, and those of --pp, --dp, --schedule,
    --microbatches, --zero and --recompute that are given narrow the search.

    Without --profile or --flops, what things take is that of usual hardware, which is told: enough
    to tell strategies apart, and no prediction of this machine.
    """
    from pathlib import Path

    from piper_dynamo.look.target import Misuse
    from piper_dynamo.predict.search import search as searched

    if ranks is not None:
        raise Misuse("--ranks: a search uses --devices")
    rates = {
        "flops": flops,
        "memory_bandwidth": memory_bandwidth,
        "bandwidth": bandwidth,
        "alpha": alpha,
    }
    found = searched(
        target.model(),
        target.inputs(),
        devices,
        costs=_costs_of(path, rates),
        memory=None if memory is None else bytes_of(memory),
        top=top,
        exhaustive=exhaustive or None,
        compile=target.compile,
        **_narrowed(ctx, devices),
    )
    click.echo(str(found))
    if out is not None:
        found.plot(out)
        click.echo(f"wrote {out}")
    if strategy_to is not None and found.best:
        try:
            Path(strategy_to).write_text(found.best[0].strategy.to_json(), encoding="utf-8")
        except OSError as error:
            raise Misuse(f"{strategy_to} cannot be written: {error}") from error
        click.echo(f"wrote {strategy_to}")
    if is_json(ctx):
        show_json(ctx, is_fine=bool(found.best), **found.to_dict())
    if not found.best:
        ctx.exit(REFUSED)


def _narrowed(ctx: click.Context, devices: int) -> dict[str, Any]:
    """What the options that were given leave to choose from."""
    from piper_dynamo.look.target import Misuse

    asked = {
        name: ctx.params[name]
        for name in (*NARROWING, *_DECIDED)
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    decided = [f"--{name.replace('_', '-')}" for name in _DECIDED if name in asked]
    if decided:
        raise Misuse(f"{', '.join(decided)}: a search does not take this")
    if "schedule" in asked:
        asked["schedule"] = schedule_name(asked["schedule"])
    dp = asked.pop("dp", None)
    if dp is not None and devices % dp:
        raise Misuse(f"--dp {dp} does not divide --devices {devices}")
    if dp is not None and asked.get("pp", devices // dp) != devices // dp:
        raise Misuse(f"--pp and --dp do not come to --devices {devices}")
    if dp is not None:
        asked["pp"] = devices // dp
    if "recompute" in asked:
        asked["recompute"] = budget_of(asked["recompute"])
    names = {"schedule": "schedules"}
    return {names.get(name, name): (value,) for name, value in asked.items()}


def _costs_of(path: str | None, rates: Mapping[str, float | None]) -> "CostsOf | None":
    """A profile, or a roofline of the rates that are given, if any are."""
    from piper_dynamo.costs import Costs
    from piper_dynamo.look.target import Misuse
    from piper_dynamo.predict.profile import Profile

    given: dict[str, Any] = {name: value for name, value in rates.items() if value is not None}
    if path is not None and given:
        raise Misuse(
            "say once what things take: --profile, or --flops and --memory-bandwidth; without "
            "either it is what usual hardware does"
        )
    if path is not None:
        return Profile.load(path)
    if not given:
        return None
    if "flops" not in given or "memory_bandwidth" not in given:
        raise Misuse("a roofline needs both --flops and --memory-bandwidth")
    return lambda chunks: Costs.roofline(chunks, **given)


def bytes_of(text: str) -> float:
    """A number of bytes, with or without a unit, as `4GiB`."""
    from piper_dynamo.look.target import Misuse

    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]iB|B|)", text)
    if found is None:
        raise Misuse(f"--memory {text}: write it as 4GiB, 512MiB or a number of bytes")
    return float(found[1]) * _UNITS[found[2]]


PREDICTING = (profile, search)
