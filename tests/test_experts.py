"""Experts split over ranks equal one process, within 1e-12 in float64, over clipped steps."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import piper_dynamo as piper
from piper_dynamo import backend as piper_backend
from piper_dynamo.ir.program import EXCHANGES, Op
from piper_dynamo.moe import routing
from piper_dynamo.passes import replicate
from piper_dynamo.runtime import exchange, local
from tests import experts, jobs, replicas
from tests.experts import EXPERTS, Mixture
from tests.models import fill, rows
from tests.replicas import LINE, PAIR

QUAD = {0: [0, 1, 2, 3]}
SPREAD = (0.0,) * EXPERTS
LONE = (9.0, 0.0, -9.0, -9.0)  # the first two experts get all tokens


# Operators.


def assignments(n: int = 7, k: int = 2) -> Tensor:
    return torch.tensor([[(3 * i + 2 * j) % EXPERTS for j in range(k)] for i in range(n)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 2])
def test_each_row_meets_its_expert(k: int, dtype: torch.dtype) -> None:
    index = assignments(7, k)
    x, w = fill([7, 4], 1).detach().to(dtype), fill([EXPERTS, 4, 3], 2).detach().to(dtype)
    sent, routing = piper.moe.dispatch(x, index, EXPERTS)
    got = piper.moe.combine(piper.moe.grouped_mm(sent, w, routing), routing)
    want = torch.stack([torch.stack([x[i] @ w[e] for e in row]) for i, row in enumerate(index)])
    assert got.dtype == dtype
    torch.testing.assert_close(got, want)


def test_the_sort_is_stable_and_counts_are_kept() -> None:
    index = torch.tensor([[2], [0], [2], [0]])
    sent, routing = piper.moe.dispatch(torch.arange(4.0).unsqueeze(1), index, EXPERTS)
    assert sent.flatten().tolist() == [1, 3, 0, 2]
    assert routing.counts.tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_the_operators(weighted: bool) -> None:
    index = assignments(5)
    x = fill([5, 4], 1).detach().requires_grad_()
    w = fill([EXPERTS, 4, 3], 2).detach().requires_grad_()
    share = fill([5, 2], 3).detach().requires_grad_()

    def mix(x: Tensor, w: Tensor, share: Tensor) -> Tensor:
        sent, routing = piper.moe.dispatch(x, index, EXPERTS)
        y = piper.moe.grouped_mm(sent, w, routing)
        return piper.moe.combine(y, routing, share if weighted else None)

    assert torch.autograd.gradcheck(mix, (x, w, share))


@pytest.mark.parametrize("op", ["permute", "unpermute", "exchange", "grouped_mm", "grouped_outer"])
def test_fake_kernels_agree_with_real_ones(op: str) -> None:
    x, order = fill([6, 4], 1).detach(), torch.tensor([3, 1, 0, 2, 5, 4])
    counts = torch.tensor([2, 0, 3, 1])
    args: dict[str, tuple[Any, ...]] = {
        "permute": (x, order, 1),
        "unpermute": (x, order),
        "exchange": (x, counts),
        "grouped_mm": (x, fill([4, 4, 3], 2).detach(), counts),
        "grouped_outer": (x, x, counts),
    }
    torch.library.opcheck(getattr(torch.ops.piper, op).default, args[op])


def test_an_expert_without_rows_has_a_zero_gradient() -> None:
    w = fill([EXPERTS, 4, 3], 2).detach().requires_grad_()
    sent, routing = piper.moe.dispatch(fill([3, 4], 1).detach(), torch.tensor([1, 1, 1]), EXPERTS)
    piper.moe.grouped_mm(sent, w, routing).sum().backward()
    assert w.grad is not None
    assert [bool(g.any()) for g in w.grad] == [False, True, False, False]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, i: piper.moe.dispatch(x[0], i, 4), "tokens [n, d]"),
        (lambda x, i: piper.moe.dispatch(x, i[:2], 4), "expert_index [n, k]"),
        (lambda x, i: piper.moe.dispatch(x, i.double(), 4), "whole numbers"),
        (lambda x, i: piper.moe.dispatch(x, i, 0), "at least one expert"),
        (
            lambda x, i: piper.moe.grouped_mm(x, x, piper.moe.dispatch(x, i, 4)[1]),
            "weight [E, d, h]",
        ),
        (
            lambda x, i: piper.moe.grouped_mm(
                x, x.new_zeros(3, 4, 2), piper.moe.dispatch(x, i, 4)[1]
            ),
            "one matrix for each expert",
        ),
        (
            lambda x, i: piper.moe.grouped_mm(
                x.float(), x.new_zeros(4, 4, 2), piper.moe.dispatch(x, i, 4)[1]
            ),
            "one dtype",
        ),
        (
            lambda x, i: piper.moe.grouped_mm(
                x, x.new_zeros(4, 4, 2), piper.moe.dispatch(x, i, 4)[1]
            ),
            "the rows [r, d] of its routing",
        ),
        (
            lambda x, i: piper.moe.combine(*piper.moe.dispatch(x, i, 4), x),
            "one weight for each token and expert",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Any, words: str) -> None:
    with pytest.raises(piper.PiperStrategyError, match=re.escape(words)):
        call(fill([7, 4], 1).detach(), assignments())


@pytest.mark.parametrize("counts", [[2, 0, 3, 1], [0, 6, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_grouped_product_is_the_same(
    counts: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used on CUDA alone; a CPU has it, too, so that forms and empty experts are tested."""
    x, y = fill([6, 8], 1).detach().to(dtype), fill([6, 16], 2).detach().to(dtype)
    w, arrived = fill([EXPERTS, 8, 16], 3).detach().to(dtype), torch.tensor(counts)
    ops = torch.ops.piper

    def products() -> list[Tensor]:
        back = ops.grouped_mm(y, w.transpose(1, 2), arrived)
        return [ops.grouped_mm(x, w, arrived), back, ops.grouped_outer(x, y, arrived)]

    want = products()
    asked = []
    monkeypatch.setattr(routing, "_is_fast", lambda *operands: asked.append(1) or True)
    for one, other in zip(products(), want, strict=True):
        torch.testing.assert_close(one, other)
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("matrix", "is_aligned"),
    [
        (torch.empty(4, 8, dtype=torch.bfloat16), True),
        (torch.empty(4, 8, dtype=torch.bfloat16).t(), True),
        (torch.empty(4, 7, dtype=torch.bfloat16), False),
        (torch.empty(2, 4, 16, dtype=torch.bfloat16)[..., ::2], False),
    ],
)
def test_what_torchs_grouped_product_takes(matrix: Tensor, is_aligned: bool) -> None:
    assert routing._is_aligned(matrix) == is_aligned
    assert not routing._is_fast(matrix, matrix)  # not on a CPU


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
def test_an_index_out_of_range_says_so(wrong: int) -> None:
    with pytest.raises(IndexError, match="experts 0 to 3"):
        piper.moe.dispatch(fill([1, 4], 1).detach(), torch.tensor([wrong]), EXPERTS)


