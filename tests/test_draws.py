"""Random numbers: which calls draw some, what they depend on, and on which device.

There is no other device here than the CPU: stand-ins take its generators' place, and a tensor says
that it is there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, default_generator, fx, nn

import piper_dynamo as piper
from piper_dynamo import _torch_compat as compat
from piper_dynamo import planning
from piper_dynamo.binding import bind, executor_of
from piper_dynamo.ir import chunk as chunks_of
from piper_dynamo.ir.alias import draws, is_random
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import Op, mix_seed
from piper_dynamo.lowering import chunks as compiling
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.lowering.draws import _seeded, seed_draws
from piper_dynamo.passes import cut
from piper_dynamo.runtime.local import LocalCommunicator, LocalWorld
from tests import jobs, replicas
from tests.jobs import LINE2, ONE
from tests.models import fill, rows, weights
from tests.replicas import PAIR

aten = torch.ops.aten
ELSEWHERE = torch.device("cuda", 1)


def dropout_on(device: torch.device) -> fx.Graph:
    """The third draw of a region."""
    with compat.FakeTensorMode():
        value = torch.empty(64, device=device)
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = value
    made = graph.call_function(aten.native_dropout.default, (given, 0.5, True))
    made.meta |= {"val": (value, value), "draw": 2}
    graph.output((made,))
    return graph


@pytest.mark.parametrize("device", [torch.device("cpu"), ELSEWHERE])
def test_a_draw_seeds_the_generator_of_its_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(), torch.Generator()))
    graph = dropout_on(device)
    seed_draws(graph)
    torch.default_generator.manual_seed(11)
    run = fx.GraphModule(nn.Module(), graph)
    run(torch.ones(64))
    for one in (torch.device("cpu"), torch.device("cuda", 0), ELSEWHERE):
        seeded = compat.generator_of(one).initial_seed() == mix_seed(11 + 2)
        assert seeded == (one == device), one


class Spy:
    """A generator of which only its seeds are known."""

    def __init__(self) -> None:
        self.seeds: list[Any] = ["before"]

    def get_state(self) -> Any:
        return self.seeds[-1]

    def set_state(self, state: Any) -> None:
        self.seeds.append(state)

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


class There(Tensor):
    """Says that it is on the other device."""

    device = ELSEWHERE  # type: ignore[assignment]


class Two(nn.Module):
    """A stage that draws and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = nn.functional.dropout(x @ self.w, 0.5)
        with piper.annotate("PP", 1):
            return h.square().mean()


def test_tasks_are_seeded_on_every_device_and_the_callers_state_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy, found = Spy(), compat.generator_of
    monkeypatch.setattr(
        compat, "generator_of", lambda device: spy if device == ELSEWHERE else found(device)
    )
    x = torch.ones(8, 4)
    plan = piper.plan(Two(), jobs.strategy(ONE, 2), (x,))
    (program,) = plan.programs
    chunks = bind(program, plan.chunks, compile_chunks(plan.chunks, "aten"))
    executor = executor_of(program, chunks, LocalCommunicator(LocalWorld(1), 0))
    weights = [torch.tensor(0.5) for _ in program.weights]
    before = torch.default_generator.get_state()
    results = executor.run([torch.eye(4)], [x.as_subclass(There)], weights, seed=3)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert results.loss is not None
    tasks = [i for i in program.instrs if i.op is Op.RUN and i.seed is not None]
    seeds = [mix_seed(3, i.seed[0]) + i.seed[1] for i in tasks if i.seed is not None]
    assert len(set(seeds)) == 2  # microbatches; a backward that draws again has its forward's
    assert spy.seeds == ["before", *seeds, "before"]
    # All on the CPU: no other generator is looked for.
    executor.run([torch.eye(4)], [x], weights, seed=3)
    assert spy.seeds[-1] == "before"
    assert len(spy.seeds) == len(seeds) + 2


# What draws.


