"""Kernels of users in chunks.

A pattern is traced to a graph of the operators that chunks are made of, and looked for from its
result backwards. The kernel becomes an operator of its own, which neither the fusing compiler nor
any other pass looks into.

Signature: chunks by name, kernels -> chunks by name.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, PiperRuntimeError, format_error
from piper_dynamo.ir.alias import operator_name
from piper_dynamo.ir.chunk import Chunk, copied, make_chunk, spec_of
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.user_kernels import Kernel

_Bound = dict[Node, Node]  # from the pattern's nodes to the chunk's


def substitute(chunks: Mapping[str, Chunk], kernels: Sequence[Kernel]) -> dict[str, Chunk]:
    """Put kernels in the place of what their patterns match.

    rewrite:   y = op2(op1(a), b)   ->   y = kernel(a, b)
    requires:  the operators and numbers of the pattern, on inputs of its shapes and dtypes
    keeps:     what the kernel keeps: values, if it computes what its pattern does

    Args:
        chunks: By name.
        kernels: In the order in which they are tried.

    Raises:
        PiperPlanError: A pattern is found nowhere, or is none.
    """
    found = dict(chunks)
    for kernel in kernels:
        pattern = _traced(kernel)
        made: dict[str, Chunk | None] = {}  # by key: equal chunks become equal ones
        for name, chunk in found.items():
            if chunk.key not in made:
                made[chunk.key] = _replaced(chunk, kernel, pattern)
            found[name] = made[chunk.key] or chunk
        if not any(made.values()):
            raise PiperPlanError(_nowhere(kernel, pattern, found))
    return found


def _traced(kernel: Kernel) -> fx.Graph:
    """The pattern as a graph with one result, which some operator has made."""
    given = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype) for s in kernel.inputs]
    with torch.no_grad():
        graph = make_fx(kernel.pattern, tracing_mode="fake")(*given).graph
    (result,) = graph.output_node().args
    if not isinstance(result, Node) or result.op != "call_function":
        raise PiperPlanError(
            format_error(
                "the pattern of a kernel makes no tensor of its own",
                {"kernel": repr(kernel), "at": kernel.where},
                hint="a pattern takes tensors and returns one tensor, made by torch's operators",
            )
        )
    return graph


def _replaced(chunk: Chunk, kernel: Kernel, pattern: fx.Graph) -> Chunk | None:
    """The chunk with the kernel in it; None where nothing matches."""
    graph = copied(chunk.graph)
    inputs = list(pattern.find_nodes(op="placeholder"))
    (result,) = pattern.output_node().args
    assert isinstance(result, Node)
    spec = spec_of(result)
    assert spec is not None
    operator = _operator(kernel, spec)
    places = 0
    for node in list(graph.nodes):
        bound: _Bound = {}
        if not _matches(result, node, bound) or _form(spec_of(node)) != _form(spec):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(operator, tuple(bound[one] for one in inputs))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        places += 1
    if not places:
        return None
    graph.eliminate_dead_code()
    made = make_chunk(graph, chunk.num_results)
    return replace(made, is_ragged=chunk.is_ragged, is_random=chunk.is_random)


def _form(spec: TensorSpec | None) -> object:
    """All but the device, which a pattern does not say."""
    return (spec.shape, spec.dtype, spec.stride) if spec is not None else None


def _matches(pattern: Node, node: Node, bound: _Bound) -> bool:
    """Whether a node computes what a pattern's does; binds the pattern's nodes on the way."""
    if pattern in bound:
        return bound[pattern] is node
    if pattern.op == "placeholder":
        have, want = spec_of(node), spec_of(pattern)
        if have is None or want is None or (have.shape, have.dtype) != (want.shape, want.dtype):
            return False
    elif (node.op, node.target) != (pattern.op, pattern.target) or not (
        _same(pattern.args, node.args, bound) and _same(pattern.kwargs, node.kwargs, bound)
    ):
        return False
    bound[pattern] = node
    return True


def _same(pattern: Any, given: Any, bound: _Bound) -> bool:
    if isinstance(pattern, Node):
        return isinstance(given, Node) and _matches(pattern, given, bound)
    if isinstance(pattern, tuple | list):
        return (
            isinstance(given, tuple | list)
            and len(given) == len(pattern)
            and all(_same(one, other, bound) for one, other in zip(pattern, given, strict=True))
        )
    if isinstance(pattern, Mapping):
        return (
            isinstance(given, Mapping)
            and pattern.keys() == given.keys()
            and all(_same(value, given[key], bound) for key, value in pattern.items())
        )
    return type(pattern) is type(given) and bool(pattern == given)


@functools.cache
def _operator(kernel: Kernel, spec: TensorSpec) -> Any:
    """The kernel as an operator; it checks what the kernel gives."""

    def run(*inputs: Tensor) -> Tensor:
        found = kernel.kernel(*inputs)
        if not isinstance(found, Tensor) or _form(TensorSpec.of(found)) != _form(spec):
            shown = f"{TensorSpec.of(found)}" if isinstance(found, Tensor) else repr(found)
            raise PiperRuntimeError(
                format_error(
                    "a kernel does not give what its pattern does",
                    {"kernel": repr(kernel), "gives": shown, "pattern": f"{spec} {spec.stride}"},
                )
            )
        return found

    def fake(*inputs: Tensor) -> Tensor:
        device = inputs[0].device
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)

    named = getattr(kernel.kernel, "__qualname__", type(kernel.kernel).__qualname__)
    name = f"{re.sub(r'[^A-Za-z0-9_]', '_', named)}_{len(_names)}"
    _names.append(name)
    taken = ", ".join(f"Tensor a{k}" for k in range(len(kernel.inputs)))
    made = torch.library.custom_op(
        f"piper_kernels::{name}", run, mutates_args=(), schema=f"({taken}) -> Tensor"
    )
    made.register_fake(fake)
    return getattr(torch.ops.piper_kernels, name).default


_names: list[str] = []


def _nowhere(kernel: Kernel, pattern: fx.Graph, chunks: Mapping[str, Chunk]) -> str:
    there = {
        operator_name(node)
        for chunk in chunks.values()
        for node in chunk.graph.nodes
        if node.op == "call_function"
    }
    asked = [operator_name(node) for node in pattern.nodes if node.op == "call_function"]
    missing = [name for name in dict.fromkeys(asked) if name not in there]
    return format_error(
        "the pattern of a kernel is found in no task",
        {
            "kernel": repr(kernel),
            "at": kernel.where,
            "operators": ", ".join(asked),
            "in no task": ", ".join(missing) or "none of these: shapes, numbers or order differ",
        },
        hint="shapes are those of one microbatch, on one rank; write the pattern as the model does",
    )
