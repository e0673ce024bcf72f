"""Compile time: equal layers are compiled once, however many there are.

Inductor's time is held to a bar. Before it come capturing and planning, which torch's tracing makes
linear in the layers; the rows give both, and their sum.

Each measurement has a process and an inductor cache of its own. Before the clock starts, one small
function is compiled: what inductor does once per cache (its header, its workers) is not the model.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import torch

import piper_dynamo as piper
from benchmarks.report import Row
from benchmarks.sides import batch_of
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

FEW, MANY = 4, 16
BAR = 1.3
SHALLOW, DEEP = 12, 48
DEPTH_BAR = 1.5


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


def _cold(layers: int, *, by_layer: bool) -> tuple[float, float, int]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="piper-cold-") as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": folder, "PIPER_CACHE_DIR": folder}
        with mock.patch.dict(os.environ, own), ProcessPoolExecutor(1, context) as pool:
            return pool.submit(compile_seconds, layers, by_layer=by_layer).result()


def depth() -> Iterator[Row]:
    """The same at the depths of real models: what is compiled, then what comes before it, too."""
    shallow_plan, shallow_compile, _ = _cold(SHALLOW, by_layer=True)
    deep_plan, deep_compile, chunks = _cold(DEEP, by_layer=True)
    for what, deep, shallow in (
        (f"compiled, {chunks} chunks", deep_compile, shallow_compile),
        ("captured and planned", deep_plan, shallow_plan),
        ("all of it", deep_plan + deep_compile, shallow_plan + shallow_compile),
    ):
        is_judged = what != "captured and planned"
        yield Row(
            section="depth",
            what=f"{DEEP} layers against {SHALLOW}, {what}",
            figures=f"{deep:.1f} s against {shallow:.1f} s: ratio {deep / shallow:.2f}",
            bar=f"<= {DEPTH_BAR} x" if is_judged else "",
            held=deep <= DEPTH_BAR * shallow if is_judged else None,
            data={"ours": deep, "theirs": shallow, "unit": "s"}
            | ({"limit": DEPTH_BAR} if is_judged else {}),
        )


def run() -> Iterator[Row]:
    """Few and many layers, each layer a region; then each stage one region."""
    for by_layer in (True, False):
        few_plan, few_compile, few_chunks = _cold(FEW, by_layer=by_layer)
        many_plan, many_compile, many_chunks = _cold(MANY, by_layer=by_layer)
        ratio = many_compile / few_compile
        whole = (many_plan + many_compile) / (few_plan + few_compile)
        yield Row(
            section="inductor",
            what=f"{MANY} layers against {FEW}, {'tagged' if by_layer else 'not tagged'} by layer",
            figures=f"{many_compile:.1f} s ({many_chunks} chunks) against {few_compile:.1f} s "
            f"({few_chunks}): ratio {ratio:.2f} (and to capture and plan {many_plan:.1f} s against "
            f"{few_plan:.1f} s: {whole:.2f} together)",
            bar=f"<= {BAR} x",
            held=ratio <= BAR,
            data={
                **{"ours": many_compile, "theirs": few_compile, "unit": "s", "limit": BAR},
                "few": {"plan_s": few_plan, "compile_s": few_compile, "chunks": few_chunks},
                "many": {"plan_s": many_plan, "compile_s": many_compile, "chunks": many_chunks},
            },
        )
