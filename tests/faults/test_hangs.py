"""Section B: nothing waits for ever, and what waits says for what.

Ranks that are threads take turns, so that a wait that cannot end fails at once; what only processes
have (signals, sockets, deadlines) is tried with processes.
"""

import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.access import state_of
from piper_dynamo.ir.program import Op
from tests import experts, jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, F1, LAYOUTS, Layout, about
from tests.jobs import LINE2, LOOP2, V2, by_hand
from tests.models import Stack4, fill, rows, tok, weights, xin
from tests.pool import Pool
from tests.replicas import LINE

# Both peers send first.

LONG = (
    "F0.0 F0.1 F2.0 F0.2 F2.1 F0.3 F2.2 B2.0 F2.3 B0.0 B2.1 B0.1 B2.2 B0.2 B2.3 B0.3",
    "F1.0 F1.1 F3.0 F1.2 F3.1 B3.0 F1.3 F3.2 B3.1 B1.0 F3.3 B3.2 B1.1 B3.3 B1.2 B1.3",
)
BOTH_WAYS = {
    "v": (
        V2,
        "F0.0 F0.1 F3.0 B3.0 F0.2 F3.1 B3.1 B0.0 F0.3 F3.2 B3.2 B0.1 F3.3 B3.3 B0.2 B0.3",
        "F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 F1.2 F2.2 B2.1 B1.1 F1.3 F2.3 B2.2 B1.2 B2.3 B1.3",
    ),
    "loop": (LOOP2, *LONG),
}


def two_stages_per_rank(shape: str) -> piper.Strategy:
    """1F1B by hand of four stages on two ranks, four microbatches."""
    placement, *texts = BOTH_WAYS[shape]
    return piper.Strategy(
        piper.Split({}, num_microbatches=4), *jobs.places(placement), *by_hand(*texts)
    )


@pytest.mark.parametrize("shape", BOTH_WAYS)
def test_neighbours_that_send_to_each_other_finish(shape: str) -> None:
    """R08, both peers send first: messages both ways at once, proved free of deadlock."""
    wanted = two_stages_per_rank(shape)
    fx.is_f1(fx.run(lambda: Stack4(4), wanted, EIGHT))
    plan = piper.plan(Stack4(4), wanted, EIGHT)
    plan.verify()
    ways = {(p.rank, i.peer) for p in plan.programs for i in p.instrs if i.op is Op.SEND}
    assert ways == {(0, 1), (1, 0)}


