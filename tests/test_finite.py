"""Values that are not finite: all ranks raise or skip together; the loss scale finds its size."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import planning
from piper_dynamo.access import state_of
from piper_dynamo.ir.program import UNWATCHED
from piper_dynamo.loss_scaling import Scaler
from tests import jobs, replicas
from tests.jobs import LINE2, Placement
from tests.models import Stack4, rows, weights
from tests.replicas import LINE, PAIR


class Logs(nn.Module):
    """The second stage takes a logarithm, of what is 0 where the input is."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            self.seen.add_(1)
            h = (x @ self.w[0].T).square().sum(1)
        with piper.annotate("PP", 1):
            return (torch.log(h).unsqueeze(1) * (y @ self.w[1].T)).mean()


def bad_row(row: int, count: int = 8) -> tuple[Tensor, Tensor]:
    """A batch that is fine but for one row."""
    x, y = rows(count)
    x[row] = 0.0
    return x, y


def good() -> tuple[Tensor, Tensor]:
    x, y = rows(8)
    return x + 2, y


def strategy(placement: Placement, microbatches: int = 4) -> piper.Strategy:
    if len(placement[0]) > 1:
        return replicas.strategy(placement, microbatches, "one_f_one_b", zero=3)
    return jobs.strategy(placement, microbatches, "one_f_one_b")


def compiled(model: nn.Module, placement: Placement, **options: Any) -> Any:
    given = replicas.mine(good(), placement)
    return piper.compile(model, strategy(placement, 2), example_inputs=given, **options)


# nan_check


@pytest.mark.parametrize(("placement", "rank"), [(LINE2, 1), (LINE, 3)], ids=["line", "replicas"])
def test_all_ranks_raise_before_anything_is_updated(placement: Placement, rank: int) -> None:
    """The message names the first task of all ranks, its microbatch, and the first parameter."""

    def job() -> tuple[str, bool]:
        step = compiled(Logs(), placement, nan_check="raise")
        step(*replicas.mine(good(), placement)).backward()
        before, seen = replicas.held(step), int(step._orig_mod.seen)
        given = replicas.mine(bad_row(6), placement)
        text = jobs.refusal(lambda: step(*given), piper.PiperRuntimeError)
        after = replicas.held(step)
        same = all(torch.equal(before[n], after[n]) for n in before)
        return text, same and seen == int(step._orig_mod.seen)

    for text, same in jobs.run_ranks(job, jobs.world(placement)):
        assert same
        jobs.mentions(text, "not finite", f"F.PP1.MB1 (stage PP=1, microbatch 1) on rank {rank}")
        jobs.mentions(text, "test_finite.py", "parameter", "'w.1'", "nothing was updated")
        if placement is LINE:
            jobs.mentions(text, "1 of 2")


def test_the_first_of_many_alike_replicas_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica's program is simulated for all."""
    monkeypatch.setattr(planning, "MANY_RANKS", 3)
    where: Placement = {0: [0, 1, 2], 1: [0, 1, 2]}
    x, y = bad_row(6, 12)  # replica 1's second microbatch
    x[8] = 0.0  # replica 2's first

    def job() -> str:
        given = replicas.mine((x, y), where)
        wanted = replicas.strategy(where, 2, "gpipe", zero=3)
        step = piper.compile(Logs(), wanted, example_inputs=given, nan_check="raise")
        return jobs.refusal(lambda: step(*given), piper.PiperRuntimeError)

    for text in jobs.run_ranks(job, 3):
        jobs.mentions(text, "F.PP1.MB0 (stage PP=1, microbatch 0) on rank 2", "2 of 3")


