"""Ranks joined by links of a stated rate: a network namespace each, veth pairs and a bridge.

On one machine loopback is too fast for communication to matter. Here what a rank sends passes a
token bucket (tc-tbf(8)). Building this needs Linux, root, and the commands `ip` and `tc`.

Signature: number of ranks, rate -> a context in which functions run once per rank.
"""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Collection
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from piper_dynamo.timeline import Timeline

NAME = "piperbench"
CLONE_NEWNET = 0x40000000  # sched.h
PORT = 29511
BURST = "64kb"  # smaller messages pass at once
LEAST_BURST = "2kb"  # a packet must fit in
LIMIT = "64mb"  # what may wait in the bucket's queue: no message is dropped


def missing() -> str:
    """What this machine lacks for namespaces; empty if nothing."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "root, for network namespaces"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"the commands {' and '.join(absent)}" if absent else ""


class Links:
    """The namespaces of one set of ranks; removed again at the end of a `with`.

    Args:
        ranks: How many.
        mbit: What each may send, in 10^6 bits per second.
    """

    def __init__(self, ranks: int, mbit: float) -> None:
        lacking = missing()
        if lacking:
            raise click.ClickException(f"links of a stated rate need {lacking}")
        self.ranks, self.mbit = ranks, mbit

    @property
    def bytes_per_s(self) -> float:
        """What each rank may send."""
        return self.mbit * 1e6 / 8

    def __enter__(self) -> "Links":
        _remove()
        try:
            self._make()
        except BaseException:
            _remove()
            raise
        return self

    def _make(self) -> None:
        _ip("link", "add", NAME, "type", "bridge")
        _ip("link", "set", NAME, "up")
        for rank in range(self.ranks):
            space, outside = f"{NAME}{rank}", _outside(rank)
            _ip("netns", "add", space)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outside, "master", NAME, "up")
            _ip("-n", space, "addr", "add", f"{_address(rank)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")
            self._shape("add", rank, f"{self.mbit}mbit", BURST)

    def __exit__(self, *_: object) -> None:
        _remove()

    def address(self, rank: int) -> str:
        """Where that rank's host is reached."""
        return _address(rank)

    def cut(self, rank: int) -> None:
        """Nothing reaches that host any more, nor leaves it; nobody is told."""
        _ip("link", "set", _outside(rank), "down")

    def mend(self, rank: int) -> None:
        """Undo `cut` and `slow`."""
        _ip("link", "set", _outside(rank), "up")
        self._shape("change", rank, f"{self.mbit}mbit", BURST)

    def slow(self, rank: int, kbit: float) -> None:
        """What that host sends is slow from now on, also the smallest message."""
        self._shape("change", rank, f"{kbit}kbit", LEAST_BURST)

    def _shape(self, verb: str, rank: int, rate: str, burst: str) -> None:
        shape = ("root", "tbf", "rate", rate, "burst", burst, "limit", LIMIT)
        _call("tc", "-n", f"{NAME}{rank}", "qdisc", verb, "dev", "eth0", *shape)

    def enter(self, rank: int) -> None:
        """Let this thread, and those that it starts, live on that rank's host."""
        _enter(f"{NAME}{rank}")

    def run(self, fn: Callable[[], Any]) -> list[Any]:
        """What `fn()` returns on each rank, called with the process group (gloo) ready."""
        context = mp.get_context("spawn")
        with context.Manager() as manager:
            found = manager.dict()
            mp.start_processes(  # type: ignore[no-untyped-call, attr-defined]
                _body, args=(self.ranks, fn, found), nprocs=self.ranks, start_method="spawn"
            )
            return [found[rank] for rank in range(self.ranks)]


def exposed_s(timeline: Timeline, kinds: Collection[str]) -> float:
    """Seconds that a rank waits for collectives of these kinds in a step; the mean over ranks.

    Every rank calls this with its own measured step. The loss's reduction does not count.
    """
    moved = {e.name for e in timeline.events if e.kind in kinds and e.name != "loss"}
    waits = [e for e in timeline.events if e.kind == "wait" and e.name in moved]
    total = torch.tensor(sum(e.duration_s for e in waits), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _body(rank: int, ranks: int, fn: Callable[[], Any], found: Any) -> None:
    _enter(f"{NAME}{rank}")
    os.environ.update(GLOO_SOCKET_IFNAME="eth0", MASTER_ADDR=_address(0), MASTER_PORT=str(PORT))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found[rank] = fn()
    dist.barrier()
    dist.destroy_process_group()


def _enter(space: str) -> None:
    """Let this thread, and those that it starts, live in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{space}", os.O_RDONLY)
    try:
        if libc.setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {space}")
    finally:
        os.close(handle)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _outside(rank: int) -> str:
    """The end of a rank's link at the bridge; interfaces have names of up to 15 letters."""
    return f"{NAME[:8]}v{rank}"


def _remove() -> None:
    """All that is there, also what an earlier run that was killed has left."""
    spaces = json.loads(_ip("-json", "netns", "list") or "[]")
    for space in (entry["name"] for entry in spaces if entry["name"].startswith(NAME)):
        # A namespace lives as long as a process in it, and so would its link.
        _ip("link", "del", _outside(int(space.removeprefix(NAME))), may_fail=True)
        _ip("netns", "del", space, may_fail=True)
    _ip("link", "del", NAME, may_fail=True)


def _ip(*arguments: str, may_fail: bool = False) -> str:
    return _call("ip", *arguments, may_fail=may_fail)


def _call(*command: str, may_fail: bool = False) -> str:
    """What a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
