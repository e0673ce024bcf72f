"""Padding: what is said of an operator's result holds when it is computed."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from piper_dynamo.passes.padding import Padding, padding_of, to_mask

aten = torch.ops.aten
ZERO, FINITE, ANY = Padding
VALUES = {ZERO: 0.0, FINITE: -0.75, ANY: float("nan")}


def said(op: Callable[..., Any], *args: Any) -> Padding:
    """What is said of the result, for operands of which that much is known."""
    graph = fx.Graph()
    known: dict[fx.Node, Padding] = {}
    operands: list[Any] = []
    for place, arg in enumerate(args):
        operands.append(graph.placeholder(f"x{place}") if isinstance(arg, Padding) else arg)
        if isinstance(arg, Padding):
            known[operands[-1]] = arg
    return padding_of(graph.call_function(op, tuple(operands)), known)


def computed(op: Callable[..., Any], *args: Any) -> Padding:
    """What rows of such values come to."""
    given = [torch.full((2, 3), VALUES[a]) if isinstance(a, Padding) else a for a in args]
    result: Tensor = op(*given)
    return ANY if not result.isfinite().all() else FINITE if result.any() else ZERO


UNARY = ("relu", "silu", "gelu", "tanh", "neg", "sigmoid", "exp", "log", "reciprocal", "rsqrt")
BACKWARDS = ("silu", "gelu", "tanh", "sigmoid")
CASES: list[tuple[Any, ...]] = [
    *((getattr(aten, name).default, x) for name in UNARY for x in Padding),
    *(
        (getattr(aten, f"{name}_backward").default, x, y)
        for name in BACKWARDS
        for x, y in product(Padding, Padding)
    ),
    *((aten.threshold_backward.default, x, y, 0) for x, y in product(Padding, Padding)),
    *(
        (op.Tensor, x, y)
        for op in (aten.add, aten.sub, aten.mul, aten.div)
        for x in Padding
        for y in Padding
    ),
    *(
        (op, x, number)
        for op in (aten.add.Tensor, aten.mul.Tensor)
        for x in Padding
        for number in (0, 2)
    ),
    *((aten.sum.dim_IntList, x, [1], True) for x in Padding),
    *((aten.constant_pad_nd.default, x, [1, 0], *fill) for x in Padding for fill in ((), (1.0,))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]._opname}-{'-'.join(map(str, c[1:]))}")
def test_results_are_at_least_as_good_as_said(case: tuple[Any, ...]) -> None:
    assert computed(*case) <= said(*case)


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "tanh", "neg"])
def test_zeros_that_stay_zeros_are_known_to(name: str) -> None:
    assert said(getattr(aten, name).default, ZERO) is ZERO


@pytest.mark.parametrize("name", ["silu", "gelu", "tanh", "sigmoid"])
def test_gradients_of_zeros_stay_zeros_whatever_the_finite_value(name: str) -> None:
    assert said(getattr(aten, f"{name}_backward").default, ZERO, FINITE) is ZERO
    assert said(getattr(aten, f"{name}_backward").default, FINITE, ZERO) is FINITE


@pytest.mark.parametrize(("x", "y"), list(product(Padding, Padding)))
def test_the_fewest_factors_are_masked(x: Padding, y: Padding) -> None:
    """Padding then adds zeros to x^T @ y; with any fewer masks it need not."""

    def adds_nothing(places: tuple[int, ...]) -> bool:
        factors = [0.0 if place in places else VALUES[one] for place, one in enumerate((x, y))]
        return factors[0] * factors[1] == 0.0

    enough = [places for places in ((), (0,), (1,), (0, 1)) if adds_nothing(places)]
    assert to_mask(x, y) in enough
    assert len(to_mask(x, y)) == min(map(len, enough))
