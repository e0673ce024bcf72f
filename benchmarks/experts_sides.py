"""What the expert benchmarks compare: a small mixture under Piper, and torch stages that wait.

Legend: T tokens of a microbatch, D model width, H width of an expert, E experts, K per token.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from benchmarks.links import exposed_s
from benchmarks.sides import torch_schedule
from piper_dynamo.ir.task import TaskName
from piper_dynamo.runtime.executor import sleep_until
from piper_dynamo.strategies import placement
from piper_dynamo.timeline import Timeline

EXPERT_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One set-up.

    Attributes:
        ranks: Pipeline ranks, with `EXPERT_RANKS` replicas each, which share the experts.
        mbit: What a rank's link carries, in 10^6 bits per second.
        unit_s: On emulated devices: forward, input gradient and weight gradient of a rank's whole
            share of a microbatch, each. None: chunks compute.
        dense: Hidden width of the dense part of each layer, which every rank has; 0: none.
    """

    ranks: int
    mbit: float
    unit_s: float | None = None
    microbatches: int = 8
    layers: int = 4
    tokens: int = 512
    dim: int = 512
    hidden: int = 512
    dense: int = 0
    experts: int = 8
    top_k: int = 2

    @property
    def world(self) -> int:
        """Processes."""
        return self.ranks * EXPERT_RANKS

    def strategy(self, schedule: str) -> piper.Strategy:
        """Piper's: replicas of each pipeline rank share the experts."""
        return piper.strategies.pipeline(
            schedule,
            ranks=self.ranks,
            num_microbatches=self.microbatches,
            replicas=EXPERT_RANKS,
            expert_ranks=EXPERT_RANKS,
        )


