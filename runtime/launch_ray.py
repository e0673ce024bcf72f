"""Ranks as actors of a Ray cluster, one each: a running one, or one on this machine for the job.

A *bundle* is what one rank needs; Ray places all of a job's at once, and near each other. Ranks
are numbered host by host, so that those that follow each other sit together.
"""

import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.runtime.failure import Failure, asked_for
from piper_dynamo.runtime.outcomes import collect
from piper_dynamo.runtime.world import Outcome, Seat, open_store, take_part

log = logging.getLogger("piper.launch")

STORE_BYTES = 256 * 2**20  # of Ray's own, which only results pass
REACH_S = 5.0  # how long an address may take to accept a connection
ROOM_S = 30.0  # how long a cluster may take to find room
START_S = 600.0  # how long the processes of ranks may take to start
POLL_S = 0.2
NO_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# What of this process's environment ranks have, too.
PASSED_ON = ("PIPER_", "GLOO_", "NCCL_", "OMP_", "TORCH")


@contextmanager
def cluster(address: str | None, ranks: int) -> Iterator[Any]:
    """Ray, joined to a cluster.

    Args:
        address: Of a running one; None: the one that this process has joined, or else one that is
            started on this machine, and ends with this.
        ranks: For how many ranks a started one has room.

    Raises:
        PiperError: Ray is not installed, or there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = _imported()
    if ray.is_initialized():
        if address is not None and address != ray.get_runtime_context().gcs_address:
            raise PiperError(
                f"launch(address={address!r}): this process has joined another Ray cluster, "
                f"{ray.get_runtime_context().gcs_address}; leave address out, or ray.shutdown() "
                "first"
            )
        yield ray
        return
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": True}
    if address is None:
        # Not "auto": a job that names no cluster is not sent to one that happens to be there.
        options |= {
            "address": "local",
            "num_cpus": max(ranks, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
        }
    else:
        _check_reachable(address)
        options["address"] = address
    try:
        with _on_loopback() if address is None else nullcontext():
            ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Refuse an address at which nothing listens; Ray itself would try for minutes.

    Raises:
        PiperError: Nothing accepts a connection there.
    """
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not port.isdigit():
        return  # "auto": Ray knows where its clusters are
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str | None, why: object) -> PiperError:
    return PiperError(
        format_error(
            "there is no Ray cluster to join" if address else "Ray does not start here",
            {"address": address or "this machine", "why": why},
            hint="start one with: ray start --head; its output has the address",
        )
    )


