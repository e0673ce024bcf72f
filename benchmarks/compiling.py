"""Compile time: equal layers are compiled once, however many there are.

Inductor's time is held to a bar. Before it come capturing and planning, which torch's tracing makes
linear in the layers; the rows give both, and their sum.

Each measurement has a process and an inductor cache of its own. Before the clock starts, one small
function is compiled: what inductor does once per cache (its header, its workers) is not the model.
"""

import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from unittest import mock

import torch

import piper_dynamo as piper
from benchmarks.paired import Comparison, compare
from benchmarks.report import Row
from benchmarks.sides import batch_of
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

FEW, MANY = 4, 16
BAR = 1.3
SHALLOW, DEEP = 12, 48
DEPTH_BAR = 1.5
PAIRS = 3


def compile_seconds(layers: int, *, by_layer: bool) -> tuple[float, float, int]:
    """Seconds to capture and plan, and to compile both ranks' chunks; how many chunks there are.

    Args:
        layers: How many layers the model has, over two stages.
        by_layer: Tag each layer, so that it is a region of its own.
    """
    torch.compile(lambda x: (x * 2).sin())(torch.ones(64))
    config = Config(layers=layers, dim=64, seq=32, batch=4, microbatches=4)
    regions = {f"layers.{i}": {"LAYER": i} for i in range(layers)} if by_layer else None
    strategy = piper.strategies.pipeline(
        config.schedule, ranks=2, num_microbatches=config.microbatches, regions=regions
    )
    model, batch = build(config), batch_of(config)
    start = time.perf_counter()
    plan = piper.plan(model, strategy, batch, world_size=2, compile="inductor")
    planned = time.perf_counter()
    wanted = {name for program in plan.programs for name, _ in program.chunks}
    compile_chunks({n: c for n, c in plan.chunks.items() if n in wanted}, "inductor")
    ended = time.perf_counter()
    return planned - start, ended - planned, len({plan.chunks[name].key for name in wanted})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cold:
    """Fresh processes with empty caches.

    Attributes:
        chunks: How many were compiled.
        plan_s: Seconds to capture and plan, of each process.
        compile_s: Seconds to compile.
    """

    chunks: list[int] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    compile_s: list[float] = field(default_factory=list)

    def measure(self, layers: int, *, by_layer: bool) -> float:
        """One more; the seconds to compile."""
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory(prefix="piper-cold-") as folder:
            own = {"TORCHINDUCTOR_CACHE_DIR": folder, "PIPER_CACHE_DIR": folder}
            with mock.patch.dict(os.environ, own), ProcessPoolExecutor(1, context) as pool:
                one = pool.submit(compile_seconds, layers, by_layer=by_layer).result()
        plan_s, compile_s, chunks = one
        self.plan_s.append(plan_s)
        self.compile_s.append(compile_s)
        self.chunks.append(chunks)
        return compile_s

    @property
    def whole_s(self) -> list[float]:
        """Seconds of both."""
        return [plan + compiled for plan, compiled in zip(self.plan_s, self.compile_s, strict=True)]


def _deep_beside_shallow(
    deep: int, shallow: int, *, by_layer: bool, pairs: int
) -> tuple[Cold, Cold]:
    """Both depths, in turn."""
    sides = Cold(), Cold()
    compare(
        functools.partial(sides[0].measure, deep, by_layer=by_layer),
        functools.partial(sides[1].measure, shallow, by_layer=by_layer),
        pairs=pairs,
        show=f"{deep} layers beside {shallow}",
    )
    return sides


def _row(
    section: str, what: str, seconds: tuple[list[float], list[float]], bar: float | None
) -> Row:
    found = Comparison(first=tuple(seconds[0]), second=tuple(seconds[1]))
    return Row(
        section=section,
        what=what,
        figures=found.text(1.0, "s"),
        bar="" if bar is None else f"<= {bar} x",
        held=None if bar is None else found.holds(bar),
        data=found.figures(limit=bar) | {"needed": PAIRS},
    )


def depth(pairs: int) -> Iterator[Row]:
    """At the depths of real models: what is compiled, then what comes before it, too."""
    deep, shallow = _deep_beside_shallow(DEEP, SHALLOW, by_layer=True, pairs=pairs)
    what = f"{DEEP} layers against {SHALLOW}"
    compiled = f"{what}, compiled, {deep.chunks[0]} chunks"
    yield _row("depth", compiled, (deep.compile_s, shallow.compile_s), DEPTH_BAR)
    yield _row("depth", f"{what}, captured and planned", (deep.plan_s, shallow.plan_s), None)
    yield _row("depth", f"{what}, all of it", (deep.whole_s, shallow.whole_s), DEPTH_BAR)


def run(pairs: int) -> Iterator[Row]:
    """Few and many layers, each layer a region; then each stage one region."""
    for by_layer in (True, False):
        many, few = _deep_beside_shallow(MANY, FEW, by_layer=by_layer, pairs=pairs)
        what = f"{MANY} layers against {FEW}, {'tagged' if by_layer else 'not tagged'} by layer"
        compiled = f"{what}, {many.chunks[0]} chunks against {few.chunks[0]}"
        yield _row("inductor", compiled, (many.compile_s, few.compile_s), BAR)
        yield _row(
            "inductor", f"{what}, with capturing and planning", (many.whole_s, few.whole_s), None
        )
