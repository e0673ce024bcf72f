"""Directives and strategies: what they mean, how they print, what they refuse."""

import copy
import dataclasses
import functools
import importlib
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

import piper_dynamo as piper
from piper_dynamo.values import FrozenMap, user_line


def weight(tokens: Any, targets: Any) -> Any:
    """A weight function, to be found by its name."""
    return targets


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
_AXES = ("pp", "dp", "ep")
_axes = st.none() | st.lists(st.sampled_from(_AXES), min_size=1, unique=True)
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
_mesh = st.builds(
    piper.Mesh,
    st.just((2, 2, 2)),
    st.just(_AXES),
    order=st.none() | st.permutations(_AXES),
)
_directive = st.one_of(
    st.builds(
        piper.Place, _region, st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
    ),
    st.builds(
        piper.Replicate,
        _region,
        axes=_axes,
        zero=st.integers(1, 3),
        bucket_mb=st.none() | _number,
        reduce_stream=_stream,
        gather_stream=_stream,
        prefetch=st.integers(0, 3),
        keep=st.sampled_from(["chunk", "step", 1, 5]),
    ),
    st.builds(piper.Replicate, _region, axes=_axes, bucket_mb=st.none() | _number),
    st.builds(piper.Shard, _region, axes=_axes, stream=_stream, capacity=st.none() | _number),
    st.builds(piper.Recompute, st.fixed_dictionaries({"PP": _index}), budget=st.floats(0, 1)),
    st.builds(
        piper.Precision,
        st.dictionaries(st.sampled_from(["PP", "EP"]), _value, max_size=2),
        param=st.sampled_from(["bf16", "fp16"]),
        grad=st.none() | st.just("fp32"),
        reduce=st.none() | st.just("fp64"),
    ),
    st.builds(
        piper.Order,
        st.lists(_task | st.lists(_task, min_size=1, max_size=3), min_size=1, max_size=12),
        stream=_stream,
    ),
)
strategies = st.builds(
    lambda split, rest, **more: piper.Strategy(*split, *rest, **more),
    st.lists(_split, max_size=1),
    st.lists(_directive, max_size=5),
    mesh=_mesh,
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
        piper.Recompute({"PP": 0}, budget=0.5),
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
    piper.Recompute({"PP": 0}, budget=0.5),
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
        piper.Split, piper.Place, piper.Replicate, piper.Shard, piper.Recompute, piper.Order,
        piper.Order,
    ]  # fmt: skip
    assert made.of(piper.Order) == made.directives[5:]
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
    for loss in (weight, _Weight.by_tokens, len):  # the modules imported, it is code
        one = piper.Split({}, loss=loss)
        root = importlib.import_module(loss.__module__.partition(".")[0])
        assert eval(repr(one), {"piper": piper, root.__name__: root}) == one
    for odd in (lambda *inputs: 1, _Weight(), _Weight().__call__, functools.partial(weight, 1)):
        text = repr(piper.Split({}, loss=odd))
        assert "0x" not in text
        with pytest.raises(SyntaxError):
            eval(text, {"piper": piper})
    shown = repr(piper.Split({}, loss=lambda *inputs: 1))
    assert f".<locals>.<lambda> of {__name__}, which has no name to import it by>" in shown
    with pytest.raises(
        piper.PiperStrategyError, match=r"cannot be written as JSON: loss is a function"
    ):
        piper.Strategy(made).to_json()


class _Weight:
    def __call__(self, *inputs: Any) -> int:
        return 1

    @classmethod
    def by_tokens(cls, tokens: Any) -> Any:
        return tokens


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
    (lambda: R(P, prefetch=2), "prefetch=2: is about gathers, of which zero=0 has none"),
    (lambda: R(P, keep="step"), "keep='step': is about gathers, of which zero=0 has none"),
    (lambda: R(P, gather_stream="g"), "gather_stream='g': is about gathers"),
    (lambda: R(P, bucket_mb=10**400), "bucket_mb=1"),
    (lambda: R(P, keep=0), 'keep=0: must be "chunk", "step", or how many buckets stay'),
    (lambda: R(P, keep="always"), 'keep=\'always\': must be "chunk", "step"'),
    (lambda: R(P, keep=True), 'keep=True: must be "chunk", "step"'),
    (lambda: piper.Shard(P, capacity=0), "capacity=0: must be a number of rows"),
    (lambda: piper.Shard(P, capacity=float("nan")), "capacity=nan: must be a number of rows"),
    (lambda: piper.Shard(P, stream=""), "stream='': must be a name"),
    (lambda: piper.Recompute(P, budget=1.5), "budget=1.5: must be a number from 0"),
    (lambda: piper.Recompute(P, budget=float("nan")), "budget=nan: must be a number from 0"),
    (lambda: piper.Recompute(P, budget=True), "budget=True: must be a number from 0"),
    (lambda: piper.Recompute({"PP": 0, "MB": 1}), "filter asks for MB"),
    (lambda: piper.Recompute({"PP": 0, "PASS": "B"}), "filter asks for PASS"),
    (lambda: piper.Precision({}), "asks for nothing; name param=, grad= or reduce="),
    (lambda: piper.Precision(P, param="int8"), "param='int8': must be one of 'bf16'"),
    (lambda: piper.Precision({"MB": 0}, param="bf16"), "filter asks for MB"),
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
        "argument 0=3: must be a directive: Split, Place, Replicate, Shard, Recompute, Precision, "
        "Order",
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
