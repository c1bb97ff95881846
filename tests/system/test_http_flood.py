"""Endless HTTP requests, on both listeners: bounded memory, a clear answer, and nobody else waits."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import Start
from tests.system.figg.foreign import Wire
from tests.system.support import get, metrics, resident_bytes

MIB = 1024 * 1024
FLOOD_BYTES = 64 * MIB
"""Bytes that each of two peers sends."""
GROWTH_BYTES_MAX = 24 * MIB
TOKEN = '[[access.token]]\nname = "it"\nsha256 = "%s"\n' % ("0" * 64)
"""Configuration with a token that no peer here has."""


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("flooded")
    config = directory / "config.toml"
    config.write_text(TOKEN)
    with ServerProcess(directory / "data", f"--config={config}") as server:
        yield server


class Flooder(threading.Thread):
    """Sends an endless request, and reads the answer."""

    def __init__(self, address: tuple[str, int], first: bytes, again: bytes) -> None:
        super().__init__(daemon=True)
        self._socket = socket.create_connection(address, timeout=30)
        self._first, self._again = first, again
        self.sent = 0
        self.answer = b""
        self.start()

    def run(self) -> None:
        with self._socket:
            try:
                self._socket.sendall(self._first)
                while self.sent < FLOOD_BYTES:
                    self._socket.sendall(self._again)
                    self.sent += len(self._again)
            except OSError:
                pass  # the server has read 16 MiB and closed the connection
            try:
                while more := self._socket.recv(65536):
                    self.answer += more
            except OSError:
                pass


FLOODS = {
    "small headers": (b"GET /metrics HTTP/1.1\r\n", b"a: b\r\n" * 20_000, 431),
    "one header": (b"GET /metrics HTTP/1.1\r\nA: ", b"b" * 120_000, 431),
    "a URL": (b"GET /metrics?", b"b" * 120_000, 414),
    "a body": (
        b"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"b" * 120_000,
        413,
    ),
}


@pytest.mark.parametrize(("first", "again", "status"), FLOODS.values(), ids=FLOODS)
def test_requests_without_an_end_cost_bounded_memory_and_nobody_a_ping(
    flooded: ServerProcess, first: bytes, again: bytes, status: int
) -> None:
    server = flooded
    before = resident_bytes(server.pid)
    grown = 0
    with Wire(server.figg) as neighbour:
        flooders = [
            Flooder(address, first, again) for address in (server.http, server.ws) for _ in range(2)
        ]
        while any(flooder.is_alive() for flooder in flooders):
            assert neighbour.alive()
            grown = max(grown, resident_bytes(server.pid) - before)
    assert grown < GROWTH_BYTES_MAX
    for flooder in flooders:
        assert flooder.answer.startswith(b"HTTP/1.1 %d " % status), flooder.answer[:200]
        assert flooder.sent < FLOOD_BYTES, "it was not read for ever"
    assert "request refused" in server.stderr
    assert "Traceback" not in server.stderr


def test_many_peers_with_half_a_request_each_cost_bounded_memory(start: Start) -> None:
    server = start("--set=limits.requests_bytes_max=16777216")
    before = resident_bytes(server.pid)
    head = b"GET /healthz?" + b"x" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n"
    room = 16_777_216 // len(head)
    with ExitStack() as stack, Wire(server.figg) as neighbour:
        peers = []
        for _ in range(room + 100):
            peer = stack.enter_context(socket.create_connection(server.http, timeout=10))
            peer.sendall(head)
            peers.append(peer)
        for peer in peers[room:]:
            assert peer.recv(12) == b"HTTP/1.1 503"
        assert neighbour.alive()
        assert resident_bytes(server.pid) - before < 2 * GROWTH_BYTES_MAX
    wait_until(lambda: get(server, "/healthz")[0] == 200, 10, "room for requests")
    assert metrics(server)["headrace_http_requests_refused_total"] >= 100
