"""Configurations of other systems as users have them: much is written out that has no effect."""

import re
from typing import Any

import pytest

import piper_dynamo as piper
from piper_dynamo.strategies import from_deepspeed, from_megatron, from_torchtitan

# As users' configurations have them: what they do not use is written out, and switched off.
OFF: dict[str, Any] = {
    "fp16": {
        "enabled": False,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": False, "check_grad_overflow": True},
    "amp": {"enabled": False, "opt_level": "O1"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none"},
        "cpu_offload": False,
    },
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "tensorboard": {"enabled": False, "output_path": "logs"},
    "comms_logger": {},
    "gradient_predivide_factor": 1.0,
    "wall_clock_breakdown": False,
}


def test_what_is_switched_off_is_as_if_it_were_left_out() -> None:
    assert from_deepspeed(OFF, world_size=2) == from_deepspeed(
        {"zero_optimization": {"stage": 2}}, world_size=2
    )


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (
            "fp16",
            {**OFF["fp16"], "enabled": True, "loss_scale": 128},
            "fp16.loss_scale=128: a fixed scale is an option",
        ),
        ("amp", {"enabled": True}, "amp={'enabled': True}: Piper has no counterpart"),
        ("flops_profiler", {"enabled": True}, "flops_profiler={'enabled': True}"),
        ("activation_checkpointing", {"cpu_checkpointing": True}, "cpu_checkpointing=True: ask"),
        (
            "activation_checkpointing",
            {"partition": True},
            "activation_checkpointing.partition=True",
        ),
        ("train_batch_size", "auto", "train_batch_size='auto': Hugging Face"),
        (
            "zero_optimization",
            {"reduce_bucket_size": "auto"},
            "zero_optimization.reduce_bucket_size=",
        ),
        ("bf16", {"enabled": "auto"}, "bf16.enabled='auto': Hugging Face"),
        ("gradient_predivide_factor", 2.0, "gradient_predivide_factor=2.0: gradients are divided"),
    ],
)
def test_what_is_not_off_is_refused(where: str, value: Any, message: str) -> None:
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)) as caught:
        from_deepspeed({**OFF, where: value}, world_size=2)
    assert len(str(caught.value).splitlines()) == 2


def test_names_may_be_those_of_the_command_line() -> None:
    given = {"--pipeline-model-parallel-size": 2, "micro-batch-size": 2, "global_batch_size": 8}
    assert from_megatron(given, world_size=2) == from_megatron(
        {"pipeline_model_parallel_size": 2, "micro_batch_size": 2, "global_batch_size": 8},
        world_size=2,
    )


def test_a_looped_schedule_has_as_many_stages_as_there_are_regions() -> None:
    regions = {f"layers.{k}": {"PP": k} for k in range(6)}
    titan = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
    made = from_torchtitan(titan, world_size=2, local_batch_size=4, regions=regions)
    assert [p.devices for p in made.of(piper.Place)] == [(k % 2,) for k in range(6)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: from_deepspeed(
                {"train_batch_size": 17, "gradient_accumulation_steps": 2}, world_size=4
            ),
            "train_batch_size=17: must be a multiple of 2 steps of accumulation x 4 replicas",
        ),
        (
            lambda: from_megatron({"--micro-batch-size": 2, "micro_batch_size": 4}, world_size=1),
            "micro_batch_size=4: is given twice",
        ),
        (
            lambda: from_megatron({"num_layers_per_virtual_pipeline_stage": 2}, world_size=1),
            "num_layers_per_virtual_pipeline_stage=2: Piper counts no layers",
        ),
        (
            lambda: from_megatron({"recompute_activations": True}, world_size=1),
            "recompute_activations=True: keep part of a region",
        ),
        (
            lambda: from_megatron(
                {
                    "pipeline_model_parallel_size": 2,
                    "virtual_pipeline_model_parallel_size": 2,
                    "num_virtual_stages_per_pipeline_rank": 3,
                },
                world_size=2,
            ),
            "num_virtual_stages_per_pipeline_rank=3: is not",
        ),
        (
            lambda: from_deepspeed({"zero_optimization": None}, world_size=1),
            "zero_optimization=None: must be a dict",
        ),
    ],
)
def test_what_contradicts_itself_or_has_another_name(make: Any, message: str) -> None:
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)):
        make()


def test_virtual_stages_have_two_names() -> None:
    rest = {"pipeline_model_parallel_size": 2, "global_batch_size": 4}
    made = [
        from_megatron({**rest, name: 2}, world_size=2)
        for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    ]
    assert made[0] == made[1]
    assert len(made[0].of(piper.Place)) == 4
