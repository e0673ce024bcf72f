"""Experts measured: exchanges hidden under compute, step times, memory and host work.

make bench-experts
make bench-experts ARGS="--only exposed --sets emulated --pictures runs/experts"

Ranks are joined by links of a stated rate (`links.py`: Linux, root, `ip` and `tc`), since overlap
matters only where communication costs something. Set-ups: "real", 2 ranks that compute and share
the experts of all stages; "emulated", 2 pipeline ranks x 2 that share experts, on devices that
wait.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

import piper_dynamo as piper
from benchmarks import command
from benchmarks.experts_sides import EXPERT_RANKS, Job, Mixture, PiperMixture, TorchMixture
from benchmarks.links import Links
from benchmarks.paired import Comparison, compare, seconds
from benchmarks.report import Row, gain_row
from piper_dynamo.pictures import plot_timeline
from piper_dynamo.timeline import Timeline

SETS = {
    "real": Job(ranks=1, mbit=1500.0, dense=1024),
    "emulated": Job(ranks=2, mbit=1000.0, unit_s=0.04, tokens=48, dim=1024, hidden=32, top_k=4),
}
EXPOSED_BAR = 0.4  # of what the same order exposes without interleaving
# How much faster than what, at least. A loop over one rank ("real") is that rank's stages in turn.
GAINS = {
    "real": {"one_f_one_b": 1.13},
    "emulated": {"one_f_one_b": 1.25, "interleaved_1f1b": 1.10},
}
TORCH_GAIN = 1.10
OVERHEAD_BAR = 0.15


def _paired(first: Callable[[], Any], second: Callable[[], Any], pairs: int) -> Comparison:
    for side in (first, second):
        for _ in range(2):
            side()
    return compare(
        lambda: seconds(first, dist.barrier),
        lambda: seconds(second, dist.barrier),
        pairs=pairs,
        show="experts" if piper.rank() == 0 else None,
    )


def _exposed(job: Job, pairs: int) -> tuple[Comparison, list[Timeline]]:
    """Exposed seconds per step of DualPipeV, interleaved and not; on rank 0 both timelines."""
    sides = [PiperMixture(job, "dualpipev", interleaved=flag) for flag in (True, False)]
    for side in sides:
        for _ in range(2):
            side()
    found = compare(sides[0].exposed_s, sides[1].exposed_s, pairs=pairs)
    return found, [side.timeline() for side in sides]


def exposed(name: str, pairs: int, pictures: str | None) -> Iterator[Row]:
    """The gate, free of what bubbles do."""
    job = SETS[name]
    with Links(job.world, job.mbit) as links:
        results = links.run(functools.partial(_exposed, job, pairs))
    found = results[0][0]
    yield Row(
        section="exposed",
        what=f"DualPipeV, {name}, {job.mbit:.0f} Mbit/s",
        figures=found.text(),
        bar=f"<= {EXPOSED_BAR:.2f} x without interleaving",
        held=found.holds(EXPOSED_BAR),
        data=found.figures(limit=EXPOSED_BAR),
    )
    if pictures is not None:
        drawn = [Timeline.merge([r[1][side] for r in results]) for side in (0, 1)]
        Path(pictures).mkdir(parents=True, exist_ok=True)
        path = Path(pictures, f"experts-{name}.png")
        titles = ("interleaved", "one after another")
        plot_timeline(dict(zip(titles, drawn, strict=True)), path, unit="s")
        click.echo(f"    {path}")


def _beside(job: Job, other: str, pairs: int) -> tuple[Comparison, float]:
    """DualPipeV against another schedule of ours; and the exposed share of that one's step."""
    mine, theirs = PiperMixture(job, "dualpipev"), PiperMixture(job, other)
    found = _paired(mine, theirs, pairs)
    share = theirs.exposed_s() / statistics.median(found.second)
    return found, share


def _beside_torch(job: Job, other: str, pairs: int) -> Comparison:
    return _paired(PiperMixture(job, "dualpipev"), TorchMixture(job, other), pairs)


def bubble_gain(job: Job, other: str) -> float:
    """What the order alone gives: simulated steps with free communication."""
    makespans = []
    for schedule in (other, "dualpipev"):
        strategy = job.strategy(schedule)
        stages = len({p.filter for p in strategy.of(piper.Place)})
        batch = torch.zeros(job.microbatches * job.tokens, job.dim)
        plan = piper.plan(Mixture(job, stages), strategy, (batch, batch), world_size=job.world)
        unit = job.ranks / stages
        makespans.append(plan.simulate(piper.Costs(F=unit, BI=unit, BW=unit)).makespan)
    return makespans[0] / makespans[1]


