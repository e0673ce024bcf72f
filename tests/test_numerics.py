"""The contract of `docs/numerics.md` in figures: weights of microbatches, dtypes, autocast."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from tests import jobs, replicas
from tests.jobs import LINE2, Placement
from tests.models import Stack4, TiedLM, fill, rows, weights, xin
from tests.replicas import LINE

BF16 = torch.bfloat16
SLOW = pytest.mark.slow


class Sum(Stack4):
    """The sum over all elements in place of their mean."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        with piper.annotate("PP", self.stages - 1):
            return loss * x.numel()


@pytest.mark.parametrize("microbatches", [*(pytest.param(m, marks=SLOW) for m in (1, 2)), 4])
@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("model", [Stack4, Sum])
def test_what_a_loss_is_divided_by(model: type[Stack4], combine: str, microbatches: int) -> None:
    """The table of the page; a sum over a microbatch's elements is one over its own rows."""

    def job() -> float:
        wanted = jobs.strategy(LINE2, microbatches, reduction=combine)
        step = piper.compile(model(2), wanted, example_inputs=rows(8))
        step(*rows(8)).backward()
        return float(piper.clip_grad_norm_(step, float("inf")))

    want = Stack4.NORM * (microbatches if combine == "sum" else 1)
    if model is Sum:
        want *= 32 / microbatches
    for norm in jobs.run_ranks(job, 2):
        assert norm == pytest.approx(want, abs=1e-9)


# Uneven numbers of tokens.


class Ignoring(TiedLM):
    """Its mean is over the labels that count, at least one; `aux` adds an early stage's loss."""

    def __init__(self, aux: float = 0.0) -> None:
        super().__init__()
        self.aux = aux

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        with piper.annotate("PP", 0):
            h = torch.tanh(F.embedding(ids, self.e) @ self.a.T)
            aux = h.square().mean() * self.aux
        with piper.annotate("PP", 1):
            logits = (h @ self.e.T).flatten(0, 1)
            total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            return total / (labels != -100).sum().clamp(min=1) + aux


