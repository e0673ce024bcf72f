"""Starting ranks, and finding out which rank this is.

Engines: "local" starts processes on this machine over loopback; "torchrun" joins the processes that
torchrun has started; "inprocess" runs all ranks as cooperative threads of this process.
"""

import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from piper_dynamo.errors import PiperError, PiperRuntimeError, format_error
from piper_dynamo.runtime import local
from piper_dynamo.runtime.comm import FOREVER_S, Communicator, TorchCommunicator, ended
from piper_dynamo.runtime.headers import CheckedCommunicator, is_asked_for
from piper_dynamo.runtime.nccl import start_group

ENGINES = ("local", "torchrun", "inprocess")
MEETING_S = 60.0
GRACE_S = 5.0  # how long other ranks may take to end after the first failure

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
        start_group(_meeting_time(timeout_s))


def _meeting_time(timeout_s: float) -> timedelta:
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


def launch(
    fn: Callable[[], Any], ranks: int, *, engine: str = "local", timeout_s: float = 300.0
) -> list[Any]:
    """Call `fn()` once per rank with the process group ready.

    Args:
        fn: A function without arguments; for "local" it must be importable (defined at the top
            of a module).
        ranks: How many ranks.
        engine: "local", "torchrun" or "inprocess". In a process that torchrun started, "local"
            joins the ranks there are.
        timeout_s: Seconds that a rank may wait for another before it fails; in one process a wait
            that cannot end fails at once.

    Returns:
        What each rank's call returned, in rank order; under "torchrun" this rank's alone.

    Raises:
        PiperRuntimeError: A rank failed; carries the first failure's own text.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise PiperError(f"launch(ranks={ranks!r}): give a number of ranks >= 1")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise PiperError(f"launch(timeout_s={timeout_s!r}): give seconds > 0")
    if engine == "local" and "TORCHELASTIC_RUN_ID" in os.environ:
        engine = "torchrun"  # a script that starts its own ranks also works under torchrun
    if engine == "inprocess":
        return local.LocalWorld(ranks).run(fn)
    if engine == "torchrun":
        return [_join(fn, ranks, timeout_s)]
    if engine == "local":
        return _spawn(fn, ranks, timeout_s)
    raise PiperError(f"launch(engine={engine!r}): choose one of {', '.join(ENGINES)}")


def _join(fn: Callable[[], Any], ranks: int, timeout_s: float) -> Any:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise PiperError(
            'launch(engine="torchrun") runs inside processes that torchrun started: '
            f"torchrun --nproc-per-node {ranks} script.py"
        )
    if int(os.environ["WORLD_SIZE"]) != ranks:
        raise PiperError(
            f"launch(ranks={ranks}) was started by torchrun with "
            f"{os.environ['WORLD_SIZE']} processes; make them equal"
        )
    started = not dist.is_initialized()
    if started:
        start_group(_meeting_time(timeout_s))
    try:
        value = fn()
        _leave(is_last=started)  # else the script may go on
        return value
    finally:
        if started:
            dist.destroy_process_group()


def _leave(*, is_last: bool) -> None:
    """End the save in the background; let the others know where this rank calls nothing more."""
    if _torch_comm is not None and _torch_comm.group is dist.group.WORLD:
        if _torch_comm.saving is not None:
            _torch_comm.saving.wait()
        if is_last:
            _torch_comm.publish(*ended(_torch_comm.rank, _torch_comm.job))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _spawn(fn: Callable[[], Any], ranks: int, timeout_s: float) -> list[Any]:
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PiperError(
            f"launch cannot send {fn!r} to other processes ({error}); "
            "define it at the top of a module"
        ) from error
    context = mp.get_context("spawn")
    port = _free_port()
    processes: list[Any] = []
    results: list[Connection] = []
    try:
        for r in range(ranks):
            # A pipe per rank: a queue would leave its semaphores behind when a rank is killed.
            receive, give = context.Pipe(duplex=False)
            process = context.Process(
                target=_body, args=(fn, r, ranks, port, timeout_s, give), name=f"rank {r}"
            )
            process.start()
            give.close()
            processes.append(process)
            results.append(receive)
        return _collect(processes, results)
    finally:
        _stop(processes)


def _body(
    fn: Callable[[], Any], rank_: int, ranks: int, port: int, timeout_s: float, results: Connection
) -> None:
    os.environ.update(
        RANK=str(rank_),
        LOCAL_RANK=str(rank_),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    # Ranks share the cores: one compute thread each unless the user says otherwise.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        start_group(_meeting_time(timeout_s), rank=rank_, world_size=ranks)
        value = fn()
        _leave(is_last=True)
        dist.barrier()
        results.send((time.time(), None, pickle.dumps(value)))
        dist.destroy_process_group()
    except BaseException as error:
        text = str(error) if isinstance(error, PiperError) else traceback.format_exc()
        results.send((time.time(), text, None))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # peers may be waiting in gloo; a normal exit would wait for them


def _leave_with_parent(parent: int) -> None:
    """No rank outlives the process that started it, however that one ends."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _collect(processes: list[Any], results: list[Connection]) -> list[Any]:
    """Each rank's result. After the first failure the others get a moment to say what they know."""
    found: dict[int, Any] = {}
    failures: dict[int, tuple[float, str]] = {}
    open_ends = {receive: r for r, receive in enumerate(results)}
    first_failure = 0.0
    while open_ends:
        for receive in wait_any(list(open_ends), timeout=0.2):
            assert isinstance(receive, Connection)
            r = open_ends.pop(receive)
            try:
                when, text, value = receive.recv()
            except EOFError:
                processes[r].join(GRACE_S)
                code = processes[r].exitcode
                when, text, value = time.time(), f"the process ended with exit code {code}", None
            if text is None:
                found[r] = pickle.loads(value)
            else:
                failures[r] = (when, text)
        if failures:
            first_failure = first_failure or time.monotonic()
            if time.monotonic() - first_failure > GRACE_S:
                break
    if failures:
        first = _root_cause(failures)
        others = sorted(set(failures) - {first})
        raise PiperRuntimeError(
            format_error(
                f"rank {first} failed",
                {
                    "also failed": ", ".join(f"rank {r}" for r in others) or "no other rank",
                    "why": failures[first][1],
                },
            )
        )
    for process in processes:
        process.join(GRACE_S)
    return [found[r] for r in range(len(processes))]


def _root_cause(failures: dict[int, tuple[float, str]]) -> int:
    """The first failure that is not only the echo of another rank's end."""
    echoes = (
        "Connection closed by peer",
        "Connection reset",
        "waits for",
        "did not start this step",
    )
    ordered = sorted(failures, key=lambda r: failures[r][0])
    causes = [r for r in ordered if not any(e in failures[r][1] for e in echoes)]
    return (causes or ordered)[0]


def _stop(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()
