"""The page of schedules is what its generator writes now, and says the same thing twice."""

import re

import pytest

from docs.build import PURPOSES, facts, text
from docs.figures import CLOSED_FORMS, MICROBATCHES, RANKS, allowed, figures
from piper_dynamo.schedules import SCHEDULES
from tests.source_tree import ROOT

PAGE = ROOT / "docs" / "schedules.md"


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch):
    """Other tests run the plans of these schedules against one process; here they are only read."""
    monkeypatch.setenv("PIPER_VERIFY", "1")


def test_page_is_what_the_generator_writes():
    assert PAGE.read_text(encoding="utf-8") == text(), "run `make docs`"


def pictures_of(page: str) -> list[str]:
    """The pictures that a page of the documents shows."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)


def test_pictures_are_there_and_small():
    named = pictures_of("schedules.md")
    assert sorted(named) == sorted(f"schedules/{name}.png" for name in SCHEDULES)
    others = pictures_of("pictures.md")
    assert others == ["pictures/timeline.png"]
    for name in (*named, *others):
        picture = (PAGE.parent / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 60_000, name


@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_time_is_the_closed_form(name: str):
    assert figures(name).idle == pytest.approx(figures(name).closed_form)


def test_live_forwards():
    """Those of the orders (`test_schedules.py`), less where a pair's backward can run first."""
    live = {name: figures(name).live for name in SCHEDULES}
    assert live == {
        "gpipe": (8, 8, 8, 8),
        "one_f_one_b": (4, 3, 2, 1),
        "interleaved_1f1b": (5.5, 4.5, 3.5, 2.5),
        "zb_h1": (4, 4, 4, 4),
        "zbv": (4, 4, 4, 4),
        "dualpipev": (4, 4, 4, 4.5),
        "dualpipe": (4, 5, 5, 4),
    }


def test_every_schedule_is_described():
    assert set(SCHEDULES) == set(PURPOSES) == set(CLOSED_FORMS)
    for name in SCHEDULES:
        assert list(facts(name)) == ["Idle", "Memory", "Least number of microbatches", "Source"]
        assert all(facts(name).values())


def test_allowed_numbers_of_microbatches():
    assert (RANKS, MICROBATCHES) == (4, 8)
    assert allowed("gpipe") == "1 to 16"
    assert allowed("interleaved_1f1b") == "1 to 8, 10, 12, 15, 16"
    assert allowed("dualpipev") == "8 to 16"
    assert allowed("dualpipe") == "8, 10, 12, 14, 16"
