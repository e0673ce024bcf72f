"""A distributed run equals the eager model on one process, over clipped SGD and AdamW steps.

Each case trains three steps with SGD and three with AdamW on one compiled step, in float64, and
compares losses, gradient norms and parameters within 1e-12 on every rank. Ranks get NaN, or an
illegal index, for the inputs that only other ranks' stages use. The controls at the end show that
the comparison fails for the mistakes it is there to find.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import piper_dynamo as piper
from tests import jobs
from tests.jobs import LINE2, LINE4, LOOP2, ONE, STEPS, V2, Placement, Trace
from tests.models import (
    BareLoss,
    Checkpointed,
    Counter,
    Custom,
    NormNet,
    NormOfOne,
    Odd,
    Paths,
    Stack4,
    TiedLM,
    rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its batch and the stages that use each input.

    Attributes:
        build: Makes the model; every call gives equal values.
        batch: The whole batch.
        needs: Per input, the stages that use it.
        statistics: Whether values depend on how the batch is cut, as with BatchNorm.
    """

    build: Callable[[], nn.Module]
    batch: tuple[Any, ...]
    needs: tuple[tuple[int, ...], ...]
    statistics: bool = False


def stack(stages: int, skip: str = "", count: int = 8) -> Subject:
    return Subject(
        build=lambda: Stack4(stages, skip), batch=rows(count), needs=((0,), (stages - 1,))
    )


TWO = ((0,), (1,))
TIED = Subject(build=TiedLM, batch=TiedLM.batch(), needs=TWO)
NORM = Subject(build=NormNet, batch=rows(8), needs=TWO, statistics=True)
COUNTER = Subject(build=Counter, batch=rows(8), needs=TWO, statistics=True)
CUSTOM = Subject(build=Custom, batch=rows(8), needs=TWO)
ODD = Subject(build=Odd, batch=TiedLM.batch(), needs=TWO)
CHECKPOINTED = Subject(build=Checkpointed, batch=rows(8), needs=TWO)
BARE = Subject(build=BareLoss, batch=rows(8), needs=TWO)


def distributed(
    subject: Subject,
    placement: Placement,
    strategy: piper.Strategy,
    batches: Sequence[tuple[Any, ...]] | None = None,
) -> list[Trace]:
    """The traces of all ranks."""

    def job() -> Trace:
        mine = [
            jobs.given_to(piper.rank(), batch, subject.needs, jobs.uses(strategy))
            for batch in batches or [subject.batch] * STEPS
        ]
        model = subject.build()
        step = piper.compile(model, strategy, example_inputs=mine[0])
        return jobs.train(step, mine)

    return jobs.run_ranks(job, jobs.world(placement))


def eager(subject: Subject, microbatches: int) -> Trace:
    return jobs.reference(subject.build(), [subject.batch] * STEPS, microbatches)


def check(subject: Subject, placement: Placement, microbatches: int, schedule: str) -> None:
    strategy = jobs.strategy(placement, microbatches, schedule)
    jobs.compare(distributed(subject, placement, strategy), eager(subject, microbatches))


@pytest.mark.parametrize(
    ("subject", "microbatches"),
    [(stack(2), 4), (stack(4, "last"), 2), (TIED, 2), (CUSTOM, 4), (ODD, 4), (CHECKPOINTED, 2)],
)
def test_the_two_references_agree(subject: Subject, microbatches: int) -> None:
    """The mean over equal microbatches is the mean over the batch."""
    jobs.compare([eager(subject, microbatches)], eager(subject, 1))


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_line_of_two(schedule: str, microbatches: int) -> None:
    check(stack(2), LINE2, microbatches, schedule)


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("gpipe", 2), ("one_f_one_b", 4), ("one_f_one_b", 1)]
)
def test_line_of_four(schedule: str, microbatches: int) -> None:
    """Fewer microbatches than stages run as well."""
    check(stack(4), LINE4, microbatches, schedule)


@pytest.mark.parametrize(
    ("schedule", "placement", "microbatches"),
    [
        ("gpipe", V2, 2),
        ("gpipe", LOOP2, 4),
        ("interleaved_1f1b", LOOP2, 4),
        ("zb_h1", LINE2, 4),
        ("zbv", V2, 4),
        ("dualpipev", V2, 4),
        ("dualpipe", LINE2, 4),
        ("dualpipe", LINE4, 8),
    ],
)
def test_other_schedules_and_placements(
    schedule: str, placement: Placement, microbatches: int
) -> None:
    check(stack(len(placement)), placement, microbatches, schedule)


def test_without_an_order() -> None:
    """Dataflow alone is enough to run."""
    check(stack(4), V2, 2, "")


def test_all_stages_on_one_rank() -> None:
    check(stack(2), ONE, 2, "gpipe")


