"""Replicated runs, and their reference: one process on the data of all replicas together.

Terms: a *replica* is a copy of the model that is given its own part of the global batch; replica r
of D is given the r-th of D equal parts. A rank's *shard* of a parameter is the r-th of the D parts
that `torch.chunk` makes along dim 0, which may be fewer than D: the others are empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import piper_dynamo as piper
from piper_dynamo.ir.program import Op, RankProgram
from tests import jobs
from tests.jobs import CLIP, STEPS, Optimizer, Placement, Trace
from tests.models import Stack4, fill, rows, tok, weights

PAIR: Placement = {0: [0, 1]}
TRIPLE: Placement = {0: [0, 1, 2]}
LINE: Placement = {0: [0, 1], 1: [2, 3]}
LOOP: Placement = {0: [0, 1], 1: [2, 3], 2: [0, 1], 3: [2, 3]}
VEE: Placement = {0: [0, 1], 1: [2, 3], 2: [2, 3], 3: [0, 1]}

# Each schedule with a placement and a number of microbatches that suit it.
SCHEDULES: dict[str, tuple[Placement, int]] = {
    "gpipe": (LINE, 2),
    "one_f_one_b": (LINE, 2),
    "interleaved_1f1b": (LOOP, 4),
    "zb_h1": (LINE, 2),
    "zbv": (VEE, 4),
    "dualpipev": (VEE, 4),
    "dualpipe": (LINE, 4),
}


def levels(*quick: int) -> list[Any]:
    """All ZeRO levels; those that are not given here are run with the slow tests."""
    return [pytest.param(z, marks=[pytest.mark.slow] * (z not in quick)) for z in range(4)]


FEW_LEVELS = levels(1, 3)
LAST_LEVEL = levels(3)  # the most is done here

OPTIMIZERS: tuple[Optimizer, ...] = (
    lambda params: torch.optim.SGD(params, lr=1.0),
    lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=True),
)


class Tied(nn.Module):
    """Two shared weights: embedding and head are `e`, the first two layers are `a`.

    On two stages `e` is on both; on four, `a` is on the first and second, `e` on the first and
    last, so that in a loop and in a V one of them is shared between ranks.
    """

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.e, self.a = nn.Parameter(fill([11, 4], 2)), nn.Parameter(fill([4, 4], 1))
        self.w = weights(2)
        self.stages = stages

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.embedding(ids, self.e)
        for k, weight in enumerate((self.a, self.a, self.w[0], self.w[1])):
            with piper.annotate("PP", k * self.stages // 4):
                h = torch.tanh(h @ weight.T)
        with piper.annotate("PP", self.stages - 1):
            return F.cross_entropy((h @ self.e.T).flatten(0, 1), labels.flatten())


class Uneven(nn.Module):
    """Rows that no number of replicas divides: 7, 2, 1, and two parameters without dims.

    On two stages each has one of these; on four, every other one.
    """

    def __init__(self, stages: int = 1) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(fill([7, 4], 1)), nn.Parameter(fill([2, 7], 2))
        self.bias = nn.Parameter(fill([1], 3))
        self.first = nn.Parameter(torch.tensor(0.75, dtype=torch.float64))
        self.last = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))
        self.stages = stages

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.a.T)
        with piper.annotate("PP", self.stages // 4):
            h = h * self.first
        with piper.annotate("PP", self.stages // 2):
            h = torch.tanh(h @ self.b.T + self.bias)
        with piper.annotate("PP", self.stages - 1):
            return F.mse_loss(h * self.last, y[:, :2])


def frozen(stages: int) -> Stack4:
    """The first and third weight get no gradient: on four stages, all of a stage's."""
    model = Stack4(stages)
    for k in (0, 2):
        model.w[k].requires_grad_(False)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on any number of stages; the first uses input 0, the last uses input 1.

    Attributes:
        build: Makes the model from a number of stages; every call gives equal values.
        batch: The global batch of a training step.
    """

    build: Callable[[int], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def numbers(step: int) -> tuple[Tensor, Tensor]:
    return rows(24, 2 * step)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    ids = tok([24, 3], 11).roll(step, 0)
    return ids, ids.roll(1, 0)


CASES: dict[str, Case] = {
    "plain": Case(build=Stack4, batch=numbers),
    "tied": Case(build=Tied, batch=tokens),
    "frozen": Case(build=frozen, batch=numbers),
    "skip": Case(build=lambda stages: Stack4(stages, "all"), batch=numbers),
    "uneven": Case(build=Uneven, batch=numbers),
}


def replicas(placement: Placement) -> int:
    return len(placement[0])


def replica_of(rank: int, placement: Placement) -> int:
    """Devices are listed in replica order."""
    return next(ranks.index(rank) for ranks in placement.values() if rank in ranks)


def strategy(
    placement: Placement,
    microbatches: int = 2,
    schedule: str = "gpipe",
    *,
    zero: int = 0,
    reduction: Any = "mean",
    mesh: piper.Mesh | None = None,
    **options: Any,
) -> piper.Strategy:
    """A split, a place per stage, one Replicate for all stages with these options, a schedule."""
    return piper.Strategy(
        piper.Split({}, dim="MB", num_microbatches=microbatches, loss=reduction),
        *jobs.places(placement, schedule, microbatches),
        piper.Replicate({"PP": "*"}, zero=zero, **options),
        *jobs.orders(schedule, placement, microbatches),
        mesh=mesh,
    )


def mine(
    batch: Sequence[Tensor], placement: Placement, wanted: piper.Strategy | None = None
) -> tuple[Any, ...]:
    """This rank's part of a global batch; what its stages do not use is poisoned.

    A strategy says which these are where a stage is placed twice.
    """
    at = replica_of(piper.rank(), placement)
    part = tuple(value.chunk(replicas(placement))[at] for value in batch)
    uses = jobs.uses(wanted) if wanted is not None else placement
    return jobs.given_to(piper.rank(), part, ((0,), (max(placement),)), uses)


def compiled(case: Case, placement: Placement, wanted: piper.Strategy, **options: Any) -> Any:
    """A step of this rank."""
    example = mine(case.batch(0), placement, wanted)
    return piper.compile(case.build(len(placement)), wanted, example_inputs=example, **options)


def local(value: Tensor) -> Tensor:
    """What this rank has of a value."""
    found = value.to_local() if isinstance(value, DTensor) else value
    return found.detach()


def held(step: Any) -> dict[str, Tensor]:
    """Copies of what this rank has of its parameters, empty shards too; no anchor."""
    return {n: local(p).clone() for n, p in piper.named_parameters(step) if p.numel()}


def grads(step: Any) -> dict[str, Tensor]:
    """Copies of what this rank has of its gradients."""
    found = [(n, p) for n, p in piper.named_parameters(step) if p.numel()]
    return {n: local(p.grad).clone() for n, p in found if p.grad is not None}


def shard(whole: Tensor, of: int, at: int) -> Tensor:
    """Part `at` of `of` along dim 0; a value without dims is whole everywhere."""
    if not whole.dim():
        return whole
    parts = whole.chunk(of)
    return parts[at] if at < len(parts) else whole[:0]


def part_of(whole: Tensor, rank: int, placement: Placement, zero: int) -> Tensor:
    """What a rank must have of a parameter between steps."""
    if zero == 0:
        return whole
    return shard(whole, replicas(placement), replica_of(rank, placement))


def train(step: Any, batches: Sequence[tuple[Any, ...]]) -> Trace:
    """Clipped steps with each optimizer in turn; leaves this rank's shards."""
    return jobs.train(step, batches, optimizers=OPTIMIZERS, held_by=held)


