"""The key-value store through which the ranks of a job speak beside their messages.

It belongs to the process that started the ranks, or to rank 0's machine, so it can be out of reach.
A request to a machine that is cut off does not come back, whatever its deadline: `Store` notes
since when it waits, and the watchdog (`waiting.py`) ends a rank that waits too long.
"""

import time
from collections.abc import Callable
from typing import Any


class Store:
    """A store of torch.distributed; texts under keys of Piper's own.

    Attributes:
        since_s: Since when a request waits for its answer, in seconds of the monotonic clock; 0.0
            where none does.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.since_s = 0.0

    def another(self) -> "Store":
        """The same store by a connection of its own, for another thread."""
        return Store(self._store.clone())

    def set(self, key: str, text: str) -> None:
        """Leave a text, in place of an earlier one."""
        self._ask(self._store.set, f"piper/{key}", text)

    def get(self, key: str) -> str | None:
        """The text of a key, if it has one."""
        if not self._ask(self._store.check, [f"piper/{key}"]):
            return None
        return bytes(self._ask(self._store.get, f"piper/{key}")).decode()

    def count(self, key: str) -> int:
        """How many have counted this key, this one included."""
        found: int = self._ask(self._store.add, f"piper/{key}", 1)
        return found

    def forget(self, key: str) -> None:
        """Remove a key."""
        self._ask(self._store.delete_key, f"piper/{key}")

    def _ask(self, request: Callable[..., Any], *args: Any) -> Any:
        self.since_s = time.monotonic()
        try:
            return request(*args)
        finally:
            self.since_s = 0.0
