"""A second Wombat client on `websockets` and `msgpack`: it imports nothing from headrace.

It was written only from the seed and the notes. `Wire` is one connection, message by message, for tests of
the protocol. `Client` behaves as the seed asks of an SDK. Elsewhere: how a client reconnects, resends,
resumes and pings (`tests/system/foreign.py`).
"""

import contextlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgpack
from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from tests.system import foreign
from tests.system.foreign import Address, Kinds, Pending

ATTACH, ATTACHED, PUBLISH, ACK, PAYLOAD, PING, PONG, DETACH, DETACHED = range(1, 10)
NUMBERS = 2**32

FIELDS: dict[int, tuple[str, dict[str, type | tuple[type, ...]]]] = {
    ATTACHED: ("attached", {"topic": str, "serial": str}),
    ACK: ("ack", {"topic": str, "sequence_number": int}),
    PAYLOAD: ("payload", {"topic": str, "serial": str, "message": bytes}),
    PONG: ("pong", {"timestamp": (int, float)}),
    DETACHED: ("detached", {"topic": str}),
}
"""Messages of servers: the name and the fields of each type, with the Python types that `msgpack` returns."""


class Message(NamedTuple):
    type: int
    topic: str = ""
    serial: str = ""
    number: float = 0  # the sequence number or the timestamp, depending on the type
    data: bytes = b""


class Closed(EOFError):  # noqa: N818 - an event, and the way a wire ends
    """The server has closed. The code is 1006 if it gave no reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code = code
        self.reason = reason


def message(kind: int, name: str, **fields: object) -> bytes:
    return pack({"type": kind, name: fields})


def pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def attach(topic: str, serial: str | None = None) -> bytes:
    """Encode an ATTACH as an SDK does that resumes from a serial, or has nothing to resume from."""
    fields = {} if serial is None else {"serial": serial}
    return message(ATTACH, "attach", topic=topic, **fields)


def detach(topic: str) -> bytes:
    return message(DETACH, "detach", topic=topic)


def publish(topic: str, number: int, data: object) -> bytes:
    return message(PUBLISH, "publish", topic=topic, message=data, sequence_number=number)


def ping(timestamp: float) -> bytes:
    return message(PING, "ping", timestamp=timestamp)


def decode(data: bytes) -> Message:
    """Decode a message from the server; raise ValueError if it is not exactly as the seed says."""
    whole = msgpack.unpackb(data)
    kind: int = whole.get("type", 0) if isinstance(whole, dict) else 0
    _check(kind in FIELDS, data)
    name, wanted = FIELDS[kind]
    _check(set(whole) == {"type", name} and set(whole[name]) == set(wanted), data)
    fields: dict[str, Any] = whole[name]
    _check(all(isinstance(fields[key], type_) for key, type_ in wanted.items()), data)
    return Message(
        kind,
        fields.get("topic", ""),
        fields.get("serial", ""),
        fields.get("sequence_number", fields.get("timestamp", 0)),
        fields.get("message", b""),
    )


def _check(condition: bool, data: bytes) -> None:
    if not condition:
        raise ValueError(f"the server sent a bad message: {data[:64]!r}")


def frame(data: bytes, opcode: int = Opcode.BINARY, fin: bool = True, mask: bool = True) -> bytes:
    return Frame(Opcode(opcode), data, fin).serialize(mask=mask)


class WebSocket:
    """The WebSocket of one connection, without its socket: bytes in, messages out."""

    def __init__(
        self, address: Address, path: str = "/v1/ws", headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        host, port = address
        self.protocol = ClientProtocol(parse_uri(f"ws://{host}:{port}{path}"), max_size=None)
        request = self.protocol.connect()
        request.headers.update(Headers(headers))
        self.protocol.send_request(request)
        self.response: Response | None = None
        self.pongs: list[bytes] = []

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages in these bytes; empty bytes mean the end of the connection."""
        if data:
            self.protocol.receive_data(data)
        elif not self.protocol.eof_sent:
            self.protocol.receive_eof()
        messages = []
        for event in self.protocol.events_received():
            if isinstance(event, Response):
                self.response = event
            elif isinstance(event, Frame) and event.opcode is Opcode.PONG:
                self.pongs.append(bytes(event.data))
            elif isinstance(event, Frame) and event.opcode is not Opcode.CLOSE:
                if event.opcode is not Opcode.BINARY or not event.fin:
                    raise ValueError(f"the server sent {event}")
                messages.append(decode(bytes(event.data)))
        if self.protocol.handshake_exc is not None:
            raise self.protocol.handshake_exc
        broken = self.protocol.parser_exc
        if broken is not None and not isinstance(broken, EOFError):
            raise ValueError("the server sent a bad frame") from broken
        return messages

    def to_send(self) -> bytes:
        return b"".join(self.protocol.data_to_send())

    @property
    def closed(self) -> Closed | None:
        """The server's close code and reason, or None."""
        received = self.protocol.close_rcvd
        return None if received is None else Closed(received.code, received.reason)


