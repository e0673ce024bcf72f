"""Runs one rank's emitted program.

The program is an ordinary Python module with a function `step(rt, state, data, weights)`; `rt` is
the `Runtime` below. A failure is told as the instruction it happened in, with the user's own source
line.
"""

import copy
import functools
import linecache
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from piper_dynamo import _torch_compat as compat
from piper_dynamo import blocks
from piper_dynamo.errors import (
    PiperError,
    PiperRuntimeError,
    PiperTimeoutError,
    format_error,
)
from piper_dynamo.ir.program import (
    COLLECTIVES,
    UNWATCHED,
    Instr,
    Op,
    RankProgram,
    Watch,
    around,
    mix_seed,
)
from piper_dynamo.runtime.comm import Communicator
from piper_dynamo.runtime.failure import is_lost
from piper_dynamo.runtime.faults import Fault, faults_of, happen, place_of, spoiled
from piper_dynamo.runtime.graphs import Recorder, StepGraph
from piper_dynamo.runtime.waiting import At, Place, Running, watched

# A sleep ends up to so much late; the rest is spun, briefly, since cores may be shared.
SLEEP_MARGIN_S = 0.0002

ChunkFn = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """An emitted module and what its lines are; `file` is where debuggers find them."""

    source: str
    file: str
    instr_of_line: Mapping[int, int]
    specs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundChunk:
    """A compiled chunk and the form of its outputs.

    Attributes:
        fn: The code.
        num_results: How many outputs come before the bundle.
        gives_bundle: Whether it leaves one.
        adding: The code that also takes sums, last, and adds to them; None where none is needed.
    """

    fn: ChunkFn
    num_results: int
    gives_bundle: bool
    adding: ChunkFn | None = None


class Probe(Protocol):
    """What is shown a chunk's inputs and outputs; it must not change or keep them."""

    def enter(self, index: int, values: Sequence[Any], bundle: Sequence[Any], /) -> None:
        """Before instruction `index`: its inputs and the sums it adds to, and its bundle."""

    def leave(self, index: int, results: Sequence[Any], /) -> None:
        """After it: its outputs in order, and last the bundle that it leaves, if any."""

    def finish(self) -> None:
        """The program has ended or failed, or stopped for the caller's gradients."""


def call_chunk(chunk: BoundChunk) -> Callable[..., Sequence[Any]]:
    """A chunk as programs call it.

    `[results..., bundle] = chunk([primals], bundle, [tangents], [sums])`: the lists are emptied, so
    a value that the program does not hold either dies at its last use inside the chunk.
    """
    plain, adding, count = chunk.fn, chunk.adding, chunk.num_results

    def without_bundle(
        primals: list[Any],
        bundle: list[Any] | None = None,
        tangents: Sequence[Any] = (),
        sums: Sequence[Any] = (),
    ) -> Sequence[Any]:
        if bundle is not None:
            primals += bundle
            bundle.clear()
        primals += tangents
        if not sums:
            return plain(primals)
        assert adding is not None
        primals += sums
        return adding(primals)

    def with_bundle(*args: Any) -> Sequence[Any]:
        outputs = without_bundle(*args)
        return [*outputs[:count], list(outputs[count:])]

    return with_bundle if chunk.gives_bundle else without_bundle


def _is_exact(value: Tensor) -> bool:
    """Whether all its values are finite: whole numbers and truth values."""
    return not (value.is_floating_point() or value.is_complex())


def sleep_until(deadline_s: float) -> None:
    """Sleep until `time.perf_counter()` says so, to some microseconds."""
    remaining = deadline_s - time.perf_counter()
    if remaining > SLEEP_MARGIN_S:
        time.sleep(remaining - SLEEP_MARGIN_S)
    while time.perf_counter() < deadline_s:
        pass


