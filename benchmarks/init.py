"""What building a model of a billion parameters takes on one rank of eight, under deferred_init.

make bench-init
make bench-init ARGS="--only plain --json results.json"

The figure is the high-water mark of resident memory (VmHWM) from the first line that builds the
model to the end of piper.compile, above what was resident after the imports, on the rank that needs
most beyond what it may. What is imported at a first use is, too, before: by planning a model of a
few numbers. Nothing is asked of the allocator. The ranks are real processes that run at once, so
seconds are those of eight processes on this machine's cores.
"""

import functools
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# What compiling imports is imported before the baseline is taken.
import torch
import torch._dynamo
import torch._inductor.compile_fx
from torch import Tensor, nn

import piper_dynamo as piper
from benchmarks import command
from benchmarks.memory import resident
from benchmarks.report import Row
from benchmarks.sides import batch_of
from piper_dynamo._torch_compat import local_tensor
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

RANKS = 8
CONFIG = Config(
    dim=2048, layers=24, heads=16, kv_heads=8, seq=64, batch=16, microbatches=8, pp=RANKS
)
LAYOUTS: dict[str, Config] = {
    "8 stages": CONFIG,
    "2 stages x 4 replicas, ZeRO-3": replace(CONFIG, pp=2, dp=4, microbatches=4, zero=3),
    "8 replicas, ZeRO-3": replace(CONFIG, pp=1, dp=8, microbatches=2, zero=3),
}
SLACK = 100 * 10**6  # bytes above the share and two of the largest tensor


class Tiny(nn.Module):
    """The least that can be planned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[1, 2] -> 0-dim."""
        with piper.annotate("PP", 0):
            loss: Tensor = self.layer(x).square().mean()
        return loss


ROW = torch.ones(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What one rank took.

    Attributes:
        peak: Bytes above the baseline.
        share: Bytes of the parameters that it holds.
        largest: Bytes of the model's largest parameter.
        parameters: How many numbers the whole model has.
        seconds: From the first line of the model to a prepared step.
    """

    peak: int
    share: int
    largest: int
    parameters: int
    seconds: float

    @property
    def allowed(self) -> int:
        """The bar."""
        return self.share + 2 * self.largest + SLACK


def built(make: Callable[[], Any], prepare: Callable[[Any], Any]) -> Built:
    """Build a model and prepare it on this rank.

    Args:
        make: Makes the model.
        prepare: Gives the step of it.
    """
    piper.plan(Tiny(), piper.strategies.pipeline("gpipe", ranks=1, num_microbatches=1), (ROW,))
    gc.collect()
    baseline = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    start = time.perf_counter()
    model = make()
    sizes = [p.nbytes for p in model.parameters()]
    count = sum(p.numel() for p in model.parameters())
    step = prepare(model)
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - baseline
    held = piper.parameters(step) if step is not None else list(model.parameters())
    return Built(
        peak=peak,
        share=sum(local_tensor(p).nbytes for p in held),
        largest=max(sizes),
        parameters=count,
        seconds=seconds,
    )


def _deferred(config: Config) -> Built:
    def make() -> Any:
        with piper.deferred_init():
            return build(config)

    def prepare(model: Any) -> Any:
        batch = [whole.chunk(config.replicas)[0] for whole in batch_of(config)]
        return piper.compile(model, config.strategy(), tuple(batch))

    return built(make, prepare)


def _plain(config: Config) -> Built:
    return built(lambda: build(config), lambda model: None)


def layouts() -> Iterator[Row]:
    """Each layout on eight ranks; the rank whose peak is highest beside what it is allowed."""
    for name, config in LAYOUTS.items():
        ranks = piper.launch(functools.partial(_deferred, config), config.world)
        worst = max(ranks, key=lambda rank: rank.peak / rank.allowed)
        yield Row(
            section="deferred",
            what=name,
            figures=f"peak {worst.peak / 1e6:.0f} MB: share {worst.share / 1e6:.0f} MB, largest "
            f"tensor {worst.largest / 1e6:.0f} MB; {worst.parameters / 1e9:.2f} B parameters; "
            f"{max(rank.seconds for rank in ranks):.0f} s",
            bar=f"<= {worst.allowed / 1e6:.0f} MB (share + 2 x largest + 100 MB)",
            held=worst.peak <= worst.allowed,
            data={"ours": worst.peak, "theirs": worst.allowed, "unit": "bytes", "limit": 1.0}
            | {"share": worst.share, "measured": "once"}
            | {"seconds": [rank.seconds for rank in ranks]},
        )


def plain() -> Iterator[Row]:
    """The same model built as usual, in one process alone."""
    (alone,) = piper.launch(functools.partial(_plain, CONFIG), 1)
    yield Row(
        section="plain",
        what="built as usual, one process alone",
        figures=f"peak {alone.peak / 1e6:.0f} MB, {alone.seconds:.0f} s",
        data={"ours": alone.peak, "unit": "bytes", "seconds": alone.seconds, "measured": "once"},
    )


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {"deferred": layouts, "plain": plain}


if __name__ == "__main__":
    command.of_sections(SECTIONS)()
