"""What ranks hold of replicated parameters, and that it behaves as torch's tools expect.

On a rank every parameter is a DTensor or none is; shards lie on dim 0; what a rank does not hold
whole is safe to touch in the module. Most tests run two replicas of one stage; those about what a
rank does not hold at all run two stages of two replicas.
"""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import piper_dynamo as piper
from tests import jobs, replicas
from tests.models import BareLoss, Dropped, Odd, Stack4, TiedLM, fill, rows
from tests.replicas import CASES, FEW_LEVELS, LAST_LEVEL, LINE, LOOP, PAIR, TRIPLE, VEE, Case
from tests.test_state import TOUCHES

UNEVEN, TIED, PLAIN, FROZEN = (CASES[name] for name in ("uneven", "tied", "plain", "frozen"))
ADAMW = replicas.OPTIMIZERS[1]
ODD = Case(build=lambda stages: Odd(), batch=replicas.tokens)


def one_step(case: Case, placement: jobs.Placement, step: Any, optimizer: Any, k: int = 0) -> float:
    loss = step(*replicas.mine(case.batch(k), placement))
    loss.backward()
    piper.clip_grad_norm_(step, jobs.CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# DTensors.


@pytest.mark.parametrize("zero", replicas.levels(0, 3))
def test_all_parameters_are_dtensors_or_none_is(zero: int) -> None:
    """From ZeRO-1 on; a parameter without dims cannot be sharded and is whole everywhere."""

    def job() -> dict[str, tuple[bool, tuple[Any, ...], tuple[int, ...], tuple[int, ...]]]:
        step = replicas.compiled(UNEVEN, TRIPLE, replicas.strategy(TRIPLE, 2, zero=zero))
        found = {}
        for name, p in piper.named_parameters(step):
            assert isinstance(p, nn.Parameter)
            assert p.is_leaf
            sharded = isinstance(p, DTensor)
            placements = tuple(p.placements) if sharded else ()
            found[name] = (sharded, placements, tuple(p.shape), tuple(replicas.local(p).shape))
        return found

    model = UNEVEN.build(1)
    for rank, found in enumerate(jobs.run_ranks(job, 3)):
        assert set(found) == {n for n, _ in model.named_parameters()}
        for name, (sharded, placements, shape, part) in found.items():
            want = model.get_parameter(name)
            assert sharded is (zero > 0)
            assert shape == want.shape
            assert part == replicas.part_of(want, rank, TRIPLE, zero).shape
            if zero:
                assert placements == ((Shard(0),) if want.dim() else (Replicate(),))


@pytest.mark.parametrize("zero", FEW_LEVELS)
def test_gradients_are_laid_out_as_their_parameters(zero: int) -> None:
    def job() -> None:
        step = replicas.compiled(UNEVEN, TRIPLE, replicas.strategy(TRIPLE, 2, zero=zero))
        step(*replicas.mine(UNEVEN.batch(0), TRIPLE)).backward()
        for name, p in piper.named_parameters(step):
            assert p.grad is not None, name
            assert isinstance(p.grad, DTensor) is isinstance(p, DTensor)
            assert p.grad.shape == p.shape
            assert p.grad.dtype == p.dtype
            assert replicas.local(p.grad).shape == replicas.local(p).shape
            if isinstance(p, DTensor):
                assert tuple(p.grad.placements) == tuple(p.placements)

    jobs.run_ranks(job, 3)


@pytest.mark.parametrize("zero", replicas.levels(0, 3))
def test_the_optimizers_state_is_sharded(zero: int) -> None:
    """Together the replicas hold each moment once, or each of them whole under ZeRO-0."""

    def job() -> dict[str, list[int]]:
        step = replicas.compiled(UNEVEN, PAIR, replicas.strategy(PAIR, 2, zero=zero))
        optimizer = ADAMW(piper.parameters(step))
        one_step(UNEVEN, PAIR, step, optimizer)
        found = {}
        for name, p in piper.named_parameters(step):
            moments = [optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")]
            found[name] = [replicas.local(m).numel() for m in moments]
            assert found[name] == [replicas.local(p).numel()] * 2
        return found

    first, second = jobs.run_ranks(job, 2)
    for name, p in UNEVEN.build(1).named_parameters():
        copies = 2 if zero == 0 or not p.dim() else 1
        total = [a + b for a, b in zip(first[name], second[name], strict=True)]
        assert total == [copies * p.numel()] * 2, name


@pytest.mark.parametrize("levels", [pytest.param((0, 1), marks=pytest.mark.slow), (3, 0)])
def test_levels_that_differ_on_one_rank(levels: tuple[int, int]) -> None:
    """Both stages are on both ranks: what is whole there is a DTensor too."""
    placement = {0: [0, 1], 1: [0, 1]}
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        *jobs.places(placement),
        *(piper.Replicate({"PP": stage}, zero=zero) for stage, zero in enumerate(levels)),
    )
    kinds: list[set[bool]] = []

    def job() -> jobs.Trace:
        step = replicas.compiled(PLAIN, placement, wanted)
        kinds.append({isinstance(p, DTensor) for p in piper.parameters(step)})
        batches = [replicas.mine(PLAIN.batch(k), placement) for k in range(jobs.STEPS)]
        return replicas.train(step, batches)

    ranks, want = jobs.run_ranks(job, 2), replicas.reference(PLAIN)
    assert kinds == [{True}, {True}]
    for rank, got in enumerate(ranks):
        jobs.close(got.losses, want.losses, f"rank {rank}: losses")
        jobs.close(got.norms, want.norms, f"rank {rank}: norms")
        for name, value in got.params.items():
            zero = levels[int(name.removeprefix("w.")) // 2]
            part = replicas.part_of(want.params[name], rank, placement, zero)
            jobs.close(value, part, f"rank {rank}: {name}")


# What a rank holds.


@pytest.mark.parametrize(
    "placement", [pytest.param(LINE, marks=pytest.mark.slow), LOOP, VEE], ids=["line", "loop", "v"]
)
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_rank_holds_its_own_stages_and_loads_its_replicas_data(
    zero: int, placement: jobs.Placement
) -> None:
    def job() -> tuple[set[str], int, int]:
        wanted = replicas.strategy(placement, 4, zero=zero)
        step = replicas.compiled(PLAIN, placement, wanted)
        return set(replicas.held(step)), piper.data_rank(step), piper.data_world(step)

    per_stage = 4 // len(placement)
    for rank, (names, data_rank, data_world) in enumerate(jobs.run_ranks(job, 4)):
        stages = [stage for stage, ranks in placement.items() if rank in ranks]
        assert names == {f"w.{s * per_stage + k}" for s in stages for k in range(per_stage)}
        assert (data_rank, data_world) == (rank % 2, 2)


@pytest.mark.parametrize("zero", LAST_LEVEL)
def test_what_a_rank_does_not_hold_whole_is_safe_to_touch(zero: int) -> None:
    """Of the other stage always; of its own where it has a shard. It names the way out."""

    def job() -> dict[str, str]:
        model = Stack4(2)
        batch = replicas.mine(PLAIN.batch(0), LINE)
        step = piper.compile(model, replicas.strategy(LINE, 2, zero=zero), example_inputs=batch)
        optimizer = ADAMW(piper.parameters(step))
        is_whole = zero == 0 and piper.rank() < 2
        touches = {n: touch for n, touch in TOUCHES.items() if n == "optimizer" or not is_whole}
        found = {}
        for _ in range(2):  # before the first step, and after it
            found.update(jobs.touched(touches, model, piper.PiperError))
            one_step(PLAIN, LINE, step, optimizer)
        return found

    for rank, found in enumerate(jobs.run_ranks(job, 4)):
        words = ("piper.parameters",) if rank < 2 and not zero else ("w.0", "piper.parameters")
        wrong = [f"{n}: {t}" for n, t in found.items() if not all(w in t for w in words)]
        assert not wrong, f"rank {rank}\n" + "\n".join(wrong)
        assert set(found) == ({"optimizer"} if rank < 2 and not zero else set(TOUCHES))


def test_a_rank_without_parameters() -> None:
    """The last stage only takes the loss: an optimizer works there, on nothing."""
    case = Case(build=lambda stages: BareLoss(), batch=replicas.numbers)
    for zero in (0, 3):
        ranks = replicas.run(case, LINE, replicas.strategy(LINE, 2, zero=zero))
        replicas.compare(ranks, replicas.reference(case), LINE, zero)
        assert not ranks[2].params
        assert not ranks[3].params


@pytest.mark.parametrize("zero", LAST_LEVEL)
def test_frozen_parameters_stay_frozen(zero: int) -> None:
    """No gradient, no optimizer state, the same bits after weight decay; the flag is kept."""

    def job() -> dict[str, tuple[bool, bool, bool, bool]]:
        step = replicas.compiled(FROZEN, LINE, replicas.strategy(LINE, 2, zero=zero))
        before = replicas.held(step)
        optimizer = ADAMW(piper.parameters(step))
        found = {}
        for k in range(2):
            step(*replicas.mine(FROZEN.batch(k), LINE)).backward()
            graded = set(replicas.grads(step))
            optimizer.step()
            optimizer.zero_grad()
        for name, p in piper.named_parameters(step):
            same = torch.equal(before[name], replicas.local(p))
            found[name] = (p.requires_grad, name in graded, bool(optimizer.state.get(p)), same)
        return found

    for rank, found in enumerate(jobs.run_ranks(job, 4)):
        free, trained = (False, False, False, True), (True, True, True, False)
        stage = rank // 2
        assert found == {f"w.{2 * stage}": free, f"w.{2 * stage + 1}": trained}


@pytest.mark.parametrize("zero", LAST_LEVEL)
def test_unused_frozen_and_detached_parameters(zero: int) -> None:
    """No gradient, so weight decay leaves them alone; each is on some rank."""
    ranks = replicas.run(ODD, LINE, replicas.strategy(LINE, 2, "one_f_one_b", zero=zero))
    want = replicas.reference(ODD)
    names = set[str]()
    for rank, got in enumerate(ranks):
        jobs.close(got.losses, want.losses, f"rank {rank}: losses")
        jobs.close(got.norms, want.norms, f"rank {rank}: norms")
        names |= set(got.params)
    assert names == set(want.params)
    for rank, got in enumerate(ranks):
        for name in {"e", "a"} & set(got.params):
            part = replicas.part_of(want.params[name], rank, LINE, zero)
            jobs.close(got.params[name], part, f"rank {rank}: {name}")


# Shared parameters.


@pytest.mark.parametrize(("placement", "schedule"), [(LINE, "one_f_one_b"), (VEE, "zbv")])
@pytest.mark.parametrize("zero", LAST_LEVEL)
def test_copies_of_a_shared_parameter_are_equal_after_each_step(
    zero: int, placement: jobs.Placement, schedule: str
) -> None:
    shared = "e" if placement is LINE else "a"

    def job() -> list[dict[str, Tensor]]:
        wanted = replicas.strategy(placement, 4, schedule, zero=zero)
        step = replicas.compiled(TIED, placement, wanted)
        optimizer = ADAMW(piper.parameters(step))
        found = []
        for k in range(3):
            one_step(TIED, placement, step, optimizer, k)
            found.append(replicas.held(step))
        return found

    ranks = jobs.run_ranks(job, 4)
    assert all(shared in rank[0] for rank in ranks)
    for k in range(3):
        replicas.check_copies([rank[k] for rank in ranks], placement)


@pytest.mark.parametrize("zero", LAST_LEVEL)
def test_norms_count_each_element_once(zero: int) -> None:
    """Shared by stages, whole on replicas, sharded, or empty; by reference numbers."""
    case = Case(build=lambda stages: TiedLM(), batch=lambda k: TiedLM.batch())

    def job() -> tuple[float, list[float], list[float]]:
        step = replicas.compiled(case, LINE, replicas.strategy(LINE, 2, zero=zero))
        loss = step(*replicas.mine(case.batch(0), LINE))
        loss.backward()
        infinite = float("inf")
        norms = [float(piper.clip_grad_norm_(step, infinite, p)) for p in (2.0, 1.0, infinite)]
        clipped = [float(piper.clip_grad_norm_(step, m)) for m in (0.01, infinite)]
        return loss.item(), norms, clipped

    model = TiedLM()
    model(*TiedLM.batch()).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    want = [flat.norm().item(), flat.abs().sum().item(), flat.abs().max().item()]
    assert want[0] == pytest.approx((TiedLM.NORM_E**2 + TiedLM.NORM_A**2) ** 0.5, abs=1e-9)
    ranks = jobs.run_ranks(job, 4)
    assert ranks == [ranks[0]] * 4
    loss, norms, clipped = ranks[0]
    assert loss == pytest.approx(TiedLM.LOSS, abs=1e-10)
    assert norms == pytest.approx(want, abs=1e-12)
    assert clipped == pytest.approx([want[0], 0.01 * want[0] / (want[0] + 1e-6)], abs=1e-12)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_norms_over_empty_shards(zero: int) -> None:
    """The third replica has no row of most parameters; a maximum over nothing is no error."""

    def job() -> list[float]:
        step = replicas.compiled(UNEVEN, TRIPLE, replicas.strategy(TRIPLE, 2, zero=zero))
        step(*replicas.mine(UNEVEN.batch(0), TRIPLE)).backward()
        return [float(piper.clip_grad_norm_(step, 1e9, p)) for p in (2.0, 1.0, float("inf"))]

    model = UNEVEN.build(1)
    model(*UNEVEN.batch(0)).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    want = [flat.norm().item(), flat.abs().sum().item(), flat.abs().max().item()]
    for got in jobs.run_ranks(job, 3):
        assert got == pytest.approx(want, abs=1e-12)


# Use over time.


@pytest.mark.parametrize("zero", FEW_LEVELS)
def test_evaluation_between_steps_uses_the_updated_values(zero: int) -> None:
    def job() -> list[float]:
        step = replicas.compiled(UNEVEN, PAIR, replicas.strategy(PAIR, 2, zero=zero))
        optimizer = ADAMW(piper.parameters(step))
        losses = []
        for k in range(2):
            losses.append(one_step(UNEVEN, PAIR, step, optimizer, k))
            with torch.no_grad():
                loss = step(*replicas.mine(UNEVEN.batch(5), PAIR))
            assert not loss.requires_grad
            losses.append(loss.item())
        return losses

    model = UNEVEN.build(1)
    optimizer, want = ADAMW(model.parameters()), []
    for k in range(2):
        loss = model(*UNEVEN.batch(k))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), jobs.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        want += [loss.item(), model(*UNEVEN.batch(5)).item()]
    first, second = jobs.run_ranks(job, 2)
    assert first == second
    jobs.close(first, want, "losses")


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_values_written_by_hand_are_seen(zero: int) -> None:
    """Through the parameters this rank holds, as an optimizer does."""

    def change(parameters: list[Tensor]) -> None:
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.5)

    def job() -> list[float]:
        step = replicas.compiled(PLAIN, PAIR, replicas.strategy(PAIR, 2, zero=zero))
        batch = replicas.mine(PLAIN.batch(0), PAIR)
        losses = [step(*batch).item()]
        change(piper.parameters(step))
        return [*losses, step(*batch).item()]

    model = Stack4(1)
    want = [model(*PLAIN.batch(0)).item()]
    change(list(model.parameters()))
    want.append(model(*PLAIN.batch(0)).item())
    for got in jobs.run_ranks(job, 2):
        jobs.close(got, want, "losses")


