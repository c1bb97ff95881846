"""A reconnect storm: thousands of clients connect and resume at once. The server is a process of its own."""

import base64
import contextlib
import os
import resource
import selectors
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.testing import ServerProcess
from tests.system.figg import foreign as figg
from tests.system.wombat import foreign as wombat
from tests.tools import takes_long

WAIT_S = 300.0
"""Time that only a failure reaches."""
RECORDS = 10
LAST = b"the last record of the storm"
LIVE = b"a record after the storm"
BYTES_PER_CONNECTION_MAX = 32 * 1024
"""Memory of the server for one connection that has resumed. Measured: 8 KiB."""
BYTES_MAX = 32 << 20
"""Memory that does not depend on the number of connections, such as the tails of topics."""

HANDSHAKE = (
    "GET /v1/ws HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {}\r\n\r\n"
)


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def masked_frame(payload: bytes) -> bytes:
    """Return a client's WebSocket message. A mask of zeros leaves the payload as it is."""
    assert len(payload) < 126
    return bytes((0x82, 0x80 | len(payload))) + bytes(4) + payload


class Client:
    """A client that knows only which record has come last."""

    def __init__(self, server: ServerProcess, is_figg: bool) -> None:
        """Connect, and ask for everything from the start of the topic."""
        self.socket = socket.create_connection(server.figg if is_figg else server.ws, WAIT_S)
        if is_figg:
            request = figg.attach(b"storm", 0)
        else:
            key = base64.b64encode(os.urandom(16)).decode()
            request = HANDSHAKE.format("localhost", key).encode()
            request += masked_frame(wombat.attach("storm", "0"))
        self.socket.sendall(request)
        self._seen = b""

    def has_seen(self, record: bytes) -> bool:
        """Read once, and return True if the record has come."""
        data = self.socket.recv(1 << 16)
        assert data, "the server has hung up"
        self._seen = self._seen[-1024:] + data
        return record in self._seen


def wait_for(record: bytes, clients: Sequence[Client]) -> None:
    """Wait until all clients have got a record."""
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
        while selector.get_map():
            ready = selector.select(WAIT_S)
            assert ready, f"{len(selector.get_map())} clients wait for {record!r}"
            for key, _ in ready:
                if key.data.has_seen(record):
                    selector.unregister(key.fileobj)


class Older(threading.Thread):
    """A client that was there before, and sends one PING after the other."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(daemon=True)
        self._wire = figg.Wire(server.figg, timeout_s=WAIT_S)
        self._is_over = threading.Event()
        self.answered = 0
        self.start()

    def run(self) -> None:
        while not self._is_over.is_set() and self._wire.alive():
            self.answered += 1

    def stop(self) -> None:
        self._is_over.set()
        self.join(WAIT_S)
        self._wire.close()


def resident_bytes(server: ServerProcess) -> int:
    pages = Path(f"/proc/{server.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


@pytest.mark.parametrize(
    "connections", [2000, pytest.param(10_000, marks=[takes_long, pytest.mark.timeout(900)])]
)
def test_a_storm_is_admitted_and_others_are_served_in_bounded_memory(
    tmp_path: Path, many_files: None, connections: int
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < connections + 200:
        pytest.skip(f"a process may have only {hard} files here")
    flags = ("--set=limits.silence_s=3600", f"--set=limits.connections_max={connections + 100}")
    with ServerProcess(tmp_path / "data", *flags) as server, contextlib.ExitStack() as stack:

        def client(number: int) -> Client:
            made = Client(server, number % 2 == 0)
            stack.callback(made.socket.close)
            return made

        publisher = figg.Wire(server.figg, timeout_s=WAIT_S)
        stack.callback(publisher.close)
        publisher.publish(b"storm", *(b"%d" % number for number in range(RECORDS - 1)), LAST)
        wait_for(LAST, [client(0), client(1)])  # whatever is allocated once is there before
        before = resident_bytes(server)
        older = Older(server)
        clients = [client(number) for number in range(connections)]
        wait_for(LAST, clients)
        grown = resident_bytes(server) - before
        older.stop()
        print(
            f"{grown / connections:.0f} bytes for each connection, {older.answered} PINGs answered"
        )
        assert older.answered > 0
        assert grown <= BYTES_MAX + connections * BYTES_PER_CONNECTION_MAX
        publisher.publish(b"storm", LIVE, first=RECORDS)
        wait_for(LIVE, clients)
        assert "Traceback" not in server.stderr, server.stderr
