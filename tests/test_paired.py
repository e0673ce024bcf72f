"""The benchmarks' protocol: variants in turn, intervals of ratios, verdicts, numbers of pairs."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import command, suites
from benchmarks.command import Fewer, of_sections, pairs_of
from benchmarks.paired import PAIRS, Comparison, compare
from benchmarks.report import Row, ratio_row


def of_ratios(*ratios: float) -> Comparison:
    return Comparison(first=ratios, second=(1.0,) * len(ratios))


def test_variants_are_measured_in_turn():
    order: list[str] = []

    def one(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = compare(lambda: one("A"), lambda: one("B"), pairs=5)
    assert "".join(order) == "ABBAABBAAB"
    assert found == Comparison(first=(1.0, 4.0, 5.0, 8.0, 9.0), second=(2.0, 3.0, 6.0, 7.0, 10.0))


def test_pairs_are_compared_and_not_all_of_one_with_all_of_the_other():
    """The machine slows down by half, and the ratio stays."""
    found = Comparison(first=(1.0, 2.0, 3.0), second=(2.0, 4.0, 6.0))
    assert (found.ratio, found.interval()) == (0.5, (0.5, 0.5))


_ratios = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20)


@given(_ratios)
def test_the_interval_has_the_median_in_it(ratios: list[float]):
    found = of_ratios(*ratios)
    low, high = found.interval()
    assert min(ratios) <= low <= found.ratio <= high <= max(ratios)
    assert found.ratio == statistics.median(found.ratios)
    assert found.interval() == (low, high)  # drawn alike each time


def test_the_interval_of_three_pairs_is_their_range():
    assert of_ratios(1.0, 0.8, 1.3).interval() == (0.8, 1.3)


def test_more_pairs_make_the_interval_narrower():
    few, many = ([0.9, 1.0, 1.1] * count for count in (1, 20))
    assert of_ratios(*many).interval() == (1.0, 1.0)
    assert of_ratios(*few).interval() == (0.9, 1.1)


@pytest.mark.parametrize(("ratio", "held"), [(1.029, True), (1.031, False), (0.5, True)])
def test_a_bar_is_held_within_three_per_cent(ratio: float, held: bool):
    assert of_ratios(*[ratio] * PAIRS).holds(1.0) is held
    assert of_ratios(*[ratio * 0.6] * PAIRS).holds(0.6) is held


def test_the_far_end_of_the_interval_decides_and_not_the_median():
    found = of_ratios(*[0.9] * 8, *[1.2] * 7)
    assert found.ratio == 0.9
    assert found.interval() == (0.9, 1.2)
    assert not found.holds(1.0)
    assert found.holds(1.2)


def test_what_is_told_is_what_was_measured():
    found = Comparison(first=(0.3, 0.1, 0.2), second=(0.2, 0.2, 0.2))
    assert found.text() == "   200.0 ms against    200.0 ms   ratio 1.000 [0.500, 1.500]"
    told = found.figures(limit=1.0)
    assert told["first"] == (0.3, 0.1, 0.2)
    assert (told["ours"], told["theirs"], told["limit"]) == (0.2, 0.2, 1.0)


# Numbers of pairs


def paired(pairs: int) -> Iterator[Row]:
    found = of_ratios(*[0.9] * pairs)
    yield ratio_row("few", f"{pairs} pairs", found, 1.0, "it", needed=3)


def alone() -> Iterator[Row]:
    yield Row(section="alone", what="once", figures="1 s")


def test_few_pairs_are_as_many_as_are_asked_for():
    section = Fewer(3, paired)
    assert [pairs_of(section, asked) for asked in (None, 1, 15)] == [3, 1, 15]
    assert [pairs_of(paired, asked) for asked in (None, 1, 20)] == [PAIRS, 1, 20]


@pytest.mark.parametrize(
    ("asked", "pairs"), [((), 3), (("--pairs", "3"), 3), (("--pairs", "15"), 15)]
)
def test_a_benchmark_takes_the_number(asked: tuple[str, ...], pairs: int):
    main = of_sections({"few": Fewer(3, paired), "alone": alone})
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert f"{pairs} pairs" in done.output
    assert "held" in done.output
    assert "nothing" not in done.output  # it decides, with as many as it needs


def test_the_table_says_which_rows_decide_nothing():
    done = CliRunner().invoke(of_sections({"few": Fewer(3, paired)}), ["--pairs", "2"])
    assert done.exit_code == 0, done.output
    assert "(2 pairs: decides nothing)" in done.output.splitlines()[-2]


def test_where_no_section_has_pairs_their_number_is_no_option():
    done = CliRunner().invoke(of_sections({"alone": alone}), ["--pairs", "3"])
    assert done.exit_code == 2
    assert "No such option" in done.output


@pytest.mark.parametrize(("asked", "pairs"), [((), 3), (("--pairs", "15"), 15)])
def test_a_suite_takes_the_number(
    asked: tuple[str, ...], pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tried = suites.Suite(about="It.", sections={"few": Fewer(3, paired)})
    monkeypatch.setattr(suites, "SUITES", {"one": tried})
    done = CliRunner().invoke(suites.main, [*asked, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "one.json").read_text())["sections"]["few"]
    assert (found["pairs"], found["rows"][0]["measured"]) == (pairs, f"{pairs} pairs")
    assert found["command"] == " ".join(["piper bench one --only few", *asked])


def test_too_few_of_the_few_decide_nothing():
    (row,) = Fewer(3, paired)(2)
    assert row.held
    assert row.verdict is None


def test_fewer_than_one_pair_is_refused():
    main = of_sections({"few": Fewer(3, paired)})
    assert CliRunner().invoke(main, ["--pairs", "0"]).exit_code == click.UsageError.exit_code
    assert command.PAIRS == 15
