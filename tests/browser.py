"""A real browser for tests: headless Chromium, driven over its debugging pipe with the standard library alone.

    with Browser() as browser:
        browser.open(url)
        browser.press("j")
        browser.evaluate("document.title")

Chromium must be installed (Debian: `apt-get install chromium`); `CHROMIUM` is None where it is not.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self


def is_demanded(environment: Mapping[str, str]) -> bool:
    """Whether tests must have a browser: a gate that skips them would prove nothing."""
    return environment.get("CI", "").lower() in ("1", "true", "yes")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe"),
    "--force-color-profile=srgb",
)
NAMED_KEYS = {
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
}

PLACE_PIPES = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands at descriptor 3 and answers at 4."""


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, width: int = 1440, height: int = 900, *, deadline_s: float = 90.0) -> None:
        assert CHROMIUM is not None, "no chromium on this machine: apt-get install chromium"
        self.console: list[str] = []
        """What the page wrote to its console, and errors it threw."""
        self.dialogs: list[str] = []
        """Texts of alerts: nothing of ours opens one."""
        self.requests: list[str] = []
        """Every address that the page asked for."""
        self._deadline_s = deadline_s
        self._number = self._loads = 0
        self._buffer = b""
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-browser-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}"]
        placed = [sys.executable, "-c", PLACE_PIPES, str(to_read), str(to_write), *command, "about:blank"]
        self._process = subprocess.Popen(
            placed, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def navigate(self, url: str) -> None:
        """Go to an address, and wait for nothing."""
        self._call("Page.navigate", url=url)

    def open(self, url: str) -> None:
        """Go to an address, and wait until the viewer has shown it."""
        self.navigate(url)
        self.wait("document.readyState === 'complete' && !document.querySelector('[aria-busy]')")

    def go(self, fragment: str) -> None:
        """Another screen of the viewer, by the part of its address after `#`."""
        self.evaluate(f"location.hash = {json.dumps(fragment)}")
        self.wait(f"document.getElementById('main').dataset.shown === {json.dumps('#' + fragment)}")

    def reload(self) -> None:
        """The page anew, until the viewer has shown it: what is asked next is asked of the new document."""
        self.evaluate("window.isOld = true")  # and reads the events of its own loading, if they are still to come
        loads, ends = self._loads, time.monotonic() + self._deadline_s
        self._call("Page.reload")
        while self._loads == loads:  # the browser is asked nothing: a page on its way out refuses to answer
            assert self._has_event(ends - time.monotonic()), "the page was not loaded again"
            self._note(self._next())
        self.wait("!window.isOld && document.getElementById('main').dataset.shown")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited; AssertionError where it throws."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression holds."""
        ends = time.monotonic() + self._deadline_s
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < ends, (
                f"{expression} does not hold; {self.evaluate('document.body.innerText')[:600]}"
            )
            time.sleep(0.05)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        for key in keys:
            name, code, text = NAMED_KEYS[key] if key in NAMED_KEYS else (key, ord(key.upper()), key)
            for kind in ("keyDown", "keyUp"):
                fields = {"text": text} if kind == "keyDown" and text else {}
                self._call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **fields)

    def text(self) -> str:
        return str(self.evaluate("document.getElementById('main').innerText"))

    def accessibility(self) -> list[dict[str, Any]]:
        """What a screen reader is told: nodes with role, name and whether they are left out."""
        nodes: list[dict[str, Any]] = self._call("Accessibility.getFullAXTree")["nodes"]
        return nodes

    def dark(self, on: bool = True) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._folder.cleanup()

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _has_event(self, within_s: float) -> bool:
        return b"\0" in self._buffer or bool(select.select([self._read], [], [], max(within_s, 0.0))[0])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "chromium ended"
            self._buffer += part
        whole, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(whole)

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(item.get("value")) for item in found["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(found["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded":
            self.console.append(found["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loads += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(found["message"])
            self._number += 1
            message = {"id": self._number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self._write, json.dumps({**message, "sessionId": self._session}).encode() + b"\0")
