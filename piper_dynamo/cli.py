"""The command `piper`.

click, because it gives subcommands, typed options, help texts and exit codes, and runs in a test
without a process.
"""

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import click

from piper_dynamo.errors import PiperError, PiperStrategyError
from piper_dynamo.look.commands import COMMANDS
from piper_dynamo.look.options import option_of
from piper_dynamo.look.prediction import PREDICTING
from piper_dynamo.schedules import schedule_name
from piper_dynamo.train.config import Config
from piper_dynamo.train.launching import ENGINES, HOSTS, Launching
from piper_dynamo.train.resume import find_checkpoint

REFUSED, FAILED = 2, 1


class _Command(click.Command):
    """Shows a PiperError as its text alone: exit code 2 for what was asked wrongly, else 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PiperError as error:
            click.echo(f"piper: {error}", err=True)
            ctx.exit(REFUSED if isinstance(error, PiperStrategyError) else FAILED)


@click.group()
@click.version_option(package_name="piper-dynamo")
def main() -> None:
    """Run ordinary PyTorch models as distributed programs."""


for _command in (*COMMANDS, *PREDICTING):
    main.add_command(_command)


def _config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option per field of the job's config."""
    for field in reversed(fields(Config)):
        command = option_of(field)(command)
    return command


def _launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How ranks are started."""
    for option in (
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default="local",
            show_default=True,
            help="What starts the ranks: processes here, torchrun's agent, or a Ray cluster.",
        ),
        click.option(
            "--max-restarts",
            type=int,
            default=0,
            show_default=True,
            help="How often the job is started again after a rank has failed: from its last "
            "checkpoint.",
        ),
        click.option(
            "--fallback",
            multiple=True,
            metavar="OPTIONS",
            help="What the next restart changes, such as dp=1,zero=0 to need fewer ranks. Given "
            "several times, each restart takes the next, and the last one stays; hosts that "
            "--nnodes 1:2 leaves decide by how many they are.",
        ),
        click.option("--address", help="Of a Ray cluster.  [default: one on this machine]"),
        click.option("--nnodes", help="torchrun's: how many hosts, or least:most.  [default: 1]"),
        click.option(
            "--nproc-per-node",
            type=click.IntRange(min=1),
            help="torchrun's: ranks of each host.  [default: they share all ranks]",
        ),
        click.option(
            "--node-rank",
            type=click.IntRange(min=0),
            help="torchrun's: which host this is.  [default: as they meet]",
        ),
        click.option("--rdzv-endpoint", help="torchrun's: where hosts meet, host:port of one."),
        click.option("--rdzv-id", help="torchrun's: what the hosts of one job have in common."),
        click.option("--rdzv-conf", help="torchrun's: key=value,... about the meeting."),
    )[::-1]:
        command = option(command)
    return command


@main.command(cls=_Command)
@_config_options
@_launch_options
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result as the last line: loss_first, loss_last and validation_loss (nats per "
    "byte), tokens_per_s, peak_mb (the most memory any rank's process held, imports included) and, "
    "with --compare, max_rel_diff and is_equal.",
)
@click.pass_context
def train(
    ctx: click.Context,
    /,
    as_json: bool,
    engine: str,
    max_restarts: int,
    fallback: tuple[str, ...],
    address: str | None,
    **options: Any,
) -> None:
    """Train a Llama-style model, or one with experts, on the text of Python's standard library.

    Starts its ranks on this machine, as --engine says; under torchrun it is one of the ranks. The
    exit code is 1 where the job failed, or --compare found a difference that rounding does not
    explain, and 2 where it was refused.
    """
    launching = Launching(
        engine=engine,
        max_restarts=max_restarts,
        fallback=fallback,
        address=address,
        hosts={name: options.pop(name) for name in HOSTS},
    )
    options["schedule"] = schedule_name(options["schedule"])
    config, *others = launching.configs(Config(**options))
    if os.environ.get("RANK", "0") == "0":
        shown = f"{config.world} rank{'s' * (config.world > 1)} of {config.schedule}"
        click.echo(f"starting {shown}: torch is imported first, which takes seconds", err=True)
    # After the options were checked.
    from piper_dynamo.train.report import claim_folder

    out, resume = config.out, config.resume
    if resume is not None:
        checkpoint = find_checkpoint(resume, out)
        out, resume = out or str(checkpoint.parent), str(checkpoint)
    if launching.claims_folder():
        out = str(claim_folder(out, resume).resolve())
    config, *others = (replace(one, out=out, resume=resume) for one in (config, *others))
    results = launching.run(config, others)
    found = results[0] or {}  # rank 0's
    if as_json and found:
        click.echo(json.dumps(found, allow_nan=False))
    if not found.get("is_equal", True):
        ctx.exit(FAILED)
