"""Kinds of models that strategies refuse, and the tables of what is trained in docs/models.md.

Models that are trained: tests/test_examples.py.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import piper_dynamo as piper
from tests import example, jobs, observed, zoo, zoo_models
from tests.source_tree import ROOT
from tests.zoo_models import Branching, Conditional, Decoder, Flex

pytestmark = [
    # torch's own, while Dynamo traces.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]
SCREEN = 64  # lines of code


def strategy() -> piper.Strategy:
    """Two pipeline ranks by two replicas."""
    return piper.strategies.pipeline(
        ranks=2, num_microbatches=2, replicas=2, zero=3, regions=Decoder.REGIONS
    )


@pytest.mark.slow
def test_trains_as_one_process() -> None:
    zoo.check(zoo_models.subject(Decoder), strategy(), optimizers=zoo.OPTIMIZERS[1:])


def refused(model: Any) -> str:
    """What is said of a model."""
    subject = zoo_models.subject(model)
    return jobs.refusal(
        lambda: piper.plan(subject.build(), strategy(), subject.batch(0, 0)),
        piper.PiperCaptureError,
    )


def test_a_branch_on_data_is_refused_with_its_line() -> None:
    source = Path(zoo_models.__file__).read_text(encoding="utf-8")
    at = 1 + source[: source.index("# the branch")].count("\n")
    jobs.mentions(refused(Branching), "graph break", "data-dependent", "torch.where")
    assert f"zoo_models.py:{at}\n" in refused(Branching)


def test_operators_on_graphs_are_refused_by_name() -> None:
    jobs.mentions(refused(Conditional), "cond", "zoo_models.py:", "hint", "torch.where")


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_flex_attention_is_refused_by_name(training: bool) -> None:
    """Also where torch computes it, forward alone on CPU."""
    with torch.set_grad_enabled(training):
        text = refused(Flex)
    words = "FlexAttention" if training else "flex_attention", "scaled_dot_product_attention"
    jobs.mentions(text, *words, "zoo_models.py:", "hint", "attn_mask=")


@pytest.mark.parametrize(
    ("model", "training"),
    [
        (Branching, True),
        *(
            pytest.param(model, training, marks=pytest.mark.slow)
            for model, training in (
                (Branching, False),
                (Conditional, True),
                (Conditional, False),
                (Decoder, True),
                (Decoder, False),
                (Flex, False),  # torch has no backward of it on CPU
            )
        ),
    ],
)
def test_without_a_strategy_all_work(model: Any, training: bool) -> None:
    subject = zoo_models.subject(model)
    with torch.set_grad_enabled(training):
        observed.check(lambda: subject.calls(training=training))


def test_a_buffer_that_is_not_that_of_its_replica_is_seen() -> None:
    """The check of whole models looks at buffers: at values, and at who changed them."""
    name, first = "mean", {"mean": torch.zeros(2)}
    want = zoo.Trace(first=first, buffers={name: torch.ones(2, 2)})
    unchanged = zoo.Trace(buffers=first, replica=1)

    def ranks(*values: float) -> list[zoo.Trace]:
        mean = torch.full((2, 2), values[0]), torch.full((2, 2), values[1])
        return [zoo.Trace(buffers={name: m[0]}, replica=r) for r, m in enumerate(mean)]

    zoo.compare([*ranks(1, 1), unchanged], want, 1e-12)
    with pytest.raises(AssertionError, match="rank 1: buffer mean: off by"):
        zoo.compare(ranks(1, 1.5), want, 1e-12)
    with pytest.raises(AssertionError, match=r"buffer mean: changed for replicas \{0\}"):
        zoo.compare(ranks(1, 0), want, 1e-12)


TABLE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def row_of(name: str) -> str:
    """The row of a model in docs/models.md."""
    rows = [row for row in TABLE.splitlines() if row.startswith("| ") and f"`{name}`" in row]
    assert len(rows) == 1, f"{name} has {len(rows)} rows"
    return rows[0]


@pytest.mark.parametrize("name", example.NAMES)
def test_examples_are_documented_as_they_are(name: str) -> None:
    """With the schedule and the level of ZeRO that the example's strategy has."""
    text, row = example.source(name), row_of(f"examples/{name}.py")
    schedule = re.search(r'pipeline\(\s*"(\w+)"', text)
    assert schedule is None or f"`{schedule[1]}`" in row
    zero = re.search(r"zero=(\d)", text)
    assert zero is not None, "neither a level of ZeRO nor a layout of experts"
    assert f"ZeRO-{zero[1]}" in row


@pytest.mark.parametrize("name", example.NAMES)
def test_an_example_is_a_screen_of_code(name: str) -> None:
    text = example.source(name)
    tree, said = ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            said |= set(range(node.body[0].lineno, 1 + (node.body[0].end_lineno or 0)))
    code = [
        line
        for at, line in enumerate(text.splitlines(), 1)
        if at not in said and line.strip() and not line.strip().startswith("#")
    ]
    assert len(code) <= SCREEN, f"{len(code)} lines of code"


def test_kinds_are_documented() -> None:
    for model in (Branching, Conditional, Flex, Decoder):
        assert row_of(model.__name__)