def test_skipped_steps_change_nothing() -> None:
    """The run goes on as if they had not been."""

    def job(batches: list[tuple[Tensor, Tensor]]) -> tuple[Any, ...]:
        model = Logs()
        step = compiled(model, LINE2, nan_check="skip")
        optimizer = torch.optim.AdamW(piper.parameters(step), lr=0.01, weight_decay=0.1)
        told = []
        for batch in batches:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = step(*batch)
            told += [str(w.message) for w in caught if "not finite" in str(w.message)]
            loss.backward()
            piper.clip_grad_norm_(step, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return replicas.held(step), told, int(model.seen)

    more = [good(), bad_row(0), bad_row(5), good()]
    for rank in range(2):
        params, told, seen = jobs.run_ranks(lambda: job(more), 2)[rank]
        want, none, steps = jobs.run_ranks(lambda: job([more[0], more[3]]), 2)[rank]
        assert len(told) == 2
        assert not none
        jobs.mentions(told[1], "F.PP1.MB1", "not handed over")
        for name, value in params.items():
            assert torch.equal(value, want[name]), name
        assert rank == 1 or seen == steps  # the first stage counts


@pytest.mark.parametrize("zero", [0, 1])
def test_what_was_put_off_before_a_skipped_step_is_handed_over(zero: int) -> None:
    """As without `no_sync`: the skipped step alone is missing from the sum."""
    wanted = replicas.strategy(LINE, 2, "one_f_one_b", zero=zero)

    def job(*, puts_off: bool) -> list[dict[str, Tensor]]:
        step = piper.compile(
            Logs(), wanted, example_inputs=replicas.mine(good(), LINE), nan_check="skip"
        )
        with piper.no_sync(step) if puts_off else nullcontext():
            step(*replicas.mine(good(), LINE)).backward()
        found = []
        for batch in (bad_row(6), good()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step(*replicas.mine(batch, LINE)).backward()
            found.append({name: grad.clone() for name, grad in replicas.grads(step).items()})
        return found

    plain = jobs.run_ranks(lambda: job(puts_off=False), 4)
    for rank, found in enumerate(jobs.run_ranks(lambda: job(puts_off=True), 4)):
        for grads, want in zip(found, plain[rank], strict=True):
            assert grads.keys() == want.keys()
            for name, grad in grads.items():
                jobs.close(grad, want[name], f"rank {rank}: {name}")


def test_a_sum_that_overflows_is_found_though_its_parts_are_finite() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                return (self.w * x).sum() / 2

    def job() -> str:
        wanted = replicas.strategy(PAIR, 1, "", zero=0, reduction="sum")
        x = torch.full((1, 2), 3e38)
        step = piper.compile(Sum(), wanted, example_inputs=(x,), nan_check="raise")
        step(x / 4).backward()
        x[0, 1] = -3e38  # the loss is finite, and each replica's gradient
        return jobs.refusal(lambda: step(x * 2 / 2 * torch.tensor([2.0, 2.0]) / 1.2), Exception)

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "'w'")


@pytest.mark.parametrize(("options", "has"), [({}, False), ({"nan_check": "skip"}, True)])
def test_off_costs_nothing(options: dict[str, Any], has: bool) -> None:
    """The program that runs does not look, and ranks do not meet after the step."""

    def job() -> tuple[bool, int]:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8), **options)
        comm = state_of(step).comm
        entries = [entry for found in comm.programs.values() for entry in found.values()]
        sources = [entry.executor._emit(UNWATCHED).source for entry in entries]
        assert sources
        assert {"rt.look" in source for source in sources} == {has}
        meetings: list[Tensor] = []

        def counted(value: Tensor) -> Tensor:
            meetings.append(value)
            reduced: Tensor = type(comm).reduce_now(comm, value)
            return reduced

        comm.reduce_now = counted
        step(*rows(8)).backward()
        return has, len(meetings)

    assert jobs.run_ranks(job, 2) == [(has, int(has))] * 2


# loss_scale


@pytest.mark.parametrize(
    ("placement", "scale"),
    [(LINE2, piper.LossScale(init=8.0)), (LINE, 1024.0)],
    ids=["line", "replicas"],
)
def test_a_scale_changes_no_result(scale: Any, placement: Placement) -> None:
    """Powers of two are exact; what is handed over, and the loss, are as they are."""
    case = replicas.CASES["plain"]

    def job() -> jobs.Trace:
        wanted = strategy(placement, 2)
        step = replicas.compiled(case, placement, wanted, loss_scale=scale)
        given = [replicas.mine(case.batch(k), placement) for k in range(3)]
        return replicas.train(step, given)

    got = jobs.run_ranks(job, jobs.world(placement))
    zero = 3 if placement is LINE else 0
    replicas.compare(got, replicas.reference(case), placement, zero)


