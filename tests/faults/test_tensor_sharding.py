"""Tensor sharding is put off: what asks for it is refused by name (R16, R36, R48, R72)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs
from tests.faults.fixtures import Lin53, Moe2
from tests.models import fill, rows, xin
from tests.replicas import PAIR


class Normed(nn.Module):
    """A LayerNorm whose tokens ranks would share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return (F.layer_norm(x, (4,), self.weight) * y).sum()


class Dense(nn.Module):
    """A weight whose shards would have norms of their own, and a bias that all would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(fill([2, 4], 0)), nn.Parameter(fill([2], 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return F.mse_loss(x @ self.w.T + self.b, y[:, :2])


class Both(Moe2):
    """Experts with a dense layer before them, in a region of its own that is to be split, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        with piper.annotate("PP", 0), piper.annotate("TP", 0):
            x = x @ self.dense
        return super().forward(x, chosen)


CASES = {
    "R16": (Both, Moe2.batch(), {"TP": 0}),
    "R36": (Lin53, (xin([4, 3], 0), xin([4, 5], 2)), {"PP": 0}),
    "R48": (Dense, rows(4), {"PP": 0}),
    "R72": (Normed, rows(4), {"PP": 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_no_experts_are_not_split(case: str) -> None:
    """R72, replicated norm weights, and the tensor-sharding parts of R16, R36 and R48: refused."""
    build, batch, region = CASES[case]
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=1),
        *jobs.places(PAIR),
        piper.Replicate({"PP": "*"}),
        piper.Shard(region),
    )
    text = jobs.refusal(lambda: piper.plan(build(), wanted, batch), piper.PiperPlanError)
    jobs.mentions(text, "the experts cannot be sharded", "tensor parallelism", "not built")
    jobs.mentions(text, "test_tensor_sharding.py" if case != "R36" else "fixtures.py")
