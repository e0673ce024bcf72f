"""Without a strategy: patterns by which backends of torch.compile are tried, beside two others.

What a call does is observed: outputs with their strides, types and memory, inputs and buffers after
it, gradients. Where `aot_eager` does what eager does, so must piper.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from tests.patterns import CASES

# torch's own, while Dynamo traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*complex.*:UserWarning"),
]


@contextmanager
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch._dynamo.reset()


def observe(name: str, backend: str | None, **options: Any) -> list[Any]:
    """What the calls of a case do."""
    with fresh():
        fn, calls = CASES[name]()
        run = fn if backend is None else torch.compile(fn, backend=backend, **options)
        seen = []
        torch.manual_seed(1)
        for args, kwargs in calls:
            try:
                output = run(*args, **kwargs)
            except ValueError as error:
                seen.append(("raised", str(error).splitlines()[0]))
                continue
            seen.append(_seen(fn, (args, kwargs), output))
        return seen


def _seen(fn: Any, given: Any, output: Any) -> dict[str, Any]:
    """Everything that a user can tell of one call."""
    leaves, spec = tree_flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    state = [t for t in (*fn.parameters(), *fn.buffers())] if isinstance(fn, nn.Module) else []
    known = [t for t in (*inputs, *state, *tensors) if t.numel()]
    found: dict[str, Any] = {
        "structure": str(spec),
        "numbers": [leaf for leaf in leaves if not isinstance(leaf, Tensor)],
        "outputs": [t.detach().clone() for t in tensors],
        "of": [(t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in tensors],
        "kinds": [type(t) for t in tensors],
        "memory": [
            [_storage(other) == _storage(one) for other in known] for one in tensors if one.numel()
        ],
    }
    used = [t for t in tensors if t.requires_grad]
    if used:
        total = sum(_number(t) * (k + 1) for k, t in enumerate(used))
        total.backward()
    found["gradients"] = [None if t.grad is None else t.grad.clone() for t in (*inputs, *state)]
    found["after"] = [t.detach().clone() for t in (*inputs, *state)]
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _number(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return (real.double() * torch.arange(1, real.numel() + 1).view(real.shape)).sum()


def difference(got: list[Any], want: list[Any]) -> str:
    """The first thing in which two observations differ; empty where they do not."""
    for k, (one, other) in enumerate(zip(got, want, strict=True)):
        if isinstance(one, tuple) or isinstance(other, tuple):
            if one != other:
                return f"call {k}: {one}, want {other}"
            continue
        for key in want[k]:
            if not _same(one[key], other[key]):
                return f"call {k}: {key} {one[key]}, want {other[key]}"
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, 1e-12, 1e-12, equal_nan=True)
    return bool(one == other)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (i % 2)) for i, n in enumerate(CASES)],
)
def test_does_what_eager_does(name: str) -> None:
    want = observe(name, None)
    found = difference(observe(name, "piper"), want)
    if found:
        theirs = difference(observe(name, "aot_eager"), want)
        assert theirs, f"piper: {found}\naot_eager is right"
        pytest.xfail(f"torch's aot_eager is not right, either: {theirs}")


@pytest.mark.parametrize("name", ["sizes_that_change", "numbers_that_change", "strided_inputs"])
def test_with_symbolic_sizes(name: str) -> None:
    assert not difference(observe(name, "piper", dynamic=True), observe(name, None))


def test_a_difference_is_seen() -> None:
    """The check fails where a call does something else."""
    for one, other in (("dropout", "random_results"), ("views_of_an_input", "views_of_a_result")):
        assert difference(observe(one, None), observe(other, None))
