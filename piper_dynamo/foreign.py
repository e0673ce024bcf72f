"""What other systems' parallelism arguments mean here.

Terms: an argument has a *counterpart* if a Strategy says the same: then it is read. Some only say
how the other system overlaps or chooses kernels, and change neither values nor what a rank holds:
they are taken and have no effect, since Piper overlaps what it can. All others are refused, unless
they have the value by which the other system leaves them out.

Sources: torchtitan's `Parallelism` configuration, Megatron-LM's `arguments.py`, DeepSpeed's
configuration JSON, by their own names.

Signature: the arguments of one of them -> the arguments of `piper.strategies.pipeline`, and a
Precision.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import Any, TypeGuard

from piper_dynamo.directives import DType, Precision
from piper_dynamo.values import Faults, is_whole

Arguments = Mapping[str, Any]
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What the arguments of another system come to.

    Attributes:
        pipeline: Arguments of `piper.strategies.pipeline`.
        precision: What is computed in another dtype than it is held in.
    """

    pipeline: dict[str, Any]
    precision: Precision | None = None


class _Reader:
    """Reads each argument once; what is left in the end is refused."""

    def __init__(self, given: object, faults: Faults, prefix: str = "") -> None:
        self._faults = faults
        self._prefix = prefix
        self._known: list[str] = []
        if not isinstance(given, Mapping):
            faults.add(prefix or "arguments", given, "must be a dict of arguments by name")
            given = {}
        self._left = dict(given)

    def take(self, name: str, default: Any) -> Any:
        """The argument's value, as it is."""
        self._known.append(name)
        return self._left.pop(name, default)

    def size(self, name: str, default: int = 1) -> int:
        """A number of ranks or of the like."""
        value = self.take(name, default)
        if not is_whole(value) or value < 1:
            self._faults.add(self._prefix + name, value, "must be a whole number of at least 1")
            return 1
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            self._faults.add(self._prefix + name, value, "must be true or false")
            return default
        return value

    def choice(self, name: str, default: str | None, meanings: Mapping[str, Any], why: str) -> Any:
        """What one of some values means; None, where that is the default, means nothing."""
        value = self.take(name, default)
        if value is None and default is None:
            return None
        if not isinstance(value, str) or value not in meanings:  # a list has no hash
            known = ", ".join(map(repr, meanings))
            self._faults.add(
                self._prefix + name, value, f"{why}; there are counterparts of {known}"
            )
            return None if default is None else meanings[default]
        return meanings[value]

    def part(self, name: str) -> "_Reader":
        """A table inside of the table."""
        return _Reader(self.take(name, {}), self._faults, f"{self._prefix}{name}.")

    def refuse(self, why: str, **absent: Any) -> None:
        """Arguments without a counterpart, by the value that leaves each out."""
        for name, without in absent.items():
            value = self.take(name, without)
            if value != without:
                self._faults.add(self._prefix + name, value, why)

    def without_effect(self, *names: str) -> None:
        """Arguments that change neither values nor what ranks hold."""
        for name in names:
            self.take(name, None)

    def finish(self) -> None:
        """Refuse what was not read."""
        for name, value in self._left.items():
            near = get_close_matches(str(name), self._known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out if it is of another kind"
            self._faults.add(
                f"{self._prefix}{name}", value, f"is no argument of parallelism known here; {hint}"
            )


NO_TENSOR = "Piper has no tensor parallelism yet; use more pipeline ranks or replicas"
NO_CONTEXT = "Piper has no context parallelism yet; a sequence stays on one rank"
OWN_LAYERS = (
    "Piper counts no layers; say the stages by regions=, by hand or by piper.auto_stages(...)"
)


# torchtitan

_TITAN_SCHEDULES = {
    "1F1B": "one_f_one_b",
    "GPipe": "gpipe",
    "LoopedBFS": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


def torchtitan(
    given: Arguments, faults: Faults, *, world_size: int, local_batch_size: int
) -> Meaning:
    """The `[parallelism]` table of a torchtitan configuration."""
    read = _Reader(given, faults)
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
    if shards == -1:
        shards = max(world_size // (ranks * copies), 1)
    if not is_whole(shards) or shards < 1 or ranks * copies * shards != world_size:
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
    if ranks > 1 and local_batch_size % size:
        faults.add("pipeline_parallel_microbatch_size", size, f"must divide {local_batch_size=}")
    schedule = read.choice(
        "pipeline_parallel_schedule", "1F1B", _TITAN_SCHEDULES, "has no counterpart"
    )
    regions = _titan_parts(read, faults)
    read.finish()
    found: dict[str, Any] = {
        "schedule": schedule if ranks > 1 else "gpipe",
        "ranks": ranks,
        "num_microbatches": max(local_batch_size // size, 1) if ranks > 1 else 1,
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


def _titan_parts(read: _Reader, faults: Faults) -> dict[str, dict[str, int]]:
    """The regions of `module_fqns_per_model_part`; none without it."""
    name, must = "module_fqns_per_model_part", "must be a list of the modules' names for each stage"
    parts = read.take(name, None)
    if parts is None:
        return {}
    if not _is_list(parts) or not parts or not all(_is_list(part) and part for part in parts):
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


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


# Megatron-LM

_MEGATRON_LEVELS = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def megatron(given: Arguments, faults: Faults, *, world_size: int) -> Meaning:
    """Arguments of Megatron-LM's `pretrain_gpt.py` and its like, by the names in `args`."""
    read = _Reader(given, faults)
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
    if not is_whole(batch) or batch < 1 or batch % (micro * replicas):
        faults.add(
            "global_batch_size",
            batch,
            f"must be a multiple of micro_batch_size={micro} x {replicas} replicas",
        )
        batch = micro * replicas
    virtual = read.take("virtual_pipeline_model_parallel_size", None)
    if virtual is not None and (not is_whole(virtual) or virtual < 2):
        faults.add("virtual_pipeline_model_parallel_size", virtual, "must be at least 2, or None")
        virtual = None
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
        found["bucket_mb"] = _bucket(bucket, "ddp_bucket_size", precision, faults)
    if replicas == 1:
        found |= {"zero": 0, "bucket_mb": None}
    read.finish()
    return Meaning(pipeline=found, precision=precision)


def _megatron_level(read: _Reader, faults: Faults) -> int:
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


def _megatron_experts(read: _Reader, faults: Faults, replicas: int) -> int:
    experts = read.size("expert_model_parallel_size")
    if replicas % experts:
        faults.add("expert_model_parallel_size", experts, f"must divide {replicas} replicas")
        return 1
    return experts


def _megatron_capacity(read: _Reader, faults: Faults) -> float | None:
    factor = read.take("moe_expert_capacity_factor", None)
    policies = {name: name for name in ("probs", "position")}
    policy = read.choice("moe_token_drop_policy", "probs", policies, "is no policy known here")
    read.without_effect("moe_pad_expert_input_to_capacity")  # slots are always padded
    if factor is None:
        return None
    if not _is_number(factor) or not 0 < factor < inf:
        faults.add("moe_expert_capacity_factor", factor, "must be a number above 0")
        return None
    if policy != "position":
        faults.add(
            "moe_token_drop_policy", policy, 'must be "position": an expert takes the first rows'
        )
    return float(factor)


def _megatron_recompute(read: _Reader, faults: Faults) -> float | None:
    which = read.take("recompute_granularity", None)
    method, layers = read.take("recompute_method", None), read.take("recompute_num_layers", None)
    read.refuse("keep part of a region by a budget, recompute=0.5", recompute_modules=None)
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


def _megatron_precision(read: _Reader, faults: Faults) -> Precision | None:
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


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bucket(elements: object, name: str, precision: Precision | None, faults: Faults) -> float:
    if not _is_number(elements) or not 1 <= elements < inf:
        faults.add(name, elements, "must be a number of elements")
        return 1.0
    sums = None if precision is None else precision.reduce or precision.grad
    return elements * (2 if sums in ("bf16", "fp16") else 4) / MIB


# DeepSpeed

_IN_THE_LOOP = {
    "optimizer": "make it in the loop, torch.optim...(piper.parameters(step))",
    "scheduler": "make it in the loop, of the optimizer there",
    "gradient_clipping": "call piper.clip_grad_norm_(step, max_norm) in the loop",
}
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
    read = _Reader(given, faults)
    for name, why in _IN_THE_LOOP.items():
        value = read.take(name, None)
        if value:
            faults.add(name, value, why)
    read.without_effect("steps_per_print", "wall_clock_breakdown", "prescale_gradients")
    read.refuse("Piper has no sparse gradients", sparse_gradients=False)
    read.refuse(NO_TENSOR, tensor_parallel=None, autotp_size=0)
    read.refuse("ask for it by piper.Recompute, or recompute=", activation_checkpointing=None)
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
    read: _Reader, faults: Faults, precision: Precision | None, replicas: int
) -> dict[str, Any]:
    part = read.part("zero_optimization")
    level = part.take("stage", 0)
    if not is_whole(level) or level not in (0, 1, 2, 3):
        faults.add("zero_optimization.stage", level, "must be 0, 1, 2 or 3")
        level = 0
    part.refuse("Piper keeps all on the device", offload_optimizer=None, offload_param=None)
    part.refuse("Piper keeps all on the device", cpu_offload=None, zero_hpz_partition_size=1)
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
        found["bucket_mb"] = _bucket(elements, name, precision, faults)
    part.finish()
    return found


def _deepspeed_precision(read: _Reader, faults: Faults) -> Precision | None:
    bf16, fp16 = read.part("bf16"), read.part("fp16")
    narrow = bf16.switch("enabled"), fp16.switch("enabled")
    fp16.refuse(
        "a loss scale is an option of the step: piper.compile(..., loss_scale=...)",
        loss_scale=None,
        initial_scale_power=None,
        loss_scale_window=None,
        hysteresis=None,
        min_loss_scale=None,
        auto_cast=False,
    )
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
