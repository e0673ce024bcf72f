"""The two sides of a comparison: one optimizer step with torch's pipelining, and with Piper."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import piper_dynamo as piper
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.strategies import placement
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import Llama, build

# torch has no ZB-H1; its ZB1P with one stage per rank is the nearest. What it calls looped BFS is
# gpipe on a loop.
TORCH = {
    "gpipe": ScheduleGPipe,
    "looped_bfs": ScheduleLoopedBFS,
    "one_f_one_b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
SPLIT = ("zb_h1", "zbv", "dualpipev")  # torch's that run a backward in two parts


def built(schedules: Iterable[str]) -> list[str]:
    """Those that Piper has by the same name, which jobs of the example model can take."""
    return [name for name in schedules if name in SCHEDULES]


def ours_of(schedule: str, ranks: int) -> tuple[str, int | None]:
    """The same order by Piper's name, and on how many stages; None: the schedule's own number."""
    return ("gpipe", 2 * ranks) if schedule == "looped_bfs" else (schedule, None)


def torch_schedule(
    name: str,
    modules: dict[int, nn.Module],
    stages: int,
    microbatches: int,
    loss_fn: Any,
    group: Any = None,
) -> Any:
    """A schedule of torch over this rank's stages, by stage number; `group`: its pipeline."""
    device = torch.device("cpu")
    made = [PipelineStage(m, s, stages, device, group=group) for s, m in modules.items()]
    kind: Any = TORCH[name]
    single = kind in (ScheduleGPipe, Schedule1F1B)
    return kind(made[0] if single else made, microbatches, loss_fn=loss_fn)


def stages_of(schedule: str, ranks: int, rank: int) -> tuple[list[int], int]:
    """The stages of one rank, and how many there are; the same for both sides."""
    name, count = ours_of(schedule, ranks)
    placed = placement(name, ranks, count)
    return [s for s, group in placed.items() if group == [rank]], len(placed)


class Stage(nn.Module):
    """The layers of one pipeline stage, as torch's pipelining wants them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Llama, stage: int, stages: int) -> None:
        super().__init__()
        self.embedding = model.embedding if stage == 0 else None
        self.layers = nn.ModuleList(
            layer for layer, s in zip(model.layers, model.stage_of, strict=True) if s == stage
        )
        last = stage == stages - 1
        self.norm = model.norm if last else None
        self.head = model.head if last else None
        self.register_buffer("cos", model.cos)
        self.register_buffer("sin", model.sin)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden values -> hidden values or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, as in the model's own forward."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(config: Config, replica: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets, the same on every rank of a replica."""
    generator = torch.Generator().manual_seed(replica)
    size = (config.batch, config.seq)
    return (
        torch.randint(0, 256, size, generator=generator),
        torch.randint(0, 256, size, generator=generator),
    )


class ScheduleStep:
    """One optimizer step of a schedule of torch's pipelining; the constructor says of which."""

    schedule: Any
    first: bool
    last: bool
    optimizer: torch.optim.Optimizer

    def __call__(self, tokens: Tensor, targets: Tensor) -> float | None:
        """The loss, on the rank that has it."""
        losses: list[Tensor] = []
        args = (tokens,) if self.first else ()
        kwargs: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*args, **kwargs, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(x.item() for x in losses) / len(losses) if losses else None


class LossStep:
    """One optimizer step of what returns its loss; the constructor says of what."""

    step: Any
    optimizer: torch.optim.Optimizer

    def __call__(self, tokens: Tensor, targets: Tensor) -> float:
        """The loss."""
        loss = self.step(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


class TorchStep(ScheduleStep):
    """One optimizer step with torch's pipelining."""

    def __init__(self, config: Config, schedule: str | None = None) -> None:
        """`schedule`: by torch's name, where the config's is ours with as many stages."""
        schedule = schedule or config.schedule
        mine, stages = stages_of(schedule, config.pp, dist.get_rank())
        model = build(config)
        modules: dict[int, nn.Module] = {s: Stage(model, s, stages) for s in mine}
        parameters = [p for m in modules.values() for p in m.parameters()]
        if config.compile == "inductor":
            # A backward in two parts goes over a stage's graph twice; torch's error names this.
            functorch_config.donated_buffer = schedule not in SPLIT
            for module in modules.values():
                module.compile()
        self.schedule = torch_schedule(schedule, modules, stages, config.microbatches, loss_fn)
        self.first, self.last = 0 in mine, stages - 1 in mine
        self.optimizer = torch.optim.AdamW(parameters, lr=config.lr, foreach=True)


class PiperStep(LossStep):
    """One optimizer step with Piper."""

    def __init__(self, config: Config, schedule: str | None = None) -> None:
        """`schedule`: by torch's name, where the config's is ours with as many stages."""
        strategy = config.strategy()
        if schedule is not None:
            name, stages = ours_of(schedule, config.pp)
            strategy = piper.strategies.pipeline(
                name, ranks=config.pp, num_microbatches=config.microbatches, stages=stages
            )
        self.step = piper.compile(build(config), strategy, batch_of(config), compile=config.compile)
        self.optimizer = torch.optim.AdamW(piper.parameters(self.step), lr=config.lr, foreach=True)
