"""Pipelines measured: time and memory beside torch's, and what Piper itself costs.

make bench-pipeline
make bench-pipeline ARGS="--only real,memory --json results.json"
"""

import os
from collections.abc import Callable, Iterator, Sequence

import click
import torch

from benchmarks import compiling, counts, emulated, host, memory, planning, real
from benchmarks.paired import PAIRS
from benchmarks.report import Row, machine, table, write
from benchmarks.sides import TORCH
from piper_dynamo.train.config import Config

JOB = Config(dim=256, layers=8, heads=8, kv_heads=4, seq=128, batch=16, microbatches=8)

# From what is exact or quick to what takes long.
SECTIONS: dict[str, Callable[[int, Sequence[str]], Iterator[Row]]] = {
    "counts": lambda pairs, schedules: counts.run(JOB, schedules),
    "host": lambda pairs, schedules: host.run(),
    "planning": lambda pairs, schedules: planning.run(),
    "inductor": lambda pairs, schedules: compiling.run(),
    "real": lambda pairs, schedules: real.eager(JOB, pairs, schedules),
    "compiled": lambda pairs, schedules: real.compiled(JOB, pairs),
    "memory": lambda pairs, schedules: memory.run(JOB, pairs, schedules),
    "emulated": lambda pairs, schedules: emulated.run(pairs, schedules),
}


def chosen(_: click.Context, option: click.Parameter, value: str) -> list[str]:
    """The names given, in the order of the table."""
    known = list(SECTIONS if option.name == "only" else TORCH)
    names = [name.strip() for name in value.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"{', '.join(map(repr, unknown))}; choose from {', '.join(known)}")
    return [name for name in known if name in names]


@click.command()
@click.option("--only", default=",".join(SECTIONS), callback=chosen, help="Sections, by comma.")
@click.option("--schedules", default=",".join(TORCH), callback=chosen, help="Schedules, by comma.")
@click.option(
    "--pairs",
    type=click.IntRange(min=1),
    default=PAIRS,
    show_default=True,
    help="Paired measurements per comparison; fewer than the default decide nothing.",
)
@click.option("--json", "path", help="Also write the rows to this file.")
def main(only: list[str], schedules: list[str], pairs: int, path: str | None) -> None:
    """Measure, and print one table with verdicts; every row also when it is there."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as each rank has
    on = machine()
    click.echo(on)
    rows: list[Row] = []
    for name in only:
        click.echo(f"{name} ...")
        for row in SECTIONS[name](pairs, schedules):
            click.echo("  " + "  ".join(cell for cell in row.cells[1:] if cell))
            rows.append(row)
            if path is not None:
                write(path, rows, on)
    click.echo("\n" + table(rows))
    if pairs < PAIRS:
        click.echo(f"only {pairs} pairs: the verdicts on times decide nothing")
    click.echo(on)


if __name__ == "__main__":
    main()
