"""What ranks tell each other is JSON: it comes back as it was, and nothing else is made of it."""

import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

import piper_dynamo as piper
from piper_dynamo import wire
from piper_dynamo.checkpoint import save
from piper_dynamo.train import job
from piper_dynamo.weights import Loaded
from tests import jobs

SIZE = torch.Size([2, 3])
VALUES: list[Any] = [
    *(None, True, 0, -(10**30), 1.5, "täxt", [], (), {}, b"\x00\xff", 1 + 2j, {1, 2}),
    {"~": "float", "value": "1"},  # a user's own dict with that key
    {1: "a", (2, "b"): [3.0], None: ()},
    OrderedDict([("b", 1), ("a", (2,))]),
    (SIZE, torch.bfloat16, torch.strided, torch.contiguous_format, torch.device("cpu")),
    TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size([0, 0]), SIZE),
        properties=TensorProperties(dtype=torch.float64),
        size=SIZE,
    ),
    WriteItemType.SHARD,
    Loaded(["a"], []),
    job.Timeline([job.Event(rank=0, stream="s", name="F", kind="F", start_s=0.0, end_s=1.0)]),
]
assert save  # it lists records


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value: Any) -> None:
    got = wire.load(wire.dump(value))
    assert got == value
    assert type(got) is type(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text() | st.integers(), inner)
        ),
    )
)
def test_any_nesting_comes_back(value: Any) -> None:
    assert wire.load(wire.dump(value)) == value


def test_numbers_that_are_not_finite() -> None:
    first, second = wire.load(wire.dump([math.inf, math.nan]))
    assert first == math.inf
    assert math.isnan(second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.arange(6)[: math.prod(shape)].reshape(shape).to(dtype)
    got = wire.load(wire.dump({"t": value.T if len(shape) > 1 else value}))["t"]
    assert got.dtype == dtype
    assert torch.equal(got, value.T if len(shape) > 1 else value)
    got.fill_(1)  # it has memory of its own


class Unknown:
    """Of no kind that is written."""


@pytest.mark.parametrize("value", [Unknown(), lambda: 0, Unknown, {"a": [Unknown()]}])
def test_what_is_no_data_is_not_written(value: Any) -> None:
    jobs.mentions(jobs.refusal(lambda: wire.dump(value)), "cannot be told to other ranks")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"~": "os.system", "value": "true"}',
        '{"~": "Unknown", "value": {}}',
        '{"~": "dtype", "value": "load"}',
        '{"~": "dtype", "value": "nn.Module"}',
        '{"~": "WriteItemType", "value": "mro"}',
        '{"~": "Loaded", "value": [1, 2, 3]}',
        '{"~": "tensor", "value": ["float32", [2], "AAAA"]}',
        '{"~": "tensor", "value": ["float32", [1000000000000], ""]}',
        '{"~": "dict", "value": [[[], 1]]}',
        "[" * 100_000,
        json.dumps("x").replace("x", "\\ud800") + "!",
    ],
    ids=lambda text: text[:40],
)
def test_what_nobody_wrote_is_refused(text: str) -> None:
    jobs.mentions(jobs.refusal(lambda: wire.load(text)), "cannot be read")


def test_there_is_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_BYTES", 100)
    text = jobs.refusal(lambda: wire.dump("x" * 100))
    jobs.mentions(text, "too large", "at most")
    jobs.mentions(jobs.refusal(lambda: wire.load('"' + "x" * 100 + '"')), "too large")


def test_two_records_of_one_name_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two records are named Loaded"):
        wire.records(type("Loaded", (), {}))


@pytest.mark.parametrize("at", ["part", "answer"])
def test_a_rank_that_cannot_say_what_it_has_fails_on_all(at: str) -> None:
    """It is told like any other failure of a call of all ranks; nobody waits."""

    def call() -> str:
        comm = job.communicator(5.0)
        mine: Any = Unknown() if at == "part" and piper.rank() == 1 else 1
        answer: Any = Unknown() if at == "answer" else 2
        meeting = job.Meeting(comm, "trying")
        return jobs.refusal(lambda: meeting.together(lambda: mine, lambda parts: answer))

    for text in jobs.run_ranks(call, 2):
        jobs.mentions(text, "a Unknown cannot be told to other ranks")