@pytest.mark.parametrize("placement", [V2, LOOP2])
def test_two_stages_per_rank_with_alternating_forwards_and_backwards(placement: Placement) -> None:
    """Both neighbours have something to send at the same time, in orders written by hand."""
    own = [[s for s, ranks in placement.items() if r in ranks] for r in range(2)]
    texts = []
    for low, high in own:
        warm = f"F{low}.0 F{low}.1 F{high}.0 "
        texts.append(warm + f"F{high}.1 B{high}.0 B{high}.1 B{low}.0 B{low}.1")
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=2), *jobs.places(placement), *jobs.by_hand(*texts)
    )
    jobs.compare(distributed(stack(4), placement, strategy), eager(stack(4), 2))


@pytest.mark.parametrize(
    ("skip", "placement", "schedule"),
    [
        ("last", LINE4, "one_f_one_b"),
        ("last", V2, "gpipe"),
        ("all", LOOP2, "gpipe"),
        ("all", LINE4, "gpipe"),
    ],
)
def test_skip_connections(skip: str, placement: Placement, schedule: str) -> None:
    check(stack(4, skip), placement, 4, schedule)


@pytest.mark.parametrize(
    ("placement", "schedule"), [(LINE2, "gpipe"), (LINE2, "one_f_one_b"), (ONE, "gpipe")]
)
def test_tied_weights(placement: Placement, schedule: str) -> None:
    check(TIED, placement, 2, schedule)


