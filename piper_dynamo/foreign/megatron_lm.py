"""The arguments of Megatron-LM; see `reading.py`.

Source: its `arguments.py`.

Signature: arguments by the names in `args` -> their meaning here.
"""

from math import inf
from typing import Any

from piper_dynamo.directives import DType, Precision
from piper_dynamo.foreign.reading import (
    NO_CONTEXT,
    NO_TENSOR,
    OWN_LAYERS,
    Arguments,
    Meaning,
    Reader,
    bucket_size,
)
from piper_dynamo.values import Faults, is_number, is_whole

_MEGATRON_LEVELS = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def megatron(given: Arguments, faults: Faults, *, world_size: int) -> Meaning:
    """Arguments of Megatron-LM's `pretrain_gpt.py` and its like, by the names in `args`."""
    read = Reader(given, faults)
    read.refuse(NO_TENSOR, tensor_model_parallel_size=1, sequence_parallel=False)
    tensor_experts = read.take("expert_tensor_parallel_size", None)
    if tensor_experts not in (None, 1):
        faults.add("expert_tensor_parallel_size", tensor_experts, NO_TENSOR)
    read.refuse(NO_CONTEXT, context_parallel_size=1)
    read.refuse("ranks are numbered with pipeline ranks outermost", use_tp_pp_dp_mapping=False)
    read.refuse(
        OWN_LAYERS,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        num_layers_per_virtual_pipeline_stage=None,
    )
    read.without_effect("overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_communication")
    read.without_effect("align_grad_reduce", "align_param_gather", "delay_grad_reduce")
    ranks = read.size("pipeline_model_parallel_size")
    replicas, rest = divmod(world_size, ranks)
    if rest or not replicas:
        faults.add("pipeline_model_parallel_size", ranks, f"must divide {world_size=}")
        replicas = 1
    micro, batch = read.size("micro_batch_size"), read.take("global_batch_size", None)
    batch = micro * replicas if batch is None else batch
    if not is_whole(batch) or batch < 1:
        faults.add("global_batch_size", batch, "must be a whole number of at least 1")
        batch = micro * replicas
    elif not faults and batch % (micro * replicas):
        faults.add(
            "global_batch_size",
            batch,
            f"must be a multiple of micro_batch_size={micro} x {replicas} replicas",
        )
        batch = micro * replicas
    virtual = _megatron_virtual(read, faults)
    found: dict[str, Any] = {
        "schedule": "one_f_one_b" if virtual is None else "interleaved_1f1b",
        "ranks": ranks,
        "stages": None if virtual is None else ranks * virtual,
        "num_microbatches": batch // (micro * replicas),
        "replicas": replicas,
        "zero": _megatron_level(read, faults),
        "expert_ranks": _megatron_experts(read, faults, replicas),
        "capacity": _megatron_capacity(read, faults),
        "recompute": _megatron_recompute(read, faults),
    }
    instances = read.size("num_distributed_optimizer_instances")
    if replicas % instances:
        faults.add(
            "num_distributed_optimizer_instances", instances, f"must divide {replicas} replicas"
        )
    elif instances > 1:
        found["shard_ranks"] = replicas // instances
    precision = _megatron_precision(read, faults)
    bucket = read.take("ddp_bucket_size", None)
    if bucket is not None:  # in elements, of gradients as they are reduced
        found["bucket_mb"] = bucket_size(bucket, "ddp_bucket_size", precision, faults)
    if replicas == 1:
        found |= {"zero": 0, "bucket_mb": None}
    read.finish()
    return Meaning(pipeline=found, precision=precision)


def _megatron_virtual(read: Reader, faults: Faults) -> int | None:
    """Stages of a rank, of which there are two names; None: one."""
    found = None
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        value = read.take(name, None)
        if value is None:
            continue
        if not is_whole(value) or value < 2:
            faults.add(name, value, "must be at least 2, or None")
        elif found not in (None, value):
            faults.add(name, value, f"is not virtual_pipeline_model_parallel_size={found}")
        else:
            found = value
    return found