class Wire(foreign.Wire):
    """One blocking connection that sends given bytes and returns message by message."""

    def __init__(
        self,
        address: Address,
        timeout_s: float = 30.0,
        receive_buffer_bytes: int | None = None,
        path: str = "/v1/ws",
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._websocket = WebSocket(address, path, headers)
        self._numbers = 0
        super().__init__(address, timeout_s, receive_buffer_bytes)

    def _open(self) -> None:
        self.socket.sendall(self._websocket.to_send())
        while self._websocket.response is None:
            self.read(65536)

    def _feed(self, data: bytes) -> list[Message]:
        messages = self._websocket.feed(data)
        with contextlib.suppress(OSError):
            self.socket.sendall(self._websocket.to_send())
        return messages

    def _closed(self) -> Closed:
        return self._websocket.closed or Closed(1006, "")

    @property
    def response(self) -> Response:
        """Return the answer to the handshake."""
        assert self._websocket.response is not None
        return self._websocket.response

    @property
    def pongs(self) -> list[bytes]:
        """Payloads of WebSocket pongs."""
        return self._websocket.pongs

    def send(self, *messages: bytes) -> None:
        """Send messages in one write, each in its own frame."""
        self.send_bytes(*map(frame, messages))

    def send_bytes(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def expect_payloads(self, count: int) -> list[Message]:
        return [self.expect(PAYLOAD) for _ in range(count)]

    def attach(self, topic: str, serial: str | None = None) -> str:
        self.send(attach(topic, serial))
        attached = self.expect(ATTACHED)
        assert attached.topic == topic
        return attached.serial

    def publish(self, topic: str, *payloads: bytes) -> None:
        """Publish all payloads in one write, with the connection's next numbers; wait until acknowledged."""
        first, self._numbers = self._numbers, self._numbers + len(payloads)
        self.send(*(publish(topic, first + i, data) for i, data in enumerate(payloads)))
        self.wait_ack(topic, self._numbers - 1)

    def wait_ack(self, topic: str, number: int) -> list[int]:
        acks: list[int] = []
        while not acks or acks[-1] < number:
            ack = self.expect(ACK)
            assert ack.topic == topic
            acks.append(int(ack.number))
        return acks

    def alive(self) -> bool:
        """Send a PING and wait for its PONG; only for connections that receive nothing else."""
        stamp = time.monotonic_ns()
        self.send(ping(stamp))
        return self.expect(PONG).number == stamp

    def until_closed(self) -> tuple[list[Message], Closed]:
        """Return everything that the server sends until it closes, and how it closed."""
        messages = []
        while True:
            try:
                messages.append(self.receive())
            except Closed as closed:
                return messages, closed


class Client(foreign.Client):
    """Client whose positions are serials.

    An ACK counts for everything up to its number, or with `by_topic` only for its topic's publishes.
    """

    kinds = Kinds(ATTACHED, DETACHED, ACK, PAYLOAD, PONG)
    numbers = NUMBERS

    def __init__(self, address: Address, *, by_topic: bool = False, **options: Any) -> None:
        self._by_topic = by_topic
        usual = {"ping_s": 5.0, "pings_unanswered_max": 1, "resend_s": 2.0}
        super().__init__(address, **usual | options)

    def _connect(self) -> Wire:
        try:
            return Wire(self.address, 30, self._receive_buffer_bytes)
        except InvalidHandshake as error:
            raise EOFError("the server refused the handshake") from error

    def _attach(self, topic: str, position: str | None) -> bytes:
        return frame(attach(topic, position))

    def _detach(self, topic: str) -> bytes:
        return frame(detach(topic))

    def _publish(self, topic: str, number: int, data: bytes) -> bytes:
        return frame(publish(topic, number, data))

    def _ping(self, timestamp: int) -> bytes:
        return frame(ping(timestamp))

    def _position_of(self, message: Message) -> str:
        return message.serial

    def _covers(self, ack: Message, pending: Pending) -> bool:
        return super()._covers(ack, pending) and (pending.topic == ack.topic or not self._by_topic)

    def wait_attached(self, topic: str, timeout_s: float = 60.0) -> None:
        self._wait(lambda: self.position(topic) is not None, timeout_s, f"ATTACHED of {topic}")

    def wait_serial(self, topic: str, serial: str, timeout_s: float = 60.0) -> None:
        reached = f"{serial}, at {self.position(topic)}"
        self._wait(lambda: self.position(topic) == serial, timeout_s, reached)
