"""The inputs of the cases, and a way to run one step of them under any layout.

A *case* is a fault that users of other systems have reported, as a small input with the value that
should come out; `docs/faults.md` lists them by number. The numbers here were computed in eager
PyTorch in float64, apart from this code. A *signature* is the value that the fault would give: the
tests that break something on purpose must see exactly that.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import programs
from piper_dynamo.runtime.executor import Runtime
from piper_dynamo.runtime.local import LocalCommunicator
from tests import jobs, replicas
from tests.jobs import LINE2, LINE4, LOOP2, V2, Placement
from tests.models import Stack4, TiedLM, fill, rows, xin

F64 = torch.float64


class F1:
    """Four tanh layers on eight rows: `tests.models.Stack4`, one weight per stage."""

    LOSS = Stack4.LOSS
    NORM = Stack4.NORM
    NORMS = Stack4.NORMS
    MICROBATCHES = (0.40752435301, 0.44942509084, 0.43159650074, 0.40756851684)
    SGD = (0.42402861536, 0.41920493128, 0.41478995956)
    ADAMW = (0.42402861536, 0.41997611239, 0.41608348506, 0.41227111562)
    # Signatures.
    SUMMED = 0.28323125389
    ONLY_LAST = 0.03502088110
    ONLY_FIRST = 0.03058246827
    NOT_REDUCED = (0.06757005706, 0.09950284698)
    DP_SUMMED = 0.14161562694
    SHIFTED_LABELS = 0.41746423961
    # With another data flow, or with other rows.
    SKIP_LOSS = Stack4.SKIP_LOSS
    SKIP_NORMS = Stack4.SKIP_NORMS
    SKIP_LOST = 0.01751404613
    FIVE_LOSS, FIVE_NORM0 = 0.43608036288, 0.02066440214
    FIVE_MEAN_OF_MEANS, FIVE_WRONG_NORM0 = 0.44110477380, 0.01944307859


class F2:
    """A language model whose embedding and head are one weight: `tests.models.TiedLM`."""

    LOSS, NORM_E, NORM_A = TiedLM.LOSS, TiedLM.NORM_E, TiedLM.NORM_A
    # Signatures: only the lookup's part, only the head's, their mean.
    ONLY_LOOKUP, ONLY_HEAD, AVERAGED = 0.07187204025, 0.09916280153, 0.06507935821
    # With ignored labels, and how a mean of means or a sum would differ.
    IGNORED_LOSS, IGNORED_NORM_E = 2.32270876819, 0.15195239298
    MEAN_OF_MEANS, MEAN_OF_MEANS_NORM_E = 2.28681798209, 0.28686516654
    SUM, SUM_NORM_E = 16.25896137734, 1.06366675087
    TWO_ROWS_IGNORED = 2.33706508263

    @staticmethod
    def ignoring(*, whole: bool = False) -> tuple[Tensor, Tensor]:
        """1 and 6 valid labels in the two halves; with `whole` none and 6."""
        ids, labels = TiedLM.batch()
        labels = labels.clone()
        labels[0] = -100
        labels[1, 0 if whole else 1 :] = -100
        return ids, labels


class Moe2(nn.Module):
    """F3: two scalar experts 1 and 2; the loss is the mean of w_e x over the tokens.

    `chosen` says each token's expert. For tokens 1, 2, 3, 4 the loss is 4, the gradients are 1.0
    and 1.5.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.tensor([1.0, 2.0], dtype=F64).reshape(2, 1, 1))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            sent, routing = piper.moe.dispatch(x, chosen, 2)
            with piper.annotate("EP"):
                out = piper.moe.grouped_mm(sent, self.experts, routing)
            return piper.moe.combine(out, routing).mean()

    @staticmethod
    def batch(count: int = 4, experts: Sequence[int] = (0, 1)) -> tuple[Tensor, Tensor]:
        """Tokens 1 to `count`; their experts follow `experts` again and again."""
        x = torch.arange(1, count + 1, dtype=F64).unsqueeze(1)
        chosen = torch.tensor([experts[k % len(experts)] for k in range(count)]).unsqueeze(1)
        return x, chosen