def _megatron_level(read: Reader, faults: Faults) -> int:
    level: int = read.choice(
        "data_parallel_sharding_strategy", "no_shard", _MEGATRON_LEVELS, "has no counterpart"
    )
    has_fsdp, has_fsdp2 = read.switch("use_megatron_fsdp"), read.switch("use_torch_fsdp2")
    shards_state = read.switch("use_distributed_optimizer")
    if has_fsdp2 and (has_fsdp or shards_state):
        other = "use_megatron_fsdp" if has_fsdp else "use_distributed_optimizer"
        faults.say(f"use_torch_fsdp2 and {other} are both asked for; Megatron takes one of them")
    if level and not has_fsdp:
        faults.say("data_parallel_sharding_strategy means nothing without use_megatron_fsdp")
    if has_fsdp2:
        return 3
    return max(level, 1) if shards_state else level


def _megatron_experts(read: Reader, faults: Faults, replicas: int) -> int:
    experts = read.size("expert_model_parallel_size")
    if replicas % experts:
        faults.add("expert_model_parallel_size", experts, f"must divide {replicas} replicas")
        return 1
    return experts


def _megatron_capacity(read: Reader, faults: Faults) -> float | None:
    factor = read.take("moe_expert_capacity_factor", None)
    policies = {name: name for name in ("probs", "position")}
    policy = read.choice("moe_token_drop_policy", "probs", policies, "is no policy known here")
    read.without_effect("moe_pad_expert_input_to_capacity")  # slots are always padded
    if factor is None:
        return None
    if not is_number(factor) or not 0 < factor < inf:
        faults.add("moe_expert_capacity_factor", factor, "must be a number above 0")
        return None
    if policy != "position":
        faults.add(
            "moe_token_drop_policy", policy, 'must be "position": an expert takes the first rows'
        )
    return float(factor)


def _megatron_recompute(read: Reader, faults: Faults) -> float | None:
    which = read.take("recompute_granularity", None)
    method, layers = read.take("recompute_method", None), read.take("recompute_num_layers", None)
    part = "keep part of a region by a budget, recompute=0.5"
    read.refuse(part, recompute_modules=None, recompute_activations=False)
    if which is None:
        for name, value in {"recompute_method": method, "recompute_num_layers": layers}.items():
            if value is not None:
                faults.add(name, value, "means nothing without recompute_granularity='full'")
        return None
    if which != "full" or method not in (None, "uniform") or layers not in (None, 1):
        faults.say(
            f"recompute_granularity={which!r}, recompute_method={method!r}, "
            f"recompute_num_layers={layers!r}: there is a counterpart of 'full', 'uniform', 1 "
            "(each layer keeps its input); keep part by a budget, piper.Recompute(budget=0.5)"
        )
    return 0.0


def _megatron_precision(read: Reader, faults: Faults) -> Precision | None:
    is_bf16, is_fp16 = read.switch("bf16"), read.switch("fp16")
    asks_wide = read.switch("accumulate_allreduce_grads_in_fp32")
    reduces_narrow = read.switch("grad_reduce_in_bf16")
    read.refuse(
        "a loss scale is an option of the step: piper.compile(..., loss_scale=...)",
        loss_scale=None,
    )
    if is_bf16 and is_fp16:
        faults.say("bf16 and fp16 are both asked for")
    if reduces_narrow and asks_wide:
        faults.say("accumulate_allreduce_grads_in_fp32 and grad_reduce_in_bf16 are both asked for")
    if reduces_narrow and not is_bf16:
        faults.say("grad_reduce_in_bf16 means nothing without bf16")
    if not (is_bf16 or is_fp16):
        return None
    name: DType = "bf16" if is_bf16 else "fp16"
    # Under bf16 Megatron sums in float32 also where it is not asked to.
    return Precision(
        {},
        param=name,
        grad="fp32" if (is_bf16 or asks_wide) and not reduces_narrow else name,
        reduce="bf16" if reduces_narrow else None,
    )
