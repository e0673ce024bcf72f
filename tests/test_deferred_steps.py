"""Steps of models built under `piper.deferred_init`, or on the meta device with an `init_fn`."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import _torch_compat as compat
from piper_dynamo.pending import PendingBuffer
from piper_dynamo.state import AbsentParameter
from tests import experts, jobs, replicas
from tests.jobs import LINE2
from tests.models import NormNet, rows
from tests.pool import Pool
from tests.replicas import LINE, PAIR, Case


class Drawn(nn.Module):
    """Random values of several kinds, a tie across stages, a table per stage, an unused weight."""

    first: Tensor
    second: Tensor

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.stages = stages
        self.e = nn.Embedding(11, 4, padding_idx=0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.unused = nn.Linear(3, 2)
        self.register_buffer("first", torch.linspace(0.5, 1.5, 4))
        self.register_buffer("second", torch.rand(4) + 0.5, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.5)
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight).add_(torch.randn(4, 4))
            self.e.weight[0].zero_()
        self.head.weight = self.e.weight
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.a(self.e(ids)) * self.first)
        with piper.annotate("PP", self.stages - 1):
            h = torch.tanh(self.b(h) * self.second)
            return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def seeded(make: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def deferred(make: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    with piper.deferred_init():
        return make()


def case(build: Callable[..., nn.Module], of: Callable[[int], nn.Module]) -> Case:
    """A case whose model is built like this."""
    return Case(build=lambda stages: build(functools.partial(of, stages)), batch=replicas.tokens)


USUAL, LATER = case(seeded, Drawn), case(deferred, Drawn)


class DrawnExperts(experts.Mixture):
    """Experts with values drawn at random."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)


@pytest.mark.parametrize("zero", replicas.levels(3))
@pytest.mark.parametrize("placement", [LINE, pytest.param(PAIR, marks=pytest.mark.slow)])
def test_training_equals_one_process(placement: jobs.Placement, zero: int) -> None:
    """Tied over stages, and in blocks of rows; the first stage has the other's tied copy."""
    wanted = replicas.strategy(placement, 2, "gpipe", zero=zero)
    ranks = replicas.run(LATER, placement, wanted)
    for trace in ranks[1:]:
        assert "unused.weight" not in trace.params  # what no program uses is rank 0's
    want = replicas.reference(USUAL, len(placement))
    part = functools.partial(whole_if_unused, zero=zero)
    replicas.compare(ranks, want, placement, zero, part=part)


def whole_if_unused(
    whole: Tensor, rank: int, placement: jobs.Placement, level: int, *, zero: int
) -> Tensor:
    unused = whole.shape in ((2, 3), (2,))
    return whole if unused else replicas.part_of(whole, rank, placement, zero)


def first_values(case: Case, placement: jobs.Placement, wanted: Any) -> list[dict[str, Tensor]]:
    """What every rank holds before the first step."""
    return jobs.run_ranks(
        lambda: replicas.held(replicas.compiled(case, placement, wanted)), jobs.world(placement)
    )


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_experts_have_their_rows(zero: int) -> None:
    def of(build: Any) -> Case:
        return Case(
            build=lambda stages: build(functools.partial(DrawnExperts, stages)),
            batch=lambda step: rows(24, 2 * step),
        )

    wanted = experts.strategy(LINE, 2, "gpipe", zero=zero)
    ranks = first_values(of(deferred), LINE, wanted)
    part = experts.part_of(2)
    whole = dict(of(seeded).build(2).named_parameters())
    assert {name for held in ranks for name in held} == set(whole)
    for rank, held in enumerate(ranks):
        for name, value in held.items():
            assert torch.equal(value, part(whole[name], rank, LINE, zero)), name


def test_a_wrong_generator_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "generator_of", lambda device: torch.Generator())
    ranks = first_values(LATER, LINE2, jobs.strategy(LINE2, 2))
    whole = dict(USUAL.build(2).named_parameters())
    assert not all(torch.equal(v, whole[n]) for held in ranks for n, v in held.items())


