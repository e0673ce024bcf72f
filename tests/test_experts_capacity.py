"""Experts with a capacity equal plain PyTorch that drops the same rows, over clipped steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import planning
from piper_dynamo.ir.program import EXCHANGES, Op
from piper_dynamo.moe import slots
from piper_dynamo.moe.capacity import Capacity
from piper_dynamo.passes import capacity as passes
from piper_dynamo.runtime import exchange, local
from tests import capacity, experts, jobs, replicas
from tests.experts import EXPERTS, Mixture
from tests.models import fill, rows
from tests.replicas import LINE, PAIR
from tests.test_experts_refusals import Even, Plain, Round, Sliced

QUAD = {0: [0, 1, 2, 3]}
ALONE = {0: [0]}
LONE = (9.0, 0.0, -9.0, -9.0)  # the first two experts are asked to take all tokens


# How many rows.


@pytest.mark.parametrize(
    ("most", "num_rows", "want"),
    [(3, 24, 3), (1.0, 24, 6), (1.25, 24, 8), (1.1, 40, 11), (0.01, 24, 1), (99, 24, 24)],
)
def test_how_many_rows_an_expert_takes(most: int | float, num_rows: int, want: int) -> None:
    """1.1 x 10 is 11, though the number nearest to 1.1 is above it."""
    assert Capacity.of(most).slots_per_expert(num_rows, EXPERTS) == want


def test_dropped_rows_are_counted_from_what_was_asked_for() -> None:
    asked = torch.tensor([[4, 0, 4, 0], [2, 2, 2, 2]])
    assert piper.moe.dropped(asked, 3).tolist() == [2, 0]
    assert piper.moe.dropped(asked, 1.0).tolist() == [4, 0]
    assert piper.moe.dropped(asked[0], 1.5).item() == 2
    assert piper.moe.dropped(asked[:0], 3).tolist() == []


def test_routings_of_unlike_sizes_are_not_counted_as_one() -> None:
    """What an expert takes depends on how many rows there are."""
    asked = torch.tensor([[4, 0, 4, 0], [2, 2, 2, 1]])
    with pytest.raises(piper.PiperStrategyError, match="rows    from 7 to 8"):
        piper.moe.dropped(asked, 1.0)


def test_two_rows_are_not_two_shares() -> None:
    assert Capacity.of(2) != Capacity.of(2.0)
    assert len({Capacity.of(2), Capacity.of(2.0), Capacity.of(2)}) == 2


# Slots.


def test_rows_take_slots_in_their_order_until_there_are_none() -> None:
    counts = torch.tensor([3, 0, 1, 2])
    x = torch.arange(1.0, 7.0).unsqueeze(1)
    taken = torch.ops.piper.pad(x, counts, 2)
    assert taken.flatten().tolist() == [1, 2, 0, 0, 4, 0, 5, 6]
    assert torch.ops.piper.unpad(taken, counts, 6).flatten().tolist() == [1, 2, 0, 4, 5, 6]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_each_is_the_transpose_of_the_other(most: int) -> None:
    counts, x, y = torch.tensor([3, 0, 1, 2]), fill([6, 4], 1), fill([4 * most, 4], 2)
    there = (torch.ops.piper.pad(x, counts, most) * y).sum()
    torch.testing.assert_close(there, (x * torch.ops.piper.unpad(y, counts, 6)).sum())


def test_even_products_are_grouped_ones() -> None:
    x, y, w = (fill(s, k).detach() for k, s in enumerate(([8, 3], [8, 2], [4, 3, 2])))
    counts, ops = torch.full((4,), 2), torch.ops.piper
    torch.testing.assert_close(ops.even_mm(x, w, 4), ops.grouped_mm(x, w, counts))
    torch.testing.assert_close(ops.even_outer(x, y, 4), ops.grouped_outer(x, y, counts))


@pytest.mark.parametrize("op", ["pad", "unpad", "even_mm", "even_outer"])
def test_fake_kernels_agree_with_real_ones(op: str) -> None:
    x, counts = fill([8, 4], 1).detach(), torch.tensor([5, 0, 2, 1])
    args: dict[str, tuple[Any, ...]] = {
        "pad": (x, counts, 3),
        "unpad": (x, counts, 8),
        "even_mm": (x, fill([4, 4, 3], 2).detach(), 4),
        "even_outer": (x, x, 4),
    }
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.piper, op).default, args[op], test_utils=checks)


def test_the_host_reads_nothing() -> None:
    """Fake tensors have no values to be read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        counts, x = torch.empty(4, dtype=torch.int64), torch.empty(8, 3)
        for found in (slots._row_of(counts, 8, 3), slots._slot_of(counts, 8, 3)):
            assert slots._chosen(x, *found).shape == (found[0].shape[0], 3)


