"""Piper's own cost per instruction: whole steps in which operators and transport take no time.

One rank runs a pipeline of tiny tensors whose chunks are emulated and take zero seconds, so that
what is left is Dynamo's guards, the program, and the hand-over of gradients. Such a program sends
nothing. So a second one is the first rank's of several: it posts, sends, waits and drains as over
gloo, up to the calls of torch.distributed, which do nothing there.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import piper_dynamo as piper
from benchmarks.emulated import WIDTH, Chain
from benchmarks.report import Row
from piper_dynamo.binding import bind, executor_of
from piper_dynamo.ir.program import Op, RankProgram
from piper_dynamo.lowering.emulate import emulated_chunk
from piper_dynamo.runtime.comm import TorchCommunicator
from piper_dynamo.runtime.world import communicator

STAGES, MICROBATCHES = 4, 16
BAR_US = 25.0
REPEATS = 200
TIMEOUT_S = 60.0
MESSAGES = (Op.POST, Op.WAIT, Op.SEND, Op.DRAIN)


def median_seconds(call: Callable[[], object]) -> float:
    """Of one call of many."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def counted(program: RankProgram) -> tuple[int, int]:
    """Instructions, frees apart, and those of messages."""
    found = [instr.op for instr in program.instrs if instr.op is not Op.FREE]
    return len(found), sum(op in MESSAGES for op in found)


def step_seconds() -> tuple[float, tuple[int, int]]:
    """The median time of a whole step on one rank, and its instructions."""
    strategy = piper.strategies.pipeline(
        "gpipe", ranks=1, stages=STAGES, num_microbatches=MICROBATCHES
    )
    x, y = torch.zeros(MICROBATCHES, WIDTH), torch.zeros(MICROBATCHES, WIDTH)
    costs = piper.Costs(F=0.0, BI=0.0, BW=0.0)
    step = piper.compile(Chain(STAGES), strategy, (x, y), compile="emulate", costs=costs)

    def once() -> None:
        step(x, y).backward()
        for parameter in piper.parameters(step):
            parameter.grad = None

    (program,) = piper.explain(step).programs
    return median_seconds(once), counted(program)


class _Done:
    """A message that has left, or come, at once."""

    def wait(self, timeout: Any = None) -> bool:
        return True


@contextmanager
def unsent() -> Iterator[None]:
    """Messages are given to torch.distributed, and go nowhere."""
    done = _Done()
    nothing = {name: lambda *args, **kwargs: done for name in ("isend", "irecv")}
    with mock.patch.multiple(dist, **nothing):
        yield


def program_seconds() -> tuple[float, tuple[int, int]]:
    """The median time of a pipeline's first program, and its instructions; as a process group."""
    x, y = torch.zeros(MICROBATCHES, WIDTH), torch.zeros(MICROBATCHES, WIDTH)
    strategy = piper.strategies.pipeline("one_f_one_b", ranks=STAGES, num_microbatches=MICROBATCHES)
    plan = piper.plan(Chain(STAGES), strategy, (x, y), STAGES)
    program = plan.programs[0]
    functions = {name: emulated_chunk(plan.chunks[name]) for name, _ in program.chunks}
    comm = communicator(TIMEOUT_S)
    assert isinstance(comm, TorchCommunicator)
    executor = executor_of(program, bind(program, plan.chunks, functions), comm)
    specs = {arg.position: arg.spec for arg in plan.args}

    def zeros(position: int) -> torch.Tensor:
        spec = specs[position]
        assert spec is not None
        return torch.zeros(spec.shape, dtype=spec.dtype)

    state = [zeros(position) for _, position in program.state]
    data = [zeros(position) for _, position in program.data]
    weights = [torch.ones(()) for _ in program.weights]
    with unsent():
        took = median_seconds(lambda: executor.run(state, data, weights))
    return took, counted(program)


def _row(what: str, took: float, count: tuple[int, int]) -> Row:
    instructions, messages = count
    each_us = took / instructions * 1e6
    return Row(
        section="host",
        what=what,
        figures=f"{took * 1e3:.2f} ms for {instructions} instructions, {messages} of them of "
        f"messages: {each_us:.1f} us each",
        bar=f"<= {BAR_US:.0f} us",
        held=each_us <= BAR_US,
        data={"ours": took / instructions, "unit": "s", "step_s": took, "count": instructions}
        | {"messages": messages, "measured": f"median of {REPEATS} steps"},
    )


def run() -> Iterator[Row]:
    """Each step's time over its instructions."""
    what = f"{STAGES} stages x {MICROBATCHES} microbatches"
    yield _row(f"{what}, one rank", *step_seconds())
    ((took, count),) = piper.launch(program_seconds, 1)
    yield _row(f"{what}, the first of {STAGES} ranks, without guards", took, count)
