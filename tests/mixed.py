"""Mixed precision by hand, in one process: what `piper.Precision` is compared with.

The master is float64, so that sums of rounded gradients are exact and in whatever order the same;
chunks compute in bfloat16, operator by operator as eager does, to the bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import piper_dynamo as piper
from tests import jobs, replicas
from tests.jobs import CLIP, STEPS, Placement, Trace
from tests.models import fill, weights

BF16 = torch.bfloat16


class Net(nn.Module):
    """Four layers with a norm between them; the loss is made in the master's dtype."""

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.w = weights(4)
        self.norm = nn.LayerNorm(4, dtype=torch.float64)
        self.stages = stages

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k in range(4):
            with piper.annotate("PP", k * self.stages // 4):
                h = torch.tanh(F.linear(h, self.w[k]))
                if k == 1:
                    h = self.norm(h)
        with piper.annotate("PP", self.stages - 1):
            return F.mse_loss(h.double(), y.double())


class Tied(nn.Module):
    """Embedding and head share a weight, `a` is used twice in the first stage.

    `apart` gives the head a parameter of its own: regions round the parts of a gradient apart.
    """

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.e, self.a = nn.Parameter(fill([11, 4], 2)), nn.Parameter(fill([4, 4], 1))
        self.head = nn.Parameter(fill([11, 4], 2)) if apart else None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.linear(F.embedding(ids, self.e), self.a))
            h = torch.tanh(F.linear(h, self.a))
        with piper.annotate("PP", 1):
            head = self.e if self.head is None else self.head
            logits = F.linear(h, head).double()
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """A layer of four experts between two dense ones; the tokens' experts are given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)
        self.experts = nn.Parameter(torch.stack([fill([4, 4], k) for k in range(4)]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.linear(x, self.w[0]))
            rows, routing = piper.moe.dispatch(h, self.index(h), 4)
            with piper.annotate("EP", 0):
                rows = torch.tanh(piper.moe.grouped_mm(rows, self.experts, routing))
            h = h + piper.moe.combine(rows, routing).squeeze(1)
            return F.mse_loss(F.linear(h, self.w[1]).double(), y.double())

    @staticmethod
    def index(h: Tensor) -> Tensor:
        return (torch.arange(h.shape[0]) * 7 % 4).unsqueeze(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExperts:
    """A step of `Experts` on two replicas that share the experts: each sees the rows of both."""

    def step(self, model: nn.Module, batch: Sequence[Tensor]) -> float:
        """Set the gradients; returns the loss."""
        assert isinstance(model, Experts)
        total, pairs = 0.0, [jobs.slices(rows, 2) for rows in jobs.slices(batch, 2)]
        for pieces in zip(*pairs, strict=True):  # a microbatch of each replica
            dense = [[p.detach().to(BF16).requires_grad_() for p in model.w] for _ in pieces]
            experts = model.experts.detach().to(BF16).requires_grad_()
            given = [(x.to(BF16), y.to(BF16).double()) for x, y in pieces]
            before = [torch.tanh(F.linear(x, w[0])) for (x, _), w in zip(given, dense, strict=True)]
            index = torch.cat([model.index(h) for h in before])
            rows, routing = piper.moe.dispatch(torch.cat(before), index, 4)
            rows = torch.tanh(piper.moe.grouped_mm(rows, experts, routing))
            after = piper.moe.combine(rows, routing).squeeze(1).chunk(2)
            for h, more, w, (_, y) in zip(before, after, dense, given, strict=True):
                loss = F.mse_loss(F.linear(h + more, w[1]).double(), y)
                (loss / 4).backward(retain_graph=True)
                total += loss.item() / 4
            for param, leaves in zip(model.w, zip(*dense, strict=True), strict=True):
                _add(param, _sum([leaf.grad for leaf in leaves], torch.float64))
            _add(model.experts, experts.grad.double())
        return total


def _add(param: Tensor, grad: Tensor) -> None:
    param.grad = grad if param.grad is None else param.grad + grad


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """How a step in mixed precision is done.

    Attributes:
        replicas: Each is given as many rows.
        microbatches: Of each replica.
        computed: What the model computes in.
        summed: What gradients of microbatches are summed in.
        reduced: What those of replicas are summed in.
        each: Whether replicas are summed for each microbatch (ZeRO 2 and 3).
        is_cast: Which parameters are computed in `computed`; inputs are, too, where all are.
    """

    replicas: int = 1
    microbatches: int = 2
    computed: torch.dtype = BF16
    summed: torch.dtype = torch.float64
    reduced: torch.dtype = torch.float64
    each: bool = False
    is_cast: Callable[[str], bool] = lambda name: True

    def step(self, model: nn.Module, batch: Sequence[Tensor]) -> float:
        """Set the gradients; returns the loss."""
        whole = dict(model.named_parameters())
        share = 1.0 / (self.replicas * self.microbatches)
        total, parts = 0.0, []
        for rows in jobs.slices(batch, self.replicas):
            parts.append([])
            for piece in jobs.slices(rows, self.microbatches):
                leaves = {
                    n: p.detach().to(self.computed if self.is_cast(n) else p.dtype).requires_grad_()
                    for n, p in whole.items()
                }
                given = [v.to(self.computed) if v.is_floating_point() else v for v in piece]
                loss = functional_call(model, leaves, tuple(given))
                total += loss.item() * share
                weight = torch.tensor(share, dtype=loss.dtype)
                grads = torch.autograd.grad(loss, list(leaves.values()), weight)
                parts[-1].append(dict(zip(leaves, grads, strict=True)))
        for name, param in whole.items():
            param.grad = self._sum([[mb[name] for mb in one] for one in parts]).to(param.dtype)
        return total

    def _sum(self, parts: list[list[Tensor]]) -> Tensor:
        if self.each:
            columns = zip(*parts, strict=True)
            return _sum([_sum(list(column), self.reduced) for column in columns], self.summed)
        sums = [_sum(one, self.summed) for one in parts]
        return _sum(sums, self.reduced) if len(sums) > 1 else sums[0]


def _sum(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = values[0].to(dtype, copy=True)
    for value in values[1:]:
        total.add_(value.to(dtype))
    return total


def reference(
    build: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    how: ByHand,
    ties: dict[str, str] | None = None,
) -> Trace:
    """Clipped steps by hand; `ties` names copies of a parameter and their first."""
    model, trace = build(), Trace()
    named = dict(model.named_parameters())
    copies = {named[a]: named[b] for a, b in (ties or {}).items()}
    params = [p for p in named.values() if p not in copies]
    for make in replicas.OPTIMIZERS:
        optimizer = make(params)
        for k in range(STEPS):
            trace.losses.append(how.step(model, batch(k)))
            for copy, first in copies.items():
                assert first.grad is not None
                first.grad += copy.grad
            trace.norms.append(float(nn.utils.clip_grad_norm_(params, CLIP)))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for copy, first in copies.items():
                    copy.copy_(first)
    trace.params.update({n: p.detach().clone() for n, p in named.items() if p not in copies})
    return trace


def run(
    build: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    placement: Placement,
    wanted: piper.Strategy,
    **options: Any,
) -> list[Trace]:
    """The traces of all ranks."""

    def job() -> Trace:
        given = [replicas.mine(batch(k), placement) for k in range(STEPS)]
        step = piper.compile(build(), wanted, example_inputs=given[0], **options)
        return replicas.train(step, given)

    return jobs.run_ranks(job, jobs.world(placement))