@pytest.mark.parametrize("zero", LAST_LEVEL)
def test_two_losses_outstanding(zero: int) -> None:
    """Both backwards come after both calls; the gradients add up."""

    def job() -> dict[str, Tensor]:
        step = replicas.compiled(PLAIN, PAIR, replicas.strategy(PAIR, 2, zero=zero))
        losses = [step(*replicas.mine(PLAIN.batch(k), PAIR)) for k in range(2)]
        for loss in losses:
            loss.backward()
        return replicas.grads(step)

    model = Stack4(1)
    for k in range(2):
        model(*PLAIN.batch(k)).backward()
    for rank, got in enumerate(jobs.run_ranks(job, 2)):
        assert len(got) == 4
        for name, grad in got.items():
            want = replicas.part_of(model.get_parameter(name).grad, rank, PAIR, zero)
            jobs.close(grad, want, f"rank {rank}: gradient of {name}")


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_step_frees_what_it_gathered(zero: int) -> None:
    """Three more steps leave no more tensors alive than the second one did."""

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    def job() -> list[int]:
        step = replicas.compiled(PLAIN, PAIR, replicas.strategy(PAIR, 2, zero=zero))
        optimizer = ADAMW(piper.parameters(step))
        found = []
        for k in range(5):
            one_step(PLAIN, PAIR, step, optimizer, k)
            found.append(alive())
        return found

    gc.freeze()  # what is there already need not be looked through
    try:
        counts = jobs.run_ranks(job, 2)[0]
    finally:
        gc.unfreeze()
    assert counts[1] >= 4 * 3 * 2  # the shards of four weights and their moments, on two ranks
    assert counts[4] <= counts[1]


