"""Malformed bytes from strangers, before any credentials, on every listener: the server lives on.

A crash before authentication caused by one malformed frame is a class of past CVEs in this field. Each
stranger sends a changed valid message and leaves. Elsewhere: the decoders alone (`tests/fuzz`).
"""

import random
import socket
from collections.abc import Iterator

import pytest

from headrace.testing import ServerProcess
from tests.fuzz import corpus
from tests.fuzz.changes import changed_bytes
from tests.fuzz.corpus import SEEDS
from tests.fuzz.targets import messages_of
from tests.system.support import get
from tests.tools import TORTURE

STRANGERS = 5000 if TORTURE else 150
"""Connections to each listener for each kind of message."""

HANDSHAKE = (
    b"GET /v1/%b HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TOKEN = '[[access.token]]\nname = "it"\nsha256 = "%s"\n' % ("0" * 64)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("malformed")
    config = directory / "config.toml"
    config.write_text(TOKEN)
    with ServerProcess(
        directory / "data", f"--config={config}", "--set=limits.refusal_delay_s=0"
    ) as one:
        yield one


def frame(message: bytes, opcode: int = 2) -> bytes:
    """Return a masked frame of WebSocket; the mask is zero."""
    head = bytes([0x80 | opcode])
    if len(message) < 126:
        return head + bytes([0x80 | len(message)]) + bytes(4) + message
    return head + bytes([0x80 | 126]) + len(message).to_bytes(2) + bytes(4) + message


def meet(address: tuple[str, int], data: bytes) -> None:
    """Send bytes, stop sending, and read until the server hangs up; a reset is an answer too."""
    with socket.create_connection(address, timeout=30) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
        except ConnectionError:
            pass


def of_websocket(path: bytes, seeds: list[bytes], opcode: int) -> list[bytes]:
    return [
        HANDSHAKE % path + b"".join(frame(one, opcode) for one in (seed, seed)) for seed in seeds
    ]


KINDS: dict[str, tuple[str, list[bytes]]] = {
    # After a hundred wrong tokens, every answer would come late.
    "figg": ("figg", [one for one in SEEDS["figg_server"] if corpus.TOKEN.encode() not in one]),
    "http": ("http", SEEDS["http_request"]),
    "http to the WebSocket listener": ("ws", SEEDS["http_request"]),
    "wombat": ("ws", of_websocket(b"ws", messages_of(*SEEDS["wombat_server"]), 2)),
    "logux": ("ws", of_websocket(b"logux/a", SEEDS["logux_messages"], 1)),
    "channels": ("ws", of_websocket(b"channels", SEEDS["channel_messages"], 1)),
    "http to Figg": ("figg", SEEDS["http_request"]),
    "Figg to http": ("http", SEEDS["figg_server"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_message_of_a_stranger_stops_nothing(server: ServerProcess, kind: str) -> None:
    listener, seeds = KINDS[kind]
    chance = random.Random(kind)
    address = getattr(server, listener)
    for _ in range(STRANGERS):
        data = changed_bytes(chance.choice(seeds), chance)
        meet(address, data)
        assert server.running, (data, server.stderr[-2000:])
    assert get(server, "/healthz")[0] == 200
    assert "Traceback" not in server.stderr, server.stderr[-4000:]
    assert "internal error" not in server.stderr, server.stderr[-4000:]


@pytest.mark.parametrize(
    "value", [b"\xa0Upgrade", b"\x85Upgrade", b"keep-alive,\x1cUpgrade", b"Upgrade\xa0"]
)
def test_a_blank_that_only_python_takes_for_one_is_no_upgrade(
    server: ServerProcess, value: bytes
) -> None:
    """The parser saw no upgrade there, and the server did: it failed later, without credentials."""
    request = (HANDSHAKE % b"ws").replace(b"Connection: Upgrade", b"Connection: " + value)
    for after in (b"", frame(b"x"), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(server.ws, timeout=30) as sock:
            sock.sendall(request + after)
            answer = sock.recv(65536)
        assert answer.split(b" ")[1] in (b"400", b"426"), answer
    assert get(server, "/healthz")[0] == 200
    assert server.running, server.stderr[-2000:]
