"""What calls do, observed: of eager, of `aot_eager` and of piper without a strategy.

Seen are outputs with their strides, types and memory, inputs, parameters and buffers after each
call, gradients, errors. A *place* is one thing that was seen of one tensor in one call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

Given = tuple[tuple[Any, ...], dict[str, Any]]  # of a call
Made = tuple[Callable[..., Any], Sequence[Given]]
Place = tuple[int, str]
TOLERANCE = 1e-12


@contextmanager
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch._dynamo.reset()


def observe(make: Callable[[], Made], backend: str | None, **options: Any) -> list[Any]:
    """What the calls do that `make` gives with what is called."""
    with fresh():
        fn, calls = make()
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


def differences(got: list[Any], want: list[Any], tolerance: float = TOLERANCE) -> dict[Place, str]:
    """Where two observations differ, and by what."""
    found = {}
    for k, (one, other) in enumerate(zip(got, want, strict=True)):
        if isinstance(one, tuple) or isinstance(other, tuple):
            if one != other:
                found[k, "raised"] = f"call {k}: {one}, want {other}"
            continue
        for key in other:
            for place, mine, wanted in _entries(key, one[key], other[key]):
                if not _same(mine, wanted, tolerance):
                    found[k, place] = f"call {k}: {place} {mine}, want {wanted}"
    return found


def _entries(key: str, got: Any, want: Any) -> Iterator[tuple[str, Any, Any]]:
    """What was seen under a key, one tensor at a time; at once where there are more or fewer."""
    if isinstance(got, list) and isinstance(want, list) and len(got) == len(want):
        yield from ((f"{key}[{k}]", *both) for k, both in enumerate(zip(got, want, strict=True)))
    else:
        yield key, got, want


def _same(one: Any, other: Any, tolerance: float) -> bool:
    """Numbers up to the tolerance times the largest of their tensor."""
    if isinstance(one, list):
        return len(one) == len(other) and all(
            _same(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()) or not one.numel():
        return torch.equal(one, other)
    largest = torch.nan_to_num(other.abs(), posinf=0.0).max().item()
    return torch.allclose(one, other, tolerance, tolerance * max(largest, 1.0), equal_nan=True)


def check(make: Callable[[], Made], tolerance: float = TOLERANCE) -> None:
    """Wherever `aot_eager` does what eager does, so does piper.

    Args:
        make: Gives what is called and the calls, fresh at every time.
        tolerance: Relative to the largest number of a tensor.
    """
    want = observe(make, None)
    ours = differences(observe(make, "piper"), want, tolerance)
    if not ours:
        return
    theirs = differences(observe(make, "aot_eager"), want, tolerance)
    alone = [text for place, text in ours.items() if place not in theirs]
    assert not alone, "aot_eager is right where piper has\n" + "\n".join(alone)
    pytest.xfail(f"torch's aot_eager is not right, either: {next(iter(theirs.values()))}")
