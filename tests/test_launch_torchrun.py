"""Real torchrun: a script that it starts, its agent in this process, and hosts that come and go."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import piper_dynamo as piper
from piper_dynamo.errors import PiperRuntimeError
from piper_dynamo.runtime.logs import log_file
from tests import jobs, restarting
from tests.source_tree import ROOT
from tests.test_train_cli import TINY
from tests.test_train_resume import losses

SCRIPT = """
import functools, json, sys
import piper_dynamo as piper
from tests import restarting

if __name__ == "__main__":
    job = functools.partial(restarting.train, sys.argv[1])
    (found,) = piper.launch(job, (2, 1), logs=sys.argv[2])
    print(json.dumps(found))
"""


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.dist(2)
@pytest.mark.timeout(200)
def test_a_script_that_torchrun_starts_and_starts_again(tmp_path: Path) -> None:
    """It calls `piper.launch` as it would alone; a killed rank is torchrun's to see."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    asked = ("--nproc-per-node", "2", "--max-restarts", "1", str(script))
    command = torchrun(*asked, str(tmp_path / "saved"), str(tmp_path / "logs"))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    # Rank 0 alone writes to the terminal; what it returned is printed after that by each rank.
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 2
    restarting.check([tuple(one) for one in found], 2)
    jobs.mentions(log_file(tmp_path / "logs", 1).read_text(), "start 0", "start 1")


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.timeout(300)
def test_torchs_agent_in_this_process(tmp_path: Path) -> None:
    job = functools.partial(restarting.train, str(tmp_path / "saved"))
    found = piper.launch(job, 2, engine="torchrun", max_restarts=1, timeout_s=60.0)
    restarting.check(found, 2)
    assert piper.launch(restarting.told, 2, engine="torchrun") == [(0, 2, "0"), (1, 2, "1")]


def boom() -> None:
    raise ValueError("boom")


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.timeout(300)
def test_the_agent_tells_who_failed(tmp_path: Path) -> None:
    job = functools.partial(restarting.train, str(tmp_path / "saved"))
    text = jobs.refusal(lambda: piper.launch(job, 2, engine="torchrun"), PiperRuntimeError)
    jobs.mentions(text, "rank 1 failed", "SIGKILL")
    text = jobs.refusal(lambda: piper.launch(boom, 2, engine="torchrun"), PiperRuntimeError)
    jobs.mentions(text, "failed", "ValueError: boom", "test_launch_torchrun.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.dist(4)
@pytest.mark.timeout(600)
def test_a_host_that_is_lost(tmp_path: Path) -> None:
    """Two hosts of two ranks each; one is killed as a whole, and the other goes on with its two."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    job = f"{TINY} --dtype float64 --steps 12 --eval-every 0 --pp 2 --save-every 1 --keep-last 20"
    hosts = (
        f"--engine torchrun --nnodes 1:2 --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id lost "
        "--rdzv-conf last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3 "
        "--max-restarts 3 --dp 2 --fallback dp=1"
    )
    command = [sys.executable, "-m", "piper_dynamo", "train", *job.split()]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *hosts.split(), "--out", str(run)],
            env=environment(),
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )

    stays = start()
    time.sleep(8)  # it opens the place where they meet
    leaves = start()
    deadline = time.monotonic() + 240
    while not (run / "step-000003" / ".metadata").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(leaves.pid, signal.SIGKILL)
    _, told = stays.communicate(timeout=300)
    assert stays.returncode == 0, told
    leaves.communicate()
    jobs.mentions(told, "topology: 2 hosts", "between hosts", "topology: 1 host;", "going on after")
    alone = [*command, "--dp", "2", "--out", str(whole)]
    subprocess.run(alone, env=environment(), check=True, capture_output=True)
    for got, want in zip(losses(run), losses(whole), strict=True):
        assert got == pytest.approx(want, abs=1e-9)
