"""Peers of another protocol that have come to the wrong port: how they are told apart. No I/O."""

from collections.abc import Mapping
from typing import NamedTuple

TLS_HELLO = b"\x16\x03"
"""The first bytes of a TLS connection: a handshake record of any version."""

TLS_ON_PLAIN_PORT = (
    "this is TLS, and the port is plain: connect without TLS, or put a proxy that ends TLS in front"
)

_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"PRI * HTTP")


class Stranger(NamedTuple):
    """A peer that does not speak Figg."""

    reason: str
    answer: bytes
    """In its own protocol, where that is cheap."""


def recognise(data: bytes, listeners: Mapping[str, str]) -> Stranger | None:
    """Tell from the first bytes of a Figg connection who else it is; no message of Figg begins like these."""
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
