"""What several system tests ask of a running server from outside: its HTTP API and its memory."""

import http.client
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace.testing import ServerProcess


def get(server: ServerProcess, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.http, timeout=10)
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


def children(pid: int) -> list[int]:
    """The processes a server has started: its applier."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def metrics(server: ServerProcess) -> dict[str, float]:
    text = get(server, "/metrics")[1].decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in lines}


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def verify(data_dir: Path) -> "subprocess.CompletedProcess[str]":
    """`headrace verify` on a directory no server uses: exit code 1 when anything is damaged."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", "verify", "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
    )
