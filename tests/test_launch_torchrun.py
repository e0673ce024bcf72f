"""Real torchrun: a script that it starts, and its agent in this process."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import piper_dynamo as piper
from piper_dynamo.errors import PiperRuntimeError
from piper_dynamo.runtime.logs import log_file
from tests import jobs, restarting
from tests.source_tree import ROOT

SCRIPT = """
import functools, json, os, sys
from pathlib import Path
import piper_dynamo as piper
from tests import restarting

if __name__ == "__main__":
    saved, logs, results = sys.argv[1:]
    job = functools.partial(restarting.train, saved)
    (found,) = piper.launch(job, (2, 1), logs=logs)
    Path(results, os.environ["RANK"] + ".json").write_text(json.dumps(found))
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
    results = tmp_path / "results"
    results.mkdir()
    folders = (str(tmp_path / "saved"), str(tmp_path / "logs"), str(results))
    command = torchrun(*asked, *folders)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    # A file for each rank: lines that two processes print into one pipe may run together.
    found = [json.loads((results / f"{rank}.json").read_text()) for rank in range(2)]
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
