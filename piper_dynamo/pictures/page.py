"""A timeline as one HTML page with zoom and hover, which loads nothing from anywhere.

`page.html` is the page without its data; the data stands in it as JSON.

Signature: timelines by heading -> HTML.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from piper_dynamo.errors import PiperError
from piper_dynamo.pictures.looks import (
    LOOKS,
    MEMORY,
    MEMORY_LABEL,
    MESSAGE,
    MESSAGE_LABEL,
    Shades,
    kind_of,
    peak_of,
    scale_of,
    shown_messages,
    streams_of,
)
from piper_dynamo.timeline import Timeline

DIGITS = 9  # of times: enough for nanoseconds of a step of a second


def write_page(
    timelines: Mapping[str, Timeline], path: str | Path, *, unit: str = "", title: str = ""
) -> None:
    """Write the page; all panels share one time axis.

    Args:
        timelines: By heading.
        path: The file.
        unit: The unit of all times; "s" is shown as ms or µs where that reads better.
        title: Above the picture.

    Raises:
        PiperError: There is nothing to draw.
    """
    shown = {name: t.shifted_to_zero() for name, t in timelines.items() if t.events}
    if not shown:
        raise PiperError("write_page got no events to draw; record or simulate a step first")
    scale, shown_unit = scale_of(max(t.makespan for t in shown.values()), unit)
    data = {
        "title": title or "Timeline of a step",
        "unit": shown_unit,
        "kinds": LOOKS,
        "message": [MESSAGE, MESSAGE_LABEL],
        "memory": MEMORY_LABEL,
        "categories": [[color, name] for name, color in MEMORY.items()],
        "panels": [_panel(name, t, scale, shown_unit) for name, t in shown.items()],
    }
    # Inside a script a closing tag would end it, wherever it stands.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = files("piper_dynamo.pictures").joinpath("page.html").read_text(encoding="utf-8")
    Path(path).write_text(page.replace("@DATA@", text), encoding="utf-8")


def _panel(name: str, timeline: Timeline, scale: float, unit: str) -> dict[str, Any]:
    """One timeline as the page reads it: ranks and streams by their place in lists."""
    ranks, streams, shades = timeline.ranks, streams_of(timeline), Shades.of(timeline)
    rows = {rank: row for row, rank in enumerate(ranks)}

    def scaled(value: float) -> float:
        return round(value * scale, DIGITS)

    events = [
        [
            rows[e.rank],
            streams.index(e.stream),
            kind_of(e),
            e.name,
            scaled(e.start_s),
            scaled(e.duration_s),
            e.tags.get("MB"),
            shades.color(e),
            e.tags.get("PP"),
            int(shades.depth(e) > 0.5),
        ]
        for e in timeline.events
    ]
    messages = [
        [rows[m.source], rows[m.target], m.name, m.nbytes, scaled(sent), scaled(taken)]
        for m, (sent, taken) in shown_messages(timeline)
    ]
    curves = [timeline.memory.get(rank, []) for rank in ranks] if timeline.memory else []
    return {
        "name": name,
        "span": scaled(timeline.makespan),
        "length": f"{timeline.makespan * scale:.3g} {unit}".strip(),
        "ranks": ranks,
        "idle": [f"{timeline.idle_share(rank):.0%}" for rank in ranks],
        "streams": streams,
        "events": events,
        "messages": messages,
        "memory": [[[scaled(at), held] for at, held in curve] for curve in curves],
        "peaks": [peak_of(curve) for curve in curves],
    }
