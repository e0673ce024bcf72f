"""Section O: buffers that forward changes: once per microbatch, in order, and no more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.passes.split import Split
from piper_dynamo.state import StepState
from piper_dynamo.step import CompiledStep
from tests import jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, about
from tests.jobs import LINE2, LOOP2, V2
from tests.models import NormNet, NormOfOne, rows, weights
from tests.replicas import LINE

F64 = torch.float64


class Counting(nn.Module):
    """A buffer that counts forwards and is a factor of the second stage's input."""

    c: Tensor

    def __init__(self, how: str = "+=", stages: int = 2) -> None:
        super().__init__()
        self.w, self.how, self.stages = weights(stages), how, stages
        self.register_buffer("c", torch.zeros((), dtype=F64))

    def count(self) -> None:
        match self.how:
            case "+=":
                self.c += 1
            case "add_":
                self.c.add_(1)
            case "new":
                self.c = self.c + 1
            case "copy_":
                self.c.copy_(self.c + 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
        for k in range(1, self.stages):
            with piper.annotate("PP", k):
                if k == 1:
                    self.count()
                    h = h * self.c
                h = h @ self.w[k].T
        with piper.annotate("PP", self.stages - 1):
            return F.mse_loss(h, y)


# Every schedule in which microbatches go one way.
ONE_WAY = {"one_f_one_b": LINE2, "gpipe": LINE2, "zb_h1": LINE2}
ONE_WAY |= {"interleaved_1f1b": LOOP2, "zbv": V2, "dualpipev": V2}
EVERY_SCHEDULE = pytest.mark.parametrize(
    "schedule", ["one_f_one_b", *fx.slowly(*list(ONE_WAY)[1:])]
)


def counted(how: str, wanted: piper.Strategy) -> list[tuple[list[float], list[float], bool]]:
    """The counts before and after each of two steps, their losses, and whether it is one tensor."""
    stages = len(jobs.uses(wanted))

    def job() -> tuple[list[float], list[float], bool]:
        model = Counting(how, stages)
        given = fx.part(EIGHT, wanted)
        buffer = model.c
        step = piper.compile(model, wanted, example_inputs=given)
        counts, losses = [float(model.c)], []
        for _ in range(2):
            loss = step(*given)
            loss.backward()
            losses.append(loss.item())
            counts.append(float(model.c))
        return counts, losses, model.c is buffer

    return jobs.run_ranks(job, fx.world(wanted))


@pytest.mark.parametrize("how", ["+=", "new", *fx.slowly("add_", "copy_")])
@EVERY_SCHEDULE
def test_a_counter_counts_microbatches_in_order(how: str, schedule: str) -> None:
    """R63, updates of buffers: 4 after a step and 8 after two, however forward writes them."""
    placement = ONE_WAY[schedule]
    model = Counting("add_", len(placement))
    want = [jobs.accumulate(model, EIGHT, 4) for _ in range(2)]  # factors 1 to 4, then 5 to 8
    ranks = counted(how, jobs.strategy(placement, 4, schedule))
    assert ranks[1][0] == [0.0, 4.0, 8.0]
    assert all(same for *_, same in ranks)
    for _, losses, _ in ranks:
        assert losses == about(want, 1e-12)


def test_replicas_count_their_own_microbatches() -> None:
    """R63, replicas: each counts what it is given, and nothing is synchronised."""
    ranks = counted("add_", replicas.strategy(LINE, 4, "one_f_one_b"))
    assert [counts for counts, *_ in ranks[2:]] == [[0.0, 4.0, 8.0]] * 2


def run_twice(self: StepState, value: Tensor, *rest: Any, **named: Any) -> None:
    """A dry run leaves its count in the buffer that a step starts from."""
    if not value:
        value.add_(1)
    ADOPT(self, value, *rest, **named)


def not_handed_on(self: Split, dag: Any) -> None:
    """Every microbatch starts from what the buffer was before the step."""
    HAND_ON(self, dag)
    given = {n.meta.get("arg"): n for n in dag.graph.find_nodes(op="placeholder")}
    for node in list(dag.graph.nodes):
        position = node.meta.get("buffer")
        for user in list(node.users) if position is not None else ():
            if user.op != "output":
                user.replace_input_with(node, given[position])


ADOPT, HAND_ON = StepState.adopt_buffer, Split.__call__
BROKEN: dict[int, tuple[Any, str, Any]] = {
    5: (StepState, "adopt_buffer", run_twice),
    1: (Split, "__call__", not_handed_on),
    0: (CompiledStep, "_is_good", lambda *_: False),  # what a step makes of buffers is dropped
}


@pytest.mark.parametrize("count", BROKEN)
def test_control_a_dry_run_an_update_that_is_dropped_and_all_that_are(count: int) -> None:
    """R63, signatures: after a step of four microbatches the buffer is 5, 1 or 0."""
    with fx.patched(BROKEN[count]):
        ranks = counted("add_", jobs.strategy(LINE2, 4))
    (_, after, _), losses, _ = ranks[1]
    assert after == count
    model = Counting("add_")
    want = jobs.accumulate(model, EIGHT, 4)
    assert (abs(losses[0] - want) < 1e-12) == (count == 0)  # the first step saw what it made


class Normed(NormOfOne):
    """The norm is in the first stage, the loss in the last."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.norm(x)
        for k in range(1, self.stages):
            with piper.annotate("PP", k):
                h = h * self.w if k == 1 else h.sin()
        with piper.annotate("PP", self.stages - 1):
            return h.square().mean()


@EVERY_SCHEDULE
def test_running_statistics_are_those_of_microbatches(schedule: str) -> None:
    """R64, BatchNorm: .59, 1.19 and 2, for every schedule; of a whole batch .3, 1.5667, 1."""
    placement = ONE_WAY[schedule]
    microbatches, batch = 2, NormOfOne.batch()
    want = {"norm.running_mean": 0.59, "norm.running_var": 1.19, "norm.num_batches_tracked": 2.0}
    if schedule == "dualpipev":  # which takes four at least, so the same ones come twice
        microbatches, batch = 4, tuple(value.repeat(2, 1) for value in batch)
        model = Normed(1)
        jobs.accumulate(model, batch, microbatches)
        want = {n: float(b) for n, b in model.named_buffers()}
        assert want["norm.num_batches_tracked"] == 4

    def job() -> dict[str, float]:
        model = Normed(len(placement))
        wanted = jobs.strategy(placement, microbatches, schedule)
        step = piper.compile(model, wanted, example_inputs=batch)
        step(*batch).backward()
        return {n: float(b) for n, b in model.named_buffers()}

    assert jobs.run_ranks(job, 2)[0] == {n: about(value, 1e-12) for n, value in want.items()}


@pytest.mark.parametrize("build", [Counting, lambda: Normed(2)], ids=["R63", "R64"])
def test_two_directions_that_would_share_a_buffer_are_refused(
    build: Callable[[], nn.Module],
) -> None:
    """R63 and R64 in the one schedule whose microbatches have no order: refused by the buffer."""
    is_count = build is Counting
    batch = EIGHT if is_count else tuple(v.repeat(2, 1) for v in NormOfOne.batch())
    wanted = jobs.strategy(LINE2, 4, "dualpipe")
    text = jobs.refusal(lambda: piper.plan(build(), wanted, batch), piper.PiperPlanError)
    name = "'c'" if is_count else "'norm.running_"
    jobs.mentions(text, "deadlock", f"the new value of buffer {name}", "eval mode")


def test_control_statistics_of_the_whole_batch() -> None:
    """R64, signature: one microbatch of all rows."""

    def job() -> list[float]:
        model, batch = NormOfOne(), NormOfOne.batch()
        step = piper.compile(model, jobs.strategy(LINE2, 1), example_inputs=batch)
        step(*batch).backward()
        return [float(b) for b in model.buffers()]

    assert jobs.run_ranks(job, 2)[0] == [about(0.3), about(1.5667, 1e-4), 1.0]


def test_replicas_have_statistics_of_their_own_rows() -> None:
    """R64, replicas: local, as docs/zero.md says; of 0 and 2, or 4 and 6."""

    def job() -> float:
        wanted = replicas.strategy(LINE, 1, "one_f_one_b")
        mine = fx.part(NormOfOne.batch(), wanted)
        model = NormOfOne()
        piper.compile(model, wanted, example_inputs=mine)(*mine).backward()
        return float(model.norm.running_mean)

    assert jobs.run_ranks(job, 4)[:2] == [about(0.1), about(0.5)]


# More inputs of the kind.


class Averaging(nn.Module):
    """A moving average of activations and a count, in a nested module, kept by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)
        self.inner = nn.Module()
        self.inner.register_buffer("mean", torch.zeros(4, dtype=torch.float32))
        self.inner.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
            self.inner.mean = 0.9 * self.inner.mean + 0.1 * h.detach().mean(0).float()
            self.inner.seen += h.shape[0]
        with piper.annotate("PP", 1):
            return F.mse_loss(h @ self.w[1].T, y)


