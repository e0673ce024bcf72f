"""What replicas send in a step, and how much of gathered parameters is there at once; exact."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import piper_dynamo as piper
from benchmarks.report import Row
from benchmarks.zero_sides import Job
from piper_dynamo.ir.program import Op, RankProgram
from piper_dynamo.train.model import build


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Of one step; counts and bytes over all ranks, the peaks of the rank that has most.

    Attributes:
        gathers: Gathers of a bucket.
        gathered_bytes: Of the whole parameters they give.
        reductions: Reductions of a bucket's gradients; the loss's are left out.
        reduced_bytes: Of the whole gradients that go in.
        peak_buckets: Gathers whose results are there at once, those on their way included.
        peak_bytes: The most bytes of gathered parameters there at once.
    """

    gathers: int
    gathered_bytes: int
    reductions: int
    reduced_bytes: int
    peak_buckets: int
    peak_bytes: int


def residency(program: RankProgram) -> list[tuple[int, int]]:
    """Gathers alive and bytes of their results after each instruction.

    A result is there from the issue of its gather until its register is freed.
    """
    coming: dict[str, tuple[int, tuple[int, ...]]] = {}  # handle -> gather, bytes of its results
    alive: dict[str, tuple[int, int]] = {}  # register -> gather, bytes
    history: list[tuple[int, int]] = []
    for at, instr in enumerate(program.instrs):
        if instr.op is Op.ALL_GATHER:
            coming[instr.outputs[0]] = at, tuple(spec.nbytes for spec in instr.specs)
        elif instr.op is Op.WAIT and instr.inputs[:1] and instr.inputs[0] in coming:
            gather, sizes = coming.pop(instr.inputs[0])
            alive |= {
                reg: (gather, size)
                for reg, size in zip(instr.outputs, sizes, strict=True)
                if reg != "_"
            }
        elif instr.op is Op.FREE:
            for reg in instr.inputs:
                alive.pop(reg, None)
        held = [*alive.values(), *((g, sum(sizes)) for g, sizes in coming.values())]
        history.append((len({gather for gather, _ in held}), sum(size for _, size in held)))
    return history


def collectives(plan: piper.Plan) -> Collectives:
    """The counts of a plan."""
    instrs = [i for p in plan.programs for i in p.instrs]
    gathers = [i for i in instrs if i.op is Op.ALL_GATHER]
    sums = [
        i
        for i in instrs
        if i.op is Op.REDUCE_SCATTER or (i.op is Op.ALL_REDUCE and i.task.startswith("grads."))
    ]
    peaks = [entry for p in plan.programs for entry in residency(p)]
    return Collectives(
        gathers=len(gathers),
        gathered_bytes=sum(s.nbytes for i in gathers for s in i.specs),
        reductions=len(sums),
        reduced_bytes=sum(
            s.nbytes * (len(i.group) if i.op is Op.REDUCE_SCATTER else 1)
            for i in sums
            for s in i.specs
        ),
        peak_buckets=max(buckets for buckets, _ in peaks),
        peak_bytes=max(nbytes for _, nbytes in peaks),
    )


def collectives_of(job: Job, zero: int, **options: object) -> Collectives:
    """The counts of a job at one level."""
    plan = piper.plan(build(job.config), job.strategy(zero, **options), job.batch(0), job.ranks)
    return collectives(plan)


def run(job: Job, zeros: Sequence[int]) -> Iterator[Row]:
    """Every level; level 3 also with its parameters kept longer."""
    for zero in zeros:
        for keep in ("chunk", 2, "step") if zero == 3 else ("chunk",):
            found = collectives_of(job, zero, keep=keep)
            figures = ", ".join(
                f"{value * 2**-20:.1f} MiB {name.removesuffix('_bytes')}"
                if name.endswith("_bytes")
                else f"{value} {name}"
                for name, value in asdict(found).items()
            )
            what = f"ZeRO-{zero}" + (f", keep={keep!r}" if zero == 3 else "")
            data = asdict(found) | {"measured": "counted"}
            yield Row(section="counts", what=what, figures=figures, data=data)
