"""The program of `docs/cuda-program.txt`: a small plan as CUDA runs it.

One expert layer on each of two stages; 1F1B over two microbatches; experts over the two replicas,
ZeRO-3 for the rest.
"""

import torch
from torch import Tensor, nn

import piper_dynamo as piper

EXPERTS = 4
PLACEMENT = {0: [0, 1], 1: [2, 3]}
MICROBATCHES = 2
RANK = 0


class Layers(nn.Module):
    """Two layers: a gate, and experts of one matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.ParameterList(nn.Parameter(torch.zeros(8, EXPERTS)) for _ in PLACEMENT)
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(EXPERTS, 8, 8)) for _ in PLACEMENT)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of what the layers make of x [n, 8]."""
        for stage in PLACEMENT:
            with piper.annotate("PP", stage):
                chances = (x @ self.gate[stage]).softmax(-1)
                weights, index = chances.topk(1)
                sent, routing = piper.moe.dispatch(x, index, EXPERTS)
                with piper.annotate("EP"):
                    out = piper.moe.grouped_mm(sent, self.up[stage], routing)
                x = x + piper.moe.combine(out, routing, weights)
        with piper.annotate("PP", max(PLACEMENT)):
            return x.square().mean()


def cuda_program() -> str:
    """The text of the page."""
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=MICROBATCHES),
        *(piper.Place({"PP": stage}, devices=ranks) for stage, ranks in PLACEMENT.items()),
        piper.Replicate({"PP": "*"}, zero=3),
        piper.Shard({"EP": "*"}),
        *piper.schedules.one_f_one_b(PLACEMENT, MICROBATCHES),
    )
    plan = piper.plan(Layers(), strategy, (torch.zeros(8, 8),))
    return str(plan.program(RANK, device="cuda"))
