"""Directives, filters, meshes and strategies: what they mean, how they print, what they refuse."""

import copy
import dataclasses
import json
import pickle
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
from piper_dynamo.values import FrozenMap, user_line


def weight(tokens: Any, targets: Any) -> Any:
    """A weight function, to be found by its name."""
    return targets


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


# ---- strategies that are right ------------------------------------------------------------------

_index = st.integers(0, 9)
_tags = st.sampled_from(["PP", "EP", "tower", "MB"])
_value = st.one_of(
    _index, st.just("*"), st.lists(_index, min_size=1, max_size=4), st.just(range(6))
)
_passes = ["F", "B", "BI", "BW"]
_region = st.dictionaries(_tags, _value, max_size=3)
_pass = st.one_of(
    st.sampled_from([*_passes, "*"]), st.lists(st.sampled_from(_passes), min_size=1, max_size=3)
)
_task = st.builds(lambda tags, which: {**tags, "PASS": which}, _region, _pass)
_name = st.text(min_size=1, max_size=6)
_stream = st.none() | _name
_axes = st.none() | st.lists(st.sampled_from(["pp", "dp", "ep"]), min_size=1, unique=True)
_number = st.integers(1, 99) | st.floats(0.25, 99)

_split = st.builds(
    piper.Split,
    st.just({}),
    dim=st.sampled_from(["MB", "SEQ"]),
    num_microbatches=st.integers(1, 9),
    inputs=st.none()
    | st.dictionaries(_name, st.integers(-2, 2) | st.just("replicate"), max_size=3),
    loss=st.sampled_from(["mean", "sum"]),
)
_directive = st.one_of(
    st.builds(
        piper.Place, _region, st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
    ),
    st.builds(
        piper.Replicate,
        _region,
        axes=_axes,
        zero=st.integers(0, 3),
        bucket_mb=st.none() | _number,
        reduce_stream=_stream,
        gather_stream=_stream,
        prefetch=st.integers(0, 3),
        keep=st.sampled_from(["chunk", "step", 1, 5]),
    ),
    st.builds(piper.Shard, _region, axes=_axes, stream=_stream, capacity=st.none() | _number),
    st.builds(
        piper.Order,
        st.lists(_task | st.lists(_task, min_size=1, max_size=3), min_size=1, max_size=12),
        stream=_stream,
    ),
)
strategies = st.builds(
    lambda split, rest, **more: piper.Strategy(
        *split, *rest, mesh=piper.Mesh((2, 2, 2), ("pp", "dp", "ep")), **more
    ),
    st.lists(_split, max_size=1),
    st.lists(_directive, max_size=5),
    loss=st.none() | _index | _name | st.lists(_name | _index, min_size=1, max_size=3),
    regions=st.none()
    | st.dictionaries(
        st.text(max_size=8),
        st.dictionaries(st.sampled_from(["PP", "EP"]), _index, min_size=1),
        max_size=3,
    ),
)


@given(strategies)
def test_strategies_print_as_the_code_that_builds_them(made: piper.Strategy):
    again = eval(repr(made), {"piper": piper})
    assert again == made
    assert hash(again) == hash(made)
    assert repr(again) == repr(made)


@given(strategies)
def test_strategies_round_trip_through_json(made: piper.Strategy):
    text = made.to_json()
    again = piper.Strategy.from_json(text)
    assert again == made
    assert again.to_json() == text
    assert [type(getattr(d, "capacity", None)) for d in again.directives] == [
        type(getattr(d, "capacity", None)) for d in made.directives
    ]


@given(strategies)
def test_strategies_copy_and_pickle(made: piper.Strategy):
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made
        assert hash(again) == hash(made)
        assert [d.where for d in again.directives] == [d.where for d in made.directives]


def example() -> piper.Strategy:
    """One of everything."""
    return piper.Strategy(
        piper.Split({}, num_microbatches=2, inputs={"mask": "replicate", "ids": 1}),
        piper.Place({"PP": 0, "MB": range(4)}, [0, 1]),
        piper.Replicate({"PP": "*"}, axes=["dp"], zero=3, keep="step"),
        piper.Shard({"EP": "*"}, stream="ep", capacity=1.5),
        piper.Order([{"PP": 0, "PASS": "F"}, [{"PP": 0, "PASS": "BI"}]]),
        *piper.schedules.one_f_one_b({0: [0, 1]}, 2),
        mesh=piper.Mesh((2,), ("dp",)),
        loss=["losses", 0],
        regions={"layers.[0-3]": {"PP": 0}},
    )


