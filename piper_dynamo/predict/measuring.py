"""Measuring a machine: chunks in this process, links and hosts in processes of their own.

Everything is the median of warm runs. Ranks of the measurement are local processes, with as many
threads as a job's ranks have.

Signature: a plan -> a profile.
"""

import functools
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm, trange

from piper_dynamo import strategies
from piper_dynamo.access import state_of
from piper_dynamo.api import compile as piper_compile
from piper_dynamo.api import plan
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.ir.alias import exchange_of
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.options import Options
from piper_dynamo.predict.links import ROUNDS, WARM, Links, ratios, slowdown_of
from piper_dynamo.predict.profile import ChunkTime, Profile, features_of
from piper_dynamo.runtime.executor import Executor
from piper_dynamo.runtime.launch import launch
from piper_dynamo.runtime.world import rank
from piper_dynamo.strategy import Strategy
from piper_dynamo.values import is_whole

LEAST_RUNS, MOST_RUNS, ENOUGH_S = 7, 50, 0.15
SHARDS = 16  # parameters of a step whose gradients are shards
SHOW_AFTER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A distinct chunk that is being measured.

    Attributes:
        chunk: What is measured.
        once: A call of it; how long it took, in seconds.
    """

    chunk: Chunk
    once: Callable[[], float]

    def time(self, seconds: float) -> ChunkTime:
        """What the profile says of it."""
        features = features_of(self.chunk)
        return ChunkTime(key=self.chunk.key, seconds=seconds, features=features)


def measurable(chunks: Mapping[str, Chunk], mode: str) -> list[Measured]:
    """The distinct chunks, compiled and called until they are warm.

    Chunks whose number of rows depends on values (experts) are left out: the profile's rates say
    what these take.

    Args:
        chunks: By name.
        mode: How they run, "aten" or "inductor".

    Raises:
        PiperError: Some are not on the CPU.
    """
    _refuse_devices(chunks)
    distinct = {
        chunk.key: chunk
        for chunk in chunks.values()
        if not chunk.is_ragged and not any(exchange_of(n) for n in chunk.graph.nodes)
    }
    found = []
    for key, chunk in tqdm(
        distinct.items(), "compiling chunks", leave=False, delay=SHOW_AFTER_S, disable=None
    ):
        function = compile_chunks({key: chunk}, mode)[key]
        one = Measured(chunk=chunk, once=functools.partial(_once, chunk, function))
        for _ in range(WARM):
            one.once()
        found.append(one)
    return found


def _refuse_devices(chunks: Mapping[str, Chunk]) -> None:
    """Of other devices calls return before they are done, and links and hosts are other ones."""
    devices: dict[str, str] = {}
    for name, chunk in chunks.items():
        for spec in (*chunk.inputs, *chunk.outputs):
            if spec is not None and spec.device != "cpu":
                devices.setdefault(spec.device, name)
    if devices:
        raise PiperError(
            format_error(
                "a profile is of a machine whose ranks compute on the CPU",
                {device: f"chunk {name}, among others" for device, name in devices.items()},
                hint="give inputs and a model on the CPU; for other devices, costs from their data "
                "sheet: piper.Costs.roofline(plan.chunks, flops=..., memory_bandwidth=...)",
            )
        )


def measure_chunks(chunks: Mapping[str, Chunk], mode: str) -> tuple[ChunkTime, ...]:
    """What each distinct chunk takes in this process: the median of its calls.

    Args:
        chunks: By name.
        mode: How they run, "aten" or "inductor".
    """
    found = []
    for one in tqdm(
        measurable(chunks, mode), "chunks", leave=False, delay=SHOW_AFTER_S, disable=None
    ):
        took: list[float] = []
        while len(took) < LEAST_RUNS or (sum(took) < ENOUGH_S and len(took) < MOST_RUNS):
            took.append(one.once())
        found.append(one.time(statistics.median(took)))
    return tuple(found)


def _once(chunk: Chunk, function: Callable[[list[Any]], Any]) -> float:
    """The time of a call; each has inputs of its own, since a chunk may write over them."""
    numbers = [node.meta.get("val") for node in chunk.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        given = [
            _filled(spec) if spec is not None else number
            for spec, number in zip(chunk.inputs, numbers, strict=True)
        ]
        start = time.perf_counter()
        function(given)
        return time.perf_counter() - start


def _filled(spec: TensorSpec) -> torch.Tensor:
    """Small random numbers, zeros where these are whole; strides may leave gaps or repeat."""
    reach = [(size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True)]
    storage = torch.zeros(1 + sum(reach), dtype=spec.dtype, device=spec.device)
    if spec.dtype.is_floating_point:
        storage.normal_(std=0.1)
    return storage.as_strided(spec.shape, spec.stride)


def measure_ranks(ranks: int) -> dict[str, Any]:
    """Links and host, between two local processes, and how several share the machine.

    Args:
        ranks: How many processes compute at once.

    Returns:
        Fields of a profile.
    """
    pair: dict[str, Any] = launch(measure_pair, 2)[0]
    if ranks == 1:
        return pair
    slowdown: tuple[float, ...] = launch(_slowdown, ranks)[0]
    return pair | {"slowdown": slowdown}


def measure_pair() -> dict[str, Any]:
    """Links and host, as fields of a profile; both of two ranks call it."""
    links = Links()
    for _ in trange(
        ROUNDS, desc="links", leave=False, delay=SHOW_AFTER_S, disable=None if rank() == 0 else True
    ):
        links.sample()
    return pair_of(links, measure_host())


def pair_of(links: Links, host: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of both."""
    of_links = links.fields()
    return {**of_links, **host, "host": host["host"] | of_links["host"]}


