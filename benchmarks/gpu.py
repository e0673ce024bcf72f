"""One GPU: whether programs on streams are right there, and what they cost.

    python benchmarks/gpu.py

Needs a checkout, torch and Triton; no network, no installation. Several ranks share the GPU as
threads of this process, each with streams of its own; NCCL is tried with the one rank that there
is. NCCL between GPUs is not verified here.

`--rehearse` runs what can run on a CPU, in tiny sizes, to see that this file works; it measures
nothing.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # a bare checkout

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

import piper_dynamo as piper
from benchmarks.paired import compare
from benchmarks.report import Row, machine, ratio_row, table
from piper_dynamo.binding import OnStreams, executor_of
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import Op
from piper_dynamo.kernels import pack, rows
from piper_dynamo.lowering.streams import on_streams
from piper_dynamo.runtime.device import CudaDevice, HostDevice
from piper_dynamo.runtime.executor import BoundChunk
from piper_dynamo.runtime.local import LocalCommunicator, LocalWorld
from piper_dynamo.runtime.nccl import start_group
from piper_dynamo.timeline import INSIDE, STEP
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

STEP_BAR, MEMORY_BAR, CHUNKS_BAR, GRAPH_BAR, PEAK_BAR, HOST_BAR_US = 1.03, 1.05, 1.03, 0.9, 0.05, 10
NEAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how large.

    Attributes:
        device: A GPU; the CPU in a rehearsal.
        compile: How chunks run where speed is measured.
        pairs: Paired measurements.
        dim: Width of the measured model.
        layers: Its layers.
        seq: Tokens of a sequence.
        batch: Sequences of a step.
    """

    device: torch.device
    compile: str = "inductor"
    pairs: int = 15
    dim: int = 2048
    layers: int = 16
    seq: int = 2048
    batch: int = 8

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """How long a call takes until the device has done it."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def config(self) -> Config:
        """The measured model: Llama-style, a billion parameters in full size."""
        return Config(
            dim=self.dim,
            layers=self.layers,
            heads=max(self.dim // 128, 4),
            kv_heads=4,
            seq=self.seq,
            batch=self.batch,
            ranks=1,
            pp=1,
            microbatches=1,
        )

    def model(self) -> nn.Module:
        """In bfloat16 on a GPU."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return build(self.config(), stages=1).to(self.device, dtype)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        shape = (self.batch, self.seq)
        draw = torch.Generator().manual_seed(0)
        found = torch.randint(0, 256, shape, generator=draw).to(self.device)
        return found, found.roll(-1, 1)


class Stack(nn.Module):
    """Small layers in stages, with experts or without."""

    def __init__(self, stages: int, width: int = 64) -> None:
        super().__init__()
        self.stages = stages
        draw = torch.Generator().manual_seed(1)
        self.w = nn.ParameterList(
            nn.Parameter(torch.randn(width, width, generator=draw) / width**0.5) for _ in range(4)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean square error of the last stage."""
        for layer, w in enumerate(self.w):
            with piper.annotate("PP", layer * self.stages // 4):
                x = torch.tanh(x @ w)
        with piper.annotate("PP", self.stages - 1):
            return (x - y).square().mean()


# Sections


def schedules(bench: Bench) -> Iterator[Row]:
    """Every built-in schedule, all ranks on this device, beside one process: gradients."""
    for dtype in NEAR:
        for name in piper.schedules.SCHEDULES:
            worst = schedule_error(bench, name, dtype)
            yield Row(
                section="schedules",
                what=f"{name}, {str(dtype).removeprefix('torch.')}",
                figures=f"off by {worst:.2g} of the largest gradient",
                bar=f"<= {NEAR[dtype]:g}",
                held=worst <= NEAR[dtype],
                data={"error": worst},
            )


def schedule_error(bench: Bench, name: str, dtype: torch.dtype) -> float:
    """The largest difference of a gradient from one process's, over the largest gradient."""
    placement = piper.strategies.placement(name, 2)
    stages, microbatches = len(placement), 8
    draw = torch.Generator().manual_seed(2)
    batch = [torch.randn(16, 64, generator=draw).to(bench.device, dtype) for _ in range(2)]
    want = Stack(stages).to(bench.device, dtype)
    want(*batch).backward()
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=microbatches),
        *piper.strategies.places(name, placement, microbatches),
        *getattr(piper.schedules, name)(placement, microbatches),
    )

    def rank() -> dict[str, Tensor]:
        stream = torch.cuda.Stream() if bench.device.type == "cuda" else None
        with torch.cuda.stream(stream):
            model = Stack(stages).to(bench.device, dtype)
            step = piper.compile(model, strategy, batch, compile="aten")
            step(*batch).backward()
            found = {n: p.grad for n, p in piper.named_parameters(step) if p.grad is not None}
        bench.wait()
        return found

    torch._dynamo.reset()
    worst, names = 0.0, set()
    largest = max(float(p.grad.abs().max()) for p in want.parameters())
    for found in piper.launch(rank, 2, engine="inprocess"):
        for key, grad in found.items():
            if grad.numel():
                names.add(key)
                other = want.get_parameter(key).grad
                worst = max(worst, float((grad.float() - other.float()).abs().max()) / largest)
    assert names == {n for n, _ in want.named_parameters()}, f"{name}: gradients are missing"
    return worst


