"""The configuration of DeepSpeed; see `reading.py`.

Source: its configuration JSON.

Signature: the configuration -> its meaning here.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from piper_dynamo.directives import DType, Precision
from piper_dynamo.foreign.reading import (
    NO_TENSOR,
    Arguments,
    Meaning,
    Reader,
    bucket_size,
    is_table,
)
from piper_dynamo.values import Faults, is_whole

_IN_THE_LOOP = {
    "optimizer": "make it in the loop, torch.optim...(piper.parameters(step))",
    "scheduler": "make it in the loop, of the optimizer there",
    "gradient_clipping": "call piper.clip_grad_norm_(step, max_norm) in the loop",
}
_AUTO = 'Hugging Face\'s Trainer fills "auto" in; give the number, or leave it out'
# Tables that mean nothing where they are switched off.
_SECTIONS = (
    *("amp", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("elasticity", "autotuning", "eigenvalue", "progressive_layer_drop", "curriculum_learning"),
    *("data_efficiency", "hybrid_engine", "compression_training"),
)
# How long gathered parameters stay, and how early they are gathered, by their default values.
_RESIDENT = {
    "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 10**9,
    "stage3_prefetch_bucket_size": 5 * 10**7,
    "stage3_param_persistence_threshold": 10**5,
    "stage3_model_persistence_threshold": sys.maxsize,
}
_RESIDENCE = (
    "which gathered parameters stay is not counted in elements here; leave it out, or say it by "
    "keep=, prefetch= and bucket_mb= of piper.strategies.pipeline(..., zero=3) or piper.Replicate"
)
_DEEPSPEED_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


def deepspeed(
    given: Arguments, faults: Faults, *, world_size: int, stages: int, expert_ranks: int
) -> Meaning:
    """A DeepSpeed configuration, with what its users say in Python: stages, expert ranks."""
    open_ = _autos(given)
    for name in open_:
        faults.add(name, "auto", _AUTO)
    read = Reader(_without(given, open_), faults)
    for name, why in _IN_THE_LOOP.items():
        value = read.take(name, None)
        if value:
            faults.add(name, value, why)
    read.without_effect("steps_per_print", "wall_clock_breakdown", "prescale_gradients")
    read.without_effect("dump_state", "memory_breakdown", "zero_allow_untested_optimizer")
    read.refuse("Piper has no sparse gradients", sparse_gradients=False)
    read.refuse(NO_TENSOR, tensor_parallel=None, autotp_size=0)
    read.refuse("gradients are divided once, by how many there are", gradient_predivide_factor=1.0)
    read.refuse_unless_off("Piper has no counterpart; leave it out", *_SECTIONS)
    checkpoints = read.part("activation_checkpointing")  # how the model's own calls keep values
    checkpoints.refuse(
        "ask for it by piper.Recompute, or recompute=",
        partition_activations=False,
        cpu_checkpointing=False,
        contiguous_memory_optimization=False,
        number_checkpoints=None,
        synchronize_checkpoint_boundary=False,
    )
    checkpoints.without_effect("profile")
    checkpoints.finish()
    replicas, rest = divmod(world_size, stages)
    if rest or not replicas:
        faults.add("stages", stages, f"must divide {world_size=}")
        replicas = 1
    if replicas % expert_ranks:
        faults.add("expert_ranks", expert_ranks, f"must divide {replicas} replicas")
        expert_ranks = 1
    precision = _deepspeed_precision(read, faults)
    zero = _deepspeed_zero(read, faults, precision, replicas)
    read_batch = {
        name: read.take(name, None)
        for name in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    }
    count = _microbatches(read_batch, replicas, faults)
    read.finish()
    found: dict[str, Any] = {
        "schedule": "one_f_one_b",
        "ranks": stages,
        "num_microbatches": count,
        "replicas": replicas,
        "expert_ranks": expert_ranks,
        **zero,
    }
    return Meaning(pipeline=found, precision=precision)


def _autos(given: object, prefix: str = "") -> list[str]:
    """Where a configuration leaves a value open, but of what is said in the loop."""
    if not is_table(given):
        return []
    found = []
    for name, value in given.items():
        if prefix or name not in _IN_THE_LOOP:
            found += [prefix + name] if value == "auto" else _autos(value, f"{prefix}{name}.")
    return found


def _without(given: object, paths: Sequence[str], prefix: str = "") -> object:
    """The configuration without the values at some places."""
    if not is_table(given):
        return given
    return {
        name: _without(value, paths, f"{prefix}{name}.")
        for name, value in given.items()
        if f"{prefix}{name}" not in paths
    }


def _microbatches(given: Mapping[str, Any], replicas: int, faults: Faults) -> int:
    """Two of the three numbers say the third: the batch is micro x steps x replicas."""
    wrong = [n for n, v in given.items() if v is not None and (not is_whole(v) or v < 1)]
    for name in wrong:
        faults.add(name, given[name], "must be a whole number of at least 1")
    batch, micro, steps = given.values()
    if wrong:
        return 1
    if steps is None and (batch is None or micro is None):
        return 1
    if micro is None and batch is not None and batch % (steps * replicas):
        must = f"a multiple of {steps} steps of accumulation x {replicas} replicas"
        faults.add("train_batch_size", batch, f"must be {must}")
        return 1
    if steps is None:
        steps, rest = divmod(batch, micro * replicas)
        if rest or not steps:
            faults.add(
                "train_batch_size",
                batch,
                f"must be a multiple of {micro} per rank x {replicas} replicas",
            )
            return 1
    elif batch is not None and micro is not None and batch != micro * steps * replicas:
        faults.add(
            "train_batch_size",
            batch,
            f"is not {micro} per rank x {steps} steps of accumulation x {replicas} replicas",
        )
    return int(steps)


def _deepspeed_zero(
    read: Reader, faults: Faults, precision: Precision | None, replicas: int
) -> dict[str, Any]:
    part = read.part("zero_optimization")
    level = part.take("stage", 0)
    if not is_whole(level) or level not in (0, 1, 2, 3):
        faults.add("zero_optimization.stage", level, "must be 0, 1, 2 or 3")
        level = 0
    on_device = "Piper keeps all on the device"
    part.refuse_unless_off(on_device, "offload_optimizer", "offload_param", switch="device")
    part.refuse(on_device, cpu_offload=False, cpu_offload_params=False)
    part.refuse("Piper has no second copy of shards; see shard_ranks", zero_hpz_partition_size=1)
    part.refuse(
        "Piper sends what it computes; ask for a smaller dtype by piper.Precision(reduce=)",
        zero_quantized_weights=False,
        zero_quantized_gradients=False,
        zero_quantized_nontrainable_weights=False,
    )
    part.without_effect("overlap_comm", "contiguous_gradients", "reduce_scatter", "sub_group_size")
    part.without_effect("allgather_partitions", "allgather_bucket_size", "round_robin_gradients")
    part.without_effect("stage3_gather_16bit_weights_on_model_save")
    if level == 3:
        part.refuse(_RESIDENCE, **_RESIDENT)
    else:  # of the third level alone
        part.without_effect(*_RESIDENT)
    found: dict[str, Any] = {"zero": level if replicas > 1 else 0}
    shards = part.take("mics_shard_size", -1)
    if shards != -1:
        found["shard_ranks"] = shards
    elements = part.take("reduce_bucket_size", None)
    if elements is not None and replicas > 1:
        name = "zero_optimization.reduce_bucket_size"
        found["bucket_mb"] = bucket_size(elements, name, precision, faults)
    part.finish()
    return found


def _deepspeed_precision(read: Reader, faults: Faults) -> Precision | None:
    bf16, fp16 = read.part("bf16"), read.part("fp16")
    narrow = bf16.switch("enabled"), fp16.switch("enabled")
    if not narrow[1]:
        fp16.drop()
    fp16.refuse(
        "a loss scale is an option of the step: piper.compile(..., loss_scale=...)",
        consecutive_hysteresis=False,
        auto_cast=False,
    )
    scale = fp16.take("loss_scale", 0)
    if scale not in (0, None):  # 0: it is found
        hint = f"piper.compile(..., loss_scale={scale!r})"
        faults.add("fp16.loss_scale", scale, f"a fixed scale is an option of the step: {hint}")
    # How the scale is found: the warning says where that is said here.
    fp16.without_effect("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    if not narrow[0]:
        bf16.drop()
    bf16.finish()
    fp16.finish()
    sums, no_dtype = read.part("data_types"), "is no dtype known here"
    grad = sums.choice("grad_accum_dtype", None, _DEEPSPEED_DTYPES, no_dtype)
    sums.finish()
    reduce = read.choice("communication_data_type", None, _DEEPSPEED_DTYPES, no_dtype)
    if all(narrow):
        faults.say("bf16.enabled and fp16.enabled are both true")
    param: DType | None = "bf16" if narrow[0] else "fp16" if narrow[1] else None
    if param is grad is reduce is None:
        return None
    return Precision({}, param=param, grad=grad or ("fp32" if param else None), reduce=reduce)
