"""Pipelines measured: time and memory beside torch's, and what Piper itself costs.

make bench-pipeline
make bench-pipeline ARGS="--only real,memory --json results.json"
"""

import functools

import click

from benchmarks import command, compiling, counts, emulated, host, memory, planning, real, steady
from benchmarks.sides import TORCH, built
from piper_dynamo.train.config import Config

# The size that the bars are stated for; smaller ones say little about compute.
JOB = Config(dim=512, layers=8, heads=8, kv_heads=4, seq=256, batch=16, microbatches=8)

# From what is exact or quick to what takes long.
SECTIONS: dict[str, command.Section] = {
    "counts": lambda pairs, schedules: counts.run(JOB, built(schedules)),
    "host": lambda pairs, schedules: host.run(),
    "planning": lambda pairs, schedules: planning.run(),
    "inductor": command.Fewer(compiling.PAIRS, lambda pairs, schedules: compiling.run(pairs)),
    "real": lambda pairs, schedules: real.eager(JOB, pairs, schedules),
    "compiled": lambda pairs, schedules: real.compiled(JOB, pairs, schedules),
    "bound": lambda pairs, schedules: real.bound(JOB, pairs, built(schedules)),
    "memory": command.Fewer(
        memory.PAIRS, lambda pairs, schedules: memory.run(JOB, pairs, built(schedules))
    ),
    "steady": lambda pairs, schedules: steady.run(built(schedules)),
    "emulated": lambda pairs, schedules: emulated.run(pairs, schedules),
    "emulated-8": lambda pairs, schedules: emulated.run(pairs, schedules, emulated.EIGHT),
}


@click.command()
@command.only(list(SECTIONS))
@click.option(
    "--schedules",
    default=",".join(TORCH),
    callback=command.names_of(list(TORCH)),
    help="Schedules, by comma; host, planning and inductor have their own.",
)
@command.pairs()
@command.json_path()
def main(only: list[str], schedules: list[str], pairs: int | None, path: str | None) -> None:
    """Measure, and print one table with verdicts; every row also when it is there."""
    chosen = {
        name: functools.partial(SECTIONS[name], command.pairs_of(SECTIONS[name], pairs), schedules)
        for name in only
    }
    command.measure(chosen, path)


if __name__ == "__main__":
    main()