class Runtime:
    """What emitted programs call. One per executor: what a step sets is set again as it resumes."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.step_seed = 0
        self.first_microbatch = 0
        self.generators = [torch.default_generator]
        self.marks: list[tuple[int, float]] = []
        self.looks: list[tuple[int, int, Tensor]] = []
        self.probe: Probe | None = None
        self.faults: dict[int, Fault] = {}
        self._ranges: list[Any] = []
        self._finish_s = 0.0
        self.connect(comm)

    def connect(self, comm: Communicator) -> None:
        """Let programs call the communicator."""
        self.post: Callable[..., Any] = comm.post
        self.wait = comm.wait
        self.wait_all = comm.wait_all
        self.drain = comm.drain
        self.about = comm.about
        # rt.all_gather([values], group, [likes]) and so on start a collective and give its handle.
        for op in COLLECTIVES:
            setattr(self, op.value, functools.partial(comm.start_collective, op))

    def begin_step(self) -> None:
        """A step begins."""

    def given(self, values: Sequence[Tensor]) -> Sequence[Any]:
        """The caller's values as programs take them."""
        return values

    def taken(self, results: Any) -> Any:
        """What a program returned as the caller takes it."""
        return results

    def bind(self, chunk: BoundChunk) -> Callable[..., Sequence[Any]]:
        """A chunk as programs call it."""
        return call_chunk(chunk)

    def open(self, name: str) -> None:
        """An instruction begins that profilers know by this name."""
        self._ranges.append(torch.autograd.profiler.record_function(name))
        self._ranges[-1].__enter__()

    def close(self) -> None:
        """It has been issued, and if it waits, it has ended."""
        self._ranges.pop().__exit__(None, None, None)

    def close_all(self) -> None:
        """The program has ended, or failed inside of something that was begun."""
        while self._ranges:
            self.close()

    def slice(self, batch: Tensor, dim: int | None, part: int, parts: int) -> Tensor:
        """One microbatch of an input, contiguous; of a stack where `dim` is None."""
        if dim is None:
            return batch[part].contiguous()
        size = batch.shape[dim] // parts
        return batch.narrow(dim, part * size, size).contiguous()

    def send(self, value: Tensor, target: int, message: int) -> None:
        """Start to send; borders are contiguous by construction, a user's output may not be."""
        self._comm.send(value.contiguous(), target, message)

    def accumulate(self, total: Tensor, part: Tensor) -> Tensor:
        """Add into a sum that this program owns."""
        return total.add_(part)

    def cast(self, value: Tensor, like: Any) -> Tensor:
        """A new value, in the dtype of `like`."""
        return value.to(like.dtype)

    def add(self, *parts: Tensor) -> Tensor:
        """A new sum, in the order given."""
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        return total

    def loss(self, *pairs: Tensor) -> Tensor:
        """The weighted sum of microbatch losses, given as loss, weight, loss, weight, ..."""
        # What counts nothing may be NaN, as a mean over no label is.
        total, *rest = (
            torch.where(weight == 0, weight, loss * weight)
            for loss, weight in zip(pairs[::2], pairs[1::2], strict=True)
        )
        for part in rest:
            total = total + part
        return total

    def concat(self, parts: Sequence[Tensor], dim: int | None) -> Tensor:
        """An output over all microbatches."""
        return torch.stack(list(parts)) if dim is None else torch.cat(list(parts), dim)

    def seed(self, microbatch: int, first_draw: int) -> None:
        """Fix a chunk's random numbers by step, global microbatch and place in the model."""
        seed = mix_seed(self.step_seed, self.first_microbatch + microbatch)
        for generator in self.generators:
            # Not mixed: a draw adds its number in the region, which makes its number in the model.
            generator.manual_seed(seed + first_draw)

    def begin(self, seconds: float) -> None:
        """On emulated devices: a chunk begins that lasts so long."""
        self._finish_s = time.perf_counter() + seconds

    def finish(self) -> None:
        """Wait until the chunk's time is over."""
        sleep_until(self._finish_s)

    def look(self, index: int, values: Sequence[Tensor | None]) -> None:
        """Note of each result of instruction `index` whether it is finite, on its device."""
        for slot, value in enumerate(values):
            if value is not None and value.numel() and not _is_exact(value):
                self.looks.append((index, slot, torch.isfinite(value).all()))

    def fail(self, index: int) -> None:
        """Before instruction `index`: what is to fail on purpose there."""
        happen(self.faults[index], self._comm)

    def spoiled(self, index: int, values: Sequence[Any]) -> list[Any]:
        """After it: its results, which a fault on purpose may change."""
        return spoiled(self.faults[index], values)

    def mark(self, index: int) -> None:
        """Instruction `index` has been issued (and, if it waits, has finished)."""
        self.marks.append((index, time.perf_counter()))

    def times(self) -> list[tuple[int, float]]:
        """When each marked instruction ended, in seconds."""
        return self.marks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResults:
    """What a program returns: the loss, then values in the order of the program's lists.

    Where no output is the loss, `backward` takes the gradients of the outputs (in the order of the
    program's `tangents`) and gives the program's gradients; it can be called once.
    """

    loss: Tensor | None
    outputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    backward: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] | None = None


