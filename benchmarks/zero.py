"""Replicas measured: memory and time of ZeRO 0 to 3 beside torch's FSDP2 and DDP.

make bench-zero
make bench-zero ARGS="--only counts,memory --levels 3 --json results.json"
"""

import functools

import click

from benchmarks import command, zero_counts, zero_hidden, zero_memory, zero_real
from benchmarks.zero_sides import Job
from piper_dynamo.train.config import Config

# Parameters, gradients and optimizer state are nearly all that a rank holds.
CONFIG = Config(dim=1024, layers=8, heads=16, kv_heads=8, seq=64, batch=4, microbatches=4)
JOB = Job(config=CONFIG)

SECTIONS: dict[str, command.Section] = {
    "counts": lambda pairs, levels: zero_counts.run(JOB, levels),
    "ddp": lambda pairs, levels: zero_real.ddp(JOB, pairs),
    "fsdp": lambda pairs, levels: zero_real.fsdp(JOB, pairs),
    "time": lambda pairs, levels: zero_real.levels(JOB, pairs, levels),
    "memory": command.Fewer(
        zero_memory.PAIRS, lambda pairs, levels: zero_memory.levels(JOB, pairs, levels)
    ),
    "hidden": lambda pairs, levels: zero_hidden.hidden(JOB, pairs, levels),
    "largest": lambda pairs, levels: zero_memory.fitting(JOB, [z for z in levels if z >= 2]),
}


@click.command()
@command.only(list(SECTIONS))
@click.option(
    "--levels",
    default="0,1,2,3",
    callback=command.names_of(["0", "1", "2", "3"]),
    help="ZeRO levels, by comma.",
)
@command.pairs()
@command.json_path()
def main(only: list[str], levels: list[str], pairs: int | None, path: str | None) -> None:
    """Measure, and print one table with verdicts; every row also when it is there."""
    zeros = [int(level) for level in levels]
    chosen = {
        name: functools.partial(SECTIONS[name], command.pairs_of(SECTIONS[name], pairs), zeros)
        for name in only
    }
    command.measure(chosen, path)


if __name__ == "__main__":
    main()
