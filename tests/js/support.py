"""Run scenarios of the JavaScript client in Node and in Chromium, and collect their reports.

Both are real programs that need not be installed (`tests/tools.py`). This file knows nothing about the
content of scenarios.
"""

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from tests.tools import node_tool, tool

HERE = Path(__file__).parent
CLIENT = HERE.parents[1] / "clients" / "js"
REPORT_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30

# Node 20 has a WebSocket behind this flag. Later versions have it by default and accept the flag.
NODE_FLAGS = ("--experimental-websocket",)

CHROMIUM = ("chromium", "chromium-browser")
CHROMIUM_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

FILES = {
    "/page.html": (HERE / "page.html", "text/html"),
    "/scenarios.mjs": (HERE / "scenarios.mjs", "text/javascript"),
    "/channel_scenarios.mjs": (HERE / "channel_scenarios.mjs", "text/javascript"),
    "/ticket_scenarios.mjs": (HERE / "ticket_scenarios.mjs", "text/javascript"),
    "/headrace.js": (CLIENT / "headrace.js", "text/javascript"),
    "/channel.js": (CLIENT / "channel.js", "text/javascript"),
    "/channel_connection.js": (CLIENT / "channel_connection.js", "text/javascript"),
    "/channel_session.js": (CLIENT / "channel_session.js", "text/javascript"),
}


class Reports:
    """Reports of a scenario, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def put(self, name: str, facts: dict[str, Any]) -> None:
        self._queue.put((name, facts))

    def expect(self, name: str) -> dict[str, Any]:
        """Wait for the next report, and check that it has this name."""
        try:
            got, facts = self._queue.get(timeout=REPORT_TIMEOUT_S)
        except queue.Empty:
            pytest.fail(f"waited {REPORT_TIMEOUT_S:g} s for the report {name!r}")
        assert got == name, facts
        return facts


@contextmanager
def node(scenario: str, url: str) -> Iterator[Reports]:
    """Run a scenario in Node. At the end of the block, the process must end by itself and successfully."""
    reports = Reports()
    command = [node_tool(), *NODE_FLAGS, str(HERE / "node_host.mjs"), scenario, url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        reader = threading.Thread(target=_read, args=(process, reports))
        reader.start()
        try:
            yield reports
            assert process.wait(STOP_TIMEOUT_S) == 0
        finally:
            process.kill()
            reader.join(STOP_TIMEOUT_S)


def _read(process: "subprocess.Popen[str]", reports: Reports) -> None:
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        reports.put(*json.loads(line))
    # This report comes last, so that a test that waits for a report learns why none comes.
    reports.put("ended", {"stderr": process.stderr.read()})


class Pages:
    """HTTP server on its own port that serves the page and receives its reports."""

    def __init__(self) -> None:
        self.reports = Reports()
        self.answers: dict[str, Callable[[], str]] = {}
        """By path: functions that answer requests, as the server of an application does."""
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urlsplit(self.path).path
                if asked in pages.answers:
                    self._answer_with(pages.answers[asked])
                    return
                found = FILES.get(asked)
                if found is None:
                    self.send_error(404)
                    return
                path, kind = found
                self._answer(200, path.read_bytes(), kind)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                pages.reports.put(*json.loads(body))
                self._answer(204, b"", "text/plain")

            def _answer_with(self, answer: Callable[[], str]) -> None:
                try:
                    self._answer(200, answer().encode(), "text/plain")
                except OSError as error:  # the server behind the application is down
                    self.send_error(502, type(error).__name__)

            def log_message(self, *args: object) -> None:
                pass

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def origin(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(STOP_TIMEOUT_S)
        self._server.server_close()


@contextmanager
def chromium(
    pages: Pages, scenario: str, url: str, profile: Path, host: str = "127.0.0.1"
) -> Iterator[Reports]:
    """Run a scenario in a page of that host. Leaving the block kills the browser."""
    page = f"{pages.origin(host)}/page.html?{urlencode({'scenario': scenario, 'url': url})}"
    command = [tool(*CHROMIUM), *CHROMIUM_FLAGS, f"--user-data-dir={profile}", page]
    with Path(f"{profile}.output").open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # the browser starts many processes, which are killed together
        )
    try:
        yield pages.reports
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)
