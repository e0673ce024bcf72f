"""A step recorded once and replayed: the host then issues one thing for all of it.

Recorded is a step on fixed memory: parameters must stay where they are, and what is given to a step
is copied to where the recorded one reads it. What it returns is copied, since the next replay
writes the same memory again and gradients are the caller's.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Values = Sequence[Tensor]
Run = Callable[[Values, Values, Values], Any]


class Recorder(Protocol):
    """Records what a device is given."""

    def __call__(self, fn: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What `fn` returns, in memory that each call of the second result writes anew.

        Recording itself runs nothing.
        """


def record_cuda(fn: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record a CUDA graph; see `Recorder`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = fn()
    return results, graph.replay


class StepGraph:
    """Runs a step: plainly where its memory is new, then recorded.

    The first step on some memory runs plainly, so that libraries and kernels are loaded; the second
    records; from then on it is replayed.
    """

    def __init__(self, run: Run, record: Recorder = record_cuda) -> None:
        self._run, self._record = run, record
        self._places: tuple[int, ...] = ()
        self._given: list[Tensor] = []
        self._results: Any = None
        self._replay: Callable[[], None] | None = None
        self.recorded = 0  # how often it has recorded

    def __call__(self, state: Values, data: Values, weights: Values) -> Any:
        """One step; see `Executor.run`."""
        places = tuple(value.data_ptr() for value in state)
        if places != self._places:
            self._places, self._replay, self._results = places, None, None
            return self._run(state, data, weights)
        if self._replay is None:
            self._given = [value.clone() for value in (*data, *weights)]
            given = self._given
            kept = list(state)
            count = len(data)
            self._results, self._replay = self._record(
                lambda: self._run(kept, given[:count], given[count:])
            )
            self.recorded += 1
        else:
            for room, value in zip(self._given, (*data, *weights), strict=True):
                room.copy_(value)
        self._replay()
        return _copied(self._results)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return tuple(_copied(one) for one in value) if isinstance(value, tuple) else value
