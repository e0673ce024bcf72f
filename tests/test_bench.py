"""`piper bench`: suites are chosen and run, what they leave is a file, a picture and a page."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from benchmarks import page, real, suites
from benchmarks.ablations import BUCKET_MB, in_buckets, outline
from benchmarks.paired import Comparison
from benchmarks.pictures import draw, panels
from benchmarks.pipeline import JOB
from benchmarks.predicted import stages_by_work
from benchmarks.report import Row, ratio_row
from benchmarks.suites import Suite
from piper_dynamo.cli import main
from piper_dynamo.look import bench
from tests.source_tree import ROOT

FASTER = Comparison(first=(0.9,) * 8 + (0.8,) * 7, second=(1.0,) * 15)
SLOWER = Comparison(first=(2.0,) * 15, second=(1.0,) * 15)
FEW = Comparison(first=(0.9, 0.9, 0.8), second=(1.0, 1.0, 1.0))


def rows(pairs: int) -> Iterator[Row]:
    yield ratio_row("times", f"faster, {pairs} pairs", FASTER, 1.0, "it")
    yield ratio_row("times", "slower", SLOWER, 1.0, "it")
    yield Row(section="times", what="alone", figures="3 s", data={"ours": 3.0, "unit": "s"})
    yield Row(section="times", what="counted", figures="4 messages", data={"messages": 4})


def few(pairs: int) -> Iterator[Row]:
    yield ratio_row("few", "faster", FEW, 1.0, "it")
    yield ratio_row("few", "as many as it takes", FEW, 1.0, "it", needed=3)
    yield Row(
        section="few",
        what="predicted",
        figures="2 s",
        bar="within 10%",
        held=False,
        data={"ours": 2.0, "other": 3.0, "unit": "s", "measured": "once"},
    )


def refused(pairs: int) -> Iterator[Row]:
    raise click.ClickException("needs root")
    yield


def broken(pairs: int) -> Iterator[Row]:
    yield Row(section="broken", what="done before", figures="1 s", data={"ours": 1.0, "unit": "s"})
    raise AssertionError("the losses differ\n  1.0 and 2.0")


TRIED = {
    "one": Suite(about="The first.", sections={"times": rows, "few": few, "links": refused}),
    "other": Suite(about="The second.", sections={"times": rows}),
    "third": Suite(about="The third.", sections={"broken": broken, "times": rows}),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where two small suites leave what they found."""
    monkeypatch.setattr(suites, "SUITES", TRIED)
    return tmp_path / "results"


def run(*words: str, folder: Path) -> Result:
    return CliRunner().invoke(suites.main, [*words, "--out", str(folder)])


def results_of(name: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_a_suite_leaves_numbers_and_a_picture(folder: Path) -> None:
    done = run("one", "--pairs", "3", folder=folder)
    assert done.exit_code == 0, done.output
    assert "NOT HELD" in done.output
    assert "(3 pairs: decides nothing)" in done.output
    assert sorted(path.name for path in folder.iterdir()) == ["one.json", "one.png"]
    sections = results_of("one", folder)["sections"]
    assert list(sections) == ["times", "few", "links"]
    times = sections["times"]
    assert times["command"] == "piper bench one --only times --pairs 3"
    assert times["pairs"] == 3
    assert {"date", "machine", "commit"} <= times.keys()
    faster, slower, alone, counted = times["rows"]
    shown = ("name", "ours", "theirs", "unit", "ratio", "low", "high", "limit", "held", "measured")
    want = ("faster, 3 pairs", 0.9, 1.0, "s", 0.9, 0.8, 0.9, 1.0, True, "15 pairs")
    assert tuple(faster[name] for name in shown) == want
    assert (slower["ratio"], slower["held"], slower["bar"]) == (2.0, False, "<= 1.00 x it")
    assert (alone["ours"], alone["ratio"], alone["held"]) == (3.0, None, None)
    assert (counted["ours"], counted["figures"]) == (None, "4 messages")
    (not_run,) = sections["links"]["rows"]
    assert (not_run["section"], not_run["figures"]) == ("links", "needs root")
    with Image.open(folder / "one.png") as picture:
        assert picture.width > 500
        assert len(picture.convert("RGB").getcolors(2**24) or ()) > 20


def test_too_few_pairs_decide_nothing(folder: Path) -> None:
    """What is predicted has no ratio, since less of it is not better."""
    run("one", "--only", "few", folder=folder)
    faster, enough, predicted = results_of("one", folder)["sections"]["few"]["rows"]
    assert (faster["held"], faster["decides"], faster["measured"]) == (None, False, "3 pairs")
    assert (enough["held"], enough["decides"]) == (True, True)
    assert (predicted["held"], predicted["decides"], predicted["ratio"]) == (False, True, None)
    assert (predicted["ours"], predicted["theirs"], predicted["measured"]) == (2.0, 3.0, "once")


def test_sections_are_chosen(folder: Path) -> None:
    assert run("one", "other", "--only", "times", folder=folder).exit_code == 0
    found = [results_of(name, folder)["sections"] for name in ("one", "other")]
    assert [list(one) for one in found] == [["times"], ["times"]]
    assert found[0]["times"]["command"] == "piper bench one --only times"


def test_a_section_that_is_run_takes_its_own_place_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("one", "--only", "few", folder=folder)
    run("one", "--only", "times", "--pairs", "3", folder=folder)
    sections = results_of("one", folder)["sections"]
    assert {name: one["pairs"] for name, one in sections.items()} == {"times": 3, "few": 15}
    run("one", "--only", "times", "--pairs", "2", folder=folder)
    again = results_of("one", folder)["sections"]
    assert list(again) == ["times", "few"]
    assert again["times"]["pairs"] == 2
    assert again["few"] == sections["few"]
    # Where it cannot be run, what was measured elsewhere stays.
    few_refused = Suite(about="The first.", sections={"times": rows, "few": refused})
    monkeypatch.setattr(suites, "SUITES", {"one": few_refused})
    run("one", folder=folder)
    assert results_of("one", folder)["sections"]["few"] == sections["few"]


def test_a_section_that_fails_loses_nothing(folder: Path) -> None:
    done = run("third", folder=folder)
    assert done.exit_code == 1
    assert "failed: third broken: 1.0 and 2.0\n" in done.output
    sections = results_of("third", folder)["sections"]
    before, failed = sections["broken"]["rows"]
    assert before["figures"] == "1 s"
    assert (failed["name"], failed["held"], failed["figures"]) == ("failed", False, "1.0 and 2.0")
    assert len(sections["times"]["rows"]) == 4
    assert (folder / "third.png").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing"], "'nothing'; choose from one, other, third"),
        (["--only", "time"], "broken, few, links, times"),
    ],
)
def test_unknown_names_are_refused(folder: Path, words: list[str], told: str) -> None:
    done = run(*words, folder=folder)
    assert done.exit_code == 2
    assert told in done.output