@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(CUSTOM, id="custom autograd.Function"),
        pytest.param(CHECKPOINTED, id="checkpoint"),
        pytest.param(BARE, id="rank without parameters"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_structures(subject: Subject) -> None:
    check(subject, LINE2, 4, "one_f_one_b")


def test_unused_frozen_and_detached_parameters() -> None:
    """They get no gradient, so weight decay leaves them alone, and each is on some rank."""
    check(ODD, LINE2, 2, "one_f_one_b")


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_statistics_of_a_microbatch(schedule: str) -> None:
    """As gradient accumulation: each microbatch is normalised by itself."""
    check(NORM, LINE2, 4, schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_running_statistics_by_hand(schedule: str) -> None:
    """Momentum .1 over microbatches (0, 2) and (4, 6): mean .59, variance 1.19, two seen."""

    def job() -> dict[str, float]:
        model = NormOfOne()
        batch = NormOfOne.batch()
        step = piper.compile(model, jobs.strategy(LINE2, 2, schedule), example_inputs=batch)
        step(*batch).backward()
        return {n: float(b) for n, b in model.named_buffers()}

    found = jobs.run_ranks(job, 2)[0]
    assert found["norm.running_mean"] == pytest.approx(0.59, abs=1e-12)
    assert found["norm.running_var"] == pytest.approx(1.19, abs=1e-12)
    assert found["norm.num_batches_tracked"] == 2


def test_running_statistics_of_replicas_are_their_own() -> None:
    """As DDP's with broadcast_buffers=False: of a replica's own rows, 0 and 2 or 4 and 6."""
    placement = {0: [0, 1], 1: [2, 3]}
    wanted = piper.Strategy(
        *jobs.strategy(placement, 1, "one_f_one_b").directives, piper.Replicate({"PP": "*"})
    )

    def job() -> dict[str, float]:
        model = NormOfOne()
        mine = NormOfOne.batch()[0].chunk(2)[piper.rank() % 2]
        step = piper.compile(model, wanted, example_inputs=(mine,))
        step(mine).backward()
        return {n: float(b) for n, b in model.named_buffers()}

    first, second, *_ = jobs.run_ranks(job, 4)
    for found, mean in ((first, 0.1), (second, 0.5)):
        assert found["norm.running_mean"] == pytest.approx(mean, abs=1e-12)
        assert found["norm.running_var"] == pytest.approx(1.1, abs=1e-12)
        assert found["norm.num_batches_tracked"] == 1


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_a_counter_sees_the_microbatches_in_order(schedule: str) -> None:
    """Four microbatches count to 4 in the first step, to 8 in the second; preparing adds none."""
    want = Counter()
    losses = [jobs.accumulate(want, rows(8), 4) for _ in range(2)]

    def job() -> tuple[list[float], list[float]]:
        model = Counter()
        step = piper.compile(model, jobs.strategy(LINE2, 4, schedule), example_inputs=rows(8))
        counts, got = [float(model.count)], []
        for _ in range(2):
            got.append(step(*rows(8)).item())
            counts.append(float(model.count))
        return counts, got

    ranks = jobs.run_ranks(job, 2)
    assert ranks[1][0] == [0.0, 4.0, 8.0]
    for _, got in ranks:
        jobs.close(got, losses, "losses")


def test_regions_by_module_path() -> None:
    """The longest pattern that matches wins; submodules inherit."""
    subject = Subject(build=Paths, batch=rows(8), needs=TWO)
    strategy = jobs.strategy(LINE2, 2, "one_f_one_b", regions=Paths.REGIONS)
    ranks = distributed(subject, LINE2, strategy)
    jobs.compare(ranks, eager(subject, 2))
    assert set(ranks[0].params) == {"layers.0.weight", "layers.1.weight"}
    assert set(ranks[1].params) == {"layers.2.weight", "layers.3.weight"}


@pytest.mark.parametrize("placement", [LINE4, LOOP2, V2], ids=["line", "loop", "v"])
def test_a_rank_holds_its_own_stages_only(placement: Placement) -> None:
    def job() -> set[str]:
        strategy = jobs.strategy(placement, 2)
        step = piper.compile(Stack4(4), strategy, example_inputs=rows(8))
        return set(jobs.held(step))

    for rank, names in enumerate(jobs.run_ranks(job, jobs.world(placement))):
        assert names == {f"w.{s}" for s, ranks in placement.items() if rank in ranks}


def first_step(
    build: Callable[[], nn.Module], batch: tuple[Any, ...], strategy: piper.Strategy, ranks: int
) -> list[tuple[float, float, dict[str, float]]]:
    """Loss, norm over all ranks and norm per held parameter with a gradient, of one step."""

    def job() -> tuple[float, float, dict[str, float]]:
        step = piper.compile(build(), strategy, example_inputs=batch)
        loss = step(*batch)
        loss.backward()
        each = {
            n: p.grad.norm().item()
            for n, p in piper.named_parameters(step)
            if p.grad is not None and p.numel()
        }
        return loss.item(), float(piper.clip_grad_norm_(step, float("inf"))), each

    return jobs.run_ranks(job, ranks)


def test_reference_numbers() -> None:
    """Stack4 and its skip form, against numbers that were computed apart from this file."""
    for skip, total, each in (
        ("", Stack4.LOSS, Stack4.NORMS),
        ("last", Stack4.SKIP_LOSS, Stack4.SKIP_NORMS),
    ):
        found = first_step(lambda s=skip: Stack4(4, s), rows(8), jobs.strategy(LOOP2, 4), 2)
        norms: dict[str, float] = {}
        for loss, norm, held in found:
            assert loss == pytest.approx(total, abs=1e-10)
            assert norm == pytest.approx(sum(v * v for v in each) ** 0.5, abs=1e-9)
            norms |= held
        assert [norms[f"w.{k}"] for k in range(4)] == pytest.approx(list(each), abs=1e-10)


def test_tied_reference_numbers() -> None:
    """The shared weight's gradient is the sum of its uses, on both holders, once in the norm."""
    found = first_step(TiedLM, TiedLM.batch(), jobs.strategy(LINE2, 2), 2)
    for loss, norm, held in found:
        assert loss == pytest.approx(TiedLM.LOSS, abs=1e-10)
        assert norm == pytest.approx((TiedLM.NORM_E**2 + TiedLM.NORM_A**2) ** 0.5, abs=1e-9)
        assert held["e"] == pytest.approx(TiedLM.NORM_E, abs=1e-10)
    assert "a" in found[0][2]
    assert "a" not in found[1][2]


def test_sum_of_microbatch_losses() -> None:
    """`loss="sum"` adds the microbatches' losses and gradients instead of averaging them."""
    found = first_step(lambda: Stack4(2), rows(8), jobs.strategy(LINE2, 4, reduction="sum"), 2)
    for loss, norm, _ in found:
        assert loss == pytest.approx(4 * Stack4.LOSS, abs=1e-10)
        assert norm == pytest.approx(4 * Stack4.NORM, abs=1e-9)


def frozen(*names: int) -> Stack4:
    model = Stack4(4)
    for k in names:
        model.w[k].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("names", "schedule"),
    [((0,), "one_f_one_b"), ((3,), "one_f_one_b"), ((0, 1, 3), "gpipe"), ((0, 1), "zbv")],
    ids=["first", "last", "all but one", "split backward"],
)
def test_whole_stages_without_a_gradient(names: tuple[int, ...], schedule: str) -> None:
    subject = replace(stack(4), build=lambda: frozen(*names))
    placement = V2 if schedule == "zbv" else {0: [0], 1: [0], 2: [1], 3: [1]}
    if schedule == "one_f_one_b":
        placement = LINE4
    ranks = distributed(subject, placement, jobs.strategy(placement, 4, schedule))
    jobs.compare(ranks, eager(subject, 4))
    before = Stack4(4)
    for trace in ranks:
        for k in names:
            if f"w.{k}" in trace.params:
                assert torch.equal(trace.params[f"w.{k}"], before.w[k].detach())


def test_dropout_does_not_depend_on_schedule_or_placement() -> None:
    """Masks come from the seed, the microbatch and the draw's number in the model."""
    from tests.models import Dropped

    subject = Subject(build=Dropped, batch=rows(8), needs=TWO)

    def seeded(placement: Placement, schedule: str, seed: int) -> Trace:
        def job() -> Trace:
            step = piper.compile(
                Dropped(), jobs.strategy(placement, 4, schedule), example_inputs=subject.batch
            )
            torch.manual_seed(seed)
            trace = jobs.train(step, [subject.batch] * 2)
            return trace

        ranks = jobs.run_ranks(job, jobs.world(placement))
        params: dict[str, torch.Tensor] = {}
        for trace in ranks:
            assert trace.losses == ranks[0].losses
            params |= trace.params
        return replace(ranks[0], params=params)

    want = seeded(LINE2, "gpipe", 7)
    assert len(set(want.losses)) == len(want.losses)
    jobs.compare([seeded(LINE2, "one_f_one_b", 7)], want)
    jobs.compare([seeded(ONE, "gpipe", 7)], want)
    jobs.compare([seeded(LINE2, "dualpipe", 7)], want)
    assert seeded(ONE, "gpipe", 8).losses != want.losses


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 6])
@pytest.mark.parametrize("skip", ["", "all"])
def test_sweep_line_of_four(schedule: str, microbatches: int, skip: str) -> None:
    check(stack(4, skip, 12), LINE4, microbatches, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("subject", [TIED, CUSTOM, ODD, CHECKPOINTED, BARE, NORM, COUNTER])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_sweep_structures(subject: Subject, schedule: str, microbatches: int) -> None:
    check(subject, LINE2, microbatches, schedule)


# Controls: what the comparison must notice.


@cache
def example() -> tuple[tuple[Trace, ...], Trace]:
    """A right run and its reference."""
    ranks = distributed(stack(2), LINE2, jobs.strategy(LINE2, 4))
    want = eager(stack(2), 4)
    jobs.compare(ranks, want)
    return tuple(ranks), want


def dropped_microbatch() -> Trace:
    x, y = stack(2).batch
    return jobs.reference(Stack4(2), [(x[:6], y[:6])] * STEPS, 3)


def summed() -> Trace:
    return jobs.reference(Stack4(2), [stack(2).batch] * STEPS, 4, loss_of=lambda loss: loss * 4)


def shifted_labels() -> Trace:
    x, y = stack(2).batch
    return jobs.reference(Stack4(2), [(x, y.roll(2, 0))] * STEPS, 4)


def unclipped() -> Trace:
    return jobs.reference(Stack4(2), [stack(2).batch] * STEPS, 4, clip=float("inf"))


@pytest.mark.parametrize("wrong", [dropped_microbatch, summed, shifted_labels, unclipped])
def test_control_a_wrong_reference_is_noticed(wrong: Callable[[], Trace]) -> None:
    ranks, _ = example()
    with pytest.raises(AssertionError, match="off by"):
        jobs.compare(ranks, wrong())


def test_control_each_part_of_the_comparison_is_alive() -> None:
    ranks, want = example()
    first = ranks[0]
    name = next(iter(first.params))
    nudged = {name: first.params[name] + 1e-11}
    for broken, told in (
        (replace(first, losses=[*first.losses[:-1], first.losses[-1] + 1e-11]), "losses"),
        (replace(first, norms=[*first.norms[:-1], first.norms[-1] - 1e-11]), "norms"),
        (replace(first, params=first.params | nudged), f"parameter {name}"),
        (replace(first, params={}), "no rank holds"),
        (replace(first, params=first.params | {"other": torch.ones(1)}), "'other'"),
    ):
        with pytest.raises(AssertionError, match=told):
            jobs.compare([broken, *ranks[1:]], want)


def test_control_untied_copies_are_noticed() -> None:
    want = eager(TIED, 2)
    drifted = want.params["e"] + 1e-14
    copy = replace(want, params={"e": drifted})
    with pytest.raises(AssertionError, match="copies of e differ"):
        jobs.compare([want, copy], want)


def test_control_statistics_of_the_whole_batch_are_another_result() -> None:
    with pytest.raises(AssertionError, match="off by"):
        jobs.compare([eager(NORM, 4)], eager(NORM, 1))


def test_control_a_lost_skip_gradient_is_noticed() -> None:
    class Lost(Stack4):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = first = torch.tanh(x @ self.w[0].T)
            for k in (1, 2, 3):
                h = torch.tanh((h + first.detach() if k == 3 else h) @ self.w[k].T)
            return nn.functional.mse_loss(h, y)

    lost = jobs.reference(Lost(4), [rows(8)] * STEPS, 4)
    with pytest.raises(AssertionError, match="off by"):
        jobs.compare([lost], eager(stack(4, "last"), 4))