def ignored(*, all_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Rows 0 and 1 count one label together, or none."""
    ids, labels = TiedLM.batch()
    labels[0] = -100
    labels[1, 0 if all_of_two else 1 :] = -100
    return ids, labels


def count(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def first_step(
    build: Any, batch: tuple[Tensor, ...], placement: Placement, microbatches: int, reduction: Any
) -> list[tuple[float, dict[str, Tensor]]]:
    """The loss and the gradients of every rank, whole."""

    def job() -> tuple[float, dict[str, Tensor]]:
        if len(placement[0]) > 1:
            wanted = replicas.strategy(placement, microbatches, zero=0, reduction=reduction)
        else:
            wanted = jobs.strategy(placement, microbatches, reduction=reduction)
        given = replicas.mine(batch, placement)
        step = piper.compile(build(), wanted, example_inputs=given)
        loss = step(*given)
        loss.backward()
        return loss.item(), replicas.grads(step)

    return jobs.run_ranks(job, jobs.world(placement))


@pytest.mark.parametrize(
    ("placement", "microbatches"),
    [
        *(pytest.param(LINE2, m, marks=SLOW) for m in (1, 2)),
        *((LINE2, 4), (LINE, 2)),
        pytest.param(LINE, 1, marks=SLOW),
    ],
)
@pytest.mark.parametrize(
    ("all_of_two", "loss", "norm"),
    [(False, 2.32270876819, 0.15195239298), (True, 2.33706508263, 0)],
)
def test_a_weight_is_exact_over_microbatches_and_replicas(
    placement: Placement, microbatches: int, all_of_two: bool, loss: float, norm: float
) -> None:
    """Also where a microbatch, or all of a replica's, count nothing."""
    batch = ignored(all_of_two=all_of_two)
    eager = Ignoring()
    want = eager(*batch)
    want.backward()
    assert want.item() == pytest.approx(loss, abs=1e-10)
    assert norm in (0, pytest.approx(float(eager.e.grad.norm()), abs=1e-10))  # type: ignore[union-attr]
    for got, grads in first_step(Ignoring, batch, placement, microbatches, count):
        assert got == pytest.approx(loss, abs=1e-10)
        for name, grad in grads.items():
            jobs.close(grad, eager.get_parameter(name).grad, f"gradient of {name}")


def test_control_the_mean_of_means_is_another_number() -> None:
    found = first_step(Ignoring, ignored(), LINE2, 2, "mean")
    assert {round(loss, 8) for loss, _ in found} == {2.28681798}


@pytest.mark.parametrize("placement", [LINE2, LINE], ids=["line", "replicas"])
def test_an_early_stages_loss_weighs_as_its_microbatch(placement: Placement) -> None:
    """One process, microbatch by microbatch: the weighted mean of whole losses."""
    model, batch = Ignoring(0.5), ignored()
    pieces = jobs.slices(batch, 4)
    shares = [count(labels).item() / 7 for _, labels in pieces]
    want = sum(model(*piece) * share for piece, share in zip(pieces, shares, strict=True))
    want.backward()
    microbatches = 4 // len(placement[0])
    for got, grads in first_step(lambda: Ignoring(0.5), batch, placement, microbatches, count):
        assert got == pytest.approx(want.item(), abs=1e-12)
        for name, grad in grads.items():
            jobs.close(grad, model.get_parameter(name).grad, f"gradient of {name}")
    plain = first_step(Ignoring, batch, placement, microbatches, count)
    assert abs(plain[0][0] - want.item()) > 1e-3


# Sizes that do not divide.


class Lin53(nn.Module):
    """15 and 5 elements, one, and one without dims: nothing that ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(fill([5, 3], 0)), nn.Parameter(fill([5], 1))
        self.one = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return F.mse_loss((x @ self.w.T + self.b) * self.scale + self.one, y)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("zero", [pytest.param(1, marks=SLOW), 3])
def test_sizes_that_no_number_of_ranks_divides(ranks: int, zero: int) -> None:
    """Norms count no filling; a state dict has the parameters' own shapes."""
    batch = xin([12, 3], 0), xin([12, 5], 2)
    eager = Lin53()
    loss = eager(*batch)
    loss.backward()
    total = nn.utils.get_total_norm([p.grad for p in eager.parameters() if p.grad is not None])

    def job() -> tuple[float, float, dict[str, Tensor]]:
        placement = {0: list(range(ranks))}
        given = replicas.mine(batch, placement)
        wanted = replicas.strategy(placement, 1, "", zero=zero)
        step = piper.compile(Lin53(), wanted, example_inputs=given)
        found = step(*given)
        found.backward()
        norm = piper.clip_grad_norm_(step, float("inf"))
        torch.optim.SGD(piper.parameters(step), lr=0.1).step()
        return found.item(), float(norm), dict(piper.state_dict(step))

    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    for got, norm, state in jobs.run_ranks(job, ranks):
        assert got == pytest.approx(loss.item(), abs=1e-12)
        assert norm == pytest.approx(float(total), abs=1e-12)
        for name, value in eager.state_dict().items():
            if name in state:
                jobs.close(state[name], value, name)


# Sums in few bits.


@pytest.mark.parametrize(
    ("microbatches", "part", "first", "in_fp32", "in_bf16"),
    [
        (17, 2.0**-4, 16.0, 17.0, 16.0),
        pytest.param(257, 2.0**-8, 1.0, 2.0, 1.0, marks=SLOW),
    ],
)
def test_the_dtype_of_sums_can_be_chosen(
    microbatches: int, part: float, first: float, in_fp32: float, in_bf16: float
) -> None:
    """What is handed over has the parameter's dtype, as eager's."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1, dtype=BF16))

        def forward(self, x: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                return (self.w * x).sum()

    x = torch.full((microbatches, 1), part, dtype=BF16)
    x[0] = first

    def found(*more: Any) -> Tensor:
        def job() -> Tensor:
            split = piper.Split({}, num_microbatches=microbatches, loss="sum")
            order = piper.schedules.gpipe({0: [0]}, microbatches)
            step = piper.compile(Weight(), piper.Strategy(split, *order, *more), (x,))
            step(x).backward()
            (param,) = piper.parameters(step)
            assert param.grad is not None
            return param.grad

        (grad,) = jobs.run_ranks(job, 1)
        assert isinstance(grad, Tensor)
        return grad

    eager = Weight()
    for row in x:
        eager(row).backward()
    plain, wide = found(), found(piper.Precision({}, grad="fp32"))
    assert eager.w.grad is not None
    assert plain.dtype == wide.dtype == eager.w.grad.dtype == BF16
    assert plain.item() == eager.w.grad.item() == in_bf16
    assert wide.item() == in_fp32


# Autocast.


class Inner(nn.Module):
    """In the middle autocast is off: v W with v = 1 + 2^-9, which bfloat16 does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.exact, self.rounded = (nn.Parameter(torch.ones(1, 1)) for _ in range(2))

    def forward(self, v: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            v = v * 1.0
        with piper.annotate("PP", 1), torch.autocast("cpu", enabled=False):
            inside = v @ self.exact
        with piper.annotate("PP", 2):
            return (inside + v @ self.rounded).float().sum()


def test_autocast_that_is_off_in_one_region() -> None:
    """The cuts are right before and right behind it; the backward runs outside of autocast."""
    v = torch.full((2, 1), 1 + 2.0**-9)

    def job() -> tuple[dict[str, float], set[torch.dtype]]:
        placement = {0: [0], 1: [1], 2: [0]}
        with torch.autocast("cpu", torch.bfloat16):
            step = piper.compile(Inner(), jobs.strategy(placement, 1, ""), example_inputs=(v,))
            loss = step(v)
        loss.backward()
        grads = [(n, p.grad) for n, p in piper.named_parameters(step) if p.grad is not None]
        return {n: g.item() / 2 for n, g in grads}, {g.dtype for _, g in grads}

    found: dict[str, float] = {}
    for grads, dtypes in jobs.run_ranks(job, 2):
        found |= grads
        assert dtypes == {torch.float32}
    assert found == {"exact": 1.001953125, "rounded": 1.0}


class Cast(nn.Module):
    """Layers of two stages, whose values autocast has in several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(p.detach().float() for p in weights(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.linear(x, self.w[0]))
            skip = torch.tanh(x)
        with piper.annotate("PP", 1):
            h = F.linear(F.linear(h, self.w[1]) + skip, self.w[2])
            return F.mse_loss(h, y)


def test_values_travel_in_the_dtypes_that_eager_has() -> None:
    batch = tuple(v.float() for v in rows(8))
    eager = Cast()
    with torch.autocast("cpu", torch.bfloat16):
        for piece in jobs.slices(batch, 2):
            loss = eager(*piece) / 2
            loss.backward()

    def job() -> tuple[dict[str, Tensor], set[torch.dtype]]:
        with torch.autocast("cpu", torch.bfloat16):
            step = piper.compile(Cast(), jobs.strategy(LINE2, 2), example_inputs=batch)
            loss = step(*batch)
        loss.backward()
        program = piper.explain(step).programs[0]
        sent = {i.spec.dtype for i in program.instrs if i.op is Op.SEND and i.spec is not None}
        return jobs.grads(step), sent

    ranks = jobs.run_ranks(job, 2)
    assert ranks[0][1] == {BF16, torch.float32}  # of a product, and not
    for grads, _ in ranks:
        for name, grad in grads.items():
            want = eager.get_parameter(name).grad
            assert want is not None
            assert torch.equal(grad, want), name


def test_autocast_and_precision_together() -> None:
    """Parameters that are bfloat16 already are not cast again; the sums stay in float32."""
    batch = tuple(v.float() for v in rows(8))

    def job() -> dict[str, Tensor]:
        wanted = piper.Strategy(
            *jobs.strategy(LINE2, 2).directives, piper.Precision({}, param="bf16")
        )
        with torch.autocast("cpu", torch.bfloat16):
            step = piper.compile(Cast(), wanted, example_inputs=batch)
            step(*batch).backward()
        return jobs.grads(step)

    eager = Cast()
    with torch.autocast("cpu", torch.bfloat16):
        for piece in jobs.slices(batch, 2):
            leaves = {n: p.detach().to(BF16).requires_grad_() for n, p in eager.named_parameters()}
            given = tuple(v.to(BF16) for v in piece)
            loss = torch.func.functional_call(eager, leaves, given) / 2
            found = torch.autograd.grad(loss, list(leaves.values()))
            for name, grad in zip(leaves, found, strict=True):
                param = eager.get_parameter(name)
                param.grad = grad.float() if param.grad is None else param.grad + grad.float()
    for grads in jobs.run_ranks(job, 2):
        for name, grad in grads.items():
            want = eager.get_parameter(name).grad
            assert want is not None
            assert grad.dtype == torch.float32
            jobs.close(grad, want, name, 1e-7)
