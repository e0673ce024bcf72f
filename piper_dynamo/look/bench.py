"""`piper bench`: the benchmarks, which are a part of the repository and not of the package."""

import subprocess
import sys
from pathlib import Path

import click

from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.look.command import Command

ROOT = Path(__file__).resolve().parents[2]


def checkout() -> Path:
    """The repository that this package is part of.

    Raises:
        PiperError: It is installed apart from its repository.
    """
    if not (ROOT / "benchmarks" / "suites.py").exists():
        raise PiperError(
            format_error(
                "the benchmarks are not here",
                {"package": str(ROOT / "piper_dynamo")},
                hint="they are a part of the repository: get it, `pip install -e .` in its folder, "
                "and call piper bench again; or make bench there",
            )
        )
    return ROOT


@click.command(cls=Command)
@click.argument("suites", nargs=-1)
@click.option("--only", help="Sections, by comma.  [default: all of the suites]")
@click.option("--pairs", type=click.IntRange(min=1), help="Paired measurements per comparison.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where files of results and pictures go.  [default: benchmarks/results]",
)
@click.pass_context
def bench(
    ctx: click.Context,
    suites: tuple[str, ...],
    only: str | None,
    pairs: int | None,
    out: Path | None,
) -> None:
    """Measure Piper beside its peers: a table, a file of results and a picture per suite.

    SUITES are names such as pipeline or zero; without any, all are run, which takes hours. Needs
    the repository, whose benchmarks they are, and an idle machine.
    """
    given = {"--only": only, "--pairs": pairs, "--out": None if out is None else out.resolve()}
    words = [word for name, value in given.items() if value is not None for word in (name, value)]
    command = [sys.executable, "-m", "benchmarks.suites", *suites, *map(str, words)]
    ctx.exit(subprocess.run(command, cwd=checkout(), check=False).returncode)
