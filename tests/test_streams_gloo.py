"""Programs on streams over torch.distributed: the calls that NCCL gets, made to gloo.

On the host everything runs at once and every wait blocks, sends too: so a step ends only because
ranks start what they do together in one order.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import piper_dynamo as piper
from piper_dynamo import _torch_compat as compat
from piper_dynamo.binding import OnStreams, executor_of
from piper_dynamo.ir.program import COLLECTIVES, Op
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.planning import Plan
from piper_dynamo.programs import pairs_of
from piper_dynamo.runtime import nccl
from piper_dynamo.runtime.comm import TorchCommunicator, start_reduce_scatter
from piper_dynamo.runtime.device import HostDevice
from piper_dynamo.runtime.on_streams import meeting_of
from piper_dynamo.runtime.world import communicator
from tests import experts, jobs, mutants, on_streams, replicas
from tests.faults import fixtures as fx
from tests.faults.test_interface import ComplexWeights
from tests.models import Stack4, rows
from tests.pool import Pool
from tests.replicas import PAIR

pytestmark = pytest.mark.dist(2)

PLANS: dict[str, Callable[[], Plan]] = {
    "pipeline": lambda: piper.plan(
        Stack4(4), jobs.strategy(jobs.V2, 4, "zbv"), rows(8), world_size=2
    ),
    "zero 0": lambda: piper.plan(Stack4(1), replicas.strategy(PAIR, 2, zero=0), rows(8)),
    "zero 1": lambda: piper.plan(Stack4(1), replicas.strategy(PAIR, 2, zero=1), rows(8)),
    "zero 3": lambda: piper.plan(Stack4(1), replicas.strategy(PAIR, 2, zero=3), rows(8)),
    "complex": lambda: piper.plan(
        ComplexWeights(torch.complex128, 1), replicas.strategy(PAIR, 2, zero=1), rows(8)
    ),
    "experts": lambda: piper.plan(
        experts.Mixture(1), experts.strategy(PAIR, 2, "gpipe", zero=1), rows(8)
    ),
    "capacity": lambda: piper.plan(
        experts.Mixture(1), experts.strategy(PAIR, 2, "gpipe", capacity=1.5), rows(8)
    ),
}


def on_gloo(kind: str) -> list[Tensor]:
    """What this rank ends with over gloo; it runs twice, to use events and buffers again."""
    torch._dynamo.reset()
    plan = PLANS[kind]()
    programs = on_streams.proved(plan)
    comm = communicator(30.0)
    assert isinstance(comm, TorchCommunicator)
    groups = sorted({*plan.communicators(), *pairs_of(plan.distinct, plan.groups)})
    comm.prepare_groups(groups)
    nccl.connect([(g, comm.groups[g]) for g in groups], comm.rank, torch.device("cpu"))

    def executor(program, chunks, comm):
        device = HostDevice()
        streams = OnStreams(
            program=programs[program.rank],
            device=device,
            meeting=meeting_of(comm, device, waits=True),
        )
        return executor_of(program, chunks, comm, streams=streams)

    functions = compile_chunks(dict(plan.chunks), "aten")
    program = programs[comm.rank].program
    first = mutants.run_rank(plan, program, functions, comm, executor)
    again = mutants.run_rank(plan, program, functions, comm, executor)
    assert all(map(torch.equal, first, again))
    return first


SLOW = ("zero 0", "zero 1", "capacity", "complex")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in PLANS]
)
def test_the_same_numbers_over_gloo(kind: str, pool: Pool):
    plan = PLANS[kind]()
    want = mutants.run(plan, plan.programs)
    assert mutants.is_same(pool.values(on_gloo, kind), want)


def reduced(dtype: torch.dtype) -> tuple[str, list[Tensor]]:
    """What torch is given to scatter, and what this rank gets of a sum of two rows each."""
    comm, group = communicator(30.0), ("sums", (0, 1))
    assert isinstance(comm, TorchCommunicator)
    comm.prepare_groups([group])
    value = torch.tensor([[1 + 2j], [3 - 4j]]).to(dtype) * (1 + comm.rank)
    into = value.new_empty((1, 1))
    given = []

    def scatter(into: Tensor, value: Tensor, **named: Any) -> Any:
        given.append(str(value.dtype))
        return plain(into, value, **named)

    plain = compat.reduce_scatter_single
    with fx.patched((compat, "reduce_scatter_single", scatter)):
        start_reduce_scatter(into, value, comm.groups[group]).wait()
    return given[0], [into]


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
def test_complex_sums_are_scattered_as_reals(dtype: torch.dtype, pool: Pool):
    """NCCL has no complex numbers, and torch gives it real ones in the other collectives alone."""
    real = str(dtype.to_real())
    for rank, (given, (got,)) in enumerate(pool.values(reduced, dtype)):
        assert given == real
        assert got.tolist() == [[[3 + 6j], [9 - 12j]][rank]]


def test_all_kinds_of_collectives_are_called():
    """Control: the plans above have every instruction that ranks meet for."""
    ops = {i.op for make in PLANS.values() for p in make().programs for i in p.instrs}
    assert {Op.SEND, Op.POST} | COLLECTIVES - {Op.ALL_TO_ALL} <= ops  # which no pass makes
    several = [
        i for make in PLANS.values() for p in make().programs for i in p.instrs if len(i.specs) > 1
    ]
    assert {Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER} <= {i.op for i in several}


def test_a_group_without_its_gpu_is_refused(pool: Pool):
    (text, _) = pool.values(refusal_without_gpu)
    jobs.mentions(text, "without its GPU", "device_id", "gloo")


def refusal_without_gpu() -> str:
    comm = communicator(30.0)
    return jobs.refusal(lambda: meeting_of(comm, HostDevice()))
