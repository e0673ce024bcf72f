"""What saving costs: bytes and memory, and what a save in the background adds to steps.

`saving`: bytes of a checkpoint's folder beside those of what is saved, and memory while saving
(VmHWM above what is resident before).

`beside`: some steps with a save in the background, its call included, against as many without, in
turn in the same processes. As many steps are taken as a save lasts when it is tried first, so that
none of them is without it. Ranks and cores are as they are: on two cores, one rank leaves the save
a core, and two ranks leave it what they do not use.
"""

import functools
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import piper_dynamo as piper
from benchmarks.memory import resident
from benchmarks.paired import Comparison, compare, seconds
from benchmarks.report import Row
from benchmarks.sides import PiperStep, batch_of
from piper_dynamo._torch_compat import local_tensor
from piper_dynamo.checkpoint.save import Saving
from piper_dynamo.train.config import Config

# Large beside a call's fixed costs, and steps that last as long as such a model's do.
CONFIG = Config(dim=768, layers=8, heads=12, kv_heads=4, seq=128, batch=16, microbatches=4, pp=1)
BESIDE = replace(CONFIG, dim=384, layers=6, heads=6, kv_heads=2)
LAYOUTS: dict[str, Config] = {
    "1 rank": replace(BESIDE, schedule="gpipe"),
    "1f1b, 2 ranks": replace(BESIDE, pp=2),
    "ZeRO-3, 2 replicas": replace(BESIDE, dp=2, zero=3, bucket_mb=4.0, batch=8),
}
PAIRS = 9
BAR = 1.05
MIB = 2**-20


def _state_bytes(step: PiperStep) -> int:
    """Of parameters and optimizer state on this rank."""
    tensors: list[Tensor] = [p.detach() for p in piper.parameters(step.step)]
    for entries in step.optimizer.state.values():
        tensors += [value for value in entries.values() if isinstance(value, Tensor)]
    return sum(local_tensor(value).nbytes for value in tensors)


def _saved(folder: str) -> tuple[int, int, int, float]:
    """Bytes of the state and of the folder, memory while saving, seconds."""
    step, batch = PiperStep(CONFIG), batch_of(CONFIG)
    step(*batch)
    gc.collect()
    piper.save_checkpoint(folder, step.step, step.optimizer)  # imports
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    piper.save_checkpoint(folder, step.step, step.optimizer)
    took = time.perf_counter() - start
    peak = resident("VmHWM") - before
    written = sum(path.stat().st_size for path in Path(folder).iterdir())
    return _state_bytes(step), written, peak, took


def saving() -> Iterator[Row]:
    """One rank that holds all."""
    with tempfile.TemporaryDirectory() as folder:
        ((state, written, peak, took),) = piper.launch(functools.partial(_saved, folder), 1)
    for what, nbytes in (("written", written), ("memory while saving", peak)):
        yield Row(
            section="saving",
            what=f"{what}, {state * MIB:.0f} MiB of state",
            figures=f"{nbytes * MIB:.1f} MiB: {nbytes / state:.3f} x   ({took:.2f} s)",
            bar="<= 1.20 x the state",
            held=nbytes <= 1.2 * state,
            data={"ours": nbytes, "theirs": state, "unit": "bytes", "limit": 1.2}
            | {"seconds": took, "measured": "once"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Steps with a save in the background against steps without.

    Attributes:
        steps: How many steps either side has.
        state: Bytes of this rank's state.
        called: Seconds that each call of the save took on the slowest rank.
        took: Seconds of each save, from its call to its end.
        found: Both sides' seconds.
    """

    steps: int
    state: int
    called: list[float]
    took: list[float]
    found: Comparison


def _beside(config: Config, folder: str, pairs: int) -> Beside:
    """One rank's."""
    step = PiperStep(config)
    batch = batch_of(config, piper.data_rank(step.step))
    called: list[float] = []
    took: list[float] = []

    def meet() -> None:
        if config.world > 1:
            dist.barrier()

    def largest(value: float) -> float:
        told = torch.tensor([value], dtype=torch.float64)
        if config.world > 1:
            dist.all_reduce(told, dist.ReduceOp.MAX)
        return told.item()

    def save() -> Saving:
        start = time.perf_counter()
        saving = piper.save_checkpoint_async(folder, step.step, step.optimizer)
        called.append(time.perf_counter() - start)
        return saving

    def steps_beside() -> int:
        """How many steps a save lasts: another is begun as long as any rank still saves."""
        saving, count = save(), 0
        while largest(not saving.done):
            step(*batch)
            count += 1
        return count

    def run(count: int, *, with_save: bool) -> float:
        saving = None

        def steps() -> None:
            nonlocal saving
            if with_save:
                saving = save()
            for _ in range(count):
                step(*batch)

        start = time.perf_counter()
        passed = seconds(steps, meet)
        if saving is not None:
            saving.wait()  # what is left of it falls on nobody
            took.append(time.perf_counter() - start)
        os.sync()
        meet()
        return passed

    step(*batch)
    step(*batch)
    steps_beside()  # imports
    count = max(steps_beside(), 1)
    called.clear()
    found = compare(
        lambda: run(count, with_save=True),
        lambda: run(count, with_save=False),
        pairs=pairs,
        show="beside" if piper.rank() == 0 else None,
    )
    return Beside(steps=count, state=_state_bytes(step), called=called, took=took, found=found)


def beside(pairs: int) -> Iterator[Row]:
    """A save in the background beside steps; rank 0's times, which are those of the slowest."""
    for name, config in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            job = functools.partial(_beside, config, folder, pairs)
            one, *_ = ranks = piper.launch(job, config.world)
        state = max(rank.state for rank in ranks)
        yield Row(
            section="beside",
            what=f"{name}, {state * MIB:.0f} MiB of state per rank, {one.steps} steps",
            figures=f"{one.found.text()}   call {statistics.median(one.called) * 1e3:.0f} ms, "
            f"saved after {statistics.median(one.took):.2f} s",
            bar=f"<= {BAR:.2f} x steps without a save",
            held=one.found.holds(BAR),
            data=one.found.figures(limit=BAR)
            | {"called": one.called, "took": one.took, "needed": PAIRS},
        )
