"""Which rank this process is, and how it becomes one.

Terms: a *seat* is a process's place in a job, as its launcher tells it; an *outcome* is how the
function ended there. Launchers are in `launch.py` and the files named after it.
"""

import os
import platform
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperError, PiperRuntimeError, PiperTimeoutError
from piper_dynamo.runtime import local
from piper_dynamo.runtime.comm import FOREVER_S, Communicator, TorchCommunicator, ended
from piper_dynamo.runtime.failure import Failure
from piper_dynamo.runtime.headers import CheckedCommunicator, is_asked_for
from piper_dynamo.runtime.logs import kept
from piper_dynamo.runtime.nccl import start_group

MEETING_S = 60.0
POLL_S = 0.01
RESTARTS, JOB, HOST = "PIPER_RESTARTS", "PIPER_JOB", "PIPER_HOST"  # told by a launcher
LOOPBACK = "127.0.0.1"

_torch_comm: TorchCommunicator | None = None
_alone: Communicator | None = None


def communicator(timeout_s: float) -> Communicator:
    """This rank's communicator: in-process, torch.distributed's, or that of a world of one."""
    global _torch_comm, _alone
    comm: Communicator | None = local.current()
    if comm is not None:
        return comm
    _join_torchrun(timeout_s)
    if dist.is_available() and dist.is_initialized():
        if _torch_comm is None or _torch_comm.group is not dist.group.WORLD:
            if _torch_comm is not None:
                _torch_comm.close()
            _torch_comm = (CheckedCommunicator if is_asked_for() else TorchCommunicator)(timeout_s)
        _torch_comm.timeout_s = timeout_s
        return _torch_comm
    if _alone is None:
        _alone = local.LocalCommunicator(local.LocalWorld(1), 0)
    return _alone


def _join_torchrun(timeout_s: float) -> None:
    """Ranks that torchrun started find each other, whether the script asks for it or not."""
    started = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    if started and dist.is_available() and not dist.is_initialized():
        meet_by_environment(timeout_s)


