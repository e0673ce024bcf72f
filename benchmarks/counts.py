"""What a step does, counted exactly from its plan; tests pin the counts of a small model."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import piper_dynamo as piper
from benchmarks.report import Row
from benchmarks.sides import batch_of
from piper_dynamo.ir.program import Op
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Over all ranks, for one step.

    Attributes:
        instructions: What the programs do, frees apart.
        frees: Instructions that only forget registers.
        messages: From rank to rank.
        bytes: In those messages.
        matmuls: Matrix products and convolutions run.
        chunks: Different chunks to compile.
    """

    instructions: int
    frees: int
    messages: int
    bytes: int
    matmuls: int
    chunks: int


def count(plan: piper.Plan) -> Counts:
    """The counts of a plan."""
    instrs = [i for p in plan.programs for i in p.instrs]
    sent = [i.spec.nbytes for i in instrs if i.op is Op.SEND and i.spec is not None]
    frees = sum(i.op is Op.FREE for i in instrs)
    return Counts(
        instructions=len(instrs) - frees,
        frees=frees,
        messages=sum(i.op is Op.SEND for i in instrs),
        bytes=sum(sent),
        matmuls=sum(plan.chunks[i.target].matmuls for i in instrs if i.op is Op.RUN),
        chunks=len({key for p in plan.programs for _, key in p.chunks}),
    )


def counts_of(config: Config) -> Counts:
    """The counts of a training job."""
    return count(piper.plan(build(config), config.strategy(), batch_of(config), config.pp))


def run(config: Config, schedules: Sequence[str]) -> Iterator[Row]:
    """Every schedule."""
    for schedule in schedules:
        found = counts_of(replace(config, schedule=schedule))
        figures = ", ".join(f"{value} {name}" for name, value in asdict(found).items())
        yield Row(section="counts", what=schedule, figures=figures, data=asdict(found))
