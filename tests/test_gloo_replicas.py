"""Replicas as real processes over gloo: process groups, meshes and uneven blocks are its own."""

from collections.abc import Iterator

import pytest
from torch import Tensor

import piper_dynamo as piper
from tests import capacity, experts, jobs, replicas
from tests.jobs import STEPS, Placement, Trace
from tests.pool import Pool
from tests.replicas import CASES, LINE
from tests.sending import check_steps

pytestmark = pytest.mark.dist(4)

FOUR: Placement = {0: [0, 1, 2, 3]}
HYBRID = {"axes": ("copy", "part"), "shard_axes": ("part",)}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Four processes for all tests of this file."""
    made = Pool(4)
    yield made
    made.close()


def train(case: str, zero: int, *, hybrid: bool) -> tuple[Trace, dict[str, Tensor]]:
    """A rank's trace, and the whole parameters that its DTensors give together with others'."""
    placement = FOUR if hybrid else LINE
    mesh = piper.Mesh((2, 2), ("copy", "part")) if hybrid else None
    options = HYBRID if hybrid else {}
    wanted = replicas.strategy(placement, 2, "one_f_one_b", zero=zero, mesh=mesh, **options)
    step = replicas.compiled(CASES[case], placement, wanted, timeout_s=30.0)
    batches = [replicas.mine(CASES[case].batch(k), placement) for k in range(STEPS)]
    trace = replicas.train(step, batches)
    held = [(n, p) for n, p in piper.named_parameters(step) if p.numel()]
    return trace, {n: p.full_tensor().detach() for n, p in held if zero}


def train_hybrid(case: str, zero: int) -> tuple[Trace, dict[str, Tensor]]:
    return train(case, zero, hybrid=True)


def train_line(case: str, zero: int) -> tuple[Trace, dict[str, Tensor]]:
    return train(case, zero, hybrid=False)


def train_experts(zero: int) -> Trace:
    """Two stages, each with experts that its two ranks share; the second rank's get no rows."""
    one, wanted = experts.case(shift=(9.0, 0.0, -9.0, -9.0)), experts.strategy
    step = replicas.compiled(one, LINE, wanted(LINE, 2, "one_f_one_b", zero=zero), timeout_s=30.0)
    return replicas.train(step, [replicas.mine(one.batch(k), LINE) for k in range(STEPS)])


def train_capacity() -> Trace:
    """The same with experts that take two rows each; those of the second rank get none."""
    one = experts.case(shift=(9.0, 0.0, -9.0, -9.0))
    wanted = experts.strategy(LINE, 2, "one_f_one_b", zero=1, capacity=2)
    step = replicas.compiled(one, LINE, wanted, timeout_s=30.0)
    return replicas.train(step, [replicas.mine(one.batch(k), LINE) for k in range(STEPS)])


def half_of(whole: Tensor, rank: int, placement: Placement, zero: int) -> Tensor:
    return replicas.shard(whole, 2, rank % 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "zero"),
    [
        ("tied", 0),
        ("uneven", 1),
        ("tied", 3),
    ],
)
def test_a_line_of_replicas(pool: Pool, case: str, zero: int) -> None:
    found = pool.values(train_line, case, zero)
    want = replicas.reference(CASES[case], 2)
    replicas.compare([trace for trace, _ in found], want, LINE, zero)
    check_whole([whole for _, whole in found], want)


@pytest.mark.parametrize("zero", [1, 3])
def test_copies_of_shards(pool: Pool, zero: int) -> None:
    found = pool.values(train_hybrid, "uneven", zero)
    want = replicas.reference(CASES["uneven"])
    replicas.compare([trace for trace, _ in found], want, FOUR, zero, part=half_of)
    check_whole([whole for _, whole in found], want)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_experts(pool: Pool, zero: int) -> None:
    """Rows of any number, none among them, by gloo's all-to-all."""
    want = replicas.reference(experts.case(shift=(9.0, 0.0, -9.0, -9.0)))
    found = pool.values(train_experts, zero)
    replicas.compare(found, want, LINE, zero, part=experts.part_of(2))


@pytest.mark.slow
def test_experts_with_a_capacity(pool: Pool) -> None:
    options = {"shift": (9.0, 0.0, -9.0, -9.0)}
    want = capacity.train(capacity.Reference(2, **options), experts.case(**options), 4)
    replicas.compare(pool.values(train_capacity), want, LINE, 1, part=experts.part_of(2))


def check_whole(found: list[dict[str, Tensor]], want: Trace) -> None:
    for rank, whole in enumerate(found):
        for name, value in whole.items():
            jobs.close(value, want.params[name], f"rank {rank}: {name} put together")


def test_a_step_sends_the_least_that_its_strategy_has_to(pool: Pool) -> None:
    """The other jobs are among the slow tests: tests/test_sent.py."""
    check_steps(pool, "2 replicas, zero 3")
