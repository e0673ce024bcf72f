"""Random trainings: a few of what `make fuzz-train` tries, and that it finds what is wrong."""

from typing import Any

import pytest
from hypothesis import strategies as st
from torch.fx.node import Node

import piper_dynamo as piper
from piper_dynamo import step
from piper_dynamo.passes import tie
from tests import fuzz_train
from tests.drawing import drawn_trainings
from tests.drawn import Job, Layer
from tests.fuzz_train import Tally, fuzz

# Torch says so where a custom autograd.Function is traced.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch):
    """The models are those of other tests, of which they compute every pass's values."""
    monkeypatch.setenv("PIPER_VERIFY", "1")


def job(*kinds: str, **named: Any) -> Job:
    """Two stages on two ranks, one layer each."""
    layers = tuple(Layer(stage=k, kind=kind) for k, kind in enumerate(kinds))
    return Job(layers=layers, on=(0, 1), microbatches=2, zero=(0, 0), **named)


SMALL = st.builds(
    lambda last, outputs: job("linear", last, outputs=outputs),
    st.sampled_from(["linear", "tied"]),
    st.sampled_from([(), (1,)]),
)


def test_random_trainings():
    tally = Tally()
    fuzz(3, 3, tally, jobs=drawn_trainings(max_ranks=2))
    assert tally.tried >= 3
    assert tally.trained >= 2, tally.table()


PIECES = Job(
    layers=(Layer(stage=0, kind="custom"), Layer(stage=0), Layer(stage=0)),
    on=(0,),
    replicas=2,
    zero=(2,),
    options=(("bucket_mb", 0.0001),),
)
THROUGH = Job(
    layers=(Layer(stage=0), Layer(stage=1, kind="embed"), Layer(stage=1, kind="experts")),
    on=(0, 1),
    zero=(0, 0),
)


@pytest.mark.parametrize("once", [PIECES, THROUGH], ids=["pieces", "through"])
def test_what_was_found_once(once: Job):
    """Custom functions in a region of several pieces; additions to what several regions use."""
    tally = Tally()
    fuzz_train.check_training(once, tally, [])
    assert tally.trained == 1


def test_control_a_broken_pass_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch):
    """Nobody adds up the gradients of a weight on two ranks. The script runs alone: it passes."""
    right = tie._tie

    def wrong(*args: Any) -> list[Node]:
        sums = right(*args)
        for one in sums:
            one.args = (one.args[0],) * len(one.args)  # a holder's part twice, the other's not
        return sums

    def take(error: Exception) -> bool:
        found.append(str(error))
        return True

    with monkeypatch.context() as broken:
        broken.setattr(tie, "_tie", wrong)
        tally, found = Tally(), list[str]()
        with pytest.raises(piper.PiperPlanError, match="the plan is unsafe"):
            fuzz(5, 0, tally, jobs=SMALL, failed=take)
    assert len(found) > 1
    assert '"h1"' not in tally.last
    exec(compile(tally.last, "failure.py", "exec"), {"__name__": "failure"})
    assert "tests" not in {line.split()[1].partition(".")[0] for line in _imports(tally.last)}


def _imports(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("import ", "from "))]


def test_control_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch):
    """What no proof sees: each microbatch counts a millionth too much."""
    right = step.loss_weights

    def wrong(*args: Any, **named: Any) -> list[float]:
        return [weight * (1 + 1e-6) for weight in right(*args, **named)]

    monkeypatch.setattr(step, "loss_weights", wrong)
    with pytest.raises(AssertionError, match="rank 0 and one process: losses: off by"):
        fuzz_train.check_training(job("linear", "linear"), Tally(), [])


def test_batches_have_numbers_of_their_own():
    """The model's values stay; what it is given is another, and as large."""
    one, other = (job("linear", "embed", numbers=n) for n in (0, 1))
    assert one.names["Model"]().w0.equal(other.names["Model"]().w0)
    for name, value in one.names["data"](16).items():
        assert not value.equal(other.names["data"](16)[name]), name
        assert value.shape == other.names["data"](16)[name].shape
        assert value.equal(one.names["data"](16)[name])


def test_a_training_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch):
    """While it runs, by its number, its seed and its job; one that is quick is not."""
    found, tally = list[str](), Tally()
    jobs = st.just(job("linear", "linear"))
    fuzz(1, 5, tally, jobs=jobs, slow=found.append)
    assert (found, tally.slow) == ([], 0)
    monkeypatch.setattr(fuzz_train, "SLOW_S", 0.01)
    fuzz(1, 5, tally, jobs=jobs, slow=found.append)
    (text,) = found
    assert text.startswith("training 2, of seed 5, takes over 0.01 s of CPU: Job(layers=")
    assert str(tally) == "2 trainings as in one process; 0 refused (0.0%); 1 slow"


def test_only_rules_may_refuse():
    known = fuzz_train.rules()
    texts = {
        "the placement is not possible\n  PP0 is placed nowhere": "the placement is not possible",
        "the plan is unsafe\n  rank 0 ...": None,
        "rank 1 failed in F.PP1.MB0\n  ...": None,
    }
    for text, rule in texts.items():
        assert fuzz_train.rule_of(piper.PiperError(text), known) == rule