# Captured.


def test_any_backend_runs_the_operators() -> None:
    """Without a strategy, and with Dynamo alone: one graph, the eager result, empty experts too."""
    model, (x, y) = Mixture(1, shift=LONE), rows(24, 0)
    want = model(x, y)
    for backend in ("eager", "aot_eager", "piper"):
        step = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(step(x, y), want, rtol=0, atol=1e-14)


def test_without_a_strategy_no_rows_are_copied_for_exchanges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one device nothing stands where the exchanges of rows would be; unrewritten, copies do."""

    def copies() -> int:
        torch._dynamo.reset()
        step, (x, y) = torch.compile(Mixture(1), backend="piper"), rows(24, 0)
        step(x, y).backward()  # compiling runs them, too
        with profile(activities=[ProfilerActivity.CPU]) as found:
            step(x, y).backward()
        names = [event.name for event in found.events()]
        assert names.count("piper::grouped_mm") > 0
        return names.count("piper::exchange") + names.count("piper::unexchange")

    assert copies() == 0
    monkeypatch.setattr(piper_backend, "drop_stand_ins", lambda graph: None)
    assert copies() > 0


def test_new_counts_do_not_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Dynamo nor Piper does anything again where other numbers of rows travel."""
    shift = (0.3, 0.0, 0.0, -9.0)  # nobody chooses the last expert
    seen: set[tuple[int, ...]] = set()
    real = exchange._splits

    def watched(asked: Tensor, arrived: Tensor) -> exchange.Splits:
        seen.add(tuple(arrived.flatten().tolist()))
        return real(asked, arrived)

    monkeypatch.setattr(exchange, "_splits", watched)
    stats = torch._dynamo.utils.counters["stats"]
    want = [Mixture(1, shift=shift)(*rows(24, 2 * k)).item() for k in range(3)]

    plans: list[piper.Plan] = []  # the ranks of this process may share one

    def job() -> tuple[list[float], set[int]]:
        batches = [replicas.mine(rows(24, 2 * k), PAIR) for k in range(3)]
        step = piper.compile(
            Mixture(1, shift=shift), experts.strategy(PAIR, 2, "gpipe"), batches[0]
        )
        losses, graphs = [], set()
        for batch in batches:
            loss = step(*batch)
            loss.backward()
            losses.append(loss.item())
            graphs.add(stats["unique_graphs"])
            plans.append(piper.explain(step))
        return losses, graphs

    before = stats["unique_graphs"]
    for losses, graphs in jobs.run_ranks(job, 2):
        assert losses == pytest.approx(want, abs=1e-12)
        assert len(graphs) == 1
        assert min(graphs) > before
    assert len(set(map(id, plans))) <= 2
    assert len(seen) > 4
    assert any(0 in counts for counts in seen)


