"""Real Ray on this machine: one actor per rank, restarts, and clusters that are there already."""

import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import piper_dynamo as piper
from piper_dynamo.errors import PiperError
from piper_dynamo.runtime import launch_ray
from piper_dynamo.runtime.logs import log_file
from tests import jobs, restarting
from tests.source_tree import ROOT
from tests.test_train_cli import TINY
from tests.test_train_resume import losses

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'piper-dynamo[ray]'")

# Of Ray's own, on start and end.
pytestmark = [
    pytest.mark.dist(2),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.timeout(240)
def test_ray_on_this_machine(tmp_path: Path) -> None:
    """Started for the job, which loses a rank and goes on with one; then it is gone."""
    job = functools.partial(restarting.train, str(tmp_path / "saved"))
    logs = tmp_path / "logs"
    found = piper.launch(job, (2, 1), engine="ray", max_restarts=1, logs=logs)
    restarting.check(found, 1)
    assert not ray.is_initialized()
    first = log_file(logs, 0).read_text()
    jobs.mentions(first, "rank 0 of 2, start 0", "rank 0 of 1, start 1")
    assert first.count("rank 0 is at 127.0.0.1") == 2
    assert "rank 1 of 2, start 0" in log_file(logs, 1).read_text()


@contextmanager
def head(**asked: int) -> Iterator[str]:
    """A cluster of another process; its address."""
    options = " ".join(f"--{name.replace('_', '-')}={value}" for name, value in asked.items())
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    start = "start --head --port=0 --include-dashboard=false"
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # a token would be written to the user's home
        "PYTHONPATH": str(ROOT),
    }
    started = subprocess.run(
        [*ray_command, *start.split(), "--num-cpus=3", *options.split()],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert started.returncode == 0, started.stderr
    told = re.search(r"--address='([^']+)'", started.stdout + started.stderr)
    assert told is not None, started.stdout
    address = told[1]
    try:
        yield address
    finally:
        subprocess.run([*ray_command, "stop", "--force"], env=environment, capture_output=True)


def gpus() -> str:
    """Those that this rank may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ray, "ROOM_S", 3.0)
    with head(num_gpus=2) as address:
        try:
            found = piper.launch(gpus, 2, engine="ray", address=address)
            assert sorted(found) == ["0", "1"]
            assert piper.launch(restarting.told, 3, engine="ray", address=address) == [
                (0, 3, "0"),
                (1, 3, "1"),
                (2, 3, "2"),
            ]
            # Numbers for which there is no room are left out.
            assert len(piper.launch(restarting.told, (5, 4, 2), engine="ray", address=address)) == 2
            text = jobs.refusal(lambda: piper.launch(int, 5, engine="ray", address=address))
            jobs.mentions(text, "no room for the ranks", "5, each a CPU", "3, of which 3 are free")
            job = f"{TINY} --dtype float64 --steps 3 --eval-every 0 --json"
            command = [sys.executable, "-m", "piper_dynamo", "train", *job.split()]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            for name, more in (("ray", f"--engine ray --address {address}"), ("local", "")):
                out = str(tmp_path / name)
                done = subprocess.run(
                    [*command, *more.split(), "--out", out],
                    env=environment,
                    capture_output=True,
                    text=True,
                )
                assert done.returncode == 0, done.stderr
                assert json.loads(done.stdout.splitlines()[-1])["loss_last"] > 0
            got, want = (losses(tmp_path / name) for name in ("ray", "local"))
            assert got == want
            assert log_file(tmp_path / "ray", 1).exists()
        finally:
            ray.shutdown()


@pytest.mark.timeout(60)
def test_an_address_at_which_nothing_listens() -> None:
    """Ray itself would try for minutes."""
    for address in ("127.0.0.1:9", "ray://127.0.0.1:9", "[::1]:9", "127.0.0.1:99999"):
        text = jobs.refusal(
            functools.partial(piper.launch, int, 1, engine="ray", address=address), PiperError
        )
        jobs.mentions(text, "no Ray cluster to join", address, "ray start --head")


@pytest.mark.timeout(120)
def test_ranks_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        pass

    class Actor:
        def __init__(self) -> None:
            self.host = self
            self.remote = Answer

    is_dead = False

    def wait(references: list[Answer], *, num_returns: int, timeout: float) -> tuple[Any, Any]:
        time.sleep(timeout)
        count = min(len(references) - 1, num_returns)  # the last one never answers
        return references[:count], references[count:]

    def get(references: list[Answer], timeout: float | None = None) -> None:
        if timeout == 0.0:
            raise ray.exceptions.GetTimeoutError("late")
        if is_dead and references:
            raise ray.exceptions.RayActorError(error_msg="it could not import torch")

    fake = SimpleNamespace(wait=wait, get=get, exceptions=ray.exceptions)
    monkeypatch.setattr(launch_ray, "START_S", 0.5)
    text = jobs.refusal(lambda: launch_ray._started(fake, [Actor(), Actor()]), PiperError)
    jobs.mentions(text, "Ray has not started the ranks", "nothing from rank 1", "ray status")
    is_dead = True
    text = jobs.refusal(lambda: launch_ray._started(fake, [Actor(), Actor()]), PiperError)
    jobs.mentions(text, "Ray has not started the ranks", "it could not import torch")
