"""`piper debug`: what `piper.debug.dump` wrote."""

from dataclasses import asdict
from math import isfinite
from typing import Any

import click

from piper_dynamo.look.command import REFUSED, Command, show_json


@click.group()
def debug() -> None:
    """Look at what tasks of a step were given and gave, as piper.debug.dump wrote it."""


@debug.command(cls=Command)
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@click.option(
    "--tolerance",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Share of a value's largest element up to which differences do not count.",
)
@click.option("--json", "as_json", is_flag=True, help="A last line as JSON.")
@click.pass_context
def diff(ctx: click.Context, first: str, second: str, tolerance: float, as_json: bool) -> None:
    """Name the first task, in order of execution, at which two runs part.

    FIRST and SECOND are folders that piper.debug.dump wrote to. The exit code is 1 where they part.
    """
    from piper_dynamo.debug import diff as compared

    found = compared(first, second, tolerance=tolerance)
    click.echo(str(found))
    if as_json:
        show_json(
            ctx,
            is_fine=found.is_equal,
            common=found.common,
            alone=found.alone,
            partings=[_plain(asdict(one)) for one in found.partings],
        )
    if not found.is_equal:
        ctx.exit(REFUSED)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    for value in row["values"]:
        value["largest"] = value["largest"] if isfinite(value["largest"]) else None
    return row
