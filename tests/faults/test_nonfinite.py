"""Section W: values that are not finite stop or skip a step on all ranks together."""

from typing import Any

import pytest
import torch
from torch import Tensor

import piper_dynamo as piper
from tests import experts, jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT
from tests.jobs import V2
from tests.models import Stack4, rows
from tests.replicas import LINE, PAIR


def with_infinity() -> tuple[Tensor, Tensor]:
    """F1's batch with one row of the second replica infinite."""
    x, y = (value.clone() for value in EIGHT)
    x[6] = float("inf")
    return x, y


def steps(check: str | None, batches: list[fx.Batch], zero: int) -> list[dict[str, Any]]:
    """Clipped steps of AdamW with a schedule; what a rank was told, and has at the end."""

    def job() -> dict[str, Any]:
        wanted = replicas.strategy(LINE, 2, "one_f_one_b", zero=zero)
        given = [fx.part(batch, wanted) for batch in batches]
        step = piper.compile(Stack4(2), wanted, example_inputs=given[0], nan_check=check)
        optimizer = fx.adamw(piper.parameters(step))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        told, losses, before = "", [], None
        for batch in given:
            before = replicas.held(step)
            try:
                loss = step(*batch)
            except piper.PiperRuntimeError as error:
                told = str(error)
                after = replicas.held(step)
                assert all(torch.equal(before[n], after[n]) for n in before)
                continue
            loss.backward()
            if all(p.grad is None for p in piper.parameters(step)):
                continue  # skipped: nothing to step by
            piper.clip_grad_norm_(step, 0.05)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"told": told, "losses": losses, "params": replicas.held(step)}

    return jobs.run_ranks(job, 4)


@pytest.mark.filterwarnings("ignore:.*gradients are not handed over")
@pytest.mark.parametrize("check", ["raise", pytest.param("skip", marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero", replicas.levels(0))
def test_a_bad_step_changes_nothing_on_any_rank(check: str, zero: int) -> None:
    """R77, non-finite on one rank: all raise or skip, and the next step is as if it were not."""
    found = steps(check, [EIGHT, with_infinity(), EIGHT], zero)
    want = steps(check, [EIGHT, EIGHT], zero)
    for got, quiet in zip(found, want, strict=True):
        assert got["losses"] == quiet["losses"]
        for name, value in quiet["params"].items():
            assert torch.equal(got["params"][name], value)
        if check == "raise":
            jobs.mentions(got["told"], "not finite", "stage PP=0, microbatch 1", "rank 1")
            jobs.mentions(got["told"], "parameter", "gradient of 'w.", "nothing was updated")


@pytest.mark.slow
def test_control_without_the_check_every_parameter_is_lost() -> None:
    """R77, signature: the step is taken, and what comes after is not a number."""
    found = steps(None, [EIGHT, with_infinity(), EIGHT], 0)
    for got in found:
        assert got["losses"][2] != got["losses"][2]
        assert all(value.isnan().any() for value in got["params"].values())


# More inputs of the kind.


@pytest.mark.slow
def test_a_bad_row_of_an_expert_is_told_on_all_ranks() -> None:
    """Another model and layout: experts over two ranks, the bad token's expert on the other."""

    def job() -> str:
        wanted = experts.strategy(PAIR, 2, "")
        good = fx.part(rows(24), wanted)
        step = piper.compile(experts.Mixture(1), wanted, example_inputs=good, nan_check="raise")
        step(*good).backward()
        x, y = good
        bad = x.clone()
        bad[0] = float("nan") if piper.rank() else 1.0
        return jobs.refusal(lambda: step(bad, y), piper.PiperRuntimeError)

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "not finite", "microbatch 0")


@pytest.mark.parametrize("value", [float("nan"), *fx.slowly(float("inf"))])
def test_a_v_in_float32_raises_on_both_ranks(value: float) -> None:
    """Another dtype and layout: found where it appears first, whichever rank has it."""

    def job() -> str:
        batch = tuple(v.float() for v in EIGHT)
        wanted = jobs.strategy(V2, 4, "zbv")
        step = piper.compile(Stack4(4).float(), wanted, example_inputs=batch, nan_check="raise")
        step(*batch).backward()
        with torch.no_grad():
            for name, p in piper.named_parameters(step):
                if name == "w.1":
                    p[0, 0] = value
        return jobs.refusal(lambda: step(*batch), piper.PiperRuntimeError)

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "not finite", "stage PP=1", "rank 1")