def test_how_a_strategy_prints():
    assert_expected_inline(
        repr(example()),
        """\
piper.Strategy(
    piper.Split({}, dim="MB", num_microbatches=2, inputs={"mask": "replicate", "ids": 1}),
    piper.Place({"PP": 0, "MB": range(4)}, devices=[0, 1]),
    piper.Replicate({"PP": "*"}, axes=("dp",), zero=3, keep="step"),
    piper.Shard({"EP": "*"}, stream="ep", capacity=1.5),
    piper.Order([{"PP": 0, "PASS": "F"}, {"PP": 0, "PASS": "BI"}]),
    piper.Order([
        {"PP": 0, "MB": 0, "PASS": "F"},
        {"PP": 0, "MB": 0, "PASS": "B"},
        {"PP": 0, "MB": 1, "PASS": "F"},
        {"PP": 0, "MB": 1, "PASS": "B"},
    ]),
    mesh=piper.Mesh((2,), ("dp",)),
    loss=("losses", 0),
    regions={"layers.[0-3]": {"PP": 0}},
)""",
    )
    assert repr(piper.Strategy()) == "piper.Strategy()"


def test_how_a_strategy_looks_in_json():
    assert_expected_inline(
        example().to_json(),
        """\
{
  "piper": 1,
  "directives": [
    {"op": "split", "filter": {}, "num_microbatches": 2, "inputs": {"mask": "replicate", "ids": 1}},
    {"op": "place", "filter": {"PP": 0, "MB": [0, 1, 2, 3]}, "devices": [0, 1]},
    {"op": "replicate", "filter": {"PP": "*"}, "axes": ["dp"], "zero": 3, "keep": "step"},
    {"op": "shard", "filter": {"EP": "*"}, "stream": "ep", "capacity": 1.5},
    {"op": "order", "groups": [
      [{"PP": 0, "PASS": "F"}],
      [{"PP": 0, "PASS": "BI"}]
    ]},
    {"op": "order", "groups": [
      [{"PP": 0, "MB": 0, "PASS": "F"}],
      [{"PP": 0, "MB": 0, "PASS": "B"}],
      [{"PP": 0, "MB": 1, "PASS": "F"}],
      [{"PP": 0, "MB": 1, "PASS": "B"}]
    ]}
  ],
  "mesh": {"shape": [2], "names": ["dp"]},
  "loss": ["losses", 0],
  "regions": {"layers.[0-3]": {"PP": 0}}
}
""",
    )
    assert piper.Strategy.from_json(piper.Strategy().to_json()) == piper.Strategy()


def test_directives_know_their_line_and_it_is_no_part_of_their_value():
    one, other = piper.Place({}, [0]), piper.Place({}, [0])
    assert re.fullmatch(r".*test_strategy\.py:\d+", one.where)
    assert one == other
    assert "where" not in repr(one)
    changed = dataclasses.replace(one, devices=[1])
    assert (changed.devices, changed.filter) == ((1,), one.filter)
    assert changed.where.startswith(__file__)


def test_a_line_outside_any_user_code_is_empty():
    scope: dict[str, Any] = {"__name__": "piper_dynamo.somewhere", "user_line": user_line}
    exec("line = user_line()", scope)
    assert scope["line"].startswith(__file__)


def test_of_gives_one_kind_in_order():
    made = example()
    assert [type(d) for d in made.directives] == [
        piper.Split, piper.Place, piper.Replicate, piper.Shard, piper.Order, piper.Order,
    ]  # fmt: skip
    assert made.of(piper.Order) == made.directives[4:]
    assert piper.Strategy().of(piper.Split) == ()


