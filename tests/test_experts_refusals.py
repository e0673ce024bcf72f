"""Expert regions that ranks can share, those that they cannot, and plans that are unsafe."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Instr, Op
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.verify import verify
from tests import experts, jobs, replicas
from tests.experts import EXPERTS, Mixture
from tests.models import fill, rows
from tests.replicas import PAIR

QUAD = {0: [0, 1, 2, 3]}


# Mutated plans.


def changed(plan: piper.Plan, op: Op, **fields: Any) -> list[Any]:
    """The programs of a plan, with the first instruction of that kind changed on every rank."""
    found = []
    for program in plan.programs:
        instrs = list(program.instrs)
        at = next(i for i, instr in enumerate(instrs) if instr.op is op)
        new = {k: v(instrs[at]) if callable(v) else v for k, v in fields.items()}
        instrs[at] = replace(instrs[at], **new)
        found.append(replace(program, instrs=tuple(instrs)))
    return found


@pytest.fixture(scope="module")
def two_ranks() -> piper.Plan:
    return piper.plan(Mixture(1), experts.strategy(PAIR, 1, ""), rows(12, 0), 2)


def test_rows_without_counts_are_refused(two_ranks: piper.Plan) -> None:
    verify(two_ranks.programs)
    wrong = changed(two_ranks, Op.EXCHANGE, inputs=lambda instr: (instr.inputs[0], instr.inputs[0]))
    with pytest.raises(piper.PiperPlanError, match="does not say how many rows"):
        verify(wrong)


def test_counts_without_their_splits_are_refused(two_ranks: piper.Plan) -> None:
    program = two_ranks.programs[0]
    started = {i.outputs[0] for i in program.instrs if i.op is Op.EXCHANGE_COUNTS}
    instrs = [
        replace(i, outputs=i.outputs[:1]) if i.op is Op.WAIT and i.inputs[0] in started else i
        for i in program.instrs
    ]
    wrong = [replace(program, instrs=tuple(instrs)), *two_ranks.programs[1:]]
    with pytest.raises(piper.PiperPlanError, match="counts and splits are 2 results, not 1"):
        verify(wrong)


def test_rows_on_another_communicator_are_refused(two_ranks: piper.Plan) -> None:
    with pytest.raises(piper.PiperPlanError, match="but their counts were over"):
        verify(changed(two_ranks, Op.EXCHANGE, stream="other"))


def test_a_rank_without_its_exchange_is_refused(two_ranks: piper.Plan) -> None:
    first, second = two_ranks.programs
    at = next(i for i, instr in enumerate(second.instrs) if instr.op is Op.UNEXCHANGE)
    (handle,) = second.instrs[at].outputs
    kept = [
        instr
        for i, instr in enumerate(second.instrs)
        if i != at and not (instr.op is Op.WAIT and instr.inputs == (handle,))
    ]
    with pytest.raises(piper.PiperPlanError, match="collective"):
        verify([first, replace(second, instrs=tuple(kept))])


def test_gathered_experts_are_refused(two_ranks: piper.Plan) -> None:
    """Each rank computes with its own."""
    programs = []
    for program in two_ranks.programs:
        (reg, _), *_ = [one for one in program.state if one[1] in dict(program.experts)]
        spec = TensorSpec(shape=(4, 4, 3), dtype=torch.float64, stride=(12, 3, 1))
        start = Instr(
            op=Op.ALL_GATHER, task="x", inputs=(reg,), outputs=("h",), group=(0, 1), specs=(spec,)
        )
        wait = Instr(op=Op.WAIT, task="x", inputs=("h",), outputs=("_",), specs=(spec,))
        programs.append(replace(program, instrs=(start, wait, *program.instrs)))
    with pytest.raises(piper.PiperPlanError, match="a rank's own experts"):
        verify(programs)


# Refusals.


class Odd(Mixture):
    """One thing in an expert region that ranks cannot share."""

    def __init__(self, what: str) -> None:
        super().__init__(1)
        self.what = what
        self.bias = nn.Parameter(fill([3], 5))
        self.square = nn.Parameter(fill([4, 3, 3], 6))
        self.register_buffer("fixed", fill([EXPERTS, 4, 3], 7).detach())

    def mix(self, h: Tensor, layer: int) -> Tensor:
        weights, index = (h @ self.gate[layer]).softmax(-1).topk(2)
        sent, routing = piper.moe.dispatch(h, index, EXPERTS)
        with piper.annotate("EP"):
            inner = piper.moe.grouped_mm(sent, self.up[layer], routing)
            if self.what == "bias":
                inner = inner + self.bias
            if self.what == "reads":
                inner = inner + h.sum()
            if self.what == "alone":
                inner = inner.softmax(0)
            if self.what == "random":
                inner = nn.functional.dropout(inner, 0.5)
            if self.what == "added up":
                inner = inner + (inner.T @ inner)[0]
            if self.what == "buffer":
                inner = inner + piper.moe.grouped_mm(sent, self.fixed, routing)
            if self.what == "turned":
                inner = inner @ self.square.transpose(0, 1)[0][:3]
            if self.what == "baked":
                inner = inner + torch.arange(inner.shape[0], dtype=inner.dtype).unsqueeze(1)
            out = piper.moe.grouped_mm(inner, self.down[layer], routing)
            extra = out.sum() if self.what == "leaves" else None
        found = piper.moe.combine(out, routing, weights)
        if self.what == "twice":
            found = found + self.up[layer].square().sum()
        return found if extra is None else found + extra


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("bias", "parameter 'bias' otherwise than as a weight of piper.moe.grouped_mm"),
        ("reads", "piper.moe.dispatch did not send there"),
        ("leaves", "piper.moe.combine does not bring back"),
        ("baked", "cannot be computed by several ranks"),
        ("alone", "_softmax works along the rows"),
        ("random", "draws random numbers"),
        ("added up", "not known to treat every row alike"),
        ("buffer", "multiplies by buffer 'fixed' expert by expert"),
        ("turned", "parameter 'square' otherwise than as a weight"),
        ("twice", "is used by F.PP0.v2 on ranks"),
    ],
)
def test_what_ranks_cannot_share_is_refused(what: str, words: str) -> None:
    with pytest.raises(piper.PiperPlanError, match=re.escape(words)) as caught:
        piper.plan(Odd(what), experts.strategy(PAIR, 2, "gpipe"), rows(12, 0), 2)
    assert "test_experts_refusals.py:" in str(caught.value)


class Even(Mixture):
    """What works for any number of rows: norms, slices and products along the last dim."""

    def experts(self, sent: Tensor, layer: int, routing: piper.moe.Routing) -> Tensor:
        sent = nn.functional.layer_norm(sent, (4,)) + nn.functional.rms_norm(sent, (4,))
        inner = piper.moe.grouped_mm(sent, self.up[layer], routing).softmax(-1)
        inner = torch.cat((inner[:, 1:], inner[:, :1] / inner.norm(dim=-1, keepdim=True)), -1)
        return piper.moe.grouped_mm(inner, self.down[layer], routing)


class Sliced(Mixture):
    """SwiGLU whose halves are one matrix's: slices, whose gradients know the rows captured."""

    def experts(self, sent: Tensor, layer: int, routing: piper.moe.Routing) -> Tensor:
        inner = piper.moe.grouped_mm(sent, self.up[layer], routing)
        inner = nn.functional.silu(inner[:, :1]) * inner[:, 1:] * inner[:, -1].unsqueeze(1)
        inner = torch.cat((inner, inner[:, :1]), 1)
        return piper.moe.grouped_mm(inner, self.down[layer], routing)