def test_what_other_ranks_hold_costs_nothing_and_says_who_has_it() -> None:
    def job() -> tuple[list[str], list[str], dict[str, str]]:
        model = LATER.build(2)
        wanted = jobs.strategy(LINE2, 2)
        piper.compile(model, wanted, example_inputs=replicas.tokens(0))
        absent = [n for n, p in model.named_parameters() if isinstance(p, AbsentParameter)]
        buffers = [n for n, b in model.named_buffers() if isinstance(b, PendingBuffer)]
        far: Any = model.b if piper.rank() == 0 else model.a
        return absent, buffers, jobs.touched({"print": lambda m: str(far.weight)}, model)

    first, second = jobs.run_ranks(job, 2)
    assert first[:2] == (["b.weight", "b.bias"], ["second"])
    assert second[:2] == (["a.weight", "a.bias"], ["first"])
    jobs.mentions(first[2]["print"], "b.weight", "rank 1", "piper.parameters")


def test_running_statistics_start_from_recorded_buffers() -> None:
    """Buffers that a program changes; a plain call, without prepare."""

    def job() -> dict[str, Tensor]:
        model = deferred(NormNet)
        options = {"strategy": jobs.strategy(LINE2, 2)}
        step = torch.compile(model, backend="piper", options=options)
        for k in range(2):
            step(*rows(8, k))
        return {n: b.clone() for n, b in model.named_buffers()}

    model = NormNet()
    for k in range(2):
        jobs.accumulate(model, rows(8, k), 2)
    first, _ = jobs.run_ranks(job, 2)
    for name, value in model.named_buffers():
        jobs.close(first[name], value, name)


def build_by_rank(makers: tuple[Callable[[], nn.Module], ...], **options: Any) -> Callable[[], Any]:
    def job() -> dict[str, Tensor]:
        model = makers[piper.rank()]()
        wanted = replicas.strategy(PAIR, 2, zero=0)
        batch = replicas.mine(replicas.tokens(0), PAIR)
        return replicas.held(piper.compile(model, wanted, example_inputs=batch, **options))

    return job


ALONE = functools.partial(Drawn, 1)  # on one stage
MIXED = {
    "seeds": (lambda: deferred(ALONE), lambda: deferred(ALONE, seed=6)),
    "one is not deferred": (lambda: deferred(ALONE), lambda: seeded(ALONE)),
}


@pytest.mark.parametrize("mixed", MIXED)
def test_replicas_must_start_alike(mixed: str) -> None:
    """Compared by what was recorded, not by values, which no rank needs whole."""
    text = jobs.refusal(lambda: jobs.run_ranks(build_by_rank(MIXED[mixed]), 2))
    jobs.mentions(text, "e.weight", "torch.manual_seed", "deferred_init")


def test_the_first_replicas_values_are_broadcast() -> None:
    ranks = jobs.run_ranks(build_by_rank(MIXED["seeds"], start="broadcast"), 2)
    want = dict(seeded(ALONE).named_parameters())
    for held in ranks:
        for name in set(held) - {"unused.weight", "unused.bias"}:
            assert torch.equal(held[name], want[name]), name


# Models on the meta device.


def bare(stages: int = 2) -> nn.Module:
    with torch.device("meta"):
        return Drawn(stages)


def draw(name: str, tensor: Tensor) -> None:
    if tensor.dim() > 1:
        nn.init.normal_(tensor, std=0.5)
    else:
        tensor.fill_(0.25 if "bias" in name else 1.5)


def test_an_init_fn_gives_the_same_values_under_every_layout() -> None:
    """By seed and name alone, and no random numbers of the step's are used up."""

    def job(placement: jobs.Placement, zero: int) -> Any:
        torch.manual_seed(8)
        wanted = replicas.strategy(placement, 2, "gpipe", zero=zero)
        batch = replicas.mine(replicas.tokens(0), placement)
        step = piper.compile(bare(len(placement)), wanted, example_inputs=batch, init_fn=draw)
        assert torch.initial_seed() == 8
        loss = step(*batch)
        loss.backward()
        return loss.item(), replicas.held(step), torch.rand(3)

    runs = [
        jobs.run_ranks(functools.partial(job, placement, zero), jobs.world(placement))
        for placement, zero in ((PAIR, 0), (LINE, 3))
    ]
    whole = runs[0][0][1]
    for rank, (loss, held, drawn) in enumerate(runs[1]):
        assert loss == pytest.approx(runs[0][0][0], abs=1e-12)
        assert torch.equal(drawn, runs[0][0][2])
        for name, value in held.items():
            unused = name.startswith("unused")
            want = whole[name] if unused else replicas.part_of(whole[name], rank, LINE, 3)
            assert torch.equal(value, want), name


