"""The arguments of torchtitan; see `reading.py`.

Source: its `Parallelism` configuration.

Signature: the `[parallelism]` table -> their meaning here.
"""

from typing import Any

from piper_dynamo.foreign.reading import (
    NO_CONTEXT,
    NO_TENSOR,
    OWN_LAYERS,
    Arguments,
    Meaning,
    Reader,
    is_list,
)
from piper_dynamo.values import Faults, is_whole

_TITAN_SCHEDULES = {
    "1F1B": "one_f_one_b",
    "GPipe": "gpipe",
    "LoopedBFS": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


def torchtitan(
    given: Arguments, faults: Faults, *, world_size: int, local_batch_size: int | None
) -> Meaning:
    """The `[parallelism]` table of a torchtitan configuration."""
    read = Reader(given, faults)
    read.refuse(NO_TENSOR, tensor_parallel_degree=1, enable_async_tensor_parallel=False)
    read.refuse(NO_TENSOR, expert_tensor_parallel_degree=1)
    read.refuse(NO_CONTEXT, context_parallel_degree=1)
    read.refuse("Piper captures and compiles backwards by itself", enable_compiled_autograd=False)
    read.refuse(
        "read the table by piper.schedules.from_csv, and give its orders to "
        "piper.strategies.from_orders",
        pipeline_parallel_schedule_csv="",
    )
    read.refuse(
        OWN_LAYERS,
        pipeline_parallel_split_points=None,
        pipeline_parallel_layers_per_stage=None,
        pipeline_parallel_first_stage_less_layers=1,
        pipeline_parallel_last_stage_less_layers=1,
    )
    # They mean something only with what is refused above.
    read.without_effect("disable_loss_parallel", "context_parallel_rotate_method")
    read.without_effect("expert_parallel_comm_backend")
    ranks = read.size("pipeline_parallel_degree")
    copies = read.size("data_parallel_replicate_degree")
    shards = read.take("data_parallel_shard_degree", -1)
    if shards == -1 and world_size % (ranks * copies):
        faults.say(
            f"pipeline_parallel_degree={ranks} x data_parallel_replicate_degree={copies} does not "
            f"divide world_size={world_size}: no number of shards fits"
        )
        shards = 1
    elif shards == -1:
        shards = world_size // (ranks * copies)
    elif not is_whole(shards) or shards < 1 or ranks * copies * shards != world_size:
        faults.say(
            f"pipeline_parallel_degree={ranks} x data_parallel_replicate_degree={copies} x "
            f"data_parallel_shard_degree={shards!r} is not world_size={world_size}"
        )
        shards = 1
    experts = read.size("expert_parallel_degree")
    if shards % experts:
        faults.add("expert_parallel_degree", experts, f"must divide the {shards} ranks of shards")
        experts = 1
    reshards = read.choice(
        "fsdp_reshard_after_forward",
        "default",
        {"default": ranks == 1, "always": True, "never": False},
        "has no counterpart",
    )
    size = read.size("pipeline_parallel_microbatch_size")
    if ranks > 1 and local_batch_size is None:
        faults.say("local_batch_size, of [training], is needed: it makes the microbatches")
    elif ranks > 1 and (local_batch_size or 1) % size:
        faults.add("pipeline_parallel_microbatch_size", size, f"must divide {local_batch_size=}")
    schedule = read.choice(
        "pipeline_parallel_schedule", "1F1B", _TITAN_SCHEDULES, "has no counterpart"
    )
    regions = _titan_parts(read, faults)
    read.finish()
    found: dict[str, Any] = {
        "schedule": schedule if ranks > 1 else "gpipe",
        "ranks": ranks,
        "num_microbatches": max((local_batch_size or 1) // size, 1) if ranks > 1 else 1,
        "replicas": copies * shards,
        # FSDP2 that keeps what it gathered reduces once per step, as ZeRO-1 does.
        "zero": 0 if shards == 1 else 3 if reshards else 1,
        "expert_ranks": experts,
    }
    if copies > 1 and shards > 1:
        found["shard_ranks"] = shards
    if regions:
        found["stages"] = 1 + max(tags["PP"] for tags in regions.values())
        found["regions"] = regions
    return Meaning(pipeline=found)


def _titan_parts(read: Reader, faults: Faults) -> dict[str, dict[str, int]]:
    """The regions of `module_fqns_per_model_part`; none without it."""
    name, must = "module_fqns_per_model_part", "must be a list of the modules' names for each stage"
    parts = read.take(name, None)
    if parts is None:
        return {}
    if not is_list(parts) or not parts or not all(is_list(part) and part for part in parts):
        faults.add(name, parts, must)
        return {}
    regions: dict[str, dict[str, int]] = {}
    for stage, modules in enumerate(parts):
        for module in modules:
            if not isinstance(module, str):
                faults.add(name, module, must)
            elif module in regions:
                faults.add(name, module, f"is in the parts {regions[module]['PP']} and {stage}")
            else:
                regions[module] = {"PP": stage}
    return regions