def times(name: str, pairs: int) -> Iterator[Row]:
    """Step times beside our other schedules, and on emulated devices beside torch's."""
    job = SETS[name]
    for other, gain in GAINS[name].items():
        with Links(job.world, job.mbit) as links:
            found, share = links.run(functools.partial(_beside, job, other, pairs))[0]
        alone = bubble_gain(job, other)
        note = f"; exchanges {share:.0%} of its step; the bubble alone gives {alone:.2f} x"
        yield gain_row("time", f"DualPipeV, {name}", found, gain, other, note)
    for other in ("dualpipev", "zbv") if job.unit_s is not None else ():
        with Links(job.world, job.mbit) as links:
            found = links.run(functools.partial(_beside_torch, job, other, pairs))[0]
        yield gain_row("time", f"DualPipeV, {name}", found, TORCH_GAIN, f"torch's {other}")


def _held_bytes(job: Job) -> tuple[int, int]:
    step = PiperMixture(job, "one_f_one_b").step
    mine: dict[str, Any] = {n: p for n, p in piper.named_parameters(step) if p.dim() == 3}
    return sum(part.to_local().nbytes for part in mine.values()), sum(
        p.nbytes for p in mine.values()
    )


def memory() -> Iterator[Row]:
    """What a rank holds of the experts."""
    job = SETS["real"]
    held, whole = piper.launch(functools.partial(_held_bytes, job), job.world)[0]
    yield Row(
        section="memory",
        what="experts' parameters on a rank",
        figures=f"{held * 2**-20:.1f} MiB of {whole * 2**-20:.1f} MiB",
        bar=f"= 1/{EXPERT_RANKS}",
        held=held * EXPERT_RANKS == whole,
        data={"ours": held, "theirs": whole, "unit": "bytes", "limit": 1 / EXPERT_RANKS}
        | {"measured": "counted"},
    )


def _moved(x: Tensor, index: Tensor, weights: Tensor, experts: int) -> Tensor:
    sent, routing = piper.moe.dispatch(x, index, experts)
    return piper.moe.combine(sent, routing, weights)


def _multiplied(rows: Tensor, up: Tensor, down: Tensor, routing: Any) -> Tensor:
    return piper.moe.grouped_mm(piper.moe.grouped_mm(rows, up, routing), down, routing)


def overhead(pairs: int) -> Iterator[Row]:
    """Routing, sorting and putting back, beside the experts' own products."""
    tokens, dim, experts, top = 4096, 512, 8, 1
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, dim, generator=draw)
    index = torch.randint(0, experts, (tokens, top), generator=draw)
    up = torch.randn(experts, dim, 2 * dim, generator=draw)
    down = torch.randn(experts, 2 * dim, dim, generator=draw)
    weights = torch.rand(tokens, top, generator=draw)
    rows, routing = piper.moe.dispatch(x, index, experts)

    # As programs run them: what stands for the exchanges on one device is no copy there.
    moved = torch.compile(_moved, backend="piper")
    multiplied = torch.compile(_multiplied, backend="piper")

    def move() -> float:
        start = time.perf_counter()
        moved(x, index, weights, experts)
        return time.perf_counter() - start

    def multiply() -> float:
        start = time.perf_counter()
        multiplied(rows, up, down, routing)
        return time.perf_counter() - start

    for _ in range(3):
        move()
        multiply()
    found = compare(move, multiply, pairs=pairs)
    yield Row(
        section="overhead",
        what="dispatch + combine, dim 512, 8 experts, 4,096 tokens",
        figures=found.text(),
        bar=f"<= {OVERHEAD_BAR:.2f} x the experts' products",
        held=found.holds(OVERHEAD_BAR),
        data=found.figures(limit=OVERHEAD_BAR),
    )


def _over(sets: Sequence[str], rows: Callable[[str], Iterator[Row]]) -> Iterator[Row]:
    for name in sets:
        yield from rows(name)


SECTIONS: dict[str, command.Section] = {
    "exposed": lambda pairs, sets, pictures: _over(sets, lambda s: exposed(s, pairs, pictures)),
    "time": lambda pairs, sets, pictures: _over(sets, lambda s: times(s, pairs)),
    "memory": lambda pairs, sets, pictures: memory(),
    "overhead": lambda pairs, sets, pictures: overhead(pairs),
}


@click.command()
@command.only(list(SECTIONS))
@click.option(
    "--sets", default=",".join(SETS), callback=command.names_of(list(SETS)), help="By comma."
)
@click.option("--pictures", default="runs/experts", help="Where both timelines are drawn.")
@command.pairs()
@command.json_path()
def main(
    only: list[str], sets: list[str], pictures: str, pairs: int | None, path: str | None
) -> None:
    """Measure, and print one table with verdicts; every row also when it is there."""
    chosen = {
        name: functools.partial(
            SECTIONS[name], command.pairs_of(SECTIONS[name], pairs), sets, pictures
        )
        for name in only
    }
    command.measure(chosen, path)


if __name__ == "__main__":
    main()
