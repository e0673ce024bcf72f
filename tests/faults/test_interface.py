"""Section D: what crosses the borders of stages, and what calls are given."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, F2, about
from tests.jobs import LINE2, LOOP3ON2, V2
from tests.models import Masked, Rich, Stack4, TiedLM, fill, rows, weights, xin
from tests.pool import Pool
from tests.replicas import LINE, PAIR

F64 = torch.float64


# Structures.


@pytest.mark.parametrize("schedule", ["gpipe", *fx.slowly("")])
def test_structures_come_back_as_they_are(schedule: str) -> None:
    """R22, None, bool, int and nested outputs: the same structure, and no stale numbers."""
    mask = (xin([8, 4], 2) > 0).to(F64)
    calls: list[dict[str, Any]] = [{}, {"mask": mask, "n": 5, "flag": False}]

    def job() -> list[tuple[Any, dict[str, Tensor]]]:
        wanted = jobs.strategy(LOOP3ON2, 2, schedule, loss="loss")
        step = piper.compile(Rich(), wanted, example_inputs=(xin([8, 4], 0),), outputs="everywhere")
        found = []
        for named in calls:
            out = step(xin([8, 4], 0), **named)
            out["loss"].backward()
            found.append((out, replicas.grads(step)))
            for p in piper.parameters(step):
                p.grad = None
        return found

    ranks = jobs.run_ranks(job, 2)
    for number, named in enumerate(calls):
        model = Rich()
        want = model(xin([8, 4], 0), **named)
        want["loss"].backward()
        jobs.check_grads([rank[number][1] for rank in ranks], model)
        for rank in ranks:
            out = rank[number][0]
            assert list(out) == list(want)
            assert out["n"] == want["n"]
            assert isinstance(out["extra"], tuple)
            assert isinstance(out["extra"][1], list)
            assert out["extra"][1][1] is None
            jobs.close(out["h"], want["h"].detach(), "h")
            jobs.close(out["extra"][0], want["extra"][0].detach(), "extra[0]")
            jobs.close(out["extra"][1][0], want["extra"][1][0].detach(), "extra[1][0]")


def test_constants_are_not_sent() -> None:
    """R22, what crosses: three tensors of the batch and their gradients, no number and no None."""
    wanted = jobs.strategy(LOOP3ON2, 2, loss="loss")
    plan = piper.plan(Rich(), wanted, (xin([8, 4], 0), None, 3, True))
    sent = [i for p in plan.programs for i in p.instrs if i.op is Op.SEND]
    assert {i.spec.shape for i in sent if i.spec is not None and i.task[0] in "FB"} == {(4, 4)}


# Inputs of later stages.


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("real", ["needed", *fx.slowly("all")])
def test_late_inputs_are_taken_where_they_are_used(named: bool, real: str) -> None:
    """R24, inputs of the last stage: as keywords or positions, real data only where needed."""
    ids, labels = TiedLM.batch()
    positions = torch.arange(3).expand(4, 3).contiguous()
    batch = {"ids": ids, "labels": labels, "positions": positions}
    first = {"ids"}

    def job() -> tuple[float, dict[str, Tensor]]:
        mine = {
            name: value
            if real == "all" or (name in first) == (piper.rank() == 0)
            else jobs.poison(value)
            for name, value in batch.items()
        }
        example: Any = mine if named else tuple(mine.values())
        step = piper.compile(TiedLM(), jobs.strategy(LINE2, 2), example_inputs=example)
        loss = step(**mine) if named else step(*mine.values())
        loss.backward()
        return loss.item(), replicas.grads(step)

    model = TiedLM()
    want = model(**batch)
    want.backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([grads for _, grads in ranks], model)
    assert [loss for loss, _ in ranks] == [about(want.item(), 1e-12)] * 2


def test_late_inputs_are_not_relayed() -> None:
    """R24, without positions: F2's numbers, and only activations and their gradients are sent."""
    wanted = jobs.strategy(LINE2, 2)
    ranks = fx.run(TiedLM, wanted, TiedLM.batch())
    assert [found.loss for found in ranks] == [about(F2.LOSS)] * 2
    plan = piper.plan(TiedLM(), wanted, TiedLM.batch())
    sent = [i for i in plan.programs[0].instrs if i.op is Op.SEND and i.task.startswith("F")]
    assert len(sent) == 2
    assert all(i.spec is not None and i.spec.dtype == F64 for i in sent)


def test_control_labels_of_another_microbatch() -> None:
    """R24, signature: labels are off by one microbatch, and every rank's loss is another."""
    with fx.shifted(EIGHT[1]):
        ranks = fx.run(lambda: Stack4(2), jobs.strategy(LINE2, 4), EIGHT)
    assert [found.loss for found in ranks] == [about(F1.SHIFTED_LABELS)] * 2


# Metadata that is no batch.


