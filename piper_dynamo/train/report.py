"""The run folder: what was asked, what was planned, what happened, as text and pictures.

config.json   metrics.jsonl   loss.png   plan.txt   program_rank0.py ...   timeline.png   trace.json
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from piper_dynamo.ir.task import TaskName
from piper_dynamo.lowering.simulate import Costs
from piper_dynamo.planning import Plan
from piper_dynamo.timeline import COMPUTE, Timeline, plot_timeline, to_chrome_trace
from piper_dynamo.train.config import Config


class RunFolder:
    """Writes a run's files as they become known."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.out)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(config.as_dict(), indent=2) + "\n")
        self._metrics = (self.path / "metrics.jsonl").open("w")
        self._train: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []

    def write_plan(self, plan: Plan) -> None:
        """The plan's summary and graph, and each rank's program as the Python that runs."""
        (self.path / "plan.txt").write_text(f"{plan.summary()}\n\n{plan.graph}\n")
        for rank in range(plan.world_size):
            (self.path / f"program_rank{rank}.py").write_text(str(plan.program(rank)))

    def metric(self, **values: Any) -> None:
        """One line of metrics.jsonl."""
        self._metrics.write(json.dumps(values) + "\n")
        self._metrics.flush()
        if "loss" in values:
            self._train.append((values["step"], values["loss"]))
        if "validation_loss" in values:
            self._validation.append((values["step"], values["validation_loss"]))

    def draw_losses(self) -> None:
        """The loss curve."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        axis.plot(*zip(*self._train, strict=True), label="training", linewidth=1)
        if self._validation:
            axis.plot(*zip(*self._validation, strict=True), "o-", label="validation", markersize=4)
        axis.set_xlabel("step")
        axis.set_ylabel("nats per byte")
        axis.grid(alpha=0.3)
        axis.legend()
        figure.savefig(self.path / "loss.png", dpi=120)

    def draw_timeline(self, plan: Plan, measured: Timeline) -> None:
        """The measured timeline of one step under the predicted one, and as a trace."""
        measured = measured.shifted_to_zero()
        predicted = plan.simulate(measured_costs(measured)).timeline
        plot_timeline(
            {"predicted from the mean time of each task": predicted, "measured": measured},
            self.path / "timeline.png",
            unit="s",
        )
        to_chrome_trace(measured, self.path / "trace.json")

    def close(self) -> None:
        """Finish the files."""
        self._metrics.close()


def measured_costs(timeline: Timeline) -> Costs:
    """Costs of a simulation: the mean measured time of each region's passes."""
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE:
            region = str(TaskName.parse(event.name).region)
            spent[region, event.kind].append(event.duration_s)
    mean = {key: sum(found) / len(found) for key, found in spent.items()}

    def cost(name: TaskName) -> float:
        return mean.get((str(name.region), name.which.value), 0.0)

    return Costs(of=cost)


def curve(values: Sequence[float], width: int = 40) -> str:
    """A loss curve in one line of text."""
    if not values:
        return ""
    marks = "█▇▆▅▄▃▂▁"
    low, high = min(values), max(values)
    picked = (
        [values[i * len(values) // width] for i in range(width)] if len(values) > width else values
    )
    scale = (len(marks) - 1) / max(high - low, 1e-12)
    return "".join(marks[round((high - v) * scale)] for v in picked)