def test_dropout_masks_differ_by_replica_and_not_by_layout() -> None:
    """Masks come from the number of the microbatch in the global batch, not in the replica."""

    def losses(parts: int, placement: jobs.Placement, wanted: piper.Strategy) -> list[float]:
        same = tuple(value.repeat(parts, 1) for value in rows(6))
        case = Case(build=lambda stages: Dropped(), batch=lambda k: same)

        def job() -> float:
            step = replicas.compiled(case, placement, wanted)
            torch.manual_seed(7)
            return step(*replicas.mine(case.batch(0), placement)).item()

        return jobs.run_ranks(job, jobs.world(placement))

    (whole,) = losses(4, jobs.ONE, jobs.strategy(jobs.ONE, 4))
    (half,) = losses(2, jobs.ONE, jobs.strategy(jobs.ONE, 2))
    assert abs(whole - half) > 1e-6  # half: what two replicas with equal masks would give
    jobs.close(losses(4, LINE, replicas.strategy(LINE, 2, zero=3)), [whole] * 4, "losses")


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_two_runs_are_bit_equal(level: int) -> None:
    wanted = replicas.strategy(PAIR, 2, zero=level)
    first, second = (replicas.run(PLAIN, PAIR, wanted) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        for name, value in one.params.items():
            assert torch.equal(value, other.params[name])


def test_initial_values_are_the_models() -> None:
    """Preparing shards them and changes none."""

    def job() -> dict[str, Tensor]:
        return replicas.held(replicas.compiled(PLAIN, PAIR, replicas.strategy(PAIR, 2, zero=3)))

    for rank, got in enumerate(jobs.run_ranks(job, 2)):
        for k in range(4):
            assert torch.equal(got[f"w.{k}"], replicas.shard(fill([4, 4], k), 2, rank))