class Stored(Drawn):
    """Every buffer is in checkpoints."""

    def __init__(self, stages: int = 2) -> None:
        super().__init__(stages)
        self.register_buffer("second", self.second)


def bare_stored(stages: int) -> nn.Module:
    with torch.device("meta"):
        return Stored(stages)


# Another seed: what is not loaded is seen.
STARTS = {
    "deferred": lambda stages: deferred(functools.partial(Stored, stages), seed=9),
    "bare": bare_stored,
}


def stored(build: Callable[[int], nn.Module]) -> Case:
    return Case(build=build, batch=replicas.tokens)


def saved(folder: Path, placement: jobs.Placement, wanted: piper.Strategy) -> Any:
    """The loss of the step after the saved one, what each rank held, and all buffers."""
    made = stored(lambda stages: seeded(functools.partial(Stored, stages)))

    def job() -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        step = replicas.compiled(made, placement, wanted)
        optimizer = torch.optim.SGD(piper.parameters(step), lr=0.5)
        step(*replicas.mine(replicas.tokens(0), placement)).backward()
        optimizer.step()
        piper.save_checkpoint(folder, step)
        loss = step(*replicas.mine(replicas.tokens(1), placement)).item()
        model = step._orig_mod
        return loss, replicas.held(step), {n: b.clone() for n, b in model.named_buffers()}

    return jobs.run_ranks(job, jobs.world(placement))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("placement", "zero"), [(LINE2, 0), (LINE, 3)])
def test_a_checkpoint_gives_values_that_are_still_to_come(
    placement: jobs.Placement, zero: int, start: str, tmp_path: Path
) -> None:
    """Also of what no program uses, and of buffers that other stages read: whole on every rank."""
    wanted = jobs.strategy(placement, 2)
    if zero:
        wanted = replicas.strategy(placement, 2, zero=zero)
    want = saved(tmp_path, placement, wanted)

    def job() -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        step = replicas.compiled(stored(STARTS[start]), placement, wanted)
        piper.load_checkpoint(tmp_path, step)
        held, model = replicas.held(step), step._orig_mod
        others = {n: b.clone() for n, b in model.named_buffers()}
        others |= {f"unused.{n}": p.detach().clone() for n, p in model.unused.named_parameters()}
        loss = step(*replicas.mine(replicas.tokens(1), placement)).item()
        return loss, held, others

    unused = {n: v for n, v in want[0][1].items() if n.startswith("unused")}
    assert len(unused) == 2
    for rank, (loss, held, others) in enumerate(jobs.run_ranks(job, jobs.world(placement))):
        assert loss == pytest.approx(want[rank][0], abs=1e-12)
        assert held.keys() == want[rank][1].keys()
        for name, value in (want[rank][1] | want[rank][2] | unused).items():
            assert torch.equal((held | others)[name], value), name


def test_a_checkpoint_that_does_not_fit_gives_nothing(tmp_path: Path) -> None:
    """The next step still needs values."""
    saved(tmp_path, LINE2, jobs.strategy(LINE2, 2))

    def job() -> tuple[str, str]:
        step = replicas.compiled(stored(bare_stored), LINE2, jobs.strategy(LINE2, 2))
        step._orig_mod.register_buffer("more", torch.zeros(1))
        told = jobs.refusal(lambda: piper.load_checkpoint(tmp_path, step))
        given = replicas.mine(replicas.tokens(1), LINE2)
        return told, jobs.refusal(lambda: step(*given))

    for told, refused in jobs.run_ranks(job, 2):
        jobs.mentions(told, "more is not in it")
        jobs.mentions(refused, "nothing gave it values", "e.weight")


