"""Peers of another protocol that connected to the wrong port: recognises their first bytes. No I/O."""

from collections.abc import Mapping
from typing import NamedTuple

TLS_HELLO = b"\x16\x03"
"""First bytes of a TLS connection: a handshake record of any version."""

TLS_ON_PLAIN_PORT = (
    "this is TLS, and the port is plain: connect without TLS, or put a proxy that ends TLS in front"
)

_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"PRI * HTTP")


class Stranger(NamedTuple):
    """A peer that does not speak Figg."""

    reason: str
    answer: bytes
    """Answer in the peer's own protocol, where that is cheap; else empty."""


def recognise(data: bytes, listeners: Mapping[str, str]) -> Stranger | None:
    """Recognise another protocol by its first bytes, with which no Figg message begins. None for Figg."""
    if data.startswith(TLS_HELLO):
        return Stranger(TLS_ON_PLAIN_PORT, b"")
    if not data.startswith(_METHODS):
        return None
    http, ws = listeners.get("http", "another port"), listeners.get("ws", "another port")
    if b"upgrade: websocket" in data.lower():
        reason = f"this is WebSocket, and the port speaks Figg: WebSocket listens at {ws}"
    else:
        reason = f"this is HTTP, and the port speaks Figg: HTTP listens at {http}"
    return Stranger(reason, _bad_request(reason))


def _bad_request(text: str) -> bytes:
    body = f"{text}\n".encode()
    head = (
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
