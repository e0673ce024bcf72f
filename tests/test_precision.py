"""Parameters computed in bfloat16 and held in more equal the same casts by hand in one process.

Losses, gradient norms and each rank's part of each parameter are compared within 1e-12, over
clipped SGD and AdamW steps: the master is float64 there (`tests/mixed.py`), and whatever is rounded
to bfloat16 is rounded alike. The controls show that sums in bfloat16 are another result.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from piper_dynamo.ir.program import Instr, Op
from piper_dynamo.planning import Plan
from tests import jobs, mixed, replicas
from tests.jobs import LINE2, Placement
from tests.mixed import BF16, ByHand
from tests.replicas import LINE, PAIR

ALL = piper.Precision({}, param="bf16")


def strategy(
    placement: Placement,
    *more: Any,
    zero: int | None = None,
    microbatches: int = 2,
    schedule: str = "one_f_one_b",
) -> piper.Strategy:
    copies = [] if zero is None else [piper.Replicate({"PP": "*"}, zero=zero)]
    return piper.Strategy(
        piper.Split({}, num_microbatches=microbatches),
        *jobs.places(placement, schedule, microbatches),
        *copies,
        *more,
        *jobs.orders(schedule, placement, microbatches),
    )


def check(got: list[jobs.Trace], want: jobs.Trace, placement: Placement, zero: int = 0) -> None:
    replicas.compare(got, want, placement, zero)


# Parity.


@pytest.mark.parametrize("schedule", ["one_f_one_b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_a_pipeline(schedule: str) -> None:
    wanted = strategy(LINE2, ALL, microbatches=4, schedule=schedule)
    got = mixed.run(mixed.Net, replicas.numbers, LINE2, wanted)
    check(got, mixed.reference(mixed.Net, replicas.numbers, ByHand(microbatches=4)), LINE2)


@pytest.mark.parametrize("zero", replicas.levels(0, 1, 3))
def test_replicas(zero: int) -> None:
    got = mixed.run(mixed.Net, replicas.numbers, LINE, strategy(LINE, ALL, zero=zero))
    check(got, mixed.reference(mixed.Net, replicas.numbers, ByHand(replicas=2)), LINE, zero)


@pytest.mark.parametrize("zero", replicas.levels(0, 3))
def test_reductions_in_fewer_bits_round_as_by_hand(zero: int) -> None:
    rule = piper.Precision({}, param="bf16", reduce="bf16")
    got = mixed.run(mixed.Net, replicas.numbers, LINE, strategy(LINE, rule, zero=zero))
    by_hand = ByHand(replicas=2, reduced=BF16, each=zero >= 2)
    check(got, mixed.reference(mixed.Net, replicas.numbers, by_hand), LINE, zero)
    exact = mixed.reference(mixed.Net, replicas.numbers, ByHand(replicas=2))
    with pytest.raises(AssertionError, match="off by"):
        check(got, exact, LINE, zero)


def test_sums_in_fewer_bits_are_another_result() -> None:
    """Not quite that by hand either: a product is added to its sum before it is rounded."""
    rule = piper.Precision({}, param="bf16", grad="bf16")
    got = mixed.run(mixed.Net, replicas.numbers, LINE2, strategy(LINE2, rule, microbatches=4))
    by_hand = ByHand(microbatches=4, summed=BF16)
    want = mixed.reference(mixed.Net, replicas.numbers, by_hand)
    jobs.close(got[0].losses, want.losses, "losses", 2e-2)
    exact = mixed.reference(mixed.Net, replicas.numbers, ByHand(microbatches=4))
    with pytest.raises(AssertionError, match="off by"):
        check(got, exact, LINE2)


@pytest.mark.parametrize("zero", [None, 3])
def test_tied_weights(zero: int | None) -> None:
    """Each region's part of the gradient is rounded, their sum is not."""
    placement = LINE2 if zero is None else LINE
    wanted = strategy(placement, ALL, zero=zero)
    got = mixed.run(mixed.Tied, replicas.tokens, placement, wanted)
    by_hand = ByHand(replicas=replicas.replicas(placement))
    want = mixed.reference(
        lambda: mixed.Tied(apart=True), replicas.tokens, by_hand, ties={"head": "e"}
    )
    check(got, want, placement, zero or 0)


