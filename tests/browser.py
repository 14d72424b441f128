"""A real browser to look at pages with: headless Chromium, spoken to over a pair of pipes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WHY_NOT = "Chromium is not installed (apt-get install chromium)"
PATIENCE_S = 240.0


class Browser:
    """One tab, which notes what pages say on the console and what they ask the network for.

    with Browser(folder) as browser:
        browser.open(file)
        browser.asks("document.title")
    """

    def __init__(self, profile: Path) -> None:
        self.profile = profile
        self.said: list[str] = []
        """Console messages, exceptions, and what the page's policy or the loader refused."""
        self.asked: list[str] = []
        """Addresses of all requests."""
        self._count = 0
        self._buffer = b""
        self._session: str | None = None

    def __enter__(self) -> Self:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        argv = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={self.profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *argv],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._session = None
            self.call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser something and wait for the answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            answer = self._next(deadline)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)
        raise TimeoutError(method)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise OSError("the browser is gone")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.said.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.said.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(str(params["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.asked.append(str(params["request"]["url"]))

    def open(self, place: Path | str) -> None:
        """Load a file or an address, and wait until it is there."""
        url = place if isinstance(place, str) else place.resolve().as_uri()
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + PATIENCE_S
        there = f"complete {url.partition(':')[0]}:"
        while self.asks("document.readyState + ' ' + location.protocol") != there:
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.02)

    def asks(self, expression: str) -> Any:
        """The value of an expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def size(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def media(self, kind: str = "", scheme: str = "light") -> None:
        """As on a screen or in print, light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=kind, features=[feature])

    def key(self, name: str, code: int, text: str = "") -> None:
        """Press a key and let it go; `text` is the character that it types."""
        named = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        if text:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        else:
            self.call("Input.dispatchKeyEvent", type="rawKeyDown", **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression on the page is true, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.asks(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def drag(self, begin: tuple[float, float], end: tuple[float, float], steps: int = 10) -> None:
        """Press the button, move the pointer and let go."""
        self._button("mousePressed", *begin)
        for step in range(1, steps + 1):
            x, y = (first + (last - first) * step / steps for first, last in zip(begin, end, strict=True))
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self._button("mouseReleased", *end)

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._button(kind, x, y)

    def centre(self, selector: str) -> tuple[float, float]:
        """Scroll to an element and return its middle."""
        box = self.asks(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            " element.scrollIntoView({block: 'center'}); const box = element.getBoundingClientRect();"
            " return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        return box[0], box[1]

    def _button(self, kind: str, x: float, y: float) -> None:
        down = int(kind == "mousePressed")
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=down, clickCount=1)

    def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    def printed(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])