def meet_by_environment(timeout_s: float) -> None:
    """Make the process group of ranks that torchrun has started."""
    time_ = meeting_time(timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        start_group(time_)
        return
    # The agent's store lives on from start to start. torch's own init_process_group finds the
    # addresses there that ranks had in the last one, and is refused when it connects to them.
    where, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    me, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = compat.TCPStore(where, port, is_master=False, timeout=time_)
    name = agreed_name(store, me, size, time_.total_seconds())
    start_group(time_, store=compat.PrefixStore(name, store), rank=me, world_size=size)


def agreed_name(store: Any, me: int, size: int, timeout_s: float) -> str:
    """A name that ranks of this start have in common, and that no earlier one had.

    Ranks ask under names of their own, so that no answer is another's: what a store has of
    earlier starts cannot be told from what it has of this one.

    Raises:
        PiperTimeoutError: Rank 0 does not answer, or ranks do not come.
    """
    deadline = time.monotonic() + timeout_s
    own = uuid.uuid4().hex
    if me:
        store.set(f"piper/asks/{me}", own)
        while not store.check([f"piper/answer/{own}"]):
            _sleep_until(deadline, "rank 0 did not meet the others")
        name = bytes(store.get(f"piper/answer/{own}")).decode()
        store.set(f"piper/here/{name}/{me}", "")
        return name
    missing = list(range(1, size))
    while missing:
        for rank in missing:
            if store.check([f"piper/asks/{rank}"]):
                asking = bytes(store.get(f"piper/asks/{rank}")).decode()
                store.set(f"piper/answer/{asking}", own)
        missing = [r for r in missing if not store.check([f"piper/here/{own}/{r}"])]
        if missing:
            _sleep_until(deadline, f"rank {', '.join(map(str, missing))} did not meet the others")
    return own


def _sleep_until(deadline: float, late: str) -> None:
    if time.monotonic() > deadline:
        raise PiperTimeoutError(f"{late} in time; look for the first failed rank")
    time.sleep(POLL_S)


def meeting_time(timeout_s: float) -> timedelta:
    """How long ranks may take to meet: importing torch is slow on a busy machine."""
    return timedelta(seconds=min(max(timeout_s, MEETING_S), FOREVER_S))


def rank() -> int:
    """This process's (or in-process thread's) rank; 0 outside a job."""
    comm = local.current()
    if comm is not None:
        return comm.rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks the job has; 1 outside a job."""
    comm = local.current()
    if comm is not None:
        return comm.world_size
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def restarts() -> int:
    """How many times the job was started before, by what starts it again when a rank fails."""
    return int(os.environ.get(RESTARTS) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def job_name() -> str | None:
    """What all starts of one job have in common, and no other job; None where nobody says it."""
    found = os.environ.get(JOB) or os.environ.get("TORCHELASTIC_RUN_ID")
    return None if found == "none" else found  # torchrun's default


def host() -> str:
    """The machine of this process; several launchers of one machine stand for as many."""
    told = os.environ.get(HOST)
    if told:
        return told
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return f"{platform.node()}/{os.environ['GROUP_RANK']}"
    return platform.node()


def is_alone() -> bool:
    """Whether this process is one rank, and not all of them as threads."""
    return local.current() is None


def leave(*, is_last: bool) -> None:
    """End the save in the background; let the others know where this rank calls nothing more."""
    if _torch_comm is not None and _torch_comm.group is dist.group.WORLD:
        if _torch_comm.saving is not None:
            _torch_comm.saving.wait()
        if is_last:
            _torch_comm.publish(*ended(_torch_comm.rank, _torch_comm.job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A process's place in a job.

    Attributes:
        rank: Which rank it is.
        world_size: Of how many.
        local_rank: Which it is of those that see the same GPUs: those on its host, in general.
        local_world_size: Of how many.
        store: Address and port of the key-value store through which ranks meet.
        timeout_s: Seconds that it may wait for another rank.
        restarts: How many times the job was started before.
        job: What all starts of the job have in common.
        host: The name of its host; empty for the machine's.
        logs: The folder for what ranks write; None leaves it where it goes.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: tuple[str, int]
    timeout_s: float
    restarts: int
    job: str
    host: str = ""
    logs: str | None = None

    def environment(self) -> dict[str, str]:
        """What others read: the names are torchrun's, where it has them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.store[0],
            "MASTER_PORT": str(self.store[1]),
            RESTARTS: str(self.restarts),
            JOB: self.job,
            HOST: self.host,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the function ended on a rank.

    Attributes:
        value: What it returned.
        failure: Why it returned nothing; None where it did.
        is_refusal: Whether another start would end alike: what was asked is refused.
    """

    value: Any = None
    failure: Failure | None = None
    is_refusal: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Outcome":
        """Of what the function raised."""
        return cls(
            failure=Failure.of(rank, error),
            is_refusal=isinstance(error, PiperError) and not isinstance(error, PiperRuntimeError),
        )


def take_part(fn: Callable[[], Any], seat: Seat) -> Outcome:
    """Meet the other ranks, and call `fn` with the process group ready.

    Returns:
        How it ended, also where it raised. The process group stays: others may still speak to it.
    """
    os.environ.update(seat.environment())
    if seat.store[0] == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    share_cores()
    try:
        time_ = meeting_time(seat.timeout_s)
        store = compat.TCPStore(*seat.store, is_master=False, timeout=time_)
        start_group(time_, store=store, rank=seat.rank, world_size=seat.world_size)
        with kept(seat.logs, seat.rank):
            value = fn()
        leave(is_last=True)
        dist.barrier()
    except BaseException as error:  # told to whoever waits for this rank
        return Outcome.of(seat.rank, error)
    return Outcome(value=value)


def share_cores() -> None:
    """Ranks share the cores: one compute thread each unless the user says otherwise."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def open_store(address: str) -> tuple[Any, tuple[str, int]]:
    """A key-value store on a port that is free, and where it is; it lives as long as it is held.

    It listens at this address alone: left to itself, it would at all that the machine has.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.bind((address, 0))
    port = listening.getsockname()[1]
    store = compat.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store's from now on
    )
    return store, (address, port)
