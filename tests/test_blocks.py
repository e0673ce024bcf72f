"""Blocks of whole parameters and gradients: used again within a step, never while in use."""

import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import piper_dynamo as piper
from piper_dynamo import blocks
from piper_dynamo.blocks import LEAST_BYTES, Blocks
from piper_dynamo.lowering.aten import runnable_graph
from piper_dynamo.lowering.sums import passing
from tests import replicas
from tests.jobs import STEPS, Trace
from tests.pool import Pool
from tests.replicas import CASES, LINE

SIZE = LEAST_BYTES // 4
LIKE = torch.empty(0)


class Shared(Blocks):
    """Gives a block out again though a tensor may still use it."""

    made: dict[int, torch.Tensor]

    def empty(self, shape, like):
        if not hasattr(self, "made"):
            self.made = {}
        count = math.prod(shape)
        return self.made.setdefault(count, like.new_empty(count)).view(*shape)


def test_a_block_is_used_again_once_no_view_is_left():
    pool = Blocks()
    first = pool.empty((SIZE,), LIKE)
    place, view = first.data_ptr(), first[10:20]
    del first
    other = pool.empty((SIZE,), LIKE)
    assert other.data_ptr() != place
    del view
    assert pool.empty((2, SIZE // 2), LIKE).data_ptr() == place


def test_it_is_the_callers_alone():
    pool = Blocks()
    held = [pool.empty((SIZE,), LIKE).fill_(number) for number in range(4)]
    assert [set(one.tolist()) for one in held] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_what_lives_on_after_the_step_is_kept_and_then_given_back():
    pool = Blocks()
    value = pool.empty((SIZE,), LIKE).fill_(1.0)
    place = value.data_ptr()
    pool.give_back()
    assert value.sum() == SIZE
    del value
    assert not pool._free
    other = pool.empty((SIZE,), LIKE)
    assert other.data_ptr() != place or other[0] == 0.0  # of the system, cleared


def test_small_ones_and_dtypes():
    pool = Blocks()
    assert pool.empty((3, 5), LIKE).shape == (3, 5)
    assert not pool._free
    assert pool.empty((SIZE, 2), torch.empty(0, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert list(pool._free) == [LEAST_BYTES]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Four processes for all tests of this file."""
    made = Pool(4)
    yield made
    made.close()


def train(kind: type[Blocks], zero: int) -> tuple[Trace, int]:
    """A rank's trace where every block, however small, is the pool's; and how many were made."""
    made = []
    of_the_system = blocks._of_the_system
    with (
        mock.patch.object(blocks, "LEAST_BYTES", 1),
        mock.patch.object(blocks, "POOL", kind()),
        mock.patch.object(blocks, "_of_the_system", lambda n: made.append(n) or of_the_system(n)),
    ):
        wanted = replicas.strategy(LINE, 2, "one_f_one_b", zero=zero)
        step = replicas.compiled(CASES["tied"], LINE, wanted, timeout_s=30.0)
        batches = [replicas.mine(CASES["tied"].batch(k), LINE) for k in range(STEPS)]
        return replicas.train(step, batches), len(made)


@pytest.mark.dist(4)
@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parity(pool: Pool, zero: int):
    want = replicas.reference(CASES["tied"], 2)
    found = pool.values(train, Blocks, zero)
    replicas.compare([trace for trace, _ in found], want, LINE, zero)
    assert all(made for _, made in found)


@pytest.mark.dist(4)
def test_that_a_block_in_use_would_be_seen(pool: Pool):
    want = replicas.reference(CASES["tied"], 2)
    found = [trace for trace, _ in pool.values(train, Shared, 3)]
    with pytest.raises(AssertionError):
        replicas.compare(found, want, LINE, 3)


def test_whole_gradients_that_are_scattered_are_written_into_blocks() -> None:
    """And those that are summed first, at lower levels, are not."""
    lent = {}
    for zero in (1, 2):
        wanted = replicas.strategy(LINE, 2, "one_f_one_b", zero=zero)
        one = [value.chunk(2)[0] for value in CASES["plain"].batch(0)]
        plan = piper.plan(CASES["plain"].build(2), wanted, one, 4)
        program = plan.programs[0]
        lent[zero] = [
            (name, node.kwargs["out"].target)
            for name, places in passing(program).items()
            for node in runnable_graph(plan.chunks[name], (), places).nodes
            if node.target is torch.ops.aten.mm.out
        ]
    assert not lent[1]
    assert {target for _, target in lent[2]} == {blocks.empty}
