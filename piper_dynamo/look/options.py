"""Command-line options that stand for the fields of the training job's config."""

import types
from collections.abc import Callable
from dataclasses import Field
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from piper_dynamo.loss_scaling import NAN_CHECKS
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.train.config import CHUNKS, DTYPES, MODELS, PRECISIONS
from piper_dynamo.train.resume import LATEST

HELP = {
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
    "order": "How ranks are numbered: axes from the one that changes last to the one that changes "
    "first, such as dp,pp,ep; the last ones stay within a host.  [default: pp,dp,ep]",
    "zero": "What replicas shard: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.",
    "bucket_mb": "MiB of parameters that are gathered and reduced as one.  [default: a stage's]",
    "prefetch": "How many uses ahead a shard is gathered.",
    "keep": "How long --zero 3 keeps what it gathered: chunk, step, or a number of buckets.",
    "recompute": "How much of its forward a stage keeps for the backward, 0 to 1, and computes the "
    "rest again; full is 0.  [default: what pays]",
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
    "precision": f"What chunks compute in, with masters of --dtype: {' or '.join(PRECISIONS)}; "
    "fp16 has a dynamic loss scale.  [default: --dtype]",
    "nan_check": f"If a value is not finite: {' or '.join(NAN_CHECKS)}.  [default: does not look]",
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
# What a shell completes an option's value to; others would be refused by the config, with more to
# say than click has.
VALUES = {
    "model": MODELS,
    "schedule": tuple(SCHEDULES),
    "compile": CHUNKS,
    "dtype": DTYPES,
    "precision": PRECISIONS,
    "nan_check": NAN_CHECKS,
    "zero": ("0", "1", "2", "3"),
    "keep": ("chunk", "step"),
    "recompute": ("full",),
}


def option_of(field: "Field[Any]") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option of a config's field, with its type and default."""
    flag, text = "--" + field.name.replace("_", "-"), HELP[field.name]
    if isinstance(field.default, bool):
        both = f"{flag}/--no-{flag[2:]}"
        return click.option(both, default=field.default, show_default=True, help=text)
    if field.name == "resume":
        return click.option(flag, is_flag=False, flag_value=LATEST, metavar="[FOLDER]", help=text)
    (kind,) = {*(get_args(field.type) or (field.type,))} - {types.NoneType}
    values = VALUES.get(field.name, ())

    def completed(
        context: click.Context, parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        return [CompletionItem(value) for value in values if value.startswith(begun)]

    return click.option(
        flag,
        type=kind,
        default=field.default,
        show_default=field.default is not None,
        help=text,
        shell_complete=completed if values else None,
    )
