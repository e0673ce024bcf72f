"""The compiled step in the user's loop: gradients handed over, losses, outputs.

Where a case is a function of "the model", it runs once on the eager model and once on the compiled
step, and both must leave the same gradients.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs
from tests.jobs import LINE2, ONE, V2
from tests.models import (
    BareLoss,
    Fixed,
    Hidden,
    Outputs,
    Stack4,
    rows,
)

F64 = torch.float64


def compiled(microbatches: int = 2, batch: tuple[Any, ...] | None = None) -> Any:
    """Stack4 on a line of two."""
    strategy = jobs.strategy(LINE2, microbatches)
    return piper.compile(Stack4(2), strategy, example_inputs=batch or rows(8))


def both(use: Callable[[Any], Any], ranks: int = 2) -> None:
    """`use` leaves the same gradients in the eager model and in the compiled step."""

    def job() -> dict[str, Tensor]:
        step = compiled()
        use(step)
        return jobs.grads(step)

    want = Stack4(2)
    use(want)
    jobs.check_grads(jobs.run_ranks(job, ranks), want)


def halves() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x, y = rows(8)
    return (x[:4], y[:4]), (x[4:], y[4:])


# Hand-over: what `loss.backward()` does with the gradients that the program made.


def test_two_calls_add_up_until_zero_grad() -> None:
    """Outer accumulation sums the calls' gradients; the norms come from apart from this file."""

    def job() -> tuple[float, float, dict[str, Tensor]]:
        step = compiled(2, halves()[0])
        for half in halves():
            step(*half).backward()
        summed, total = jobs.grads(step), float(piper.clip_grad_norm_(step, float("inf")))
        for p in piper.parameters(step):
            p.grad = None
        for half in halves():
            (step(*half) / 2).backward()
        return total, float(piper.clip_grad_norm_(step, float("inf"))), summed

    want = Stack4(2)
    for half in halves():
        want(*half).backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([summed for *_, summed in ranks], want)
    for total, halved, _ in ranks:
        assert total == pytest.approx(0.14161562694, abs=1e-9)  # 0.11762853830 if the first fades
        assert halved == pytest.approx(Stack4.NORM, abs=1e-9)


def test_control_a_fading_first_call_is_noticed() -> None:
    want, faded = Stack4(2), Stack4(2)
    for half in halves():
        want(*half).backward()
    faded(*halves()[0]).backward()
    for p in faded.parameters():
        assert p.grad is not None
        p.grad /= 2
    faded(*halves()[1]).backward()
    got = {n: p.grad for n, p in faded.named_parameters() if p.grad is not None}
    with pytest.raises(AssertionError, match="off by"):
        jobs.check_grads([got], want)


@pytest.mark.parametrize(
    "scaled",
    [
        pytest.param(lambda loss: loss / 2, id="half"),
        pytest.param(lambda loss: loss.square() + 3 * loss, id="function"),
        pytest.param(lambda loss: loss.float() * 2, id="another dtype"),
    ],
)
def test_the_incoming_tangent_scales_the_gradients(scaled: Callable[[Tensor], Tensor]) -> None:
    both(lambda model: scaled(model(*rows(8))).backward())


def test_backward_takes_a_tangent() -> None:
    both(lambda model: model(*rows(8)).backward(torch.tensor(-0.5, dtype=F64)))


def test_losses_of_two_calls_can_be_added() -> None:
    def use(model: Any) -> None:
        first, second = (model(*half) for half in halves())
        (first + 3 * second).backward()

    both(use)


def test_two_losses_may_be_outstanding_in_any_order() -> None:
    def use(model: Any) -> None:
        first, second = (model(*half) for half in halves())
        (3 * second).backward()
        first.backward()

    both(use)


def test_a_third_outstanding_loss_drops_the_oldest() -> None:
    def job() -> tuple[str, dict[str, Tensor]]:
        step = compiled()
        losses = [step(*rows(8)) for _ in range(3)]
        text = jobs.refusal(losses[0].backward, Exception)
        losses[2].backward()
        losses[1].backward()
        return text, jobs.grads(step)

    want = Stack4(2)
    (2 * want(*rows(8))).backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([got for _, got in ranks], want)
    for text, _ in ranks:
        jobs.mentions(text, "loss")


@pytest.mark.parametrize("retain", [False, True], ids=["plain", "retain_graph"])
def test_a_second_backward_of_one_loss_raises(retain: bool) -> None:
    def job() -> dict[str, Tensor]:
        step = compiled()
        loss = step(*rows(8))
        loss.backward(retain_graph=retain)
        with pytest.raises(Exception, match=r"second|twice|already"):
            loss.backward()
        return jobs.grads(step)

    want = Stack4(2)
    want(*rows(8)).backward()
    jobs.check_grads(jobs.run_ranks(job, 2), want)