def test_strategies_are_frozen_and_hashable():
    made = example()
    assert {made: 1}[example()] == 1
    for record in (made, made.mesh, *made.directives):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, None)
    regions = made.regions
    assert regions is not None
    assert regions == {"layers.[0-3]": {"PP": 0}}
    with pytest.raises(TypeError):
        regions["x"] = {}
    with pytest.raises(AttributeError, match="this mapping is frozen"):
        regions.other = 1
    assert len(regions) == 1


def test_equal_only_where_the_request_is():
    assert piper.Shard({}, capacity=2) != piper.Shard({}, capacity=2.0)
    assert piper.Order([{"PP": 0}]) == piper.Order([[{"PP": 0}]])
    assert piper.Place({}, [0, 1]) != piper.Place({}, [1, 0])
    assert piper.Strategy(loss="a") != piper.Strategy(loss=("a", "b"))
    assert piper.Split({}, inputs={}) == piper.Split({})
    assert piper.Strategy(regions={}) == piper.Strategy()
    assert FrozenMap({"a": 1}) == FrozenMap([("a", 1)])


def test_a_weight_function_prints_by_name_and_is_compared_as_itself():
    made = piper.Split({}, loss=weight)
    assert repr(made).endswith(f"loss={__name__}.weight)")
    assert made == piper.Split({}, loss=weight)
    assert made != piper.Split({}, loss=lambda *inputs: 1)
    assert "0x" not in repr(piper.Split({}, loss=_Weight()))
    with pytest.raises(
        piper.PiperStrategyError, match=r"cannot be written as JSON: loss is a function"
    ):
        piper.Strategy(made).to_json()


class _Weight:
    def __call__(self, *inputs: Any) -> int:
        return 1


# ---- strategies that are wrong ------------------------------------------------------------------

