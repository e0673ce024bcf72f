"""The two sides with replicas: one optimizer step with FSDP2 or DDP of torch, and with Piper.

torch's levels, as torchtitan sets them up with a pipeline: 0 is DDP around the stage; 2 and 3 are
`fully_shard` of embedding, every layer, norm with head, and the stage, without and with
`reshard_after_forward`. Without a pipeline it is torchtitan's default: all are resharded but norm
with head, which the backward needs first. (torch's pipelining keeps whole gradients until the last
backward, so its level 2 is ZeRO-1 in effect, and it is what our levels 1 and 2 are measured
beside.) Piper's levels are Replicate's, with a region per layer and buckets of half DDP's default:
what a chunk makes and gathers at once follows them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import piper_dynamo as piper
from benchmarks.sides import LossStep, ScheduleStep, Stage, batch_of, loss_fn, torch_schedule
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.strategies import placement
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

BUCKET_MB = 12
DDP_BUCKET_MB = 25  # its default
BESIDE = {0: 0, 1: 2, 2: 2, 3: 3}  # the level of torch that one of ours is measured beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What both sides run.

    Attributes:
        config: Model and pipeline; its batch is that of one replica.
        replicas: Copies of the pipeline; pipeline rank r has the ranks r*replicas and following.
        bucket_mb: Of Piper's buckets.
    """

    config: Config
    replicas: int = 2
    bucket_mb: float = BUCKET_MB

    @property
    def ranks(self) -> int:
        """The size of the world."""
        return self.config.pp * self.replicas

    def strategy(self, zero: int, **options: Any) -> piper.Strategy:
        """Piper's: a region per layer, one Replicate for all."""
        config = self.config
        devices = placement(config.schedule, config.pp, replicas=self.replicas)
        orders, _ = SCHEDULES[config.schedule]
        return piper.Strategy(
            piper.Split({}, num_microbatches=config.microbatches),
            *(piper.Place({"PP": stage}, devices=group) for stage, group in devices.items()),
            piper.Replicate({"PP": "*"}, zero=zero, bucket_mb=self.bucket_mb, **options),
            *orders(devices, config.microbatches),
            regions={f"layers.{i}": {"LAYER": i} for i in range(config.layers)},
        )

    def batch(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a rank is given: its replica's tokens and targets."""
        return batch_of(self.config, rank % self.replicas)


def _sharded(stage: Any, mesh: Any, *, reshard: bool, reshard_last: bool) -> Any:
    """FSDP2 on the units that torchtitan takes for a Llama; norm with head is the last."""
    units: list[Any] = [*stage.layers]
    if stage.embedding is not None:
        units.append(stage.embedding)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    if stage.head is not None:
        last: Any = [stage.norm, stage.head]
        fully_shard(last, mesh=mesh, reshard_after_forward=reshard_last)
    fully_shard(stage, mesh=mesh)  # it has no parameters left
    return stage


class TorchZero(ScheduleStep):
    """One optimizer step with torch's pipelining and DDP (level 0) or FSDP2 (2, 3).

    Its loss is its replica's, on the rank that has it.
    """

    def __init__(self, job: Job, level: int) -> None:
        config = job.config
        mesh = init_device_mesh("cpu", (config.pp, job.replicas), mesh_dim_names=("pp", "dp"))
        number = mesh["pp"].get_local_rank()
        # The pipelines here have a stage per rank.
        stage = Stage(build(config), number, config.stages)
        if level:
            reshard = level == 3
            module: Any = _sharded(stage, mesh["dp"], reshard=reshard, reshard_last=reshard)
        else:
            module = DistributedDataParallel(
                stage, process_group=mesh["dp"].get_group(), bucket_cap_mb=DDP_BUCKET_MB
            )
        self.schedule = torch_schedule(
            config.schedule,
            {number: module},
            config.stages,
            config.microbatches,
            loss_fn,
            mesh["pp"].get_group(),
        )
        self.first, self.last = number == 0, number == config.stages - 1
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=config.lr, foreach=True)


class Ddp(LossStep):
    """One optimizer step with DDP of the whole model, without a pipeline; its replica's loss."""

    def __init__(self, job: Job) -> None:
        self.step = DistributedDataParallel(build(job.config))
        self.optimizer = torch.optim.AdamW(self.step.parameters(), lr=job.config.lr, foreach=True)


class Fsdp(LossStep):
    """One optimizer step with FSDP2 of the whole model, without a pipeline; its replica's loss."""

    def __init__(self, job: Job) -> None:
        mesh = init_device_mesh("cpu", (job.replicas,))
        self.step = _sharded(build(job.config), mesh, reshard=True, reshard_last=False)
        self.optimizer = torch.optim.AdamW(self.step.parameters(), lr=job.config.lr, foreach=True)


class PiperZero(LossStep):
    """One optimizer step with Piper; its loss is that of all replicas."""

    def __init__(self, job: Job, zero: int) -> None:
        batch = job.batch(piper.rank())
        self.step = piper.compile(
            build(job.config), job.strategy(zero), batch, compile=job.config.compile
        )
        self.optimizer = torch.optim.AdamW(
            piper.parameters(self.step), lr=job.config.lr, foreach=True
        )


def mean_over_ranks(loss: float | None) -> float:
    """The mean of the losses of the ranks that have one."""
    found = torch.tensor([loss or 0.0, float(loss is not None)], dtype=torch.float64)
    dist.all_reduce(found)
    return float(found[0] / found[1])