class Round(Mixture):
    """Experts in turn: the routing depends on no data."""

    def mix(self, h: Tensor, layer: int) -> Tensor:
        index = (torch.arange(h.shape[0]) * 2).unsqueeze(1) % EXPERTS + torch.arange(2)
        sent, routing = piper.moe.dispatch(h, index, EXPERTS)
        with piper.annotate("EP"):
            inner = torch.tanh(piper.moe.grouped_mm(sent, self.up[layer], routing))
            out = piper.moe.grouped_mm(inner, self.down[layer], routing)
        return piper.moe.combine(out, routing, (h @ self.gate[layer])[:, :2].sigmoid())


class Plain(Mixture):
    """An expert region without experts' matrices: rows travel all the same."""

    def experts(self, sent: Tensor, layer: int, routing: piper.moe.Routing) -> Tensor:
        return torch.tanh(sent)


@pytest.mark.parametrize("kind", [pytest.param(Even, marks=pytest.mark.slow), Sliced, Round, Plain])
def test_what_treats_every_row_alike_works(kind: type[Mixture]) -> None:
    one = replicas.Case(build=kind, batch=experts.case().batch)
    ranks = replicas.run(one, PAIR, experts.strategy(PAIR, 2, "gpipe"), steps=2)
    want = replicas.reference(one, steps=2)
    # Plain's matrices are used nowhere, so nobody splits them.
    part = replicas.part_of if kind is Plain else experts.part_of(2)
    replicas.compare(ranks, want, PAIR, 0, part=part)


