"""`piper train --save-every --resume`: the same losses, the last checkpoints, what is refused."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import piper_dynamo as piper
from piper_dynamo.cli import main
from piper_dynamo.train import resume
from piper_dynamo.train.progress import Progress
from piper_dynamo.train.resume import find_checkpoint, prune, step_folder
from tests.source_tree import ROOT
from tests.test_train_cli import alone


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, float, float]]:
    lines = [line for line in metrics(run) if "loss" in line]
    return [(line["step"], line["loss"], line["learning_rate"]) for line in lines]


def fake(run: Path, *steps: int, whole: bool = True) -> None:
    """Checkpoints that nobody will load."""
    for number in steps:
        folder = step_folder(run, number)
        folder.mkdir(parents=True)
        (folder / "x_0.distcp").write_text("")
        if whole:
            (folder / ".metadata").write_text("")


def test_a_resumed_job_has_the_losses_of_the_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = {"steps": 6, "dtype": "float64", "save_every": 2, "eval_every": 3}
    alone(whole, monkeypatch, **options)
    assert [p.name for p in resume.all_checkpoints(whole)] == ["step-000004", "step-000006"]
    alone(broken, monkeypatch, **{**options, "keep_last": 3})
    checkpoint = step_folder(broken, 2)
    alone(broken, monkeypatch, **{**options, "keep_last": 3, "resume": str(checkpoint)})
    assert losses(broken) == losses(whole)
    assert [line["step"] for line in metrics(broken)] == [1, 2, 3, 3, 4, 5, 6, 6]
    with pytest.raises(piper.PiperError, match="has done 6 steps; give --steps above that"):
        alone(broken, monkeypatch, **{**options, "resume": str(step_folder(broken, 6))})


def test_only_the_last_whole_checkpoints_stay(tmp_path: Path) -> None:
    fake(tmp_path, 5, 10, 100)
    fake(tmp_path, 15, 120, whole=False)
    (tmp_path / "step-notes").mkdir()
    prune(tmp_path, 2, saving=step_folder(tmp_path, 120))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-000010", "step-000100", "step-000120", "step-notes"}
    prune(tmp_path, 1)
    assert [path.name for path in resume.all_checkpoints(tmp_path)] == ["step-000100"]


def test_which_checkpoint_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, run in enumerate(("b", "a")):  # `a` saved last
        fake(Path("runs") / run, 3, 12)
        os.utime(Path("runs") / run / "step-000012" / ".metadata", (number, 1e9 + number))
        os.utime(Path("runs") / run / "step-000003" / ".metadata", (number, number))
    fake(Path("runs/a"), 15, whole=False)
    last = Path("runs/a/step-000012")
    assert find_checkpoint("runs/a", None) == last
    assert find_checkpoint(str(last), "elsewhere") == last
    assert find_checkpoint(resume.LATEST, None) == last
    assert find_checkpoint(resume.LATEST, "runs/b") == Path("runs/b/step-000012")
    fake(Path("empty"), 1, whole=False)
    for asked, out in (("empty", None), (resume.LATEST, "empty"), ("missing", None)):
        with pytest.raises(piper.PiperError, match="nothing to resume") as caught:
            find_checkpoint(asked, out)
        assert ("step-000001" in str(caught.value)) == (asked != "missing")


def test_a_new_run_does_not_take_a_folder_with_checkpoints(tmp_path: Path) -> None:
    fake(tmp_path, 5)
    for more in ([], ["--resume", str(tmp_path / "other" / "step-000001")]):
        fake(tmp_path / "other", 1) if more else None
        result = CliRunner().invoke(main, ["train", "--out", str(tmp_path), *more])
        assert result.exit_code == 1
        assert "checkpoints of an earlier run" in result.stderr
        assert "step-000005" in result.stderr
    assert step_folder(tmp_path, 5).exists()


def test_nothing_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for asked in (["--resume"], ["--resume", "here"], ["--out", "there", "--resume"]):
        result = CliRunner().invoke(main, ["train", *asked])
        assert result.exit_code == 1
        assert "nothing to resume in" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_job_goes_on_under_another_layout(tmp_path: Path) -> None:
    """SIGKILL of all its processes at whatever moment, three times; then to the end."""
    tiny = "--dim 16 --layers 2 --heads 2 --kv-heads 1 --seq 16 --batch 12 --microbatches 2"
    job = f"{tiny} --dtype float64 --steps 40 --eval-every 0 --save-every 1 --out"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(run: str, more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "piper_dynamo", "train", *job.split(), run, *more.split()]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, start_new_session=True, text=True
        )

    assert start("whole", "--pp 1").wait() == 0
    layouts = [
        "--pp 2",
        "--pp 1 --dp 2 --zero 3",
        "--pp 2 --dp 2 --zero 1",
        "--pp 1 --dp 3 --zero 2",
    ]
    reached = 0
    for number, layout in enumerate(layouts):
        process = start("run", layout + (" --resume" if number else ""))
        goal = reached + 8
        while number < 3 and process.poll() is None:
            found = resume.whole_checkpoints(tmp_path / "run")
            reached = resume.steps_of(found[-1]) if found else 0
            if reached >= goal:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.003)
        assert process.wait() == (0 if number == 3 else -signal.SIGKILL)
    for got, want in zip(losses(tmp_path / "run"), losses(tmp_path / "whole"), strict=True):
        assert got == pytest.approx(want, abs=1e-9)


def test_a_resumed_run_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a log are numbered as those of the unbroken run are."""
    said: list[str] = []
    shown = Progress(is_shown=True, file=io.StringIO())
    monkeypatch.setattr(shown, "say", said.append)
    with shown.steps(6, 3) as step:
        for _ in range(3):
            step("loss 1")
    assert [line.split(":")[0] for line in said] == ["step 4 of 6", "step 6 of 6"]
