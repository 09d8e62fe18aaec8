"""Debian's Chromium without a screen, driven over its debugging pipe: what a page shows, asks for and complains about.

with Chromium(width=1440, height=900) as page:
    page.open("http://127.0.0.1:8080/")
    page.until("document.querySelectorAll('canvas').length > 3", "the charts")
    page.screenshot(Path("page.png"))
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

ANSWER_SECONDS = 30.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def missing() -> str | None:
    """Why there is no browser here, or None."""
    return None if shutil.which("chromium") else "chromium is not installed (Debian package chromium)"


class Chromium:
    """One browser with one page; a context manager that leaves no process and no file.

    Attributes:
        requests: addresses asked for so far; those of data: are not requests.
        complaints: console errors and warnings, exceptions, refused loads.
    """

    def __init__(self, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="flowtrain-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        redirect = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", "chromium", *FLAGS, f"--user-data-dir={self._profile}"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One call of the DevTools protocol; AssertionError when it is refused or not answered in time."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            readable = select.select([self._read], [], [], max(left, 0))[0]
            assert readable, f"Chromium did not answer {what} in {ANSWER_SECONDS:g} s"
            part = os.read(self._read, 1 << 20)
            assert part, f"Chromium ended during {what}"
            self._buffer += part
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                address = event["request"]["url"]
                if not address.startswith("data:"):
                    self.requests.append(address)
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(event["args"])[:500])
            case "Log.entryAdded" if event["entry"]["level"] in ("error", "warning"):
                self.complaints.append(event["entry"]["text"])
            case "Network.loadingFailed" if not event.get("canceled"):
                self.complaints.append(f"{event['errorText']} of {event['type']}")

    # --- the page -----------------------------------------------------------------------------------------------------

    def resize(self, width: int, height: int) -> None:
        """Points of the page."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, address: str) -> None:
        """Begin to load a page."""
        error = self.call("Page.navigate", url=address).get("errorText")
        assert not error, f"{address}: {error}"

    def value(self, script: str) -> Any:
        """What an expression of JavaScript is, as JSON."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, what: str, within: float = 20.0) -> Any:
        """The first true value of an expression; AssertionError, naming `what`, when there is none in time."""
        deadline = time.monotonic() + within
        while not (found := self.value(script)):
            assert time.monotonic() < deadline, f"waited {within:g} s for {what}; the page said {self.complaints}"
            time.sleep(0.05)
        return found

    def screenshot(self, path: Path) -> None:
        """The visible part as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def key(self, name: str) -> None:
        """Press a key where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def memory_bytes(self) -> int:
        """Memory of the page's process that it shares with no other."""
        process = psutil.Process(self._process.pid)
        pages = [
            child.memory_full_info().uss
            for child in process.children(recursive=True)
            if "--type=renderer" in child.cmdline()
        ]
        return max(pages)
