"""What schedules cost, measured on plans of a small model.

Terms: F, BI, BW are the times of a rank's whole share of one microbatch, of which each of its
stages takes an equal part; a forward is *live* until its backward ends.

Signature: a schedule's name -> its figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.task import Pass, TaskName
from piper_dynamo.lowering.simulate import Costs
from piper_dynamo.planning import Plan
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.strategies import pipeline, placement

RANKS, MICROBATCHES, LAYERS, WIDTH, ROWS = 4, 8, 8, 64, 64
F = BI = BW = 1.0
TIMES = f"{F:g}, {BI:g} and {BW:g}"
WORK = MICROBATCHES * (F + BI + BW)
SHARE_BYTES = LAYERS // RANKS * ROWS * WIDTH * 4
"""What a rank keeps of one microbatch between forward and backward: each layer's output."""

# Idle time of p ranks with v stages each, as the docstrings have it.
CLOSED_FORMS: dict[str, Callable[[int, int], float]] = {
    "gpipe": lambda p, v: (p - 1) * (F + BI + BW),
    "one_f_one_b": lambda p, v: (p - 1) * (F + BI + BW),
    "interleaved_1f1b": lambda p, v: (p - 1) * (F + BI + BW) / v,
    "zb_h1": lambda p, v: (p - 1) * max(F, BI, F + BI - BW),
    "zbv": lambda p, v: (p - 1) * F / 2,
    "dualpipev": lambda p, v: (p - 1) * F / 2,
    "dualpipe": lambda p, v: (p / 2 - 1) * F,
}


class Stack(nn.Module):
    """Equal linear layers, equally many in each of the stages."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.stages = stages

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean squared error, in the last stage."""
        for number, layer in enumerate(self.layers):
            with piper.annotate("PP", number * self.stages // LAYERS):
                x = layer(x).tanh()
        with piper.annotate("PP", self.stages - 1):
            return nn.functional.mse_loss(x, y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one schedule costs; per rank where it is a tuple."""

    idle: float
    closed_form: float
    makespan: float
    live: tuple[float, ...]
    peak_bytes: tuple[int, ...]


def plan_of(name: str, *, input_gradient: bool) -> Plan:
    """The schedule's plan of the stack; an input gradient makes the first stage's work equal."""
    stages = len(placement(name, RANKS))
    x, y = torch.zeros(2, MICROBATCHES * ROWS, WIDTH)
    strategy = pipeline(name, ranks=RANKS, num_microbatches=MICROBATCHES)
    batch = (x.requires_grad_(input_gradient), y)
    return piper.plan(Stack(stages), strategy, batch, world_size=RANKS)


def sharded_plan() -> Plan:
    """Two pipeline ranks of two replicas each, which shard all they hold."""
    strategy = pipeline("one_f_one_b", ranks=2, num_microbatches=4, replicas=2, zero=3)
    x, y = torch.zeros(2, 4 * ROWS, WIDTH)
    return piper.plan(Stack(2), strategy, (x, y))


def uniform(name: str) -> Costs:
    """Costs of a stage, of which a rank may have several."""
    v = len(placement(name, RANKS)) // RANKS
    return Costs(F=F / v, BI=BI / v, BW=BW / v)


def live_forwards(plan: Plan, rank: int) -> int:
    """The most of a rank's forwards that wait for the end of their backward, in stages."""
    held = most = 0
    for instr in plan.programs[rank].instrs:
        if instr.op is Op.RUN:
            which = TaskName.parse(instr.task).which
            held += {Pass.F: 1, Pass.B: -1, Pass.BI: 0, Pass.BW: -1}[which]
            most = max(most, held)
    return most


@cache
def figures(name: str) -> Figures:
    """Measure a schedule on its plans."""
    v = len(placement(name, RANKS)) // RANKS
    equal = plan_of(name, input_gradient=True)
    step = equal.simulate(uniform(name))
    memory = plan_of(name, input_gradient=False).simulate()
    return Figures(
        idle=step.makespan - max(step.busy(r) for r in range(RANKS)),
        closed_form=CLOSED_FORMS[name](RANKS, v),
        makespan=step.makespan,
        live=tuple(live_forwards(equal, r) / v for r in range(RANKS)),
        peak_bytes=tuple(memory.peak_bytes(r) for r in range(RANKS)),
    )


def allowed(name: str, most: int = 4 * RANKS) -> str:
    """The numbers of microbatches that a schedule takes, as ranges."""
    ranges: list[list[int]] = []
    for m in range(1, most + 1):
        try:
            SCHEDULES[name][0](placement(name, RANKS), m)
        except piper.PiperStrategyError:
            continue
        if ranges and ranges[-1][1] == m - 1:
            ranges[-1][1] = m
        else:
            ranges.append([m, m])
    shown = (
        f"{a} to {b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1))) for a, b in ranges
    )
    return ", ".join(shown)
