"""Timelines: their arithmetic, the exported trace, and the pictures' marks on the canvas."""

import json
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import piper_dynamo as piper
from piper_dynamo.lowering.simulate import Costs
from piper_dynamo.pictures import plot_timeline, to_chrome_trace
from piper_dynamo.pictures.looks import LOOKS
from piper_dynamo.predict.profile import FEATURES, ChunkTime
from piper_dynamo.timeline import COMPUTE, Event, Timeline
from tests.models import Stack4, rows


def task(rank: int, kind: str, mb: int, start: float, end: float, stage: int = 0) -> Event:
    return Event(
        rank=rank,
        stream="compute",
        name=f"{kind}.PP{stage}.MB{mb}",
        kind=kind,
        tags={"PP": stage, "MB": mb},
        start_s=start,
        end_s=end,
    )


def wait(rank: int, start: float, end: float) -> Event:
    return Event(rank=rank, stream="wait", name="wait", kind="wait", start_s=start, end_s=end)


def two_ranks() -> Timeline:
    """A forward each, then a backward each, at 10 to 17 s."""
    return Timeline(
        [
            task(0, "F", 0, 10, 11),
            wait(0, 11, 15),
            task(0, "B", 0, 15, 17),
            task(1, "F", 0, 11, 12, stage=1),
            task(1, "B", 0, 12, 15, stage=1),
        ]
    )


def pipeline(ranks: int, microbatches: int) -> Timeline:
    """All forwards, then all backwards; a rank's tasks never overlap."""
    events = []
    for rank in range(ranks):
        for mb in range(microbatches):
            start = rank + mb
            events.append(task(rank, "F", mb, start, start + 1, rank))
            start = ranks + microbatches + 2 * (ranks - rank + mb)
            events.append(task(rank, "B", mb, start, start + 2, rank))
    return Timeline(events)


# Arithmetic


def test_busy_and_idle():
    timeline = two_ranks()
    assert timeline.ranks == [0, 1]
    assert timeline.makespan == 7
    assert [timeline.busy(r) for r in (0, 1)] == [3, 4]
    assert timeline.idle_share(0) == pytest.approx(4 / 7)


def test_nothing_recorded():
    timeline = Timeline()
    assert (timeline.ranks, timeline.makespan, timeline.idle_share(0)) == ([], 0, 0)
    assert timeline.shifted_to_zero() == timeline


def test_shifting_keeps_durations():
    moved = two_ranks().shifted_to_zero()
    assert min(e.start_s for e in moved.events) == 0
    durations = [e.duration_s for e in two_ranks().events]
    assert [e.duration_s for e in moved.events] == durations


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4))
def test_merging_puts_ranks_on_one_clock(offsets: list[float]):
    """Ranks whose clocks are `offsets` behind did the same at the same time."""
    behind = [Timeline([task(r, "F", 0, 0, 1)]).shifted(-o) for r, o in enumerate(offsets)]
    merged = Timeline.merge(behind, offsets)
    assert merged.ranks == list(range(len(offsets)))
    assert merged.makespan == pytest.approx(1)


def test_merging_without_offsets_keeps_times():
    merged = Timeline.merge([two_ranks(), Timeline([task(2, "F", 0, 9, 10)])])
    assert merged.makespan == 8


def test_merging_needs_an_offset_per_timeline():
    with pytest.raises(piper.PiperError, match="2 timelines and 1 offsets"):
        Timeline.merge([two_ranks(), two_ranks()], [0.0])


# The trace


def test_trace(tmp_path: Path):
    path = tmp_path / "trace.json"
    to_chrome_trace(two_ranks(), path)
    trace = json.loads(path.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(0, "rank 0"), (1, "rank 1")]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert {threads[r, 0] for r in (0, 1)} == {"compute"}
    assert {threads[r, 1] for r in (0, 1)} == {"wait"}
    drawn = [e for e in events if e["ph"] == "X"]
    assert len(drawn) == len(two_ranks().events)
    assert all((e["pid"], e["tid"]) in threads for e in drawn)
    last = next(e for e in drawn if e["pid"] == 0 and e["cat"] == "B")
    assert (last["name"], last["ts"], last["dur"]) == ("B.PP0.MB0", 5e6, 2e6)
    assert last["args"] == {"PP": 0, "MB": 0}


# Pictures


