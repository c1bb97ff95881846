"""Peers of another protocol on the Figg port are recognised by their first bytes, and told where to go."""

import pytest

from headrace.server.strangers import recognise
from headrace.wire.figg import messages as figg

LISTENERS = {"figg": "h:1", "ws": "h:2", "http": "h:3"}


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_http_is_told_where_http_listens(method):
    found = recognise(f"{method} / HTTP/1.1\r\nHost: x\r\n\r\n".encode(), LISTENERS)
    assert found is not None
    assert found.reason == "this is HTTP, and the port speaks Figg: HTTP listens at h:3"
    head, _, body = found.answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert f"Content-Length: {len(body)}".encode() in head
    assert found.reason.encode() in body


def test_websocket_is_told_where_websocket_listens():
    request = b"GET /v1/ws HTTP/1.1\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n\r\n"
    found = recognise(request, LISTENERS)
    assert found is not None
    assert found.reason.endswith("WebSocket listens at h:2")


def test_tls_is_told_that_the_port_is_plain():
    found = recognise(bytes.fromhex("16030100c8010000c40303"), LISTENERS)
    assert found is not None
    assert "this is TLS" in found.reason
    assert found.answer == b""


@pytest.mark.parametrize("kind", range(12))
def test_no_message_of_figg_is_taken_for_a_stranger(kind):
    for size in (0, 8, 0x4745, 0x1603):
        assert recognise(figg.HEADER.pack(kind, 1, size), LISTENERS) is None
