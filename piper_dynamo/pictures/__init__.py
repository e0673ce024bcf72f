"""Pictures of plans and runs: `save` draws timelines in the form that a path's suffix names.

.png, .svg   for papers and pages (`still.py`)
.html        one page with zoom and hover (`page.py`)
.json        a trace for ui.perfetto.dev (`trace.py`)
"""

from collections.abc import Mapping
from pathlib import Path

from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.pictures.page import write_page
from piper_dynamo.pictures.still import plot_timeline
from piper_dynamo.pictures.trace import read_chrome_trace, to_chrome_trace
from piper_dynamo.timeline import Timeline

__all__ = ["SUFFIXES", "plot_timeline", "read_chrome_trace", "save", "to_chrome_trace"]

SUFFIXES = (".png", ".svg", ".html", ".json")


def save(
    timelines: Mapping[str, Timeline], path: str | Path, *, unit: str = "", title: str = ""
) -> None:
    """Draw timelines above each other, rank by time.

    Args:
        timelines: By heading.
        path: Where to; its suffix says in which form.
        unit: Of all times; "s" is shown as ms or µs where that reads better. Empty: none is
            claimed.
        title: Above the picture.

    Raises:
        PiperError: There is nothing to draw, the suffix is another, or the file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    try:
        match suffix:
            case ".png" | ".svg":
                plot_timeline(timelines, path, unit=unit, title=title)
            case ".html":
                write_page(timelines, path, unit=unit, title=title)
            case ".json":
                to_chrome_trace(timelines, path, unit=unit)
            case _:
                raise PiperError(
                    format_error(
                        "a picture's form follows from its path's suffix",
                        {"path": path, "known": ", ".join(SUFFIXES)},
                        hint="name the picture e.g. timeline.png",
                    )
                )
    except OSError as error:
        raise PiperError(
            format_error(
                "the picture cannot be written",
                {"path": path, "why": error},
                hint="name a file in a folder that is there and that you may write to",
            )
        ) from error