P, R, D = {"PP": 0}, piper.Replicate, [0]
BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: piper.Split({}, num_microbatches=0),
        "num_microbatches=0: must be a whole number of at least 1",
    ),
    (lambda: piper.Split({}, num_microbatches=2.0), "num_microbatches=2.0: must be a whole number"),
    (
        lambda: piper.Split({}, num_microbatches=True),
        "num_microbatches=True: must be a whole number",
    ),
    (lambda: piper.Split({}, dim="dim0"), "dim='dim0': must be a tag name"),
    (lambda: piper.Split({}, dim=0), "dim=0: must be a tag name"),
    (lambda: piper.Split({"MB": 0}), "filter asks for 'MB', the tag that this Split makes"),
    (lambda: piper.Split({}, inputs=["x"]), "inputs=['x']: must be a dict"),
    (lambda: piper.Split({}, inputs={"x": "no"}), "inputs['x']='no': must be the dim to slice"),
    (lambda: piper.Split({}, inputs={"x": True}), "inputs['x']=True: must be the dim to slice"),
    (lambda: piper.Split({}, inputs={"": 0}), "inputs: the argument's name='': must be a name"),
    (lambda: piper.Split({}, loss="max"), 'loss=\'max\': must be "mean", "sum", or a function'),
    (lambda: piper.Split({"PASS": "F"}), "filter asks for PASS, which only Order can"),
    (lambda: piper.Split([]), "filter: a filter is a dict such as {'PP': 0}, not a list"),
    (lambda: piper.Place(P, []), "devices=[]: is empty; name at least one rank"),
    (lambda: piper.Place(P, 0), "devices=0: must be a list of ranks; write devices=[0]"),
    (lambda: piper.Place(P, "01"), "devices='01': must be a list of ranks; such as [0, 1]"),
    (lambda: piper.Place(P, [0, 0]), "devices=[0, 0]: names a rank twice"),
    (lambda: piper.Place(P, [-1]), "devices=[-1]: each rank must be a whole number of at least 0"),
    (lambda: piper.Place(P, [False]), "devices=[False]: each rank must be a whole number"),
    (lambda: piper.Place({"PASS": "F"}, [0]), "filter asks for PASS, which only Order can"),
    (lambda: R(P, zero=4), "zero=4: must be 0, 1, 2 or 3"),
    (lambda: R(P, zero=True), "zero=True: must be 0, 1, 2 or 3"),
    (lambda: R(P, axes=()), "axes=(): must be a tuple of one or more names"),
    (lambda: R(P, axes="dp"), "axes='dp': must be a tuple of names; write axes=('dp',)"),
    (lambda: R(P, axes=("dp", "dp")), "axes=('dp', 'dp'): names one twice"),
    (lambda: R(P, axes=("dp", 1)), "axes=('dp', 1): each must be a name"),
    (lambda: R(P, shard_axes="dp"), "shard_axes='dp': must be a tuple of names"),
    (
        lambda: R(P, axes=("dp",), shard_axes=("ep",)),
        "shard_axes=('ep',): must be a part of axes=('dp',)",
    ),
    (lambda: R(P, bucket_mb=0), "bucket_mb=0: must be a number of MiB above 0"),
    (lambda: R(P, bucket_mb=float("inf")), "bucket_mb=inf: must be a number of MiB above 0"),
    (lambda: R(P, bucket_mb=True), "bucket_mb=True: must be a number of MiB above 0"),
    (lambda: R(P, bucket_mb="25"), "bucket_mb='25': must be a number of MiB above 0"),
    (lambda: R(P, reduce_stream=""), "reduce_stream='': must be a name"),
    (lambda: R(P, gather_stream=0), "gather_stream=0: must be a name"),
    (lambda: R(P, prefetch=-1), "prefetch=-1: must be a whole number of at least 0"),
    (lambda: R(P, keep=0), 'keep=0: must be "chunk", "step", or how many buckets stay'),
    (lambda: R(P, keep="always"), 'keep=\'always\': must be "chunk", "step"'),
    (lambda: R(P, keep=True), 'keep=True: must be "chunk", "step"'),
    (lambda: piper.Shard(P, capacity=0), "capacity=0: must be a number of tokens"),
    (lambda: piper.Shard(P, capacity=float("nan")), "capacity=nan: must be a number of tokens"),
    (lambda: piper.Shard(P, stream=""), "stream='': must be a name"),
    (lambda: piper.Shard(P, axes=[]), "axes=[]: must be a tuple of one or more names"),
    (lambda: piper.Order([]), "groups=[]: is empty; leave the Order out"),
    (lambda: piper.Order(P), "groups={'PP': 0}: must be a list of groups"),
    (lambda: piper.Order("F0"), "groups='F0': must be a list of groups"),
    (lambda: piper.Order([P, []]), "groups[1]=[]: is an empty group; leave it out"),
    (lambda: piper.Order(["F0"]), "groups[0]='F0': must be a filter or a list of filters"),
    (
        lambda: piper.Order([[P, 1]]),
        "groups[0][1]: a filter is a dict such as {'PP': 0}, not a int",
    ),
    (lambda: piper.Order([P], stream=1), "stream=1: must be a name"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_directives_refuse(make: Callable[[], Any], message: str):
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)) as caught:
        make()
    first = str(caught.value).splitlines()[0]
    assert re.fullmatch(r"piper\.\w+ at .*test_strategy\.py:\d+ is refused", first)


def test_misspelt_arguments_are_python_errors():
    with pytest.raises(TypeError, match="num_microbatch"):
        piper.Split({}, num_microbatch=2)


def test_a_refusal_lists_every_fault():
    with pytest.raises(piper.PiperStrategyError) as caught:
        piper.Replicate({"PP": "0", "PASS": "f"}, zero=7, prefetch=True)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("piper.Replicate at ")
    assert_expected_inline(
        "\n".join(rest),
        """\
  filter: 'PP': '0': write 0
  filter: 'PASS': 'f': PASS must be one of "F", "B", "BI", "BW", a list of them, or "*"
  filter asks for PASS, which only Order can; a region's passes belong together here
  zero=7: must be 0, 1, 2 or 3
  prefetch=True: must be a whole number of at least 0; 0 gathers at the use itself""",
    )


