"""Random numbers of tasks on other devices: the generator that is drawn from is the one seeded.

There is no such device here: stand-ins take its generators' place, and a tensor says that it is
there.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import piper_dynamo as piper
from piper_dynamo import _torch_compat as compat
from piper_dynamo.binding import bind, executor_of
from piper_dynamo.ir.program import Op, mix_seed
from piper_dynamo.lowering.aten import seed_draws
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.runtime.local import LocalCommunicator, LocalWorld
from tests import jobs
from tests.jobs import ONE

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
    seeds = [mix_seed(3, *i.seed[:2]) + i.seed[2] for i in tasks if i.seed is not None]
    assert len(set(seeds)) == 2  # microbatches; a backward that draws again has its forward's
    assert spy.seeds == ["before", *seeds, "before"]
    # All on the CPU: no other generator is looked for.
    executor.run([torch.eye(4)], [x], weights, seed=3)
    assert spy.seeds[-1] == "before"
    assert len(spy.seeds) == len(seeds) + 2