# Parity.


@pytest.mark.parametrize(
    ("placement", "microbatches", "most", "top"),
    [(ALONE, 3, 2, 2), (PAIR, 2, 3, 2), (PAIR, 2, 1, 1), (QUAD, 1, 2, 2)],
)
def test_one_stage(placement: Any, microbatches: int, most: int, top: int) -> None:
    wanted = experts.strategy(placement, microbatches, "gpipe", capacity=most)
    capacity.check(wanted, placement, microbatches, most, top=top)


@pytest.mark.parametrize(
    ("schedule", "zero", "factor", "most", "shift"),
    [
        ("one_f_one_b", 0, 1.25, 4, LONE),
        pytest.param("zb_h1", 1, 0.5, 2, (0.0,) * 4, marks=pytest.mark.slow),
        ("zbv", 3, 1.0, 2, LONE),
        pytest.param("dualpipev", 0, 1.0, 2, (0.0,) * 4, marks=pytest.mark.slow),
    ],
)
def test_pipelines(
    schedule: str, zero: int, factor: float, most: int, shift: tuple[float, ...]
) -> None:
    """Microbatches of 6 rows, or 3, and two experts for each; some experts get none."""
    placement, microbatches = replicas.SCHEDULES[schedule]
    wanted = experts.strategy(placement, microbatches, schedule, zero=zero, capacity=factor)
    capacity.check(wanted, placement, microbatches, most, zero=zero, shift=shift)


@pytest.mark.slow
@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("schedule", list(replicas.SCHEDULES))
@pytest.mark.parametrize("shift", [(0.0,) * 4, LONE], ids=["spread", "lone"])
def test_sweep_pipelines(schedule: str, zero: int, top: int, shift: tuple[float, ...]) -> None:
    placement, microbatches = replicas.SCHEDULES[schedule]
    wanted = experts.strategy(placement, microbatches, schedule, zero=zero, capacity=2)
    capacity.check(wanted, placement, microbatches, 2, zero=zero, top=top, shift=shift)


def test_copies_of_experts() -> None:
    wanted = experts.copies(2, QUAD, "gpipe", capacity=2)
    capacity.check(wanted, QUAD, 2, 2, size=2, shift=LONE)


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_replicas_that_hold_all_experts(zero: int) -> None:
    """Nothing is exchanged, and each replica drops rows of its own tokens."""
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        *jobs.places(PAIR),
        piper.Replicate({"PP": "*"}, axes=("dp", "ep"), zero=zero),
        piper.Shard({"EP": "*"}, axes=("ep",), capacity=2),
        mesh=piper.Mesh((2, 1), ("dp", "ep")),
    )
    plan = piper.plan(Mixture(1), wanted, rows(12, 0), 2)
    assert not any(i.op in EXCHANGES for p in plan.programs for i in p.instrs)
    capacity.check(wanted, PAIR, 2, 2, size=1, zero=zero)


@pytest.mark.parametrize(
    "kind", [Mixture, pytest.param(Even, marks=pytest.mark.slow), Sliced, Round, Plain]
)
def test_room_for_all_rows_drops_none(kind: type[Mixture]) -> None:
    """Then it does not matter that there is a capacity, nor among how many ranks tokens are."""
    one = replicas.Case(build=kind, batch=experts.case().batch)
    ranks = replicas.run(one, PAIR, experts.strategy(PAIR, 2, "gpipe", capacity=99), steps=2)
    part = replicas.part_of if kind is Plain else experts.part_of(2)
    replicas.compare(ranks, replicas.reference(one, steps=2), PAIR, 0, part=part)


