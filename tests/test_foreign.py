"""Strategies from the parallelism arguments of torchtitan, Megatron-LM and DeepSpeed."""

import re
from collections.abc import Callable
from typing import Any

import pytest

import piper_dynamo as piper
from piper_dynamo.strategies import from_deepspeed, from_megatron, from_torchtitan, pipeline
from tests import zoo, zoo_models
from tests.zoo_models import Decoder

REGIONS = Decoder.REGIONS
ONE = {"*": {"PP": 0}}

# What each says, and the call that says it by hand.
SAME: dict[str, tuple[Callable[[], piper.Strategy], piper.Strategy]] = {
    "torchtitan, FSDP": (
        lambda: from_torchtitan({"data_parallel_shard_degree": -1}, world_size=4),
        pipeline(ranks=1, num_microbatches=1, replicas=4, zero=3, schedule="gpipe", regions=ONE),
    ),
    "torchtitan, DDP": (
        lambda: from_torchtitan(
            {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}, world_size=4
        ),
        pipeline(ranks=1, num_microbatches=1, replicas=4, schedule="gpipe", regions=ONE),
    ),
    "torchtitan, hybrid": (
        lambda: from_torchtitan({"data_parallel_replicate_degree": 2}, world_size=4),
        pipeline(
            "gpipe",
            ranks=1,
            num_microbatches=1,
            replicas=4,
            zero=3,
            shard_ranks=2,
            regions=ONE,
        ),
    ),
    "torchtitan, pipeline": (
        lambda: from_torchtitan(
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "pipeline_parallel_microbatch_size": 2,
                "module_fqns_per_model_part": [["words"], ["layers.0"], ["layers.1"], ["head"]],
                "tensor_parallel_degree": 1,
            },
            world_size=4,
            local_batch_size=8,
        ),
        pipeline(
            "interleaved_1f1b",
            ranks=2,
            stages=4,
            num_microbatches=4,
            replicas=2,
            zero=1,  # what is gathered stays, so that gradients are reduced once
            regions={
                name: {"PP": k} for k, name in enumerate(("words", "layers.0", "layers.1", "head"))
            },
        ),
    ),
    "torchtitan, stages of regions": (
        lambda: from_torchtitan(
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "LoopedBFS"},
            world_size=2,
            local_batch_size=4,
            regions={f"layers.{k}": {"PP": k} for k in range(6)},
        ),
        pipeline(
            "gpipe",
            ranks=2,
            stages=6,
            num_microbatches=4,
            regions={f"layers.{k}": {"PP": k} for k in range(6)},
        ),
    ),
    "torchtitan, experts": (
        lambda: from_torchtitan(
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "DualPipeV",
                "expert_parallel_degree": 2,
                "fsdp_reshard_after_forward": "always",
            },
            world_size=8,
            local_batch_size=4,
        ),
        pipeline("dualpipev", ranks=2, num_microbatches=4, replicas=4, zero=3, expert_ranks=2),
    ),
    "megatron, pipeline": (
        lambda: from_megatron(
            {
                "pipeline_model_parallel_size": 2,
                "micro_batch_size": 2,
                "global_batch_size": 16,
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "ddp_bucket_size": 2**20,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            world_size=4,
        ),
        pipeline(
            ranks=2,
            num_microbatches=4,
            replicas=2,
            zero=1,
            bucket_mb=4.0,
            recompute=0.0,
        ),
    ),
    "megatron, interleaved": (
        lambda: from_megatron(
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "micro_batch_size": 1,
                "global_batch_size": 4,
                "use_distributed_optimizer": True,  # there is nothing to distribute over
            },
            world_size=2,
        ),
        pipeline("interleaved_1f1b", ranks=2, stages=4, num_microbatches=4),
    ),
    "megatron, experts": (
        lambda: from_megatron(
            {
                "expert_model_parallel_size": 2,
                "moe_expert_capacity_factor": 1.5,
                "moe_token_drop_policy": "position",
                "use_megatron_fsdp": True,
                "data_parallel_sharding_strategy": "optim_grads",
            },
            world_size=4,
        ),
        pipeline(
            ranks=1,
            num_microbatches=1,
            replicas=4,
            zero=2,
            expert_ranks=2,
            capacity=1.5,
            regions=ONE,
        ),
    ),
    "megatron, FSDP2": (
        lambda: from_megatron({"use_torch_fsdp2": True}, world_size=2),
        pipeline(ranks=1, num_microbatches=1, replicas=2, zero=3, regions=ONE),
    ),
    "megatron, instances": (
        lambda: from_megatron(
            {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
            world_size=4,
        ),
        pipeline(ranks=1, num_microbatches=1, replicas=4, zero=1, shard_ranks=2, regions=ONE),
    ),
    "deepspeed, ZeRO": (
        lambda: from_deepspeed(
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {
                    "stage": 3,
                    "overlap_comm": True,
                    "reduce_bucket_size": 2**20,
                    "offload_param": None,
                    "stage3_max_live_parameters": 1e9,  # as it is without
                    "stage3_prefetch_bucket_size": 5e7,
                },
                "steps_per_print": 10,
            },
            world_size=4,
        ),
        pipeline(ranks=1, num_microbatches=4, replicas=4, zero=3, bucket_mb=4.0, regions=ONE),
    ),
    "deepspeed, MiCS and stages": (
        lambda: from_deepspeed(
            {
                "gradient_accumulation_steps": 4,
                "zero_optimization": {"stage": 3, "mics_shard_size": 2},
            },
            world_size=8,
            stages=2,
            regions=REGIONS,
            loss="loss",
        ),
        pipeline(
            ranks=2,
            num_microbatches=4,
            replicas=4,
            zero=3,
            shard_ranks=2,
            regions=REGIONS,
            loss="loss",
        ),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_says_the_same(name: str) -> None:
    make, want = SAME[name]
    assert make() == want


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (
            lambda: from_megatron({"bf16": True}, world_size=1),
            piper.Precision({}, param="bf16", grad="fp32"),
        ),
        (
            lambda: from_megatron({"bf16": True, "grad_reduce_in_bf16": True}, world_size=1),
            piper.Precision({}, param="bf16", grad="bf16", reduce="bf16"),
        ),
        (  # Megatron sums in float32 under bf16, whatever its default says
            lambda: from_megatron(
                {"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, world_size=1
            ),
            piper.Precision({}, param="bf16", grad="fp32"),
        ),
        (
            lambda: from_deepspeed({"data_types": {"grad_accum_dtype": "bf16"}}, world_size=1),
            piper.Precision({}, grad="bf16"),
        ),
        (
            lambda: from_deepspeed(
                {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"},
                world_size=1,
            ),
            piper.Precision({}, grad="bf16", reduce="fp32"),
        ),
        (
            lambda: from_deepspeed(
                {"bf16": {"enabled": True}, "communication_data_type": "fp32"}, world_size=1
            ),
            piper.Precision({}, param="bf16", grad="fp32", reduce="fp32"),
        ),
    ],
)
def test_precision(make: Callable[[], piper.Strategy], want: piper.Precision) -> None:
    assert make().of(piper.Precision) == (want,)


@pytest.mark.parametrize(
    ("make", "grad"),
    [
        (lambda: from_megatron({"fp16": True}, world_size=1), "fp16"),
        (
            lambda: from_megatron(
                {"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, world_size=1
            ),
            "fp32",
        ),
        (lambda: from_deepspeed({"fp16": {"enabled": True}}, world_size=1), "fp32"),
    ],
)
def test_fp16_tells_of_the_scale_that_is_not_in_a_strategy(
    make: Callable[[], piper.Strategy], grad: Any
) -> None:
    with pytest.warns(UserWarning, match=r'piper\.compile\(\.\.\., loss_scale="dynamic"\)') as told:
        made = make()
    assert [one.filename for one in told] == [__file__]
    assert made.of(piper.Precision) == (piper.Precision({}, param="fp16", grad=grad),)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: from_torchtitan({"tensor_parallel_degree": 2}, world_size=2), "no tensor parallelism"),
    (lambda: from_torchtitan({"context_parallel_degree": 2}, world_size=2), "no context parallel"),
    (
        lambda: from_torchtitan({"pipeline_parallel_degree": 2}, world_size=2),
        "local_batch_size, of [training], is needed",
    ),
    (
        lambda: from_torchtitan({"pipeline_parallel_degree": 4}, world_size=6, local_batch_size=8),
        "pipeline_parallel_degree=4 x data_parallel_replicate_degree=1 does not divide",
    ),
    (
        lambda: from_torchtitan({"pipeline_parallel_split_points": ["a"]}, world_size=2),
        "pipeline_parallel_split_points=['a']: Piper counts no layers; say the stages by regions=",
    ),
    (
        lambda: from_megatron({"micro_batch_size": "4"}, world_size=2),
        "micro_batch_size='4': must be a whole number of at least 1, not a text",
    ),
    (
        lambda: from_megatron({"num_layers": 12}, world_size=2),
        "known here; leave it out if it is of another kind: of the model, the data",
    ),
    (
        lambda: from_torchtitan({"data_parallel_shard_degre": 2}, world_size=2),
        "did you mean 'data_parallel_shard_degree'?",
    ),
    (
        lambda: from_torchtitan(
            {"pipeline_parallel_schedule": "InterleavedZeroBubble"}, world_size=1
        ),
        "there are counterparts of '1F1B'",
    ),
    (
        lambda: from_torchtitan({"pipeline_parallel_schedule_csv": "a.csv"}, world_size=1),
        "piper.schedules.from_csv",
    ),
    (
        lambda: from_torchtitan({"pipeline_parallel_layers_per_stage": 2}, world_size=1),
        "piper.auto_stages",
    ),
    (lambda: from_torchtitan({"data_parallel_shard_degree": 3}, world_size=4), "is not world_size"),
    (
        lambda: from_torchtitan({"expert_parallel_degree": 3}, world_size=4),
        "must divide the 4 ranks",
    ),
    (lambda: from_torchtitan([], world_size=1), "must be a dict"),
    (
        lambda: from_torchtitan(
            {"module_fqns_per_model_part": [["words"], ["head"]]},
            world_size=1,
            regions=REGIONS,
        ),
        "module_fqns_per_model_part and regions= both say the stages",
    ),
    *(
        (
            lambda parts=parts: from_torchtitan(
                {"module_fqns_per_model_part": parts}, world_size=1
            ),
            message,
        )
        for parts, message in (
            (3, "must be a list of the modules' names for each stage"),
            ([], "must be a list of the modules' names for each stage"),
            ([["words"], []], "must be a list of the modules' names for each stage"),
            (["words", "head"], "must be a list of the modules' names for each stage"),
            ([["words"], [1]], "module_fqns_per_model_part=1: must be a list"),
            ([["words"], ["head", "words"]], "'words': is in the parts 0 and 1"),
        )
    ),
    (lambda: from_torchtitan({}, world_size=0), "world_size=0: must be a whole number"),
    (lambda: from_megatron({"tensor_model_parallel_size": 2}, world_size=2), "tensor parallelism"),
    (lambda: from_megatron({"context_parallel_size": 2}, world_size=2), "context parallelism"),
    (lambda: from_megatron({"use_tp_pp_dp_mapping": True}, world_size=2), "outermost"),
    (lambda: from_megatron({"recompute_granularity": "selective"}, world_size=1), "by a budget"),
    (
        lambda: from_megatron({"recompute_method": "block"}, world_size=1),
        "recompute_method='block': means nothing without recompute_granularity",
    ),
    (
        lambda: from_megatron({"recompute_num_layers": 2}, world_size=1),
        "recompute_num_layers=2: means nothing without recompute_granularity",
    ),
    (lambda: from_megatron({"moe_expert_capacity_factor": 1.0}, world_size=1), '"position"'),
    *(
        (
            lambda factor=factor: from_megatron(
                {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": "position"},
                world_size=1,
            ),
            f"moe_expert_capacity_factor={factor!r}: must be a number above 0",
        )
        for factor in ("1.5", "much", True, 0, float("nan"), float("inf"), [1.5])
    ),
    (
        lambda: from_megatron({"moe_token_drop_policy": "last"}, world_size=1),
        "moe_token_drop_policy='last': is no policy known here",
    ),
    (
        lambda: from_megatron({"grad_reduce_in_bf16": True}, world_size=1),
        "grad_reduce_in_bf16 means nothing without bf16",
    ),
    (
        lambda: from_megatron(
            {
                "bf16": True,
                "grad_reduce_in_bf16": True,
                "accumulate_allreduce_grads_in_fp32": True,
            },
            world_size=1,
        ),
        "accumulate_allreduce_grads_in_fp32 and grad_reduce_in_bf16 are both asked for",
    ),
    (lambda: from_megatron({"loss_scale": 128}, world_size=1), "loss_scale="),
    (lambda: from_megatron({"bf16": True, "fp16": True}, world_size=1), "both asked for"),
    (lambda: from_megatron({"global_batch_size": 3}, world_size=2), "must be a multiple"),
    (lambda: from_megatron({"pipeline_model_parallel_size": 3}, world_size=4), "must divide"),
    (lambda: from_megatron({"pipeline_model_parallel_layout": "Et*3|L"}, world_size=1), "regions="),
    (
        lambda: from_megatron({"data_parallel_sharding_strategy": "optim"}, world_size=1),
        "without use_megatron_fsdp",
    ),
    (
        lambda: from_megatron(
            {"use_torch_fsdp2": True, "data_parallel_sharding_strategy": "optim"}, world_size=2
        ),
        "without use_megatron_fsdp",
    ),
    (
        lambda: from_megatron({"data_parallel_sharding_strategy": ["optim"]}, world_size=1),
        "data_parallel_sharding_strategy=['optim']: has no counterpart",
    ),
    (
        lambda: from_torchtitan({"pipeline_parallel_schedule": {"1F1B": 1}}, world_size=1),
        "pipeline_parallel_schedule={'1F1B': 1}: has no counterpart",
    ),
    *(
        (
            lambda config=config: from_deepspeed(config, world_size=1),
            f"{path}={value!r}: is no dtype known here",
        )
        for value in ("int8", ["bf16"], True)
        for path, config in (
            ("communication_data_type", {"communication_data_type": value}),
            ("data_types.grad_accum_dtype", {"data_types": {"grad_accum_dtype": value}}),
        )
    ),
    *(
        (
            lambda level=level: from_deepspeed(
                {"zero_optimization": {"stage": level}}, world_size=2
            ),
            f"zero_optimization.stage={level!r}: must be 0, 1, 2 or 3",
        )
        for level in (1.0, True, [1])
    ),
    (
        lambda: from_megatron(
            {"use_torch_fsdp2": True, "use_distributed_optimizer": True}, world_size=2
        ),
        "use_torch_fsdp2 and use_distributed_optimizer are both asked for",
    ),
    *(
        (
            lambda name=name: from_deepspeed(
                {"zero_optimization": {"stage": 3, name: 1000}}, world_size=2
            ),
            f"zero_optimization.{name}=1000: which gathered parameters stay",
        )
        for name in (
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
        )
    ),
    (
        lambda: from_torchtitan(
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
            world_size=2,
            local_batch_size=8,
            regions={f"layers.{k}": {"PP": k} for k in range(5)},
        ),
        "stages=5: must be a multiple of ranks=2",
    ),
    (lambda: from_deepspeed({"optimizer": {"type": "Adam"}}, world_size=1), "in the loop"),
    (lambda: from_deepspeed({"gradient_clipping": 1.0}, world_size=1), "clip_grad_norm_"),
    (
        lambda: from_deepspeed(
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, world_size=2
        ),
        "zero_optimization.offload_param={'device': 'cpu'}: Piper keeps all on the device",
    ),
    (
        lambda: from_deepspeed(
            {"zero_optimization": {"zero_quantized_weights": True}}, world_size=1
        ),
        "zero_optimization.zero_quantized_weights=True",
    ),
    (
        lambda: from_deepspeed(
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, world_size=1
        ),
        "must be a multiple of 2 per rank",
    ),
    (
        lambda: from_deepspeed(
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 3,
            },
            world_size=1,
        ),
        "is not 2 per rank x 3 steps",
    ),
    (lambda: from_deepspeed({"zero_optimization": {"stage": 4}}, world_size=1), "must be 0, 1, 2"),
    (lambda: from_deepspeed({}, world_size=4, stages=3), "stages=3: must divide"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_has_no_counterpart_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)) as caught:
        make()
    first = str(caught.value).splitlines()[0]
    assert re.fullmatch(r"piper\.strategies\.from_\w+ at .*test_foreign\.py:\d+ is refused", first)