class Lin53(nn.Module):
    """F4: a weight of 5 rows and a bias of 5, on 4 rows of data; no size divides."""

    LOSS, NORM_W, NORM_B, SUM_AFTER = 0.6525390625, 0.52511973151, 0.38094249894, -0.37125

    def __init__(self, stages: int = 1) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(fill([5, 3], 0)), nn.Parameter(fill([5], 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return F.mse_loss(x @ self.w.T + self.b, y)

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        return xin([4, 3], 0), xin([4, 5], 2)


# Layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A schedule with a placement and a number of microbatches that suit it."""

    schedule: str
    placement: Placement
    microbatches: int = 4

    @property
    def stages(self) -> int:
        return len(self.placement)

    def strategy(self, **named: Any) -> piper.Strategy:
        """Without replicas."""
        return jobs.strategy(self.placement, self.microbatches, self.schedule, **named)


LAYOUTS: Mapping[str, Layout] = {
    "gpipe": Layout(schedule="gpipe", placement=LINE4),
    "one_f_one_b": Layout(schedule="one_f_one_b", placement=LINE4),
    "interleaved_1f1b": Layout(schedule="interleaved_1f1b", placement=LOOP2),
    "zb_h1": Layout(schedule="zb_h1", placement=LINE4),
    "zbv": Layout(schedule="zbv", placement=V2),
    "dualpipev": Layout(schedule="dualpipev", placement=V2),
    "dualpipe": Layout(schedule="dualpipe", placement=LINE2),
}


def slowly(*values: Any) -> list[Any]:
    """Parameters that are tried with the slow tests."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def layouts(*quick: str) -> Any:
    """`layout` is each of the schedules; those that are not named are run with the slow tests."""
    return pytest.mark.parametrize(
        "layout",
        [
            pytest.param(layout, id=name, marks=[pytest.mark.slow] * (name not in quick))
            for name, layout in LAYOUTS.items()
        ],
    )


# Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank has after some calls of a step: the last loss, the norm over all ranks, and
    the gradients that it holds, whole or as its part."""

    losses: list[float]
    norm: float
    grads: dict[str, Tensor]

    @property
    def loss(self) -> float:
        return self.losses[-1]


Batch = tuple[Any, ...]


def world(wanted: piper.Strategy) -> int:
    """How many ranks a strategy places something on."""
    return 1 + max(rank for place in wanted.of(piper.Place) for rank in place.devices)


def part(batch: Batch, wanted: piper.Strategy) -> Batch:
    """This rank's rows: the whole batch, or its replica's part where there are replicas."""
    groups = [p.devices for p in wanted.of(piper.Place) if piper.rank() in p.devices]
    if not wanted.of(piper.Replicate) or not groups:
        return batch
    at, of = list(groups[0]).index(piper.rank()), len(groups[0])
    return tuple(v.chunk(of)[at] if isinstance(v, Tensor) and v.dim() else v for v in batch)


def run(
    build: Callable[[], nn.Module],
    wanted: piper.Strategy,
    *batches: Batch,
    scaled: float = 1.0,
    **options: Any,
) -> list[Found]:
    """Calls of the compiled step on these global batches without clearing gradients, by rank."""

    def job() -> Found:
        mine = [part(batch, wanted) for batch in batches]
        step = piper.compile(build(), wanted, example_inputs=mine[0], **options)
        losses = []
        for given in mine:
            loss = step(*given)
            losses.append(loss.item())
            (loss * scaled).backward()
        norm = float(piper.clip_grad_norm_(step, math.inf))
        return Found(losses=losses, norm=norm, grads=replicas.grads(step))

    return jobs.run_ranks(job, world(wanted))


def train(
    build: Callable[[], nn.Module],
    wanted: piper.Strategy,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *batches: Batch,
    **options: Any,
) -> list[list[float]]:
    """Steps of training, one per batch; each rank's losses."""

    def job() -> list[float]:
        mine = [part(batch, wanted) for batch in batches]
        step = piper.compile(build(), wanted, example_inputs=mine[0], **options)
        found, losses = optimizer(piper.parameters(step)), []
        for given in mine:
            loss = step(*given)
            loss.backward()
            found.step()
            found.zero_grad()
            losses.append(loss.item())
        return losses

    return jobs.run_ranks(job, world(wanted))


def trained_alone(
    build: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *batches: Batch,
) -> list[float]:
    """The same steps in one process, on whole batches."""
    model = build()
    found, losses = optimizer(model.parameters()), []
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        found.step()
        found.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=True)


def about(value: Any, digits: float = 1e-10) -> Any:
    """Equal to a number that is given with about eleven digits."""
    return pytest.approx(value, abs=digits)


def norms(ranks: Sequence[Found]) -> dict[str, float]:
    """The norm of each parameter's gradient, from the ranks that hold it whole."""
    return {n: g.norm().item() for found in ranks for n, g in found.grads.items()}


def is_f1(ranks: Sequence[Found]) -> None:
    """Loss, norm and each gradient's norm are F1's on every rank."""
    for found in ranks:
        assert found.loss == about(F1.LOSS)
        assert found.norm == about(F1.NORM)
    each = norms(ranks)
    assert [each[f"w.{k}"] for k in range(4)] == about(list(F1.NORMS))


def eager(build: Callable[[], nn.Module], *batches: Batch) -> tuple[nn.Module, list[float]]:
    """The model in one process after backwards of these batches, and their losses."""
    model, losses = build(), []
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        losses.append(loss.item())
    return model, losses


def equals_eager(
    build: Callable[[], nn.Module], wanted: piper.Strategy, *batches: Batch, **options: Any
) -> list[Found]:
    """Losses, norm and whole gradients of all ranks are those of one process on whole batches."""
    ranks = run(build, wanted, *batches, **options)
    model, losses = eager(build, *batches)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in ranks:
        jobs.close(found.losses, losses, "losses")
        jobs.close(found.norm, norm.item(), "norm")
    jobs.check_grads([found.grads for found in ranks], model)
    return ranks


# Faults made on purpose


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """While a job runs, (object, name, replacement) each."""
    with pytest.MonkeyPatch.context() as patch:
        for target, name, value in changes:
            patch.setattr(target, name, value)
        yield


@contextmanager
def keeping(which: str) -> Iterator[None]:
    """Of all microbatches' gradients only the "first" or the "last" is kept."""

    def keep(self: Runtime, total: Tensor, part: Tensor) -> Tensor:
        return total if which == "first" else part

    with patched(
        (programs, "add_in_chunks", lambda program, chunks: program),
        (Runtime, "accumulate", keep),
    ):
        yield


@contextmanager
def collectives(change: Callable[[str, int, Tensor], Tensor]) -> Iterator[None]:
    """`change(operation, rank, value)` is what goes into collectives."""
    start = LocalCommunicator.start_collective

    def changed(self: Any, name: str, values: Any, *rest: Any, **named: Any) -> Any:
        first, *others = values
        if isinstance(first, Tensor):
            first = change(name, self.rank, first)
        given = [first, *(change(name, self.rank, v) if _is_float(v) else v for v in others)]
        return start(self, name, given, *rest, **named)

    with patched((LocalCommunicator, "start_collective", changed)):
        yield


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def shifted(of: Tensor) -> Iterator[None]:
    """Slices of the input with these values are those of the microbatch before."""
    take = Runtime.slice

    def other(self: Runtime, batch: Tensor, dim: int | None, part: int, parts: int) -> Tensor:
        is_it = batch.shape == of.shape and torch.equal(batch, of)
        return take(self, batch, dim, (part - 1) % parts if is_it else part, parts)

    with patched((Runtime, "slice", other)):
        yield


def stack(layout: Layout) -> Callable[[], nn.Module]:
    """F1 on the layout's stages."""
    return lambda: Stack4(layout.stages)


EIGHT = rows(8)
