"""Operations on a running server from outside: its HTTP API, its memory, a pause."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.testing import ServerProcess, wait_until
from tests.tools import tool, without


def get(server: ServerProcess, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.http, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def get_json(server: ServerProcess, path: str, status: int = 200) -> Any:
    answered, body = get(server, path)
    assert answered == status, body
    return json.loads(body)


def destroy(server: ServerProcess, topic: str) -> int:
    """Destroy a topic, and return the offset at which it ended."""
    connection = http.client.HTTPConnection(*server.http, timeout=30)
    try:
        connection.request("DELETE", f"/v1/topic?name={topic}")
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        end: int = json.loads(body)["end"]["offset"]
        return end
    finally:
        connection.close()


def start_of(server: ServerProcess, topic: str) -> int:
    start: int = get_json(server, f"/v1/topic?name={topic}")["start"]["offset"]
    return start


def children(pid: int) -> list[int]:
    """Return the processes that a server has started: its applier."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class FailingServer(ServerProcess):
    """A server in which strace makes some system calls fail, such as `pwritev2:error=ENOSPC:when=3..8`.

    Calls are counted per thread.
    """

    def __init__(self, data_dir: Path, *flags: str, inject: str, **options: Any) -> None:
        self._strace = tool("strace")
        self._inject = inject
        if subprocess.run([self._strace, "-o/dev/null", "true"], capture_output=True).returncode:
            without("strace may not trace here")
        super().__init__(data_dir, *flags, **options)

    @property
    def command(self) -> list[str]:
        call = self._inject.partition(":")[0]
        # With -D, the server is our child and not that of strace.
        options = ("-D", "-f", "-o/dev/null", f"-etrace={call}", f"-einject={self._inject}")
        return [self._strace, *options, *super().command]


@contextmanager
def held_back(server: ServerProcess, publish_much: Callable[[], object]) -> Iterator[None]:
    """Let publishes wait while the block runs: the journal is full and the applier does not run.

    `publish_much` must send more than the journal has room for.
    """
    (applier,) = children(server.pid)
    os.kill(applier, signal.SIGSTOP)
    try:
        publish_much()
        wait_until(lambda: get(server, "/healthz")[0] == 503, 30, "publishes to be held back")
        yield
    finally:
        os.kill(applier, signal.SIGCONT)


def metrics(server: ServerProcess) -> dict[str, float]:
    text = get(server, "/metrics")[1].decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in lines}


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def verify(data_dir: Path) -> "subprocess.CompletedProcess[str]":
    """Run `headrace verify` on a directory that no server uses: exit code 1 if anything is damaged."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", "verify", "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
    )
