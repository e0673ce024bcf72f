"""Bytes that torch's CPU allocator gives out during a step, block by block, from its profiler.

Resident memory knows a block once it has been written to; the allocator knows it from the first
moment, as a plan does. What gloo allocates for itself is in neither.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from piper_dynamo import blocks
from piper_dynamo.runtime.executor import Runtime

MARK = "piper: an instruction has been issued"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Bytes of what was allocated during a call.

    Attributes:
        between: The most after any instruction of a recorded step.
        ever: The most at any moment.
        left: At its end.
    """

    between: int
    ever: int
    left: int


def allocated(call: Callable[[], Any]) -> Allocated:
    """Call it, with a step of which every instruction is marked."""
    with _marked(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = [e for e in events if e.get("name") in (MARK, "[memory]")]
    now = between = ever = 0
    for event in sorted(wanted, key=lambda e: float(e["ts"])):
        if event["name"] == MARK:
            between = max(between, now)
        elif event["args"]["Device Type"] == 0:
            now += event["args"]["Bytes"]
            ever = max(ever, now)
    return Allocated(between=between, ever=ever, left=now)


@contextmanager
def _marked() -> Iterator[None]:
    """Every instruction leaves a mark in the profile, and all memory comes from torch."""
    mark, least = Runtime.mark, blocks.LEAST_BYTES

    def marking(self: Runtime, index: int) -> None:
        with record_function(MARK):
            mark(self, index)

    Runtime.mark = marking  # type: ignore[method-assign]
    blocks.LEAST_BYTES = torch.iinfo(torch.int64).max
    try:
        yield
    finally:
        Runtime.mark = mark  # type: ignore[method-assign]
        blocks.LEAST_BYTES = least
