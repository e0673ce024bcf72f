"""What ranks on one machine take of each other: links between two, and processors that they share.

A machine's speed drifts, by a third within minutes where others use it. So everything is sampled
in rounds, of which each has all of it once and in turn, and the medians are what is told.

Signature: rounds -> fields of a profile.
"""

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from piper_dynamo.costs import sent_bytes
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind
from piper_dynamo.runtime.comm import TorchCommunicator
from piper_dynamo.runtime.world import communicator, rank, world_size

WARM, ROUNDS = 2, 15
SIZES = (2**8, 2**16, 2**18, 2**20, 2**22)  # bytes of messages
VALUES = 65  # of a collective with many
FEW, LARGE = SIZES[0] // 4, SIZES[-1] // 4  # float32 numbers
COLLECTIVES = ((Op.ALL_REDUCE, 1, 1), (Op.ALL_GATHER, 1, 2), (Op.REDUCE_SCATTER, 2, 1))
GROUP = ("profile", (0, 1))


class Links:
    """Samples of messages and collectives; both of two ranks make one, and call it alike."""

    def __init__(self) -> None:
        """Warm: a round that is not counted has been run for each of `WARM`."""
        found = communicator(60.0)
        assert isinstance(found, TorchCommunicator)
        self.comm = found
        self.comm.prepare_groups([GROUP])
        self.took: dict[Hashable, list[float]] = {}
        for _ in range(WARM):
            self.sample()
        self.took.clear()

    def sample(self) -> None:
        """One round of everything."""
        for nbytes in SIZES:
            value = torch.zeros(nbytes // 4)
            dist.barrier()
            self._add(("there", nbytes), _time(functools.partial(self._round_trip, value)) / 2)
            self._add(("back", nbytes), _time(functools.partial(self._all_reduce, [value])))
        small = [torch.zeros(FEW) for _ in range(VALUES)]
        self._add("many", _time(functools.partial(self._all_reduce, small)))
        self._sample_issuing()
        one, other = torch.zeros(LARGE), torch.zeros(LARGE)
        self._add(Op.ADD, _time(lambda: one + other))
        self._add(Op.ACCUMULATE, _time(lambda: one.add_(other)))

    def _sample_issuing(self) -> None:
        """What transfers take of a rank that computes on: each, each value, each byte.

        A transfer costs processor time until it is over, not only where it is issued: messages are
        copied and summed by threads of the rank. So what it takes is how much longer the rank
        computes while it is under way.
        """
        alone = work_of(2)
        for op, given, come in COLLECTIVES:
            for count, size in ((1, FEW), (VALUES, FEW), (1, LARGE)):
                values = [torch.zeros(given * size) for _ in range(count)]
                likes = [torch.zeros(come * size) for _ in range(count)]
                dist.barrier()
                begin = time.perf_counter()
                handle = self.comm.start_collective(op, values, GROUP, likes)
                if count == 1 and size == FEW:
                    self._add(("issued", op), time.perf_counter() - begin)
                _work()
                self.comm.wait_all(handle)
                self._add((op, count, size), time.perf_counter() - begin - alone)
        for op, source in ((Op.SEND, 0), (Op.POST, 1)):  # as rank 0 sees it
            for size in (FEW, LARGE):
                dist.barrier()
                self._add((op, 1, size), self._while_one_sends(source, torch.zeros(size)) - alone)

    def fields(self) -> dict[str, Any]:
        """Of a profile: what messages take, collectives beside them, and issuing either."""
        there = [self._median(("there", nbytes)) for nbytes in SIZES]
        back = [self._median(("back", nbytes)) for nbytes in SIZES]
        sent = [sent_bytes(Kind.ALL_REDUCE, [_flat(nbytes)], 2) for nbytes in SIZES]
        per_value = max((self._median("many") - back[0]) / (VALUES - 1), 0.0)
        alpha, per_byte = _line(SIZES, there)
        start, per_reduced = _line(sent, back)
        return {
            "alpha": alpha,
            "bandwidth": 2 / (per_byte + per_reduced),
            "skew": max(start - alpha - per_value, 0.0),
            "per_value": per_value,
            **self._issuing(),
        }

    def _issuing(self) -> dict[str, dict[str, float]]:
        """The host's fields, by what an instruction does."""
        found: dict[str, dict[str, float]] = {"host": {}, "host_value": {}, "host_byte": {}}

        def extra(op: Op, count: int, size: int) -> float:
            return max(self._median((op, count, size)) - self._median((op, 1, FEW)), 0.0)

        for op, _, come in COLLECTIVES:
            found["host"][op.value] = self._median(("issued", op))
            found["host_value"][op.value] = extra(op, VALUES, FEW) / (VALUES - 1)
            found["host_byte"][op.value] = extra(op, 1, LARGE) / (4 * come * (LARGE - FEW))
        for op in (Op.SEND, Op.POST):
            found["host_byte"][op.value] = extra(op, 1, LARGE) / (4 * (LARGE - FEW))
        for op in (Op.ADD, Op.ACCUMULATE):
            found["host_byte"][op.value] = self._median(op) / (4 * LARGE)
        return found

    def _add(self, what: Hashable, seconds: float) -> None:
        self.took.setdefault(what, []).append(seconds)

    def _median(self, what: Hashable) -> float:
        return statistics.median(self.took[what])

    def _round_trip(self, value: torch.Tensor) -> None:
        other = 1 - self.comm.rank
        handle = self.comm.post(other, 0, value)
        if self.comm.rank == 0:
            self.comm.send(value, other, 0)
        got = self.comm.wait(handle)
        if self.comm.rank == 1:
            self.comm.send(got, other, 0)
        self.comm.drain(other, 0)

    def _all_reduce(self, values: Sequence[torch.Tensor]) -> None:
        self.comm.wait_all(self.comm.start_collective(Op.ALL_REDUCE, values, GROUP, values))

    def _while_one_sends(self, source: int, value: torch.Tensor) -> float:
        """How long this rank computes, and waits, while a message goes from `source`."""
        begin = time.perf_counter()
        if self.comm.rank == source:
            self.comm.send(value, 1 - source, 0)
            _work()
            self.comm.drain(1 - source, 0)
        else:
            handle = self.comm.post(source, 0, value)
            _work()
            self.comm.wait(handle)
        return time.perf_counter() - begin


def slowdown_of(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """A profile's slowdown from `ratios` of some rounds."""
    found = (statistics.median(column) for column in zip(*rounds, strict=True))
    return (1.0, *(max(ratio, 1.0) for ratio in found))


def ratios() -> list[float]:
    """How much longer rank 0 takes while 2, 3, ... ranks work, beside alone; on every rank.

    Alone and together one after the other: what else the machine does in between slows one round,
    and not one side.
    """
    alone = work_of(1)
    together = [work_of(count) for count in range(2, world_size() + 1)]  # begins with a barrier
    return [each / alone if alone else 1.0 for each in together]


def work_of(count: int) -> float:
    """What rank 0 takes for a fixed mixture of products and traffic while `count` ranks do it."""
    dist.barrier()
    return _time(_work) if rank() < count else 0.0


def _work() -> None:
    weight, rows = torch.zeros(256, 256), torch.zeros(512, 256)
    for _ in range(24):
        hidden = torch.nn.functional.silu(rows @ weight)
        torch.softmax(hidden.add_(rows), -1)


def _time(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _flat(nbytes: int) -> TensorSpec:
    return TensorSpec.of(torch.empty(nbytes // 4))


def _line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope: of the smallest size, and of the two largest."""
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return seconds[0], max(slope, 1e-15)
