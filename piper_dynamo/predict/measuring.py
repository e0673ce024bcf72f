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
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm, trange

from piper_dynamo import strategies
from piper_dynamo.access import state_of
from piper_dynamo.api import compile as piper_compile
from piper_dynamo.api import plan
from piper_dynamo.costs import sent_bytes
from piper_dynamo.errors import PiperError
from piper_dynamo.ir.alias import exchange_of
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.options import Options
from piper_dynamo.predict.profile import ChunkTime, Profile, features_of
from piper_dynamo.runtime.comm import TorchCommunicator
from piper_dynamo.runtime.executor import Executor
from piper_dynamo.runtime.launch import launch
from piper_dynamo.runtime.world import communicator, rank, world_size
from piper_dynamo.strategy import Strategy
from piper_dynamo.values import is_whole

WARM, LEAST_RUNS, MOST_RUNS, ENOUGH_S = 2, 7, 50, 0.15
SIZES = (2**8, 2**16, 2**18, 2**20, 2**22)  # bytes of messages
VALUES = 65  # of a collective with many
SHARDS = 16  # parameters of a step whose gradients are shards
ROUNDS = 15
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
    """
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
    links = _links()
    regions = {f"layers.{stage}": {"PP": stage} for stage in range(2)}
    line = strategies.pipeline(ranks=2, num_microbatches=8, regions=regions)
    host, call = _host(_Tiny(2), line)
    alone: dict[str, Any] = {"schedule": "gpipe", "ranks": 1, "num_microbatches": 1}
    alone["regions"] = {"layers.*": {"PP": 0}}
    whole, sharded = (
        _host(_Tiny(SHARDS), strategies.pipeline(replicas=2, zero=zero, **alone))[1]
        for zero in (0, 1)
    )
    per_shard = max((sharded - whole) / SHARDS, 0.0)
    return links | {"host": host | links["host"], "call": call, "call_shard": per_shard}


def _links() -> dict[str, Any]:
    """Fixed cost and bandwidth of messages, and what collectives take beside them."""
    comm = communicator(60.0)
    assert isinstance(comm, TorchCommunicator)
    group = ("profile", (0, 1))
    comm.prepare_groups([group])
    there, back, reduced = [], [], []
    for nbytes in SIZES:
        value = torch.zeros(nbytes // 4)
        dist.barrier()
        there.append(_median(functools.partial(_round_trip, comm, value)) / 2)
        back.append(sent_bytes(Kind.ALL_REDUCE, [TensorSpec.of(value)], 2))
        reduced.append(_median(functools.partial(_all_reduce, comm, [value], group)))
    small = [torch.zeros(SIZES[0] // 4) for _ in range(VALUES)]
    many = _median(functools.partial(_all_reduce, comm, small, group))
    per_value = max((many - reduced[0]) / (VALUES - 1), 0.0)
    alpha, per_byte = _line(SIZES, there)
    start, per_reduced = _line(back, reduced)
    return {
        "alpha": alpha,
        "bandwidth": 2 / (per_byte + per_reduced),
        "skew": max(start - alpha - per_value, 0.0),
        "per_value": per_value,
        **_issuing(comm, group),
    }


def _issuing(comm: TorchCommunicator, group: Any) -> dict[str, dict[str, float]]:
    """What transfers take of a rank that computes on: each, each value, each byte.

    A transfer costs processor time until it is over, not only where it is issued: messages are
    copied and summed by threads of the rank. So what it takes is how much longer the rank computes
    while it is under way.
    """
    large, few = SIZES[-1] // 4, SIZES[0] // 4
    collectives = ((Op.ALL_REDUCE, 1, 1), (Op.ALL_GATHER, 1, 2), (Op.REDUCE_SCATTER, 2, 1))
    issued: dict[Op, list[float]] = defaultdict(list)
    longer: dict[tuple[Op, int, int], list[float]] = defaultdict(list)
    rounds = trange(
        WARM + ROUNDS,
        desc="transfers",
        leave=False,
        delay=SHOW_AFTER_S,
        disable=None if comm.rank == 0 else True,
    )
    for _ in rounds:  # all in turn: what else the machine does slows a round of each
        alone = _work_of(2)
        for op, given, come in collectives:
            for count, size in ((1, few), (VALUES, few), (1, large)):
                values = [torch.zeros(given * size) for _ in range(count)]
                likes = [torch.zeros(come * size) for _ in range(count)]
                dist.barrier()
                begin = time.perf_counter()
                handle = comm.start_collective(op, values, group, likes)
                if count == 1 and size == few:
                    issued[op].append(time.perf_counter() - begin)
                _work()
                comm.wait_all(handle)
                longer[op, count, size].append(time.perf_counter() - begin - alone)
        for op, source in ((Op.SEND, 0), (Op.POST, 1)):  # as rank 0 sees it
            for size in (few, large):
                dist.barrier()
                took = _while_one_sends(comm, source, torch.zeros(size))
                longer[op, 1, size].append(took - alone)
    found: dict[str, dict[str, float]] = {"host": {}, "host_value": {}, "host_byte": {}}

    def extra(op: Op, count: int, size: int) -> float:
        more, least = longer[op, count, size][WARM:], longer[op, 1, few][WARM:]
        return max(statistics.median(more) - statistics.median(least), 0.0)

    for op, _, come in collectives:
        found["host"][op.value] = statistics.median(issued[op][WARM:])
        found["host_value"][op.value] = extra(op, VALUES, few) / (VALUES - 1)
        found["host_byte"][op.value] = extra(op, 1, large) / (4 * come * (large - few))
    for op in (Op.SEND, Op.POST):
        found["host_byte"][op.value] = extra(op, 1, large) / (4 * (large - few))
    one, other = torch.zeros(large), torch.zeros(large)
    found["host_byte"][Op.ADD.value] = _median(lambda: one + other) / one.nbytes
    found["host_byte"][Op.ACCUMULATE.value] = _median(lambda: one.add_(other)) / one.nbytes
    return found


def _while_one_sends(comm: TorchCommunicator, source: int, value: torch.Tensor) -> float:
    """How long this rank computes, and waits, while a message goes from `source` to the other."""
    begin = time.perf_counter()
    if comm.rank == source:
        comm.send(value, 1 - source, 0)
        _work()
        comm.drain(1 - source, 0)
    else:
        handle = comm.post(source, 0, value)
        _work()
        comm.wait(handle)
    return time.perf_counter() - begin


def _round_trip(comm: TorchCommunicator, value: torch.Tensor) -> None:
    other = 1 - comm.rank
    handle = comm.post(other, 0, value)
    if comm.rank == 0:
        comm.send(value, other, 0)
    got = comm.wait(handle)
    if comm.rank == 1:
        comm.send(got, other, 0)
    comm.drain(other, 0)


def _all_reduce(comm: TorchCommunicator, values: Sequence[torch.Tensor], group: Any) -> None:
    comm.wait_all(comm.start_collective(Op.ALL_REDUCE, values, group, values))


def _median(call: Callable[[], Any]) -> float:
    for _ in range(WARM):
        call()
    took = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def _line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope: of the smallest size, and of the two largest."""
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return seconds[0], max(slope, 1e-15)