def sent_both_ways(shape: str, megabytes: int) -> tuple[float, float]:
    """Loss and norm with activations of so much; 0 for those of F1."""
    width = max(megabytes * 2**20 // 8 // 4 // 2, 1)  # two rows of four float64
    model = Wide(width) if megabytes else Stack4(4)
    step = piper.compile(model, two_stages_per_rank(shape), example_inputs=EIGHT, timeout_s=60.0)
    loss = step(*EIGHT)
    loss.backward()
    return loss.item(), float(piper.clip_grad_norm_(step, math.inf))


class Wide(nn.Module):
    """F1 whose borders carry every value `width` times; the copies come to nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w, self.width = weights(4), width

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        wide = x.repeat(1, self.width)
        for k in range(4):
            with piper.annotate("PP", k):
                h = torch.tanh(wide[:, :4] @ self.w[k].T)
                wide = h.repeat(1, self.width) if k < 3 else h
        with piper.annotate("PP", 3):
            return F.mse_loss(wide, y)


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("shape", "megabytes"),
    [("v", 0), pytest.param("v", 32, marks=pytest.mark.slow)]
    + [pytest.param("loop", size, marks=pytest.mark.slow) for size in (0, 32)],
)
def test_processes_that_send_to_each_other_finish(pool: Pool, shape: str, megabytes: int) -> None:
    """R08, on gloo, where sends that block both ways deadlock: of 64 bytes, and of 32 MB."""
    for loss, norm in pool.values(sent_both_ways, shape, megabytes):
        assert loss == about(F1.LOSS)
        assert norm == about(F1.NORM)


# Receives that are posted early.


def looped(*texts: str) -> piper.Strategy:
    return piper.Strategy(
        piper.Split({}, num_microbatches=4), *jobs.places(LOOP2), *by_hand(*texts)
    )


def test_a_receive_that_is_posted_early_blocks_no_send() -> None:
    """R09, early-posted receives: a rank's next receive comes before the sends it waits for."""
    fx.is_f1(fx.run(lambda: Stack4(4), looped(*LONG), EIGHT))


def test_orders_that_wait_for_each_other_are_refused_with_the_cycle() -> None:
    """R09, an order that cannot run: refused when compiled, naming who waits for whom."""
    crossed = LONG[1].replace("F1.1 F3.0 F1.2 F3.1", "F3.1 F1.1 F3.0 F1.2")
    text = jobs.refusal(
        lambda: piper.plan(Stack4(4), looped(LONG[0], crossed), EIGHT), piper.PiperPlanError
    )
    jobs.mentions(text, "rank 1", "F.PP3.MB1", "F.PP1.MB1", "waits for", "models.py")


# How many gradients cross.


class Mixed(nn.Module):
    """The first stage gives a value with a gradient, a mask and a table without one."""

    def __init__(self, two: bool) -> None:
        super().__init__()
        self.w, self.two = weights(3), two

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
            other = torch.tanh(x @ self.w[2].T)
            mask = (x > 0).to(torch.int32)
            table = x.detach().cos().float()
        with piper.annotate("PP", 1):
            h = (h @ self.w[1].T) * mask + table
            if self.two:
                h = h + other
            return F.mse_loss(h, y)


@pytest.mark.parametrize(("two", "count"), [(False, 1), (True, 2)])
def test_only_gradients_that_exist_are_sent_back(two: bool, count: int) -> None:
    """R10, floats without a gradient at a border: both ends count the same messages."""
    wanted = jobs.strategy(LINE2, 2, "one_f_one_b")
    fx.equals_eager(lambda: Mixed(two), wanted, EIGHT, timeout_s=10.0)
    plan = piper.plan(Mixed(two), wanted, EIGHT)
    back = [i for i in plan.programs[1].instrs if i.op is Op.SEND and i.task.startswith("B")]
    posted = [i for i in plan.programs[0].instrs if i.op is Op.POST and i.task.startswith("B")]
    assert len(back) == len(posted) == 2 * count


# Groups of ranks.


class Tied(experts.Mixture):
    """A weight of the first stage is one of the last, too; experts in between."""

    def __init__(self, stages: int = 2) -> None:
        super().__init__(stages)
        self.e = nn.Parameter(fill([4, 4], 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            x = torch.tanh(x @ self.e.T)
        with piper.annotate("PP", self.stages - 1):
            y = y @ self.e
        return super().forward(x, y)


TIED = replicas.Case(build=Tied, batch=lambda step: rows(16, 2 * step))


def grouped(placement: jobs.Placement = LINE) -> piper.Strategy:
    """Two stages, two replicas of each, which share the experts."""
    return experts.strategy(placement, 2, "one_f_one_b")


@pytest.mark.slow
def test_groups_of_every_kind_work_together() -> None:
    """R12, sub-groups: of stages, replicas, tied weights and experts; parity with one process."""
    ranks = replicas.run(TIED, LINE, grouped(), steps=2)
    want = replicas.reference(TIED, steps=2)
    replicas.compare(ranks, want, LINE, 0, part=experts.part_of(2))


def test_all_ranks_make_all_groups_in_one_order() -> None:
    """R12, one list for all ranks, in the plan's summary; of global ranks, wherever they start."""
    plan = piper.plan(Tied(), grouped(), TIED.batch(0))
    made = plan.communicators()
    assert made == sorted(made)
    kinds = {ranks for _, ranks in made}
    assert {(0, 1), (2, 3)} == kinds
    lines = plan.summary().partition("communicators, in the order in which ranks create them")[2]
    for stream, ranks in made:
        assert stream in lines
        assert ", ".join(map(str, ranks)) in lines or f"{ranks[0]}-{ranks[-1]}" in lines, ranks
    # Experts of the first stage on the last ranks.
    backwards = {0: [5, 4], 1: [1, 0], 2: [2, 3]}
    plan = piper.plan(Tied(3), grouped(backwards), TIED.batch(0))
    assert {(5, 4), (1, 0), (2, 3)} <= {ranks for _, ranks in plan.communicators()}


def made_again() -> list[float]:
    """Twenty communicators with all their groups, and a step on each."""
    found = []
    for _ in range(20):
        torch._dynamo.reset()
        given = tuple(v.chunk(2)[piper.rank() % 2] for v in TIED.batch(0))
        step = piper.compile(Tied(), grouped(), example_inputs=given, timeout_s=30.0)
        comm = state_of(step).comm
        comm.groups.clear()
        comm.prepare_groups(piper.explain(step).communicators())
        found.append(step(*given).item())
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.dist(4)
def test_groups_are_made_twenty_times() -> None:
    """R12, on four processes, twenty times over."""
    first = Tied(1)(*TIED.batch(0)).item()
    for losses in piper.launch(made_again, 4, timeout_s=60.0):
        assert losses == [about(first)] * 20


# Fewer microbatches than stages.

LEAST = {"gpipe": 1, "one_f_one_b": 1, "interleaved_1f1b": 1, "zb_h1": 1, "zbv": 1}
LEAST |= {"dualpipev": 4, "dualpipe": 4}


@pytest.mark.parametrize("microbatches", [1, *fx.slowly(2), 3])
@pytest.mark.parametrize("schedule", LAYOUTS)
def test_fewer_microbatches_than_stages_run_where_the_schedule_can(
    schedule: str, microbatches: int
) -> None:
    """R13, M < S: planned and proved; a schedule that needs more says how many."""
    layout = LAYOUTS[schedule]
    batch = rows(6)

    def planned() -> piper.Plan:
        wanted = jobs.strategy(layout.placement, microbatches, schedule)
        return piper.plan(Stack4(layout.stages), wanted, batch)

    try:
        plan = planned()
    except piper.PiperStrategyError as error:
        assert microbatches < LEAST[schedule]
        jobs.mentions(str(error), schedule, "num_microbatches", str(microbatches))
        if schedule.startswith("dual"):
            jobs.mentions(str(error), str(2 * jobs.world(layout.placement)))
    else:
        assert microbatches >= LEAST[schedule]
        assert plan.simulate().makespan > 0


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("zb_h1", 1)]
    + [
        pytest.param(schedule, microbatches, marks=pytest.mark.slow)
        for schedule, least in LEAST.items()
        for microbatches in (1, 2, 3)
        if microbatches >= least and (schedule, microbatches) != ("zb_h1", 1)
    ],
)
def test_fewer_microbatches_than_stages_are_right(schedule: str, microbatches: int) -> None:
    """R13, M < S, run: as one process."""
    layout = LAYOUTS[schedule]
    wanted = jobs.strategy(layout.placement, microbatches, schedule)
    fx.equals_eager(fx.stack(layout), wanted, rows(6))


# A rank that fails.

CALLS = {"count": 0}
STAMP = "the second step begins at"
TIMEOUT_S = 6.0
A_FEW_S = 10.0  # for two cores, which also end processes and their transport


@torch.library.custom_op("faults::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    """The value; from its third call on, an error."""
    CALLS["count"] += 1
    if CALLS["count"] > 2:
        raise ValueError("boom")
    return x.clone()


@fragile.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


fragile.register_autograd(lambda ctx, grad: grad)


class Fragile(Stack4):
    """F1 whose loss fails in the second step of two microbatches."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k in range(4):
            with piper.annotate("PP", k // 2):
                h = torch.tanh(h @ self.w[k].T)
        with piper.annotate("PP", 1):
            return F.mse_loss(fragile(h), y)  # the line that fails


def two_steps(act: Callable[[], None] = lambda: None, build: type[Stack4] = Stack4) -> None:
    """A good step, then `act` on the second rank, and a second step."""
    CALLS["count"] = 0
    wanted = jobs.strategy(LINE2, 2, "one_f_one_b")
    step = piper.compile(build(2), wanted, example_inputs=EIGHT, timeout_s=TIMEOUT_S)
    CALLS["count"] = 0
    step(*EIGHT).backward()
    if piper.rank() == 1:
        print(f"{STAMP} {time.time()}", flush=True)
        act()
    step(*EIGHT).backward()


def failing_loss() -> None:
    two_steps(build=Fragile)


def killed() -> None:
    two_steps(lambda: os._exit(17))


def sleeping() -> None:
    two_steps(lambda: time.sleep(30))


def line_that_fails() -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(k for k, line in enumerate(lines) if line.endswith("# the line that fails"))


WHERE = ("rank 1 failed in F.PP1.MB0", "ValueError: boom", f"test_hangs.py:{line_that_fails()}")


def test_an_error_in_a_step_names_rank_stage_microbatch_and_line() -> None:
    """R14, a rank raises: all ranks end with its error, its task and the user's line."""
    text = jobs.refusal(lambda: jobs.run_ranks(failing_loss, 2), piper.PiperRuntimeError)
    jobs.mentions(text, *WHERE)


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("job", "words"),
    [
        (failing_loss, WHERE),
        (killed, ("rank 1 failed", "17")),
        (sleeping, ("rank 0 waits for B.PP1.MB0 from rank 1", "6 s")),
    ],
    ids=["raises", "dies", "sleeps"],
)
def test_a_rank_that_fails_ends_the_launch(
    job: Callable[[], None], words: tuple[str, ...], tmp_path: Path
) -> None:
    """R14, with processes: within the deadline and a few seconds, the first failure told last."""
    text = jobs.refusal(
        lambda: piper.launch(job, 2, timeout_s=TIMEOUT_S, logs=tmp_path), piper.PiperRuntimeError
    )
    ended = time.time()
    jobs.mentions(text, *words)
    said = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    (began,) = re.findall(rf"{STAMP} ([\d.]+)", said)
    seconds = ended - float(began)
    assert seconds < TIMEOUT_S + A_FEW_S, f"told after {seconds:.1f} s:\n{text}"


# More inputs of the kind.


class Far(nn.Module):
    """Everything of the first stage is used by every later one, on a rank of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(fill([4, 4], k).float()) for k in range(3))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            x = F.one_hot(ids, 4).float()
            first = torch.tanh(x @ self.w[0].T)
        with piper.annotate("PP", 1):
            second = torch.tanh(first @ self.w[1].T) + x
        with piper.annotate("PP", 2):
            return (torch.tanh(second @ self.w[2].T) + first + x - y).square().mean()


@pytest.mark.parametrize("schedule", ["one_f_one_b", *fx.slowly("zb_h1")])
def test_messages_past_a_stage_come_in_order(schedule: str) -> None:
    """Order of messages on another model, in float32: three ranks, each sends to both others."""
    batch = tok([6], 4), xin([6, 4], 1).float()
    placement = {0: [0], 1: [1], 2: [2]}
    ranks = fx.run(Far, jobs.strategy(placement, 3, schedule), batch)
    model, losses = fx.eager(Far, batch)
    for found in ranks:
        assert found.loss == pytest.approx(losses[0], abs=1e-6)
        for name, grad in found.grads.items():
            torch.testing.assert_close(grad, dict(model.named_parameters())[name].grad)


@pytest.mark.parametrize("layout", [Layout(schedule="dualpipe", placement=LINE2, microbatches=6)])
def test_both_directions_at_once_finish(layout: Layout) -> None:
    """Peers that send to each other on another layout: half of the microbatches each way."""
    fx.equals_eager(fx.stack(layout), layout.strategy(), rows(12))
