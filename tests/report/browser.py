"""A headless Chromium, driven through its own DevTools pipe: what a page says, fetches, draws and looks like."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe", "about:blank"),
)

#: Walks the scenes that Vega has drawn; crosses of heat maps may touch each other.
SPOILT_TEXTS = """(() => {
    const found = [], pen = document.createElement('canvas').getContext('2d');
    for (const [number, result] of reportDrawn) {
        const figure = document.getElementById(`figure-${number}`), texts = [];
        if (!result || figure.hidden) continue;
        const say = (what, text) => found.push(`${figure.querySelector('figcaption').textContent}: ${what}: ${text}`);
        const {clientWidth: width, clientHeight: height} = figure.querySelector('canvas');
        const walk = (mark, x, y) => (mark.items ?? []).forEach((item) => {
            const inner = mark.marktype === 'group' ? item.items : [];
            inner.forEach((each) => walk(each, x + (item.x ?? 0), y + (item.y ?? 0)));
            if (mark.marktype !== 'text' || !item.text || item.text === '\\u00d7' || item.opacity === 0) return;
            pen.font = `${item.fontWeight ?? 400} ${item.fontSize ?? 11}px ${item.font ?? 'sans-serif'}`;
            const lines = [item.text].flat().map(String), {x1, y1, x2, y2} = item.bounds;
            if (item.limit && lines.some((line) => pen.measureText(line).width > item.limit)) say('limit', lines);
            const box = [x1 + x, y1 + y, x2 + x, y2 + y];
            if (box[0] < -1 || box[1] < -1 || box[2] > width + 1 || box[3] > height + 1) say('edge', lines);
            for (const [other, each] of texts)
                if (Math.min(box[2], each[2]) - Math.max(box[0], each[0]) > 1.5 &&
                    Math.min(box[3], each[3]) - Math.max(box[1], each[1]) > 2.5) say('overlap', [other, lines]);
            texts.push([lines, box]);
        });
        walk(result.view.scenegraph().root, ...result.view.origin());
    }
    return found; })()"""


def find_chromium() -> str | None:
    """Returns the command of a Chromium: GEOCONT_CHROMIUM, or one on the path."""
    names = (os.environ.get("GEOCONT_CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@dataclass
class Page:
    """One open page.

    Attributes:
        messages: What it wrote to the console, and its uncaught errors.
        requests: Addresses that it asked for, its own among them.
    """

    send: Any
    session: str = ""
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression; promises are awaited."""
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.send("Runtime.evaluate", options, self)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file in a window of some size and returns once all visible figures are drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", {"features": [scheme]}, self)
        window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", window, self)
        self.send("Page.navigate", {"url": path.resolve().as_uri()}, self)
        self.settle()

    def settle(self) -> None:
        """Waits until all visible figures are drawn."""
        self.evaluate(
            """new Promise((done) => { const look = () => document.documentElement?.dataset.ready &&
            !document.querySelector('figure[data-number]:not([hidden]):not([data-drawn])')
            ? done() : setTimeout(look, 20); look(); })"""
        )

    def spoilt_texts(self) -> list[str]:
        """Returns what is cut by a limit or an edge, or overlaps something, among the texts of the figures shown."""
        return self.evaluate(SPOILT_TEXTS)  # type: ignore[no-any-return]

    def choose(self, select: int, option: int) -> None:
        """Chooses an option of a select, both by number, and waits until what it shows is drawn."""
        self.evaluate(
            f"""(() => {{ const each = document.querySelectorAll('select')[{select}]; each.selectedIndex = {option};
            each.dispatchEvent(new Event('change', {{bubbles: true}})) }})()"""
        )
        self.settle()

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as PNG."""
        answer = self.send("Page.captureScreenshot", {"captureBeyondViewport": True, **self._clip()}, self)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self) -> dict[str, Any]:
        size = self.send("Page.getLayoutMetrics", {}, self)["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


@contextmanager
def chromium(command: str, profile: Path) -> Iterator[Page]:
    """Starts Chromium with a profile of its own and yields an empty page."""
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()

    def wire() -> None:  # Chromium reads from 3 and writes to 4
        reader, writer = os.dup(to_browser), os.dup(to_us)
        os.dup2(reader, 3)
        os.dup2(writer, 4)

    arguments = [command, f"--user-data-dir={profile}", *OPTIONS]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(arguments, preexec_fn=wire, close_fds=False, **quiet)
    os.close(to_browser)
    os.close(to_us)
    try:
        yield _connect(os.fdopen(from_us, "wb", 0), os.fdopen(from_browser, "rb", 0))
    finally:
        process.terminate()
        process.wait(timeout=20)


def _connect(output: Any, stream: Any) -> Page:
    number, rest = 0, b""
    page = Page(None)

    def receive() -> dict[str, Any]:
        nonlocal rest
        while b"\0" not in rest:
            chunk = stream.read(1 << 16)
            assert chunk, "Chromium ended"
            rest += chunk
        message, _, rest = rest.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def send(method: str, parameters: dict[str, Any], to: Page | None = None) -> dict[str, Any]:
        nonlocal number
        number += 1
        message = {"id": number, "method": method, "params": parameters}
        if to is not None:
            message["sessionId"] = to.session
        output.write(json.dumps(message).encode() + b"\0")
        while (answer := receive()).get("id") != number:
            _note(page, answer)
        assert "error" not in answer, answer
        return answer["result"]  # type: ignore[no-any-return]

    page.send = send
    target = send("Target.createTarget", {"url": "about:blank"})["targetId"]
    page.session = send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
        send(f"{domain}.enable", {}, page)
    return page


def _note(page: Page, event: dict[str, Any]) -> None:
    method, values = event.get("method"), event.get("params", {})
    if method == "Runtime.consoleAPICalled":
        page.messages.append(" ".join(str(each.get("value", each.get("description"))) for each in values["args"]))
    elif method == "Runtime.exceptionThrown":
        page.messages.append(str(values["exceptionDetails"].get("exception", {}).get("description")))
    elif method == "Log.entryAdded":
        page.messages.append(values["entry"]["text"])
    elif method == "Network.requestWillBeSent":
        page.requests.append(values["request"]["url"])
