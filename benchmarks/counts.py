"""What a step does, counted exactly from its plan, and compared with the counts that are committed.

make bench-counts                  what differs from benchmarks/counts.json; exit code 1 if anything
make bench-counts ARGS=--write     what is there now becomes what is committed

Counts are the same on every machine, so a difference is a change of what steps do: a regression
unless it is meant. tests/test_counts.py compares them, too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

import piper_dynamo as piper
from benchmarks.report import Row
from benchmarks.sides import batch_of
from benchmarks.zero_counts import collectives
from piper_dynamo.ir.program import ROW_EXCHANGES, Op
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.tables import table
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import Llama, build

PATH = Path(__file__).parent / "counts.json"

# Four layers, four microbatches of each replica.
SMALL = Config(dim=32, layers=4, heads=2, kv_heads=1, seq=8, batch=4, microbatches=4)
PAIR = replace(SMALL, dp=2, batch=8)
EXPERTS = replace(SMALL, model="moe", ep=2, batch=8, experts=4)
GATE: Mapping[str, Config] = {
    "one rank": replace(SMALL, pp=1, schedule="gpipe"),
    **{schedule: replace(SMALL, schedule=schedule) for schedule in SCHEDULES},
    "4 ranks": replace(SMALL, pp=4),
    "tied head": replace(SMALL, tied_head=True),
    "recompute full": replace(SMALL, recompute="full"),
    "bf16": replace(SMALL, precision="bf16"),
    **{f"2 replicas, zero {zero}": replace(PAIR, zero=zero) for zero in range(4)},
    "2 replicas, zero 0, buckets": replace(PAIR, bucket_mb=0.05),
    "2 replicas, zero 3, buckets": replace(PAIR, zero=3, bucket_mb=0.05),
    "2 replicas, zero 3, kept": replace(PAIR, zero=3, keep="step"),
    "2 replicas, zbv, zero 2": replace(PAIR, zero=2, schedule="zbv"),
    "experts": EXPERTS,
    "experts, dualpipev": replace(EXPERTS, schedule="dualpipev"),
    "experts, capacity": replace(EXPERTS, capacity=1.0),
    "experts, 2 replicas, zero 3": replace(EXPERTS, dp=2, batch=16, zero=3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """For one step, over all ranks; peaks of the rank that has most.

    Attributes:
        instructions: What the programs do, frees apart.
        frees: Instructions that only forget registers.
        messages: From rank to rank.
        bytes: In those messages.
        gathers: Of a bucket's parameters.
        gathered_bytes: Of the whole parameters that they make.
        reductions: Of a bucket's gradients.
        reduced_bytes: Of the whole gradients that go in.
        exchanges: Of rows with experts.
        exchanged_bytes: Of the rows that come, where experts are used evenly.
        matmuls: Matrix products and convolutions run.
        chunks: Different chunks to compile.
        peak_bytes: The most that a step holds at once, by when each value is made and freed.
        peak_inside_bytes: The same with what chunks need while they run, parameters and buffers.
    """

    instructions: int
    frees: int
    messages: int
    bytes: int
    gathers: int
    gathered_bytes: int
    reductions: int
    reduced_bytes: int
    exchanges: int
    exchanged_bytes: int
    matmuls: int
    chunks: int
    peak_bytes: int
    peak_inside_bytes: int


def count(plan: piper.Plan) -> Counts:
    """The counts of a plan."""
    instrs = [i for p in plan.programs for i in p.instrs]
    sent = [i.spec.nbytes for i in instrs if i.op is Op.SEND and i.spec is not None]
    frees = sum(i.op is Op.FREE for i in instrs)
    exchanged = [s.nbytes for i in instrs if i.op in ROW_EXCHANGES for s in i.specs]
    of_replicas = collectives(plan)
    return Counts(
        instructions=len(instrs) - frees,
        frees=frees,
        messages=len(sent),
        bytes=sum(sent),
        gathers=of_replicas.gathers,
        gathered_bytes=of_replicas.gathered_bytes,
        reductions=of_replicas.reductions,
        reduced_bytes=of_replicas.reduced_bytes,
        exchanges=len(exchanged),
        exchanged_bytes=sum(exchanged),
        matmuls=sum(plan.chunks[i.target].matmuls for i in instrs if i.op is Op.RUN),
        chunks=len({key for p in plan.programs for _, key in p.chunks}),
        peak_bytes=max(p.peak_bytes for p in plan.programs),
        peak_inside_bytes=max(one.total for one in plan.memory()),
    )


_models: dict[tuple[Any, ...], Llama] = {}


def plan_of(config: Config) -> piper.Plan:
    """The plan of a training job; those that differ in their schedule alone share a model.

    So it is captured once for all of them.
    """
    others = tuple(value for name, value in config.as_dict().items() if name != "schedule")
    key = (config.stages, *others)
    if key not in _models:
        _models[key] = build(config)
    batch = tuple(whole.chunk(config.replicas)[0] for whole in batch_of(config))
    return piper.plan(_models[key], config.strategy(), batch, config.world)


def counts_of(config: Config) -> Counts:
    """The counts of a training job."""
    return count(plan_of(config))


def committed() -> dict[str, dict[str, int]]:
    """What the file says, by job."""
    found: dict[str, dict[str, int]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def write(found: Mapping[str, Mapping[str, int]]) -> None:
    """Make these the committed ones: a job per line, so that a diff reads as a table."""
    lines = [f"{json.dumps(name)}: {json.dumps(dict(counts))}" for name, counts in found.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def difference(
    want: Mapping[str, Mapping[str, int]], found: Mapping[str, Mapping[str, int]]
) -> str:
    """A table of what is not as committed; empty where all is."""
    rows = []
    for job in [*want, *(name for name in found if name not in want)]:
        before, now = want.get(job, {}), found.get(job, {})
        for name in dict.fromkeys([*before, *now]):
            old, new = before.get(name), now.get(name)
            if old != new:
                rows.append([job, name, _shown(old), _shown(new), _change(old, new)])
    if not rows:
        return ""
    heads = ["job", "count", "committed", "now", "change"]
    hint = "if that is meant: make bench-counts ARGS=--write, and commit benchmarks/counts.json"
    return "\n".join([*table(heads, rows, left=("job", "count")), hint])


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _change(old: int | None, new: int | None) -> str:
    if old is None or new is None:
        return "only now" if old is None else "gone"
    return f"{new - old:+}" + (f" ({new / old - 1:+.1%})" if old else "")


def run(config: Config, schedules: Sequence[str]) -> Iterator[Row]:
    """Every schedule."""
    for schedule in schedules:
        found = asdict(counts_of(replace(config, schedule=schedule)))
        figures = ", ".join(f"{value} {name}" for name, value in found.items() if value)
        data = found | {"measured": "counted"}
        yield Row(section="counts", what=schedule, figures=figures, data=data)


def gate() -> dict[str, dict[str, int]]:
    """The counts of every job of the gate."""
    found = {}
    with click.progressbar(GATE.items(), label="planning", show_eta=False) as jobs:
        for name, config in jobs:
            found[name] = asdict(counts_of(config))
    return found


@click.command()
@click.option(
    "--write", "is_meant", is_flag=True, help="Make the counts of now the committed ones."
)
@click.pass_context
def main(ctx: click.Context, is_meant: bool) -> None:
    """Compare the counts of small jobs with the committed ones."""
    want: dict[str, Any] = committed() if PATH.exists() else {}
    found = gate()
    differs = difference(want, found)
    if differs:
        click.echo(differs)
    if is_meant:
        write(found)
    click.echo(
        f"{len(found)} jobs, {len(fields(Counts))} counts each: "
        + ("written" if is_meant else "not as committed" if differs else "as committed")
    )
    ctx.exit(1 if differs and not is_meant else 0)


if __name__ == "__main__":
    main()