class Attending(nn.Module):
    """Dropout, then attention that drops nothing, which torch marks as random all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.dropout(torch.tanh(x @ self.w[0].T), 0.5, self.training)
        with piper.annotate("PP", 1):
            q = (h @ self.w[1].T).view(-1, 1, 2, 2)
            return F.mse_loss(F.scaled_dot_product_attention(q, q, q).flatten(1), y)


def test_attention_without_dropout_draws_nothing() -> None:
    plan = piper.plan(Attending(), jobs.strategy(LINE2, 2), rows(8), 2)
    marked = [n for c in plan.chunks.values() for n in c.graph.nodes if is_random(n)]
    assert {draws(node) for node in marked} == {False, True}
    first, second = plan.programs
    assert any(i.seed is not None for i in first.instrs)
    assert all(i.seed is None for i in second.instrs)


def losses_of_attention(evaluate: bool) -> list[float]:
    """Of training steps, maybe with evaluation between them."""

    def job() -> list[float]:
        model = Attending()
        step = piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=rows(8))
        torch.manual_seed(3)
        found = []
        for _ in range(2):
            if evaluate:
                model.eval()
                with torch.no_grad():
                    step(*rows(8))
                model.train()
            found.append(step(*rows(8)).item())
        return found

    first, second = jobs.run_ranks(job, 2)
    assert first == second
    assert first[0] != first[1]
    return list(first)


def test_evaluating_attention_uses_up_no_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    want = losses_of_attention(evaluate=False)
    assert losses_of_attention(evaluate=True) == want
    # Control: what torch marks counts as drawing.
    monkeypatch.setattr(planning, "_templates", {})
    monkeypatch.setattr(chunks_of, "draws", is_random)
    assert losses_of_attention(evaluate=True) != want


# What masks depend on.


class Wandering(nn.Module):
    """Four layers with dropout, each in a stage of its own choice; the third is a side branch."""

    def __init__(self, stages: Sequence[int]) -> None:
        super().__init__()
        self.w, self.stages = weights(4), stages

    def layer(self, k: int, h: Tensor) -> Tensor:
        with piper.annotate("PP", self.stages[k]):
            return F.dropout(torch.tanh(h @ self.w[k].T), 0.25, self.training)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.layer(0, x)
        second, side = self.layer(1, first), self.layer(2, x)
        last = self.layer(3, second + side)
        with piper.annotate("PP", self.stages[3]):
            return F.mse_loss(last, y)


def losses(
    build: Callable[[], nn.Module],
    placement: jobs.Placement,
    wanted: piper.Strategy,
    **options: Any,
) -> list[float]:
    """Of trained steps under one seed."""

    def job() -> list[float]:
        torch.manual_seed(3)
        of, at = replicas.replicas(placement), replicas.replica_of(piper.rank(), placement)
        mine = tuple(value.chunk(of)[at] for value in rows(8))
        step = piper.compile(build(), wanted, example_inputs=mine, **options)
        return jobs.train(step, [mine] * jobs.STEPS).losses

    return list(jobs.run_ranks(job, jobs.world(placement))[0])


@pytest.mark.parametrize(
    ("stages", "placement"),
    [
        ((0, 0, 1, 1), LINE2),  # two stages
        ((0, 1, 0, 1), LINE2),  # a stage in two parts: its draws are not next to each other
        ((0, 1, 0, 0), ONE),  # a stage that is come back to
        ((0, 0, 0, 0), PAIR),  # half of the microbatches each
    ],
)
def test_masks_do_not_depend_on_where_the_model_is_cut(
    stages: Sequence[int], placement: jobs.Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {0: [0]}
    whole = functools.partial(Wandering, (0, 0, 0, 0))
    want = losses(whole, alone, jobs.strategy(alone, 4))
    wanted = jobs.strategy(placement, 4, "")  # which orders no visits
    if placement is PAIR:
        wanted = replicas.strategy(PAIR, 2)
    cut_up = functools.partial(Wandering, stages)
    jobs.close(losses(cut_up, placement, wanted), want, "losses")
    if len(set(stages)) > 1:  # Control: each region counts from 0.
        monkeypatch.setattr(planning, "_templates", {})
        monkeypatch.setattr(cut, "_count_from_first", lambda graph: 0 * count_from_first(graph))
        assert abs(losses(cut_up, placement, wanted)[0] - want[0]) > 1e-6


count_from_first = cut._count_from_first


# Draws in chunks that Inductor compiles.

DRAWS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.native_dropout.default, (torch.ones(64), 0.5, True), {}),
    (aten.bernoulli.p, (torch.ones(64), 0.5), {}),
    (aten.rand_like.default, (torch.ones(64),), {}),
    (aten.rand.default, ([64],), {"dtype": torch.float64, "device": torch.device("cpu")}),
    (aten.randint.low, (3, 1000, [64]), {}),
    (aten.randperm.default, (64,), {}),
    (aten.multinomial.default, (torch.ones(64), 9), {}),
    (aten.normal_functional.default, (torch.ones(64),), {}),
    (aten.exponential.default, (torch.ones(64),), {}),
]


@pytest.mark.parametrize(("draw", "args", "options"), DRAWS, ids=[str(d[0]) for d in DRAWS])
def test_an_operator_that_seeds_itself_draws_by_its_number(
    draw: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    seeded = _seeded(draw)
    default_generator.manual_seed(11)
    found = [seeded(number, *args, **options) for number in (5, 6, 5)]
    assert default_generator.initial_seed() == 11  # the next one's chunk is the same
    default_generator.manual_seed(mix_seed(11 + 5))
    want = draw(*args, **options)
    first, other, again = (one if isinstance(one, tuple) else (one,) for one in found)
    wanted = want if isinstance(want, tuple) else (want,)
    assert all(torch.equal(a, b) for a, b in zip(first, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        fake = seeded(5, *args, **options)
    assert (fake[0] if isinstance(fake, tuple) else fake).shape == wanted[0].shape


class Noisy(nn.Module):
    """Two dropouts, and noise that is as the value and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.dropout(torch.tanh(x @ self.w[0].T), 0.5)
            h = F.dropout(torch.tanh(h @ self.w[1].T), 0.25)
            h = h + torch.rand_like(h) * torch.rand(4, dtype=h.dtype, device=h.device)
            return F.mse_loss(h, y)


