"""Load over Logux (protocol 5), written from the protocol's text alone. Does not measure.

Subscribers answer each `sync` with `synced`, as real clients do. The publisher sends one event in each
`sync`.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from base64 import b64encode

from bench.load import load
from bench.load.load import STALL_TIMEOUT_S, StallError, VerificationError

CHANNEL = "bench"
_SHORT_MAX = 126
_SYNC = b'["sync",'
_NUMBER = b'"number":'
_PAYLOAD = "x" * 64


def frame(payload: bytes) -> bytes:
    """Return a client's WebSocket frame, masked with zeros."""
    size = len(payload)
    short = size < _SHORT_MAX
    length = bytes((0x80 | size,)) if short else b"\xfe" + size.to_bytes(2, "big")
    return b"\x81" + length + b"\0\0\0\0" + payload


def message(*fields: object) -> bytes:
    return frame(json.dumps(fields, separators=(",", ":")).encode())


def event(number: int) -> bytes:
    """Return a `sync` message of the publisher with a numbered event."""
    made = {"type": "bench", "channel": CHANNEL, "number": number, "text": _PAYLOAD}
    return message("sync", number + 1, made, {"id": [number, 0], "time": number})


def websocket(address: tuple[str, int], path: str) -> socket.socket:
    """Connect and complete the WebSocket handshake."""
    sock = load.connect(*address)
    key = b64encode(os.urandom(16)).decode()
    sock.sendall(
        f"GET {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += load.receive_exactly(sock, 1)
    if b" 101 " not in head:
        raise VerificationError(f"no WebSocket: {head!r}")
    return sock


def unframe(buffer: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete messages from a server, and the rest of the buffer."""
    found, at = [], 0
    while len(buffer) - at >= 2:
        size, start = buffer[at + 1], at + 2
        if size == 126:
            size, start = int.from_bytes(buffer[at + 2 : at + 4], "big"), at + 4
        elif size == 127:
            size, start = int.from_bytes(buffer[at + 2 : at + 10], "big"), at + 10
        if start + size > len(buffer):
            break
        found.append(buffer[start : start + size])
        at = start + size
    return found, buffer[at:]


class Client:
    """One client connection."""

    def __init__(self, address: tuple[str, int], path: str, node: str) -> None:
        self.sock = websocket(address, path)
        self._buffer = b""
        self.sock.sendall(message("connect", 5, node, 0, {"subprotocol": 1}))
        self.wait_for(b'["connected"')
        self.received = 0

    def wait_for(self, begin: bytes, text: bytes = b"") -> None:
        """Wait for a message that begins with `begin` and contains `text`. For set-up only."""
        while True:
            for one in self._frames():
                self._answer(one)
                if one.startswith(begin) and text in one:
                    return

    def subscribe(self) -> None:
        made = {"type": "logux/subscribe", "channel": CHANNEL}
        self.sock.sendall(message("sync", 1, made, {"id": 0, "time": 0}))
        self.wait_for(_SYNC, b"logux/processed")

    def _frames(self) -> list[bytes]:
        data = self.sock.recv(load.READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a connection")
        found, self._buffer = unframe(self._buffer + data)
        return found

    def _answer(self, one: bytes) -> None:
        if one.startswith(_SYNC):
            self.sock.sendall(
                frame(b'["synced",%b]' % one[len(_SYNC) : one.index(b",", len(_SYNC))])
            )

    def readable(self) -> None:
        """Receive and answer as a subscriber, and check that events arrive in order and once."""
        answers = []
        for one in self._frames():
            if not one.startswith(_SYNC):
                continue
            added = one[len(_SYNC) : one.index(b",", len(_SYNC))]
            answers.append(frame(b'["synced",%b]' % added))
            at = one.find(_NUMBER)
            if at < 0:
                continue
            at += len(_NUMBER)
            number = int(one[at : one.index(b",", at)])
            if number != self.received:
                raise VerificationError(f"event {number} came instead of {self.received}")
            self.received += 1
        self.sock.sendall(b"".join(answers))


class Audience:
    """One publisher and many subscribers. The next block waits until all subscribers have the last one."""

    def __init__(self, address: tuple[str, int], path: str, subscribers: int) -> None:
        self.publisher = Client(address, path, "0:publisher:tab")
        self.subscribers = {}
        for number in range(subscribers):
            client = Client(address, path, f"{number + 1}:client:tab")
            client.subscribe()
            self.subscribers[client.sock.fileno()] = client
        self._sent = self._answered = 0

    def publish(self, events: int, block: int) -> float:
        """Publish `events` more events; return the seconds until the last subscriber has all of them."""
        poll = select.epoll()
        for client in (self.publisher, *self.subscribers.values()):
            poll.register(client.sock, select.EPOLLIN)
        began = time.perf_counter()
        until = self._sent + events
        try:
            while self._sent < until:
                last = min(self._sent + block, until)
                self.publisher.sock.sendall(b"".join(map(event, range(self._sent, last))))
                self._sent = last
                self._await(poll)
        finally:
            poll.close()
        return time.perf_counter() - began

    def _await(self, poll: select.epoll) -> None:
        waiting = {fd for fd, one in self.subscribers.items() if one.received < self._sent}
        while waiting or self._answered < self._sent:
            events = poll.poll(STALL_TIMEOUT_S)
            if not events:
                raise StallError(f"{len(waiting)} subscribers lack some of {self._sent} events")
            for fd, _ in events:
                client = self.subscribers.get(fd)
                if client is None:
                    self._publisher_readable()
                    continue
                client.readable()
                if client.received >= self._sent:
                    waiting.discard(fd)

    def _publisher_readable(self) -> None:
        for one in self.publisher._frames():
            self.publisher._answer(one)
            if b'"logux/processed"' in one:
                self._answered += 1
            elif b'"logux/undo"' in one or one.startswith(b'["error"'):
                raise VerificationError(one.decode())

    def close(self) -> None:
        sockets: list[socket.socket] = [one.sock for one in self.subscribers.values()]
        for sock in (self.publisher.sock, *sockets):
            sock.close()
