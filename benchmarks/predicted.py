"""Step times that the simulator predicts where there is no machine: nothing here was run.

The models are those of Piper's paper (arXiv 2606.11169), Qwen3-like with experts: 1B and 9B. A
chunk takes as long as its arithmetic or its memory traffic at the published peak rates, operator by
operator (`Costs.roofline`): real steps are slower, and the figures say how schedules compare.
Layers are shared out so that the fullest stage has as little work as it can; the head, which works
as much as several layers, is in the last. Rows say what part of all work the fullest stage has.
Rates: NVIDIA's data sheets of A100 SXM 80 GB and H100 SXM (bfloat16 without sparsity). Links: each
GPU's share of its host's network, 4 x 100 Gbit/s for 8 A100 and 3.2 Tbit/s for 8 H100 (AWS p4d and
p5); all messages take them, also within a host. A message's latency is assumed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from benchmarks.report import Row
from piper_dynamo.strategies import placement
from piper_dynamo.train.model import Attention, rotary_table

VOCAB, SEQ, ROWS, TOP_K = 151_936, 512, 4, 2  # of a microbatch: 4 rows of 512 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's sizes."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    experts: int
    hidden: int


SHAPES = {
    "1B": Shape(dim=1024, layers=16, heads=16, kv_heads=8, experts=4, hidden=3584),
    "9B": Shape(dim=2048, layers=24, heads=32, kv_heads=8, experts=8, hidden=7168),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Published peak rates, per second."""

    flops: float
    memory_bandwidth: float
    link: float


GPUS = {
    "A100": Gpu(flops=312e12, memory_bandwidth=2.039e12, link=50e9 / 8),
    "H100": Gpu(flops=989e12, memory_bandwidth=3.35e12, link=400e9 / 8),
}
LATENCY_S = 20e-6  # assumed
# Model, pipeline ranks, ranks that share experts.
LAYOUTS = (("1B", 8, 1), ("1B", 8, 4), ("9B", 4, 4), ("9B", 8, 4))
SCHEDULES = ("one_f_one_b", "interleaved_1f1b", "dualpipev")


class Layer(nn.Module):
    """Attention and experts, each behind an RMSNorm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.attention = Attention(shape.dim, shape.heads, shape.kv_heads)
        self.moe = piper.moe.MoELayer(shape.dim, shape.hidden, shape.experts, TOP_K)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TC, sin_TC)
        out: Tensor = x_BTD + self.moe(self.moe_norm(x_BTD))
        return out


def head_in_layers(shape: Shape) -> float:
    """The head's work in that of a layer: by the parameters that a token is multiplied with."""
    head_dim = shape.dim // shape.heads
    attention = 2 * shape.dim * (shape.heads + shape.kv_heads) * head_dim
    return VOCAB * shape.dim / (attention + 3 * TOP_K * shape.dim * shape.hidden)


def stages_by_work(layers: int, head: float, stages: int) -> tuple[list[int], float]:
    """The stage of each layer, and the part of all work that the fullest stage has: the least.

    Args:
        layers: How many, each of work 1; every stage but the last has at least one.
        head: Its work; it is in the last stage.
        stages: How many, at least two.
    """
    others = stages - 1

    def fullest(last: int) -> float:
        return max(last + head, math.ceil((layers - last) / others))

    last = min(range(layers - others + 1), key=fullest)
    ahead = layers - last
    stage_of = [i * others // ahead for i in range(ahead)] + [others] * last
    return stage_of, fullest(last) / (layers + head)


class Qwen(nn.Module):
    """A decoder with experts whose layers are shared out over stages."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, stages: int) -> None:
        super().__init__()
        self.stage_of, _ = stages_by_work(shape.layers, head_in_layers(shape), stages)
        self.last = stages - 1
        self.embedding = nn.Embedding(VOCAB, shape.dim)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, VOCAB, bias=False)
        cos, sin = rotary_table(SEQ, shape.dim // shape.heads)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.to(torch.bfloat16)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """[B, T] and [B, T] -> mean cross entropy."""
        with piper.annotate("PP", 0):
            x_BTD = self.embedding(tokens_BT)
        for layer, stage in zip(self.layers, self.stage_of, strict=True):
            with piper.annotate("PP", stage):
                x_BTD = layer(x_BTD, self.cos, self.sin)
        with piper.annotate("PP", self.last):
            logits_BTV = self.head(self.norm(x_BTD))
            return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def plan_of(name: str, schedule: str, ranks: int, sharers: int) -> piper.Plan:
    """The plan of a layout, without memory for the model."""
    stages, microbatches = len(placement(schedule, ranks)), 2 * ranks
    with torch.device("meta"):
        model = Qwen(SHAPES[name], stages)
    strategy = piper.strategies.pipeline(
        schedule,
        ranks=ranks,
        num_microbatches=microbatches,
        replicas=sharers,
        expert_ranks=sharers,
    )
    tokens = torch.zeros(ROWS * microbatches, SEQ, dtype=torch.int64)
    return piper.plan(model, strategy, (tokens, tokens.clone()), world_size=ranks * sharers)


def run() -> Iterator[Row]:
    """Every layout, schedule and GPU, beside 1F1B of the same."""
    for name, ranks, sharers in LAYOUTS:
        plain: dict[str, float] = {}
        for schedule in SCHEDULES:
            plan = plan_of(name, schedule, ranks, sharers)
            shape, stages = SHAPES[name], len(placement(schedule, ranks))
            _, fullest = stages_by_work(shape.layers, head_in_layers(shape), stages)
            for kind, gpu in GPUS.items():
                costs = piper.Costs.roofline(
                    plan.chunks,
                    flops=gpu.flops,
                    memory_bandwidth=gpu.memory_bandwidth,
                    alpha=LATENCY_S,
                    bandwidth=gpu.link,
                )
                took = plan.simulate(costs).makespan
                base = plain.setdefault(kind, took)
                tokens = 2 * ranks * ROWS * SEQ * sharers
                yield Row(
                    section="predicted",
                    what=f"{name}, {kind}, PP {ranks} x EP {sharers}, {schedule}",
                    figures=f"predicted {took * 1e3:.1f} ms, {tokens / took:.0f} tokens/s, "
                    f"{base / took:.2f} x as fast as 1F1B; the fullest of {stages} stages has "
                    f"{fullest:.0%} of the work",
                    data={"ours": took, "theirs": base, "unit": "s", "tokens_per_s": tokens / took}
                    | {"measured": "predicted", "fullest": fullest},
                )