def test_what_is_dropped_by_hand() -> None:
    """One expert, two ranks of three tokens: each keeps its first two."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([[[2.0]], [[1.0]]], dtype=torch.float64))

        def forward(self, tokens: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with piper.annotate("PP", 0):
                sent, routing = piper.moe.dispatch(tokens, index, 2)
                with piper.annotate("EP"):
                    y = piper.moe.grouped_mm(sent, self.w, routing)
                out = piper.moe.combine(y, routing)
                return out.sum(), out.flatten(), routing.counts

    tokens = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]], dtype=torch.float64)

    def job() -> tuple[list[float], list[int], list[float]]:
        mine = tokens.chunk(2)[piper.rank()], torch.zeros(3, dtype=torch.int64)
        step = piper.compile(One(), experts.strategy(PAIR, 1, "", capacity=2), mine)
        loss, out, counts = step(*mine)
        loss.backward()
        ((_, w),) = piper.named_parameters(step)
        assert w.grad is not None
        return out.tolist(), counts.tolist(), replicas.local(w.grad).flatten().tolist()

    first, second = jobs.run_ranks(job, 2)
    assert first == ([2.0, 4.0, 0.0], [3, 0], [(1 + 2 + 8 + 16) / 2])
    assert second == ([16.0, 32.0, 0.0], [3, 0], [0.0])  # who asked for how much, drops and all


# Padding.


class Normed(Mixture):
    """Rows are divided by their length: of a row of zeros that makes NaN."""

    def experts(self, sent: Tensor, layer: int, routing: piper.moe.Routing) -> Tensor:
        sent = sent / sent.norm(dim=-1, keepdim=True)
        inner = piper.moe.grouped_mm(sent, self.up[layer], routing).exp().log()
        inner = inner / inner.norm(dim=-1, keepdim=True)
        return piper.moe.grouped_mm(inner, self.down[layer], routing)


class NormedReference(capacity.Reference):
    def expert(self, rows: Tensor, layer: int, expert: int) -> Tensor:
        inner = rows / rows.norm(dim=-1, keepdim=True) @ self.up[layer][expert]
        return inner / inner.norm(dim=-1, keepdim=True) @ self.down[layer][expert]


class Ended(Mixture):
    """Only what experts give meets rows divided by their length: the first gradient is NaN."""

    def mix(self, h: Tensor, layer: int) -> Tensor:
        weights, index = (h @ self.gate[layer] + self.shift).softmax(-1).topk(self.top)
        sent, routing = piper.moe.dispatch(h, index, EXPERTS)
        with piper.annotate("EP"):
            inner = piper.moe.grouped_mm(sent, self.up[layer], routing).sigmoid()
            out = piper.moe.grouped_mm(inner, self.down[layer], routing)
            out = out * sent / sent.norm(dim=-1, keepdim=True)
        return piper.moe.combine(out, routing, weights)


class EndedReference(capacity.Reference):
    def expert(self, rows: Tensor, layer: int, expert: int) -> Tensor:
        out = (rows @ self.up[layer][expert]).sigmoid() @ self.down[layer][expert]
        return out * rows / rows.norm(dim=-1, keepdim=True)


class Gated(Mixture):
    """Two products take the same rows, whose gradient is the sum of both."""

    def mix(self, h: Tensor, layer: int) -> Tensor:
        weights, index = (h @ self.gate[layer] + self.shift).softmax(-1).topk(self.top)
        sent, routing = piper.moe.dispatch(h, index, EXPERTS)
        with piper.annotate("EP"):
            gate = piper.moe.grouped_mm(sent, self.up[layer], routing).sigmoid()
            inner = gate * piper.moe.grouped_mm(sent, self.down[layer].mT, routing)
            out = piper.moe.grouped_mm(inner, self.down[layer], routing)
        return piper.moe.combine(out, routing, weights)


class GatedReference(capacity.Reference):
    def expert(self, rows: Tensor, layer: int, expert: int) -> Tensor:
        down = self.down[layer][expert]
        return ((rows @ self.up[layer][expert]).sigmoid() * (rows @ down.T)) @ down


REFERENCES: dict[type[Mixture], type[capacity.Reference]] = {
    Normed: NormedReference,
    Ended: EndedReference,
    Gated: GatedReference,
}


def check_normed(schedule: str, kind: type[Mixture] = Normed, **options: Any) -> None:
    """Experts without tokens among them; a weight's gradient may be its own task."""
    placement, microbatches = replicas.SCHEDULES[schedule]
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=microbatches),
        *jobs.places(placement),
        piper.Replicate({"PP": "*"}, **options),
        piper.Shard({"EP": "*"}, capacity=3),
        *jobs.orders(schedule, placement, microbatches),
    )
    one = experts.case()
    built = replace(one, build=lambda stages: kind(stages, shift=LONE))
    ranks = replicas.run(built, placement, wanted)
    want = capacity.train(REFERENCES[kind](3, shift=LONE), one, 2 * microbatches)
    replicas.compare(ranks, want, placement, 0, part=experts.part_of(2))


