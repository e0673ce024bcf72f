"""Mixtures of experts in tests: a small model, and what each rank must hold of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs, replicas
from tests.jobs import Placement
from tests.models import fill, rows
from tests.replicas import Case

EXPERTS = 4


class Mixture(nn.Module):
    """Four residual layers, each a gate and experts of two matrices; the loss is a mean.

    Routing follows the values, so that microbatches, replicas and steps differ in it. `shift` adds
    to the gate's logits by expert: a large one leaves others without any token. Models that differ
    in what their experts compute override `experts`.
    """

    def __init__(
        self, stages: int = 1, *, top: int = 2, shift: tuple[float, ...] = (0.0,) * EXPERTS
    ) -> None:
        super().__init__()
        self.stages, self.top = stages, top
        self.gate = nn.ParameterList(fill([4, EXPERTS], 20 + k) for k in range(4))
        self.up = nn.ParameterList(fill([EXPERTS, 4, 3], k) for k in range(4))
        self.down = nn.ParameterList(fill([EXPERTS, 3, 4], 10 + k) for k in range(4))
        self.register_buffer("shift", torch.tensor(shift, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for layer in range(4):
            with piper.annotate("PP", layer * self.stages // 4):
                h = torch.tanh(h + self.mix(h, layer))
        with piper.annotate("PP", self.stages - 1):
            return (h - y).square().mean()

    def mix(self, h: Tensor, layer: int) -> Tensor:
        chances = (h @ self.gate[layer] + self.shift).softmax(-1)
        weights, index = chances.topk(self.top)
        sent, routing = piper.moe.dispatch(h, index, EXPERTS)
        with piper.annotate("EP"):
            out = self.experts(sent, layer, routing)
        return piper.moe.combine(out, routing, weights)

    def experts(self, sent: Tensor, layer: int, routing: piper.moe.Routing) -> Tensor:
        inner = torch.tanh(piper.moe.grouped_mm(sent, self.up[layer], routing))
        return piper.moe.grouped_mm(inner, self.down[layer], routing)


def case(num_rows: int = 24, **options: Any) -> Case:
    """The model with these options on so many rows; every call of `build` gives equal values."""
    return Case(
        build=lambda stages: Mixture(stages, **options), batch=lambda step: rows(num_rows, 2 * step)
    )


def is_expert(name: str) -> bool:
    return name.startswith(("up", "down"))


def strategy(
    placement: Placement, microbatches: int, schedule: str, *, zero: int = 0, **options: Any
) -> piper.Strategy:
    """Experts split over all ranks of their region, the rest replicated."""
    return piper.Strategy(
        piper.Split({}, num_microbatches=microbatches),
        *jobs.places(placement, schedule, microbatches),
        piper.Replicate({"PP": "*"}, zero=zero),
        piper.Shard({"EP": "*"}, **options),
        *jobs.orders(schedule, placement, microbatches),
    )


def part_of(size: int) -> Callable[[Tensor, int, Placement, int], Tensor]:
    """What a rank must hold where `size` ranks, next to each other, share the experts.

    From ZeRO 1 on, the ranks that hold the same experts share those again.
    """

    def part(whole: Tensor, rank: int, placement: Placement, zero: int) -> Tensor:
        if whole.dim() != 3:  # experts' matrices are the only parameters with three dims
            return replicas.part_of(whole, rank, placement, zero)
        replica, copies = replicas.replica_of(rank, placement), replicas.replicas(placement) // size
        mine = whole.chunk(size)[replica % size]
        return replicas.shard(mine, copies, replica // size) if zero else mine

    return part


def check(
    wanted: piper.Strategy, placement: Placement, *, zero: int = 0, size: int = 0, **options: Any
) -> None:
    """Ranks under this strategy equal one process on the global batch."""
    one = case(**options)
    ranks = replicas.run(one, placement, wanted)
    part = part_of(size or replicas.replicas(placement))
    replicas.compare(ranks, replicas.reference(one), placement, zero, part=part)


def copies(
    microbatches: int,
    placement: Placement,
    schedule: str,
    num_copies: int = 2,
    *,
    capacity: int | float | None = None,
    **options: Any,
) -> piper.Strategy:
    """Two ranks share the experts, and there are two copies of them, or more."""
    return piper.Strategy(
        piper.Split({}, num_microbatches=microbatches),
        *jobs.places(placement, schedule, microbatches),
        piper.Replicate({"PP": "*"}, axes=("dp", "ep"), **options),
        piper.Shard({"EP": "*"}, axes=("ep",), capacity=capacity),
        *jobs.orders(schedule, placement, microbatches),
        mesh=piper.Mesh((num_copies, 2), ("dp", "ep")),
    )