def kernels(bench: Bench) -> Iterator[Row]:
    """Triton kernels beside their references: values and time."""
    big = 4096 if bench.device.type == "cuda" else 64
    tokens = torch.randn(big, 1024, device=bench.device)
    order = torch.randperm(2 * big, device=bench.device)
    weights = torch.rand(big, 2, device=bench.device)
    made = torch.randn(2 * big, 1024, device=bench.device)
    values = [torch.randn(1, 1000 + 13 * k, device=bench.device) for k in range(64)]
    flat = torch.empty(1, sum(v.shape[1] for v in values), device=bench.device)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "permute": (
            lambda: rows.permute(tokens, order, 2),
            lambda: rows.permute_reference(tokens, order, 2),
        ),
        "combine": (
            lambda: rows.combine(made, order, weights),
            lambda: rows.combine_reference(made, order, weights),
        ),
        "pack": (lambda: pack.pack(values), lambda: pack.pack_reference(values, flat, 1.0) or flat),
    }
    for name, (kernel, reference) in pairs.items():
        torch.testing.assert_close(kernel(), reference(), rtol=1e-5, atol=1e-5)
        found = compare(
            lambda k=kernel: bench.seconds(k),
            lambda r=reference: bench.seconds(r),
            pairs=bench.pairs,
        )
        yield ratio_row("kernels", name, found, 1.0, "torch")


def whole_step(bench: Bench) -> Iterator[Row]:
    """A step of one rank beside `torch.compile`'s default, and eight microbatches beside one."""
    batch = bench.tokens()
    sides = {
        "inductor": torch.compile(bench.model(), backend="inductor"),
        "piper": compiled(bench, 1),
        "8 microbatches": compiled(bench, min(8, bench.batch)),
    }
    peaks = {}
    for name, side in sides.items():
        train(side, batch)
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
            train(side, batch)
            bench.wait()
            peaks[name] = torch.cuda.max_memory_allocated(bench.device)
    for first, second, bar in (
        ("piper", "inductor", STEP_BAR),
        ("8 microbatches", "piper", CHUNKS_BAR),
    ):
        found = compare(
            lambda a=first: bench.seconds(lambda: train(sides[a], batch)),
            lambda b=second: bench.seconds(lambda: train(sides[b], batch)),
            pairs=bench.pairs,
        )
        yield ratio_row("step", first, found, bar, second)
    if peaks:
        ratio = peaks["piper"] / peaks["inductor"]
        yield Row(
            section="step",
            what="peak memory",
            figures=f"ratio {ratio:.3f}",
            bar=f"<= {MEMORY_BAR} x inductor",
            held=ratio <= MEMORY_BAR,
            data=dict(peaks),
        )


def compiled(bench: Bench, microbatches: int, **options: Any) -> Any:
    """The measured model as a step of one rank."""
    strategy = piper.Strategy(piper.Split({}, num_microbatches=microbatches))
    options = {"compile": bench.compile} | options
    torch._dynamo.reset()
    return piper.compile(bench.model(), strategy, bench.tokens(), **options)


def train(side: Any, batch: tuple[Tensor, Tensor]) -> None:
    """Forward and backward; gradients are dropped."""
    result = side(*batch)
    (result if isinstance(result, Tensor) else result[0]).backward()
    for parameter in getattr(side, "_orig_mod", side).parameters():
        parameter.grad = None


