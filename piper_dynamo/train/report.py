"""The run folder: what was asked, what was planned, what happened, as text and pictures.

config.json     options, versions and data of the run
plan.txt        summary and distributed graph         program_rank0.py ...  what each rank runs
metrics.jsonl   a line per step and per evaluation    loss.png              the same as curves
timeline.png    one step, predicted above measured    timeline.html         the same, with zoom
trace.json      the measured step, for Perfetto       rank-0.log ...    what each rank wrote
summary.json    the result, as `--json` prints it           step-000100 ...  checkpoints
"""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.files import FOLDER_MODE
from piper_dynamo.measure import PREDICTED_FROM_RUN, measured_costs
from piper_dynamo.pictures import save, to_chrome_trace
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.world import job_name, restarts
from piper_dynamo.summary import legend
from piper_dynamo.timeline import Timeline
from piper_dynamo.train.config import Config
from piper_dynamo.train.data import Corpus
from piper_dynamo.train.resume import (
    RUNS,
    all_checkpoints,
    keep_metrics,
    steps_of,
    whole_checkpoints,
)

FILES = (
    "config.json",
    "plan.txt",
    "metrics.jsonl",
    "loss.png",
    "timeline.png",
    "timeline.html",
    "trace.json",
    "summary.json",
)


def claim_folder(out: str | None, resume: str | None = None, *, restarted: bool = False) -> Path:
    """Make the run folder and clear it of what an earlier run left.

    Args:
        out: The folder; None: a new one under `runs/`, named by the time.
        resume: The checkpoint to go on from; its own run's metrics up to there are kept.
        restarted: Whether this is the same run, started again: the logs of ranks are kept.

    Raises:
        PiperError: It cannot be made or written to, or has another run's checkpoints.
    """
    folder = Path(out) if out else RUNS / time.strftime("%Y%m%d-%H%M%S")
    goes_on = resume is not None and Path(resume).resolve().parent == folder.resolve()
    if not goes_on and whole_checkpoints(folder):
        raise PiperError(
            format_error(
                "the run folder has checkpoints of an earlier run",
                {"--out": folder, "they are": ", ".join(p.name for p in all_checkpoints(folder))},
                hint="go on from the last with --resume, remove them, or name another folder",
            )
        )
    kept = "metrics.jsonl" if goes_on else ""
    try:
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        # A run of fewer ranks, or one that stops early, must not leave an older run's files.
        names = [name for name in FILES if name != kept]
        old = [*(folder / name for name in names), *folder.glob("program_rank*.py")]
        for path in old + ([] if goes_on or restarted else list(folder.glob("rank-*.log"))):
            path.unlink(missing_ok=True)
        if goes_on:
            keep_metrics(folder / kept, steps_of(Path(str(resume))))
        (folder / "metrics.jsonl").touch()
    except OSError as error:
        raise PiperError(
            format_error(
                "the run folder cannot be written",
                {"--out": folder, "why": error},
                hint="name a folder that you may write to",
            )
        ) from error
    return folder


def is_restart(out: str | None) -> bool:
    """Whether the run folder is this job's, which was started before.

    Torch's agent does not count the starts that a host's coming or going makes.
    """
    if out is None:
        return False
    if restarts():
        return True
    try:
        told = json.loads((Path(out) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return job_name() is not None and told.get("job") == job_name()


class RunFolder:
    """Writes a run's files as they become known, and the pictures at its end, however it ends."""

    def __init__(self, folder: Path) -> None:
        """`folder` exists and is this run's; see `claim_folder`."""
        self.path = folder
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._train: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []
        self._recorded: tuple[int, Plan, Timeline] | None = None
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            self._draw(json.loads(line))  # of the run that this one goes on from

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.close()
        self._draw_losses()
        self._draw_timeline()

    def write_config(self, config: Config, corpus: Corpus) -> None:
        """What was asked, and on what it runs."""
        from piper_dynamo.version import __version__

        self._write_json(
            "config.json",
            {
                "options": config.as_dict(),
                "job": job_name(),
                "data": {
                    "files": corpus.files,
                    "train_bytes": len(corpus.train),
                    "validation_bytes": len(corpus.validation),
                    "crc32": corpus.fingerprint,
                },
                "versions": {
                    "piper": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                    "machine": platform.platform(),
                },
            },
        )

    def write_plan(self, plan: Plan) -> None:
        """The plan's summary and graph, and each rank's program as the Python that runs."""
        summary = plan.summary()
        text = f"{summary}\n\n{legend(summary)}\n\n{plan.graph}\n"
        (self.path / "plan.txt").write_text(text, encoding="utf-8")
        for rank in range(plan.world_size):
            path = self.path / f"program_rank{rank}.py"
            path.write_text(str(plan.program(rank)), encoding="utf-8")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """The result."""
        self._write_json("summary.json", summary)

    def metric(self, **values: Any) -> None:
        """One line of metrics.jsonl."""
        self._metrics.write(json.dumps(values) + "\n")
        self._metrics.flush()
        self._draw(values)

    def _draw(self, values: Mapping[str, Any]) -> None:
        if "loss" in values:
            self._train.append((values["step"], values["loss"]))
        if "validation_loss" in values:
            self._validation.append((values["step"], values["validation_loss"]))

    def keep_timeline(self, step: int, plan: Plan, measured: Timeline) -> None:
        """A step's timeline of all ranks; drawn at the end, while no rank waits for it."""
        self._recorded = (step, plan, measured.shifted_to_zero())

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def _draw_losses(self) -> None:
        if not self._train:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        alone = "o" if len(self._train) == 1 else "-"  # one point makes no line
        axis.plot(*zip(*self._train, strict=True), alone, label="training", linewidth=1)
        if self._validation:
            axis.plot(*zip(*self._validation, strict=True), "o-", label="validation", markersize=4)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("step")
        axis.set_ylabel("loss (nats per byte)")
        axis.grid(alpha=0.3)
        axis.legend()
        figure.savefig(self.path / "loss.png", dpi=120)

    def _draw_timeline(self) -> None:
        if self._recorded is None:
            return
        step, plan, measured = self._recorded
        predicted = plan.timeline(measured_costs(measured))
        shown = {PREDICTED_FROM_RUN: predicted, "measured": measured}
        for name in ("timeline.png", "timeline.html"):
            save(shown, self.path / name, unit="s", title=f"step {step}")
        to_chrome_trace(measured, self.path / "trace.json")


def curve(values: Sequence[float], width: int = 40) -> str:
    """A loss curve in one line of text, the last value included."""
    if not values:
        return ""
    marks = "▁▂▃▄▅▆▇█"
    low, high = min(values), max(values)
    last = len(values) - 1
    count = min(len(values), width)
    picked = [values[i * last // max(count - 1, 1)] for i in range(count)]
    scale = (len(marks) - 1) / max(high - low, 1e-12)
    return "".join(marks[round((v - low) * scale)] for v in picked)
