"""What the benchmark commands share: choosing sections, running them, one table at the end."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch

from benchmarks.paired import PAIRS
from benchmarks.report import Row, machine, table, write

Section = Callable[..., Iterator[Row]]
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
        show_default=f"{PAIRS}; fewer where each is a job of its own",
        help="Paired measurements per comparison; a row of fewer than it takes decides nothing.",
    )


@dataclass(frozen=True, slots=True)
class Fewer:
    """A section of comparisons that have fewer pairs unless their number is asked for.

    Attributes:
        pairs: How many.
        rows: The section; it takes a number of pairs first.
    """

    pairs: int
    rows: Section

    def __call__(self, pairs: int, *more: Any) -> Iterator[Row]:
        """The section's rows."""
        return self.rows(pairs, *more)


def pairs_of(section: Section, asked: int | None) -> int:
    """How many pairs a section's comparisons have; `asked` is the option --pairs."""
    if asked is not None:
        return asked
    return section.pairs if isinstance(section, Fewer) else PAIRS


def json_path() -> Callable[[Any], Any]:
    """The option --json."""
    return click.option("--json", "path", help="Also write the rows to this file.")


def of_sections(sections: Mapping[str, Section]) -> click.Command:
    """The command of a benchmark whose sections take no options but, those of few pairs, --pairs.

    Without such a section there is no option --pairs.
    """

    def main(only: list[str], path: str | None, pairs: int | None = None) -> None:
        """Measure, and print one table with verdicts; every row also when it is there."""
        measure({name: _bound(sections[name], pairs) for name in only}, path)

    asked = [only(list(sections)), json_path()]
    if any(isinstance(section, Fewer) for section in sections.values()):
        asked.insert(1, pairs())
    for option in reversed(asked):
        main = option(main)
    return click.command(main)


def _bound(section: Section, asked: int | None) -> Callable[[], Iterator[Row]]:
    return partial(section, pairs_of(section, asked)) if isinstance(section, Fewer) else section


def measure(sections: Mapping[str, Callable[[], Iterator[Row]]], path: str | None) -> None:
    """Run the sections, and print one table with verdicts; every row also when it is there."""
    on = begin()
    rows: list[Row] = []
    for name, section in sections.items():
        for row in shown(name, section()):
            rows.append(row)
            if path is not None:
                write(path, rows, on)
    end(rows, on)


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


def end(rows: Sequence[Row], on: str) -> None:
    """All rows as one table, and what was measured on."""
    click.echo("\n" + table(rows))
    click.echo(on)
