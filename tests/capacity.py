"""Experts with a capacity in tests: plain PyTorch that drops the same rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests import experts, replicas
from tests.experts import EXPERTS, Mixture
from tests.jobs import CLIP, STEPS, Placement, Trace
from tests.replicas import OPTIMIZERS, Case

Kept = Callable[[list[int], int], list[int]]


def first(rows: list[int], most: int) -> list[int]:
    """The rule: an expert's first rows in the order of the tokens."""
    return rows[:most]


def last(rows: list[int], most: int) -> list[int]:
    """A wrong rule."""
    return rows[-most:]


class Reference(Mixture):
    """The mixture expert by expert, without Piper's operators: `most` rows of each."""

    def __init__(self, most: int, kept: Kept = first, **options: Any) -> None:
        super().__init__(**options)
        self.most, self.kept = most, kept

    def mix(self, h: Tensor, layer: int) -> Tensor:
        weights, index = (h @ self.gate[layer] + self.shift).softmax(-1).topk(self.top)
        total = torch.zeros_like(h)
        flat = index.flatten().tolist()
        for expert in range(EXPERTS):
            mine = [row for row, chosen in enumerate(flat) if chosen == expert]
            rows = torch.tensor(self.kept(mine, self.most), dtype=torch.int64)
            tokens = rows // self.top
            found = self.expert(h[tokens], layer, expert) * weights.flatten()[rows].unsqueeze(1)
            total = total.index_add(0, tokens, found)
        return total

    def expert(self, rows: Tensor, layer: int, expert: int) -> Tensor:
        return torch.tanh(rows @ self.up[layer][expert]) @ self.down[layer][expert]


def train(model: nn.Module, case: Case, parts: int, steps: int = STEPS) -> Trace:
    """Clipped steps in one process; the batch in as many parts as ranks have microbatches."""
    trace = Trace()
    for make in OPTIMIZERS:
        optimizer = make(model.parameters())
        for step in range(steps):
            whole = 0.0
            for part in zip(*(value.chunk(parts) for value in case.batch(step)), strict=True):
                loss = model(*part) / parts
                loss.backward()
                whole += loss.item()
            trace.losses.append(whole)
            trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    trace.params.update({n: p.detach().clone() for n, p in model.named_parameters()})
    return trace


def check(
    wanted: Any,
    placement: Placement,
    microbatches: int,
    most: int,
    *,
    zero: int = 0,
    size: int = 0,
    kept: Kept = first,
    **options: Any,
) -> None:
    """Ranks under this strategy equal plain PyTorch that keeps `most` rows of each expert."""
    one = experts.case(**options)
    count = replicas.replicas(placement)
    ranks = replicas.run(one, placement, wanted)
    want = train(Reference(most, kept, **options), one, count * microbatches)
    # Where nobody shares experts they are parameters like others.
    part = experts.part_of(size or count) if (size or count) > 1 else replicas.part_of
    replicas.compare(ranks, want, placement, zero, part=part)
