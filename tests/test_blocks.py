"""Blocks of gathered parameters: used again within a step, never while a tensor uses them."""

import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from piper_dynamo.runtime import blocks
from piper_dynamo.runtime.blocks import LEAST_BYTES, Blocks
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


def train(kind: type[Blocks]) -> Trace:
    """A rank's trace where every gathered parameter, however small, has such a block."""
    with (
        mock.patch.object(blocks, "LEAST_BYTES", 1),
        mock.patch("piper_dynamo.runtime.comm.Blocks", kind),
        mock.patch("piper_dynamo.runtime.launch._torch_comm", None),
    ):
        wanted = replicas.strategy(LINE, 2, "one_f_one_b", zero=3)
        step = replicas.compiled(CASES["tied"], LINE, wanted, timeout_s=30.0)
        batches = [replicas.mine(CASES["tied"].batch(k), LINE) for k in range(STEPS)]
        return replicas.train(step, batches)


@pytest.mark.dist(4)
def test_parity(pool: Pool):
    want = replicas.reference(CASES["tied"], 2)
    replicas.compare(pool.values(train, Blocks), want, LINE, 3)


@pytest.mark.dist(4)
def test_that_a_block_in_use_would_be_seen(pool: Pool):
    want = replicas.reference(CASES["tied"], 2)
    with pytest.raises(AssertionError):
        replicas.compare(pool.values(train, Shared), want, LINE, 3)
