"""Load over Wombat, written from the protocol's text alone. Does not measure.

Client frames are masked, as WebSocket requires, before the measurement starts. The published records
determine what a subscriber must receive, except the topic's epoch, which is taken from the first serial.
"""

from __future__ import annotations

import base64
import functools
import os
import socket
import struct
from collections.abc import Iterator, Sequence

from bench.load import load
from bench.load.load import BLOCK, TOPIC, Publisher, Stream, VerificationError

EPOCH = b"0000000000000"
"""Placeholder for the epoch in expected data. An epoch, a time in milliseconds, has as many digits."""
MASK = b"\x5a\xc3\x96\x0f"

_U32 = struct.Struct(">I")


def text(value: bytes) -> bytes:
    """Encode a MessagePack string."""
    return (bytes((0xA0 | len(value),)) if len(value) < 32 else bytes((0xD9, len(value)))) + value


def number(value: int) -> bytes:
    """Encode an unsigned integer in MessagePack's shortest form."""
    for limit, head, size in ((1 << 7, b"", 1), (1 << 8, b"\xcc", 1), (1 << 16, b"\xcd", 2)):
        if value < limit:
            return head + value.to_bytes(size, "big")
    return b"\xce" + _U32.pack(value) if value < 1 << 32 else b"\xcf" + struct.pack(">Q", value)


def message(kind: int, name: bytes, **fields: bytes) -> bytes:
    """Encode `{type: kind, name: {fields}}` from fields that are already encoded."""
    inner = b"".join(text(key.encode()) + value for key, value in fields.items())
    head = b"\x82" + text(b"type") + number(kind) + text(name)
    return head + bytes((0x80 | len(fields),)) + inner


def head(size: int, masked: bool) -> bytes:
    flag = 0x80 if masked else 0
    if size < 126:
        return bytes((0x82, flag | size))
    return struct.pack(">BBH", 0x82, flag | 126, size)


@functools.lru_cache(maxsize=64)
def _mask(size: int) -> int:
    return int.from_bytes((MASK * (size // 4 + 1))[:size], "big")


def client_frame(data: bytes) -> bytes:
    size = len(data)
    masked = (int.from_bytes(data, "big") ^ _mask(size)).to_bytes(size, "big")
    return head(size, masked=True) + MASK + masked


def server_frame(data: bytes) -> bytes:
    return head(len(data), masked=False) + data


def attach(topic: bytes) -> bytes:
    return client_frame(message(1, b"attach", topic=text(topic)))


@functools.lru_cache(maxsize=2)
def publish_stream(count: int) -> Stream:
    return load.blocks_of(_publish_frames(load.payloads(count)))


def _publish_frames(made: Sequence[bytes]) -> Iterator[bytes]:
    before = message(3, b"publish", topic=text(TOPIC), message=b"", sequence_number=b"")
    at = before.index(text(b"message")) + len(text(b"message"))
    for index, payload in enumerate(made):
        binary = b"\xc4" + bytes((len(payload),)) + payload
        yield client_frame(before[:at] + binary + before[at:] + number(index))


@functools.lru_cache(maxsize=2)
def payload_stream(count: int) -> Stream:
    """Return the PAYLOAD messages that a subscriber of a new topic receives."""
    return load.blocks_of(_payload_frames(load.payloads(count)))


def _payload_frames(made: Sequence[bytes]) -> Iterator[bytes]:
    offset = 0
    for payload in made:
        record = _U32.pack(len(payload)) + payload
        offset += len(record)
        serial = text(EPOCH + b"@%d" % offset)
        fields = {"topic": text(TOPIC), "serial": serial, "message": b"\xc6" + record}
        yield server_frame(message(5, b"payload", **fields))


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect and complete the WebSocket handshake."""
    sock = load.connect(*address)
    key = base64.b64encode(os.urandom(16)).decode()
    sock.sendall(
        f"GET /v1/ws HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += load.receive_exactly(sock, 1)
    if not answer.startswith(b"HTTP/1.1 101 "):
        raise VerificationError(f"no WebSocket but {answer!r}")
    return sock


def ping(sock: socket.socket, stamp: int) -> None:
    """Send a PING and wait for its PONG, which proves that the connection has a session."""
    sock.sendall(client_frame(message(6, b"ping", timestamp=number(stamp))))
    pong = server_frame(message(7, b"pong", timestamp=number(stamp)))
    if load.receive_exactly(sock, len(pong)) != pong:
        raise VerificationError("PING was not answered with its own PONG")


def attached(address: tuple[str, int]) -> socket.socket:
    """Return a WebSocket that is attached to the topic, which does not exist yet."""
    sock = connect(address)
    _attach(sock)
    return sock


def _attach(sock: socket.socket) -> None:
    sock.sendall(attach(TOPIC))
    answer = server_frame(message(2, b"attached", topic=text(TOPIC), serial=text(b"0@0")))
    if load.receive_exactly(sock, len(answer)) != answer:
        raise VerificationError("not the ATTACHED of a topic that is not there yet")


class WombatAcks:
    """Parser of ACKs, which must be well-formed and increasing."""

    def __init__(self) -> None:
        self.rest = b""
        self.acked = 0

    def feed(self, data: bytes) -> int:
        data = self.rest + data
        at = 0
        while len(data) - at > 2 and len(data) - at >= 2 + data[at + 1]:
            end = at + 2 + data[at + 1]
            self._ack(data[at:end])
            at = end
        self.rest = data[at:]
        return self.acked

    def _ack(self, frame: bytes) -> None:
        before = server_frame(message(4, b"ack", topic=text(TOPIC), sequence_number=b""))
        if frame[2 : len(before)] != before[2:]:
            raise VerificationError(f"not an ACK: {frame!r}")
        tail = frame[len(before) :]
        value = int.from_bytes(tail if len(tail) == 1 else tail[1:], "big")
        if value < self.acked or number(value) != tail:
            raise VerificationError(f"bad ACK {frame!r} after {self.acked}")
        self.acked = value + 1


class WombatSubscriber:
    """Subscriber that stores everything that arrives after ATTACHED."""

    def __init__(self, address: tuple[str, int], expected: Stream) -> None:
        self.expected = expected
        self.data = load.buffer(len(expected.data) + 4096)
        self.view = memoryview(self.data)
        self.received = 0
        self.sock = connect(address)

    def attach(self) -> None:
        _attach(self.sock)

    def readable(self) -> None:
        at = self.received
        got = self.sock.recv_into(self.view[at : at + load.READ_BYTES])
        if not got:
            raise ConnectionError("the server closed the subscriber's connection")
        self.received = at + got

    def has(self, messages: int) -> bool:
        return self.received >= self.expected.ends[messages // BLOCK - 1]

    def verify(self, blocks: int) -> None:
        """Raise VerificationError unless exactly the bytes of the first `blocks` blocks have arrived."""
        end = self.expected.ends[blocks - 1]
        if self.received != end:
            raise VerificationError(f"received {self.received} bytes, expected {end}")
        at = self.expected.data.index(EPOCH)
        epoch = bytes(self.data[at : at + len(EPOCH)])
        expected = self.expected.data[:end].replace(EPOCH + b"@", epoch + b"@")
        if self.view[:end] != memoryview(expected):
            raise VerificationError("what was received is not what was published")

    def close(self) -> None:
        self.sock.close()


def publisher(address: tuple[str, int], stream: Stream) -> Publisher:
    return Publisher(connect(address), stream, WombatAcks())
