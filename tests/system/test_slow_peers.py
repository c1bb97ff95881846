"""Slow peers on every listener, before and after they have shown credentials: bounded memory, nobody waits.

Each begins something large and never ends it. Elsewhere: the times after which such peers are closed
(`tests/server/http/test_limits.py`, `tests/server/peers/test_held_back.py`, `tests/server/tls`), and peers
that send without an end (`test_http_flood.py`).
"""

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import ServerProcess, wait_until
from headrace.wire.figg import messages as figg
from tests.certificates import Authority
from tests.fakes.tls_socket import TlsSocket
from tests.system.access.server import EVERYTHING, Tokens
from tests.system.figg.foreign import HEADER, PUBLISH, VERSION
from tests.system.support import resident_bytes
from tests.system.test_malformed import HANDSHAKE, frame

PEERS = 60
"""Peers of each kind. They are few, so that the test needs no more than the usual 1024 open files."""
BYTES_PER_PEER_MAX = 24 * 1024
"""Measured: 7 KiB."""
TLS_BYTES_PER_PEER_MAX = 96 * 1024
"""Measured: 30 KiB."""
BYTES_MAX = 12 << 20
"""Memory that does not depend on the number of peers."""
ANNOUNCED = 900_000
"""Size of the messages that never come whole: about the largest that a listener accepts."""

Connect = Callable[[str], Any]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=["plain", "tls"])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, authority: Authority
) -> Iterator[tuple[ServerProcess, Connect]]:
    """A server, and a function that connects to a listener of it."""
    Tokens(tmp_path / "data").add("valid", EVERYTHING)
    flags = ["--set=limits.authentication_s=600"]
    trusted: ssl.SSLContext | None = None
    if request.param == "tls":
        own = authority.issue("server")
        trusted = authority.trusted()
        flags += [
            f"--set=listen.tls.cert={own.certificate}",
            f"--set=listen.tls.key={own.key}",
        ]
    with ServerProcess(tmp_path / "data", *flags) as process:

        def connect(listener: str) -> Any:
            plain = socket.create_connection(getattr(process, listener), 60)
            return plain if trusted is None else TlsSocket(plain, trusted)

        yield process, connect
        assert "Traceback" not in process.stderr, process.stderr


def large_frame(message: bytes) -> bytes:
    """Return the beginning of a WebSocket frame that announces much more."""
    return bytes([0x82, 0x80 | 127]) + ANNOUNCED.to_bytes(8) + bytes(4) + message


BEARER = b"Authorization: Bearer valid\r\n"
LARGE_FIGG = HEADER.pack(PUBLISH, VERSION, ANNOUNCED) + b"\0\0\0\1t"
UPGRADE = HANDSHAKE % b"ws"
UPGRADE_WITH_TOKEN = UPGRADE.replace(b"Host:", BEARER + b"Host:")
LARGE_POST = b"POST /v1/staged HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: 900000\r\n\r\nHRB1"

KINDS: dict[str, tuple[str, list[bytes]]] = {
    "figg, nothing": ("figg", []),
    "figg, half a header": ("figg", [LARGE_FIGG[:5]]),
    "figg, half a message": ("figg", [LARGE_FIGG]),
    "figg with a token": ("figg", [figg.encode_auth("valid"), LARGE_FIGG]),
    "ws, half a handshake": ("ws", [UPGRADE[:100]]),
    "ws, half a message": ("ws", [UPGRADE, large_frame(b"\x83\xa4type")]),
    "ws with a token": ("ws", [UPGRADE_WITH_TOKEN, large_frame(b"\x83\xa4type")]),
    "http, half a head": ("http", [b"GET /v1/topics HTTP/1.1\r\nHost: loc"]),
    "http, half a body": ("http", [LARGE_POST % b""]),
    "http with a token": ("http", [LARGE_POST % BEARER]),
}
ASK = b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n" + BEARER + b"\r\n"


def test_slow_peers_on_every_listener_cost_bounded_memory_and_delay_nobody(
    server: tuple[ServerProcess, Connect],
) -> None:
    process, connect = server
    for listener in ("figg", "ws", "http"):
        assert is_served(connect, listener)
    before = resident_bytes(process.pid)
    with ExitStack() as stack:
        for listener, pieces in KINDS.values():
            for _ in range(PEERS):
                peer = stack.enter_context(closing(connect(listener)))
                for piece in pieces:
                    peer.sendall(piece)
        for listener in ("figg", "ws", "http"):
            assert is_served(connect, listener)
        grown = resident_bytes(process.pid) - before
        each = TLS_BYTES_PER_PEER_MAX if isinstance(peer, TlsSocket) else BYTES_PER_PEER_MAX
        assert grown < BYTES_MAX + len(KINDS) * PEERS * each, grown
    wait_until(lambda: is_served(connect, "http"), what="the server after they have left")


def is_served(connect: Connect, listener: str) -> bool:
    """Return True if a peer with a token gets an answer; the peers before it have been read by then."""
    with closing(connect(listener)) as peer:
        if listener == "figg":
            peer.sendall(figg.encode_auth("valid") + figg.encode_ping(1))
        else:
            peer.sendall(UPGRADE_WITH_TOKEN + frame(b"x") if listener == "ws" else ASK)
        return bool(peer.recv(100))


PATHS = (b"ws", b"channels", b"logux/main")


@pytest.mark.parametrize("path", PATHS)
def test_a_stranger_may_not_send_much_of_a_message_that_never_ends(
    server: tuple[ServerProcess, Connect], path: bytes
) -> None:
    """What a stranger may send counts when it comes, and not when a message is complete."""
    _, connect = server
    with closing(connect("ws")) as peer, contextlib.suppress(ConnectionError):
        peer.sendall(HANDSHAKE % path + large_frame(b"\x83\xa4type") + bytes(100_000))
        while peer.recv(1000):
            pass  # until the server hangs up
