"""A real headless Chromium, driven through chromedriver's WebDriver protocol.

The protocol (https://www.w3.org/TR/webdriver2/) is JSON over HTTP, so that it needs no package.
"""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
START_S = 60.0


class Browser:
    """One window, of 1400 x 900 pixels."""

    def __init__(self, base: str) -> None:
        self.base = base
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {"args": [*arguments, "--window-size=1400,900"], "binary": BROWSER}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{made['sessionId']}"

    def _ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self._ask(self.session + "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._ask(self.session + "/execute/sync", {"script": script, "args": []})

    def text(self, element: str) -> str:
        """The text of an element, by its id; frames that were asked for are drawn."""
        self._ask(
            self.session + "/execute/async",
            {"script": "requestAnimationFrame(() => setTimeout(arguments[0]))", "args": []},
        )
        return str(self.run(f"return document.getElementById('{element}').textContent"))

    def act(self, *actions: dict[str, Any], kind: str = "pointer") -> None:
        """Input as from a device: a pointer, a wheel or a keyboard."""
        source = {"type": kind, "id": kind, "actions": list(actions)}
        self._ask(self.session + "/actions", {"actions": [source]})

    def point(self, x: float, y: float) -> None:
        self.act({"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0})

    def drag(self, x: float, y: float, by: float) -> None:
        start = {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}
        end = {"type": "pointerMove", "x": round(x + by), "y": round(y), "duration": 50}
        down, up = ({"type": name, "button": 0} for name in ("pointerDown", "pointerUp"))
        self.act(start, down, end, up)

    def wheel(self, x: float, y: float, by: int) -> None:
        turn = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": by}
        self.act({**turn, "duration": 0}, kind="wheel")

    def press(self, key: str) -> None:
        self.act({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}, kind="key")

    def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self._ask(self.session + "/screenshot", method="GET"))

    def log(self) -> list[str]:
        """The errors of the page."""
        found = self._ask(self.session + "/se/log", {"type": "browser"})
        return [one["message"] for one in found if one["level"] == "SEVERE"]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own; ends with the block."""
    assert DRIVER is not None
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
            except OSError:
                assert time.monotonic() < deadline, "chromedriver does not start"
                time.sleep(0.05)
        window = Browser(f"http://127.0.0.1:{port}")
        try:
            yield window
        finally:
            window._ask(window.session, method="DELETE")
    finally:
        process.terminate()
        process.wait(10)
