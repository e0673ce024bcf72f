"""Emulated devices: chunks that compute nothing but take their modelled time.

Signature: a chunk -> a callable that gives zeros of the right form; programs and costs -> seconds
per task. Equal chunks share a callable but tasks have their own durations, so the waiting is the
program's: `emit` puts it around each chunk. Messages are real.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.costs import Costs, durations
from piper_dynamo.errors import PiperStrategyError, format_error
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import RankProgram
from piper_dynamo.ir.spec import TensorSpec


def emulated_chunk(chunk: Chunk) -> Callable[[list[Any]], Sequence[Any]]:
    """What a compiled chunk gives, all zeros.

    Bundles are made once: only emulated chunks take them, and those look at nothing. Results are
    made anew, since users may keep and change outputs and gradients.
    """
    fresh, bundle = chunk.outputs[: chunk.num_results], chunk.outputs[chunk.num_results :]
    kept = [zeros(spec) for spec in bundle]

    def run(args: list[Any]) -> Sequence[Any]:
        args.clear()
        return [*map(zeros, fresh), *kept]

    return run


def zeros(spec: TensorSpec | None) -> Tensor | None:
    """A tensor of this form, all zeros; its strides may leave gaps or repeat elements."""
    if spec is None:
        return None
    if spec.is_contiguous:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    reach = [(size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True)]
    storage = torch.zeros(1 + sum(reach), dtype=spec.dtype, device=spec.device)
    return storage.as_strided(spec.shape, spec.stride)


def modelled_seconds(
    programs: Sequence[RankProgram], costs: Costs, halves: Mapping[str, tuple[bool, bool]]
) -> dict[str, float]:
    """Seconds per task, exactly those that `simulate` charges.

    Raises:
        PiperStrategyError: A task would take no finite time of at least 0.
    """
    found = durations(programs, costs, halves)
    wrong = [f"{task}: {s!r} s" for task, s in found.items() if not 0 <= s < math.inf]
    if wrong:
        raise PiperStrategyError(
            format_error(
                "option 'costs' gives tasks a time that cannot be waited",
                {"tasks": "\n".join(wrong[:5] + ["..."] * (len(wrong) > 5))},
                hint="give seconds, finite and at least 0",
            )
        )
    return found