class Executor:
    """One rank's program, ready to run."""

    def __init__(
        self,
        program: RankProgram,
        emit: Callable[[Watch], Code],
        chunks: Mapping[str, BoundChunk],
        comm: Communicator,
        runtime: Runtime | None = None,
        *,
        record: Recorder | None = None,
    ) -> None:
        """Make a program ready.

        Args:
            program: What runs.
            emit: Its code.
            chunks: What it calls.
            comm: The way to the others.
            runtime: What the code calls, where that is not written for the host.
            record: Records steps, which are then replayed; None: each is issued anew.
        """
        self.program = program
        self.comm = comm
        self._emit = emit
        self._runtime = runtime if runtime is not None else Runtime(comm)
        self._chunks = {name: self._runtime.bind(chunk) for name, chunk in chunks.items()}
        self._steps = {UNWATCHED: self._load(UNWATCHED)}
        self._faults = faults_of(program.rank, program.world_size)
        self._graph = StepGraph(self._plainly, record) if record is not None else None
        self._random = any(i.seed is not None for i in program.instrs)

    def _load(self, watch: Watch) -> Callable[..., Any]:
        code = self._emit(watch)

        def place(line: int) -> Place:
            return _place(self.program, code.instr_of_line.get(line, 0))

        namespace: dict[str, Any] = {**self._chunks, **code.specs}
        exec(compile(code.source, code.file, "exec"), namespace)
        step = namespace["step"]

        def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                try:
                    # Operators were traced with their casts: none may be added now.
                    with (
                        torch.no_grad(),
                        compat.no_autocast(),
                        watched(Running(file=code.file, rank=self.comm.rank, place=place)),
                    ):
                        return call(*args)
                except StopIteration:
                    raise
                except BaseException as error:
                    index = _failed_instr(error.__traceback__, code.file, code.instr_of_line)
                    self.comm.abandon()
                    if index is None or not isinstance(error, Exception):
                        raise
                    raise self._explain(error, index) from error

            return run

        if not self.program.tangents:
            return guarded(step)

        def start(*args: Any) -> Any:
            paused = step(*args)
            return (*guarded(paused.send)(None), guarded(paused.send))

        return start

    def _explain(self, error: Exception, index: int) -> PiperError:
        instr = self.program.instrs[index]
        rank, task = self.program.rank, instr.task or instr.op
        where = _user_line(error.__traceback__) or instr.where
        details = {
            "where": where or "no source line",
            "instruction": f"{instr.op} {task}",
            "program": around(self.program, index),
        }
        if isinstance(error, PiperTimeoutError) or is_lost(error):
            return self._explain_wait(error, index, details)
        cause = f"{type(error).__name__}: {error}"
        made = PiperRuntimeError(
            format_error(f"rank {rank} failed in {task}", {**details, "why": cause})
        )
        made.where = where
        return made

    def _explain_wait(
        self, error: Exception, index: int, details: Mapping[str, str]
    ) -> PiperTimeoutError:
        """A wait that ran out, or whose other end is gone; and what the other ranks are at."""
        rank, comm = self.program.rank, self.comm
        text, peers = _place(self.program, index)
        hint = "look for the first failed rank; raise timeout_s if steps take that long"
        if isinstance(error, PiperTimeoutError):
            report = comm.ask(At(text=text, peers=peers, seconds=comm.timeout_s))
            finite = comm.timeout_s != float("inf")
            waited = f" since {comm.timeout_s:g} s" if finite else ", and it cannot come"
            title = _waiting_for(rank, self.program.instrs[index]) + waited
        else:
            report = comm.explain_loss(At(text=f"{text} and lost the connection", peers=peers))
            whom = ", ".join(f"rank {peer}" for peer in peers) or "another rank"
            title = f"rank {rank} lost its connection to {whom}"
            hint = "look at what that rank said last: its process has ended, or cannot be reached"
        told = {**details, "why": str(error), "hint": hint, **report.rows}
        return report.marks(PiperTimeoutError(format_error(title, told)))

    def run(
        self,
        state: Sequence[Tensor],
        data: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        seed: int = 0,
        first_microbatch: int = 0,
        watch: Watch = UNWATCHED,
        probe: Probe | None = None,
    ) -> StepResults:
        """Run one step.

        Args:
            state: Parameters and buffers, in the program's order.
            data: Data arguments, whole batches, in the program's order.
            weights: Loss weights, 0-dim, in the program's order.
            seed: The step's seed.
            first_microbatch: The global index of this replica's first microbatch.
            watch: What is looked at; where it is timed, see `marks`.
            probe: What is shown the chunks that `watch` names, to the end of the step.
        """
        runtime = self._runtime
        if probe is not None:  # a backward may come after the next step's forward
            runtime = copy.copy(runtime)
            runtime.probe = probe
        runtime.step_seed, runtime.first_microbatch = seed, first_microbatch
        runtime.marks.clear()
        runtime.looks.clear()
        if self._random:
            # The CPU's tells chunks their seed, whichever devices they draw on.
            devices = dict.fromkeys(v.device for v in (*state, *data) if v.device.type != "cpu")
            runtime.generators = [torch.default_generator, *map(compat.generator_of, devices)]
        if self.comm.is_checked:
            watch = replace(watch, named=True)
        if self._faults:
            watch = self._failing(watch)
        if self._graph is not None and watch == UNWATCHED and probe is None:
            loss, outputs, grads, buffers = self._graph(state, data, weights)
            return StepResults(loss=loss, outputs=outputs, grads=grads, buffers=buffers)
        if compat.is_profiling():
            watch = replace(watch, ranged=True)
        if watch not in self._steps:
            self._steps[watch] = self._load(watch)
        step = self._steps[watch]
        runtime.begin_step()
        if watch.timed:
            runtime.mark(-1)
        arguments = (runtime, *map(runtime.given, (state, data, weights)))
        if not self.program.tangents:
            loss, outputs, grads, buffers = self._run_part(runtime, step, *arguments)
            return StepResults(loss=loss, outputs=outputs, grads=grads, buffers=buffers)
        outputs, buffers, resume = self._run_part(runtime, step, *arguments)
        faults = dict(runtime.faults)

        def backward(tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
            # Another step may have begun since: what is drawn again must be what was drawn.
            runtime.step_seed, runtime.first_microbatch = seed, first_microbatch
            runtime.faults |= faults
            try:
                self._run_part(runtime, resume, tuple(tangents))
            except StopIteration as end:
                finished: tuple[Tensor, ...] = end.value
                return finished
            raise AssertionError("a program pauses once")

        return StepResults(loss=None, outputs=outputs, grads=(), buffers=buffers, backward=backward)

    def _failing(self, watch: Watch) -> Watch:
        """What is looked at in a step, with the faults on purpose that are for it."""
        faults = self._runtime.faults
        faults.clear()
        for fault in self._faults:
            if fault.step == self.comm.steps:
                index = place_of(fault, self.program)
                if index < 0:
                    happen(fault, self.comm)
                else:
                    faults[index] = fault
        return replace(watch, faults=frozenset(faults)) if faults else watch

    def _plainly(self, *given: Sequence[Tensor]) -> Any:
        """The step that is recorded."""
        runtime = self._runtime
        runtime.begin_step()
        arguments = (runtime, *map(runtime.given, given))
        return self._run_part(runtime, self._steps[UNWATCHED], *arguments)

    def _run_part(self, runtime: Runtime, call: Callable[..., Any], *args: Any) -> Any:
        """Run a program, or the part up to where it waits for gradients or from there on.

        Chunks seed the default generators; the caller's state comes back afterwards.
        """
        generators = runtime.generators if self._random else []
        before = [generator.get_state() for generator in generators]
        try:
            return runtime.taken(call(*args))
        finally:
            runtime.close_all()
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            self.comm.end_step()
            blocks.POOL.give_back()
            if runtime.probe is not None:
                runtime.probe.finish()

    @property
    def looks(self) -> Sequence[tuple[int, int, Tensor]]:
        """Instruction, output, whether that was finite, of the last step's tasks; taken once."""
        found = tuple(self._runtime.looks)
        self._runtime.looks.clear()
        return found

    @property
    def marks(self) -> Sequence[tuple[int, float]]:
        """Instruction and end time in seconds of the last timed step; -1 is its start."""
        return tuple(self._runtime.times())


def _waiting_for(rank: int, instr: Instr) -> str:
    """Which rank waits for what from whom."""
    task = instr.task or instr.op
    if instr.op is Op.DRAIN:
        return f"rank {rank} waits for rank {instr.peer} to take {task}"
    if instr.peer >= 0:
        return f"rank {rank} waits for {task} from rank {instr.peer}"
    return f"rank {rank} waits for {task} of all its ranks"


def _place(program: RankProgram, index: int) -> Place:
    """What a rank is at in an instruction, and which ranks it waits for there."""
    instr, rank = program.instrs[index], program.rank
    if instr.op not in (Op.WAIT, Op.DRAIN):
        line = f" ({instr.where})" if instr.where else ""
        return f"is in {instr.task or instr.op}{line}", ()
    peers: tuple[int, ...] = (instr.peer,)
    if instr.peer < 0:
        (handle,) = instr.inputs
        started = next(i for i in reversed(program.instrs[:index]) if handle in i.outputs)
        peers = tuple(other for other in started.group if other != rank)
    return _waiting_for(rank, instr).removeprefix(f"rank {rank} "), peers


_USER_LINE = re.compile(r"# File: (.+?:\d+)\b")  # as torch.fx writes it above the code of a line


def _user_line(trace: TracebackType | None) -> str:
    """The user's line of the operator that failed; equal chunks share the lines of the first."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if re.match(r"<piper chunk |chunk-", file.rpartition(os.sep)[2]):
            above = linecache.getlines(file)[: trace.tb_lineno]
            lines = (m[1] for text in reversed(above) if (m := _USER_LINE.search(text)))
            found = next(lines, found)
        trace = trace.tb_next
    return found


def _failed_instr(
    trace: TracebackType | None, name: str, instr_of_line: Mapping[int, int]
) -> int | None:
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            found = instr_of_line.get(trace.tb_lineno)
        trace = trace.tb_next
    return found
