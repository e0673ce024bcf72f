"""The checkpoints of a run: `step-000100` and so on, beside each other in its run folder."""

import json
import shutil
from pathlib import Path

from piper_dynamo.errors import PiperError, format_error

METADATA = ".metadata"  # a checkpoint without it is not whole
LATEST = "latest"  # what `--resume` without a folder asks for
RUNS = Path("runs")


def step_folder(run: Path, steps: int) -> Path:
    """Where a run keeps its checkpoint after so many steps."""
    return run / f"step-{steps:06d}"


def all_checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints, whole or not, oldest first."""
    found = [path for path in run.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def whole_checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints that can be resumed, oldest first."""
    return [path for path in all_checkpoints(run) if (path / METADATA).exists()]


def prune(run: Path, keep: int, saving: Path | None = None) -> None:
    """Remove all but the last whole checkpoints of a run.

    Args:
        run: The run folder.
        keep: How many stay.
        saving: One that is being written, which stays too.
    """
    kept = {*whole_checkpoints(run)[-keep:], saving}
    for path in all_checkpoints(run):
        if path not in kept:
            shutil.rmtree(path)


def find_checkpoint(asked: str, out: str | None) -> Path:
    """The checkpoint that `--resume` means.

    Args:
        asked: A checkpoint, a run folder (its last one), or LATEST: that of `out`, else of the run
            under `runs/` that saved last.
        out: The run folder that was asked for.

    Raises:
        PiperError: There is none.
    """
    if asked != LATEST:
        where = Path(asked)
        found = [where] if (where / METADATA).exists() else whole_checkpoints(where)
    elif out is not None:
        where = Path(out)
        found = whole_checkpoints(where)
    else:
        where = RUNS
        every = [path for run in where.glob("*") for path in whole_checkpoints(run)]
        found = sorted(every, key=lambda path: (path / METADATA).stat().st_mtime)
    if not found:
        broken = [path.name for path in all_checkpoints(where)]
        raise PiperError(
            format_error(
                f"there is nothing to resume in {where}",
                {"broken off": ", ".join(broken)} if broken else {},
                hint="name a run folder, or a step-* folder in it; a run saves with --save-every",
            )
        )
    return found[-1]


def keep_metrics(file: Path, steps: int) -> None:
    """Drop what a run recorded after the checkpoint that it goes on from."""
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= steps]
    file.write_text("".join(kept), encoding="utf-8")


def steps_of(checkpoint: Path) -> int:
    """How many steps were done, by the folder's name; 0 where it has another."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdigit() else 0