def _slowdown() -> tuple[float, ...]:
    """How much longer rank 0 takes while 1, 2, ... ranks work, beside alone."""
    return slowdown_of([ratios() for _ in range(ROUNDS)])


def slowdown_of(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """A profile's slowdown from `ratios` of some rounds."""
    found = (statistics.median(column) for column in zip(*rounds, strict=True))
    return (1.0, *(max(ratio, 1.0) for ratio in found))


def ratios() -> list[float]:
    """How much longer rank 0 takes while 2, 3, ... ranks work, beside alone; on every rank.

    Alone and together one after the other: what else the machine does in between slows one round,
    and not one side.
    """
    alone = _work_of(1)
    together = [_work_of(count) for count in range(2, world_size() + 1)]  # begins with a barrier
    return [each / alone if alone else 1.0 for each in together]


def _work_of(count: int) -> float:
    """What rank 0 takes for a fixed mixture of products and traffic while `count` ranks do it."""
    dist.barrier()
    if rank() >= count:
        return 0.0
    start = time.perf_counter()
    _work()
    return time.perf_counter() - start


def _work() -> None:
    weight, rows = torch.zeros(256, 256), torch.zeros(512, 256)
    for _ in range(24):
        hidden = torch.nn.functional.silu(rows @ weight)
        torch.softmax(hidden.add_(rows), -1)


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

    Takes seconds per chunk, and starts processes: under `if __name__ == "__main__":` in a script.
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
        PiperError: The model, the strategy or the inputs are refused, or `ranks` is not at least 1.
    """
    if ranks is not None and (not is_whole(ranks) or ranks < 1):
        raise PiperError(f"profile: ranks is {ranks!r}; give a number of at least 1")
    chosen = Options(compile=compile).compile_for(tree_leaves(inputs))
    found = plan(model, strategy or Strategy(), inputs, compile=chosen)
    return measure(found.chunks, compile=chosen, ranks=ranks or found.world_size)
