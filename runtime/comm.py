"""What a rank program asks of communication, and how torch.distributed gives it.

Sends are asynchronous and first-in first-out per channel; receives are posted in the order the peer
sends. A message's tag is its position in the channel, so that the two ends must agree on which
message it is.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperTimeoutError

POLL_S = 0.002
FOREVER_S = 1e6  # what a timedelta and gloo take for no deadline


class Communicator(Protocol):
    """One rank's way to the others; every wait ends within the deadline or raises."""

    rank: int
    world_size: int
    timeout_s: float
    steps: int
    programs: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]]

    def post(self, source: int, message: int, like: Any) -> Any:
        """Start to receive a message of the channel from `source`, shaped like `like`; a handle."""

    def wait(self, handle: Any) -> Tensor:
        """The value of a posted receive or started collective."""

    def send(self, value: Tensor, target: int, message: int) -> None:
        """Start to send; `value` must not change before its `drain`."""

    def drain(self, target: int, message: int) -> None:
        """Wait until a sent value has left."""

    def start_collective(self, name: str, value: Tensor, group: Sequence[int], like: Any) -> Any:
        """Start the collective `name` over `group`, with a result shaped like `like`; a handle."""

    def prepare_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Create communicators; every rank calls this with the same groups in the same order."""

    def reduce_now(self, value: Tensor) -> Tensor:
        """The sum of `value` over all ranks; blocks."""

    def publish(self, key: str, text: str) -> None:
        """Leave a short text that any rank can read, in place of an earlier one."""

    def lookup(self, key: str, start: str, timeout_s: float) -> str | None:
        """A published text that begins with `start`; None if there is none within the time."""

    def abandon(self) -> None:
        """Forget what a failed step left in flight."""


class TorchCommunicator:
    """torch.distributed's default process group (gloo on CPU)."""

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout_s = timeout_s
        self.steps = 0
        self.programs: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()
        self.group = dist.group.WORLD
        self._store = compat.default_store()
        self._sending: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        self._groups: dict[tuple[int, ...], Any] = {}

    def post(self, source: int, message: int, like: Any) -> Any:
        """See `Communicator`."""
        buffer = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return dist.irecv(buffer, source, tag=message), buffer

    def wait(self, handle: Any) -> Tensor:
        """See `Communicator`."""
        work, value = handle
        self._finish(work)
        return value  # type: ignore[no-any-return]

    def _finish(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=min(self.timeout_s, FOREVER_S)))
        except RuntimeError as error:
            if "imed out" in str(error) or "timeout" in str(error).lower():
                raise PiperTimeoutError(f"nothing came within {self.timeout_s:g} s") from error
            raise

    def send(self, value: Tensor, target: int, message: int) -> None:
        """See `Communicator`."""
        # The Work must be kept: dropping it loses the message.
        work = dist.isend(value, target, tag=message)
        self._sending[target, message] = work, value

    def drain(self, target: int, message: int) -> None:
        """See `Communicator`."""
        work, _ = self._sending.pop((target, message))
        self._finish(work)

    def start_collective(self, name: str, value: Tensor, group: Sequence[int], like: Any) -> Any:
        """See `Communicator`."""
        members = self._group(tuple(group))
        result = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if name == "all_reduce":
            result.copy_(value)
            work = dist.all_reduce(result, group=members, async_op=True)
        elif name == "all_gather":
            work = dist.all_gather_into_tensor(result, value, group=members, async_op=True)
        elif name == "reduce_scatter":
            work = dist.reduce_scatter_tensor(result, value, group=members, async_op=True)
        else:
            work = dist.all_to_all_single(result, value, group=members, async_op=True)
        return work, result

    def prepare_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Create communicators; every rank calls this with the same groups in the same order."""
        for group in groups:
            if group not in self._groups:
                self._groups[group] = dist.new_group(list(group))

    def _group(self, group: tuple[int, ...]) -> Any:
        return self._groups[group]

    def reduce_now(self, value: Tensor) -> Tensor:
        """See `Communicator`."""
        result = value.clone()
        self._finish(dist.all_reduce(result, async_op=True))
        return result

    def publish(self, key: str, text: str) -> None:
        """See `Communicator`."""
        self._store.set(f"piper/{key}", text)

    def lookup(self, key: str, start: str, timeout_s: float) -> str | None:
        """See `Communicator`."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._store.check([f"piper/{key}"]):
                text = bytes(self._store.get(f"piper/{key}")).decode()
                if text.startswith(start):
                    return text
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)

    def abandon(self) -> None:
        """See `Communicator`."""
        self._sending.clear()
