"""`piper train --engine --max-restarts --fallback`: what is refused, and a restart of the job."""

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import piper_dynamo as piper
from piper_dynamo.cli import main
from piper_dynamo.runtime import world
from piper_dynamo.runtime.logs import log_file
from piper_dynamo.train import job, report
from piper_dynamo.train.config import Config
from piper_dynamo.train.launching import Launching
from tests import jobs
from tests.test_train_cli import alone, refusal
from tests.test_train_data import counting
from tests.test_train_resume import losses, metrics

NOWHERE = dict.fromkeys(
    ("nnodes", "nproc_per_node", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ("--engine mpi", "'mpi' is not one of 'local', 'torchrun', 'ray'"),
        ("--max-restarts -1", "--max-restarts is -1; give 0 to 1000"),
        ("--max-restarts 1", "there is none without --save-every"),
        ("--nnodes 2", "--nnodes: these are torchrun's; give --engine torchrun"),
        ("--address h:1", "--address h:1 is of a Ray cluster; give --engine ray"),
        ("--fallback dp=1", "--fallback is about restarts; give --max-restarts"),
        (
            "--engine torchrun --nnodes 2 --max-restarts 1 --save-every 1 --rdzv-endpoint h:1",
            "a restart has to find the run folder: name it with --out",
        ),
        (
            "--max-restarts 1 --save-every 1 --fallback batch=6",
            "--batch 6 does not divide into --microbatches 4",
        ),
        ("--max-restarts 1 --save-every 1 --fallback steps=6", "'steps=6' is no option that a"),
        ("--max-restarts 1 --save-every 1 --fallback ddp=1", "write it as dp=1,zero=0"),
        ("--max-restarts 1 --save-every 1 --fallback dp", "write it as dp=1,zero=0"),
        (
            "--max-restarts 1 --save-every 1 --fallback dp=two",
            "dp to 'two'; give it as int",
        ),
        ("--max-restarts 1 --save-every 1 --fallback zero=3", "needs replicas"),
        ("--max-restarts 1 --save-every 1 --fallback lr=0.1", "two jobs of 2, 2 ranks are unlike"),
    ],
)
def test_refuses(arguments: str, want: str) -> None:
    assert want in refusal(*arguments.split())


def test_hosts_without_a_place_to_meet() -> None:
    asked = "--engine torchrun --nnodes 2 --nproc-per-node 1"
    result = CliRunner().invoke(main, ["train", *asked.split()])
    assert result.exit_code == 1
    assert "rdzv_endpoint=host:port" in result.stderr


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("TORCHELASTIC_MAX_RESTARTS", "2")):
        monkeypatch.setenv(name, value)
    assert "name it with --out" in refusal("--save-every", "1")
    assert "as one of its ranks" in refusal("--engine", "ray")


def test_fallbacks() -> None:
    asked = ("dp=2", "dp=1,zero=0", "pp=1,dp=3,tied-head=true,recompute=0.5,lr=0.5")
    launching = Launching(max_restarts=2, fallback=asked, hosts=NOWHERE)
    found = launching.configs(Config(dp=2, zero=3, batch=24, save_every=1, ranks=4))
    assert [one.world for one in found] == [4, 4, 2, 3]
    _, again, second, third = found
    assert (again.dp, again.zero) == (2, 3)
    assert (second.dp, second.zero, second.ranks) == (1, 0, None)
    assert (third.pp, third.dp, third.tied_head, third.recompute) == (1, 3, True, "0.5")
    assert third.lr == 0.5


def test_a_restart_knows_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not report.is_restart(None)
    assert not report.is_restart(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"job": "a"}))
    assert not report.is_restart(str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's default is no name
    assert world.job_name() is None
    assert not report.is_restart(str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert not report.is_restart(str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert report.is_restart(str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert report.is_restart(str(tmp_path))
    assert world.restarts() == 1


class Stopped(Exception):
    """Stands for whatever ends a rank."""


@pytest.mark.slow
def test_a_job_that_is_started_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call twice: the second finds the first's checkpoint, and keeps its log.

    Only the first compares its first steps with one process; the second says so.
    """
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = {"steps": 5, "dtype": "float64", "save_every": 2, "eval_every": 0}
    assert alone(whole, monkeypatch, **options, compare=True)["is_equal"]
    step = job._Job._step

    def stopping(self: Any, *arguments: Any) -> None:
        if arguments[-1] == 3 and not world.restarts():
            raise Stopped
        step(self, *arguments)

    monkeypatch.setattr(job._Job, "_step", stopping)
    with pytest.raises(Stopped):
        alone(broken, monkeypatch, **options, compare=True)
    assert [line["step"] for line in metrics(broken)] == [1, 2, 3]
    monkeypatch.setenv(world.RESTARTS, "1")
    assert "is_equal" not in alone(broken, monkeypatch, **options, compare=True)
    assert losses(broken) == losses(whole)
    text = log_file(broken, 0).read_text()
    assert text.count("-- rank 0, process") == 2
    jobs.mentions(text, "Stopped", "none is compared", "going on after step 2")


def killing(config: Config, others: tuple[Config, ...]) -> dict[str, Any]:
    """The training job, whose last rank is killed in its fourth step."""
    step = job._Job._step

    def stopping(self: Any, *arguments: Any) -> None:
        is_last = piper.rank() == piper.world_size() - 1
        if arguments[-1] == 3 and is_last and not world.restarts():
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, *arguments)

    job._Job._step = stopping  # type: ignore[method-assign]
    job.read_corpus = counting
    return job.run_rank(config, others)


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["local", "torchrun", "ray"])
def test_a_killed_rank(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on from its last checkpoint, under torchrun on as many ranks, else on fewer."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options: dict[str, Any] = {
        "dim": 16, "heads": 2, "kv_heads": 1, "layers": 2, "seq": 16, "batch": 4,
        "microbatches": 2, "steps": 6, "dtype": "float64", "save_every": 1, "eval_every": 0,
    }  # fmt: skip
    alone(whole, monkeypatch, **(options | {"pp": 1}))
    launching = Launching(max_restarts=1, fallback=("pp=1",), hosts=NOWHERE)
    config, *others = launching.configs(Config(**options, out=str(broken)))
    ranks = 2 if engine == "torchrun" else (2, 1)
    run = functools.partial(killing, config, tuple(others))
    found = piper.launch(run, ranks, engine=engine, max_restarts=1)
    assert len(found) == (2 if engine == "torchrun" else 1)
    for got, want in zip(losses(broken), losses(whole), strict=True):
        assert got == pytest.approx(want, abs=1e-9)
    assert log_file(broken, 0).read_text().count("-- rank 0, process") == 2