def test_experts_on_every_rank() -> None:
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        piper.Place({"PP": 0}, devices=[0, 1]),
        piper.Replicate({"PP": 0}, zero=3),
        ALL,
    )
    got = mixed.run(mixed.Experts, replicas.numbers, PAIR, wanted)
    check(got, mixed.reference(mixed.Experts, replicas.numbers, ByHand(replicas=2)), PAIR, 3)


@pytest.mark.parametrize("zero", [0, 3])
def test_experts_over_ranks(zero: int) -> None:
    """Of experts a rank casts its own, whose rows of all replicas are one product: in any order."""
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        piper.Place({"PP": 0}, devices=[0, 1]),
        piper.Replicate({"PP": 0}, zero=zero),
        piper.Shard({"EP": "*"}),
        ALL,
    )
    batch = replicas.numbers(0)

    def job() -> tuple[float, dict[str, Tensor]]:
        given = replicas.mine(batch, PAIR)
        step = piper.compile(mixed.Experts(), wanted, example_inputs=given)
        loss = step(*given)
        loss.backward()
        return loss.item(), replicas.grads(step)

    eager = mixed.Experts()
    want = mixed.SharedExperts().step(eager, batch)
    for rank, (loss, grads) in enumerate(jobs.run_ranks(job, 2)):
        jobs.close(loss, want, f"rank {rank}: loss")
        for name, grad in grads.items():
            whole = eager.get_parameter(name).grad
            assert whole is not None
            is_expert = name == "experts"
            mine = whole if not is_expert and zero == 0 else whole.chunk(2)[rank]
            bound = float(torch.finfo(BF16).eps * whole.abs().max()) if is_expert else 1e-12
            jobs.close(grad, mine, f"rank {rank}: gradient of {name}", bound)


class Late(nn.Module):
    """The first stage in bfloat16, the second as it is held, by hand where `cast`."""

    def __init__(self, *, cast: bool = False) -> None:
        super().__init__()
        self.w = mixed.weights(2)
        self.cast = cast

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.linear(x, self.w[0]))
        with piper.annotate("PP", 1):
            h = h.double() if self.cast else h
            return F.mse_loss(torch.tanh(F.linear(h, self.w[1])), y)


def test_one_region_alone() -> None:
    """What comes in is cast, what leaves is cast back where it is used: few bytes are sent."""
    wanted = strategy(LINE2, piper.Precision({"PP": 0}, param="bf16"))

    def by_hand() -> jobs.Trace:
        model, trace = Late(cast=True), jobs.Trace()
        for make in replicas.OPTIMIZERS:
            optimizer = make(model.parameters())
            for k in range(jobs.STEPS):
                total = 0.0
                for x, y in jobs.slices(replicas.numbers(k), 2):
                    leaf = model.w[0].detach().bfloat16().requires_grad_()
                    params = {"w.0": leaf, "w.1": model.w[1]}
                    loss = torch.func.functional_call(model, params, (x.bfloat16(), y))
                    (loss / 2).backward()
                    assert leaf.grad is not None
                    grad = leaf.grad.double()
                    model.w[0].grad = grad if model.w[0].grad is None else model.w[0].grad + grad
                    total += loss.item() / 2
                trace.losses.append(total)
                trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), jobs.CLIP)))
                optimizer.step()
                optimizer.zero_grad()
        trace.params.update({n: p.detach().clone() for n, p in model.named_parameters()})
        return trace

    check(mixed.run(Late, replicas.numbers, LINE2, wanted), by_hand(), LINE2)
    plan = piper.plan(Late(), wanted, replicas.numbers(0))
    sent = {i.spec.dtype for p in plan.programs for i in p.instrs if i.op is Op.SEND and i.spec}
    assert sent == {BF16, torch.float64}  # the value; the loss, which every rank gets


def test_the_optimizer_steps_what_it_is_given() -> None:
    """The master keeps its dtype, and so do its gradient and the model's state dict."""

    def job() -> tuple[Any, ...]:
        wanted = strategy(LINE2, ALL)
        step = piper.compile(mixed.Net(), wanted, example_inputs=replicas.numbers(0))
        step(*replicas.numbers(0)).backward()
        params = piper.parameters(step)
        return {p.dtype for p in params}, {p.grad.dtype for p in params if p.grad is not None}

    for dtypes, grads in jobs.run_ranks(job, 2):
        assert dtypes == grads == {torch.float64}


