"""Without a strategy: patterns by which backends of torch.compile are tried, beside two others.

Where `aot_eager` does what eager does, so must piper. Whole models: tests/test_examples.py.
"""

import pytest
import torch

from tests.observed import check, differences, observe
from tests.patterns import CASES, on, x

# torch's own, while Dynamo traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*complex.*:UserWarning"),
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (i % 2)) for i, n in enumerate(CASES)],
)
def test_does_what_eager_does(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", ["sizes_that_change", "numbers_that_change", "strided_inputs"])
def test_with_symbolic_sizes(name: str) -> None:
    make = CASES[name]
    assert not differences(observe(make, "piper", dynamic=True), observe(make, None))


def test_a_difference_is_seen() -> None:
    """The check fails where a call does something else."""
    for one, other in (("dropout", "random_results"), ("views_of_an_input", "views_of_a_result")):
        assert differences(observe(CASES[one], None), observe(CASES[other], None))


def test_a_difference_where_aot_eager_is_right_is_no_excuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a call in which both are wrong, too: each thing that was seen is compared by itself."""

    def wrong(make, backend, **options):
        seen = observe(make, backend, **options)
        if backend is not None:
            seen[0]["numbers"] = ["of both"]
        if backend == "piper":
            seen[0]["after"] = [t + 1 for t in seen[0]["after"]]
        return seen

    monkeypatch.setattr("tests.observed.observe", wrong)
    with pytest.raises(AssertionError, match="aot_eager is right") as found:
        check(lambda: on(torch.sin, x()))
    assert "after[0]" in str(found.value)
    assert "numbers" not in str(found.value)


def test_nor_is_one_in_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are wrong in what a call leaves of its first input, and piper alone of its second."""

    def wrong(make, backend, **options):
        seen = observe(make, backend, **options)
        for at in {None: (), "aot_eager": (0,), "piper": (0, 1)}[backend]:
            seen[0]["after"][at] += 1
        return seen

    monkeypatch.setattr("tests.observed.observe", wrong)
    with pytest.raises(AssertionError, match="aot_eager is right") as found:
        check(lambda: on(torch.add, (x(), x(key=1))))
    assert "after[1]" in str(found.value)
    assert "after[0]" not in str(found.value)