BAD_STRATEGIES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: piper.Strategy(piper.schedules.gpipe({0: [0]}, 1)),
        "argument 0 is a list; unpack it: Strategy(..., *schedule, ...)",
    ),
    (lambda: piper.Strategy((piper.Place(P, D),)), "argument 0 is a tuple; unpack it"),
    (
        lambda: piper.Strategy(piper.Place({"PP": s}, [s]) for s in range(2)),
        "argument 0 is a generator; unpack it",
    ),
    (lambda: piper.Strategy(None), "argument 0=None: is no directive"),
    (
        lambda: piper.Strategy(piper.Place(P, D), piper.Mesh((2,), ("dp",))),
        'argument 1=piper.Mesh((2,), ("dp",)): is no directive; mesh, loss and regions go by',
    ),
    (lambda: piper.Strategy({"PP": 0}), "argument 0={'PP': 0}: is no directive"),
    (lambda: piper.Strategy("gpipe"), "argument 0='gpipe': is no directive"),
    (
        lambda: piper.Strategy(3),
        "argument 0=3: must be a directive: Split, Place, Replicate, Shard, Order",
    ),
    (lambda: piper.Strategy(piper.Place), "must be a directive: Split, Place, Replicate"),
    (
        lambda: piper.Strategy(piper.Split({}), piper.Split({"PP": 0}, dim="SEQ")),
        "one Split at most, for now; leave one of these out",
    ),
    (lambda: piper.Strategy(mesh=(2, 2)), "mesh=(2, 2): must be a piper.Mesh, or None"),
    (lambda: piper.Strategy(R(P, axes=("dp",))), "names axes, but there is no mesh; add mesh="),
    (lambda: piper.Strategy(piper.Shard(P, axes=("ep",))), "names axes, but there is no mesh"),
    (lambda: piper.Strategy(R(P, shard_axes=("dp",))), "names axes, but there is no mesh"),
    (
        lambda: piper.Strategy(R(P, axes=("ep",)), mesh=piper.Mesh((2,), ("dp",))),
        "the mesh has no axis ['ep']; there are: dp",
    ),
    (
        lambda: piper.Strategy(piper.Place(P, [1, 2]), mesh=piper.Mesh((2,), ("dp",))),
        "ranks [2] are not in the mesh (0-1)",
    ),
    (lambda: piper.Strategy(loss=-1), "loss=-1: must be a key, an index of at least 0, a path"),
    (lambda: piper.Strategy(loss=True), "loss=True: must be a key"),
    (lambda: piper.Strategy(loss=""), "loss='': must be a key"),
    (lambda: piper.Strategy(loss=()), "loss=(): must be a key"),
    (lambda: piper.Strategy(loss=("a", ("b",))), "loss=('a', ('b',)): must be a key"),
    (lambda: piper.Strategy(loss=lambda x: x), "must be a key, an index"),
    (lambda: piper.Strategy(regions=["layers"]), "regions=['layers']: must be a dict such as"),
    (lambda: piper.Strategy(regions={0: {"PP": 0}}), "regions=0: a pattern is a string"),
    (lambda: piper.Strategy(regions={"a": 0}), "regions['a']=0: must be a dict of tags"),
    (lambda: piper.Strategy(regions={"a": {}}), "regions['a']={}: must be a dict of tags"),
    (lambda: piper.Strategy(regions={"a": {"MB": 0}}), "regions['a']: 'MB' is no tag"),
    (lambda: piper.Strategy(regions={"a": {"P1": 0}}), "regions['a']: 'P1' is no tag"),
    (
        lambda: piper.Strategy(regions={"a": {"PP": "0"}}),
        "regions['a']['PP']='0': must be a whole number",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD_STRATEGIES)
def test_strategies_refuse(make: Callable[[], Any], message: str):
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)) as caught:
        make()
    first = str(caught.value).splitlines()[0]
    assert re.fullmatch(r"piper\.Strategy at .*test_strategy\.py:\d+ is refused", first)


def test_two_splits_are_both_named_with_their_lines():
    with pytest.raises(piper.PiperStrategyError) as caught:
        piper.Strategy(piper.Split({}), piper.Split({}, num_microbatches=2))
    found = re.findall(r"piper\.Split\(.*\) at .*test_strategy\.py:\d+", str(caught.value))
    assert len(found) == 2


# ---- the published system's files ---------------------------------------------------------------