@contextmanager
def _on_loopback() -> Iterator[None]:
    """What Ray starts meanwhile listens on loopback alone.

    It takes any other address of the machine for it, but where it cannot have a cluster of several,
    as it thinks of macOS and Windows. So it is told that this is one of these.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    told = os.environ.get(NO_CLUSTER)
    os.environ[NO_CLUSTER] = "0"  # to the processes that Ray starts
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if told is None:
            del os.environ[NO_CLUSTER]
        else:
            os.environ[NO_CLUSTER] = told


def _imported() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise PiperError(
            format_error(
                'launch(engine="ray") needs Ray, which is not installed',
                {"why": error},
                hint="pip install 'piper-dynamo[ray]'",
            )
        ) from error


def run(
    ray: Any,
    fn: Callable[[], Any],
    ranks: Sequence[int],
    *,
    timeout_s: float,
    restarts: int,
    job: str,
    logs: str | None,
) -> list[Any]:
    """One start of a job, on the first number of ranks for which there is room; see `launch`."""
    group, count, gpus = _room(ray, ranks)
    actors: list[Any] = []
    try:
        actors = _actors(ray, group, count, gpus)
        hosts = _started(ray, actors)
        where = ray.get(actors[0].open_store.remote(), timeout=timeout_s)
        function = ray.put(fn)
        pending = {}
        for r, actor in enumerate(actors):
            seat = Seat(
                rank=r,
                world_size=count,
                # Ray shows each actor its own GPUs alone.
                local_rank=0 if gpus else hosts[:r].count(hosts[r]),
                local_world_size=1 if gpus else hosts.count(hosts[r]),
                store=where,
                timeout_s=timeout_s,
                restarts=restarts,
                job=job,
                host=hosts[r],
                logs=logs,
            )
            pending[actor.run.remote(function, seat)] = r
        found = collect(count, lambda: _arrivals(ray, pending, restarts))
        return [found[r].value for r in range(count)]
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _room(ray: Any, ranks: Sequence[int]) -> tuple[Any, int, int]:
    """Bundles for the first number of ranks for which there is room, that number, and GPUs each."""
    have = ray.cluster_resources()
    for count in ranks:
        gpus = 1 if have.get("GPU", 0) >= count else 0
        bundle = {"CPU": 1} | ({"GPU": gpus} if gpus else {})
        if have.get("CPU", 0) < count:
            continue  # Ray would wait for it to grow
        group = ray.util.placement_group([bundle] * count, strategy="PACK")
        if group.wait(ROOM_S):
            return group, count, gpus
        ray.util.remove_placement_group(group)
    free = ray.available_resources()
    raise PiperError(
        format_error(
            "the Ray cluster has no room for the ranks",
            {
                "ranks": " or ".join(map(str, ranks)) + ", each a CPU",
                "CPUs": f"{have.get('CPU', 0):g}, of which {free.get('CPU', 0):g} are free",
            },
            hint="add nodes, end other jobs, or give a smaller number, too: launch(ranks=(4, 2))",
        )
    )


def _actors(ray: Any, group: Any, count: int, gpus: int) -> list[Any]:
    """An actor per bundle, in rank order: host by host."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    met = list(dict.fromkeys(nodes[bundle] for bundle in range(count)))
    bundles = sorted(range(count), key=lambda bundle: (met.index(nodes[bundle]), bundle))
    names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    is_one_each = len({names[node] for node in met}) == len(met)
    hosts = {n: names[n] if is_one_each else f"{names[n]}/{met.index(n)}" for n in met}
    passed = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **passed}
    actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Rank)
    return [
        actor.options(
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
            runtime_env={"env_vars": environment},
        ).remote(hosts[nodes[bundle]], os.getcwd())
        for bundle in bundles
    ]


def _started(ray: Any, actors: Sequence[Any]) -> list[str]:
    """The hosts of the ranks, once all have started; what that takes is no wait for a rank.

    Raises:
        PiperError: Ray did not start one, or not in time.
    """
    answers = [actor.host.remote() for actor in actors]
    pending = list(answers)
    log.info("waiting for Ray to start %d processes", len(answers))
    end = time.monotonic() + START_S
    try:
        while pending and time.monotonic() < end:
            done, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            ray.get(done)  # raises what a rank ended by, whatever becomes of the others
        return list(ray.get(answers, timeout=0.0 if pending else None))
    except ray.exceptions.RayError as error:
        missing = ", ".join(str(r) for r, answer in enumerate(answers) if answer in pending)
        is_late = isinstance(error, ray.exceptions.GetTimeoutError)
        why = f"nothing from rank {missing} in {START_S:.0f} s" if is_late else str(error).strip()
        raise PiperError(
            format_error(
                "Ray has not started the ranks",
                {"ranks": len(actors), "why": why},
                hint="ray status and ray logs say why; Piper must be installed on each node",
            )
        ) from error


def _arrivals(ray: Any, pending: dict[Any, int], restarts: int) -> Mapping[int, Outcome]:
    done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_S)
    found = {}
    for reference in done:
        r = pending.pop(reference)
        try:
            found[r] = ray.get(reference)
        except ray.exceptions.RayError as error:
            why = ", ".join(filter(None, ("the process ended", asked_for(r, restarts))))
            text = f"{why}: {str(error).strip()}"
            found[r] = Outcome(failure=Failure(rank=r, when=time.time(), text=text))
    return found


class _Rank:
    """One rank, in a process that Ray started."""

    def __init__(self, host: str, folder: str) -> None:
        self._host = host
        if os.path.isdir(folder):  # names of files mean what they mean to whoever started the job
            os.chdir(folder)
        self._store: Any = None

    def host(self) -> str:
        """Where it is; that it answers says that it has started."""
        return self._host

    def open_store(self) -> tuple[str, int]:
        """Open the store through which ranks meet, for as long as this rank lives."""
        address = importlib.import_module("ray").util.get_node_ip_address()
        self._store, where = open_store(address)
        return where

    def run(self, fn: Callable[[], Any], seat: Seat) -> Outcome:
        """Be this rank."""
        return take_part(fn, seat)
