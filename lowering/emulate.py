"""Emulated devices: chunks that compute nothing but take their modelled time.

Signature: a chunk -> a callable that gives zeros of the right form. Equal chunks share a callable
but tasks have their own durations, so the waiting is the program's: `emit` puts it around each
chunk. Messages are real.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node

from piper_dynamo.errors import PiperStrategyError, format_error
from piper_dynamo.ir.alias import exchange_of
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind


def emulated_chunk(chunk: Chunk) -> Callable[[list[Any]], Sequence[Any]]:
    """What a compiled chunk gives, all zeros; of experts' counts, the same for each.

    Bundles are made once: only emulated chunks take them, and those look at nothing. Results are
    made anew, since users may keep and change outputs and gradients.

    Raises:
        PiperStrategyError: Experts cannot be given the same number of rows.
    """
    fresh, bundle = chunk.outputs[: chunk.num_results], chunk.outputs[chunk.num_results :]
    kept = [zeros(spec) for spec in bundle]
    even = _even_counts(chunk)

    def run(args: list[Any]) -> Sequence[Any]:
        args.clear()
        results = [zeros(spec) for spec in fresh]
        for index, counts in even.items():
            results[index] = counts.clone()
        return [*results, *kept]

    return run


def _even_counts(chunk: Chunk) -> dict[int, Tensor]:
    """Counts of rows that the chunk gives: experts are used evenly, so that rows really travel."""
    found = {}
    outputs = chunk.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    for index, node in enumerate(outputs[: chunk.num_results]):
        if not isinstance(node, Node) or exchange_of(node) is not Kind.EXCHANGE_COUNTS:
            continue
        sent = [u for u in node.users if exchange_of(u) is Kind.EXCHANGE]
        rows = sent[0].meta["val"].shape[0] if sent else 0
        counts = zeros(chunk.outputs[index])
        assert counts is not None
        if rows % counts.shape[0]:
            raise PiperStrategyError(
                format_error(
                    "emulated devices use all experts alike, and that cannot be here",
                    {"rows of a microbatch": rows, "experts": counts.shape[0]},
                    hint="choose tokens per microbatch, times experts per token, that the experts "
                    "divide",
                )
            )
        found[index] = counts + rows // counts.shape[0]
    return found


def zeros(spec: TensorSpec | None) -> Tensor | None:
    """A tensor of this form, all zeros; its strides may leave gaps or repeat elements."""
    if spec is None:
        return None
    if spec.is_contiguous:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    reach = [(size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True)]
    storage = torch.zeros(1 + sum(reach), dtype=spec.dtype, device=spec.device)
    return storage.as_strided(spec.shape, spec.stride)
