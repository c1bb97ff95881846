"""Crowds of silent connections from one address, on every listener: peers of another address get in at once.

Elsewhere: which of them gives way (`tests/server/peers/test_newcomers.py`), and the memory that slow peers
take (`test_slow_peers.py`).
"""

import socket
import ssl
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import ServerProcess
from headrace.wire.figg import messages as figg
from tests.certificates import Authority
from tests.fakes.tls_socket import TlsSocket
from tests.system.access.server import EVERYTHING, Tokens
from tests.system.test_malformed import HANDSHAKE, frame

HANDSHAKES_MAX = 20
CONNECTIONS_MAX = 30
EACH = CONNECTIONS_MAX + 5
"""Silent connections of each kind."""
CROWD, NEIGHBOUR = "127.0.0.1", "127.0.0.2"

BEARER = b"Authorization: Bearer valid\r\n"
UPGRADE = HANDSHAKE % b"ws"
UPGRADE_WITH_TOKEN = UPGRADE.replace(b"Host:", BEARER + b"Host:")
ASK = b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n" + BEARER + b"\r\n"

SILENT = {
    "figg": (b"", figg.encode_auth("valid")[:5]),
    "ws": (b"", UPGRADE[:100], UPGRADE),
    "http": (b"", ASK[:20], b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"),
}
"""What the connections of a crowd send before they fall silent, by listener."""


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_silent_connections_of_one_address_keep_nobody_else_out(
    tmp_path: Path, has_tls: bool
) -> None:
    Tokens(tmp_path / "data").add("valid", EVERYTHING)
    flags = [
        f"--set=limits.handshakes_max={HANDSHAKES_MAX}",
        f"--set=limits.connections_max={CONNECTIONS_MAX}",
        "--set=limits.authentication_s=600",
    ]
    trusted: ssl.SSLContext | None = None
    if has_tls:
        authority = Authority.make(tmp_path)
        own, trusted = authority.issue("server"), authority.trusted()
        flags += [f"--set=listen.tls.cert={own.certificate}", f"--set=listen.tls.key={own.key}"]
    with ServerProcess(tmp_path / "data", *flags) as server, ExitStack() as stack:

        def connect(listener: str, source: str) -> Any:
            plain = dial(listener, source)
            return plain if trusted is None else TlsSocket(plain, trusted)

        def dial(listener: str, source: str) -> socket.socket:
            made = socket.create_connection(
                getattr(server, listener), 60, source_address=(source, 0)
            )
            stack.callback(made.close)
            return made

        older = connect("figg", CROWD)
        assert is_alive(older)
        for listener, beginnings in SILENT.items():
            for begun in beginnings:
                for _ in range(EACH):
                    silent = dial(listener, CROWD)
                    if trusted is None and begun:
                        silent.sendall(begun)
                for _ in range(3):
                    assert is_served(connect, listener)
        assert is_alive(older)
        assert "Traceback" not in server.stderr, server.stderr


def is_served(connect: Any, listener: str) -> bool:
    """Return True if a peer of another address, with a token, gets an answer."""
    with closing(connect(listener, NEIGHBOUR)) as peer:
        if listener == "figg":
            return is_alive(peer)
        peer.sendall(UPGRADE_WITH_TOKEN + frame(b"x") if listener == "ws" else ASK)
        return bool(peer.recv(100).startswith((b"HTTP/1.1 101", b"HTTP/1.1 200")))


def is_alive(peer: Any) -> bool:
    """Send a token and a PING, and wait for an answer."""
    peer.sendall(figg.encode_auth("valid") + figg.encode_ping(1))
    return bool(peer.recv(100))
