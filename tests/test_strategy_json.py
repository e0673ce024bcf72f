"""Strategies as JSON text, and the published system's schedule files."""

import json
import re
from typing import Any

import pytest
from expecttest import assert_expected_inline

import piper_dynamo as piper


def test_how_a_strategy_looks_in_json():
    made = piper.Strategy(
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
    assert_expected_inline(
        made.to_json(),
        """\
{
  "piper": 1,
  "directives": [
    {"op": "split", "filter": {}, "num_microbatches": 2, "inputs": {"mask": "replicate", "ids": 1}},
    {"op": "place", "filter": {"PP": 0, "MB": [0, 1, 2, 3]}, "devices": [0, 1]},
    {"op": "replicate", "filter": {"PP": "*"}, "axes": ["dp"], "zero": 3, "keep": "step"},
    {"op": "shard", "filter": {"EP": "*"}, "stream": "ep", "capacity": 1.5},
    {"op": "recompute", "filter": {"PP": 0}, "budget": 0.5},
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


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, {}),
        ({"PP": 1}, {"PP": 1}),
        ({"PP": "1", "EP": "*"}, {"PP": 1, "EP": "*"}),
        ({"MB": 3, "PP": 0}, {"PP": 0, "MB": 3}),
        *(({"PP": 0, "PASS": which}, {"PP": 0, "PASS": which}) for which in ("F", "B", "BI", "BW")),
    ],
)
def test_published_filters(given: dict[str, Any], want: dict[str, Any]):
    text = json.dumps([{"op": "order", "filters": [[given], [given]]}])
    assert piper.Strategy.from_json(text) == piper.Strategy(piper.Order([want, want]))


# As the published description writes DualPipeV's first of two ranks: a pair is one group.
DUALPIPEV = (
    "F0.0 F0.1 F0.2 F3.0 BI3.0 BW3.0 F3.1 F0.3+B3.1 F3.2+B0.0 B3.2 F3.3+B0.1 B3.3 "
    "BI0.2 BW0.2 BI0.3 BW0.3"
)


def test_published_dualpipev():
    groups = [
        [
            {"PP": int(stage), "MB": int(micro), "PASS": which}
            for which, stage, micro in re.findall(r"([A-Z]+)(\d)\.(\d)", word)
        ]
        for word in DUALPIPEV.split()
    ]
    made = piper.Strategy.from_json(json.dumps([{"op": "order", "filters": groups}]))
    assert made == piper.Strategy(piper.Order(groups))
    ours = piper.schedules.dualpipev({0: [0], 1: [1], 2: [1], 3: [0]}, 4)[0]

    def forwards(order: piper.Order) -> list[Any]:
        return [task for group in order.groups for task in group if task.tags["PASS"] == "F"]

    (theirs,) = made.of(piper.Order)
    assert forwards(theirs) == forwards(ours)


@pytest.mark.parametrize(
    "op", ["shard_tensor", "ring_exchange", "fuse_collectives", "mesh", "route", "layout"]
)
def test_published_extensions_are_refused_by_name(op: str):
    with pytest.raises(piper.PiperStrategyError, match=f"directive 0 is '{op}', which"):
        piper.Strategy.from_json(json.dumps([{"op": op, "filter": {}, "devices": [0]}]))


def test_published_splits():
    split = {"op": "split", "filter": {}, "dim_name": "BATCH", "num_microbatches": 2}
    made = piper.Strategy.from_json(json.dumps([split]))
    assert made == piper.Strategy(piper.Split({}, dim="BATCH", num_microbatches=2))
    with pytest.raises(piper.PiperStrategyError, match="one Split at most, for now"):
        piper.Strategy.from_json(json.dumps([split, split]))


ONE = '{"op": "place", "filter": {}, "devices": [0]}'
BAD_TEXTS: list[tuple[Any, type[Exception], str]] = [
    ("{", piper.PiperSyntaxError, "the text is not JSON"),
    ("strategy.json", piper.PiperSyntaxError, "of a file give the text: Path(...).read_text()"),
    (piper.Strategy(), piper.PiperSyntaxError, "expected its JSON text; got piper.Strategy("),
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
    (
        '[{"op": "place", "filter": {"PP": 1}, "devices": [0]},'
        ' {"op": "replicate", "filter": {"PP": [0, 1]}, "devices": [5, 6]}]',
        piper.PiperStrategyError,
        "directive 1 names devices [5, 6], but the region is placed elsewhere",
    ),
    (
        '[{"op": "place", "filter": {"PP": 0}, "devices": [0], "device": [1]}]',
        piper.PiperSyntaxError,
        "directive 0: both 'devices' and 'device'; leave out one",
    ),
    (
        f'[{{"op": "place", "filter": {{"PP": "{"9" * 5000}"}}, "devices": [0]}}]',
        piper.PiperStrategyError,
        'an index is a whole number; "*" is any',
    ),
    (
        f'{{"piper": 1, "directives": [{ONE}, {{"op": "split", "filter": {{}}, "dim": 3}}]}}',
        piper.PiperStrategyError,
        "directives[1]: piper.Split at",
    ),
    ('{"piper": 1.0, "directives": []}', piper.PiperSyntaxError, "a strategy of version 1.0"),
]


def test_devices_are_compared_with_those_of_the_same_regions_alone():
    """Whatever tags say which these are."""
    places = [{"op": "place", "filter": {"EP": k}, "devices": [2 * k, 2 * k + 1]} for k in range(2)]
    more = {"op": "replicate", "filter": {"EP": 0}, "devices": [0, 1], "prefetch_distance": 2}
    assert piper.Strategy.from_json(json.dumps([*places, more])).directives[2] == piper.Replicate(
        {"EP": 0}
    )


@pytest.mark.parametrize(("text", "kind", "message"), BAD_TEXTS)
def test_from_json_refuses(text: Any, kind: type[Exception], message: str):
    with pytest.raises(kind, match=re.escape(message)):
        piper.Strategy.from_json(text)
