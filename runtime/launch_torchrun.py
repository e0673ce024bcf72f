"""Ranks that torchrun starts: joined from inside, or started by its agent in this process.

The agent is torch's own: it meets those of other hosts, watches the ranks, and starts them again.
"""

import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from piper_dynamo.errors import PiperError
from piper_dynamo.runtime.failure import UNGUARDED, Failure, is_lost
from piper_dynamo.runtime.faults import check_variable
from piper_dynamo.runtime.launch_local import check_sendable
from piper_dynamo.runtime.logs import kept
from piper_dynamo.runtime.outcomes import JobFailedError, job_failed
from piper_dynamo.runtime.world import Outcome, leave, meet_by_environment, share_cores

log = logging.getLogger("piper.launch")

HERE = "localhost:0"  # a meeting place for one host, on a port that is free


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a job, as torchrun's options of the same names say it.

    Attributes:
        nnodes: How many, or least:most.
        nproc_per_node: Ranks of each; None: the largest number of ranks, shared out.
        node_rank: Which of them this is, where it is not left to the meeting.
        rdzv_endpoint: Where they meet: host:port of one of them.
        rdzv_id: What the hosts of one job have in common.
        rdzv_conf: More about the meeting: key=value, separated by commas.
    """

    nnodes: str = "1"
    nproc_per_node: int | None = None
    node_rank: int | None = None
    rdzv_endpoint: str = HERE
    rdzv_id: str | None = None
    rdzv_conf: str = ""

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most hosts.

        Raises:
            PiperError: They are no numbers, or in no order.
        """
        low, _, high = self.nnodes.partition(":")
        if low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low):
            return int(low), int(high or low)
        raise PiperError(f"nnodes is {self.nnodes!r}; give a number of hosts, or least:most")

    def ranks_here(self, ranks: Sequence[int]) -> int:
        """How many ranks of these numbers this host starts.

        Raises:
            PiperError: No number of hosts makes as many.
        """
        low, high = self.bounds
        if self.nproc_per_node is None and max(ranks) % high:
            raise PiperError(
                f"{max(ranks)} ranks do not divide among {high} hosts; give nproc_per_node, or "
                "another number of hosts"
            )
        here = self.nproc_per_node or max(ranks) // high
        possible = [here * count for count in range(low, high + 1)]
        if not set(possible) & set(ranks):
            raise PiperError(
                f"{self.nnodes} hosts of {here} ranks are {', '.join(map(str, possible))} ranks, "
                f"and the job has {' or '.join(map(str, ranks))}"
            )
        return here

    def meeting(self) -> Mapping[str, Any]:
        """How torch's agents meet: by themselves, or in the order that `node_rank` says."""
        conf = dict(pair.partition("=")[::2] for pair in self.rdzv_conf.split(",") if pair)
        if self.bounds[1] > 1 and self.rdzv_endpoint == HERE:
            raise PiperError("several hosts need a place to meet: give rdzv_endpoint=host:port")
        if self.node_rank is None:
            return {"rdzv_backend": "c10d", "rdzv_configs": conf}
        return {"rdzv_backend": "static", "rdzv_configs": conf | {"rank": self.node_rank}}


def run(
    fn: Callable[[], Any],
    ranks: Sequence[int],
    *,
    timeout_s: float,
    max_restarts: int,
    logs: str | None,
    hosts: Hosts | None = None,
) -> list[Any]:
    """Join the ranks that torchrun started; where it started none, start them; see `launch`."""
    check_variable(ranks)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return _start(fn, ranks, timeout_s, max_restarts, logs, hosts or Hosts())
    if max_restarts and os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        log.warning("torchrun starts ranks again only with its own --max-restarts")
    return [_join(fn, ranks, timeout_s, logs)]


def _join(fn: Callable[[], Any], ranks: Sequence[int], timeout_s: float, logs: str | None) -> Any:
    if int(os.environ["WORLD_SIZE"]) not in ranks:
        raise PiperError(
            f"launch(ranks={' or '.join(map(str, ranks))}) was started by torchrun with "
            f"{os.environ['WORLD_SIZE']} processes; make them equal"
        )
    started = not dist.is_initialized()
    if started:
        meet_by_environment(timeout_s)
    try:
        with kept(logs, dist.get_rank()):
            value = fn()
        leave(is_last=started)  # else the script may go on
        if started:
            dist.barrier()  # the store may be rank 0's, and others may still read from it
        return value
    finally:
        if started:
            dist.destroy_process_group()


def _start(
    fn: Callable[[], Any],
    ranks: Sequence[int],
    timeout_s: float,
    max_restarts: int,
    logs: str | None,
    hosts: Hosts,
) -> list[Any]:
    """Run torch's agent for this host, until the job ends."""
    # Importing them takes long.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    check_sendable(fn)
    low, high = hosts.bounds
    config = LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=hosts.ranks_here(ranks),
        run_id=hosts.rdzv_id or uuid.uuid4().hex,
        rdzv_endpoint=hosts.rdzv_endpoint,
        max_restarts=max_restarts,
        start_method="spawn",
        **hosts.meeting(),
    )
    try:
        found = elastic_launch(config, _member)(
            fn, tuple(ranks), timeout_s, logs, hosts.rdzv_endpoint == HERE
        )
    except ChildFailedError as error:
        raise _failed(error, max_restarts) from error
    return [found[rank] for rank in sorted(found)]


def _member(
    fn: Callable[[], Any], ranks: Sequence[int], timeout_s: float, logs: str | None, is_alone: bool
) -> Any:
    """A rank that the agent started."""
    if is_alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    share_cores()
    return _join(fn, ranks, timeout_s, logs)


def _failed(error: Any, restarts: int) -> JobFailedError:
    """What torch's agent knows of the ranks that failed here: by rank, and their own text.

    Args:
        error: The agent's.
        restarts: How often it started them again before it gave up.
    """
    found = {}
    for rank, one in error.failures.items():
        known = one.error_file_data.get("message")
        if not isinstance(known, dict):  # it did not raise
            has_begun = one.exitcode != UNGUARDED  # torchrun does not say
            failure = Failure.ended(rank, one.exitcode, restarts, has_begun=has_begun)
        else:
            told, trace = str(one.message), str(known.get("extraInfo", {}).get("py_callstack", ""))
            kind, _, text = told.partition(": ")
            blamed = re.search(r"^ +first +rank (\d+) ", told, re.MULTILINE)
            failure = Failure(
                rank=rank,
                when=float(one.timestamp),
                text=text if kind.startswith("Piper") else trace.rstrip() or told,
                error=told.partition("\n")[0],
                is_echo=kind == "PiperTimeoutError" or is_lost(RuntimeError(told)),
                blames=int(blamed[1]) if blamed else -1,
            )
        found[rank] = Outcome(failure=failure)
    return job_failed(found)
