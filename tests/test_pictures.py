"""Pictures of plans: arrows, memory curves, the trace and back, drawings of the graph, refusals."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import piper_dynamo as piper
from piper_dynamo.footprint import held_before
from piper_dynamo.pictures import SUFFIXES, graph, read_chrome_trace, save, to_chrome_trace
from piper_dynamo.pictures.looks import LOOKS, MESSAGE, shown_messages
from piper_dynamo.timeline import BEFORE, CATEGORIES, Event, Message, Timeline
from tests import jobs
from tests.jobs import LINE2, LINE4
from tests.models import Stack4, rows
from tests.programs import VARIABLE, need


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch):
    """Other tests run such plans; here they are only drawn."""
    monkeypatch.setenv("PIPER_VERIFY", "1")


@cache
def plan(stages: int = 2, microbatches: int = 2) -> piper.Plan:
    placement = LINE2 if stages == 2 else LINE4
    wanted = jobs.strategy(placement, microbatches, "one_f_one_b")
    return piper.plan(Stack4(stages), wanted, rows(2 * microbatches))


def send(source: int, target: int, **times: float) -> Message:
    return Message(source=source, target=target, number=0, name="F.PP0.MB0", **times)


# What is drawn


def test_messages_of_a_simulation():
    """A forward's value and a gradient per microbatch, taken when they have arrived."""
    found = plan().timeline(piper.Costs(comm=0.5)).messages
    shown = {
        (m.source, m.target, m.name): m.ends for m in found if m.name.partition(".")[0] != "loss"
    }
    assert shown == {
        (0, 1, "F.PP0.MB0"): (1.0, 1.5),
        (0, 1, "F.PP0.MB1"): (2.0, 4.5),  # taken after the first backward
        (1, 0, "B.PP1.MB0"): (4.5, 5.0),
        (1, 0, "B.PP1.MB1"): (7.5, 8.0),
    }
    assert {m.nbytes for m in found if m.name != "loss"} == {2 * 4 * 8}


def test_the_loss_has_no_arrow():
    timeline = plan().timeline()
    assert "loss" in {m.name for m in timeline.messages}
    assert "loss" not in {m.name for m, _ in shown_messages(timeline)}


def test_halves_of_a_message_are_joined():
    mine = Timeline([], [send(0, 1, sent_s=3.0)])
    theirs = Timeline([], [send(0, 1, taken_s=5.0)])
    assert mine.messages[0].ends is None
    (whole,) = Timeline.merge([mine, theirs], [0.0, 10.0]).messages
    assert whole.ends == (3.0, 15.0)


def activations(nbytes: int) -> tuple[int, ...]:
    return tuple(nbytes if name == "activations" else 0 for name in CATEGORIES)


@pytest.mark.parametrize("stages", [2, 4])
def test_memory_reaches_the_predicted_peak(stages: int):
    found = plan(stages, 4)
    timeline = found.timeline()
    for program in found.programs:
        curve = timeline.memory[program.rank]
        times, held = zip(*curve, strict=True)
        before = len(BEFORE)
        assert max(sum(one[before:]) for one in held) == program.peak_bytes
        assert {one[:before] for one in held} == {held_before(program, found.args)}
        assert list(times) == sorted(times)
        assert 0 <= times[0] <= times[-1] <= timeline.makespan
        assert all(curve[k] != curve[k + 1] for k in range(len(curve) - 1))


def test_a_rank_without_tasks_is_idle(tmp_path: Path):
    box = Event(rank=0, stream="compute", name="F", kind="F", start_s=0, end_s=1)
    timeline = Timeline([box], memory={0: [(0.0, activations(1))], 2: [(0.5, activations(8))]})
    assert timeline.ranks == [0, 2]
    assert timeline.idle_share(2) == 1
    for suffix in SUFFIXES:
        save({"": timeline}, tmp_path / f"idle{suffix}")


def count(path: Path, kind: str) -> int:
    """How many of matplotlib's collections of a kind an SVG has."""
    ids = (element.get("id", "") for element in ET.parse(path).iter())
    return sum(name.startswith(kind) for name in ids)


def test_stills_have_arrows_and_memory(tmp_path: Path):
    path = tmp_path / "plan.svg"
    plan().plot(path)
    text = path.read_text()
    assert (count(path, "LineCollection"), count(path, "PolyCollection")) == (1, 1 + 4)
    assert MESSAGE in text
    for held in ("parameters", "gradients", "activations", "communication"):
        assert f"<!-- memory: {held} -->" in text
    assert re.search(r"<!-- peak [\d.]+ [KM]?i?B -->", text)


def test_more_messages_are_paler_and_without_heads(tmp_path: Path):
    few, many = tmp_path / "few.svg", tmp_path / "many.svg"
    plan().plot(few)
    boxes = [
        Event(rank=r, stream="compute", name="F", kind="F", start_s=0, end_s=1) for r in (0, 1)
    ]
    save({"": Timeline(boxes, [send(0, 1, sent_s=0.1, taken_s=0.5)] * 200)}, many)
    assert count(few, "PathCollection") == 2  # heads up, heads down
    assert count(many, "PathCollection") == 0


# Traces


def test_a_trace_is_read_as_it_was_written(tmp_path: Path):
    want = plan().simulate(piper.Costs(F=0.5, comm=0.25)).timeline
    want = Timeline(want.events, [m for m in want.messages if m.ends])
    to_chrome_trace(want, tmp_path / "trace.json")
    found = read_chrome_trace(tmp_path / "trace.json")
    assert found.events == want.events
    for got, message in zip(found.messages, want.messages, strict=True):
        assert got.ends == pytest.approx(message.ends)
        assert (got.source, got.target, got.number) == (
            message.source,
            message.target,
            message.number,
        )


