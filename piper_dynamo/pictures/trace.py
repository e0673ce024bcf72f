"""Timelines as the trace files of Chrome and Perfetto, and back.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A
process is a rank, a thread a stream; messages are flows, memory is a counter.

Signature: timelines by heading -> JSON; JSON -> the timeline with a heading.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.pictures.looks import streams_of
from piper_dynamo.timeline import CATEGORIES, Event, Held, Message, Timeline

HIGHEST = 1_000_000  # ranks of one heading
INSIDE_US = 1e-3  # viewers bind an arrow to the box it begins in, not to one that ends there


def to_chrome_trace(
    timelines: Timeline | Mapping[str, Timeline], path: str | Path, *, unit: str = "s"
) -> None:
    """Write a trace for ui.perfetto.dev or chrome://tracing.

    A process per rank, a thread per stream, the first event at 0.

    Args:
        timelines: One, or several by their heading, which the names of their processes begin with.
        path: The file.
        unit: "s" where times are seconds; else one unit is shown as a millisecond.
    """
    given = {"": timelines} if isinstance(timelines, Timeline) else timelines
    micro = 1e6 if unit == "s" else 1e3
    events: list[dict[str, Any]] = []
    for index, (heading, timeline) in enumerate(given.items()):
        events += _events(timeline.shifted_to_zero(), heading, index * HIGHEST, micro)
    other = {} if unit == "s" else {"otherData": {"unit": f"1 ms is one of: {unit or 'unit'}"}}
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", **other})
    Path(path).write_text(text, encoding="utf-8")


def _events(timeline: Timeline, heading: str, first: int, micro: float) -> list[dict[str, Any]]:
    """One timeline's, its ranks numbered from `first` on."""
    events: list[dict[str, Any]] = []
    streams = streams_of(timeline)
    for rank in timeline.ranks:
        name = f"{heading} · rank {rank}" if heading else f"rank {rank}"
        process = {"ph": "M", "pid": first + rank, "tid": 0}
        events.append({**process, "name": "process_name", "args": {"name": name}})
        sort = {"sort_index": first + rank}
        events.append({**process, "name": "process_sort_index", "args": sort})
        for number, stream in enumerate(streams):
            thread = {"ph": "M", "pid": first + rank, "tid": number}
            events.append({**thread, "name": "thread_name", "args": {"name": stream}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
    for e in timeline.events:
        events.append(
            {
                "ph": "X",
                "name": e.name,
                "cat": e.kind,
                "pid": first + e.rank,
                "tid": streams.index(e.stream),
                "ts": e.start_s * micro,
                "dur": e.duration_s * micro,
                "args": dict(e.tags),
            }
        )
    for m in timeline.messages:
        events += _flow(m, first, micro)
    for rank, curve in timeline.memory.items():
        for at, held in curve:
            counter = {"ph": "C", "name": "memory", "pid": first + rank, "tid": 0}
            named = dict(zip(CATEGORIES, held, strict=True))
            events.append({**counter, "ts": at * micro, "args": named})
    return events


def _flow(message: Message, first: int, micro: float) -> list[dict[str, Any]]:
    """An arrow: two events of one id."""
    if message.ends is None:
        return []
    sent, taken = message.ends
    link = {
        "name": message.name,
        "cat": "message",
        "id": f"{first}:{message.source}>{message.target}:{message.number}",
    }
    sizes = {"bytes": message.nbytes}
    source = {
        "pid": first + message.source,
        "tid": 0,
        "ts": sent * micro - INSIDE_US,
        "args": sizes,
    }
    target = {"pid": first + message.target, "tid": 0, "ts": taken * micro}
    return [{**link, **source, "ph": "s"}, {**link, **target, "ph": "f", "bp": "e"}]


def read_chrome_trace(path: str | Path) -> Timeline:
    """The timeline of a trace that `to_chrome_trace` wrote of one timeline in seconds.

    Raises:
        PiperError: The file cannot be read, or is no such trace.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        streams = {
            (row["pid"], row["tid"]): row["args"]["name"]
            for row in rows
            if row["ph"] == "M" and row["name"] == "thread_name"
        }
        events = [_event(row, streams) for row in rows if row["ph"] == "X"]
        return Timeline(events, _messages(rows), _memory(rows))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PiperError(
            format_error(
                "this is not a trace of a step",
                {"file": path, "why": f"{type(error).__name__}: {error}"},
                hint="give a run folder of piper train, whose trace.json it wrote",
            )
        ) from error


def _event(row: Mapping[str, Any], streams: Mapping[tuple[int, int], str]) -> Event:
    start = row["ts"] / 1e6
    return Event(
        rank=row["pid"],
        stream=streams[row["pid"], row["tid"]],
        name=row["name"],
        kind=row["cat"],
        tags=row["args"],
        start_s=start,
        end_s=start + row["dur"] / 1e6,
    )


def _memory(rows: list[dict[str, Any]]) -> dict[int, list[tuple[float, Held]]]:
    found: dict[int, list[tuple[float, Held]]] = {}
    for row in rows:
        if row["ph"] == "C":
            held = tuple(int(row["args"][name]) for name in CATEGORIES)
            found.setdefault(row["pid"], []).append((row["ts"] / 1e6, held))
    return found


def _messages(rows: list[dict[str, Any]]) -> list[Message]:
    sent = {row["id"]: row for row in rows if row["ph"] == "s"}
    return [
        Message(
            source=sent[row["id"]]["pid"],
            target=row["pid"],
            number=int(row["id"].rpartition(":")[2]),
            name=row["name"],
            nbytes=sent[row["id"]]["args"]["bytes"],
            sent_s=(sent[row["id"]]["ts"] + INSIDE_US) / 1e6,
            taken_s=row["ts"] / 1e6,
        )
        for row in rows
        if row["ph"] == "f"
    ]
