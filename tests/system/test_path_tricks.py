"""Paths as weapons: no path in a request goes around access control, and no name becomes a path of a file.

Elsewhere: what a path of each protocol means (`tests/system/wombat/test_http.py`, `tests/server/http`).
"""

import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import connect_blocking
from headrace.testing import ServerProcess
from tests.system.access.server import EVERYTHING, Socket, Tokens, ask
from tests.system.support import verify

PATHS = [
    "//v1/topics",
    "/v1//topics",
    "/./v1/topics",
    "/healthz/../v1/topics",
    "/healthz/..%2fv1/topics",
    "/healthz%2f..%2fv1%2ftopics",
    "/healthz/%2e%2e/v1/topics",
    "/healthz;/../v1/topics",
    "/healthz%00/../v1/topics",
    "/healthz\\..\\v1\\topics",
    "/%76%31/topics",
    "/V1/TOPICS",
    "/v1/topics/",
    "/v1/topics%20",
    "/v1/topics%00",
    "/v1/topics;/healthz",
    "/v1/topics?/healthz",
    "/v1/topics#/healthz",
    "/v1/topics/healthz",
    "/healthz/v1/topics",
    "http://localhost/v1/topics",
    "http://localhost/healthz/../v1/topics",
    "*",
    "/../../../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/tokens.json",
    "/v1/../../tokens.json",
]

NAMES = [
    *("..", ".", "../outside", "../../outside", "/tmp/outside", "a/../../../outside"),
    *("..\\outside", "C:\\outside", "%2e%2e%2foutside", "~/outside", "tokens.json", "catalogue"),
    *("nul\0outside", "-rf", "a//b", "a/./b", "con", "x" * 255, "é/../outside", "*", "a/"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("paths") / "in" / "side"
    directory.mkdir(parents=True)
    Tokens(directory / "data").add("all", EVERYTHING)
    with ServerProcess(directory / "data", "--set=limits.refusal_delay_s=0") as process:
        with Socket(process, "/v1/ws", bearer="all"):
            pass
        yield process
        assert "Traceback" not in process.stderr, process.stderr


def status_and_body(address: tuple[str, int], path: str, method: str) -> tuple[int, bytes]:
    """Ask without credentials for a path exactly as it is written."""
    with socket.create_connection(address, 30) as peer:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        peer.sendall(head.encode())
        answer = http.client.HTTPResponse(peer, method=method)
        answer.begin()
        return answer.status, answer.read()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
@pytest.mark.parametrize("listener", ["http", "ws"])
def test_no_path_goes_around_access_control(
    server: ServerProcess, listener: str, method: str
) -> None:
    for path in PATHS:
        status, body = status_and_body(getattr(server, listener), path, method)
        if status == 200:
            assert method == "HEAD" or json.loads(body) == {"status": "ok"}, path
            assert path.startswith("/healthz")
        else:
            assert status in (400, 401, 404, 405, 421, 426), (path, status)
        assert b'topics":' not in body


def test_no_name_becomes_a_path_outside_the_data_directory(server: ServerProcess) -> None:
    root = server.data_dir.parents[2]
    outside = files(root, server.data_dir)
    host, port = server.figg
    with connect_blocking(f"figg://{host}:{port}", token="all") as client:
        for name in NAMES:
            client.publish(name, b"inside")
    for name in NAMES:
        member = {"name": name, "processor": "p"}
        joined = ask(server, "all", "POST", "/v1/channel/join", params=member)
        assert joined.status_code in (200, 400), (name, joined.text)
        position = {"topic": name, "epoch": 0, "offset": 0, "ordinal": 0}
        body = {"reader": name, "positions": [position]}
        ask(server, "all", "POST", "/v1/cursors", json=body)
        # An upload is named by its id, and nothing that is no id names a file.
        asked = {"producer": "p", "number": 0, "staged": [name]}
        refused = ask(server, "all", "POST", "/v1/batches", json=asked)
        assert refused.status_code in (400, 404), (name, refused.text)
    assert files(root, server.data_dir) == outside
    assert (server.data_dir / "tokens.json").is_file()
    server.restart()
    with connect_blocking(f"figg://{host}:{port}", token="all") as client:
        for name in NAMES:
            client.publish(name, b"after a restart")
    for name in NAMES:
        found = ask(server, "all", "GET", "/v1/topic", params={"name": name})
        assert found.json()["records"] == 2, name
    assert server.terminate() == 0
    try:
        done = verify(server.data_dir)
        assert done.returncode == 0, done.stdout
    finally:
        server.start()
    inside = files(server.data_dir, None)
    assert not [path for path in inside if "outside" in path], inside
    assert files(root, server.data_dir) == outside


def files(root: Path, apart_from: Path | None) -> set[str]:
    """Return all paths below a directory, apart from those in another."""
    found = set()
    for directory, folders, names in os.walk(root):
        if apart_from is not None and Path(directory) == apart_from:
            folders.clear()
            continue
        found |= {os.path.join(directory, name) for name in (*folders, *names)}
    return found