class Small(nn.Module):
    """Its gradient, about 2^-26, is nothing in float16, unless it is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.w * x
        with piper.annotate("PP", 1):
            return (h.float() * 2.0**-14).sum()


def small(**options: Any) -> list[Any]:
    """The gradient of `Small` on the rank that holds its weight."""

    def job() -> Any:
        x = torch.full((2, 2), 2.0**-12)
        wanted = piper.Strategy(
            *jobs.strategy(LINE2, 2).directives, piper.Precision({"PP": 0}, param="fp16")
        )
        step = piper.compile(Small(), wanted, example_inputs=(x,), **options)
        step(x).backward()
        return [p.grad.tolist() for p in piper.parameters(step) if p.numel()]

    return list(jobs.run_ranks(job, 2)[0])


def test_a_scale_saves_what_float16_cannot_hold() -> None:
    want = [2.0**-26] * 2
    assert small() == [[0.0, 0.0]]
    assert small(loss_scale=2.0**10) == [want]
    assert small(loss_scale="dynamic") == [want]


def test_a_dynamic_scale_backs_off_and_grows_alike_on_all_ranks() -> None:
    """One bad replica is enough; `torch.amp.GradScaler` does the same."""
    rule = piper.LossScale(init=64.0, interval=2)

    def job() -> list[tuple[float, bool]]:
        step = compiled(Logs(), LINE, loss_scale=rule)
        found = [(piper.loss_scale(step), True)]
        for batch in (bad_row(6), good(), good(), good(), bad_row(1)):
            step(*replicas.mine(batch, LINE)).backward()
            grads = [p.grad is not None for p in piper.parameters(step)]
            assert len(set(grads)) == 1
            found.append((piper.loss_scale(step), grads[0]))
            for param in piper.parameters(step):
                param.grad = None
        return found

    want = [(64.0, True), (32.0, False), (32.0, True), (64.0, True), (64.0, True), (32.0, False)]
    assert jobs.run_ranks(job, 4) == [want] * 4


def test_checkpoints_keep_a_dynamic_scale(tmp_path: Path) -> None:
    """A run that is resumed, under another layout, has the scale and the steps since it changed."""

    def made(placement: Placement, **options: Any) -> Any:
        return compiled(Logs(), placement, **options)

    def save() -> None:
        step = made(LINE2, loss_scale=piper.LossScale(init=64.0, interval=2))
        for batch in (bad_row(6), good()):
            step(*batch).backward()
        piper.save_checkpoint(tmp_path, step)

    def load() -> list[float]:
        step = made(LINE, loss_scale=piper.LossScale(init=4.0, interval=2))
        piper.load_checkpoint(tmp_path, step)
        found = [piper.loss_scale(step)]
        step(*replicas.mine(good(), LINE)).backward()
        return [*found, piper.loss_scale(step)]

    def load_fixed() -> float:
        step = made(LINE2, loss_scale=4.0)
        piper.load_checkpoint(tmp_path, step)
        return piper.loss_scale(step)

    jobs.run_ranks(save, 2)
    assert jobs.run_ranks(load, 4) == [[32.0, 64.0]] * 4
    assert jobs.run_ranks(load_fixed, 2) == [4.0, 4.0]


def test_a_scaler_is_torchs() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    ours = Scaler.of(piper.LossScale(interval=3))
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for value in (float("inf"), 1.0, 1.0, 1.0, 1.0, float("nan"), 1.0, 1.0, 1.0):
        theirs.scale(weight * 0)
        weight.grad = torch.full((1,), value)
        theirs.step(optimizer)
        theirs.update()
        ours.update(is_finite=value == 1.0)
        assert ours.factor == theirs.get_scale()


def test_a_model_that_is_compiled_again_has_the_later_scale() -> None:
    def job() -> list[float]:
        model, found = Stack4(2), []
        for option in ({}, {"loss_scale": 4.0}, {}):
            step = compiled(model, LINE2, **option)
            step(*rows(8)).backward()
            found.append(piper.loss_scale(step))
        return found

    assert jobs.run_ranks(job, 2) == [[1.0, 4.0, 1.0]] * 2


def test_a_loss_in_bfloat16_rounds_no_gradient() -> None:
    """A scale of 3 has no reciprocal in few bits."""

    class Rounded(Stack4):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y).bfloat16()

    def job(**option: Any) -> dict[str, Tensor]:
        step = compiled(Rounded(2), LINE2, **option)
        step(*rows(8)).backward()
        return replicas.grads(step)

    want = jobs.run_ranks(job, 2)
    for rank, grads in enumerate(jobs.run_ranks(lambda: job(loss_scale=3.0), 2)):
        for name, grad in grads.items():
            jobs.close(grad, want[rank][name], name, 1e-6)


def test_evaluation_is_not_scaled() -> None:
    def job() -> tuple[float, float]:
        step = compiled(Stack4(2), LINE2, loss_scale=4.0)
        with torch.no_grad():
            before = step(*rows(8)).item()
        return before, step(*rows(8)).item()

    for before, trained in jobs.run_ranks(job, 2):
        assert before == pytest.approx(Stack4.LOSS, abs=1e-12)
        assert trained == pytest.approx(Stack4.LOSS, abs=1e-12)


# Refusals.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nan_check": "warn"}, ("nan_check", "raise", "skip")),
        ({"loss_scale": 0.0}, ("loss_scale", "above 0")),
        ({"loss_scale": "auto"}, ("loss_scale", "dynamic")),
        ({"loss_scale": "dynamic", "nan_check": "raise"}, ("dynamic", "nan_check", "skip")),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], words: tuple[str, ...]) -> None:
    wanted = jobs.strategy(LINE2, 2)
    text = jobs.refusal(lambda: piper.plan(Stack4(2), wanted, rows(8), **options))
    jobs.mentions(text, *words)


@pytest.mark.parametrize(
    ("given", "word"),
    [({"init": 0}, "init"), ({"backoff": 1.0}, "backoff"), ({"interval": 0}, "interval")],
)
def test_scales_that_are_none(given: dict[str, Any], word: str) -> None:
    text = jobs.refusal(lambda: piper.LossScale(**given), piper.PiperStrategyError)
    jobs.mentions(text, word)


class Half(nn.Module):
    """Its loss is made in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return F.mse_loss(x @ self.w[0].T, y)


