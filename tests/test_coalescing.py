"""Small values of a collective travel as one, and come as if each had travelled alone."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from piper_dynamo.ir.program import Op
from piper_dynamo.runtime import coalescing
from piper_dynamo.runtime.coalescing import together
from piper_dynamo.runtime.world import communicator, rank
from tests.pool import Pool

pytestmark = pytest.mark.dist(3)

RANKS = 3
GROUP = ("test", (0, 1, 2))
# Rows of each whole value: shards of some are uneven, of some empty; large ones travel alone.
VALUES = (
    ((7, 3), torch.float32),
    ((1,), torch.float64),
    ((2, 2), torch.float32),
    ((200, 300), torch.float32),
    ((6,), torch.int64),
    ((0, 4), torch.float32),
    ((5, 1, 2), torch.float32),
    ((9,), torch.float64),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(RANKS)
    yield made
    made.close()


def wholes(of: int) -> list[Tensor]:
    """A rank's values, whole numbers so that sums are exact."""
    torch.manual_seed(of)
    return [torch.randint(-99, 99, shape).to(dtype) for shape, dtype in VALUES]


def rows_of(whole: Tensor) -> int:
    return -(-whole.shape[0] // RANKS)


def run(op: Op) -> tuple[list[Tensor], int]:
    """What this rank gets, and how many messages and reductions it took part in."""
    comm = communicator(30.0)
    comm.prepare_groups([GROUP])
    mine = wholes(rank())
    if op is Op.ALL_GATHER:
        likes = mine
        values = [coalescing.with_rows(v, RANKS * rows_of(v)) for v in wholes(0)]
        values = [v.narrow(0, rank() * rows_of(v), rows_of(v)) for v in values]
    elif op is Op.REDUCE_SCATTER:
        values, likes = mine, [v.new_empty((rows_of(v), *v.shape[1:])) for v in mine]
    else:
        values, likes = mine, mine
    started = 0
    send, reduce = dist.isend, dist.all_reduce

    def counted(call: object) -> object:
        def counting(*args: object, **kwargs: object) -> object:
            nonlocal started
            started += 1
            return call(*args, **kwargs)  # type: ignore[operator]

        return counting

    dist.isend, dist.all_reduce = counted(send), counted(reduce)  # type: ignore[assignment]
    try:
        found = comm.wait_all(comm.start_collective(op, values, GROUP, likes))
    finally:
        dist.isend, dist.all_reduce = send, reduce
    if op is Op.ALL_REDUCE:
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(found, values, strict=True))
    return found, started


def expected(op: Op, of: int) -> list[Tensor]:
    if op is Op.ALL_GATHER:
        return wholes(0)
    sums = [sum(column[1:], column[0]) for column in zip(*map(wholes, range(RANKS)), strict=True)]
    if op is Op.ALL_REDUCE:
        return sums
    whole = [coalescing.with_rows(v, RANKS * rows_of(v)) for v in sums]
    return [v.narrow(0, of * rows_of(v), rows_of(v)) for v in whole]


# float32: small ones in one, and a large one, whatever its shards; float64 in one; int64.
@pytest.mark.parametrize(
    ("op", "starts"), [(Op.ALL_REDUCE, 4), (Op.ALL_GATHER, 2 * 4), (Op.REDUCE_SCATTER, 2 * 4)]
)
def test_over_gloo(op: Op, starts: int, pool: Pool) -> None:
    for of, outcome in enumerate(pool.run(run, op)):
        found, started = outcome.value
        assert started == starts
        for one, want in zip(found, expected(op, of), strict=True):
            assert one.dtype == want.dtype
            assert one.shape == want.shape
            assert torch.equal(one, want)


def test_which_travel_together() -> None:
    small, large = torch.zeros(4), torch.zeros(coalescing.SMALL_BYTES)
    assert together(Op.ALL_REDUCE, [small, large, small, torch.zeros(0)], 2) == [[0, 2], [1], [3]]
    assert together(Op.ALL_REDUCE, [small.double(), small, small], 2) == [[0], [1, 2]]
    assert together(Op.ALL_TO_ALL, [small, small], 2) == [[0], [1]]
    assert together(Op.ALL_REDUCE, [small.to("meta"), small.to("meta")], 2) == [[0], [1]]
    many = together(Op.ALL_REDUCE, [torch.zeros(coalescing.SMALL_BYTES // 4)] * 33, 2)
    assert [len(places) for places in many] == [32, 1]
    half = torch.zeros(coalescing.SMALL_BYTES // 8)  # of float32: a gathered value is counted whole
    assert together(Op.ALL_GATHER, [half, half], 2) == [[0, 1]]
    assert together(Op.ALL_GATHER, [half, half], 3) == [[0], [1]]