def test_each_argument_is_split_or_kept_as_it_is_told() -> None:
    """R28, metadata along dim 0: a mask is split, a table of four rows kept; scalars are kept."""
    wanted = jobs.strategy(LINE2, 2, inputs={"table": "replicate"})
    ranks = fx.run(Masked, wanted, Masked.batch())
    model, losses = fx.eager(Masked, Masked.batch())
    jobs.check_grads([found.grads for found in ranks], model)
    assert [found.loss for found in ranks] == [about(losses[0], 1e-12)] * 2


def test_offsets_are_refused_unless_something_is_said_of_them() -> None:
    """R28, offsets of five entries beside four rows: nothing is guessed, the argument is named."""
    offsets = torch.tensor([0, 3, 6, 9, 12])
    wanted = jobs.strategy(LINE2, 2, inputs={"table": "replicate"})
    text = jobs.refusal(lambda: piper.plan(Masked(), wanted, (*Masked.batch(), offsets)))
    jobs.mentions(text, "offsets", "5", "4", "replicate")


class AnyRows(Masked):
    """Takes a table of fewer rows, too, which are used again."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        table: Tensor,
        scale: Tensor,
        factor: float = 1.0,
        offsets: Tensor | None = None,
    ) -> Tensor:
        with piper.annotate("PP", 1):
            table = table[torch.arange(4) % table.shape[0]]
        return super().forward(x, mask, table, scale, factor, offsets)


def test_control_a_table_that_is_split_is_another_result() -> None:
    """R28, signature: nobody says that the table is kept, and its rows go with the microbatches."""
    x, mask, table, scale, factor = batch = Masked.batch()
    want = Masked()(*batch).item()
    split = [
        Masked()(x[k : k + 2], mask[k : k + 2], table[[k, k + 1, k, k + 1]], scale, factor).item()
        for k in (0, 2)
    ]
    assert sum(split) / 2 != pytest.approx(want, abs=1e-3)
    kept = jobs.strategy(LINE2, 2, inputs={"table": "replicate"})
    for found in fx.run(AnyRows, kept, batch):
        assert found.loss == about(want, 1e-12)
    for found in fx.run(AnyRows, jobs.strategy(LINE2, 2), batch):
        assert found.loss == about(sum(split) / 2, 1e-12)


# Complex tensors.


class Rotary(nn.Module):
    """q seen as complex numbers and turned by a table of phases, of every stage or of the first."""

    table: Tensor

    def __init__(self, crosses: bool, stages: int = 2) -> None:
        super().__init__()
        self.w, self.crosses, self.stages = weights(2), crosses, stages
        angles = torch.arange(6, dtype=torch.float32).reshape(3, 2)
        self.register_buffer("table", torch.polar(torch.ones(3, 2), angles), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x and y [n, 3, 4]."""
        with piper.annotate("PP", 0):
            q = self.turn((x @ self.w[0].T).float(), self.table)
            phases = self.table * (1 + 0 * x[0, 0, 0].float())  # made of data, so it must be sent
        with piper.annotate("PP", 1):
            q = self.turn((q.to(F64) @ self.w[1].T).float(), phases if self.crosses else self.table)
            return (q - y).square().mean()

    @staticmethod
    def turn(q: Tensor, phases: Tensor) -> Tensor:
        turned = torch.view_as_complex(q.unflatten(-1, (2, 2))) * phases
        return torch.view_as_real(turned).flatten(-2)


@pytest.mark.filterwarnings("ignore:.*complex.*")
@pytest.mark.parametrize("crosses", [True, *fx.slowly(False)])
@pytest.mark.parametrize("copied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_complex_tables_equal_one_process(crosses: bool, copied: bool) -> None:
    """R29, complex tensors: as a buffer of every stage, and across a border; two replicas."""
    batch = xin([8, 3, 4], 0), xin([8, 3, 4], 1)
    wanted = replicas.strategy(LINE, 2) if copied else jobs.strategy(LINE2, 2)
    ranks = fx.run(lambda: Rotary(crosses), wanted, batch)
    model, losses = fx.eager(lambda: Rotary(crosses), batch)
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        for name, grad in found.grads.items():
            want = dict(model.named_parameters())[name].grad
            torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)
    if not crosses:  # a buffer that never changes is not sent or reduced
        plan = piper.plan(Rotary(False), wanted, batch)
        specs = [s for p in plan.programs for i in p.instrs for s in (i.spec, *i.specs)]
        assert not any(s is not None and s.dtype.is_complex for s in specs)


def turned() -> tuple[float, dict[str, Tensor]]:
    """A step of two stages whose table crosses, on this process."""
    batch = xin([8, 3, 4], 0), xin([8, 3, 4], 1)
    step = piper.compile(Rotary(True), jobs.strategy(LINE2, 2), example_inputs=batch)
    loss = step(*batch)
    loss.backward()
    return loss.item(), replicas.grads(step)