# Parity.


@pytest.mark.parametrize(
    ("schedule", "zero", "top"),
    [("gpipe", 0, 1), ("gpipe", 1, 2), ("gpipe", 3, 2)],
)
def test_one_stage(schedule: str, zero: int, top: int) -> None:
    experts.check(experts.strategy(PAIR, 2, schedule, zero=zero), PAIR, zero=zero, top=top)


@pytest.mark.parametrize(
    ("schedule", "zero", "top", "shift"),
    [
        ("one_f_one_b", 0, 2, LONE),
        pytest.param("one_f_one_b", 3, 1, SPREAD, marks=pytest.mark.slow),
        ("zb_h1", 1, 2, LONE),
        pytest.param("zbv", 0, 2, SPREAD, marks=pytest.mark.slow),
        ("dualpipev", 3, 2, LONE),
        pytest.param("dualpipe", 3, 2, LONE, marks=pytest.mark.slow),
    ],
)
def test_pipelines(schedule: str, zero: int, top: int, shift: tuple[float, ...]) -> None:
    placement, microbatches = replicas.SCHEDULES[schedule]
    wanted = experts.strategy(placement, microbatches, schedule, zero=zero)
    experts.check(wanted, placement, zero=zero, top=top, shift=shift)


@pytest.mark.slow
@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zbv", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("shift", [SPREAD, LONE], ids=["spread", "lone"])
def test_sweep_pipelines(schedule: str, zero: int, top: int, shift: tuple[float, ...]) -> None:
    placement, microbatches = replicas.SCHEDULES[schedule]
    wanted = experts.strategy(placement, microbatches, schedule, zero=zero)
    experts.check(wanted, placement, zero=zero, top=top, shift=shift)


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_four_ranks_share_the_experts(zero: int) -> None:
    experts.check(experts.strategy(QUAD, 2, "gpipe", zero=zero), QUAD, zero=zero, shift=LONE)


@pytest.mark.slow
@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zbv", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("shift", [SPREAD, LONE], ids=["spread", "lone"])
def test_sweep_pipelines_whose_stages_are_on_four_ranks(
    schedule: str, zero: int, top: int, shift: tuple[float, ...]
) -> None:
    """An expert a rank: ranks without any row, and experts' blocks of a single matrix."""
    placement, microbatches = replicas.SCHEDULES[schedule]
    wide = {stage: [r * 2 + i for r in ranks for i in (0, 1)] for stage, ranks in placement.items()}
    wanted = experts.strategy(wide, microbatches, schedule, zero=zero)
    experts.check(wanted, wide, num_rows=48, zero=zero, top=top, shift=shift)


def test_copies_of_experts_are_summed_over_their_holders() -> None:
    experts.check(experts.copies(2, QUAD, "gpipe"), QUAD, size=2)


@pytest.mark.parametrize("zero", replicas.levels(1, 3))
def test_copies_of_experts_are_sharded_over_their_holders(zero: int) -> None:
    wanted = experts.copies(2, QUAD, "gpipe", zero=zero)
    experts.check(wanted, QUAD, zero=zero, size=2, shift=LONE)


@pytest.mark.parametrize("zero", replicas.levels(3))
def test_uneven_and_empty_blocks_of_experts(zero: int) -> None:
    """Three ranks hold the same two experts: one each for the first two, none for the third."""
    six = {0: [0, 1, 2, 3, 4, 5]}
    experts.check(experts.copies(2, six, "gpipe", 3, zero=zero), six, zero=zero, size=2)


def test_experts_keep_whole_where_their_copies_are_not_among_the_shard_axes() -> None:
    """Only what all ranks use is sharded, over the axis along which experts differ."""
    wanted = experts.copies(2, QUAD, "gpipe", zero=1, shard_axes=("ep",))
    plan = piper.plan(experts.Mixture(1), wanted, rows(12, 0), 4)
    (program, *_) = plan.programs
    names = {arg.position: arg.name for arg in plan.args}
    assert {names[p].split(".")[0] for p, _ in program.experts} == {"up", "down"}
    assert {names[p].split(".")[0] for p, _ in program.shards} == {"gate"}