def test_batch_data_in_an_expert_region_is_refused() -> None:
    class Reads(Mixture):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                weights, index = (x @ self.gate[0]).softmax(-1).topk(2)
                sent, routing = piper.moe.dispatch(x, index, EXPERTS)
                with piper.annotate("EP"):
                    out = sent + y.sum()
                return piper.moe.combine(out, routing, weights).mean()

    with pytest.raises(piper.PiperPlanError, match="reads the batch's 'y'"):
        piper.plan(Reads(1), experts.strategy(PAIR, 2, "gpipe"), rows(12, 0), 2)


def test_rows_of_another_routing_are_refused() -> None:
    x, w = fill([4, 4], 1).detach(), fill([EXPERTS, 4, 3], 2).detach()
    sent, routing = piper.moe.dispatch(x, torch.tensor([0, 1, 2, 3]), EXPERTS)
    with pytest.raises(piper.PiperStrategyError, match="of its routing"):
        piper.moe.grouped_mm(sent[:3], w, routing)
    with pytest.raises(RuntimeError, match="x has 3 rows, but its routing has 4"):
        torch.ops.piper.grouped_mm(sent[:3], w, routing.arrived)
    with pytest.raises(piper.PiperStrategyError, match="of its routing"):
        piper.moe.combine(sent[:3], routing)


def test_rows_of_another_routing_are_refused_where_they_are_captured() -> None:
    class Short(Mixture):
        def mix(self, h: Tensor, layer: int) -> Tensor:
            sent, routing = piper.moe.dispatch(h, torch.arange(h.shape[0]) % EXPERTS, EXPERTS)
            with piper.annotate("EP"):
                piper.moe.grouped_mm(sent[1:], self.up[layer], routing)
            return h

    with pytest.raises(piper.PiperError, match="of its routing"):
        piper.plan(Short(1), experts.strategy(PAIR, 2, "gpipe"), rows(12, 0), 2)


def test_experts_that_do_not_divide_are_refused() -> None:
    wanted = experts.strategy({0: [0, 1, 2]}, 1, "")
    with pytest.raises(piper.PiperPlanError, match=r"4 experts, which 3 ranks do not divide"):
        piper.plan(Mixture(1), wanted, rows(12, 0), 3)


def test_two_shards_of_one_region_are_refused() -> None:
    wanted = experts.strategy(PAIR, 1, "")
    twice = piper.Strategy(*wanted.directives, piper.Shard({"EP": 0}))
    with pytest.raises(piper.PiperPlanError, match="sharded twice"):
        piper.plan(Mixture(1), twice, rows(12, 0), 2)


def test_experts_sharded_over_some_of_their_copies_are_refused_by_name() -> None:
    """Four ranks hold the same experts, and blocks would be spread over two of them."""
    eight = {0: list(range(8))}
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        *jobs.places(eight),
        piper.Replicate({"PP": "*"}, axes=("out", "in", "ep"), shard_axes=("in",), zero=1),
        piper.Shard({"EP": "*"}, axes=("ep",)),
        mesh=piper.Mesh((2, 2, 2), ("out", "in", "ep")),
    )
    with pytest.raises(piper.PiperPlanError, match=r"some of the ranks that hold the same ones"):
        piper.plan(Mixture(1), wanted, rows(16, 0), 8)


def test_a_region_without_experts_is_refused() -> None:
    wanted = piper.Strategy(
        *jobs.places(PAIR), piper.Replicate({"PP": "*"}), piper.Shard({"XP": "*"})
    )
    with pytest.raises(piper.PiperPlanError, match="no task has the tag 'XP'"):
        piper.plan(Mixture(1), wanted, rows(12, 0), 2)


class Returned(Mixture):
    """Gives away rows that are with their experts."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        with piper.annotate("PP", 0):
            sent, routing = piper.moe.dispatch(x, (x @ self.gate[0]).topk(2)[1], experts.EXPERTS)
            with piper.annotate("EP"):
                out = piper.moe.grouped_mm(sent, self.up[0], routing)
            mixed = piper.moe.combine(out, routing).sum(1)
            return mixed.square().mean(), out


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("placement", "capacity"), [(PAIR, None), (PAIR, 2), ({0: [0]}, 2)])
def test_rows_of_experts_are_no_output(
    placement: dict[int, list[int]], capacity: int | None, microbatches: int
) -> None:
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=microbatches),
        *jobs.places(placement),
        *([piper.Replicate({"PP": "*"})] if len(placement[0]) > 1 else []),
        piper.Shard({"EP": "*"}, capacity=capacity),
        loss=0,
    )
    with pytest.raises(piper.PiperPlanError, match="gives an output or a buffer a value that"):
        piper.plan(Returned(1), wanted, rows(12, 0), len(placement[0]))
