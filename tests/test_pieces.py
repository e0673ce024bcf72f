"""Regions cut at buckets of parameters, and at repeated blocks."""

import pytest
import torch
from torch import nn

import piper_dynamo as piper
from piper_dynamo.filters import Filter
from piper_dynamo.passes.pieces import Cuts
from piper_dynamo.passes.regions import find_regions
from tests.tracing import capture


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, dtype=torch.float64)
        self.down = nn.Linear(2 * dim, dim, dtype=torch.float64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Four equal blocks on two stages."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(4))

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            with piper.annotate("PP", i // 2):
                x = block(x)
                if i == 3:
                    x = x.square().mean()
        return x


BLOCK = (2 * 4 * 8 + 8 + 4) * 8  # bytes of a block's parameters
X = torch.ones(4, 4, dtype=torch.float64)


def regions(cuts: Cuts) -> list[str]:
    found = find_regions(capture(Stack(), (X,), 2).capture, cuts)
    return [str(region) for region in found.order]


def test_without_cuts_a_stage_is_one_region():
    assert regions(Cuts()) == ["PP0", "PP1"]


def test_every_block_is_a_piece():
    assert regions(Cuts(blocks=(Filter({}),))) == ["PP0", "PP0.v1", "PP1", "PP1.v1"]


@pytest.mark.parametrize(
    ("size", "pieces"),
    [(2 * BLOCK, 1), (2 * BLOCK - 1, 2), (BLOCK, 2), (BLOCK - 1, 4), (1, 4)],
)
def test_a_bucket_takes_what_fits(size: int, pieces: int):
    """A parameter larger than the bucket is alone in one; a block that fits is not torn."""
    found = regions(Cuts(buckets=((Filter({"PP": 0}), size),)))
    assert found == ["PP0", *(f"PP0.v{i}" for i in range(1, pieces)), "PP1"]


def test_equal_blocks_are_cut_alike_and_compiled_once():
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        piper.Place({"PP": [0, 1]}, devices=[0, 1]),
        piper.Replicate({"PP": "*"}, zero=3, bucket_mb=BLOCK / 2**20),
    )
    found = piper.plan(Stack(), strategy, (X,), world_size=2)
    keys = {name: key for program in found.programs for name, key in program.chunks}
    assert keys["F_PP0_v1"] == keys["F_PP1"]
    assert keys["B_PP0_v1"] == keys["B_PP1"]
