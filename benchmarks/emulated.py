"""Step time on emulated devices beside torch's runtime with stages that only sleep.

Both sides wait for the same modelled times in the same way and really send their (small) messages,
so what differs is order, communication and overhead.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import piper_dynamo as piper
from benchmarks.paired import Comparison, compare, seconds
from benchmarks.report import Row, ratio_row
from benchmarks.sides import ours_of, stages_of, torch_schedule
from piper_dynamo.runtime.executor import sleep_until

WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What both sides wait for.

    Attributes:
        ranks: Of the pipeline.
        microbatches: Of a step, of each replica.
        unit_s: Forward, input gradient and weight gradient of a stage, each.
        replicas: Of the pipeline; torch's are DDP's.
        simulated_bar: How much longer than its simulation a step may take.
    """

    ranks: int
    microbatches: int
    unit_s: float
    replicas: int = 1
    simulated_bar: float = 1.03

    @property
    def world(self) -> int:
        """Processes."""
        return self.ranks * self.replicas


FOUR = Setup(ranks=4, microbatches=8, unit_s=0.02)
EIGHT = Setup(ranks=8, microbatches=16, unit_s=0.04, simulated_bar=1.05)


class Chain(nn.Module):
    """One small linear layer per stage; what it computes is not looked at."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(stages))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[B, WIDTH] and [B, WIDTH] -> loss."""
        for stage, layer in enumerate(self.layers):
            with piper.annotate("PP", stage):
                x = layer(x)
        with piper.annotate("PP", len(self.layers) - 1):
            return F.mse_loss(x, y)


class _Forward(torch.autograd.Function):
    """Meets input and weight; its backward takes no time, so it may run for either or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, unit_s: float) -> Tensor:
        deadline = time.perf_counter() + unit_s
        ctx.size = weight.shape
        out = torch.zeros_like(x)
        sleep_until(deadline)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0].new_zeros(ctx.size), None


class _Gradient(torch.autograd.Function):
    """The identity; its backward is the input-gradient or the weight-gradient work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit_s: float) -> Tensor:
        ctx.unit_s = unit_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sleep_until(time.perf_counter() + ctx.unit_s)
        return grads[0], None


class Sleeper(nn.Module):
    """A stage of torch's pipelining that only sleeps.

    torch splits a backward at the node where input and weight meet: for the input gradient it runs
    from there to the input, later from there to the weight. Stage 0's input wants no gradient: as
    in Piper, its backward is weight-gradient work alone.
    """

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.unit_s = unit_s

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH] -> zeros [B, WIDTH]."""
        if x.is_meta or not torch.is_grad_enabled():  # torch asks for the shapes
            return torch.zeros_like(x)
        x = _Gradient.apply(x, self.unit_s)  # type: ignore[no-untyped-call]
        weight = _Gradient.apply(self.weight, self.unit_s)  # type: ignore[no-untyped-call]
        out: Tensor = _Forward.apply(x, weight, self.unit_s)  # type: ignore[no-untyped-call]
        return out


def _theirs(setup: Setup, schedule: str, modules: dict[int, nn.Module], stages: int) -> Any:
    """Torch's schedule on this rank's pipeline; with replicas each stage is DDP's."""
    group = None
    if setup.replicas > 1:
        mesh = init_device_mesh("cpu", (setup.ranks, setup.replicas), mesh_dim_names=("pp", "dp"))
        group = mesh["pp"].get_group()
        for stage, module in modules.items():
            modules[stage] = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    return torch_schedule(schedule, modules, stages, setup.microbatches, F.mse_loss, group)


def measure(schedule: str, setup: Setup, pairs: int) -> tuple[Comparison, float]:
    """Both sides on every rank, and the simulated time of Piper's program."""
    mine, stages = stages_of(schedule, setup.ranks, piper.rank() // setup.replicas)
    costs = piper.Costs(F=setup.unit_s, BI=setup.unit_s, BW=setup.unit_s)
    x, y = (torch.zeros(4 * setup.microbatches, WIDTH) for _ in range(2))
    name, count = ours_of(schedule, setup.ranks)
    strategy = piper.strategies.pipeline(
        name,
        ranks=setup.ranks,
        num_microbatches=setup.microbatches,
        stages=count,
        replicas=setup.replicas,
    )
    torch.manual_seed(0)  # replicas start alike
    step = piper.compile(Chain(stages), strategy, (x, y), compile="emulate", costs=costs)
    modules: dict[int, nn.Module] = {s: Sleeper(setup.unit_s) for s in mine}
    theirs = _theirs(setup, schedule, modules, stages)

    def run_ours() -> None:
        step(x, y).backward()
        for parameter in piper.parameters(step):
            parameter.grad = None

    def run_theirs() -> None:
        args = (x,) if 0 in mine else ()
        kwargs: dict[str, Any] = {"target": y, "losses": []} if stages - 1 in mine else {}
        theirs.step(*args, **kwargs, return_outputs=False)
        for module in modules.values():
            module.zero_grad()

    for _ in range(2):
        run_ours()
        run_theirs()
    found = compare(
        lambda: seconds(run_ours, dist.barrier),
        lambda: seconds(run_theirs, dist.barrier),
        pairs=pairs,
        show=f"emulated {schedule}" if piper.rank() == 0 else None,
    )
    return found, piper.explain(step).simulate(costs).makespan


def run(pairs: int, schedules: Sequence[str], setup: Setup = FOUR) -> Iterator[Row]:
    """Every schedule: beside torch's runtime, and beside our own simulated time."""
    section = "emulated" if setup == FOUR else f"emulated-{setup.ranks}"
    bar = setup.simulated_bar
    for schedule in schedules:
        found, simulated = piper.launch(
            functools.partial(measure, schedule, setup, pairs), setup.world
        )[0]
        yield ratio_row(section, schedule, found, 1.0, "torch's runtime")
        beside = Comparison(first=found.first, second=(simulated,) * len(found.first))
        yield Row(
            section=section,
            what=f"{schedule}, simulated",
            figures=beside.text(),
            bar=f"<= {bar:.2f} x simulated",
            held=beside.holds(bar),
            data=beside.figures(limit=bar),
        )
