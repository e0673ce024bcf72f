"""The page with zoom and hover, in a real headless browser where there is one."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piper_dynamo.pictures import save
from piper_dynamo.timeline import CATEGORIES, Event, Message, Timeline
from tests import browser as browsing
from tests.programs import need
from tests.test_timeline import pipeline

LEFT = 118  # pixels of the ranks' names


def held(activations: int) -> tuple[int, ...]:
    """Beside a KiB of parameters."""
    sizes = {"parameters": 1024, "activations": activations}
    return tuple(sizes.get(name, 0) for name in CATEGORIES)


def small() -> Timeline:
    """Two ranks, ten units: F on 0, a message, F and B on 1, a message, B on 0."""

    def task(rank: int, kind: str, start: float, end: float) -> Event:
        name, tags = f"{kind}.PP{rank}.MB3", {"PP": rank, "MB": 3}
        return Event(
            rank=rank, stream="compute", name=name, kind=kind, tags=tags, start_s=start, end_s=end
        )

    def message(source: int, kind: str, sent: float, taken: float) -> Message:
        ends = {"source": source, "target": 1 - source, "sent_s": sent, "taken_s": taken}
        return Message(number=0, name=f"{kind}.PP{source}.MB3", nbytes=2048, **ends)

    sent = Event(rank=0, stream="send", name="F.PP0.MB3", kind="send", start_s=2, end_s=3)
    return Timeline(
        [task(0, "F", 0, 2), sent, task(1, "F", 3, 5), task(1, "B", 5, 8), task(0, "B", 9, 10)],
        [message(0, "F", 2, 3), message(1, "B", 8, 9)],
        {0: [(0.0, held(1024)), (9.0, held(4096))], 1: [(3.0, held(2048))]},
    )


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_page_holds_everything_itself(tmp_path: Path):
    path = tmp_path / "page.html"
    save({"predicted": small(), "</script><b>": small()}, path, unit="units", title="a <step>")
    text = path.read_text()
    assert not re.findall(r"""(?:src|href)=|url\(|@import|fetch\(|https?://""", text)
    assert text.count("</script>") == 2
    data = data_of(path)
    assert [panel["name"] for panel in data["panels"]] == ["predicted", "</script><b>"]
    panel = data["panels"][0]
    assert (panel["span"], panel["idle"], panel["peaks"]) == (10, ["70%", "50%"], [5120, 3072])
    assert len(panel["events"]) == 5
    assert panel["messages"][0] == [0, 1, "F.PP0.MB3", 2048, 2, 3]


def test_times_of_a_page_are_in_its_unit(tmp_path: Path):
    path = tmp_path / "page.html"
    save(
        {"": Timeline([Event(rank=0, stream="compute", name="F", kind="F", start_s=0, end_s=0.5)])},
        path,
        unit="s",
    )
    data = data_of(path)
    assert (data["unit"], data["panels"][0]["span"]) == ("ms", 500)


@pytest.fixture(scope="module")
def window() -> Iterator[browsing.Browser]:
    need(chromium=browsing.BROWSER, chromium_driver=browsing.DRIVER)
    with browsing.browser() as found:
        yield found


@pytest.fixture
def page(window: browsing.Browser, tmp_path: Path) -> browsing.Browser:
    path = tmp_path / "page.html"
    save({"predicted": small()}, path, unit="units", title="a <step>")
    window.open(path)
    return window


def place(
    page: browsing.Browser, time: float, rank: int, share: float = 0.25
) -> tuple[float, float]:
    """Where in the window a rank is at a time, at a share of its height from its top."""
    box = page.run(
        "const b = document.querySelector('canvas').getBoundingClientRect();"
        "return [b.left, b.top, b.width, panels[0].pitch]"
    )
    left, top, width, pitch = box
    return left + LEFT + time / 10 * (width - LEFT - 78), top + 4 + (rank + share) * pitch


def test_page_draws(page: browsing.Browser):
    assert page.text("title") == "a <step>"
    assert page.text("range") == "0 – 10 of 10 units"
    legend = page.text("legend")
    assert all(word in legend for word in ("forward", "backward", "send", "message", "memory"))
    assert "reduce" not in legend  # only what is there
    colors = page.run(
        "const c = document.querySelector('canvas'), p = c.getContext('2d'), s = devicePixelRatio;"
        "return [1, 6.5].map(t => [...p.getImageData((118 + t / 10 * panels[0].inner) * s, "
        "(t < 3 ? 10 : 10 + panels[0].pitch) * s, 1, 1).data.slice(0, 3)])"
    )
    assert colors == [[0x7F, 0xB3, 0xD9], [0xE9, 0xA8, 0x6B]]
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.log() == []
    assert page.picture().startswith(b"\x89PNG")


def test_pointing_at_a_task_says_what_it_is(page: browsing.Browser):
    page.point(*place(page, 1, 0))
    tip = page.text("tip")
    assert tip.splitlines() == [
        "F.PP0.MB3 · forward",
        "rank 0, compute",
        "microbatch 3, stage 0",
        "0 to 2 units, takes 2",
        "sends 2.0 KiB to rank 1, taken at 3 units",
    ]
    page.point(*place(page, 6.5, 1))
    assert page.text("tip").startswith("B.PP1.MB3 · backward\nrank 1")
    page.point(*place(page, 9.5, 0, 0.75))  # the memory below the row
    assert page.text("tip").splitlines() == [
        "rank 0 at 9.5 units",
        "holds 5.0 KiB",
        *("  activations 4.0 KiB", "  parameters 1.0 KiB"),
        "peak 5.0 KiB",
    ]
    page.point(*place(page, 8.4, 0, 0.25))  # nothing there
    assert page.text("tip") == ""


def test_wheel_drag_and_keys_move_the_view(page: browsing.Browser):
    x, y = place(page, 2, 0)
    page.wheel(x, y, -600)
    start, end = map(float, re.findall(r"[\d.]+", page.text("range"))[:2])
    assert 0 < start < 2 < end < 7
    page.point(x, y)
    assert page.text("tip").startswith("F.PP0.MB3")  # what was under the pointer still is
    page.drag(x, y, -200)
    assert float(re.findall(r"[\d.]+", page.text("range"))[0]) > start
    page.press("0")
    assert page.text("range") == "0 – 10 of 10 units"
    page.press("+")
    assert page.text("range") == "1.5 – 8.5 of 10 units"
    page.run("document.getElementById('fit').click()")
    assert page.text("range") == "0 – 10 of 10 units"


def test_memory_and_messages_can_be_hidden(page: browsing.Browser):
    before = page.run("return panels[0].height")
    page.run("document.getElementById('memory').click()")
    assert page.run("return panels[0].height") < before
    pixels = "const c = document.querySelector('canvas'); return c.toDataURL()"
    page.text("range")
    shown = page.run(pixels)
    page.run("document.getElementById('messages').click()")
    page.text("range")
    assert page.run(pixels) != shown


def test_a_large_page_fits_and_is_fast(window: browsing.Browser, tmp_path: Path):
    """16 ranks and 64 microbatches: all rows in the window, a frame in well under a second."""
    large = pipeline(16, 64)
    arrows = [
        Message(
            source=e.rank, target=e.rank + 1, number=0, name=e.name, sent_s=e.end_s, taken_s=e.end_s
        )
        for e in large.events
        if e.kind == "F" and e.rank < 15
    ]
    path = tmp_path / "large.html"
    save({"predicted": Timeline(large.events, arrows)}, path, unit="units")
    window.open(path)
    begin = time.perf_counter()
    assert window.text("range").startswith("0 – ")
    assert time.perf_counter() - begin < 10
    assert window.run("return panels[0].canvas.getBoundingClientRect().bottom < innerHeight")
    took = window.run("const t = performance.now(); panels[0].draw(); return performance.now() - t")
    assert took < 500  # takes 20
    assert window.log() == []