class Bare(nn.Module):
    """It has no loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(1)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return x @ self.w[0].T


@pytest.mark.parametrize(
    ("model", "inputs", "option", "words"),
    [
        (Half, 2, {"loss_scale": 8.0}, ("float16", "logits.float()")),
        (Bare, 1, {"loss_scale": 8.0}, ("loss that is made inside",)),
        (Bare, 1, {"nan_check": "raise"}, ("loss that is made inside",)),
    ],
)
def test_what_cannot_be_watched(
    model: type[nn.Module], inputs: int, option: dict[str, Any], words: tuple[str, ...]
) -> None:
    wanted = piper.Strategy(piper.Precision({}, param="fp16"))
    given = rows(8)[:inputs]
    text = jobs.refusal(lambda: piper.plan(model(), wanted, given, **option))
    jobs.mentions(text, *words)
    step = torch.compile(model(), backend="piper", options={"strategy": wanted, **option})
    for _ in range(2):  # a call that was refused is refused again
        jobs.mentions(jobs.refusal(lambda: step(*given)), *words)


def test_ranks_with_unlike_options_are_told_apart() -> None:
    def job() -> str:
        option = {"nan_check": "skip"} if piper.rank() else {}
        step = piper.compile(
            Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8), timeout_s=20, **option
        )
        return jobs.refusal(lambda: step(*rows(8)))

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "different programs", "nan_check='skip'")
