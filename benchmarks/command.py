"""What the benchmark commands share: choosing sections, running them, one table at the end."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import torch

from benchmarks.paired import PAIRS
from benchmarks.report import Row, machine, table, write

Names = Callable[[click.Context, click.Parameter, str], list[str]]


def in_order(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names, in the order known.

    Raises:
        BadParameter: Some are none of these.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        wrong = ", ".join(map(repr, unknown))
        raise click.BadParameter(f"{wrong}; choose from {', '.join(known)}")
    return [name for name in known if name in names]


def by_comma(text: str) -> list[str]:
    """The names in a text."""
    return [name.strip() for name in text.split(",")]


def names_of(known: Sequence[str]) -> Names:
    """A callback for an option that takes names by comma; they come back in the order known."""
    return lambda _, __, value: in_order(by_comma(value), known)


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
) -> None:
    """Run the sections, and print one table with verdicts; every row also when it is there."""
    on = begin()
    rows: list[Row] = []
    for name, section in sections.items():
        for row in shown(name, section()):
            rows.append(row)
            if path is not None:
                write(path, rows, on)
    end(rows, num_pairs, on)


def begin() -> str:
    """Be as each rank is; what is measured on."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as each rank has
    on = machine()
    click.echo(on)
    return on


def shown(name: str, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of a section, each printed when it is there."""
    click.echo(f"{name} ...")
    for row in rows:
        click.echo("  " + "  ".join(cell for cell in row.cells[1:] if cell))
        yield row


def end(rows: Sequence[Row], num_pairs: int, on: str) -> None:
    """All rows as one table."""
    click.echo("\n" + table(rows))
    if num_pairs < PAIRS:
        click.echo(f"only {num_pairs} pairs: the verdicts on times decide nothing")
    click.echo(on)
