"""What a step keeps for its backward beside what its plan says, and what saving costs.

make bench-state
make bench-state ARGS="--only activations --json results.json"

`activations`: resident memory (VmRSS) after every instruction of a step, above what is resident
before the step; its highest value beside `plan.program(rank).rank_program.peak_bytes`, which speaks
of the same moments. What a chunk needs while it runs is not in either. glibc is told to give blocks
of 64 KiB and more back at once, so that its reserves do not count.

`saving`: bytes of a checkpoint's folder beside those of what is saved, and memory while saving
(VmHWM above what is resident before).
"""

import ctypes
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch._dynamo
import torch._inductor.compile_fx
from torch import Tensor

import piper_dynamo as piper
from benchmarks import command
from benchmarks.memory import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, resident
from benchmarks.report import Row
from benchmarks.sides import PiperStep, batch_of
from piper_dynamo._torch_compat import local_tensor
from piper_dynamo.runtime.executor import Runtime
from piper_dynamo.train.config import Config

# One rank: what is to receive a message is planned for, but resident only once it has come.
CONFIG = Config(dim=256, layers=4, heads=8, kv_heads=4, seq=256, batch=32, microbatches=4, pp=1)
# Large beside a call's fixed costs, and steps that last as long as such a model's do.
SAVED = replace(CONFIG, dim=768, layers=8, heads=12, kv_heads=4, seq=128, batch=16, pp=1)
CASES: dict[str, tuple[str | None, bool]] = {
    "float32": (None, False),
    "float32, recompute 0.5": ("0.5", False),
    "float32, recompute full": ("full", False),
    "autocast bfloat16": (None, True),
    "autocast bfloat16, recompute full": ("full", True),
}
WITHIN = 0.05
MIB = 2**-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One rank's step, in bytes.

    Attributes:
        planned: The plan's peak.
        measured: The same moments' highest resident memory, above the step's start.
        inside: The step's highest at any moment (VmHWM), above its start.
    """

    planned: int
    measured: int
    inside: int


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Resident memory at every mark of a recorded step."""
    found: list[int] = []
    mark = Runtime.mark

    def watching(self: Runtime, index: int) -> None:
        found.append(resident("VmRSS"))
        mark(self, index)

    Runtime.mark = watching  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Runtime.mark = mark  # type: ignore[method-assign]


def kept(config: Config, autocast: bool) -> Kept:
    """This rank's figures of a step after two others."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return _kept(config)


def _kept(config: Config) -> Kept:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    libc.mallopt(M_TRIM_THRESHOLD, 64 * 1024)
    step, batch = PiperStep(config), batch_of(config)
    for _ in range(2):
        with piper.record(step.step):
            step(*batch)
    gc.collect()
    libc.malloc_trim(0)
    with piper.record(step.step), _watched() as found:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        step.step(*batch)
        inside = resident("VmHWM")
    planned = piper.explain(step.step).programs[piper.rank()].peak_bytes
    return Kept(planned=planned, measured=max(found) - found[0], inside=inside - found[0])


def activations() -> Iterator[Row]:
    """All forwards before all backwards, by how much is kept and in which precision."""
    config = replace(CONFIG, schedule="gpipe")
    for name, (recompute, autocast) in CASES.items():
        job = functools.partial(kept, replace(config, recompute=recompute), autocast)
        (one,) = piper.launch(job, 1)
        off = one.measured / one.planned - 1
        yield Row(
            section="activations",
            what=name,
            figures=f"planned {one.planned * MIB:.1f} MiB, measured {one.measured * MIB:.1f} MiB "
            f"({off:+.1%}); with what chunks need inside {one.inside * MIB:.1f} MiB",
            bar=f"measured within {WITHIN:.0%} of planned",
            held=abs(off) <= WITHIN,
            data={"planned": one.planned, "measured": one.measured, "inside": one.inside},
        )


def _state_bytes(step: PiperStep) -> int:
    """Of parameters and optimizer state on this rank."""
    tensors: list[Tensor] = [p.detach() for p in piper.parameters(step.step)]
    for entries in step.optimizer.state.values():
        tensors += [value for value in entries.values() if isinstance(value, Tensor)]
    return sum(local_tensor(value).nbytes for value in tensors)


def _saved(folder: str) -> tuple[int, int, int, float]:
    """Bytes of the state and of the folder, memory while saving, seconds."""
    step, batch = PiperStep(SAVED), batch_of(SAVED)
    step(*batch)
    gc.collect()
    piper.save_checkpoint(folder, step.step, step.optimizer)  # imports
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    piper.save_checkpoint(folder, step.step, step.optimizer)
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    written = sum(path.stat().st_size for path in Path(folder).iterdir())
    return _state_bytes(step), written, peak, seconds


def saving() -> Iterator[Row]:
    """One rank that holds all."""
    with tempfile.TemporaryDirectory() as folder:
        ((state, written, peak, seconds),) = piper.launch(functools.partial(_saved, folder), 1)
    for what, nbytes in (("written", written), ("memory while saving", peak)):
        yield Row(
            section="saving",
            what=f"{what}, {state * MIB:.0f} MiB of state",
            figures=f"{nbytes * MIB:.1f} MiB: {nbytes / state:.3f} x   ({seconds:.2f} s)",
            bar="<= 1.20 x the state",
            held=nbytes <= 1.2 * state,
            data={"state": state, "bytes": nbytes, "seconds": seconds},
        )


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {"activations": activations, "saving": saving}


if __name__ == "__main__":
    command.of_sections(SECTIONS)()