def test_a_damaged_checkpoint_makes_no_values(tmp_path: Path) -> None:
    """What no program uses still says that it has none, and is read from a sound one."""
    saved(tmp_path, LINE2, jobs.strategy(LINE2, 2))
    sound = {path: path.read_bytes() for path in tmp_path.glob("*.distcp")}

    def damage() -> None:
        for path, data in sound.items():
            path.write_bytes(bytes(len(data)))

    def job() -> tuple[str, str, bool]:
        step = replicas.compiled(stored(bare_stored), LINE2, jobs.strategy(LINE2, 2))
        weight = step._orig_mod.unused.weight
        told = jobs.refusal(lambda: piper.load_checkpoint(tmp_path, step))
        touched = jobs.touched({"print": lambda m: str(weight)}, step._orig_mod)
        for path, data in sound.items():
            path.write_bytes(data)
        piper.load_checkpoint(tmp_path, step)
        return told, touched["print"], bool(weight.isfinite().all())

    damage()
    for rank, (told, touched, is_read) in enumerate(jobs.run_ranks(job, 2)):
        jobs.mentions(told, "damaged")
        assert is_read
        if rank:  # rank 0's is made for its optimizer
            jobs.mentions(touched, "unused.weight", "has no values yet")


def nothing(name: str, tensor: Tensor) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (bare, {}, ("meta device", "e.weight", "piper.load_state_dict", "init_fn")),
        (bare, {"init_fn": nothing}, ("nothing", "gave", "weight")),
        (bare, {"init_fn": "normal"}, ("init_fn", "str", "function")),
        (LATER.build, {"init_fn": draw}, ("init_fn", "nothing to do")),
    ],
    ids=["no values", "untouched", "no function", "idle"],
)
def test_refusals(make: Any, options: dict[str, Any], words: tuple[str, ...]) -> None:
    batch = replicas.tokens(0)

    def job() -> None:
        wanted = jobs.strategy(LINE2, 2)
        step = piper.compile(make(2), wanted, example_inputs=batch, **options)
        step(*batch)

    jobs.mentions(jobs.refusal(lambda: jobs.run_ranks(job, 2)), *words)


def test_a_plan_needs_no_values() -> None:
    plan = piper.plan(LATER.build(2), jobs.strategy(LINE2, 2), replicas.tokens(0))
    assert plan.world_size == 2


# Memory.


class Wide(nn.Module):
    """Sixteen weights of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.randn(1024, 1024) / 32 for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for k, weight in enumerate(self.w):
            with piper.annotate("PP", k // 8):
                x = torch.tanh(x @ weight)
        with piper.annotate("PP", 1):
            return x.square().mean()


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(field + ":"))


def measure(zero: int, defer: bool) -> tuple[int, int]:
    """The peak of building and preparing above what was resident before, and this rank's share.

    Without the proofs that the tests ask for beside the usual ones: these take hundreds of MiB.
    """
    os.environ["PIPER_VERIFY"] = "1"  # of a process that does nothing else
    batch = (torch.ones(2, 1024),)
    placement = {0: [0, 1], 1: [0, 1]} if zero else LINE2
    wanted = replicas.strategy(placement, 2, zero=zero) if zero else jobs.strategy(LINE2, 2)
    piper.compile(Wide(), wanted, example_inputs=batch)  # what a first compilation loads
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step = piper.compile(deferred(Wide) if defer else Wide(), wanted, example_inputs=batch)
    peak = status("VmHWM") - before
    return peak, sum(replicas.local(p).nbytes for p in piper.parameters(step))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


@pytest.mark.dist(2)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.slow  # what other tests leave in the process moves its figures
@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_needs_memory_for_its_share_alone(pool: Pool, zero: int) -> None:
    """64 MiB of weights, half of them on each rank; built as usual, a rank needs them all."""
    largest, slack = 4 * 2**20, 12 * 2**20
    for peak, share in pool.values(measure, zero, True):
        assert share == 32 * 2**20
        assert peak <= share + 2 * largest + slack
    for peak, share in pool.values(measure, zero, False):
        assert peak > share + 2 * largest + slack