@pytest.mark.parametrize(
    ("placement", "schedule"),
    [(LINE2, "zb_h1"), pytest.param(LINE2, "gpipe", marks=pytest.mark.slow)],
)
def test_a_moving_average_by_assignment(placement: jobs.Placement, schedule: str) -> None:
    """Another model and dtype: float32 averages and whole numbers, in a submodule."""
    want = Averaging()
    for _ in range(2):
        jobs.accumulate(want, EIGHT, 4)

    def job() -> dict[str, Tensor]:
        model = Averaging()
        step = piper.compile(model, jobs.strategy(placement, 4, schedule), example_inputs=EIGHT)
        for _ in range(2):
            step(*EIGHT).backward()
        return {n: b.clone() for n, b in model.named_buffers()}

    found = jobs.run_ranks(job, 2)[0]
    for name, value in want.named_buffers():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("build", [Averaging, *fx.slowly(NormNet)])
def test_buffers_of_replicas_of_one_stage(build: Callable[[], nn.Module]) -> None:
    """Another layout: two replicas with the same rows have what one process has of these."""
    want = build()
    jobs.accumulate(want, rows(4), 2)
    wanted = replicas.strategy({0: [0, 1], 1: [0, 1]}, 2, "")

    def job() -> dict[str, Tensor]:
        model = build()
        step = piper.compile(model, wanted, example_inputs=rows(4))
        step(*rows(4)).backward()
        return {n: b.clone() for n, b in model.named_buffers()}

    for found in jobs.run_ranks(job, 2):
        for name, value in want.named_buffers():
            torch.testing.assert_close(found[name], value)