def measure_host() -> dict[str, Any]:
    """What issuing instructions takes, and steps beside their programs; both ranks call it."""
    regions = {f"layers.{stage}": {"PP": stage} for stage in range(2)}
    line = strategies.pipeline(ranks=2, num_microbatches=8, regions=regions)
    host, call = _host(_Tiny(2), line)
    alone: dict[str, Any] = {"schedule": "gpipe", "ranks": 1, "num_microbatches": 1}
    alone["regions"] = {"layers.*": {"PP": 0}}
    whole, sharded = (
        _host(_Tiny(SHARDS), strategies.pipeline(replicas=2, zero=zero, **alone))[1]
        for zero in (0, 1)
    )
    return {"host": host, "call": call, "call_shard": max((sharded - whole) / SHARDS, 0.0)}


def _slowdown() -> tuple[float, ...]:
    """How much longer rank 0 takes while 1, 2, ... ranks work, beside alone."""
    return slowdown_of([ratios() for _ in range(ROUNDS)])


class _Tiny(nn.Module):
    """Layers that compute next to nothing: what a step of them takes is its host's."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(layers))
        for layer in self.layers:
            nn.init.eye_(layer.get_parameter("weight"))  # alike on all ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 2] -> 0-dim loss."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _host(model: nn.Module, strategy: Strategy) -> tuple[dict[str, float], float]:
    """What instructions take this rank to issue, by what they do, and a step beside its program."""
    x = torch.zeros(8, 2)
    step = piper_compile(model, strategy, (x,))
    spent: dict[str, list[float]] = defaultdict(list)
    beside: list[float] = []

    def take(executor: Executor, *rest: Any) -> None:
        marks = executor.marks
        for (_, start), (index, end) in pairwise(marks):
            spent[executor.program.instrs[index].op.value].append(end - start)
        beside.append(marks[-1][1] - marks[0][1])

    state_of(step).recorder = take
    for _ in range(WARM + ROUNDS):
        start = time.perf_counter()
        step(x).backward()
        beside[-1] = time.perf_counter() - start - beside[-1]
    waits = (Op.RUN, Op.WAIT, Op.DRAIN)
    host = {op: statistics.median(took) for op, took in spent.items() if Op(op) not in waits}
    return host, statistics.median(beside[WARM:])


def machine() -> dict[str, str]:
    """What is measured, and with what."""
    from piper_dynamo.version import __version__

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "processor": f"{os.cpu_count()} x {model}",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "piper": __version__,
    }


def measure(chunks: Mapping[str, Chunk], *, compile: str, ranks: int) -> Profile:
    """The profile of this machine, for plans whose chunks are like these.

    Args:
        chunks: By name.
        compile: How they run, "aten" or "inductor".
        ranks: How many processes share the machine; messages are measured between two.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as ranks have
    try:
        times = measure_chunks(chunks, compile)
        return Profile(machine=machine(), compile=compile, chunks=times, **measure_ranks(ranks))
    finally:
        torch.set_num_threads(threads)


def profile(
    model: nn.Module,
    strategy: Strategy | None,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    ranks: int | None = None,
    compile: str | None = None,
) -> Profile:
    """Measure this machine: a model's chunks, messages between processes, and the host.

    Of the CPU: chunks on other devices are refused, since neither they nor the links and the host
    beside them are measured here (`Costs.roofline` says what such hardware does). Takes seconds per
    chunk, and starts processes: under `if __name__ == "__main__":` in a script.
    What else runs on the machine is measured, too.

    Args:
        model: The single-device model.
        strategy: What cuts it into the chunks that are measured; None: it is one.
        inputs: The inputs of one replica, as for `compile`.
        ranks: How many processes will share the machine; None: the strategy's ranks.
        compile: How chunks will run; None: the default of the inputs' device.

    Returns:
        The profile, which `plan.simulate`, `plan.plot` and `piper.search` take as costs.

    Raises:
        PiperError: The model, the strategy or the inputs are refused, are not on the CPU, or
            `ranks` is not at least 1.
    """
    if ranks is not None and (not is_whole(ranks) or ranks < 1):
        raise PiperError(f"profile: ranks is {ranks!r}; give a number of at least 1")
    chosen = Options(compile=compile).compile_for(tree_leaves(inputs))
    found = plan(model, strategy or Strategy(), inputs, compile=chosen)
    return measure(found.chunks, compile=chosen, ranks=ranks or found.world_size)
