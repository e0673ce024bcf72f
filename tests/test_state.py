"""What a rank does not hold is safe to touch, free and named; what it holds is the user's own."""

import copy
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs
from tests.jobs import LINE2
from tests.models import Odd, Stack4, TiedLM, rows

# On rank 1 of a line of two, w.0 and w.1 are absent; rank 0 holds them.
TOUCHES: dict[str, Callable[[nn.Module], Any]] = {
    "print": lambda model: print(model.w[0]),
    "repr": lambda model: repr(model.w[0]),
    "str": lambda model: str(model.w[0]),
    "add": lambda model: model.w[0] + 1,
    "radd": lambda model: 1 + model.w[0],
    "matmul": lambda model: torch.ones(4, 4, dtype=torch.float64) @ model.w[0],
    "function": lambda model: torch.sum(model.w[0]),
    "in place": lambda model: model.w[0].data.mul_(2),
    "detached": lambda model: model.w[0].detach() + 1,
    "index": lambda model: model.w[0][0],
    "item": lambda model: model.w[0][0, 0].item(),
    "tolist": lambda model: model.w[0].tolist(),
    "numpy": lambda model: model.w[0].detach().numpy(),
    "copy into": lambda model: torch.zeros(4, 4, dtype=torch.float64).copy_(model.w[0]),
    "clone": lambda model: model.w[0].clone(),
    "deepcopy": lambda model: copy.deepcopy(model.w[0]),
    "deepcopy of the model": copy.deepcopy,
    "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "eager forward": lambda model: model(*rows(8)),
}


def test_touching_an_absent_parameter_names_it_its_holder_and_the_way_out() -> None:
    def job() -> dict[str, str]:
        model = Stack4(2)
        piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=rows(8))
        if piper.rank() == 0:
            return {}
        return jobs.touched(TOUCHES, model)

    _, found = jobs.run_ranks(job, 2)
    wrong = {
        name: text
        for name, text in found.items()
        if not all(word in text for word in ("w.0", "rank 0", "piper.parameters"))
    }
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    assert set(found) == set(TOUCHES)


def test_metadata_of_an_absent_parameter() -> None:
    def job() -> None:
        model = Stack4(2)
        piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=rows(8))
        absent = model.w[2 if piper.rank() == 0 else 0]
        assert [n for n, _ in model.named_parameters()] == [f"w.{k}" for k in range(4)]
        assert isinstance(absent, nn.Parameter)
        assert absent.shape == (4, 4)
        assert absent.size(0) == 4
        assert absent.dim() == 2
        assert absent.numel() == 16
        assert absent.dtype == torch.float64
        assert absent.device.type == "cpu"
        assert absent.requires_grad
        assert absent.grad is None

    jobs.run_ranks(job, 2)


class Wide(nn.Module):
    """Two stages of 64 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.full((4096, 4096), 1e-3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0])
        with piper.annotate("PP", 1):
            return (h @ self.w[1]).square().mean()


def resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_an_absent_parameter_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks hold 128 MiB together, not the 256 MiB of two whole models."""
    # Executing the graph after every pass, as the other tests do, is memory of its own.
    monkeypatch.setenv("PIPER_VERIFY", "1")
    jobs.run_ranks(
        lambda: piper.compile(TiedLM(), jobs.strategy(LINE2, 2), example_inputs=TiedLM.batch()), 2
    )  # what the first compilation loads is not measured
    models = [Wide(), Wide()]
    before = resident_mib()

    def job() -> Any:
        batch = (torch.ones(2, 4096),)
        model = models[piper.rank()]
        return piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=batch)

    steps = jobs.run_ranks(job, 2)
    assert resident_mib() - before < -100
    assert len(steps) == 2


def test_two_models_of_one_class_share_a_strategy_but_not_state() -> None:
    """Both are trained in turn, with values of their own; each equals its eager run."""

    def build(factor: float) -> Stack4:
        model = Stack4(2)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)
        return model

    factors = (1.0, 0.5)

    def job() -> list[jobs.Trace]:
        strategy = jobs.strategy(LINE2, 2)
        steps = [piper.compile(build(f), strategy, example_inputs=rows(8)) for f in factors]
        optimizers = [torch.optim.SGD(piper.parameters(s), lr=1.0) for s in steps]
        traces = [jobs.Trace() for _ in factors]
        for _ in range(2):
            losses = [step(*rows(8)) for step in steps]  # both outstanding at once
            for loss, step, optimizer, trace in zip(losses, steps, optimizers, traces, strict=True):
                loss.backward()
                trace.losses.append(loss.item())
                trace.norms.append(float(piper.clip_grad_norm_(step, 1e9)))
                optimizer.step()
                optimizer.zero_grad()
        for step, trace in zip(steps, traces, strict=True):
            trace.params.update(jobs.held(step))
        return traces

    ranks = jobs.run_ranks(job, 2)
    for i, factor in enumerate(factors):
        want, model = jobs.Trace(), build(factor)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            loss = model(*rows(8))
            loss.backward()
            want.losses.append(loss.item())
            want.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
            optimizer.step()
            optimizer.zero_grad()
        want.params.update({n: p.detach() for n, p in model.named_parameters()})
        jobs.compare([rank[i] for rank in ranks], want)


