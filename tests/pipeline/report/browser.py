"""A headless Chromium that opens one page and reports the result over the DevTools protocol, on two pipes.

In this way a test can examine a page that allows no script.
"""

import base64
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from headrace.testing.server import PASS_DESCRIPTORS
from tests.js.support import CHROMIUM, CHROMIUM_FLAGS
from tests.tools import tool

TIMEOUT_S = 120.0


class Browser:
    def __init__(self, profile: Path, *flags: str) -> None:
        command = tool(*CHROMIUM)
        from_us, to_it = os.pipe()
        from_it, to_us = os.pipe()
        # Chromium expects the pipes at file descriptors 3 and 4.
        place = [sys.executable, "-I", "-S", "-c", PASS_DESCRIPTORS, f"{from_us},{to_us}"]
        options = [*CHROMIUM_FLAGS, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [*place, command, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(from_us, to_us),
        )
        os.close(from_us)
        os.close(to_us)
        self._in, self._out = to_it, from_it
        self._number = 0
        self._session: str | None = None
        self._buffer = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._in)
        os.close(self._out)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def open(self, page: Path, *, dark: bool = False, width: int = 1200) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width)
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        while not self.told("Page.loadEventFired"):
            self._read()

    def resize(self, width: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )

    def close_page(self) -> None:
        self.ask("Page.close")
        self._session = None

    def told(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] == method]

    def evaluate(self, expression: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def next_event(self, method: str) -> dict[str, Any]:
        """Wait for the next event of this kind, and forget all events until then."""
        while not (found := self.told(method)):
            self._read()
        self.events.clear()
        return found[0]

    def _read(self) -> dict[str, Any]:
        """Return the next message; events are also kept in `events`."""
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"Chromium said nothing for {TIMEOUT_S:g} s"
            data = os.read(self._out, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if "method" in message:
            self.events.append(message)
        return message
