"""Plans on streams: their programs as CUDA would run them, on a device that is made up."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.binding import OnStreams, executor_of
from piper_dynamo.ir.program import Watch
from piper_dynamo.ir.streams import StreamProgram
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.lowering.happens_before import verify_streams
from piper_dynamo.lowering.launches import in_launch_order
from piper_dynamo.lowering.streams import on_streams
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.device import Device, HostDevice
from piper_dynamo.runtime.fake_device import FakeDevice, FakeMachine
from piper_dynamo.runtime.local import LocalWorld, current
from piper_dynamo.runtime.on_streams import meeting_of
from tests import mutants

Block = Callable[[Callable[[], bool], str], None]


def lowered(plan: Plan) -> tuple[StreamProgram, ...]:
    """All ranks' programs on streams, not yet proved."""
    return tuple(on_streams(p, plan.chunks) for p in in_launch_order(tuple(plan.programs)))


def proved(plan: Plan) -> tuple[StreamProgram, ...]:
    """The same, proved."""
    found = lowered(plan)
    verify_streams(found, plan.chunks)
    return found


def run(
    plan: Plan,
    programs: Sequence[StreamProgram],
    seed: int | None,
    made: Callable[[Block], Device] | None = None,
) -> list[list[Tensor]]:
    """What each rank ends with on a made-up device whose timing is drawn.

    Args:
        plan: Whose chunks these are.
        programs: Of all ranks.
        seed: Of the draw; None: all runs at once, in the order of the host.
        made: Makes another device, from what waits for other ranks.
    """
    machine = FakeMachine(seed or 0)
    by_rank = {one.program.rank: one for one in programs}

    def executor(program, chunks, comm):
        def block(ready, what):
            comm.world.block(comm.rank, ready, what)

        if made is not None:
            device = made(block)
        else:
            device = HostDevice(block=block) if seed is None else FakeDevice(machine, block)
        streams = OnStreams(
            program=by_rank[program.rank], device=device, meeting=meeting_of(comm, device)
        )
        return executor_of(program, chunks, comm, streams=streams)

    return mutants.run(plan, [one.program for one in programs], executor)


def times(plan: Plan, programs: Sequence[StreamProgram], seed: int) -> list[Any]:
    """When each instruction of each rank ended."""
    machine = FakeMachine(seed)
    watch = Watch(timed=True)

    def body() -> Any:
        comm = current()
        device = FakeDevice(machine, lambda ready, what: comm.world.block(comm.rank, ready, what))
        given = programs[comm.rank]
        streams = OnStreams(program=given, device=device, meeting=meeting_of(comm, device))
        functions = compile_chunks(dict(plan.chunks), "aten")
        made = []

        def executor(program, chunks, comm):
            made.append(executor_of(program, chunks, comm, streams=streams))
            return made[0]

        mutants.run_rank(plan, given.program, functions, comm, executor, watch=watch)
        return made[0].marks

    return LocalWorld(plan.world_size).run(body)


def are_equal(have: list[list[Tensor]], want: list[list[Tensor]]) -> bool:
    """Bit for bit."""
    return all(
        len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
        for mine, theirs in zip(have, want, strict=True)
    )
