"""The command `piper`.

click, because it gives subcommands, typed options, help texts and exit codes, and runs in a test
without a process.
"""

import functools
import json
import os
import types
from collections.abc import Callable
from dataclasses import Field, fields, replace
from typing import Any, get_args

import click

from piper_dynamo.errors import PiperError, PiperStrategyError
from piper_dynamo.runtime.launch import launch
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.train.config import CHUNKS, DTYPES, Config, schedule_name
from piper_dynamo.train.resume import LATEST, find_checkpoint

_HELP = {
    "out": "Run folder; an earlier run's files in it are replaced.  [default: runs/<time>]",
    "steps": "Optimizer steps.",
    "ranks": "Processes; follows from --pp, --dp and --ep.",
    "pp": "Pipeline ranks.",
    "model": "llama, or moe: DeepSeek-style experts in place of every MLP.",
    "dp": "Replicas of the pipeline, each on its share of the batch.",
    "ep": "Replicas that share the experts of one copy, of --model moe.",
    "experts": "Experts per layer of --model moe, beside a shared one.",
    "top_k": "Experts that a token goes to.",
    "capacity": "Most tokens an expert takes of a rank's microbatch, 1 being its even share; it "
    "drops the others.  [default: takes all]",
    "zero": "What replicas shard: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.",
    "bucket_mb": "MiB of parameters that are gathered and reduced as one.  [default: a stage's]",
    "prefetch": "How many uses ahead a shard is gathered.",
    "keep": "How long --zero 3 keeps what it gathered: chunk, step, or a number of buckets.",
    "microbatches": "Microbatches per step and replica.",
    "schedule": f"One of {', '.join(SCHEDULES)}; 1f1b is one_f_one_b.",
    "compile": f"How chunks run: {' or '.join(CHUNKS)}.",
    "dim": "Model dim.",
    "layers": "Decoder layers.",
    "heads": "Attention heads.",
    "kv_heads": "Key-value heads.",
    "seq": "Tokens (bytes) per row.",
    "batch": "Rows per step, all microbatches and replicas together.",
    "tied_head": "Share the weights of embedding and head.",
    "dtype": f"{' or '.join(DTYPES)}.",
    "lr": "Peak learning rate.",
    "warmup": "Steps of linear warm-up.",
    "weight_decay": "AdamW's weight decay.",
    "clip": "Gradient norm to clip at.",
    "seed": "Of initial values and batches.",
    "eval_every": "Steps between evaluations, and one at the end; 0: never.",
    "eval_batches": "Batches per evaluation.",
    "save_every": "Steps between checkpoints, and one at the end; 0: none.",
    "keep_last": "How many checkpoints stay, in step-* folders of the run folder.",
    "resume": "Go on from a run folder's last checkpoint, or from a step-* folder, under whatever "
    "--pp, --dp, --ep and --zero; without FOLDER, from that of --out or of the newest run.",
    "compare": "Check the first three steps against one process.",
    "timeout_s": "Seconds a rank may wait for another.",
}
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


def _option(field: "Field[Any]") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option of a config's field, with its type and default."""
    flag, text = "--" + field.name.replace("_", "-"), _HELP[field.name]
    if isinstance(field.default, bool):
        both = f"{flag}/--no-{flag[2:]}"
        return click.option(both, default=field.default, show_default=True, help=text)
    if field.name == "resume":
        return click.option(flag, is_flag=False, flag_value=LATEST, metavar="[FOLDER]", help=text)
    (kind,) = {*(get_args(field.type) or (field.type,))} - {types.NoneType}
    has_default = field.default is not None
    return click.option(flag, type=kind, default=field.default, show_default=has_default, help=text)


def _config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option per field of the job's config."""
    for field in reversed(fields(Config)):
        command = _option(field)(command)
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