def graphs(bench: Bench) -> Iterator[Row]:
    """What replaying a recorded step leaves of the host's time."""
    batch = bench.tokens()
    host = {}
    for graph in (False, True):
        step = compiled(bench, min(4, bench.batch), graph=graph)
        for _ in range(3):
            train(step, batch)
        times = []
        for _ in range(bench.pairs):
            bench.wait()
            start = time.perf_counter()
            step(*batch)
            times.append(time.perf_counter() - start)  # the host's alone
        host[graph] = sorted(times)[len(times) // 2]
    saved = 1 - host[True] / host[False]
    yield Row(
        section="graph",
        what="host time of a step",
        figures=f"{saved:.0%} less",
        bar=f">= {GRAPH_BAR:.0%}",
        held=saved >= GRAPH_BAR,
        data={"issued_s": host[False], "replayed_s": host[True]},
    )


class Nothing:
    """Meets nobody: what is left of a message is what the host does for it."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def send(self, stream: Any, value: Any, target: int, message: int) -> None:
        """Put nothing on the stream."""
        self.device.put(stream, _pass, value)

    def receive(self, stream: Any, into: Any, source: int, message: int) -> None:
        """Put nothing on the stream."""
        self.device.put(stream, _pass, into)

    def collective(self, stream: Any, op: Op, values: Any, group: Any, into: Any) -> None:
        """Put nothing on the stream."""
        self.device.put(stream, _pass, values)

    def rows(self, stream: Any, value: Any, group: Any, into: Any, *counts: Any) -> None:
        """Put nothing on the stream."""
        self.device.put(stream, _pass, value)


def _pass(*args: Any) -> None:
    """Nothing."""


def host_cost(bench: Bench) -> Iterator[Row]:
    """What issuing an instruction takes, where chunks and messages do nothing."""
    microbatches = 64
    placement = {0: [0, 1], 1: [2, 3]}
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=microbatches),
        *(piper.Place({"PP": s}, devices=d) for s, d in placement.items()),
        piper.Replicate({"PP": "*"}, zero=3),
        *piper.schedules.one_f_one_b(placement, microbatches),
    )
    batch = [torch.zeros(microbatches, 64, device=bench.device) for _ in range(2)]
    plan = piper.plan(Stack(2).to(bench.device), strategy, batch, 4)
    given = on_streams(plan.launched[0], plan.chunks)
    device = CudaDevice(bench.device) if bench.device.type == "cuda" else HostDevice()
    chunks = {
        name: BoundChunk(
            fn=_made(plan.chunks[name], bench.device),
            num_results=plan.chunks[name].num_results,
            gives_bundle=len(plan.chunks[name].outputs) > plan.chunks[name].num_results,
            adding=_made(plan.chunks[name], bench.device),
        )
        for name, _ in given.program.chunks
    }
    comm = LocalCommunicator(LocalWorld(4), 0)
    streams = OnStreams(program=given, device=device, meeting=Nothing(device))
    executor = executor_of(given.program, chunks, comm, streams=streams)
    specs = {arg.position: arg.spec for arg in plan.args}
    shards = dict(given.program.shards)

    def held(position: int) -> Tensor:
        spec = specs[position]
        assert spec is not None
        rows_held = -(-spec.shape[0] // len(shards.get(position, (0,))))
        return torch.zeros((rows_held, *spec.shape[1:]), device=bench.device)

    state = [held(position) for _, position in given.program.state]
    data = [held(position) for _, position in given.program.data]
    weights = [torch.ones((), device=bench.device) for _ in given.program.weights]
    times = []
    for _ in range(30):
        bench.wait()
        start = time.perf_counter()
        executor.run(state, data, weights)
        times.append(time.perf_counter() - start)
    count = sum(i.op not in (Op.FREE, Op.DRAIN) for i in given.program.instrs)
    each_us = min(times) / count * 1e6
    yield Row(
        section="host",
        what=f"per instruction, of {count}",
        figures=f"{each_us:.1f} us",
        bar=f"<= {HOST_BAR_US} us",
        held=each_us <= HOST_BAR_US,
        data={"each_us": each_us, "instructions": count},
    )


def _made(chunk: Chunk, device: torch.device) -> Callable[[list[Any]], list[Any]]:
    """Code of a chunk that computes nothing and gives what is there already."""
    found = [
        torch.zeros(spec.shape, dtype=spec.dtype, device=device) if spec is not None else None
        for spec in chunk.outputs
    ]

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        return list(found)

    return run


def peaks(bench: Bench) -> Iterator[Row]:
    """Predicted peak memory beside the measured one."""
    step = compiled(bench, min(4, bench.batch), compile="aten")
    batch = bench.tokens()
    train(step, batch)
    bench.wait()
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    step(*batch)
    bench.wait()
    measured = torch.cuda.max_memory_allocated(bench.device) - before
    plan = piper.explain(step)
    program = plan.programs[0]
    buffers = sum(on_streams(program, plan.chunks).buffers)
    held = plan.memory()[0].held
    predicted = sum(held[name] for name in (*STEP, INSIDE)) + buffers
    off = abs(predicted / measured - 1)
    yield Row(
        section="peak",
        what="predicted beside measured",
        figures=f"off by {off:.1%}",
        bar=f"<= {PEAK_BAR:.0%}",
        held=off <= PEAK_BAR,
        data={"predicted": predicted, "measured": measured},
    )


def nccl(bench: Bench) -> Iterator[Row]:
    """NCCL with one rank: it starts, runs every collective, and is recorded."""
    from datetime import timedelta

    start_group(timedelta(seconds=60), rank=0, world_size=1, store=dist.HashStore())
    try:
        value = torch.ones(1024, device=bench.device)
        room = torch.empty_like(value)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(value, async_op=True).wait(),
            "all_gather": lambda: dist.all_gather_into_tensor(room, value, async_op=True).wait(),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(room, value, async_op=True).wait(),
            "all_to_all": lambda: dist.all_to_all_single(room, value, async_op=True).wait(),
        }
        for name, call in calls.items():
            call()
            bench.wait()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
            graph.replay()
            bench.wait()
            right = bool((value == 1).all() and (name == "all_reduce" or (room == 1).all()))
            yield Row(
                section="nccl", what=name, figures="runs, and is recorded", bar="right", held=right
            )
    finally:
        dist.destroy_process_group()


def overlap(bench: Bench) -> Iterator[Row]:
    """Copies on one stream beside products on another: how much of the shorter is hidden."""
    a = torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16)
    here = torch.empty(256 * 2**20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=bench.device)
    side = torch.cuda.Stream()

    def work() -> None:
        for _ in range(50):
            a @ a

    def copy() -> None:
        with torch.cuda.stream(side):
            there.copy_(here, non_blocking=True)

    work()
    alone = {f.__name__: min(bench.seconds(f) for _ in range(5)) for f in (work, copy)}
    both = min(bench.seconds(lambda: (copy(), work())) for _ in range(5))
    hidden = (sum(alone.values()) - both) / min(alone.values())
    yield Row(
        section="overlap",
        what="copy beside products",
        figures=f"{hidden:.0%} hidden",
        bar=">= 80%",
        held=hidden >= 0.8,
        data={**alone, "both": both},
    )


ANYWHERE = {"schedules": schedules, "kernels": kernels, "step": whole_step, "host": host_cost}
ON_GPU = {"graph": graphs, "peak": peaks, "overlap": overlap, "nccl": nccl}


@click.command()
@click.option("--only", default="", help="Sections, by comma; all if left out.")
@click.option("--pairs", default=15, show_default=True, type=click.IntRange(min=1))
@click.option("--rehearse", is_flag=True, help="On the CPU, in tiny sizes; measures nothing.")
def main(only: str, pairs: int, rehearse: bool) -> None:
    """Run the sections; print a table, and a last line of JSON."""
    sections = ANYWHERE if rehearse else ANYWHERE | ON_GPU
    chosen = [name.strip() for name in only.split(",") if name.strip()] or list(sections)
    unknown = [name for name in chosen if name not in sections]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}; choose from {', '.join(sections)}")
    if not rehearse and not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device: nothing is measured (--rehearse)")
    bench = Bench(device=torch.device("cuda", 0), pairs=pairs)
    if rehearse:
        bench = Bench(
            device=torch.device("cpu"),
            compile="aten",
            pairs=pairs,
            dim=32,
            layers=2,
            seq=16,
            batch=8,
        )
    on = machine() if rehearse else f"{torch.cuda.get_device_name(0)}, {machine()}"
    click.echo(on)
    found: list[Row] = []
    for name in chosen:
        try:
            found += sections[name](bench)
        except Exception as error:  # the others are still worth their time on a machine lent
            found.append(
                Row(section=name, what="failed", figures=repr(error)[:300], bar="runs", held=False)
            )
    click.echo(table(found))
    rehearsed = {"rehearsal": True} if rehearse else {}
    facts = [{"section": r.section, "what": r.what, "held": r.held, **r.data} for r in found]
    click.echo(json.dumps({**rehearsed, "machine": on, "rows": facts}))
    if any(row.held is False for row in found) and not rehearse:
        sys.exit(1)


if __name__ == "__main__":
    main()
