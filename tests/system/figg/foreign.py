"""A second Figg client, written only from the seed and the notes: it imports nothing from headrace.

`Wire` is one connection, message by message, for tests of the protocol. `Client` behaves as the existing SDK
does. Elsewhere: how a client reconnects, resends, resumes and pings (`tests/system/foreign.py`).
"""

import struct
import time
from typing import NamedTuple

from tests.system import foreign
from tests.system.foreign import Address, Kinds

ATTACH, ATTACHED, DETACH, DETACHED, PUBLISH, ACK, DATA, PING, PONG = range(1, 10)
VERSION = 1
FROM_OFFSET = 0x8000  # "bit 1", counted from the left, as the SDK does
FROM_OFFSET_RIGHT = 0x0001  # the same, counted from the right

HEADER = struct.Struct(">HHI")
U64 = struct.Struct(">Q")


class Message(NamedTuple):
    type: int
    topic: bytes = b""
    number: int = 0  # the offset, sequence number or timestamp, depending on the type
    data: bytes = b""


def frame(kind: int, payload: bytes, version: int = VERSION) -> bytes:
    return HEADER.pack(kind, version, len(payload)) + payload


def field(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def attach(topic: bytes, offset: int | None = None, flags: int | None = None) -> bytes:
    """Encode an ATTACH as the SDK does: the offset is always present, and the flag says whether it counts."""
    if flags is None:
        flags = 0 if offset is None else FROM_OFFSET
    return frame(ATTACH, struct.pack(">H", flags) + field(topic) + U64.pack(offset or 0))


def detach(topic: bytes) -> bytes:
    return frame(DETACH, field(topic))


def publish(topic: bytes, number: int, data: bytes) -> bytes:
    return frame(PUBLISH, field(topic) + U64.pack(number) + field(data))


def ping(timestamp: int) -> bytes:
    return frame(PING, U64.pack(timestamp))


def decode(kind: int, payload: bytes) -> Message:
    """Decode a message from the server; raise ValueError if it is not exactly as the seed says."""
    if kind in (ACK, PONG):
        _check(len(payload) == 8, kind, payload)
        return Message(kind, number=U64.unpack(payload)[0])
    topic, rest = _take_field(kind, payload)
    if kind == DETACHED:
        _check(not rest, kind, payload)
        return Message(kind, topic)
    _check(kind in (ATTACHED, DATA) and len(rest) >= 8, kind, payload)
    offset, rest = U64.unpack(rest[:8])[0], rest[8:]
    if kind == ATTACHED:
        _check(not rest, kind, payload)
        return Message(kind, topic, offset)
    data, rest = _take_field(kind, rest)
    _check(not rest, kind, payload)
    return Message(kind, topic, offset, data)


def _take_field(kind: int, payload: bytes) -> tuple[bytes, bytes]:
    _check(len(payload) >= 4, kind, payload)
    size = struct.unpack(">I", payload[:4])[0]
    _check(len(payload) >= 4 + size, kind, payload)
    return payload[4 : 4 + size], payload[4 + size :]


def _check(condition: bool, kind: int, payload: bytes) -> None:
    if not condition:
        raise ValueError(f"the server sent a bad message of type {kind}: {payload[:64]!r}")


class Decoder:
    """Decoder of the server's bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages = []
        position = 0
        while len(self._buffer) - position >= HEADER.size:
            kind, version, size = HEADER.unpack_from(self._buffer, position)
            if version != VERSION:
                raise ValueError(f"the server sent version {version}")
            end = position + HEADER.size + size
            if len(self._buffer) < end:
                break
            messages.append(decode(kind, bytes(self._buffer[position + HEADER.size : end])))
            position = end
        del self._buffer[:position]
        return messages


class Wire(foreign.Wire):
    """One blocking connection that sends given bytes and returns message by message."""

    def __init__(
        self, address: Address, timeout_s: float = 30.0, receive_buffer_bytes: int | None = None
    ) -> None:
        self._decoder = Decoder()
        super().__init__(address, timeout_s, receive_buffer_bytes)

    def _feed(self, data: bytes) -> list[Message]:
        return self._decoder.feed(data)

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def expect_data(self, count: int) -> list[Message]:
        return [self.expect(DATA) for _ in range(count)]

    def attach(self, topic: bytes, offset: int | None = None) -> int:
        self.send(attach(topic, offset))
        attached = self.expect(ATTACHED)
        assert attached.topic == topic
        return attached.number

    def publish(self, topic: bytes, *payloads: bytes, first: int = 0) -> None:
        """Publish all payloads in one write, and wait until the last one is acknowledged."""
        self.send(*(publish(topic, first + i, data) for i, data in enumerate(payloads)))
        self.wait_ack(first + len(payloads) - 1)

    def wait_ack(self, number: int) -> list[int]:
        acks = [self.expect(ACK).number]
        while acks[-1] < number:
            acks.append(self.expect(ACK).number)
        return acks

    def alive(self) -> bool:
        """Send a PING and wait for its PONG; only for connections that receive nothing else."""
        stamp = time.monotonic_ns()
        self.send(ping(stamp))
        return self.expect(PONG).number == stamp

    def until_closed(self) -> list[Message]:
        """Return everything that the server sends until it closes."""
        messages = []
        while True:
            try:
                messages.append(self.receive())
            except EOFError:
                return messages


class Client(foreign.Client):
    """Client whose positions are offsets."""

    kinds = Kinds(ATTACHED, DETACHED, ACK, DATA, PONG)

    def _connect(self) -> Wire:
        return Wire(self.address, 30, self._receive_buffer_bytes)

    _attach = staticmethod(attach)
    _detach = staticmethod(detach)
    _publish = staticmethod(publish)
    _ping = staticmethod(ping)

    def _position_of(self, message: Message) -> int:
        return message.number

    def wait_offset(self, topic: bytes, offset: int, timeout_s: float = 60.0) -> None:
        reached = f"{offset}, at {self.position(topic)}"
        self._wait(lambda: (self.position(topic) or 0) >= offset, timeout_s, reached)
