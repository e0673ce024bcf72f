"""`piper bench`: suites are chosen and run, what they leave is a file, a picture and a page."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks import page, suites
from benchmarks.paired import Comparison
from benchmarks.pictures import draw, panels
from benchmarks.report import Row, ratio_row
from benchmarks.suites import SUITES, Suite
from piper_dynamo.cli import main
from piper_dynamo.look import bench
from tests.source_tree import ROOT

FASTER = Comparison(first=(0.9, 0.9, 0.8), second=(1.0, 1.0, 1.0))
SLOWER = Comparison(first=(2.0, 2.0, 2.0), second=(1.0, 1.0, 1.0))


def rows(pairs: int) -> Iterator[Row]:
    yield ratio_row("times", f"faster, {pairs} pairs", FASTER, 1.0, "it")
    yield ratio_row("times", "slower", SLOWER, 1.0, "it")
    yield Row(section="times", what="alone", figures="3 s", data={"ours": 3.0, "unit": "s"})
    yield Row(section="times", what="counted", figures="4 messages", data={"messages": 4})


def refused(pairs: int) -> Iterator[Row]:
    raise click.ClickException("needs root")
    yield


TRIED = {
    "one": Suite(about="The first.", sections={"times": rows, "links": refused}),
    "other": Suite(about="The second.", sections={"times": rows}),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where two small suites leave what they found."""
    monkeypatch.setattr(suites, "SUITES", TRIED)
    return tmp_path / "results"


def test_a_suite_leaves_numbers_and_a_picture(folder: Path) -> None:
    done = CliRunner().invoke(suites.main, ["one", "--pairs", "3", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    assert "NOT HELD" in done.output
    assert sorted(path.name for path in folder.iterdir()) == ["one.json", "one.png"]
    found = json.loads((folder / "one.json").read_text())
    assert found["command"] == "piper bench one --pairs 3"
    assert (found["pairs"], found["suite"]) == (3, "one")
    faster, slower, alone, counted, not_run = found["rows"]
    shown = ("name", "ours", "theirs", "unit", "ratio", "low", "high", "limit", "held")
    want = ("faster, 3 pairs", 0.9, 1.0, "s", 0.9, 0.8, 0.9, 1.0, True)
    assert tuple(faster[name] for name in shown) == want
    assert (slower["ratio"], slower["held"], slower["bar"]) == (2.0, False, "<= 1.00 x it")
    assert (alone["ours"], alone["ratio"], alone["held"]) == (3.0, None, None)
    assert (counted["ours"], counted["figures"]) == (None, "4 messages")
    assert (not_run["section"], not_run["figures"]) == ("links", "needs root")
    with Image.open(folder / "one.png") as picture:
        assert picture.width > 500
        assert len(picture.convert("RGB").getcolors(2**24) or ()) > 20


def test_sections_are_chosen(folder: Path) -> None:
    words = ["--only", "times", "--out", str(folder)]
    assert CliRunner().invoke(suites.main, words).exit_code == 0
    found = [json.loads((folder / f"{name}.json").read_text()) for name in TRIED]
    assert [len(one["rows"]) for one in found] == [4, 4]
    assert found[0]["command"] == "piper bench one --only times"


@pytest.mark.parametrize(
    ("words", "told"),
    [(["nothing"], "'nothing'; choose from one, other"), (["--only", "time"], "links, times")],
)
def test_unknown_names_are_refused(folder: Path, words: list[str], told: str) -> None:
    done = CliRunner().invoke(suites.main, [*words, "--out", str(folder)])
    assert done.exit_code == 2
    assert told in done.output


def test_panels_are_by_what_they_show() -> None:
    found = panels([row.record("one") for row in rows(3)])
    assert {label: len(shown) for label, shown in found.items()} == {"ours / theirs": 2, "s": 1}


def test_results_without_figures_are_drawn(tmp_path: Path) -> None:
    found = suites.results_of("one", [], on="a machine", how="piper bench", pairs=1)
    draw(found, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_the_page_has_every_suite(folder: Path) -> None:
    CliRunner().invoke(suites.main, ["one", "--pairs", "3", "--out", str(folder)])
    text = page.text(folder)
    assert "## one\n\nThe first.\n\n`piper bench one --pairs 3`" in text
    row = (
        "| times: faster, 3 pairs | 900 ms | 1 s | 0.900 [0.800, 0.900] | &lt;= 1.00 x it | held |"
    )
    assert row in text
    assert "| times: counted: 4 messages |" in text
    assert "**not held**" in text
    assert "No results yet: `piper bench other`" in text


def test_the_page_is_that_of_the_results() -> None:
    """`make docs` writes it again."""
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page.text()


def test_results_are_of_suites_that_there_are() -> None:
    found = {path.stem for path in page.RESULTS.glob("*.json")}
    assert found <= SUITES.keys()
    assert {path.stem for path in page.RESULTS.glob("*.png")} == found


def test_the_command_runs_the_suites_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def run(command: list[str], **named: object) -> subprocess.CompletedProcess[str]:
        called.append([*command, str(named["cwd"])])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    words = ["bench", "plan", "zero", "--only", "proof", "--pairs", "2"]
    assert CliRunner().invoke(main, words).exit_code == 3
    asked = ["-m", "benchmarks.suites", "plan", "zero", "--only", "proof", "--pairs", "2"]
    assert called == [[sys.executable, *asked, str(ROOT)]]


def test_without_the_repository_the_command_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    done = CliRunner().invoke(main, ["bench"])
    assert done.exit_code == 1
    assert "the benchmarks are not here" in done.output
    assert "pip install -e ." in done.output
    shutil.rmtree(tmp_path)
