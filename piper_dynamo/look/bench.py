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


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SUITES]... [OPTIONS]...")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where files of results and pictures go.  [default: benchmarks/results]",
)
@click.pass_context
def bench(ctx: click.Context, words: tuple[str, ...], out: Path | None) -> None:
    """Measure Piper beside its peers: a table, a file of results and a picture per suite.

    SUITES are names such as pipeline or zero; without any, all are run, which takes hours. Needs
    the repository, whose benchmarks they are, and an idle machine. OPTIONS are those of the
    benchmarks, which are given them as they are: --only SECTIONS by comma, and --pairs NUMBER.
    """
    there = [] if out is None else ["--out", str(out.resolve())]  # they run in another folder
    command = [sys.executable, "-m", "benchmarks.suites", *words, *there]
    ctx.exit(subprocess.run(command, cwd=checkout(), check=False).returncode)
