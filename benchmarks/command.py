"""What the benchmark commands share: choosing sections, running them, one table at the end."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import torch

from benchmarks.paired import PAIRS
from benchmarks.report import Row, machine, table, write

Names = Callable[[click.Context, click.Parameter, str], list[str]]


def names_of(known: Sequence[str]) -> Names:
    """A callback for an option that takes names by comma; they come back in the order known."""

    def chosen(_: click.Context, __: click.Parameter, value: str) -> list[str]:
        names = [name.strip() for name in value.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown:
            wrong = ", ".join(map(repr, unknown))
            raise click.BadParameter(f"{wrong}; choose from {', '.join(known)}")
        return [name for name in known if name in names]

    return chosen


def only(known: Sequence[str]) -> Callable[[Any], Any]:
    """The option --only."""
    return click.option(
        "--only", default=",".join(known), callback=names_of(known), help="Sections, by comma."
    )


def pairs() -> Callable[[Any], Any]:
    """The option --pairs."""
    return click.option(
        "--pairs",
        type=click.IntRange(min=1),
        default=PAIRS,
        show_default=True,
        help="Paired measurements per comparison; fewer than the default decide nothing.",
    )


def json_path() -> Callable[[Any], Any]:
    """The option --json."""
    return click.option("--json", "path", help="Also write the rows to this file.")


def of_sections(sections: Mapping[str, Callable[[], Iterator[Row]]]) -> click.Command:
    """The command of a benchmark whose sections take no options."""

    @click.command()
    @only(list(sections))
    @json_path()
    def main(only: list[str], path: str | None) -> None:
        """Measure, and print one table with verdicts; every row also when it is there."""
        measure({name: sections[name] for name in only}, PAIRS, path)

    return main


def measure(
    sections: Mapping[str, Callable[[], Iterator[Row]]], num_pairs: int, path: str | None
) -> tuple[str, list[Row]]:
    """Run the sections, and print one table with verdicts; every row also when it is there.

    Returns:
        What it was measured on, and the rows.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as each rank has
    on = machine()
    click.echo(on)
    rows: list[Row] = []
    for name, section in sections.items():
        click.echo(f"{name} ...")
        for row in section():
            click.echo("  " + "  ".join(cell for cell in row.cells[1:] if cell))
            rows.append(row)
            if path is not None:
                write(path, rows, on)
    click.echo("\n" + table(rows))
    if num_pairs < PAIRS:
        click.echo(f"only {num_pairs} pairs: the verdicts on times decide nothing")
    click.echo(on)
    return on, rows
