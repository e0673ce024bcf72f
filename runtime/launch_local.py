"""Ranks as processes of this machine, which meet over loopback."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.runtime.failure import UNGUARDED, UNGUARDED_TEXT, Failure
from piper_dynamo.runtime.outcomes import GRACE_S, collect
from piper_dynamo.runtime.world import LOOPBACK, Outcome, Seat, open_store, take_part

START_METHOD = "spawn"  # a fork of this process would share its threads' locks
STOP_S = 1.0  # how long ranks may take to end once they are asked to


def run(
    fn: Callable[[], Any],
    ranks: int,
    *,
    timeout_s: float,
    restarts: int,
    job: str,
    logs: str | None,
) -> list[Any]:
    """One start of a job; see `launch`."""
    check_sendable(fn)
    context: Any = mp.get_context(START_METHOD)
    # Held here: it outlives any rank, so that the others can still speak to each other.
    store, where = open_store(LOOPBACK)
    processes: list[Any] = []
    results: dict[Any, int] = {}
    begun: set[int] = set()
    try:
        with _terminable():
            for r in range(ranks):
                seat = Seat(
                    rank=r,
                    world_size=ranks,
                    local_rank=r,
                    local_world_size=ranks,
                    store=where,
                    timeout_s=timeout_s,
                    restarts=restarts,
                    job=job,
                    logs=logs,
                )
                # A pipe per rank: a queue would leave its semaphores behind when one is killed.
                receive, give = context.Pipe(duplex=False)
                process = context.Process(target=_body, args=(fn, seat, give), name=f"rank {r}")
                process.start()
                give.close()
                processes.append(process)
                results[receive] = r
            found = collect(ranks, lambda: _arrivals(processes, results, begun, restarts))
            for process in processes:
                process.join(GRACE_S)
        return [pickle.loads(found[r].value) for r in range(ranks)]
    finally:
        _stop(processes)
        del store


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does: with its ranks."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def check_sendable(fn: Callable[[], Any]) -> None:
    """Other processes get a function by its name, and read the script that this one runs.

    Raises:
        PiperError: It has none that they could find it by, or there is no such file.
        SystemExit: This is such a process, and still reads.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stderr.write(f"launch is called where {UNGUARDED_TEXT}\n")
        raise SystemExit(UNGUARDED)  # `Failure.ended` tells the rest
    try:
        sent = pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PiperError(
            format_error(
                "launch cannot send its function to other processes",
                {"function": getattr(fn, "__qualname__", repr(fn)), "why": str(error)},
                hint="define it at the top of a module, and give it arguments by "
                "functools.partial(function, ...)",
            )
        ) from error
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (script and os.path.isfile(script)):
        return
    if script or b"__main__" in sent:
        raise PiperError(
            format_error(
                "launch starts processes that read the script again, and it is in no file",
                {
                    "function": getattr(fn, "__qualname__", repr(fn)),
                    "script": script or "python -c, or an interactive session",
                },
                hint='save it as a file and run that; or give engine="inprocess", which has one '
                "process",
            )
        )


def _body(fn: Callable[[], Any], seat: Seat, results: Connection) -> None:
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    compat.keep_progress_local()
    results.send(None)  # it has begun
    found = take_part(fn, seat)
    if found.failure is None:
        try:
            found = Outcome(value=pickle.dumps(found.value))
        except Exception as error:  # told to the parent like any other
            found = Outcome.of(seat.rank, error)
    results.send(found)
    if found.failure is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # peers may be waiting in gloo; a normal exit would wait for them
    dist.destroy_process_group()


def _leave_with_parent(parent: int) -> None:
    """No rank outlives the process that started it, however that one ends."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _arrivals(
    processes: list[Any], results: dict[Any, int], begun: set[int], restarts: int
) -> Mapping[int, Outcome]:
    """What has come from ranks, each of which says first that it has begun, and then how it ended.

    Args:
        processes: By rank.
        results: The ranks that have not ended, by what they send.
        begun: The ranks that have begun; those that do now are added.
        restarts: How often the job was started before.
    """
    found: dict[int, Outcome] = {}
    for receive in wait_any(list(results), timeout=0.2):
        assert isinstance(receive, Connection)
        r = results[receive]
        try:
            told = receive.recv()
        except EOFError:
            processes[r].join(GRACE_S)
            code = processes[r].exitcode
            failure = Failure.ended(r, code, restarts, has_begun=r in begun)
            told = Outcome(failure=failure, is_refusal=code == UNGUARDED and r not in begun)
        if told is None:
            begun.add(r)
        else:
            found[r] = told
            del results[receive]
    return found


def _stop(processes: list[Any]) -> None:
    """End what still runs, all of it within `STOP_S`."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + STOP_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
        if process.is_alive():
            process.kill()
            process.join()