def texts(path: Path) -> list[str]:
    """The texts of an SVG; matplotlib draws glyphs and leaves each text as a comment."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    return [(e.text or "").strip() for e in ET.parse(path, parser).iter(ET.Comment)]


def colors(path: Path) -> set[str]:
    """Fill colours of an SVG."""
    found = set()
    for element in ET.parse(path).iter():
        for rule in element.get("style", "").split(";"):
            name, _, value = rule.partition(":")
            if name.strip() == "fill":
                found.add(value.strip())
    return found


def test_picture_shows_ranks_kinds_and_microbatches(tmp_path: Path):
    path = tmp_path / "timeline.svg"
    plot_timeline({"predicted": pipeline(2, 3), "measured": two_ranks()}, path, title="a step")
    found = texts(path)
    assert {"a step", "predicted · 15", "measured · 7", "forward", "backward", "wait"} <= set(found)
    assert sum(f.endswith("idle") for f in found) == 2 + 2
    assert "57% idle" in found
    numbers = [f for f in found if f in ("0", "1", "2")]
    assert len(numbers) >= 2 * 2 * 3 + 4
    assert {LOOKS[kind][0] for kind in ("F", "B", "wait")} <= colors(path)


def test_later_stages_of_a_rank_are_darker(tmp_path: Path):
    path = tmp_path / "timeline.svg"
    plot_timeline({"v": Timeline([task(0, "F", 0, 0, 1, 0), task(0, "F", 0, 1, 2, 3)])}, path)
    assert {LOOKS["F"][0], "#4c6b82"} <= colors(path)


@pytest.mark.parametrize(
    ("seconds", "want"), [(7, "time (s)"), (0.3, "time (ms)"), (1e-3, "time (µs)")]
)
def test_seconds_are_shown_in_a_unit_that_reads_well(tmp_path: Path, seconds: float, want: str):
    path = tmp_path / "timeline.svg"
    plot_timeline({"": Timeline([task(0, "F", 0, 0, seconds)])}, path, unit="s")
    assert want in texts(path)


@pytest.mark.parametrize(
    ("units", "want"),
    [({}, {"time (units of cost)", "predicted · 6 units of cost"}), ({"unit": "s"}, {"time (s)"})],
)
def test_a_predicted_step_claims_seconds_only_where_its_costs_are(
    tmp_path: Path, units: dict[str, str], want: set[str]
):
    """One region: two microbatches of a forward and, with no input gradient, a backward of 2."""
    path = tmp_path / "plan.svg"
    strategy = piper.Strategy(piper.Split({}, num_microbatches=2), piper.Place({}, devices=[0]))
    plan = piper.plan(Stack4(1), strategy, rows(2))
    plan.plot(path, Costs(F=1, BW=2), **units)
    found = set(texts(path))
    assert want <= found
    assert {text for text in found if text.startswith("time")} <= want


def test_a_step_predicted_from_a_profile_is_in_seconds(tmp_path: Path):
    """Also where another unit is asked for: a profile knows its own."""
    path = tmp_path / "plan.svg"
    plan = piper.plan(Stack4(1), piper.Strategy(), rows(2))
    times = tuple(
        ChunkTime(key=key, seconds=2.0, features=(0.0,) * len(FEATURES))
        for key in sorted({chunk.key for chunk in plan.chunks.values()})
    )
    profile = piper.Profile(machine={}, compile="aten", chunks=times)
    for units in ({}, {"unit": "units of cost"}):
        plan.plot(path, profile, **units)
        assert [text for text in texts(path) if text.startswith("time")] == ["time (s)"]


def test_a_large_picture_is_drawn_fast(tmp_path: Path):
    """One collection for all boxes; a number costs about a millisecond, a box next to nothing."""
    path = tmp_path / "timeline.svg"
    large = pipeline(16, 64)
    sends = [
        Event(rank=e.rank, stream="send", name="", kind="send", start_s=e.end_s, end_s=e.end_s + 1)
        for e in large.events
    ]
    begin = time.process_time()
    plot_timeline({"predicted": Timeline(large.events + sends)}, path)
    assert time.process_time() - begin < 10  # takes 2
    ids = [element.get("id", "") for element in ET.parse(path).iter()]
    assert len([name for name in ids if name.startswith("PolyCollection")]) == 1


def test_numbers_that_do_not_fit_are_left_out(tmp_path: Path):
    path = tmp_path / "timeline.svg"
    narrow = task(0, "F", 77, 0, 1e-4)
    plot_timeline({"": Timeline([narrow, task(0, "F", 88, 1, 2)])}, path)
    found = texts(path)
    assert "88" in found
    assert "77" not in found


def test_png_by_suffix_and_size(tmp_path: Path):
    """More boxes make a wider picture, more ranks a higher one."""
    sizes = []
    for number, timeline in enumerate((two_ranks(), pipeline(2, 64), pipeline(8, 2))):
        path = tmp_path / f"{number}.png"
        plot_timeline({"": timeline}, path)
        head = path.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        sizes.append(struct.unpack(">II", head[16:24]))
    small, wide, high = sizes
    assert wide[0] > small[0]
    assert high[1] > small[1]


@pytest.mark.parametrize("name", ["timeline", "timeline.pdf", "timeline.txt"])
def test_refuses_other_suffixes(tmp_path: Path, name: str):
    with pytest.raises(piper.PiperError, match=r"\.png and \.svg"):
        plot_timeline({"": two_ranks()}, tmp_path / name)


def test_refuses_to_draw_nothing(tmp_path: Path):
    with pytest.raises(piper.PiperError, match="no events to draw"):
        plot_timeline({"measured": Timeline()}, tmp_path / "timeline.png")


def test_every_kind_has_a_look():
    assert set(COMPUTE) < set(LOOKS)
    assert len({color for color, _ in LOOKS.values()}) == len(LOOKS)
    assert len({label for _, label in LOOKS.values()}) == len(LOOKS)


def test_importing_does_not_import_matplotlib():
    code = "import sys, piper_dynamo.planning; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
