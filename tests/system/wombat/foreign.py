"""A second Wombat client on `websockets` and `msgpack`: it imports nothing from headrace.

It was written only from the seed and the notes. `Wire` is one connection, message by message, for tests of
the protocol. `Client` behaves as the seed asks of an SDK: it reconnects, resends, resumes and pings.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgpack
from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

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

Address = tuple[str, int]


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


class Wire:
    """One blocking connection that sends given bytes and returns message by message."""

    def __init__(
        self,
        address: Address,
        timeout_s: float = 30.0,
        receive_buffer_bytes: int | None = None,
        path: str = "/v1/ws",
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(timeout_s)
        self._websocket = WebSocket(address, path, headers)
        self._messages: deque[Message] = deque()
        self._numbers = 0
        try:
            self.socket.connect(address)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.sendall(self._websocket.to_send())
            while self._websocket.response is None:
                self.read(65536)
        except BaseException:
            self.socket.close()
            raise

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

    def receive(self) -> Message:
        """Return the next message; raise Closed if the server has closed, TimeoutError if it is silent."""
        while not self._messages:
            self.read(65536)
        return self._messages.popleft()

    def read(self, size: int) -> int:
        """Read at most `size` bytes once, for readers that must be slow; return the number of bytes read."""
        try:
            data = self.socket.recv(size)
        except ConnectionResetError:
            data = b""
        self._messages.extend(self._websocket.feed(data))
        with contextlib.suppress(OSError):
            self.socket.sendall(self._websocket.to_send())
        if not data:
            raise self._websocket.closed or Closed(1006, "")
        return len(data)

    def taken(self) -> list[Message]:
        """Return the messages that have been read and not yet received, without waiting."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def expect(self, kind: int) -> Message:
        found = self.receive()
        assert found.type == kind, f"wanted type {kind}, got {found}"
        return found

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

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending:
    """A publish that is not acknowledged."""

    __slots__ = ("data", "note", "number", "sent_s", "topic")

    def __init__(self, number: int, topic: str, data: bytes, note: object) -> None:
        self.number = number
        self.topic = topic
        self.data = data
        self.note = note
        self.sent_s = 0.0