@pytest.mark.dist(2)
@pytest.mark.filterwarnings("ignore:.*complex.*")
def test_complex_tables_cross_between_processes(pool: Pool) -> None:
    """R29, over gloo: what is sent is complex, and the numbers are those of one process."""
    batch = xin([8, 3, 4], 0), xin([8, 3, 4], 1)
    model, losses = fx.eager(lambda: Rotary(True), batch)
    for loss, grads in pool.values(turned):
        assert loss == pytest.approx(losses[0], abs=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


# More inputs of the kind.


class Pairs(nn.Module):
    """Tuples in tuples of several dtypes between the stages, and an argument in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, batch: dict[str, Any], *, twice: bool = False) -> tuple[Any, ...]:
        x, extra = batch["x"], batch["more"][0]
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
            kept = (h.to(torch.bfloat16), (h > 0, extra + 1))
        with piper.annotate("PP", 1):
            half, (positive, number) = kept
            h = torch.tanh(h @ self.w[1].T) * positive + half.to(F64) * (2 if twice else 1)
            return (h * number.to(F64).unsqueeze(1)).square().mean(), {"positive": positive}


@pytest.mark.parametrize("twice", [True, *fx.slowly(False)])
def test_nested_inputs_and_small_dtypes_cross(twice: bool) -> None:
    """Structures of another model: bfloat16, bool and int64 at one border, inputs in a dict."""
    batch = {"x": xin([8, 4], 0), "more": [torch.arange(8)]}

    def job() -> tuple[float, dict[str, Tensor], Any]:
        wanted = jobs.strategy(LINE2, 4, "one_f_one_b", loss=0)
        step = piper.compile(Pairs(), wanted, example_inputs={"batch": batch}, outputs="everywhere")
        loss, out = step(batch, twice=twice)
        loss.backward()
        return loss.item(), replicas.grads(step), out["positive"]

    model = Pairs()
    loss, out = model(batch, twice=twice)
    loss.backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([grads for _, grads, _ in ranks], model)
    for value, _, positive in ranks:
        assert value == about(loss.item(), 1e-12)
        assert torch.equal(positive, out["positive"])


def test_what_is_kept_whole_is_whole_on_every_replica() -> None:
    """Metadata on another layout: replicas split what is split, and keep what is kept."""
    x, y = rows(8)
    shift = fill([8], 1).detach()

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weights(1)

        def forward(self, x: Tensor, y: Tensor, shift: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                return ((x @ self.w[0].T - y) * shift[:4]).square().mean()

    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2, inputs={"shift": "replicate"}),
        *jobs.places(PAIR),
        piper.Replicate({"PP": "*"}),
    )

    def job() -> tuple[float, dict[str, Tensor]]:
        given = (*fx.part((x, y), wanted), shift)
        step = piper.compile(Shifted(), wanted, example_inputs=given)
        loss = step(*given)
        loss.backward()
        return loss.item(), replicas.grads(step)

    model = Shifted()
    want = model(x, y, shift)
    want.backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([grads for _, grads in ranks], model)
    assert [loss for loss, _ in ranks] == [about(want.item(), 1e-12)] * 2


class ComplexWeights(nn.Module):
    """A complex parameter in the first stage; what crosses is complex."""

    def __init__(self, dtype: torch.dtype, stages: int = 2) -> None:
        super().__init__()
        self.p = nn.Parameter(
            torch.polar(fill([4], 1).detach() + 1, fill([4], 2).detach()).to(dtype)
        )
        self.w = nn.Parameter(fill([4, 4], 3).to(dtype.to_real()))
        self.stages = stages

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = x * self.p
        for k in range(1, self.stages):
            with piper.annotate("PP", k):
                h = h * torch.exp(1j * h.real) if k < self.stages - 1 else h
        with piper.annotate("PP", self.stages - 1):
            return (h.abs() @ self.w + h.imag - y).square().mean()


@pytest.mark.filterwarnings("ignore:.*omplex.*")
@pytest.mark.parametrize("zero", replicas.levels(0))
def test_complex_parameters_are_reduced(zero: int) -> None:
    """Complex tensors of another kind: a parameter in complex128, and its gradient."""
    build = lambda: ComplexWeights(torch.complex128)  # noqa: E731
    ranks = fx.run(build, replicas.strategy(LINE, 2, zero=zero), rows(8))
    model, losses = fx.eager(build, rows(8))
    want = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in ranks:
        assert found.loss == about(losses[0], 1e-12)
        assert found.norm == about(want.item(), 1e-12)


@pytest.mark.filterwarnings("ignore:.*omplex.*")
@pytest.mark.parametrize("schedule", ["zbv", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_complex_activations_cross_a_v(schedule: str) -> None:
    """Complex tensors in another layout, in complex64: activations and their gradients."""
    build = lambda: ComplexWeights(torch.complex64, 4)  # noqa: E731
    batch = tuple(value.float() for value in rows(8))
    ranks = fx.run(build, jobs.strategy(V2, 4, schedule), batch)
    model, losses = fx.eager(build, batch)
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-5)
        for name, grad in found.grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