@pytest.mark.timeout(30)
def test_two_jobs_of_one_process_do_not_meet() -> None:
    """The same class and an equal strategy, launched again: new ranks, new state, same numbers."""

    def job() -> float:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        loss = step(*rows(8))
        loss.backward()
        torch.optim.SGD(piper.parameters(step), lr=1.0).step()
        return loss.item()

    torch._dynamo.reset()
    for _ in range(2):
        for loss in piper.launch(job, 2, engine="inprocess"):  # no reset in between
            assert loss == pytest.approx(Stack4.LOSS, abs=1e-12)


def test_parameters_changed_in_place_between_steps_are_seen() -> None:
    def change(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.mul_(0.5).add_(0.01 * len(name))

    def job() -> list[float]:
        model = Stack4(2)
        step = piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=rows(8))
        losses = [step(*rows(8)).item()]
        for name, p in piper.named_parameters(step):
            change(model, name, p)
        losses.append(step(*rows(8)).item())
        for _, p in piper.named_parameters(step):
            p.data.mul_(2)
        losses.append(step(*rows(8)).item())
        return losses

    want = Stack4(2)
    losses = [want(*rows(8)).item()]
    for name, p in want.named_parameters():
        change(want, name, p)
    losses.append(want(*rows(8)).item())
    for p in want.parameters():
        p.data.mul_(2)
    losses.append(want(*rows(8)).item())
    for got in jobs.run_ranks(job, 2):
        jobs.close(got, losses, "losses")


def test_held_parameters_are_the_models_own_objects() -> None:
    """Initialisation of a CPU model is kept, names are the user's, a tied one is one object."""

    def job() -> list[str]:
        model = TiedLM()
        before = dict(model.named_parameters())
        step = piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=TiedLM.batch())
        held = dict(piper.named_parameters(step))
        for name, p in held.items():
            assert p is before[name]
            assert torch.equal(p, dict(TiedLM().named_parameters())[name])
        assert list(piper.parameters(step)) == list(held.values())
        return list(held)

    assert jobs.run_ranks(job, 2) == [["e", "a"], ["e"]]


def test_every_parameter_is_on_some_rank_whether_it_is_used_or_not() -> None:
    def job() -> tuple[list[str], dict[str, bool], list[str]]:
        model = Odd()
        step = piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=TiedLM.batch())
        step(*TiedLM.batch()).backward()
        held = {n: p for n, p in piper.named_parameters(step) if p.numel()}
        return (
            [n for n, p in held.items() if p.grad is not None],
            {n: p.requires_grad for n, p in held.items()},
            [n for n, _ in model.named_parameters()],
        )

    want = {n: p.requires_grad for n, p in Odd().named_parameters()}
    ranks = jobs.run_ranks(job, 2)
    flags = {name: flag for _, held, _ in ranks for name, flag in held.items()}
    assert flags == want
    assert {name for graded, *_ in ranks for name in graded} == {"e", "a"}
    for *_, names in ranks:
        assert names == list(want)


def test_preparing_changes_no_value() -> None:
    """Neither parameters nor buffers, gradients nor the random state."""

    def job() -> None:
        model = Stack4(2)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        step = piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=rows(8))
        assert torch.equal(torch.get_rng_state(), before)
        for name, p in piper.named_parameters(step):
            assert p.grad is None
            assert torch.equal(p, dict(Stack4(2).named_parameters())[name])

    jobs.run_ranks(job, 2)


def test_planning_changes_no_model() -> None:
    """A plan needs no weights, and leaves the model it is given whole."""
    model = Stack4(2)
    plan = piper.plan(model, jobs.strategy(LINE2, 2), rows(8))
    assert plan.world_size == 2
    assert model(*rows(8)).item() == pytest.approx(Stack4.LOSS, abs=1e-12)
    copy.deepcopy(model)
    with torch.device("meta"):
        bare = Stack4(2)
    of_meta = piper.plan(bare, jobs.strategy(LINE2, 2), tuple(t.to("meta") for t in rows(8)))
    assert of_meta.fingerprint() == plan.fingerprint()
    assert all(p.is_meta for p in bare.parameters())


class MetaTrap(nn.Module):
    """What torch cannot do on the meta device: cross entropy's derivative, a mix of devices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.table(ids) + torch.arange(4)
            self.seen.add_(h.detach().sum(0))
        with piper.annotate("PP", 1):
            return nn.functional.cross_entropy(self.head(h), labels)


def test_a_meta_model_is_planned_as_on_the_cpu() -> None:
    batch = (torch.arange(8) % 6, torch.arange(8) % 5)
    want = piper.plan(MetaTrap(), jobs.strategy(LINE2, 2), batch)
    with torch.device("meta"):
        bare = MetaTrap()
    for given in (batch, tuple(value.to("meta") for value in batch)):
        found = piper.plan(bare, jobs.strategy(LINE2, 2), given)
        assert found.fingerprint() == want.fingerprint()
        assert found.summary() == want.summary()
    assert bare.head.weight is bare.table.weight
    assert bare.seen.is_meta


def test_functions_on_a_step_say_what_they_need() -> None:
    for call in (piper.parameters, piper.explain, piper.data_rank):
        text = jobs.refusal(lambda call=call: call(torch.compile(Stack4(2), backend="piper")))
        jobs.mentions(text, "prepare")
        jobs.refusal(lambda call=call: call(object()))
