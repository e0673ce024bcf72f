"""Every report is tried, every kind by other inputs, too, and the page of both is current."""

import re

import pytest

from docs import tables
from tests.faults import kinds
from tests.faults.kinds import DEFERRED, KINDS
from tests.source_tree import ROOT

# The numbers have gaps.
CASES = {
    *("R01", "R03", "R05", "R06", "R08", "R09", "R10", "R12", "R13", "R14", "R15", "R16", "R18"),
    *("R19", "R21", "R22", "R24", "R28", "R29", "R30", "R31", "R32", "R33", "R35", "R36", "R37"),
    *("R38", "R40", "R43", "R45", "R47", "R48", "R49", "R50", "R52", "R53", "R54", "R56", "R57"),
    *("R58", "R59", "R62", "R63", "R64", "R66", "R67", "R68", "R69", "R72", "R73", "R74", "R77"),
    "R78",
}


def test_every_case_has_a_test_and_a_kind() -> None:
    """No number is forgotten, and none is made up."""
    assert set(kinds.case_tests()) == CASES
    assert {case for kind in KINDS for case in kind.cases} == CASES
    assert set(DEFERRED) == {case for kind in KINDS if kind.deferred for case in kind.cases}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.split(":")[0])
def test_every_kind_has_other_inputs(kind: kinds.Kind) -> None:
    """At least two tests beside the cases, each of which exists and is none of a case's own."""
    of_cases = {name for found in kinds.case_tests().values() for _, name, _ in found}
    for one in kind.others:
        path, name = kinds.full(one)
        names = [n for n, _ in kinds.tests_of(path)]
        assert name in names or (name == "*" and names), one
        assert name not in of_cases or kind.deferred, one
    assert len(kind.others) >= 2 or kind.deferred


def test_a_tests_name_says_what_is_right() -> None:
    """Case numbers are in docstrings and not in names."""
    for found in kinds.case_tests().values():
        for _, name, told in found:
            assert not re.search(r"_r\d\d", name)
            assert told


def test_the_page_is_what_the_tests_say() -> None:
    """The page of faults is written by `make docs` from these docstrings."""
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert page == tables.faults(), "run `make docs`"