PLACED = """[
 {"op":"place","filter":{"PP":0},"devices":[0,2],"stream":"pp"},
 {"op":"place","filter":{"PP":1},"devices":[1,3],"stream":"pp"},
 {"op":"replicate","filter":{"PP":0},"devices":[0,2],"reduce_stream":"dp"},
 {"op":"replicate","filter":{"PP":1},"devices":[1,3],"reduce_stream":"dp"},
 {"op":"shard","filter":{"PP":0,"EP":"*"},"devices":[0,2],"stream":"ep"},
 {"op":"shard","filter":{"PP":1,"EP":"*"},"devices":[1,3],"stream":"ep"},
 {"op":"split","filter":{},"dim_name":"MB","num_microbatches":4}]"""


def test_published_placement():
    assert piper.Strategy.from_json(PLACED) == piper.Strategy(
        piper.Place({"PP": 0}, [0, 2]),
        piper.Place({"PP": 1}, [1, 3]),
        piper.Replicate({"PP": 0}, reduce_stream="dp"),
        piper.Replicate({"PP": 1}, reduce_stream="dp"),
        piper.Shard({"PP": 0, "EP": "*"}, stream="ep"),
        piper.Shard({"PP": 1, "EP": "*"}, stream="ep"),
        piper.Split({}, num_microbatches=4),
    )


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1"])
def test_published_orders(name: str):
    orders = getattr(piper.schedules, name)({0: [0, 2], 1: [1, 3]}, 4)
    rows = [
        {"op": "order", "filters": [[dict(one.items) for one in group] for group in order.groups]}
        for order in orders
    ]
    made = piper.Strategy.from_json(json.dumps(json.loads(PLACED) + rows))
    assert list(made.of(piper.Order)) == orders


def test_published_pairs_and_numbers_as_texts():
    made = piper.Strategy.from_json(
        """[{"op": "place", "filter": {"PP": "0"}, "device": ["1"]},
            {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": "2"},
            {"op": "order", "filters": [[{"PP": "0", "MB": 0, "PASS": "F"}],
                [{"PP": 0, "MB": "1", "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "B"}]]}]"""
    )
    assert made == piper.Strategy(
        piper.Place({"PP": 0}, [1]),
        piper.Split({}, num_microbatches=2),
        piper.Order(
            [
                {"PP": 0, "MB": 0, "PASS": "F"},
                [{"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "B"}],
            ]
        ),
    )


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, {}),
        ({"shard_grads": True}, {"zero": 2}),
        ({"shard_params": True}, {"zero": 3}),
        (
            {"shard_params": True, "shard_grads": True, "gather_stream": "dp"},
            {"zero": 3, "gather_stream": "dp"},
        ),
        ({"bucket_size": 25}, {"bucket_mb": 25}),
        (
            {"shard_params": True, "prefetch_distance": 2, "regather": False},
            {"zero": 3, "prefetch": 2, "keep": "step"},
        ),
    ],
)
def test_published_replicate(fields: dict[str, Any], want: dict[str, Any]):
    row = {"op": "replicate", "filter": {"PP": "*"}, "devices": [0, 1], **fields}
    made = piper.Strategy.from_json(json.dumps([row]))
    assert made == piper.Strategy(piper.Replicate({"PP": "*"}, **want))