@pytest.mark.parametrize(
    ("schedule", "bucket_mb"),
    [
        pytest.param("one_f_one_b", None, marks=pytest.mark.slow),
        ("zb_h1", None),
        pytest.param("zb_h1", 0.0002, marks=pytest.mark.slow),
    ],
)
def test_padding_does_not_poison_gradients(schedule: str, bucket_mb: float | None) -> None:
    """Buckets cut experts in two, so that one piece's rows are the other's."""
    check_normed(schedule, bucket_mb=bucket_mb)


@pytest.mark.slow
def test_pieces_of_experts_sum_the_gradient_of_their_rows() -> None:
    """Each product is in a bucket of its own; what leaves the experts is combined rows alone."""
    check_normed("one_f_one_b", Gated, bucket_mb=0.0001)
    plan = piper.plan(
        Gated(1),
        piper.Strategy(
            piper.Place({"PP": 0}, [0, 1]),
            piper.Replicate({"PP": "*"}, bucket_mb=0.0001),
            piper.Shard({"EP": "*"}),
        ),
        rows(12, 0),
        2,
    )
    assert sum(str(region).startswith("PP0.EP0") for region in plan.dag.regions) == 2


@pytest.mark.slow
def test_masks_of_gradients_alone_are_enough_where_values_are_finite() -> None:
    check_normed("one_f_one_b", Ended)


