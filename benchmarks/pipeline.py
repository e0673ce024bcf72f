"""Step time beside `torch.distributed.pipelining`: same model, data, optimizer, threads and run.

python benchmarks/pipeline.py [--schedules one_f_one_b,gpipe] [--compile aten] [--pairs 15]
"""

import functools
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import piper_dynamo as piper
from benchmarks.paired import Comparison, compare, machine, table
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import Llama, build

TORCH = {
    "gpipe": ScheduleGPipe,
    "one_f_one_b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Stage(nn.Module):
    """The layers of one pipeline stage, as torch's pipelining wants them."""

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
        return self.head(self.norm(x)) if self.head is not None else x


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, as in the model's own forward."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchStep:
    """One optimizer step with torch's pipelining."""

    def __init__(self, config: Config, *, compiled: bool) -> None:
        rank = dist.get_rank()
        model = build(config)
        mine = [s for s, ranks in config.placement().items() if ranks == [rank]]
        modules = [Stage(model, s, config.stages) for s in mine]
        run = [torch.compile(m) if compiled else m for m in modules]
        stages = [
            PipelineStage(m, s, config.stages, torch.device("cpu"))
            for m, s in zip(run, mine, strict=True)
        ]
        kind = TORCH[config.schedule]
        given: Any = stages if len(stages) > 1 else stages[0]
        self.schedule = kind(given, config.microbatches, loss_fn=loss_fn)
        self.first, self.last = 0 in mine, config.stages - 1 in mine
        parameters = [p for m in modules for p in m.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=config.lr, foreach=True)

    def __call__(self, tokens: Tensor, targets: Tensor) -> float | None:
        """The loss, on the rank that has it."""
        losses: list[Tensor] = []
        args = (tokens,) if self.first else ()
        kwargs: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*args, **kwargs)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(x.item() for x in losses) / len(losses) if losses else None


class PiperStep:
    """One optimizer step with Piper."""

    def __init__(self, config: Config, tokens: Tensor, targets: Tensor) -> None:
        self.step = piper.compile(
            build(config), config.strategy(), (tokens, targets), compile=config.compile
        )
        self.optimizer = torch.optim.AdamW(piper.parameters(self.step), lr=config.lr, foreach=True)

    def __call__(self, tokens: Tensor, targets: Tensor) -> float:
        """The loss."""
        loss = self.step(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def measure(config: Config, pairs: int) -> Comparison | None:
    """Both variants on every rank; rank 0's times (the ranks meet before each)."""
    generator = torch.Generator().manual_seed(0)
    size = (config.batch, config.seq)
    tokens = torch.randint(0, 256, size, generator=generator)
    targets = torch.randint(0, 256, size, generator=generator)
    ours = PiperStep(config, tokens, targets)
    theirs = TorchStep(config, compiled=config.compile == "inductor")
    for _ in range(2):
        mine, other = ours(tokens, targets), theirs(tokens, targets)
        if other is not None and abs(mine - other) > 1e-3 * abs(other):
            raise AssertionError(f"the losses differ: {mine} and {other}")

    def one(step: Any) -> None:
        step(tokens, targets)
        dist.barrier()

    return compare(lambda: one(ours), lambda: one(theirs), pairs=pairs, before=dist.barrier)


@click.command()
@click.option("--schedules", default="gpipe,one_f_one_b,interleaved_1f1b,zbv,dualpipev")
@click.option(
    "--compile", "mode", default="aten", help="aten against eager, inductor against compiled"
)
@click.option("--pairs", default=15)
@click.option("--dim", default=512)
@click.option("--layers", default=8)
@click.option("--seq", default=256)
def main(schedules: str, mode: str, pairs: int, dim: int, layers: int, seq: int) -> None:
    """Print step times beside torch's, two ranks with one thread each."""
    rows = []
    for schedule in schedules.split(","):
        config = Config(
            schedule=schedule,
            compile=mode,
            dim=dim,
            layers=layers,
            heads=8,
            kv_heads=4,
            seq=seq,
            batch=16,
            microbatches=8,
        )
        found = piper.launch(functools.partial(measure, config, pairs), ranks=2)[0]
        rows.append((schedule, str(found), "held" if found.holds(1.0) else "not held"))
        click.echo(table(rows[-1:]))
    click.echo(machine())


if __name__ == "__main__":
    main()