def run(
    case: Case, placement: Placement, wanted: piper.Strategy, steps: int = STEPS
) -> list[Trace]:
    """The traces of all ranks."""

    def job() -> Trace:
        step = compiled(case, placement, wanted)
        return train(step, [mine(case.batch(k), placement, wanted) for k in range(steps)])

    return jobs.run_ranks(job, jobs.world(placement))


def reference(
    case: Case,
    stages: int = 1,
    *,
    steps: int = STEPS,
    factor: float = 1.0,
    rows_of: Callable[[Tensor], Tensor] = lambda value: value,
) -> Trace:
    """The same steps in one process on whole global batches.

    `factor` on the gradients and `rows_of` on the inputs make wrong references for the controls.
    """
    model, trace = case.build(stages), Trace()
    for make in OPTIMIZERS:
        optimizer = make(model.parameters())
        for k in range(steps):
            loss = model(*(rows_of(value) for value in case.batch(k)))
            (loss * factor).backward()
            trace.losses.append(loss.item())
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            trace.norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
    trace.params.update({n: p.detach().clone() for n, p in model.named_parameters()})
    return trace


def compare(
    ranks: Sequence[Trace],
    want: Trace,
    placement: Placement,
    zero: int,
    *,
    part: Callable[[Tensor, int, Placement, int], Tensor] = part_of,
) -> None:
    """Losses and norms are the reference's, alike on all ranks; each shard is its part of it.

    Raises:
        AssertionError: Names what differs, on which rank and by how much.
    """
    names: set[str] = set()
    for rank, got in enumerate(ranks):
        where = f"rank {rank}: "
        jobs.close(got.losses, want.losses, where + "losses")
        jobs.close(got.norms, want.norms, where + "gradient norms")
        assert got.losses == ranks[0].losses, f"{where}losses are not those of rank 0"
        assert got.norms == ranks[0].norms, f"{where}norms are not those of rank 0"
        for name, value in got.params.items():
            assert name in want.params, f"{where}holds {name!r}, which the model does not have"
            mine = part(want.params[name], rank, placement, zero)
            jobs.close(value, mine, f"{where}shard of {name}")
        names |= set(got.params)
    assert names == set(want.params), f"no rank holds {sorted(set(want.params) - names)}"
    check_copies([got.params for got in ranks], placement)


def check_copies(ranks: Sequence[dict[str, Tensor]], placement: Placement) -> None:
    """Stages that share a parameter have bit-equal copies of what a replica has of it."""
    first: dict[tuple[str, int], Tensor] = {}
    for rank, params in enumerate(ranks):
        for name, value in params.items():
            key = (name, replica_of(rank, placement))
            assert torch.equal(first.setdefault(key, value), value), f"copies of {name} differ"


def reductions(program: RankProgram) -> list[int]:
    """Where the collectives are whose results reach this rank's gradients; not the loss's."""
    wanted = {reg for _, reg in program.grads}
    found = []
    for index in reversed(range(len(program.instrs))):
        instr = program.instrs[index]
        if instr.op in (Op.FREE, Op.RUN) or not wanted & set(instr.writes()):
            continue
        wanted |= set(instr.reads())
        if instr.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            found.append(index)
    return found[::-1]


def gathers(program: RankProgram) -> list[int]:
    """Where parameters are gathered."""
    return [k for k, instr in enumerate(program.instrs) if instr.op is Op.ALL_GATHER]


def end_of(program: RankProgram, start: int) -> int:
    """Where the collective that starts there is waited for."""
    (handle,) = program.instrs[start].outputs
    return next(
        k
        for k, instr in enumerate(program.instrs)
        if instr.op is Op.WAIT and instr.inputs == (handle,)
    )
