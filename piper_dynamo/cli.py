"""The command `piper`; click gives typed options, help texts and exit codes."""

import functools
import json
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from piper_dynamo.errors import PiperError
from piper_dynamo.runtime.launch import launch
from piper_dynamo.train.config import STAGES_PER_RANK, Config

_HELP = {
    "out": "Run folder.",
    "steps": "Optimizer steps.",
    "ranks": "Processes; follows from --pp.",
    "pp": "Pipeline ranks.",
    "microbatches": "Microbatches per step.",
    "schedule": f"One of {', '.join(STAGES_PER_RANK)}.",
    "compile": "How chunks run: aten or inductor.",
    "dim": "Model dim.",
    "layers": "Decoder layers.",
    "heads": "Attention heads.",
    "kv_heads": "Key-value heads.",
    "seq": "Tokens (bytes) per row.",
    "batch": "Rows per step, all microbatches together.",
    "tied_head": "Share the weights of embedding and head.",
    "dtype": "float32 or float64.",
    "lr": "Peak learning rate.",
    "warmup": "Steps of linear warm-up.",
    "weight_decay": "AdamW's weight decay.",
    "clip": "Gradient norm to clip at.",
    "seed": "Of initial values and batches.",
    "eval_every": "Steps between evaluations; 0: never.",
    "eval_batches": "Batches per evaluation.",
    "compare": "Check the first three steps against one process.",
    "timeout_s": "Seconds a rank may wait for another.",
}


class _Command(click.Command):
    """Shows a refusal as the user's mistake that it is: its text, exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PiperError as error:
            click.echo(f"piper: {error}", err=True)
            ctx.exit(2 if type(error).__name__ == "PiperStrategyError" else 1)


@click.group()
@click.version_option(package_name="piper-dynamo")
def main() -> None:
    """Run ordinary PyTorch models as distributed programs."""


def _config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option per field of the job's config, with its default."""
    for field in reversed(fields(Config)):
        name = "--" + field.name.replace("_", "-")
        default: Any = field.default
        if isinstance(default, bool):
            option = click.option(
                f"{name}/--no-{name[2:]}", default=default, help=_HELP[field.name]
            )
        else:
            kind = int if default is None else type(default)
            option = click.option(
                name, type=kind, default=default, show_default=True, help=_HELP[field.name]
            )
        command = option(command)
    return command


@main.command(cls=_Command)
@_config_options
@click.option("--json", "as_json", is_flag=True, help="Print a machine-readable last line.")
def train(as_json: bool, **options: Any) -> None:
    """Train a Llama-style model on the text of Python's standard library."""
    from piper_dynamo.train.job import run_rank

    config = Config(**options)
    job = functools.partial(run_rank, config)
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    engine = "torchrun" if started else "local"
    results = launch(job, config.pp, engine=engine, timeout_s=config.timeout_s)
    first = not started or os.environ["RANK"] == "0"
    if as_json and first:
        click.echo(json.dumps(results[0]))
