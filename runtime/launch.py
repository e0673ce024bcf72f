"""Starting ranks.

Engines: "local" starts processes on this machine, which meet over loopback; "torchrun" joins the
processes that torchrun has started, or starts its agent; "ray" starts actors of a Ray cluster;
"inprocess" runs all ranks as cooperative threads of this process.
"""

import functools
import logging
import math
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from piper_dynamo.errors import PiperError
from piper_dynamo.runtime import launch_local, launch_ray, launch_torchrun, local
from piper_dynamo.runtime.faults import check_variable
from piper_dynamo.runtime.outcomes import JobFailedError

log = logging.getLogger("piper.launch")

ENGINES = ("local", "torchrun", "ray", "inprocess")
MAX_RESTARTS = 1000


def launch(
    fn: Callable[[], Any],
    ranks: int | Sequence[int],
    *,
    engine: str = "local",
    timeout_s: float = 300.0,
    max_restarts: int = 0,
    logs: str | Path | None = None,
    address: str | None = None,
) -> list[Any]:
    """Call `fn()` once per rank with the process group ready.

    A job that is started again calls `fn` again: what it saved before is its own to load. A
    refusal of what was asked (any PiperError but a PiperRuntimeError) ends the job at once.

    Args:
        fn: A function without arguments, or one with `functools.partial`; for other processes it
            must be importable (defined at the top of a module).
        ranks: How many ranks; or several numbers, of which each start takes the next and the last
            one stays, such as (4, 4, 2). Under "ray" a start leaves out those for which the
            cluster has no room; under torchrun it has as many as its hosts start, if that is one
            of them.
        engine: "local", "torchrun", "ray" or "inprocess". In a process that torchrun started,
            "local" joins the ranks there are.
        timeout_s: Seconds that a rank may wait for another before it fails; in one process a wait
            that cannot end fails at once.
        max_restarts: How many times the job is started again after a rank has failed. In a
            process that torchrun started, torchrun's own --max-restarts says that.
        logs: A folder that gets a file per rank with what it writes: only rank 0 also writes to
            the terminal. None: all ranks write to the terminal.
        address: Of a running Ray cluster, as `ray.init` takes it; None: the one that this process
            has joined, or else one on this machine, for this job.

    Returns:
        What each rank's call returned, in rank order; under "torchrun" those of this host, and in
        a process that torchrun started its own alone.

    Raises:
        PiperError: An argument is refused, or the engine is not there.
        PiperRuntimeError: A rank failed; carries the first failure's own text.
    """
    sizes = _checked(ranks, engine, timeout_s, max_restarts)
    if address is not None and engine != "ray":
        raise PiperError(f'launch(address={address!r}) is of a Ray cluster; give engine="ray"')
    check_variable(sizes)
    kept = None if logs is None else str(Path(logs).resolve())
    if engine == "inprocess":
        if max_restarts or len(sizes) > 1 or logs is not None:
            raise PiperError(
                'launch(engine="inprocess") has one process: it takes one number of ranks, no '
                "max_restarts and no logs"
            )
        return local.LocalWorld(sizes[0]).run(fn)
    # A script that starts its own ranks also works under torchrun.
    if engine == "torchrun" or (engine == "local" and "TORCHELASTIC_RUN_ID" in os.environ):
        return launch_torchrun.run(
            fn, sizes, timeout_s=timeout_s, max_restarts=max_restarts, logs=kept
        )
    job = uuid.uuid4().hex
    if engine == "local":
        start = functools.partial(launch_local.run, fn, timeout_s=timeout_s, job=job, logs=kept)
        return _started(lambda left, count: start(left[0], restarts=count), sizes, max_restarts)
    with launch_ray.cluster(address, max(sizes)) as found:
        start_ray = functools.partial(
            launch_ray.run, found, fn, timeout_s=timeout_s, job=job, logs=kept
        )
        return _started(lambda left, count: start_ray(left, restarts=count), sizes, max_restarts)


def _checked(ranks: Any, engine: str, timeout_s: Any, max_restarts: Any) -> tuple[int, ...]:
    """The numbers of ranks."""
    sizes = tuple(ranks) if isinstance(ranks, Sequence) and not isinstance(ranks, str) else (ranks,)
    if not sizes or not all(_is_whole(one) and one >= 1 for one in sizes):
        raise PiperError(f"launch(ranks={ranks!r}): give a number of ranks >= 1")
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not timeout_s > 0 or math.isnan(timeout_s):
        raise PiperError(f"launch(timeout_s={timeout_s!r}): give seconds > 0")
    if not _is_whole(max_restarts) or not 0 <= max_restarts <= MAX_RESTARTS:
        raise PiperError(f"launch(max_restarts={max_restarts!r}): give 0 to {MAX_RESTARTS}")
    if engine not in ENGINES:
        raise PiperError(f"launch(engine={engine!r}): choose one of {', '.join(ENGINES)}")
    return sizes


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _started(
    start: Callable[[Sequence[int], int], list[Any]], sizes: Sequence[int], max_restarts: int
) -> list[Any]:
    """Start a job until it ends well, or has been started often enough.

    Args:
        start: Called with the numbers of ranks that are left, and how many starts there were.
        sizes: All numbers.
        max_restarts: How many starts there may be after the first.
    """
    for count in range(max_restarts + 1):
        left = sizes[min(count, len(sizes) - 1) :]
        try:
            return start(left, count)
        except JobFailedError as error:
            if error.is_refusal or count == max_restarts:
                raise
            log.warning("%s\nrestart %d of %d", error, count + 1, max_restarts)
    raise AssertionError("a start returns or raises")
