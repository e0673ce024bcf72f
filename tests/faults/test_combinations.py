"""Every pair of features trains as one process does, or is refused as the documents say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import piper_dynamo as piper
from docs import tables
from tests import jobs
from tests.faults import combinations
from tests.faults.combinations import (
    FEATURES,
    OF_THE_LOOP,
    PAIRS,
    REFUSED,
    Setup,
    Trained,
    setup_of,
)
from tests.source_tree import ROOT

QUICK = {
    ("split backward", "experts"),
    ("ZeRO 2", "buffers"),
    ("skips", "checkpoint"),
    ("dropout", "Recompute"),
    ("frozen", "resume"),
}
# Features of which every pair is planned among the quick tests: what refuses is the plan.
PLANNED = {"split backward", "both directions", "buffers"}


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(*p, marks=[pytest.mark.slow] * (p not in QUICK)) for p in PAIRS],
)
def test_a_pair_trains_as_one_process_or_is_refused(
    first: str, second: str, tmp_path: Path
) -> None:
    """Two clipped steps: losses, norms and the whole state; or the words of the table."""
    setup = setup_of(first, second)
    if (first, second) in REFUSED:
        text = jobs.refusal(lambda: combinations.run(setup, tmp_path), piper.PiperError)
        jobs.mentions(text, *REFUSED[first, second][1:])
        return
    ranks = combinations.run(setup, tmp_path)
    combinations.compare(setup, ranks, combinations.reference(setup))


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(f, marks=[pytest.mark.slow] * (f not in PLANNED))
        for f in FEATURES
        if f not in OF_THE_LOOP
    ],
)
def test_pairs_are_planned_or_refused(first: str) -> None:
    """With each other feature but the loop's: a plan that is proved, or the words of the table."""
    wrong = []
    for pair in (p for p in PAIRS if first in p and OF_THE_LOOP.isdisjoint(p)):
        want = REFUSED.get(pair, ())
        try:
            combinations.plan(setup_of(*pair))
        except piper.PiperError as error:
            told = str(error)
            if not want or any(word not in told for word in want[1:]):
                wrong.append(f"{pair}: {told.splitlines()[0]}")
        else:
            wrong += [f"{pair}: planned"] if want else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name", [pytest.param(f, marks=[pytest.mark.slow] * (f != "experts")) for f in FEATURES]
)
def test_what_is_not_built_is_refused_with_everything(name: str, tmp_path: Path) -> None:
    """Tensor parallelism beside each feature: where it is compiled, by its name."""
    setup = combinations.split_weights(setup_of(name, name))

    def call() -> Any:
        return combinations.run(setup, tmp_path) if setup.how else combinations.plan(setup)

    text = jobs.refusal(call, piper.PiperPlanError)
    jobs.mentions(text, *combinations.SPLIT_WORDS)


def test_control_plans_have_the_options_and_nothing_of_the_loop() -> None:
    assert {"no_sync", "evaluation", "deferred init", "resume"} == OF_THE_LOOP
    wrong = Setup(options={"loss_scale": -1.0})
    text = jobs.refusal(lambda: combinations.plan(wrong), piper.PiperError)
    jobs.mentions(text, "'loss_scale'", "-1.0")
    with pytest.raises(ValueError, match="no plan has"):
        combinations.plan(setup_of("1F1B", "resume"))


def test_control_a_wrong_state_is_noticed(tmp_path: Path) -> None:
    """The comparison sees losses, norms and each value of the state."""
    setup = setup_of("1F1B", "skips")
    ranks, want = combinations.run(setup, tmp_path), combinations.reference(setup)
    combinations.compare(setup, ranks, want)
    other = combinations.reference(setup_of("1F1B", "tied weights"))
    for wrong in (
        Trained(losses=other.losses, norms=want.norms, state=want.state),
        Trained(losses=want.losses, norms=other.norms, state=want.state),
        Trained(
            losses=want.losses, norms=want.norms, state=want.state | {"w.2": other.state["w.2"]}
        ),
    ):
        with pytest.raises(AssertionError, match="off by"):
            combinations.compare(setup, ranks, wrong)


def test_control_moments_that_a_rounded_resume_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Precision, too, the comparison sees an optimizer that starts anew."""
    setup = setup_of("Precision", "resume")
    want = combinations.reference(setup)
    combinations.compare(setup, combinations.run(setup, tmp_path / "whole"), want)
    load = piper.load_checkpoint
    monkeypatch.setattr(piper, "load_checkpoint", lambda folder, step, _: load(folder, step))
    ranks = combinations.run(setup, tmp_path / "lost")
    with pytest.raises(AssertionError, match=r"rank 0: w\.0: off by 0\.00"):
        combinations.compare(setup, ranks, want)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("1F1B", {"directives": ()}),  # nothing is rounded
        pytest.param("frozen", {"parts": frozenset()}, marks=pytest.mark.slow),
    ],
)
def test_control_a_rounded_pair_that_ignores_a_feature(
    name: str, wrong: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, norms and state are each off by more than is allowed under Precision."""
    setup = setup_of(name, "Precision")
    want = combinations.reference(setup)
    for got in combinations.run(replace(setup, **wrong), tmp_path):
        for mixed in (
            replace(want, losses=got.losses),
            replace(want, norms=got.norms),
            replace(want, state=got.state),
        ):
            with pytest.raises(AssertionError, match="off by"):
                combinations.compare(setup, [mixed], want)


def test_the_page_is_what_the_table_says() -> None:
    """The page is written by `make docs` from the pairs that these tests try."""
    page = (ROOT / "docs" / "what-works-with-what.md").read_text(encoding="utf-8")
    assert page == tables.pairs(), "run `make docs`"


def test_every_feature_is_documented_and_tried() -> None:
    """Each has a page, and a pair among the quick tests is one of the table's."""
    for feature in FEATURES.values():
        assert (ROOT / "docs" / feature.page).exists()
    assert all((ROOT / "docs" / page).exists() for page in combinations.NOT_BUILT.values())
    assert set(PAIRS) >= QUICK
    assert set(PAIRS) >= set(REFUSED)
    assert set(PAIRS) >= set(combinations.NOTES)
