"""PNG and SVG pictures of timelines, drawn with matplotlib.

A rank has a row of tasks, a lane per further stream, and below them what it holds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piper_dynamo.errors import PiperError
from piper_dynamo.ir.spec import show_bytes
from piper_dynamo.pictures.looks import (
    EDGE,
    LOOKS,
    MEMORY,
    MEMORY_LABEL,
    MESSAGE,
    MESSAGE_LABEL,
    Shades,
    held_categories,
    kind_of,
    peak_of,
    scale_of,
    shown_messages,
    streams_of,
)
from piper_dynamo.timeline import CATEGORIES, COMPUTE, Event, Message, Timeline

# In units of a row of tasks.
COMPUTE_HEIGHT, LANE_HEIGHT, MEMORY_HEIGHT, GAP = 1.0, 0.24, 0.5, 0.30
FEW_RANKS = 4  # up to so many there is room for names of lanes
_LEGEND_COLUMNS = 8
FEW_MESSAGES = 150  # more are drawn paler, and without heads


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
    row_in = 0.42 if most_ranks <= FEW_RANKS else 0.30
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
        scale, shown_unit = scale_of(span, unit)
        scales.append(scale)
        panel.frame(axis, span * scale)
        length = f"{panel.timeline.makespan * scale:.3g} {shown_unit}".strip()
        axis.set_title(f"{name} · {length}", loc="left", fontsize=10)
        axis.set_title(panel.shades.told(), loc="right", fontsize=8)
        axis.set_xlabel(f"time ({shown_unit})" if shown_unit else "time", fontsize=8)
    _legend(figure, list(shown.values()))
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
        self.ranks = timeline.ranks
        self.lanes = [s for s in streams_of(timeline) if s != "compute"]
        self.memory_top = COMPUTE_HEIGHT + LANE_HEIGHT * len(self.lanes)
        self.pitch = self.memory_top + (MEMORY_HEIGHT + 0.1) * bool(timeline.memory) + GAP
        self.height = self.pitch * len(self.ranks)
        self.rows = {rank: row * self.pitch for row, rank in enumerate(self.ranks)}
        boxes: dict[int, int] = {}
        for e in timeline.events:
            if e.kind in COMPUTE:
                boxes[e.rank] = boxes.get(e.rank, 0) + 1
        self.most_boxes = max(boxes.values(), default=0)
        self.shades = Shades.of(timeline)
        self.messages = shown_messages(timeline)

    def frame(self, axis: Any, span: float) -> None:
        """Draw what is around the boxes: an axis of `span` units, the ranks at the left."""
        is_small = len(self.ranks) <= FEW_RANKS
        between = "\n" if is_small else " · "
        peaks = {rank: show_bytes(peak_of(c)) for rank, c in self.timeline.memory.items()}
        labels = [
            between.join(
                [
                    f"rank {rank}",
                    f"{self.timeline.idle_share(rank):.0%} idle",
                    *([peaks[rank]] if rank in peaks and not is_small else []),
                ]
            )
            for rank in self.ranks
        ]
        places = [top + COMPUTE_HEIGHT / 2 for top in self.rows.values()]
        axis.set_yticks(places, labels, fontsize=8)
        if is_small:
            lanes = [
                (COMPUTE_HEIGHT + LANE_HEIGHT * (number + 0.5), stream)
                for number, stream in enumerate(self.lanes)
            ]
            minor = [(top + place, name) for top in self.rows.values() for place, name in lanes]
            minor += [
                (self.rows[rank] + self.memory_top + MEMORY_HEIGHT / 2 + 0.1, f"peak {peak}")
                for rank, peak in peaks.items()
            ]
            axis.set_yticks([p for p, _ in minor], [n for _, n in minor], minor=True, fontsize=5.5)
        axis.set_xlim(0, span * 1.002)  # the last box keeps its right edge
        axis.set_ylim(self.height - GAP / 2, -GAP / 2)
        axis.tick_params(axis="x", labelsize=8)
        axis.tick_params(axis="y", which="both", length=0)
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
        corners, faces, edges = [], [], []
        for e in self.timeline.events:
            top, height = self._place(e)
            start, end, bottom = e.start_s * scale, e.end_s * scale, top + height
            corners.append([(start, top), (end, top), (end, bottom), (start, bottom)])
            faces.append(self.shades.color(e))
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
                    color="white" if self.shades.depth(e) > 0.5 else "black",
                    ha="center",
                    va="center",
                    zorder=4,
                )
        # One for all: an artist for each row and colour takes long.
        boxes = PolyCollection(corners, facecolors=faces, edgecolors=edges, linewidths=0.4)
        axis.add_collection(boxes, autolim=False)
        if self.timeline.memory:
            self._draw_memory(axis, scale)
        if self.messages:
            self._draw_messages(axis, scale)

    def _place(self, event: Event) -> tuple[float, float]:
        """Top and height of an event's box."""
        top = self.rows[event.rank]
        if event.stream == "compute":
            return top, COMPUTE_HEIGHT
        return top + COMPUTE_HEIGHT + LANE_HEIGHT * self.lanes.index(event.stream), LANE_HEIGHT

    def _draw_memory(self, axis: Any, scale: float) -> None:
        """What each rank holds, by category, all to the scale of the highest peak."""
        from matplotlib.collections import PolyCollection

        curves = self.timeline.memory
        most = max(map(peak_of, curves.values()), default=0) or 1
        end = self.timeline.makespan * scale
        # From the top of the stack down: each category covers what is above those below it.
        for category in reversed(held_categories(self.timeline)):
            areas = []
            for rank, curve in curves.items():
                floor = self.rows[rank] + self.memory_top + 0.1 + MEMORY_HEIGHT
                corners, height = [(0.0, floor)], floor
                for at, held in curve:
                    corners.append((at * scale, height))
                    height = floor - MEMORY_HEIGHT * sum(held[: category + 1]) / most
                    corners.append((at * scale, height))
                areas.append([*corners, (end, height), (end, floor)])
            look = MEMORY[CATEGORIES[category]]
            boxes = PolyCollection(areas, facecolors=look, edgecolors=EDGE, linewidths=0.3)
            axis.add_collection(boxes, autolim=False)

    def _draw_messages(self, axis: Any, scale: float) -> None:
        """An arrow from the end of the source's row to the target's."""
        from matplotlib.collections import LineCollection

        lines = []
        for message, (sent, taken) in self.messages:
            start, end = self._ends(message)
            lines.append([(sent * scale, start), (taken * scale, end)])
        is_few = len(lines) <= FEW_MESSAGES
        axis.add_collection(
            LineCollection(
                lines, colors=MESSAGE, linewidths=0.7, alpha=0.8 if is_few else 0.35, zorder=3
            ),
            autolim=False,
        )
        if is_few:
            tips = [line[1] for line in lines]
            for mark, going_down in (("v", True), ("^", False)):
                chosen = [
                    tip
                    for tip, line in zip(tips, lines, strict=True)
                    if (line[1][1] > line[0][1]) is going_down
                ]
                if chosen:
                    axis.scatter(*zip(*chosen, strict=True), s=9, marker=mark, c=MESSAGE, zorder=3)

    def _ends(self, message: Message) -> tuple[float, float]:
        """Where an arrow leaves its source's row of tasks, and where it meets its target's."""
        source, target = self.rows[message.source], self.rows[message.target]
        if target > source:
            return source + COMPUTE_HEIGHT, target
        return source, target + COMPUTE_HEIGHT


def _legend(figure: Any, timelines: list[Timeline]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found = {kind_of(e) for t in timelines for e in t.events}
    handles: list[Any] = [
        Patch(facecolor=color, edgecolor=EDGE, linewidth=0.4, label=label)
        for kind, (color, label) in LOOKS.items()
        if kind in found
    ]
    if any(shown_messages(t) for t in timelines):
        handles.append(Line2D([], [], color=MESSAGE, linewidth=0.8, label=MESSAGE_LABEL))
    for category in sorted({at for t in timelines for at in held_categories(t)}):
        name = CATEGORIES[category]
        label = f"{MEMORY_LABEL}: {name}"
        handles.append(Patch(facecolor=MEMORY[name], edgecolor=EDGE, linewidth=0.4, label=label))
    columns = min(len(handles), _LEGEND_COLUMNS)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)