class Client:
    """Client that keeps its promises over any number of connections.

    One thread does all input and output, and runs the callbacks. `on_send` is called when a publish is
    written to a connection for the first time; it returns the note that `on_ack` gets. `on_attached` gets the
    serials that were asked for and answered. `on_payload` is called for each message. `on_send` is not called
    for a publish that is resent on the same connection: the server must not store it again.

    An ACK counts for everything up to its number, or with `by_topic` only for its topic's publishes.
    """

    def __init__(
        self,
        address: Address,
        *,
        on_send: Callable[[str, bytes], object] = lambda topic, data: None,
        on_ack: Callable[[str, object], None] = lambda topic, note: None,
        on_attached: Callable[[str, str | None, str], None] = lambda topic, asked, got: None,
        on_payload: Callable[[str, str, bytes], None] = lambda topic, serial, data: None,
        window: int = 256,
        first_number: int = 0,
        by_topic: bool = False,
        ping_s: float = 5.0,
        resend_s: float = 2.0,
        backoff_s: tuple[float, float] = (0.02, 0.5),
        receive_buffer_bytes: int | None = None,
    ) -> None:
        self.address = address
        self.connections = 0
        self.dropped_by_pings = 0
        self.resent = 0
        self.error: BaseException | None = None
        self.closed: list[Closed] = []
        """Each close by the server, with its code and reason."""
        self.latencies_s: list[float] = []
        self._on_send, self._on_ack = on_send, on_ack
        self._on_attached, self._on_payload = on_attached, on_payload
        self._window = window
        self._by_topic = by_topic
        self._ping_s = ping_s
        self._resend_s = resend_s
        self._backoff_s = backoff_s
        self._receive_buffer_bytes = receive_buffer_bytes
        self._changed = threading.Condition()
        self._closing = False
        self._next_number = first_number
        self._queued: deque[tuple[str, bytes]] = deque()  # accepted, not yet numbered
        self._unacked: deque[Pending] = deque()
        self._attachments: dict[str, _Attachment] = {}
        self._detaching: set[str] = set()
        self._orders: deque[bytes] = deque()  # ATTACH and DETACH asked for while connected
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def publish(self, topic: str, data: bytes, timeout_s: float = 60.0) -> None:
        """Queue one message; wait while the window is full."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._room() or self.error, timeout_s)
            if self.error:
                raise RuntimeError("the client has failed") from self.error
            if not ready:
                raise TimeoutError("the window stayed full")
            self._queued.append((topic, data))
        self._wake()

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until every queued message is acknowledged."""
        self._wait(lambda: self.unacknowledged == 0, timeout_s, "everything to be acknowledged")

    @property
    def unacknowledged(self) -> int:
        return len(self._queued) + len(self._unacked)

    @property
    def oldest_unacknowledged(self) -> int | None:
        with self._changed:
            return self._unacked[0].number if self._unacked else None

    def attach(self, topic: str, serial: str | None = None) -> None:
        with self._changed:
            self._attachments[topic] = _Attachment(serial)
            self._detaching.discard(topic)
            self._orders.append(attach(topic, serial))
        self._wake()

    def detach(self, topic: str) -> None:
        with self._changed:
            self._attachments.pop(topic, None)
            self._detaching.add(topic)
            self._orders.append(detach(topic))
        self._wake()

    def serial(self, topic: str) -> str | None:
        """Serial of the last message received, or the one in ATTACHED, or None before that."""
        state = self._attachments.get(topic)
        return state.serial if state is not None and state.attached else None

    def wait_attached(self, topic: str, timeout_s: float = 60.0) -> None:
        self._wait(lambda: self.serial(topic) is not None, timeout_s, f"ATTACHED of {topic}")

    def wait_serial(self, topic: str, serial: str, timeout_s: float = 60.0) -> None:
        self._wait(
            lambda: self.serial(topic) == serial, timeout_s, f"{serial}, at {self.serial(topic)}"
        )

    def close(self) -> None:
        with self._changed:
            self._closing = True
        self._wake()
        self._thread.join(30)
        self._wake_send.close()
        self._wake_receive.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: condition() or self.error, timeout_s)
            if not reached or self.error:
                raise TimeoutError(f"waited in vain for {what}") from self.error

    def _room(self) -> bool:
        return self.unacknowledged < self._window

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_send.send(b"!")

    def _run(self) -> None:
        failures = 0
        try:
            while not self._closing:
                try:
                    wire = Wire(self.address, 30, self._receive_buffer_bytes)
                except (OSError, EOFError, InvalidHandshake):
                    self._pause(failures)
                    failures += 1
                    continue
                failures = 0
                self.connections += 1
                with wire:
                    try:
                        _Connection(self, wire).run()
                    except Closed as closed:
                        self.closed.append(closed)
                    except OSError:
                        pass
                if not self._closing:
                    self._pause(0)
        except BaseException as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _pause(self, failures: int) -> None:
        first, longest = self._backoff_s
        time.sleep(min(longest, first * 2 ** min(failures, 10)))


class _Attachment:
    def __init__(self, asked: str | None) -> None:
        self.asked = asked
        self.attached = False
        self.serial = ""