ONE = '{"op": "place", "filter": {}, "devices": [0]}'
BAD_TEXTS: list[tuple[str, type[Exception], str]] = [
    ("{", piper.PiperSyntaxError, "the text is not JSON"),
    ("[" * 100_000, piper.PiperSyntaxError, "the text is not JSON"),
    ("3", piper.PiperSyntaxError, 'expected an object with "piper" and "directives"'),
    ("{}", piper.PiperSyntaxError, 'expected an object with "piper" and "directives"'),
    ('{"piper": 2}', piper.PiperSyntaxError, "of version 2; this Piper reads version 1"),
    ('{"piper": true}', piper.PiperSyntaxError, "of version True; this Piper reads version 1"),
    ('{"piper": 1}', piper.PiperSyntaxError, '"directives" must be an array'),
    ('{"piper": 1, "directives": [], "x": 1}', piper.PiperSyntaxError, "the strategy: unknown 'x'"),
    ('{"piper": 1, "piper": 1}', piper.PiperSyntaxError, "'piper' comes twice in one object"),
    ('{"piper": NaN}', piper.PiperSyntaxError, "NaN is not a number of JSON"),
    ('{"piper": 1, "directives": [], "mesh": [2]}', piper.PiperSyntaxError, 'an object of "shape"'),
    (
        '{"piper": 1, "directives": [{}]}',
        piper.PiperSyntaxError,
        'directives[0]: expected an object with "op"',
    ),
    (
        '{"piper": 1, "directives": [[]]}',
        piper.PiperSyntaxError,
        'directives[0]: expected an object with "op"',
    ),
    (
        '{"piper": 1, "directives": [{"op": "x"}]}',
        piper.PiperSyntaxError,
        "directives[0]: no directive 'x'",
    ),
    (
        '{"piper": 1, "directives": [{"op": "split"}]}',
        piper.PiperSyntaxError,
        "(split): 'filter' is missing",
    ),
    (
        '{"piper": 1, "directives": [{"op": "order"}]}',
        piper.PiperSyntaxError,
        "(order): 'groups' is missing",
    ),
    (
        '{"piper": 1, "directives": [{"op": "place", "filter": {}}]}',
        piper.PiperSyntaxError,
        "directives[0] (place): 'devices' is missing",
    ),
    (
        '{"piper": 1, "directives": [{"op": "split", "filter": {}, "where": "x"}]}',
        piper.PiperSyntaxError,
        "directives[0]: unknown 'where'; known: dim, filter, inputs, loss, num_microbatches",
    ),
    (
        '{"piper": 1, "directives": [{"op": "split", "filter": {}, "num_microbatches": 0}]}',
        piper.PiperStrategyError,
        "num_microbatches=0: must be a whole number of at least 1",
    ),
    ("[3]", piper.PiperSyntaxError, 'directive 0: expected an object with "op", got 3'),
    ('[{"op": "fuse"}]', piper.PiperSyntaxError, "directive 0: no directive 'fuse'"),
    (
        '[{"op": "layout"}]',
        piper.PiperStrategyError,
        "directive 0 is 'layout', which this version does not have",
    ),
    (
        '[{"op": "place", "filter": {}}]',
        piper.PiperSyntaxError,
        "directive 0: devices must be an array of ranks",
    ),
    (
        '[{"op": "place", "devices": [0]}]',
        piper.PiperSyntaxError,
        "directive 0 (place): 'filter' is missing",
    ),
    (
        '[{"op": "place", "filter": 0, "devices": [0]}]',
        piper.PiperSyntaxError,
        "a filter is an object, not 0",
    ),
    (
        '[{"op": "place", "filter": {}, "devices": [0], "x": 1}]',
        piper.PiperSyntaxError,
        "directive 0: unknown 'x'",
    ),
    (
        '[{"op": "place", "filter": {"PP": null}, "devices": [0]}]',
        piper.PiperSyntaxError,
        "'PP' is null",
    ),
    (
        '[{"op": "place", "filter": {"PP": "a"}, "devices": [0]}]',
        piper.PiperStrategyError,
        "'PP': 'a'",
    ),
    (
        '[{"op": "place", "filter": {}, "devices": [null]}]',
        piper.PiperStrategyError,
        "devices=[None]",
    ),
    (
        '[{"op": "order", "filters": [{"PP": 0}]}]',
        piper.PiperSyntaxError,
        "an array of arrays of filters",
    ),
    ('[{"op": "order", "filters": 3}]', piper.PiperSyntaxError, "an array of arrays of filters"),
    (
        '[{"op": "replicate", "filter": {}, "devices": [0], "shard_grads": 1}]',
        piper.PiperSyntaxError,
        "directive 0: shard_grads must be true or false: 1",
    ),
    (
        f'[{ONE}, {{"op": "shard", "filter": {{"EP": "*"}}, "devices": [0, 1]}}]',
        piper.PiperStrategyError,
        "directive 1 names devices [0, 1], but the region is placed elsewhere",
    ),
]


@pytest.mark.parametrize(("text", "kind", "message"), BAD_TEXTS)
def test_from_json_refuses(text: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=re.escape(message)):
        piper.Strategy.from_json(text)
