"""A pool of real processes joined by gloo, started once per test run.

Importing torch takes seconds, so the workers stay and run what they are sent: a function at the top
of a test module, by name. A worker that dies, hangs or loses step with the others ends the pool;
the next use starts a new one.
"""

import importlib
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

GROUP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank's call came to: a value, or the text of what it raised."""

    value: Any = None
    error: str | None = None
    kind: str = ""


class Pool:
    """`size` processes with a gloo process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Outcome]:
        """`fn(*args)` on every rank.

        Raises:
            TimeoutError: A rank did not answer; the pool is ended.
        """
        self._start()
        for pipe in self._pipes:
            pipe.send((fn.__module__, fn.__qualname__, args))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < self.size:
            waiting = {self._pipes[r]: r for r in range(self.size) if r not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(waiting.values())
                self.close()
                raise TimeoutError(f"{fn.__qualname__}: no answer from ranks {silent}")
            for pipe in ready:
                try:
                    outcomes[waiting[pipe]] = pipe.recv()  # type: ignore[index]
                except EOFError:
                    outcomes[waiting[pipe]] = Outcome(error="the process ended", kind="EOFError")  # type: ignore[index]
        found = [outcomes[rank] for rank in range(self.size)]
        if any(one.error is not None for one in found):
            self.close()  # what is left in its channels is not known
        return found

    def values(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What `fn(*args)` returns on every rank; an error of any of them is an error here."""
        found = self.run(fn, *args)
        wrong = [f"rank {r}: {one.error}" for r, one in enumerate(found) if one.error is not None]
        assert not wrong, "\n".join(wrong)
        return [one.value for one in found]

    def close(self) -> None:
        """End the processes that this pool started."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        if self._processes:
            return
        context = mp.get_context("spawn")
        self._folder = TemporaryDirectory(prefix="piper-pool-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, self.size, store, theirs, list(sys.path)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _work(rank: int, size: int, store: str, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            os._exit(0)  # the teardown of gloo is not what is tested
        try:
            torch.manual_seed(0)
            fn: Any = importlib.import_module(module)
            for part in name.split("."):
                fn = getattr(fn, part)
            answer = Outcome(value=fn(*args))
        except Exception as error:
            answer = Outcome(error=f"{error}\n{traceback.format_exc()}", kind=type(error).__name__)
        pipe.send(answer)