def test_what_the_third_level_alone_reads_has_no_effect_below() -> None:
    config = {"stage": 2, "stage3_param_persistence_threshold": 1000}
    made = from_deepspeed({"zero_optimization": config}, world_size=2)
    assert made.of(piper.Replicate)[0].zero == 2


def test_all_faults_are_listed() -> None:
    with pytest.raises(piper.PiperStrategyError) as caught:
        from_megatron(
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "unheard_of": 1},
            world_size=4,
        )
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    "faulty",
    [{"shard_ranks": 3, "zero": 3}, {"shard_ranks": 2, "zero": 0}, {"shard_ranks": 0, "zero": 1}],
)
def test_shards_over_some_of_the_replicas(faulty: dict[str, int]) -> None:
    with pytest.raises(piper.PiperStrategyError, match="shard_ranks="):
        pipeline(ranks=1, num_microbatches=1, replicas=4, **faulty)


@pytest.mark.slow
def test_a_hybrid_trains_as_one_process() -> None:
    """Two stages, and two copies of shards over two ranks each: eight ranks."""
    subject = zoo_models.subject(Decoder)
    made = from_torchtitan(
        {
            "pipeline_parallel_degree": 2,
            "data_parallel_replicate_degree": 2,
            "data_parallel_shard_degree": 2,
            "pipeline_parallel_microbatch_size": 4,
            "fsdp_reshard_after_forward": "always",
        },
        world_size=8,
        local_batch_size=8,
        regions=REGIONS,
    )
    zoo.check(subject, made)
