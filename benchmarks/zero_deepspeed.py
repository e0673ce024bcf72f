"""Step time with replicas beside DeepSpeed's ZeRO 1 to 3 with its defaults, on CPU over gloo.

Without a pipeline: DeepSpeed's takes no ZeRO above 1. It is optional: `pip install -e '.[bench]'`;
its operators are built when first used, and none is used here, so that the optimizer is torch's on
both sides.
"""

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.report import Row
from benchmarks.zero_real import measure_beside
from benchmarks.zero_sides import Job
from piper_dynamo.train.model import build


class DeepSpeedStep:
    """One optimizer step with DeepSpeed of the whole model; its replica's loss."""

    def __init__(self, job: Job, level: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        model = build(job.config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.config.lr, foreach=True)
        asked = {
            "train_micro_batch_size_per_gpu": job.config.batch,
            "zero_optimization": {"stage": level},
            "zero_allow_untested_optimizer": True,
        }
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=asked)

    def __call__(self, tokens: Tensor, targets: Tensor) -> float:
        """The loss."""
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())


def run(job: Job, pairs: int, zeros: Sequence[int]) -> Iterator[Row]:
    """Every level above 0.

    Raises:
        ClickException: DeepSpeed is not there.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise click.ClickException(
            "DeepSpeed is not installed: pip install -c constraints.txt -e '.[bench]'"
        )
    version = importlib.metadata.version("deepspeed")
    alone = Job(config=replace(job.config, pp=1, microbatches=1), replicas=job.replicas)
    for zero in zeros:
        if zero:
            found = measure_beside(alone, functools.partial(DeepSpeedStep, level=zero), zero, pairs)
            yield Row(
                section="deepspeed",
                what=f"ZeRO-{zero}, no pipeline, beside DeepSpeed {version} with its defaults",
                figures=found.text(),
                data=found.figures() | {"deepspeed": version},
            )