def test_a_trace_shows_arrows_and_memory(tmp_path: Path):
    path = tmp_path / "trace.json"
    plan().plot(path)
    trace: dict[str, Any] = json.loads(path.read_text())
    phases = [event["ph"] for event in trace["traceEvents"]]
    assert phases.count("s") == phases.count("f") == len(plan().timeline().messages)
    assert phases.count("C") > 4
    assert "units of cost" in trace["otherData"]["unit"]
    # An arrow begins inside the box that it comes from, where a viewer finds it.
    start = next(e for e in trace["traceEvents"] if e["ph"] == "s")
    box = next(
        e
        for e in trace["traceEvents"]
        if e["ph"] == "X" and e["name"] == start["name"] and e["pid"] == start["pid"]
    )
    assert box["ts"] < start["ts"] < box["ts"] + box["dur"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}'])
def test_refuses_what_is_no_trace(tmp_path: Path, text: str):
    path = tmp_path / "trace.json"
    path.write_text(text)
    refused = jobs.refusal(lambda: read_chrome_trace(path))
    jobs.mentions(refused, "not a trace of a step", str(path), "run folder")


def test_measured_below_predicted(tmp_path: Path):
    """Costs are the measured means: the same step comes out."""
    found = plan()
    to_chrome_trace(found.simulate(piper.Costs(F=1, BI=2, BW=3)).timeline, tmp_path / "trace.json")
    found.plot(tmp_path / "both.svg", run=tmp_path)
    text = (tmp_path / "both.svg").read_text()
    for heading in ("predicted, from the mean time of each task · 16 s", "measured · 16 s"):
        assert f"<!-- {heading} -->" in text
    found.plot(tmp_path / "both.svg", piper.Costs(), run=tmp_path)
    assert "from the mean time" not in (tmp_path / "both.svg").read_text()


def test_refuses_a_run_of_another_plan(tmp_path: Path):
    to_chrome_trace(plan(2, 4).simulate().timeline, tmp_path / "trace.json")
    refused = jobs.refusal(lambda: plan(2, 2).plot(tmp_path / "x.svg", run=tmp_path))
    jobs.mentions(refused, "not one of this plan", "the run has B.PP0.MB2 on rank 0")
    refused = jobs.refusal(lambda: plan().plot(tmp_path / "x.svg", run=tmp_path / "none"))
    jobs.mentions(refused, "not a trace of a step", "none")


# Forms and refusals


@pytest.mark.parametrize("name", ["timeline", "timeline.pdf"])
def test_refuses_other_forms(tmp_path: Path, name: str):
    refused = jobs.refusal(lambda: plan().plot(tmp_path / name))
    jobs.mentions(refused, "suffix", name, *SUFFIXES)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_refuses_a_folder_that_is_not_there(tmp_path: Path, suffix: str):
    refused = jobs.refusal(lambda: plan().plot(tmp_path / "none" / f"x{suffix}"))
    jobs.mentions(refused, "cannot be written", f"x{suffix}", "no such file")


def test_refuses_an_empty_page(tmp_path: Path):
    with pytest.raises(piper.PiperError, match="no events to draw"):
        save({"measured": Timeline()}, tmp_path / "timeline.html")


# The graph


def test_graph_as_text(tmp_path: Path):
    """A box per task in a frame per rank, the values between them, and orders."""
    path = tmp_path / "plan.dot"
    plan().draw(path)
    text = path.read_text()
    boxes = dict(re.findall(r'label="([FB]\w*\.PP\d\.MB\d)" shape=box fillcolor="(#\w+)"', text))
    assert len(boxes) == 2 * 2 * 2
    assert {name: boxes[name] for name in ("F.PP0.MB1", "B.PP1.MB0")} == {
        "F.PP0.MB1": LOOKS["F"][0],
        "B.PP1.MB0": LOOKS["B"][0],
    }
    assert re.findall(r'label="(rank \d)"', text) == ["rank 0", "rank 1"]
    assert text.count('label="send"') == text.count('label="recv"')
    assert re.search(r'F_PP0_MB0 -> \w+ \[label="64 B" color="#5b3f8c"\]', text)
    assert "F_PP0_MB0 -> F_PP0_MB1 [style=dashed" in text


def test_programs_that_must_be_here_are_not_skipped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    need(graphviz="/usr/bin/dot")
    with pytest.raises(pytest.skip.Exception, match="not here: chromium-driver"):
        need(graphviz="/usr/bin/dot", chromium_driver=None)
    monkeypatch.setenv(VARIABLE, "1")
    need(graphviz="/usr/bin/dot")
    with pytest.raises(pytest.fail.Exception, match=f"not here: graphviz.*{VARIABLE}=1"):
        need(graphviz=None)


def test_graph_as_picture(tmp_path: Path):
    need(graphviz=shutil.which("dot"))
    path = tmp_path / "plan.svg"
    plan().draw(path)
    found = {"".join(e.itertext()).strip() for e in ET.parse(path).iter() if e.tag.endswith("text")}
    assert {"F.PP0.MB0", "B.PP1.MB1", "send", "64 B", "rank 1"} <= found


def test_graph_without_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graph.shutil, "which", lambda name: None)
    refused = jobs.refusal(lambda: plan().draw(tmp_path / "plan.svg"))
    jobs.mentions(refused, "graphviz", "plan.dot")
    plan().draw(tmp_path / "plan.dot")


def test_graph_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    jobs.mentions(jobs.refusal(lambda: plan().draw(tmp_path / "plan.png")), ".dot or .svg")
    monkeypatch.setattr(graph, "MOST_NODES", 10)
    refused = jobs.refusal(lambda: plan().draw(tmp_path / "plan.dot"))
    jobs.mentions(refused, "too large", "most", "10", "fewer microbatches")
