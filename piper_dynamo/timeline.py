"""Timelines: what each rank did when, simulated or measured, drawn and exported.

Terms: an *event* is one instruction's stretch of time on one rank's stream; *idle* is what is left
of the makespan beside the events that compute.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

COMPUTE = ("F", "B", "BI", "BW")
# Colours that stay apart in print and for colour-blind readers (Okabe-Ito, lightened).
COLORS = {
    "F": "#7fb3d9",
    "B": "#e9a86b",
    "BI": "#f2c14e",
    "BW": "#8fc79a",
    "send": "#b7a6d6",
    "recv": "#b7a6d6",
    "wait": "#eeeeee",
    "reduce": "#d98fb3",
    "gather": "#d98fb3",
    "other": "#cccccc",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One stretch of time.

    Attributes:
        rank: Whose.
        stream: The logical stream, `compute` for chunks.
        name: The task's name.
        kind: F, B, BI, BW, send, recv, wait, reduce, gather or other.
        tags: Region tags and MB.
        start_s: Begin, in seconds (or in the simulation's unit).
        end_s: End.
    """

    rank: int
    stream: str
    name: str
    kind: str
    tags: Mapping[str, Any] = field(default_factory=dict)
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it lasts."""
        return self.end_s - self.start_s


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Events of one or several ranks."""

    events: list[Event] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have events."""
        return sorted({e.rank for e in self.events})

    @property
    def makespan(self) -> float:
        """From the first begin to the last end."""
        if not self.events:
            return 0.0
        return max(e.end_s for e in self.events) - min(e.start_s for e in self.events)

    def busy(self, rank: int) -> float:
        """Time a rank spends in F, B, BI and BW."""
        return sum(e.duration_s for e in self.events if e.rank == rank and e.kind in COMPUTE)

    def idle_share(self, rank: int) -> float:
        """The share of the makespan in which a rank does not compute."""
        return 1.0 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def from_zero(self) -> "Timeline":
        """The same, beginning at 0."""
        start = min((e.start_s for e in self.events), default=0.0)
        moved = [replace(e, start_s=e.start_s - start, end_s=e.end_s - start) for e in self.events]
        return Timeline(events=moved)

    @staticmethod
    def merge(timelines: Iterable["Timeline"]) -> "Timeline":
        """Several ranks' timelines as one; their clocks must agree, as they do on one machine."""
        return Timeline(events=[e for t in timelines for e in t.events])

    def mean_duration(self, kind: str) -> float | None:
        """The mean duration of a kind of task; None where there is none."""
        found = [e.duration_s for e in self.events if e.kind == kind]
        return sum(found) / len(found) if found else None


def to_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a trace for Perfetto or chrome://tracing: a process per rank, a thread per stream."""
    events: list[dict[str, Any]] = []
    streams = sorted({e.stream for e in timeline.events}, key=lambda s: (s != "compute", s))
    for rank in timeline.ranks:
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for number, stream in enumerate(streams):
            named = {"ph": "M", "name": "thread_name", "pid": rank, "tid": number}
            events.append({**named, "args": {"name": stream}})
    for e in timeline.from_zero().events:
        events.append(
            {
                "ph": "X",
                "name": e.name,
                "cat": e.kind,
                "pid": e.rank,
                "tid": streams.index(e.stream),
                "ts": e.start_s * 1e6,
                "dur": e.duration_s * 1e6,
                "args": dict(e.tags),
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def plot_timeline(
    timelines: Mapping[str, Timeline], path: str | Path, *, unit: str = "", title: str = ""
) -> None:
    """Draw timelines above each other, rank by time, coloured by kind, with microbatch numbers.

    Args:
        timelines: By heading, e.g. `{"predicted": ..., "measured": ...}`, each on its own axis.
        path: PNG or SVG, by its suffix.
        unit: Of the time axis.
        title: Above the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {name: t.from_zero() for name, t in timelines.items() if t.events}
    heights = [max(len(t.ranks), 1) for t in shown.values()] or [1]
    figure = Figure(figsize=(14, 1.3 + sum(0.55 * h + 0.75 for h in heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(shown) or 1, 1, squeeze=False, height_ratios=[h + 1 for h in heights]
    )
    for (name, timeline), (axis,) in zip(shown.items(), axes, strict=True):
        _draw(axis, timeline)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_xlabel(f"time ({unit})" if unit else "time", fontsize=8)
    kinds = {e.kind for t in shown.values() for e in t.events}
    _legend(figure, [k for k in COLORS if k in kinds])
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def _draw(axis: Any, timeline: Timeline) -> None:
    ranks = timeline.ranks
    width = max(timeline.makespan, 1e-12)
    for row, rank in enumerate(ranks):
        mine = [e for e in timeline.events if e.rank == rank]
        _bars(
            axis, [e for e in mine if e.stream == "compute" and e.kind in COMPUTE], row, 0.0, 0.62
        )
        rest = [e for e in mine if e.kind not in COMPUTE and e.kind != "other"]
        _bars(axis, rest, row, 0.66, 0.14)
        for e in mine:
            mb = e.tags.get("MB")
            if e.kind in COMPUTE and mb is not None and e.duration_s > width * 0.008:
                middle = (e.start_s + e.end_s) / 2
                size = 7 if e.duration_s > width * 0.014 else 5
                axis.text(middle, row + 0.31, str(mb), ha="center", va="center", fontsize=size)
    labels = [f"rank {r}\nidle {timeline.idle_share(r):.0%}" for r in ranks]
    axis.set_yticks([row + 0.4 for row in range(len(ranks))], labels, fontsize=8)
    axis.set_xlim(0, width)
    axis.set_ylim(len(ranks), -0.1)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _bars(axis: Any, events: Sequence[Event], row: int, top: float, height: float) -> None:
    for kind in dict.fromkeys(e.kind for e in events):
        spans = [(e.start_s, e.duration_s) for e in events if e.kind == kind]
        axis.broken_barh(
            spans,
            (row + top, height),
            facecolors=COLORS.get(kind, "#cccccc"),
            edgecolors="#555555",
            linewidth=0.3,
        )


def _legend(figure: Any, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    names = {"F": "forward", "B": "backward", "BI": "input gradient", "BW": "weight gradient"}
    patches = [
        Patch(facecolor=COLORS[k], edgecolor="#555555", label=names.get(k, k)) for k in kinds
    ]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