class Mixture(nn.Module):
    """Residual layers of a dense part and of experts behind a gate; each is in one stage."""

    def __init__(self, job: Job, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stage_of = [k * stages // job.layers for k in range(job.layers)]
        self.experts, self.top_k = job.experts, job.top_k
        self.scale = nn.Parameter(torch.ones(job.dim))  # so that the first layer's input has a use
        sizes = [(job.dim, job.dense), (job.dense, job.dim)] if job.dense else []
        self.dense = nn.ModuleList(
            nn.ParameterList(_weight(*size) for size in sizes) for _ in self.stage_of
        )
        self.gate = nn.ParameterList(_weight(job.dim, job.experts) for _ in self.stage_of)
        self.up = nn.ParameterList(_weight(job.experts, job.dim, job.hidden) for _ in self.stage_of)
        self.down = nn.ParameterList(
            _weight(job.experts, job.hidden, job.dim) for _ in self.stage_of
        )

    def forward(self, x_TD: Tensor, y_TD: Tensor) -> Tensor:
        """[T, D] and [T, D] -> mean square error."""
        with piper.annotate("PP", 0):
            x_TD = x_TD * self.scale
        for layer, stage in enumerate(self.stage_of):
            with piper.annotate("PP", stage):
                part: Any = self.dense[layer]
                if len(part):
                    first, second = part
                    x_TD = x_TD + (x_TD @ first).relu() @ second
                weights_TK, index_TK = (x_TD @ self.gate[layer]).softmax(-1).topk(self.top_k)
                rows, routing = piper.moe.dispatch(x_TD, index_TK, self.experts)
                with piper.annotate("EP"):
                    inner = piper.moe.grouped_mm(rows, self.up[layer], routing).relu()
                    out = piper.moe.grouped_mm(inner, self.down[layer], routing)
                x_TD = x_TD + piper.moe.combine(out, routing, weights_TK)
        with piper.annotate("PP", self.stage_of[-1]):
            return F.mse_loss(x_TD, y_TD)


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / shape[-2] ** 0.5)


def one_by_one(strategy: piper.Strategy) -> piper.Strategy:
    """The same order without interleaving: each group of several filters becomes groups of one."""
    return piper.Strategy(
        *(
            piper.Order([[task] for group in d.groups for task in group])
            if isinstance(d, piper.Order)
            else d
            for d in strategy.directives
        ),
        mesh=strategy.mesh,
    )


class PiperMixture:
    """Forward and backward of one step under a schedule; gradients are dropped."""

    def __init__(self, job: Job, schedule: str, *, interleaved: bool = True) -> None:
        stages = len(placement(schedule, job.ranks))
        strategy = job.strategy(schedule)
        options: dict[str, Any] = {}
        if job.unit_s is not None:
            options = {"compile": "emulate", "costs": costs_of(job, stages)}
        self._model = Mixture(job, stages)
        size = (job.microbatches * job.tokens, job.dim)
        data = torch.Generator().manual_seed(1 + piper.rank() % EXPERT_RANKS)
        self._batch = (torch.randn(size, generator=data), torch.randn(size, generator=data))
        strategy = strategy if interleaved else one_by_one(strategy)
        self.step = piper.compile(self._model, strategy, self._batch, **options)

    def __call__(self) -> None:
        """One step."""
        self.step(*self._batch).backward()
        for parameter in piper.parameters(self.step):
            parameter.grad = None

    def exposed_s(self) -> float:
        """Seconds that a rank waits for exchanges in a step; the mean over ranks."""
        return exposed_s(self.timeline(), ("exchange",))

    def timeline(self) -> Timeline:
        """One measured step of this rank."""
        with piper.record(self.step) as timeline:
            self()
        found: Timeline = timeline
        return found


def costs_of(job: Job, stages: int) -> piper.Costs:
    """What an emulated stage takes: its part of the rank's unit, whatever pass, and its links."""
    assert job.unit_s is not None
    stage_s = job.unit_s * job.ranks / stages
    passes: Mapping[str, float] = {"F": 1.0, "BI": 1.0, "BW": 1.0, "B": 2.0}

    def of(task: TaskName) -> float:
        return stage_s * passes[task.which.value]

    return piper.Costs(of=of, bandwidth=job.mbit * 1e6 / 8)


class _Wait(torch.autograd.Function):
    """The identity; forward and backward take time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        sleep_until(time.perf_counter() + forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sleep_until(time.perf_counter() + ctx.backward_s)
        return grads[0], None, None


class _Exchange(torch.autograd.Function):
    """The identity on its input; rows as large as Piper's travel, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, group: Any) -> Tensor:
        ctx.rows, ctx.group = rows, group
        dist.all_to_all_single(torch.empty_like(rows), rows, group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dist.all_to_all_single(torch.empty_like(ctx.rows), ctx.rows, group=ctx.group)
        return grads[0], None, None


class _Meet(torch.autograd.Function):
    """Where input and weight meet: there torch splits a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.size = weight.shape
        return x.clone()  # torch detaches it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_zeros(ctx.size)


class WaitingStage(nn.Module):
    """A stage of torch's pipelining of one layer: waits and exchanges like an emulated one."""

    def __init__(self, job: Job, stage_s: float, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(job.dim))
        self.scale = nn.Parameter(torch.ones(()))
        self.part_s, self.stage_s, self.group = stage_s / 3, stage_s, group
        self.rows = torch.zeros(job.tokens * job.top_k, job.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        if x.is_meta or not torch.is_grad_enabled():  # torch asks for the shapes
            return torch.zeros_like(x)
        if not x.requires_grad:  # the first stage's layer has a backward, as it has in Piper
            x = x * self.scale
        part_s, apply_wait, exchange = self.part_s, _Wait.apply, _Exchange.apply
        x = apply_wait(x, part_s, part_s)  # type: ignore[no-untyped-call]
        x = exchange(x, self.rows, self.group)  # type: ignore[no-untyped-call]
        x = apply_wait(x, part_s, part_s)  # type: ignore[no-untyped-call]
        x = exchange(x, self.rows, self.group)  # type: ignore[no-untyped-call]
        x = apply_wait(x, part_s, part_s)  # type: ignore[no-untyped-call]
        weight = apply_wait(self.weight, 0.0, self.stage_s)  # type: ignore[no-untyped-call]
        out: Tensor = _Meet.apply(x, weight)  # type: ignore[no-untyped-call]
        return out


class TorchMixture:
    """The same step under torch's schedule of that name, with stages that wait."""

    def __init__(self, job: Job, schedule: str) -> None:
        assert job.unit_s is not None
        mine = piper.rank()
        pipes = [[s * EXPERT_RANKS + e for s in range(job.ranks)] for e in range(EXPERT_RANKS)]
        shares = [[s * EXPERT_RANKS + e for e in range(EXPERT_RANKS)] for s in range(job.ranks)]
        # Every rank makes every group, in one order.
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in (*pipes, *shares)}
        pipe, share = (
            next(g for ranks in found if mine in ranks and (g := groups[tuple(ranks)]))
            for found in (pipes, shares)
        )
        placed = placement(schedule, job.ranks)
        stage_s = job.unit_s * job.ranks / len(placed)
        assert job.layers == len(placed), "a WaitingStage is one layer"
        stages = [s for s, (rank,) in placed.items() if rank == mine // EXPERT_RANKS]
        self._modules: dict[int, nn.Module] = {s: WaitingStage(job, stage_s, share) for s in stages}
        self._schedule = torch_schedule(
            schedule, self._modules, len(placed), job.microbatches, F.mse_loss, group=pipe
        )
        size = (job.microbatches * job.tokens, job.dim)
        self._x, self._y = torch.zeros(size), torch.zeros(size)
        self._first, self._last = 0 in stages, len(placed) - 1 in stages

    def __call__(self) -> None:
        """One step."""
        args = (self._x,) if self._first else ()
        kwargs: dict[str, Any] = {"target": self._y, "losses": []} if self._last else {}
        self._schedule.step(*args, **kwargs, return_outputs=False)
        for module in self._modules.values():
            module.zero_grad()
