"""A second Figg client, written only from the seed and the notes: it imports nothing from headrace.

`Wire` is one connection, message by message, for tests of the protocol. `Client` behaves as the existing SDK
does: it reconnects, resends, resumes and pings.
"""

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

ATTACH, ATTACHED, DETACH, DETACHED, PUBLISH, ACK, DATA, PING, PONG = range(1, 10)
VERSION = 1
FROM_OFFSET = 0x8000  # "bit 1", counted from the left, as the SDK does
FROM_OFFSET_RIGHT = 0x0001  # the same, counted from the right

HEADER = struct.Struct(">HHI")
U64 = struct.Struct(">Q")

Address = tuple[str, int]


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


class Wire:
    """One blocking connection that sends given bytes and returns message by message."""

    def __init__(
        self, address: Address, timeout_s: float = 30.0, receive_buffer_bytes: int | None = None
    ) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(timeout_s)
        self.socket.connect(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = Decoder()
        self._messages: deque[Message] = deque()

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def receive(self) -> Message:
        """Return the next message; raise EOFError if the server has closed, TimeoutError if it is silent."""
        while not self._messages:
            self.read(65536)
        return self._messages.popleft()

    def read(self, size: int) -> int:
        """Read at most `size` bytes once, for readers that must be slow; return the number of bytes read."""
        try:
            data = self.socket.recv(size)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("the server closed the connection")
        self._messages.extend(self._decoder.feed(data))
        return len(data)

    def taken(self) -> list[Message]:
        """Return the messages that have been read and not yet received, without waiting."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def expect(self, kind: int) -> Message:
        message = self.receive()
        assert message.type == kind, f"wanted type {kind}, got {message}"
        return message

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

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending(NamedTuple):
    """A publish that is not acknowledged."""

    number: int
    topic: bytes
    data: bytes
    note: object


class Client:
    """Client that keeps its promises over any number of connections.

    One thread does all input and output, and runs the callbacks. `on_send` is called each time a publish is
    written to a connection (resends included); it returns the note that `on_ack` gets. `on_attached` gets the
    offsets that were asked for and answered. `on_data` is called for each record.
    """

    def __init__(
        self,
        address: Address,
        *,
        on_send: Callable[[bytes, bytes], object] = lambda topic, data: None,
        on_ack: Callable[[bytes, object], None] = lambda topic, note: None,
        on_attached: Callable[[bytes, int | None, int], None] = lambda topic, asked, got: None,
        on_data: Callable[[bytes, int, bytes], None] = lambda topic, offset, data: None,
        window: int = 256,
        ping_s: float = 2.0,
        pings_unanswered_max: int = 2,
        backoff_s: tuple[float, float] = (0.02, 0.5),
    ) -> None:
        self.address = address
        self.connections = 0
        self.dropped_by_pings = 0
        self.error: BaseException | None = None
        self.latencies_s: list[float] = []
        self._on_send, self._on_ack = on_send, on_ack
        self._on_attached, self._on_data = on_attached, on_data
        self._window = window
        self._ping_s = ping_s
        self._pings_max = pings_unanswered_max
        self._backoff_s = backoff_s
        self._changed = threading.Condition()
        self._closing = False
        self._next_number = 0
        self._queued: deque[tuple[bytes, bytes]] = deque()  # accepted, not yet numbered
        self._unacked: deque[Pending] = deque()
        self._attachments: dict[bytes, _Attachment] = {}
        self._detaching: set[bytes] = set()
        self._orders: deque[bytes] = deque()  # ATTACH and DETACH asked for while connected
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def publish(self, topic: bytes, data: bytes, timeout_s: float = 60.0) -> None:
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
        with self._changed:
            done = self._changed.wait_for(lambda: self.unacknowledged == 0 or self.error, timeout_s)
            if not done or self.error:
                raise TimeoutError(f"{self.unacknowledged} unacknowledged") from self.error

    @property
    def unacknowledged(self) -> int:
        return len(self._queued) + len(self._unacked)

    @property
    def oldest_unacknowledged(self) -> int | None:
        with self._changed:
            return self._unacked[0].number if self._unacked else None

    def attach(self, topic: bytes, offset: int | None = None) -> None:
        with self._changed:
            self._attachments[topic] = _Attachment(offset)
            self._detaching.discard(topic)
            self._orders.append(attach(topic, offset))
        self._wake()

    def detach(self, topic: bytes) -> None:
        with self._changed:
            self._attachments.pop(topic, None)
            self._detaching.add(topic)
            self._orders.append(detach(topic))
        self._wake()

    def offset(self, topic: bytes) -> int | None:
        """Offset of the last message received, or the one in ATTACHED, or None before that."""
        state = self._attachments.get(topic)
        return state.position if state is not None and state.attached else None

    def wait_offset(self, topic: bytes, offset: int, timeout_s: float = 60.0) -> None:
        with self._changed:
            reached = self._changed.wait_for(
                lambda: (self.offset(topic) or 0) >= offset or self.error, timeout_s
            )
            if not reached or self.error:
                raise TimeoutError(f"at {self.offset(topic)}, not {offset}") from self.error

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
                    connection = socket.create_connection(self.address, timeout=30)
                except OSError:
                    self._pause(failures)
                    failures += 1
                    continue
                failures = 0
                self.connections += 1
                try:
                    _Connection(self, connection).run()
                except OSError:
                    pass
                finally:
                    connection.close()
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
    def __init__(self, asked: int | None) -> None:
        self.asked = asked
        self.attached = False
        self.position = 0


class _Connection:
    """One connection of a Client: the loop of the client's thread while the connection lasts."""

    def __init__(self, client: Client, connection: socket.socket) -> None:
        self.client = client
        self.socket = connection
        self.decoder = Decoder()
        self.output = bytearray()
        self.pings: deque[float] = deque()
        self.next_ping = time.monotonic() + client._ping_s

    def run(self) -> None:
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._resume()
        with selectors.DefaultSelector() as selector:
            selector.register(self.client._wake_receive, selectors.EVENT_READ)
            selector.register(self.socket, selectors.EVENT_READ)
            while not self.client._closing:
                self._take_work()
                if not self._ping():
                    return
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.output else 0)
                selector.modify(self.socket, events)
                for key, ready in selector.select(max(0.0, self.next_ping - time.monotonic())):
                    if key.fileobj is not self.socket:
                        self.client._wake_receive.recv(4096)
                        continue
                    if ready & selectors.EVENT_READ and not self._read():
                        return
                    if ready & selectors.EVENT_WRITE:
                        del self.output[: self.socket.send(self.output[:65536])]

    def _resume(self) -> None:
        """Do what the seed asks of a client that has reconnected."""
        client = self.client
        with client._changed:
            client._orders.clear()
            for topic, state in client._attachments.items():
                if state.attached:
                    state.asked, state.attached = state.position, False
                self.output += attach(topic, state.asked)
            for topic in client._detaching:
                self.output += detach(topic)
            for number, topic, data, _ in client._unacked:
                client._on_send(topic, data)
                self.output += publish(topic, number, data)

    def _take_work(self) -> None:
        client = self.client
        with client._changed:
            while client._orders:
                self.output += client._orders.popleft()
            while client._queued:
                topic, data = client._queued.popleft()
                note = client._on_send(topic, data)
                client._unacked.append(Pending(client._next_number, topic, data, note))
                self.output += publish(topic, client._next_number, data)
                client._next_number += 1

    def _ping(self) -> bool:
        now = time.monotonic()
        if now < self.next_ping:
            return True
        if len(self.pings) >= self.client._pings_max:
            self.client.dropped_by_pings += 1
            return False
        self.pings.append(now)
        self.output += ping(int(now * 1e9))
        self.next_ping = now + self.client._ping_s
        return True

    def _read(self) -> bool:
        data = self.socket.recv(262144)
        if not data:
            return False
        messages = self.decoder.feed(data)
        with self.client._changed:
            for message in messages:
                self._handle(message)
            self.client._changed.notify_all()
        return True

    def _handle(self, message: Message) -> None:
        client = self.client
        kind, topic, number, data = message
        state = client._attachments.get(topic)
        if kind == ACK:
            while client._unacked and client._unacked[0].number <= number:
                done = client._unacked.popleft()
                client._on_ack(done.topic, done.note)
        elif kind == PONG:
            client.latencies_s.append(time.monotonic() - self.pings.popleft())
        elif kind == DETACHED:
            client._detaching.discard(topic)
        elif kind == ATTACHED and state is not None:
            client._on_attached(topic, state.asked, number)
            state.attached, state.position = True, number
        elif kind == DATA and state is not None and state.attached:
            client._on_data(topic, number, data)
            state.position = number