class _Connection:
    """One connection of a Client: the loop of the client's thread while the connection lasts."""

    def __init__(self, client: Client, wire: Wire) -> None:
        self.client = client
        self.wire = wire
        self.output = bytearray()
        self.pinged_s: float | None = None
        self.next_ping = time.monotonic() + client._ping_s

    def run(self) -> None:
        self._resume()
        sock = self.wire.socket
        with selectors.DefaultSelector() as selector:
            selector.register(self.client._wake_receive, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while not self.client._closing:
                self._take_work()
                if not self._ping():
                    return
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.output else 0)
                selector.modify(sock, events)
                for key, ready in selector.select(self._patience_s()):
                    if key.fileobj is not sock:
                        self.client._wake_receive.recv(4096)
                        continue
                    if ready & selectors.EVENT_READ:
                        self._read()
                    if ready & selectors.EVENT_WRITE:
                        sent = sock.send(self.output[:65536], socket.MSG_DONTWAIT)
                        del self.output[:sent]

    def _patience_s(self) -> float:
        client, now = self.client, time.monotonic()
        until = self.next_ping
        with client._changed:
            if client._unacked:
                until = min(until, client._unacked[0].sent_s + client._resend_s)
        return max(0.0, until - now)

    def _resume(self) -> None:
        """Do what the seed asks of a client that has reconnected."""
        client = self.client
        with client._changed:
            client._orders.clear()
            for topic, state in client._attachments.items():
                if state.attached:
                    state.asked, state.attached = state.serial, False
                self._send(attach(topic, state.asked))
            for topic in client._detaching:
                self._send(detach(topic))
            for pending in client._unacked:
                client._on_send(pending.topic, pending.data)
                self._publish(pending)

    def _take_work(self) -> None:
        client = self.client
        with client._changed:
            while client._orders:
                self._send(client._orders.popleft())
            self._resend()
            while client._queued:
                topic, data = client._queued.popleft()
                note = client._on_send(topic, data)
                client._unacked.append(Pending(client._next_number, topic, data, note))
                self._publish(client._unacked[-1])
                client._next_number = (client._next_number + 1) % NUMBERS

    def _resend(self) -> None:
        """Resend publishes that were not acknowledged in time, with their old numbers."""
        late_s = time.monotonic() - self.client._resend_s
        for pending in self.client._unacked:
            if pending.sent_s > late_s:
                break
            self.client.resent += 1
            self._publish(pending)

    def _publish(self, pending: Pending) -> None:
        pending.sent_s = time.monotonic()
        self._send(publish(pending.topic, pending.number, pending.data))

    def _send(self, data: bytes) -> None:
        self.output += frame(data)

    def _ping(self) -> bool:
        now = time.monotonic()
        if now < self.next_ping:
            return True
        if self.pinged_s is not None:
            self.client.dropped_by_pings += 1
            return False
        self.pinged_s = now
        self._send(ping(int(now * 1e9)))
        self.next_ping = now + self.client._ping_s
        return True

    def _read(self) -> None:
        try:
            self.wire.read(262144)
        finally:
            with self.client._changed:
                for found in self.wire.taken():
                    self._handle(found)
                self.client._changed.notify_all()

    def _handle(self, found: Message) -> None:
        client = self.client
        state = client._attachments.get(found.topic)
        if found.type == ACK:
            self._acknowledged(found.topic, int(found.number))
        elif found.type == PONG:
            assert self.pinged_s is not None
            client.latencies_s.append(time.monotonic() - self.pinged_s)
            self.pinged_s = None
        elif found.type == DETACHED:
            client._detaching.discard(found.topic)
        elif found.type == ATTACHED and state is not None:
            client._on_attached(found.topic, state.asked, found.serial)
            state.attached, state.serial = True, found.serial
        elif found.type == PAYLOAD and state is not None and state.attached:
            client._on_payload(found.topic, found.serial, found.data)
            state.serial = found.serial

    def _acknowledged(self, topic: str, number: int) -> None:
        client = self.client
        kept: deque[Pending] = deque()
        for pending in client._unacked:
            covered = (number - pending.number) % NUMBERS < NUMBERS // 2
            if covered and (pending.topic == topic or not client._by_topic):
                client._on_ack(pending.topic, pending.note)
            else:
                kept.append(pending)
        client._unacked = kept