def test_double_backward_raises() -> None:
    def job() -> None:
        step = compiled()
        params = [p for p in piper.parameters(step) if p.numel()]

        def twice() -> None:
            got = torch.autograd.grad(step(*rows(8)), params, create_graph=True)
            torch.stack([g.square().sum() for g in got]).sum().backward()

        jobs.refusal(twice, Exception)

    jobs.run_ranks(job, 2)


def test_autograd_grad_gives_the_gradients_and_touches_no_parameter() -> None:
    def job() -> dict[str, Tensor]:
        step = compiled()
        held = {n: p for n, p in piper.named_parameters(step) if p.numel()}
        got = torch.autograd.grad(step(*rows(8)) / 2, list(held.values()))
        assert all(p.grad is None for p in held.values())
        return dict(zip(held, got, strict=True))

    want = Stack4(2)
    (want(*rows(8)) / 2).backward()
    jobs.check_grads(jobs.run_ranks(job, 2), want)


def test_gradient_hooks_run_and_may_change_the_gradient() -> None:
    def use(model: Any, params: list[Any]) -> list[int]:
        calls: list[int] = []
        handles = [p.register_hook(lambda g: 2 * g) for p in params]
        handles += [p.register_post_accumulate_grad_hook(lambda _: calls.append(1)) for p in params]
        model(*rows(8)).backward()
        for handle in handles:
            handle.remove()
        return calls

    def job() -> dict[str, Tensor]:
        step = compiled()
        held = [p for p in piper.parameters(step) if p.numel()]
        assert len(use(step, held)) == len(held)
        return jobs.grads(step)

    want = Stack4(2)
    use(want, list(want.parameters()))
    jobs.check_grads(jobs.run_ranks(job, 2), want)


def test_gradients_are_storage_of_the_users_own() -> None:
    """A later call changes nothing in gradients that were handed over before."""

    def job() -> None:
        step = compiled()
        step(*rows(8)).backward()
        before, held = jobs.grads(step), {n: p.grad for n, p in piper.named_parameters(step)}
        for p in piper.parameters(step):
            p.grad = None
        step(*rows(8, 3)).backward()
        for name, value in before.items():
            assert torch.equal(held[name], value)

    jobs.run_ranks(job, 2)


# The loss.


@pytest.mark.parametrize("placement", [LINE2, V2], ids=["line", "v"])
def test_every_rank_gets_the_loss(placement: jobs.Placement) -> None:
    def job() -> Tensor:
        strategy = jobs.strategy(placement, 4)
        step = piper.compile(Stack4(len(placement)), strategy, example_inputs=rows(8))
        loss = step(*rows(8))
        assert loss.shape == ()
        assert loss.dtype == F64
        assert loss.requires_grad
        return loss.detach()

    for loss in jobs.run_ranks(job, 2):
        assert loss.item() == pytest.approx(Stack4.LOSS, abs=1e-12)


