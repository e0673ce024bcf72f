"""Runs that are saved under one layout and resumed under another, and the unbroken run beside them.

Terms: a *layout* is a placement and a strategy for it; a *leg* is the part of a run between two
saves, under one layout. Rows of the batch divide among one, two and three replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs, replicas
from tests.jobs import CLIP, Placement
from tests.models import fill
from tests.replicas import Case

LEG = 2  # steps


class Mixed(nn.Module):
    """Even, uneven, dimensionless, tied and frozen parameters, and a buffer that counts.

    `a` is used on the first and the last stage; `head` is another name of it.
    """

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(fill([4, 4], 0)), nn.Parameter(fill([5, 4], 1))
        self.c, self.bias = nn.Parameter(fill([4, 5], 2)), nn.Parameter(fill([5], 4))
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.frozen = nn.Parameter(fill([4], 3), requires_grad=False)
        self.head = self.a
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.last = stages - 1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = (torch.tanh(x @ self.a.T + self.frozen) @ self.b.T + self.bias) * self.scale
        with piper.annotate("PP", self.last):
            self.calls.add_(1)
            return ((torch.tanh(h) @ self.c.T @ self.head - y) ** 2).mean()


MIXED = Case(build=Mixed, batch=replicas.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a leg runs."""

    placement: Placement
    strategy: piper.Strategy

    @property
    def ranks(self) -> int:
        return jobs.world(self.placement)


def layout(placement: Placement, zero: int = 0) -> Layout:
    """Two microbatches, replicas where the placement has some."""
    schedule = "one_f_one_b"
    if len(placement[0]) == 1:
        return Layout(placement=placement, strategy=jobs.strategy(placement, 2, schedule))
    wanted = replicas.strategy(placement, 2, schedule, zero=zero)
    return Layout(placement=placement, strategy=wanted)


def optimizer(named: Sequence[tuple[str, Tensor]]) -> Any:
    """AdamW with weight decay for matrices only, and a schedule; groups may be empty."""
    free = [(name, p) for name, p in named if p.requires_grad]
    groups = [
        {"params": [p for _, p in free if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in free if p.dim() <= 1], "weight_decay": 0.0},
    ]
    found = torch.optim.AdamW(groups, lr=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(found, [lambda k: 0.9**k, lambda k: 0.8**k])
    return found, schedule


@dataclass(slots=True, kw_only=True)
class Run:
    """A rank's step, optimizer and schedule."""

    case: Case
    layout: Layout
    step: Any
    optimizer: torch.optim.Optimizer
    schedule: Any

    @classmethod
    def start(cls, case: Case, where: Layout) -> "Run":
        step = replicas.compiled(case, where.placement, where.strategy)
        found, schedule = optimizer(list(piper.named_parameters(step)))
        return cls(case=case, layout=where, step=step, optimizer=found, schedule=schedule)

    def train(self, first: int, count: int = LEG) -> list[tuple[float, float]]:
        """(loss, norm) of some steps."""
        found = []
        for number in range(first, first + count):
            batch = replicas.mine(self.case.batch(number), self.layout.placement)
            loss = self.step(*batch)
            loss.backward()
            norm = piper.clip_grad_norm_(self.step, CLIP)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
        return found

    def save(self, folder: Path, steps: int) -> None:
        piper.save_checkpoint(
            folder, self.step, self.optimizer, scheduler=self.schedule, extra={"steps": steps}
        )

    def load(self, folder: Path) -> Any:
        return piper.load_checkpoint(folder, self.step, self.optimizer, scheduler=self.schedule)


@dataclass(slots=True, kw_only=True)
class Alone:
    """The plain model in one process, with optimizer and schedule."""

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any

    @classmethod
    def start(cls, case: Case) -> "Alone":
        model = case.build(1)
        found, schedule = optimizer(list(model.named_parameters()))
        return cls(case=case, model=model, optimizer=found, schedule=schedule)

    def train(self, first: int, count: int) -> list[tuple[float, float]]:
        """(loss, norm) of some steps."""
        trace = []
        for number in range(first, first + count):
            loss = self.model(*self.case.batch(number))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            trace.append((loss.item(), norm.item()))
        return trace

    def save(self, folder: Path, extra: Any = None) -> None:
        piper.save_checkpoint(
            folder, self.model, self.optimizer, scheduler=self.schedule, extra=extra
        )

    def load(self, folder: Path) -> Any:
        return piper.load_checkpoint(folder, self.model, self.optimizer, scheduler=self.schedule)


def unbroken(case: Case, steps: int) -> list[tuple[float, float]]:
    """(loss, norm) of the plain model's steps."""
    return Alone.start(case).train(0, steps)


def leg(case: Case, where: Layout, folder: Path, first: int) -> list[list[tuple[float, float]]]:
    """A leg, resumed from the folder unless it is the first, and saved there; by rank."""

    def job() -> list[tuple[float, float]]:
        run = Run.start(case, where)
        if first:
            assert run.load(folder) == {"steps": first}
        found = run.train(first)
        run.save(folder, first + LEG)
        return found

    return jobs.run_ranks(job, where.ranks)


def chain(case: Case, layouts: Sequence[Layout], folder: Path) -> None:
    """Every leg's losses and norms on every rank are the unbroken run's.

    Raises:
        AssertionError: They are not; names leg and rank.
    """
    want = unbroken(case, LEG * len(layouts))
    for number, where in enumerate(layouts):
        first = LEG * number
        for rank, got in enumerate(leg(case, where, folder, first)):
            jobs.close(got, want[first : first + LEG], f"leg {number}, rank {rank}", 1e-9)
