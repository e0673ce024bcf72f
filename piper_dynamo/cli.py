"""The command `piper`.

click, because it gives subcommands, typed options, help texts and exit codes, and runs in a test
without a process.
"""

import functools
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
from piper_dynamo.runtime.launch import launch
from piper_dynamo.train.config import Config, schedule_name
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


@main.command(cls=_Command)
@_config_options
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result as the last line: loss_first, loss_last and validation_loss (nats per "
    "byte), tokens_per_s, peak_mb (the most memory any rank's process held, imports included) and, "
    "with --compare, max_rel_diff.",
)
def train(as_json: bool, **options: Any) -> None:
    """Train a Llama-style model, or one with experts, on the text of Python's standard library.

    Starts its ranks on this machine; under torchrun it is one of the ranks.
    """
    options["schedule"] = schedule_name(options["schedule"])
    config = Config(**options)
    is_started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    is_first = not is_started or os.environ["RANK"] == "0"
    # After the options were checked: importing torch's compiler takes seconds.
    from piper_dynamo.train.job import run_rank
    from piper_dynamo.train.report import claim_folder

    if config.resume is not None:
        checkpoint = find_checkpoint(config.resume, config.out)
        config = replace(config, resume=str(checkpoint), out=config.out or str(checkpoint.parent))
    if is_first:
        config = replace(config, out=str(claim_folder(config.out, config.resume)))
    job = functools.partial(run_rank, config)
    engine = "torchrun" if is_started else "local"
    results = launch(job, config.world, engine=engine, timeout_s=config.timeout_s)
    if as_json and is_first:
        click.echo(json.dumps(results[0], allow_nan=False))