def noisy_chunk(device: str = "cpu") -> Chunk:
    batch = tuple(value.to(device) for value in rows(8))
    plan = piper.plan(Noisy().to(device), jobs.strategy({0: [0]}, 1), batch)
    return next(chunk for name, chunk in plan.chunks.items() if name.startswith("F_"))


def given_by(chunk: Chunk, mode: str, seed: int = 11) -> list[Tensor]:
    """What a chunk gives."""
    run = compile_chunks({"F": chunk}, mode)["F"]
    specs = [spec for spec in chunk.inputs if spec is not None]
    inputs = [fill(spec.shape, k).to(spec.device) for k, spec in enumerate(specs)]
    default_generator.manual_seed(seed)
    return list(run(inputs))


def are_near(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=1e-12, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def test_inductor_draws_what_aten_draws(device: str) -> None:
    chunk = noisy_chunk(device)
    want = given_by(chunk, "aten")
    assert are_near(given_by(chunk, "inductor"), want)
    assert not are_near(given_by(chunk, "inductor", seed=12), want)


def test_control_draws_that_inductor_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decomposes them into some that it cannot compile here."""
    monkeypatch.setattr(compiling, "hide_draws", lambda graph: None)
    monkeypatch.setattr(compiling, "_compiled", {})
    with pytest.raises(Exception, match=r"rand"):
        given_by(noisy_chunk(), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, 0.0])
@pytest.mark.parametrize("bucket_mb", [None, 1e-4])
def test_a_step_has_the_same_masks_however_it_is_compiled(
    bucket_mb: float | None, recompute: float | None
) -> None:
    """Cut into a chunk per weight, too, and where masks are drawn again."""
    want = losses(Noisy, PAIR, replicas.strategy(PAIR, 2))
    wanted = replicas.strategy(PAIR, 2, bucket_mb=bucket_mb)
    again = [piper.Recompute({}, budget=recompute)] if recompute is not None else []
    wanted = piper.Strategy(*wanted.directives, *again)
    for mode in ("aten", "inductor"):
        jobs.close(losses(Noisy, PAIR, wanted, compile=mode), want, mode)
    plan = piper.plan(Noisy(), wanted, rows(4), 2)
    assert len(plan.dag.regions) == (1 if bucket_mb is None else 2)