class Tied(Mixture):
    """All layers have the same experts, each its own gate."""

    def __init__(self, stages: int = 1) -> None:
        super().__init__(stages)
        self.up = nn.ParameterList([self.up[0]] * 4)
        self.down = nn.ParameterList([self.down[0]] * 4)


@pytest.mark.parametrize("copied", [False, True])
def test_layers_may_share_experts(copied: bool) -> None:
    """The gradient is the sum over all layers, reduced once over the copies."""
    placement = QUAD if copied else PAIR
    if copied:
        wanted = experts.copies(2, placement, "gpipe")
    else:
        wanted = experts.strategy(placement, 2, "gpipe")
    one = replicas.Case(build=Tied, batch=experts.case().batch)
    ranks = replicas.run(one, placement, wanted)
    replicas.compare(ranks, replicas.reference(one), placement, 0, part=experts.part_of(2))


def test_every_layout_gives_one_gradient() -> None:
    """Not summed once too often, not divided again: [1.0, 1.5] for two experts on two ranks."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64).reshape(2, 1, 1))

        def forward(self, tokens: Tensor, index: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                sent, routing = piper.moe.dispatch(tokens, index, 2)
                with piper.annotate("EP"):
                    y = piper.moe.grouped_mm(sent, self.w, routing)
                return piper.moe.combine(y, routing).mean()

    tokens = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    index = (tokens.flatten() - 1).long() % 2

    def job() -> list[list[float]]:
        mine = tokens.chunk(2)[piper.rank()], index.chunk(2)[piper.rank()]
        step = piper.compile(Two(), experts.strategy(PAIR, 1, ""), mine)
        found = []
        for which in (mine[1], torch.zeros_like(mine[1]), torch.ones_like(mine[1])):
            step(mine[0], which).backward()
            ((_, w),) = piper.named_parameters(step)
            assert w.grad is not None
            found.append(replicas.local(w.grad).flatten().tolist())
            w.grad = None
        return found

    first, second = jobs.run_ranks(job, 2)
    assert (first, second) == ([[1.0], [2.5], [0.0]], [[1.5], [0.0], [2.5]])


def test_split_backward_multiplies_no_more() -> None:
    counts = []
    for schedule in ("one_f_one_b", "zb_h1"):
        placement, microbatches = replicas.SCHEDULES[schedule]
        plan = piper.plan(
            Mixture(2), experts.strategy(placement, microbatches, schedule), rows(12, 0), 4
        )
        runs = [i for p in plan.programs for i in p.instrs if i.op is Op.RUN]
        counts.append(sum(plan.chunks[i.target].matmuls for i in runs))
    assert counts[0] == counts[1] > 0


def test_what_a_rank_holds_and_exchanges() -> None:
    plan = piper.plan(Mixture(2), experts.strategy(LINE, 2, "gpipe"), rows(12, 0), 4)
    names = {a.position: a.name for a in plan.args}
    for program in plan.programs:
        mine = {names[p] for p, _ in program.experts}
        assert len(mine) == 4
        assert all(experts.is_expert(name) for name in mine)
        issued = [i.op for i in program.instrs if i.op in EXCHANGES]
        # Per layer and microbatch: counts once; there and back, in forward and backward.
        assert issued.count(Op.EXCHANGE_COUNTS) == 2 * 2
        assert issued.count(Op.EXCHANGE) == 2 * 2 * 2
        # The first layer's rows are the batch, which gets no gradient.
        assert issued.count(Op.UNEXCHANGE) == 2 * 2 * 2 - (2 if program.rank < 2 else 0)
    assert "sharded" in plan.summary()
    assert "exchanges of a step, with the bytes of the rows that come if" in plan.summary()


# Controls: the comparison fails for the mistakes it is there to find.


def fails(wanted: piper.Strategy, placement: Any, **options: Any) -> None:
    with pytest.raises(AssertionError, match=r"params|shard of|norms|losses"):
        experts.check(wanted, placement, **options)


def test_control_rows_in_the_order_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exchange._splits

    def unsorted(asked: Tensor, arrived: Tensor) -> exchange.Splits:
        return replace(real(asked, arrived), by_expert=None, by_rank=None)

    monkeypatch.setattr(exchange, "_splits", unsorted)
    fails(experts.strategy(PAIR, 2, "gpipe"), PAIR)


@pytest.mark.parametrize("zero", [0, 1])
def test_control_copies_not_summed(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof misses the ranks that hold the same experts, whole ones or blocks."""
    monkeypatch.setattr(replicate, "_reduce_experts", lambda *args, **named: None)
    with pytest.raises(piper.PiperPlanError, match="not reduced over ranks"):
        piper.plan(Mixture(1), experts.copies(2, QUAD, "gpipe", zero=zero), rows(12, 0), 4)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_control_expert_gradients_scaled(factor: float) -> None:
    one = experts.case()
    model = one.build(1)
    for name, param in model.named_parameters():
        if experts.is_expert(name):
            param.register_hook(lambda grad: grad * factor)
    want = replicas.reference(replace(one, build=lambda stages: model))
    ranks = replicas.run(one, PAIR, experts.strategy(PAIR, 2, "gpipe"))
    with pytest.raises(AssertionError, match=r"losses|norms"):
        replicas.compare(ranks, want, PAIR, 0, part=experts.part_of(2))


