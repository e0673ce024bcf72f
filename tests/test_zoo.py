"""Models of kinds that users have: ranks train them as one process does, or they are refused."""

import re
from pathlib import Path
from typing import Any

import pytest

import piper_dynamo as piper
from tests import jobs, zoo, zoo_models
from tests.source_tree import ROOT
from tests.zoo_models import (
    Branching,
    Checkpointed,
    Conditional,
    Decoder,
    Flex,
    Nested,
    ResNet,
    Rounded,
    TextLSTM,
    Translator,
    UNet,
)

# Torch's own, while Dynamo traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def strategy(model: Any, **options: Any) -> piper.Strategy:
    """Two pipeline ranks by two replicas; four stages in a V where the model has four."""
    stages = 1 + max(tags["PP"] for tags in model.REGIONS.values())
    return piper.strategies.pipeline(
        "zbv" if stages == 4 else "one_f_one_b",
        ranks=2,
        num_microbatches=4 if stages == 4 else 2,
        replicas=2,
        zero=3,
        regions=model.REGIONS,
        loss="loss" if model is UNet else None,
        **options,
    )


QUICK = (ResNet, TextLSTM, Rounded)
SLOW = (UNet, Translator, Decoder, Checkpointed, Nested)


@pytest.mark.parametrize(
    "model",
    [*QUICK, *(pytest.param(model, marks=pytest.mark.slow) for model in SLOW)],
    ids=lambda model: model.__name__,
)
def test_trains_as_one_process(model: Any) -> None:
    zoo.check(zoo_models.subject(model), strategy(model), optimizers=zoo.OPTIMIZERS[1:])


def test_a_branch_on_data_is_refused_with_its_line() -> None:
    subject = zoo_models.subject(Branching)
    text = jobs.refusal(
        lambda: piper.plan(subject.build(), strategy(Branching), subject.batch(0, 0)),
        piper.PiperCaptureError,
    )
    jobs.mentions(text, "graph break", "zoo_models.py:", "data-dependent", "torch.where")


@pytest.mark.parametrize(("model", "name"), [(Conditional, "cond"), (Flex, "FlexAttention")])
def test_operators_on_graphs_are_refused_by_name(model: Any, name: str) -> None:
    subject = zoo_models.subject(model)
    text = jobs.refusal(
        lambda: piper.plan(subject.build(), strategy(model), subject.batch(0, 0)),
        piper.PiperCaptureError,
    )
    jobs.mentions(text, name, "zoo_models.py:", "hint")


TABLE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def row_of(name: str) -> str:
    """The row of a model in docs/models.md."""
    rows = [row for row in TABLE.splitlines() if row.startswith("| ") and f"`{name}`" in row]
    assert len(rows) == 1, f"{name} has {len(rows)} rows"
    return rows[0]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_are_documented_as_they_are(path: Path) -> None:
    """With the schedule and the level of ZeRO that the example's strategy has."""
    text, row = path.read_text(encoding="utf-8"), row_of(f"examples/{path.name}")
    schedule = re.search(r'pipeline\(\s*"(\w+)"', text)
    assert schedule is None or f"`{schedule[1]}`" in row
    zero = re.search(r"zero=(\d)", text)
    assert (f"ZeRO-{zero[1]}" in row) if zero is not None else ("ZeRO" not in row)
    assert len(text.splitlines()) <= 90, "more than a screen of code"


@pytest.mark.parametrize("model", [*QUICK, *SLOW], ids=lambda model: model.__name__)
def test_kinds_are_documented_as_they_are(model: Any) -> None:
    row = row_of(model.__name__)
    assert ("`zbv`" in row) == (len({tags["PP"] for tags in model.REGIONS.values()}) == 4)
    assert "ZeRO-3" in row
