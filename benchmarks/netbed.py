"""A job whose ranks are hosts of their own: network namespaces, joined by links that can fail.

    with Links(4, mbit=1000) as links:
        job = Hosts.start(links, train, timeout_s=6.0)
        links.cut(2)
        found = job.join(limit_s=11.0)

Each rank is a process in the namespace of its host (`links.py`), started as torchrun starts ranks:
by RANK, WORLD_SIZE and the address of rank 0's host. Needs Linux, root, `ip` and `tc`.

Signature: links, a function -> what it returned, or how it failed, on each rank.
"""

import multiprocessing as mp
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

import piper_dynamo as piper
from benchmarks.links import Links
from piper_dynamo.runtime.failure import Failure

FIRST_PORT, NUM_PORTS = 29600, 300  # one per job: a port may stay busy for a while


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a rank: its value, or its failure; neither where it had to be killed."""

    value: Any = None
    failure: Failure | None = None
    is_hung: bool = False


class Hosts:
    """The ranks of a job that runs."""

    _jobs = 0

    def __init__(self, processes: list[Any], pipes: list[Connection]) -> None:
        self._processes, self._pipes = processes, pipes

    @classmethod
    def start(
        cls, links: Links, fn: Callable[[], Any], *, timeout_s: float, method: str = "spawn"
    ) -> "Hosts":
        """Start `fn()` on every host.

        Args:
            links: The hosts.
            fn: At the top of a module; it is called with the process group ready.
            timeout_s: See `piper.launch`.
            method: How Python starts processes.
        """
        context: Any = mp.get_context(method)
        port = FIRST_PORT + cls._jobs % NUM_PORTS
        cls._jobs += 1
        processes, pipes = [], []
        for rank in range(links.ranks):
            ours, theirs = context.Pipe(duplex=False)
            args = (links, rank, port, fn, timeout_s, theirs)
            process = context.Process(target=_host, args=args, name=f"host {rank}", daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return cls(processes, pipes)

    def join(self, limit_s: float) -> list[Outcome]:
        """What became of each rank; those that have not ended within the limit are killed."""
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + limit_s
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    self._processes[rank].join(1.0)
                    code = self._processes[rank].exitcode
                    found[rank] = Outcome(failure=Failure.ended(rank, code))
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
                process.join()
        hung = Outcome(is_hung=True)
        return [found.get(rank, hung) for rank in range(len(self._processes))]


def _host(
    links: Links, rank: int, port: int, fn: Callable[[], Any], timeout_s: float, give: Connection
) -> None:
    links.enter(rank)
    os.environ.update(
        TORCHELASTIC_RUN_ID=f"netbed {port}",
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(links.ranks),
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=links.address(0),
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="eth0",
    )
    torch.set_num_threads(1)
    try:
        (value,) = piper.launch(fn, links.ranks, engine="torchrun", timeout_s=timeout_s)
        give.send(Outcome(value=value))
    except BaseException as error:
        give.send(Outcome(failure=Failure.of(rank, error)))
        os._exit(1)  # a normal end would wait for connections that are cut