def emulate(microbatches: int) -> list[float]:
    """A step of two emulated ranks; 24 rows, 12 a rank."""

    def job() -> float:
        costs = piper.Costs(F=1e-4, BI=1e-4, BW=1e-4)
        wanted = experts.strategy(PAIR, microbatches, "gpipe")
        batch = replicas.mine(experts.case().batch(0), PAIR)
        step = piper.compile(Mixture(1), wanted, batch, compile="emulate", costs=costs)
        loss = step(*batch)
        loss.backward()
        return float(loss.item())

    return jobs.run_ranks(job, 2)


def test_emulated_devices_exchange_even_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed, but as many rows travel as evenly used experts would get."""
    sent: list[list[int]] = []
    real = exchange.pack

    def watched(op: Op, values: Any, size: int) -> exchange.Parcel:
        found = real(op, values, size)
        if op is not Op.EXCHANGE_COUNTS:
            sent.append(found.sent)
        return found

    monkeypatch.setattr(local, "pack", watched)
    assert emulate(2) == [0.0, 0.0]
    assert sent == [[6, 6]] * (2 * 2 * (4 * 4 - 1))  # the first layer's rows have no gradient


def test_emulated_experts_that_cannot_be_used_alike_are_refused() -> None:
    with pytest.raises(piper.PiperStrategyError, match="use all experts alike"):
        emulate(4)  # 3 tokens, 6 rows for 4 experts


class Autocast(Mixture):
    """Experts in bfloat16; the gate is not, so that rounding changes no choice."""

    def __init__(self, how: str) -> None:
        super().__init__(1)
        self.how = how
        self.float()

    def mix(self, h: Tensor, layer: int) -> Tensor:
        h = h.float()
        weights, index = (h @ self.gate[layer]).softmax(-1).topk(2)
        sent, routing = piper.moe.dispatch(h, index, EXPERTS)
        is_auto = self.how == "autocast"
        with piper.annotate("EP"), torch.autocast("cpu", torch.bfloat16, enabled=is_auto):
            up, down = self.up[layer], self.down[layer]
            if self.how == "cast":
                sent, up, down = sent.bfloat16(), up.to(torch.bfloat16), down.bfloat16()
            inner = torch.tanh(piper.moe.grouped_mm(sent, up, routing))
            out = piper.moe.grouped_mm(inner, down, routing).float()
        return piper.moe.combine(out, routing, weights)


def first_gradients(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model(*batch).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("how", ["autocast", "cast"])
def test_experts_in_a_smaller_dtype(how: str) -> None:
    """As one process under autocast, by far nearer to it than bfloat16 is to float32."""
    batch = experts.case().batch(0)

    def job() -> dict[str, Tensor]:
        mine = replicas.mine(batch, PAIR)
        step = piper.compile(Autocast(how), experts.strategy(PAIR, 1, ""), mine)
        step(*mine).backward()
        return replicas.grads(step)

    ranks = jobs.run_ranks(job, 2)
    want = first_gradients(Autocast("autocast"), batch)
    whole = first_gradients(Autocast("plain"), batch)
    for name, value in want.items():
        if experts.is_expert(name):
            got = torch.cat([found[name] for found in ranks])
            rounding = (value - whole[name]).norm()
            assert rounding > 0, name
            assert (got - value).norm() < rounding / 4, name


def test_experts_without_values_can_be_planned() -> None:
    """On a device that knows no autocast."""
    model = Mixture(1).to("meta")
    plan = piper.plan(model, experts.strategy(PAIR, 2, "gpipe"), rows(12, 0), 2)
    assert [bool(program.experts) for program in plan.programs] == [True, True]
