"""Names of tasks: the text form is strict in both directions."""

import string
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_dynamo.errors import PiperSyntaxError
from piper_dynamo.ir.task import Kind, Pass, RegionId, Task, TaskName, is_tag_name

MANY = settings(max_examples=max(200, settings.default.max_examples))
LETTERS = string.ascii_letters + "_"

tag_names = (
    st.tuples(
        st.sampled_from(LETTERS),
        st.text(LETTERS + string.digits, max_size=4),
        st.sampled_from(LETTERS),
    )
    .map("".join)
    .filter(is_tag_name)
) | st.sampled_from([c for c in LETTERS if c != "v"])

regions = st.builds(
    lambda tags, visit: RegionId(tags=tuple(tags.items()), visit=visit),
    st.dictionaries(tag_names, st.integers(0, 10**6), max_size=4),
    st.integers(0, 20),
)
names = st.builds(
    lambda which, region, mb: TaskName(which=which, region=region, mb=mb),
    st.sampled_from(Pass),
    regions,
    st.none() | st.integers(0, 10**6),
)


@MANY
@given(names)
def test_text_round_trip(name: TaskName):
    assert TaskName.parse(str(name)) == name


@MANY
@given(names, names)
def test_unlike_names_have_unlike_texts(one: TaskName, other: TaskName):
    assert (str(one) == str(other)) == (one == other)


@MANY
@given(st.data())
def test_what_parses_is_written_that_way(data: st.DataObject):
    """Near misses: a name with a character changed, added or taken away."""
    text = str(data.draw(names))
    at = data.draw(st.integers(0, len(text)))
    drop = data.draw(st.integers(0, 2))
    text = text[:at] + data.draw(st.text("FBIWPv.MB019x \n٣", max_size=2)) + text[at + drop :]
    parsed = None
    with suppress(PiperSyntaxError):
        parsed = TaskName.parse(text)
    assert parsed is None or str(parsed) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F.",
        "FF.PP0",
        "f.PP0",
        "G.PP0.MB1",
        "F.PP",
        "F.0",
        "F.PP0.MB3x",
        "F.PP0.MB3 ",
        "F.PP0.MB3\n",
        " F.PP0",
        "F..PP0",
        "F PP0",
        "F.PP-1",
        "F.PP٣",
    ],
)
def test_what_is_no_task_is_refused(text: str):
    with pytest.raises(PiperSyntaxError, match="not a task"):
        TaskName.parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("F.PP00.MB1", "the task is written 'F.PP0.MB1'"),
        ("F.PP0.MB01", "the task is written 'F.PP0.MB1'"),
        ("F.PP0.v0", "the task is written 'F.PP0'"),
        ("F.MB0.PP1", "MB comes once, last"),
        ("F.PP0.MB1.MB2", "MB comes once, last"),
        ("F.v1.PP0", "expected"),
        ("F.PP0.v1.MB0", "expected"),
    ],
)
def test_another_way_to_write_a_task_is_refused(text: str, reason: str):
    with pytest.raises(PiperSyntaxError, match="not a task") as caught:
        TaskName.parse(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["F.PASS0", "F.PP0.PP1", "F.PP0.PP0.MB1"])
def test_tags_that_no_region_can_have_are_refused(text: str):
    """PASS is no annotation, and an annotation nested in one of its name replaces it."""
    with pytest.raises(PiperSyntaxError, match="not a task"):
        TaskName.parse(text)


@pytest.mark.parametrize("name", ["PP", "a", "_", "V", "vv", "a1b", "MBs", "stage_"])
def test_tag_names(name: str):
    assert is_tag_name(name)
    region = RegionId(tags=((name, 7),))
    assert TaskName.parse(f"F.{name}7").region == region


@pytest.mark.parametrize("name", ["", "v", "MB", "PASS", "PP0", "1a", "a.b", "a b", "é", "PP\n"])
def test_what_cannot_be_a_tag(name: str):
    assert not is_tag_name(name)


def test_tags_are_what_filters_match():
    name = TaskName.parse("BI.PP1.EP2.MB3.v4")
    assert dict(name.tags) == {"PP": 1, "EP": 2, "MB": 3, "PASS": "BI"}
    assert name.region == RegionId(tags=(("PP", 1), ("EP", 2)), visit=4)
    assert str(name.with_pass(Pass.BW)) == "BW.PP1.EP2.MB3.v4"


def test_records_are_named_by_what_they_do():
    name = TaskName.parse("F.PP0.MB1")
    assert str(Task(kind=Kind.COMPUTE, name=name)) == "F.PP0.MB1"
    assert str(Task(kind=Kind.SEND, name=name, label="h")) == "send.F.PP0.MB1.h"
    assert str(Task(kind=Kind.LOSS, label="loss")) == "loss.loss"
    assert str(RegionId(tags=())) == "all"