@pytest.mark.parametrize("kind", [pytest.param(Normed, marks=pytest.mark.slow), Ended])
def test_control_padding_that_is_not_masked(
    kind: type[Mixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_mask", lambda *args: None)
    monkeypatch.setattr(planning, "_templates", {})  # what was captured before has masks
    with pytest.raises(AssertionError, match=r"norms|losses"):
        check_normed("one_f_one_b", kind)


def masks(kind: type[Mixture]) -> int:
    """How many factors of gradients are masked in the backward of a layer's experts."""
    plan = piper.plan(kind(1), experts.strategy(PAIR, 1, "", capacity=2), rows(12, 0), 2)
    runs = [i for i in plan.programs[0].instrs if i.op is Op.RUN]
    (name,) = [i.target for i in runs if i.task == "B.PP0.EP1.MB0"]
    nodes = plan.chunks[name].graph.nodes
    return sum(n.name.startswith("masked_fill_scalar") for n in nodes)


def test_only_what_may_be_poisoned_is_masked() -> None:
    """Normed: both factors of one product, which may be anything, and one of the other's.

    Ended: the gradient alone, since sigmoids of padding are finite; and that of the product before.
    """
    assert [masks(kind) for kind in (Mixture, Normed, Ended)] == [0, 3, 2]


# Static.


def test_programs_say_exactly_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No counts are exchanged, and rows as planned, whatever the routing; twice as memory said."""
    wanted = experts.strategy(PAIR, 2, "one_f_one_b", capacity=3)
    plan = piper.plan(Mixture(1), wanted, rows(12, 0), 2)
    issued = [i for i in plan.programs[0].instrs if i.op in EXCHANGES]
    assert {i.op for i in issued} == {Op.EXCHANGE, Op.UNEXCHANGE}
    assert {i.specs[0].shape for i in issued} == {(EXPERTS * 3, 4)}
    assert not any(plan.chunks[i.target].is_ragged for i in plan.programs[0].instrs if i.target)
    assert f"{len(issued)} (" in plan.summary()
    assert "used evenly" not in plan.summary()
    sent: list[list[int]] = []
    real = exchange.pack

    def watched(op: Op, values: Any, size: int) -> exchange.Parcel:
        found = real(op, values, size)
        sent.append(found.sent)
        assert found.sent == found.received
        return found

    monkeypatch.setattr(local, "pack", watched)
    replicas.run(experts.case(shift=LONE), PAIR, wanted, steps=1)
    assert sent == [[6, 6]] * (2 * 2 * len(issued))  # ranks, and optimizers


def test_another_capacity_is_another_plan() -> None:
    shapes = []
    for most in (2, 2.0, None):
        plan = piper.plan(Mixture(1), experts.strategy(PAIR, 1, "", capacity=most), rows(8, 0), 2)
        first = next(i for i in plan.programs[0].instrs if i.op is Op.EXCHANGE)
        shapes.append(first.specs[0].shape[0])
    assert shapes == [EXPERTS * 2, EXPERTS * 8, 8 * 2]


def test_another_routing_does_not_compile_again() -> None:
    step = piper.compile(Mixture(1), experts.strategy(ALONE, 2, "", capacity=2), rows(24, 0))
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for k in range(3):
            step(*rows(24, 2 * k)).backward()
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.slow
def test_emulated_devices_send_all_slots() -> None:
    """Tokens that the experts do not divide are no matter here."""

    def job() -> float:
        costs = piper.Costs(F=1e-4, BI=1e-4, BW=1e-4)
        wanted = experts.strategy(PAIR, 4, "gpipe", capacity=1.0)
        batch = replicas.mine(experts.case().batch(0), PAIR)
        step = piper.compile(Mixture(1), wanted, batch, compile="emulate", costs=costs)
        loss = step(*batch)
        loss.backward()
        return float(loss.item())

    assert jobs.run_ranks(job, 2) == [0.0, 0.0]


@pytest.mark.slow
def test_inductor_compiles_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert chunks too, since their sizes are known."""
    from piper_dynamo.lowering import chunks

    compiled: list[str] = []
    real = chunks._inductor

    def watched(chunk: Any, **options: Any) -> Any:
        compiled.append(" ".join(str(n.target) for n in chunk.graph.nodes))
        return real(chunk, **options)

    monkeypatch.setattr(chunks, "_inductor", watched)
    one, wanted = experts.case(), experts.strategy(PAIR, 2, "gpipe", capacity=2)

    def job() -> jobs.Trace:
        step = replicas.compiled(one, PAIR, wanted, compile="inductor")
        return replicas.train(step, [replicas.mine(one.batch(0), PAIR)])

    ranks = jobs.run_ranks(job, 2)
    want = capacity.train(capacity.Reference(2), one, 4, steps=1)
    for got in ranks:
        jobs.close(got.losses, want.losses, "losses", 1e-10)
        jobs.close(got.norms, want.norms, "norms", 1e-10)
    assert sum("bmm" in text for text in compiled) >= 2
    assert not any("even_mm" in text for text in compiled)


# Controls: the comparison fails for the mistakes it is there to find.


def test_control_the_last_rows_are_kept() -> None:
    with pytest.raises(AssertionError, match=r"norms|losses"):
        capacity.check(
            experts.strategy(PAIR, 2, "gpipe", capacity=2), PAIR, 2, 2, kept=capacity.last
        )


def test_control_padding_is_not_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are padded, too."""
    monkeypatch.setattr(
        slots, "_chosen", lambda values, index, is_none: values.index_select(0, index)
    )
    with pytest.raises(AssertionError, match=r"norms|losses"):
        capacity.check(experts.strategy(PAIR, 2, "gpipe", capacity=2), PAIR, 2, 2)


def test_control_rows_stay_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from piper_dynamo.passes import localize

    monkeypatch.setattr(localize, "sort_by_expert", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError, match=r"norms|losses"):
        capacity.check(experts.strategy(PAIR, 2, "gpipe", capacity=2), PAIR, 2, 2)


def test_pipelines_take_a_capacity() -> None:
    made = piper.strategies.pipeline(
        ranks=2, num_microbatches=2, replicas=2, expert_ranks=2, capacity=1.25
    )
    (shard,) = made.of(piper.Shard)
    assert (shard.capacity, shard.axes) == (1.25, None)
    alone = piper.strategies.pipeline(ranks=2, num_microbatches=2, replicas=2, capacity=4)
    (shard,) = alone.of(piper.Shard)
    assert (shard.capacity, shard.axes) == (4, ("ep",))
    assert not piper.strategies.pipeline(ranks=2, num_microbatches=2).of(piper.Shard)
    capacity.check(alone, LINE, 2, 4, size=1)