def test_a_rank_without_parameters_takes_part() -> None:
    """Its loss is differentiable, and an optimizer and clipping work on what it has."""

    def job() -> tuple[float, float, list[str]]:
        step = piper.compile(BareLoss(), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        optimizer = torch.optim.AdamW(piper.parameters(step), lr=0.01, foreach=True)
        loss = step(*rows(8))
        assert loss.requires_grad
        loss.backward()
        norm = float(piper.clip_grad_norm_(step, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm, [n for n, p in piper.named_parameters(step) if p.numel()]

    want = BareLoss()
    loss = jobs.accumulate(want, rows(8), 2)
    norm = float(nn.utils.clip_grad_norm_(want.parameters(), 1.0))
    ranks = jobs.run_ranks(job, 2)
    for got_loss, got_norm, _ in ranks:
        jobs.close([got_loss, got_norm], [loss, norm], "loss and norm")
    assert [names for *_, names in ranks] == [["w.0", "w.1"], []]


def test_clipping_uses_the_norm_over_all_ranks() -> None:
    """Clip .01: factor .14122735204 on every stage; |w.0|'s gradient is then .00397684561."""

    def job() -> tuple[float, dict[str, float]]:
        strategy = jobs.strategy(V2, 4)
        step = piper.compile(Stack4(4), strategy, example_inputs=rows(8))
        step(*rows(8)).backward()
        norm = float(piper.clip_grad_norm_(step, 0.01))
        return norm, {n: g.norm().item() for n, g in jobs.grads(step).items()}

    found: dict[str, float] = {}
    for norm, each in jobs.run_ranks(job, 2):
        assert norm == pytest.approx(Stack4.NORM, abs=1e-9)
        found |= each
    assert found["w.0"] == pytest.approx(0.00397684561, abs=1e-7)
    # torch adds 1e-6 to the norm before it divides, so the factor is exact to about 1e-5 only.
    factor = 0.14122735204
    wanted = [factor * norm for norm in Stack4.NORMS]
    assert [found[f"w.{k}"] for k in range(4)] == pytest.approx(wanted, rel=2e-5)


def test_norms_three_and_four_make_five() -> None:
    def job() -> tuple[float, dict[str, Tensor]]:
        batch = (torch.ones(2, dtype=F64),)
        step = piper.compile(Fixed(), jobs.strategy(LINE2, 2), example_inputs=batch)
        step(*batch).backward()
        return float(piper.clip_grad_norm_(step, 1.0)), jobs.grads(step)

    (one, first), (two, second) = jobs.run_ranks(job, 2)
    assert (one, two) == (pytest.approx(5, abs=1e-12), pytest.approx(5, abs=1e-12))
    assert first["a"].item() == pytest.approx(0.6, abs=1e-6)
    assert second["b"].item() == pytest.approx(0.8, abs=1e-6)


# Outputs.


@pytest.mark.parametrize("loss", ["nested.loss", ("nested", "loss")], ids=["path", "tuple"])
def test_loss_by_path_and_outputs_on_their_owners(loss: Any) -> None:
    """Other outputs: detached, in the model's structure, in row order, on their owners."""

    def job() -> dict[str, Any]:
        strategy = jobs.strategy(LINE2, 4, loss=loss)
        step = piper.compile(Outputs(two_losses=True), strategy, example_inputs=rows(8))
        out = step(*rows(8))
        out["nested"]["loss"].backward()
        return {"out": out, "grads": jobs.grads(step)}

    first, second = jobs.run_ranks(job, 2)
    want = Outputs(two_losses=True)
    expected = want(*rows(8))
    expected["nested"]["loss"].backward()
    jobs.check_grads([first["grads"], second["grads"]], want)
    for rank in (first, second):
        assert list(rank["out"]) == list(expected)
        assert rank["out"]["none"] is None
        jobs.close(rank["out"]["nested"]["loss"].detach(), expected["nested"]["loss"], "loss")
    jobs.close(first["out"]["hidden"], expected["hidden"], "hidden")
    jobs.close(second["out"]["logits"], expected["logits"], "logits")
    assert not first["out"]["hidden"].requires_grad
    assert not second["out"]["logits"].requires_grad
    # A 0-dim output is stacked over the microbatches.
    early = torch.stack([want(*piece)["early"] for piece in jobs.slices(rows(8), 4)])
    jobs.close(first["out"]["early"], early, "early")
    assert_absent(first["out"]["logits"])
    assert_absent(second["out"]["hidden"])


def assert_absent(value: Any) -> None:
    """Nothing is there, or something that says so when it is used: never silent numbers."""
    if value is not None:
        jobs.refusal(lambda: float(value.sum()))


def test_outputs_everywhere() -> None:
    def job() -> dict[str, Any]:
        strategy = jobs.strategy(LINE2, 4, loss="nested.loss")
        step = piper.compile(Outputs(), strategy, example_inputs=rows(8), outputs="everywhere")
        out = step(*rows(8))
        out["nested"]["loss"].backward()
        return {k: v.detach() if isinstance(v, Tensor) else v for k, v in out.items()}

    expected = Outputs()(*rows(8))
    for out in jobs.run_ranks(job, 2):
        for name in ("hidden", "logits"):
            jobs.close(out[name], expected[name], name)
        assert out["early"].shape == (4,)


def test_the_only_differentiable_scalar_is_the_loss() -> None:
    """A detached scalar beside it is no candidate."""

    def job() -> tuple[float, dict[str, Tensor]]:
        step = piper.compile(Outputs(), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        loss = step(*rows(8))["nested"]["loss"]
        loss.backward()
        return loss.item(), jobs.grads(step)

    want = Outputs()
    loss = want(*rows(8))["nested"]["loss"]
    loss.backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([got for _, got in ranks], want)
    jobs.close([value for value, _ in ranks], [loss.item()] * 2, "loss")


def test_without_a_loss_forward_and_backward_are_two_programs() -> None:
    """Nothing in the output is scalar: the gradient of what the user makes of it is handed in."""

    def job() -> tuple[Tensor, dict[str, Tensor]]:
        x, y = rows(8)
        step = piper.compile(Hidden(), jobs.strategy(ONE, 2, ""), example_inputs=(x,))
        out = step(x)
        nn.functional.mse_loss(out, y).backward()
        return out.detach(), jobs.grads(step)

    want = Hidden()
    x, y = rows(8)
    out = want(x)
    nn.functional.mse_loss(out, y).backward()
    ((got, held),) = jobs.run_ranks(job, 1)
    jobs.close(got, out.detach(), "output")
    jobs.check_grads([held], want)
