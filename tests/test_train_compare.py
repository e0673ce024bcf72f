"""`piper train --compare` as a command: equal runs end with 0, others with 1."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from piper_dynamo.cli import FAILED, main
from piper_dynamo.train import compare, job
from piper_dynamo.train.config import Config
from piper_dynamo.train.launching import Launching
from piper_dynamo.train.optim import set_learning_rate
from tests.test_train_cli import TINY
from tests.test_train_data import counting


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's one rank is this process."""

    def run(self: Launching, config: Config, others: Sequence[Config]) -> list[Any]:
        return [job.run_rank(config, tuple(others))]

    monkeypatch.setattr(Launching, "run", run)
    monkeypatch.setattr(job, "read_corpus", counting)


@pytest.mark.parametrize(("wrong", "code"), [(1.0, 0), (1.001, FAILED)])
def test_a_difference_is_the_exit_code(
    wrong: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's steps are a little longer than the run's."""

    def rate(optimizer: Any, step: int, config: Config) -> float:
        found = set_learning_rate(optimizer, step, config)
        for group in optimizer.param_groups:
            group["lr"] *= wrong
        return found

    monkeypatch.setattr(compare, "set_learning_rate", rate)
    asked = "--pp 1 --steps 4 --dtype float64 --eval-every 0 --compare --json --out"
    done = CliRunner().invoke(main, ["train", *TINY.split(), *asked.split(), str(tmp_path)])
    assert done.exit_code == code, done.output
    told = json.loads(done.stdout)
    assert told["is_equal"] is (code == 0)
    assert ("DIFFERS from one process" in done.stderr) is (code == FAILED)
    assert "run folder:" in done.stderr  # it went on to its end
    assert json.loads((tmp_path / "summary.json").read_text()) == told


def test_without_a_comparison_there_is_no_verdict(tmp_path: Path) -> None:
    asked = "--pp 1 --steps 1 --eval-every 0 --json --out"
    done = CliRunner().invoke(main, ["train", *TINY.split(), *asked.split(), str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert not {"is_equal", "max_rel_diff"} & json.loads(done.stdout).keys()
