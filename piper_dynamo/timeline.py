"""Timelines: what each rank did when, simulated or measured, drawn and exported.

Terms: an *event* is one instruction's stretch of time on one rank's stream; *busy* is the time in
events that compute, *idle* the rest of the makespan. A *lane* is a thin row of the picture under a
rank's compute row, one per further stream.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from piper_dynamo.errors import PiperError
from piper_dynamo.ir.program import COLLECTIVES, EXCHANGES, REDUCTIONS

COMPUTE = ("F", "B", "BI", "BW")
# Colours that stay apart in print and for colour-blind readers (Okabe-Ito, lightened), and what
# the legend calls them; kinds of one name share an entry.
LOOKS: Mapping[str, tuple[str, str]] = {
    "F": ("#7fb3d9", "forward"),
    "B": ("#e9a86b", "backward"),
    "BI": ("#f2c14e", "input gradient"),
    "BW": ("#8fc79a", "weight gradient"),
    "send": ("#8b76b8", "send"),
    "recv": ("#b9abd6", "receive"),
    "wait": ("#e4e4e4", "wait"),
    "reduce": ("#c4668f", "reduce"),
    "gather": ("#dca3be", "gather"),
    "exchange": ("#7d5ba6", "exchange of rows"),
    "other": ("#a8a8a8", "other work"),
}
COLLECTIVE_LOOKS = {
    op: "reduce" if op in REDUCTIONS else "exchange" if op in EXCHANGES else "gather"
    for op in COLLECTIVES
}
EDGE = "#4d4d4d"
COMPUTE_HEIGHT, LANE_HEIGHT, GAP = 1.0, 0.24, 0.30  # in units of a compute row


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One stretch of time.

    Attributes:
        rank: Whose.
        stream: The logical stream, `compute` for chunks.
        name: The task's name.
        kind: F, B, BI, BW, send, recv, wait, reduce, gather, exchange or other.
        tags: Region tags such as PP, and MB.
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


@dataclass(slots=True)
class Timeline:
    """Events of one or several ranks; a recording adds to `events` when its step ends."""

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
        """The share of the makespan, of all ranks together, in which a rank does not compute."""
        return 1.0 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def shifted(self, offset_s: float) -> "Timeline":
        """The same, later by an offset."""
        moved = [
            replace(e, start_s=e.start_s + offset_s, end_s=e.end_s + offset_s) for e in self.events
        ]
        return Timeline(moved)

    def shifted_to_zero(self) -> "Timeline":
        """The same, beginning at 0."""
        return self.shifted(-min((e.start_s for e in self.events), default=0.0))

    @staticmethod
    def merge(
        timelines: Iterable["Timeline"], offsets_s: Sequence[float] | None = None
    ) -> "Timeline":
        """Several ranks' timelines as one.

        Args:
            timelines: One per rank, or any number.
            offsets_s: What to add to each one's times, so that all follow one clock. Left out: the
                clocks agree already, as `time.perf_counter` does between processes of one Linux
                machine.

        Raises:
            PiperError: There are not as many offsets as timelines.
        """
        given = list(timelines)
        offsets = [0.0] * len(given) if offsets_s is None else list(offsets_s)
        if len(offsets) != len(given):
            raise PiperError(
                f"Timeline.merge got {len(given)} timelines and {len(offsets)} offsets; "
                "give one offset per timeline"
            )
        moved = [t.shifted(o) if o else t for t, o in zip(given, offsets, strict=True)]
        return Timeline([e for t in moved for e in t.events])


def to_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a trace for ui.perfetto.dev or chrome://tracing.

    A process per rank, a thread per stream, the first event at 0. Times are taken as seconds.
    """
    events: list[dict[str, Any]] = []
    streams = _streams(timeline)
    for rank in timeline.ranks:
        process = {"ph": "M", "pid": rank, "tid": 0}
        events.append({**process, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({**process, "name": "process_sort_index", "args": {"sort_index": rank}})
        for number, stream in enumerate(streams):
            thread = {"ph": "M", "pid": rank, "tid": number}
            events.append({**thread, "name": "thread_name", "args": {"name": stream}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
    for e in timeline.shifted_to_zero().events:
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
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def plot_timeline(
    timelines: Mapping[str, Timeline], path: str | Path, *, unit: str = "", title: str = ""
) -> None:
    """Draw timelines above each other, rank by time, coloured by kind, with microbatch numbers.

    Where ranks hold several stages, a later stage's tasks are darker. Numbers that do not fit into
    their box are left out.

    Args:
        timelines: By heading, e.g. `{"predicted": ..., "measured": ...}`.
        path: PNG or SVG, by its suffix.
        unit: The unit of all times, for the labels: the panels then share one time axis. "s" is
            shown as ms or µs where that reads better. Empty: none is claimed, and each panel has an
            axis of its own.
        title: Above the picture.

    Raises:
        PiperError: There is nothing to draw, or the suffix is another.
    """
    path = Path(path)
    shown = {name: t.shifted_to_zero() for name, t in timelines.items() if t.events}
    if not shown:
        raise PiperError("plot_timeline got no events to draw; record or simulate a step first")
    if path.suffix.lower() not in (".png", ".svg"):
        raise PiperError(f"plot_timeline writes .png and .svg, by the path's suffix; got '{path}'")
    # Here, so that importing Piper costs nothing; through objects, since pyplot's state is global
    # and would take the user's backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {name: _Panel(t) for name, t in shown.items()}
    heights = [panel.height for panel in panels.values()]
    most_ranks = max(len(t.ranks) for t in shown.values())
    row_in = 0.42 if most_ranks <= 4 else 0.30
    width_in = min(max(13.0, 0.18 * max(p.most_boxes for p in panels.values())), 40.0)
    figure = Figure(
        figsize=(width_in, 0.8 + sum(row_in * h + 0.7 for h in heights)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(t.makespan for t in shown.values())
    scales: list[float] = []
    for (name, panel), axis in zip(panels.items(), axes, strict=True):
        span = (longest if unit else panel.timeline.makespan) or 1.0
        scale, shown_unit = _scale(span, unit)
        scales.append(scale)
        panel.frame(axis, span * scale)
        length = f"{panel.timeline.makespan * scale:.3g} {shown_unit}".strip()
        axis.set_title(f"{name} · {length}", loc="left", fontsize=10)
        axis.set_xlabel(f"time ({shown_unit})" if shown_unit else "time", fontsize=8)
    _legend(figure, {e.kind for t in shown.values() for e in t.events})
    if title:
        figure.suptitle(title, fontsize=11)
    # Lay out the frames alone: with the boxes and numbers, everything would be drawn twice.
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    for panel, axis, scale in zip(panels.values(), axes, scales, strict=True):
        panel.fill(axis, scale)
    figure.savefig(path, dpi=120)


class _Panel:
    """One timeline of a picture. Lengths across time in points, 1/72 inch, where text is fitted."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.lanes = [s for s in _streams(timeline) if s != "compute"]
        self.pitch = COMPUTE_HEIGHT + LANE_HEIGHT * len(self.lanes) + GAP
        self.height = self.pitch * len(timeline.ranks)
        boxes: dict[int, int] = {}
        stages: dict[int, set[int]] = {}
        for e in timeline.events:
            if e.kind in COMPUTE:
                boxes[e.rank] = boxes.get(e.rank, 0) + 1
                stages.setdefault(e.rank, set()).add(e.tags.get("PP", 0))
        self.most_boxes = max(boxes.values(), default=0)
        self.stages = {rank: sorted(found) for rank, found in stages.items()}

    def frame(self, axis: Any, span: float) -> None:
        """Draw what is around the boxes: an axis of `span` units, the ranks at the left."""
        ranks = self.timeline.ranks
        between = "\n" if len(ranks) <= 4 else " · "
        labels = [f"rank {r}{between}{self.timeline.idle_share(r):.0%} idle" for r in ranks]
        places = [row * self.pitch + COMPUTE_HEIGHT / 2 for row in range(len(ranks))]
        axis.set_yticks(places, labels, fontsize=8)
        axis.set_xlim(0, span * 1.002)  # the last box keeps its right edge
        axis.set_ylim(self.height - GAP / 2, -GAP / 2)
        axis.tick_params(axis="x", labelsize=8)
        axis.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)

    def fill(self, axis: Any, scale: float) -> None:
        """Draw the boxes and their numbers, `scale` units of the axis to one of the timeline's."""
        from matplotlib.collections import PolyCollection
        from matplotlib.font_manager import FontProperties

        fonts = {size: FontProperties(size=size) for size in (8.0, 6.5, 5.0)}
        left, right = axis.get_xlim()
        width = axis.get_window_extent().width * 72 / axis.figure.dpi
        points = width / (right - left) * scale  # to one unit of the timeline
        rows = {rank: row * self.pitch for row, rank in enumerate(self.timeline.ranks)}
        corners, faces, edges = [], [], []
        for e in self.timeline.events:
            top, height = rows[e.rank], COMPUTE_HEIGHT
            if e.stream != "compute":
                top += COMPUTE_HEIGHT + LANE_HEIGHT * self.lanes.index(e.stream)
                height = LANE_HEIGHT
            start, end, bottom = e.start_s * scale, e.end_s * scale, top + height
            corners.append([(start, top), (end, top), (end, bottom), (start, bottom)])
            depth = self._depth(e)
            faces.append(_darker(LOOKS.get(e.kind, LOOKS["other"])[0], depth))
            # An edge would hide a box that is not much wider than a line.
            edges.append(EDGE if e.duration_s * points > 3 else faces[-1])
            if e.stream != "compute" or e.kind not in COMPUTE or "MB" not in e.tags:
                continue
            number, room = str(e.tags["MB"]), e.duration_s * points - 1.5
            # A digit is 0.62 of its size wide.
            font = next((f for size, f in fonts.items() if 0.62 * size * len(number) < room), None)
            if font is not None:
                # Through the figure: an axis gives each text a clip path, which takes long.
                axis.figure.text(
                    (start + end) / 2,
                    top + height / 2,
                    number,
                    transform=axis.transData,
                    fontproperties=font,
                    color="white" if depth > 0.5 else "black",
                    ha="center",
                    va="center",
                )
        # One for all: an artist for each row and colour takes long.
        boxes = PolyCollection(corners, facecolors=faces, edgecolors=edges, linewidths=0.4)
        axis.add_collection(boxes, autolim=False)

    def _depth(self, event: Event) -> float:
        """0 for the first of a rank's stages, 1 for the last."""
        stages = self.stages.get(event.rank, [0])
        if event.kind not in COMPUTE or len(stages) < 2:
            return 0.0
        return stages.index(event.tags.get("PP", 0)) / (len(stages) - 1)


def _streams(timeline: Timeline) -> list[str]:
    """All streams, compute first."""
    return sorted({e.stream for e in timeline.events}, key=lambda s: (s != "compute", s))


def _scale(span: float, unit: str) -> tuple[float, str]:
    """What to multiply times with, and the unit they then have."""
    if unit != "s" or span >= 2:
        return 1.0, unit
    return (1e3, "ms") if span >= 2e-3 else (1e6, "µs")


def _darker(color: str, depth: float) -> str:
    """A colour, up to 40 % darker."""
    keep = 1 - 0.4 * depth
    parts = (round(int(color[i : i + 2], 16) * keep) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


def _legend(figure: Any, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    found = {kind if kind in LOOKS else "other" for kind in kinds}
    patches = [
        Patch(facecolor=color, edgecolor=EDGE, linewidth=0.4, label=label)
        for kind, (color, label) in LOOKS.items()
        if kind in found
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
