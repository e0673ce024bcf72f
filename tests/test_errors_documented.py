"""docs/errors.md has every error that the package raises, and no other."""

import re

import piper_dynamo as piper
from tests.raised import plan_faults, titles
from tests.source_tree import ROOT

TEXT = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `(?P<title>[^`]+)` \| (?P<text>.+) \|$", flags=re.MULTILINE)


def rows() -> dict[str, str]:
    """The documented titles and kinds, with what is said of each."""
    return {found["title"]: found["text"] for found in _ROW.finditer(TEXT)}


def kinds() -> set[str]:
    return {name for name in piper.__all__ if name.startswith("Piper") and name.endswith("Error")}


def test_every_error_is_documented():
    found = titles()
    missing = {title: places for title, places in found.items() if title not in rows()}
    assert not missing, "docs/errors.md lacks\n" + "\n".join(
        f"  {title}   ({', '.join(places)})" for title, places in missing.items()
    )


def test_no_other_error_is_documented():
    assert sorted(set(rows()) - set(titles()) - kinds()) == []
    assert kinds() <= set(rows())


def test_each_stands_once_and_says_something():
    titled = [found["title"] for found in _ROW.finditer(TEXT)]
    assert sorted({t for t in titled if titled.count(t) > 1}) == []
    assert [title for title, text in rows().items() if len(text) < 9] == []


def test_titles_are_found_in_all_their_forms():
    found = titles()
    assert len(found) > 200
    assert any(place.startswith("runtime/") for place in found["rank … failed in …"])
    assert "an order contradicts the dataflow or another order" in found  # chosen by a condition
    assert "this table of actions cannot be run" in found  # a parameter's default
    assert "the plan is unsafe" in found


def test_each_fault_of_a_plan_is_documented():
    """With its text, as the proof has it, in quotes; no other is."""
    quoted = re.findall(r'^\| "([^"]+)" \| .{9,} \|$', TEXT, flags=re.MULTILINE)
    assert len(set(quoted)) == len(quoted)
    found = plan_faults()
    assert len(found) > 40
    assert {line: at for line, at in found.items() if line not in quoted} == {}
    # Put together of what is there and what is to be.
    assert set(quoted) - set(found) == {"the gradient … lacks …"}