@pytest.mark.parametrize("zero", [0, 3])
def test_a_model_in_bfloat16_sums_in_float32(zero: int) -> None:
    """Without a master: 16 + 16 x 1/16 is 17, not 16; what is handed over is bfloat16."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=BF16))

        def forward(self, x: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                return (self.w * x).sum()

    def found(*more: Any) -> set[float]:
        x = torch.full((17, 2), 1 / 16, dtype=BF16)
        x[0] = 16.0
        wanted = piper.Strategy(
            piper.Split({}, num_microbatches=17, loss="sum"),
            piper.Place({"PP": 0}, devices=[0, 1]),
            piper.Replicate({"PP": 0}, zero=zero),
            *more,
        )

        def job() -> list[float]:
            step = piper.compile(Weight(), wanted, example_inputs=(x,))
            step(x).backward()
            (param,) = piper.parameters(step)
            assert param.grad is not None
            assert param.grad.dtype == BF16
            grad: list[float] = replicas.local(param.grad).tolist()
            return grad

        return {value for grad in jobs.run_ranks(job, 2) for value in grad}

    assert found() == {32.0}
    assert found(piper.Precision({}, grad="fp32")) == {34.0}


class Checkpointed(mixed.Net):
    """Each layer is computed again in the backward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k in range(4):
            with piper.annotate("PP", k * self.stages // 4):
                h = checkpoint(self.layer, h, self.w[k], use_reentrant=False)
        with piper.annotate("PP", self.stages - 1):
            return F.mse_loss(self.norm(h).double(), y.double())

    @staticmethod
    def layer(h: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(F.linear(h, w))


class Nested(Checkpointed):
    """A stage inside of a checkpoint inside of a checkpoint."""

    @staticmethod
    def layer(h: Tensor, w: Tensor) -> Tensor:
        return checkpoint(Nested.inner, h, w, use_reentrant=False)  # type: ignore[no-any-return]

    @staticmethod
    def inner(h: Tensor, w: Tensor) -> Tensor:
        with piper.annotate("EP", 0):
            return torch.tanh(F.linear(h, w))


def test_tags_are_seen_in_nested_checkpoints() -> None:
    wanted = strategy(LINE2, piper.Precision({"EP": 0}, param="bf16"))
    found = piper.plan(Nested(), wanted, replicas.numbers(0))
    assert len(found.dag.computed) == 4  # the layers; the norm is held as it is


def test_checkpointed_layers() -> None:
    got = mixed.run(Checkpointed, replicas.numbers, LINE2, strategy(LINE2, ALL))
    check(got, mixed.reference(Checkpointed, replicas.numbers, ByHand()), LINE2)
    alone = piper.Precision({"PP": 0}, param="bf16")
    found = piper.plan(Checkpointed(), strategy(LINE2, alone), replicas.numbers(0))
    sent = {i.spec.dtype for i in found.programs[0].instrs if i.op is Op.SEND and i.spec}
    assert sent == {BF16}


class Normed(nn.Module):
    """A norm with running statistics, which stay float64 and so does it; by hand where `cast`."""

    def __init__(self, *, cast: bool = False) -> None:
        super().__init__()
        self.w = mixed.weights(2)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.cast = cast

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.linear(x, self.w[0]))
            if self.cast:
                norm = self.norm
                w, b = norm.weight.double(), norm.bias.double()
                mean, var = norm.running_mean, norm.running_var
                h = F.batch_norm(h.double(), mean, var, w, b, training=True).to(BF16)
            else:
                h = self.norm(h)
        with piper.annotate("PP", 1):
            return F.mse_loss(torch.tanh(F.linear(h, self.w[1])).double(), y.double())


@pytest.mark.parametrize("zero", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_a_norm_with_running_statistics_computes_in_theirs(zero: int | None) -> None:
    placement = LINE2 if zero is None else LINE
    got = mixed.run(Normed, replicas.numbers, placement, strategy(placement, ALL, zero=zero))
    by_hand = ByHand(replicas=replicas.replicas(placement))
    want = mixed.reference(lambda: Normed(cast=True), replicas.numbers, by_hand)
    check(got, want, placement, zero or 0)


# What the plan says.


def plan(zero: int, *more: Any) -> Plan:
    wanted = strategy(LINE, *more, zero=zero)
    return piper.plan(mixed.Net(), wanted, tuple(v[:12] for v in replicas.numbers(0)))


def dtypes(found: Plan, *ops: Op) -> set[torch.dtype]:
    """Of what these make on all ranks, but for the loss."""
    instrs = [i for p in found.programs for i in p.instrs if i.op in ops and i.task != "loss"]
    return {spec.dtype for i in instrs for spec in i.specs}


def test_gathers_and_reductions_have_the_dtypes_asked_for() -> None:
    found = plan(3, piper.Precision({}, param="bf16", reduce="fp32"))
    assert dtypes(found, Op.ALL_GATHER) == {BF16}
    assert dtypes(found, Op.REDUCE_SCATTER) == {torch.float32}
    whole = plan(3)
    assert dtypes(whole, Op.ALL_GATHER, Op.REDUCE_SCATTER) == {torch.float64}
    text, before = found.summary(), whole.summary()
    assert "bfloat16" in text
    assert "float32" in text
    assert "bfloat16" not in before


def test_a_parameter_is_cast_once_a_step() -> None:
    """However often it is gathered, and of a shard only what the rank holds."""
    for zero in (0, 3):
        for program in plan(zero, ALL).programs:
            casts = [i.spec for i in program.instrs if i.op is Op.CAST and i.spec is not None]
            narrow = [spec for spec in casts if spec.dtype == BF16]
            assert len(narrow) == len(program.state)
            rows = {spec.shape[0] for spec in narrow}
            assert rows == ({2} if zero == 3 else {4})


# Controls.


def test_control_a_lost_cast_is_noticed() -> None:
    """Other casts than those asked for are another result."""
    got = mixed.run(mixed.Net, replicas.numbers, LINE2, strategy(LINE2, ALL))
    for how in (
        ByHand(computed=torch.float64),
        ByHand(summed=BF16),
        ByHand(computed=torch.float16),
    ):
        with pytest.raises(AssertionError, match="off by"):
            check(got, mixed.reference(mixed.Net, replicas.numbers, how), LINE2)


# Programs that are changed by hand.

Change = Callable[[list[Instr]], None]


def refused(zero: int, change: Change, *more: Any) -> str:
    """Why the plan with rank 0's instructions changed is refused."""
    found = plan(zero, *more)
    instrs = list(found.programs[0].instrs)
    change(instrs)
    programs = replace(found.programs[0], instrs=tuple(instrs)), *found.programs[1:]
    return jobs.refusal(lambda: replace(found, programs=programs).verify(), piper.PiperPlanError)


def first_cast(instrs: list[Instr], *of: str) -> int:
    """Where the first cast of a register is whose name begins so."""
    casts = [k for k, instr in enumerate(instrs) if instr.op is Op.CAST]
    return next(k for k in casts if instrs[k].inputs[0].startswith(of))


def to_fp16(*of: str) -> Change:
    """The same for all: that cast is to float16."""

    def change(instrs: list[Instr]) -> None:
        at = first_cast(instrs, *of)
        spec = instrs[at].spec
        assert spec is not None
        instrs[at] = replace(instrs[at], spec=replace(spec, dtype=torch.float16))

    return change


def test_a_task_that_reads_the_master_is_refused() -> None:
    def change(instrs: list[Instr]) -> None:
        cast = instrs[first_cast(instrs, "w_", "norm_")]
        (reg,), (held,) = cast.outputs, cast.inputs
        run = next(k for k, i in enumerate(instrs) if i.op is Op.RUN and reg in i.inputs)
        inputs = tuple(held if r == reg else r for r in instrs[run].inputs)
        instrs[run] = replace(instrs[run], inputs=inputs)

    jobs.mentions(refused(0, change, ALL), "'w.0'", "as bfloat16", "F.PP0.MB0")


@pytest.mark.parametrize("zero", [0, 3])
def test_a_cast_to_another_dtype_is_refused(zero: int) -> None:
    jobs.mentions(refused(zero, to_fp16("w_", "norm_"), ALL), "float16", "bfloat16")


def test_a_sum_that_is_not_begun_in_its_dtype_is_refused() -> None:
    def change(instrs: list[Instr]) -> None:
        at = first_cast(instrs, "d_")
        instrs[at] = replace(instrs[at], op=Op.ACCUMULATE, spec=None, nbytes=())

    jobs.mentions(refused(0, change, ALL), "grad_", "float64", "first part")


def test_a_reduction_of_another_dtype_is_refused() -> None:
    rule = piper.Precision({}, param="bf16", reduce="fp32")
    text = refused(0, to_fp16("grad_"), rule)
    jobs.mentions(text, "has float16, not float32", "all_reduce")
