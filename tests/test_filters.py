"""Filters and meshes: what they match, how they print, what they refuse."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

import piper_dynamo as piper
from piper_dynamo.filters import Filter
from piper_dynamo.ir.task import TaskName

# ---- filters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "yes", "no"),
    [
        ({}, ["F.PP0.MB0", "BW.EP1"], []),
        ({"PP": 0}, ["F.PP0.MB3", "BW.PP0.EP1"], ["F.PP1", "F.EP0"]),
        ({"PP": "*"}, ["F.PP7"], ["F.EP7"]),
        ({"PP": [0, 2]}, ["F.PP0", "F.PP2"], ["F.PP1"]),
        ({"PP": 0, "MB": range(2)}, ["F.PP0.MB1"], ["F.PP0.MB2", "F.PP0", "F.PP1.MB0"]),
        ({"PASS": "B"}, ["B.PP0"], ["BI.PP0", "BW.PP0", "F.PP0"]),
        ({"PASS": ["BI", "BW"]}, ["BI.PP0", "BW.PP0"], ["B.PP0"]),
        ({"PASS": "*"}, ["BI.PP0", "F.PP0"], []),
    ],
)
def test_filter_matches(wanted: Any, yes: list[str], no: list[str]):
    made = Filter(wanted)
    assert [name for name in yes + no if made.matches(TaskName.parse(name).tags)] == yes


def test_filter_allows_one_tag_at_a_time():
    made = Filter({"PP": [0, 2], "MB": "*"})
    assert made.allows("PP", 2)
    assert not made.allows("PP", 1)
    assert made.allows("MB", 9)
    assert made.allows("EP", 9)  # not asked for


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"PP": 0, "MB": 1}, {"MB": 1, "PP": 0}),
        ({"MB": range(3)}, {"MB": [2, 0, 1, 1]}),
        ({"MB": [4]}, {"MB": 4}),
        ({"PASS": ["BW", "F"]}, {"PASS": ("F", "BW")}),
        ({"PP": {1, 0}}, {"PP": [0, 1]}),
    ],
)
def test_filters_compare_by_what_they_ask_for(one: Any, other: Any):
    assert Filter(one) == Filter(other)
    assert hash(Filter(one)) == hash(Filter(other))
    assert repr(Filter(one)) == repr(Filter(other))


def test_filter_of_a_filter_is_the_same():
    assert Filter(Filter({"PP": 0})) == Filter({"PP": 0})
    assert Filter({}) != Filter({"PP": 0})
    assert not Filter({})


def test_filters_print_as_dicts():
    shown = [
        repr(Filter(wanted))
        for wanted in (
            {},
            {"PASS": "F", "MB": 1, "EP": "*", "PP": 0},
            {"MB": range(8)},
            {"MB": range(2, 5)},
            {"MB": [1, 3, 5], "PASS": ["F", "B"]},
        )
    ]
    assert_expected_inline(
        "\n".join(shown),
        """\
{}
{"PP": 0, "EP": "*", "MB": 1, "PASS": "F"}
{"MB": range(8)}
{"MB": range(2, 5)}
{"MB": [1, 3, 5], "PASS": ["F", "B"]}""",
    )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([("PP", 0)], "a filter is a dict such as {'PP': 0}, not a list"),
        (None, "a filter is a dict such as {'PP': 0}, not a NoneType"),
        ({"PP": "0"}, "'PP': '0': write 0"),
        ({"PP": "all"}, "'PP': 'all': an index is a whole number; \"*\" is any"),
        ({"PP": True}, "'PP': True: must be a whole number of at least 0"),
        ({"PP": -1}, "'PP': -1: must be a whole number of at least 0"),
        ({"PP": 0.5}, "'PP': 0.5: must be a whole number of at least 0"),
        ({"PP": []}, "'PP': []: must be a whole number of at least 0"),
        ({"PP": [0, True]}, "'PP': [0, True]: must be a whole number of at least 0"),
        ({"PP": None}, "'PP': None: must be a whole number of at least 0"),
        ({"layer1": 0}, "'layer1': 0: a tag is a name that ends in a letter"),
        ({0: 0}, "0: 0: a tag is a name that ends in a letter"),
        ({"PASS": "FWD"}, '\'PASS\': \'FWD\': PASS must be one of "F", "B", "BI", "BW"'),
        ({"PASS": 0}, "'PASS': 0: PASS must be one of"),
        ({"PASS": ["F", "b"]}, "'PASS': ['F', 'b']: PASS must be one of"),
        ({"PASS": []}, "'PASS': []: PASS must be one of"),
    ],
)
def test_filter_refuses(wanted: Any, message: str):
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)):
        Filter(wanted)
    with pytest.raises(piper.PiperStrategyError, match=re.escape(f"groups[1][0]: {message}")):
        piper.Order([{"PP": 0}, [wanted]])


# ---- meshes -------------------------------------------------------------------------------------


def test_mesh_is_row_major():
    mesh = piper.Mesh((2, 2, 2), ("pp", "dp", "ep"))
    assert mesh.size == 8
    assert mesh.ranks() == list(range(8))
    assert mesh.ranks(pp=0) == [0, 1, 2, 3]
    assert mesh.ranks(pp=1, ep=0) == [4, 6]
    assert mesh.ranks(dp=1, ep=0) == [2, 6]
    assert mesh.ranks(pp=[0, 1], dp=range(1), ep=1) == [1, 5]
    assert mesh.axis_size("ep") == 2
    assert repr(mesh) == 'piper.Mesh((2, 2, 2), ("pp", "dp", "ep"))'


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_mesh_axes_partition_the_ranks(shape: list[int], data: st.DataObject):
    names = [chr(97 + axis) for axis in range(len(shape))]
    mesh = piper.Mesh(shape, names)
    axis = data.draw(st.sampled_from(names))
    parts = [mesh.ranks(**{axis: i}) for i in range(mesh.axis_size(axis))]
    assert sorted(rank for part in parts for rank in part) == list(range(mesh.size))
    assert {len(part) for part in parts} == {mesh.size // mesh.axis_size(axis)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: piper.Mesh((), ()), "shape=(): must be a tuple of one or more sizes"),
        (lambda: piper.Mesh(4, ("dp",)), "shape=4: must be a tuple of one or more sizes"),
        (lambda: piper.Mesh("22", ("a", "b")), "shape='22': must be a tuple of one or more sizes"),
        (lambda: piper.Mesh((0,), ("dp",)), "shape=(0,): each size must be a whole number"),
        (lambda: piper.Mesh((True,), ("dp",)), "shape=(True,): each size must be a whole number"),
        (lambda: piper.Mesh((2, 2), ("dp", "dp")), "names=('dp', 'dp'): names one twice"),
        (
            lambda: piper.Mesh((2,), "dp"),
            "names='dp': must be a tuple of names; write names=('dp',)",
        ),
        (lambda: piper.Mesh((2,), ("",)), "names=('',): each must be a name"),
        (lambda: piper.Mesh((2,), ()), "names=(): must be a tuple of one or more names"),
        (lambda: piper.Mesh((2, 2), ("dp",)), "2 sizes but 1 names; give one name per size"),
        (lambda: piper.Mesh((2,), ("dp",)).ranks(pp=0), "there is no axis 'pp'; there are: dp"),
        (lambda: piper.Mesh((2,), ("dp",)).ranks(dp=2), "dp=2: must be in 0-1"),
        (lambda: piper.Mesh((2,), ("dp",)).ranks(dp=-1), "dp=-1: must be in 0-1"),
        (lambda: piper.Mesh((2,), ("dp",)).ranks(dp=[]), "dp=[]: must be in 0-1"),
        (lambda: piper.Mesh((2,), ("dp",)).ranks(dp=True), "dp=True: must be in 0-1"),
        (lambda: piper.Mesh((2,), ("dp",)).axis_size("ep"), "there is no axis 'ep'; there are: dp"),
    ],
)
def test_mesh_refuses(make: Callable[[], Any], message: str):
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)):
        make()