def test_panels_are_by_what_they_show() -> None:
    found = panels([row.record("one", "times") for row in (*rows(3), *few(3))])
    assert {label: len(shown) for label, shown in found.items()} == {"ours / theirs": 4, "s": 2}


def test_results_without_figures_are_drawn(tmp_path: Path) -> None:
    draw({"suite": "one", "sections": {}}, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_the_page_has_every_suite(folder: Path) -> None:
    run("one", folder=folder)
    text = page.text(folder)
    assert "## one\n\nThe first.\n\n- times: `piper bench one --only times`, " in text
    assert (
        "| times: faster, 15 pairs | 900.0 ms against 1000.0 ms ratio 0.900 [0.800, 0.900] | "
        "&lt;= 1.00 x it | 15 pairs | held |"
    ) in text
    assert "&lt;= 1.00 x it | 3 pairs | (3 pairs: decides nothing) |" in text
    assert "| times: counted | 4 messages |  |  |  |" in text
    assert "**not held**" in text
    assert "| links: not run | needs root |" in text
    assert "No results yet: `piper bench other`" in text


def test_the_page_is_that_of_the_results() -> None:
    """`make docs` writes it again."""
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page.text()


def test_compiled_schedules_have_a_row_each_and_1f1b_the_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real, "run", lambda ours, theirs, pairs: FASTER)
    found = list(real.compiled(JOB, 15, ["looped_bfs", "one_f_one_b", "zbv"]))
    rows_ = ["looped_bfs", "one_f_one_b", "one_f_one_b, time", "zbv"]
    assert [row.what for row in found] == rows_
    assert [bool(row.bar) for row in found] == [False, True, True, False]


def test_results_are_of_suites_that_there_are() -> None:
    assert page.strays() == []


def test_strays_among_results_are_found(folder: Path) -> None:
    run("one", folder=folder)
    assert page.strays(folder) == []
    (folder / "one.png").rename(folder / "older.png")
    gone = {"suite": "other", "sections": {"gone": {}}}
    for name in ("other", "unknown"):
        (folder / f"{name}.json").write_text(json.dumps(gone))
    assert page.strays(folder) == [
        "unknown.json is of no suite",
        "one.json has no picture",
        "other.json has no picture",
        "unknown.json has no picture",
        "older.png has no results",
        "other.json: no section gone",
    ]


def test_stages_have_as_little_of_the_work_as_they_can() -> None:
    assert stages_by_work(4, 0.0, 2) == ([0, 0, 1, 1], 0.5)
    assert stages_by_work(6, 2.0, 4) == ([0, 0, 1, 1, 2, 2], 0.25)  # the head alone is the last
    stage_of, fullest = stages_by_work(16, 6.0, 16)
    assert sorted(set(stage_of)) == list(range(15))
    assert fullest == 6 / 22


@pytest.mark.slow
def test_buckets_differ_in_their_reductions_alone() -> None:
    (many, cut_s), (one, whole_s) = (outline(in_buckets(size)) for size in (BUCKET_MB, None))
    assert one == 1
    assert many >= 4
    assert cut_s == pytest.approx(whole_s)


def test_the_command_runs_the_suites_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def called_with(command: list[str], **named: object) -> subprocess.CompletedProcess[str]:
        called.append([*command, str(named["cwd"])])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", called_with)
    monkeypatch.chdir(ROOT / "tests")
    words = ["bench", "--out", "there", "plan", "zero", "--only", "proof", "--pairs=2"]
    assert CliRunner().invoke(main, words).exit_code == 3
    asked = ["-m", "benchmarks.suites", "plan", "zero", "--only", "proof", "--pairs=2"]
    asked += ["--out", str(ROOT / "tests" / "there")]
    assert called == [[sys.executable, *asked, str(ROOT)]]


def test_without_the_repository_the_command_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    done = CliRunner().invoke(main, ["bench"])
    assert done.exit_code == 1
    assert "the benchmarks are not here" in done.output
    assert "pip install -e ." in done.output
