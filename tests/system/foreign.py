"""The parts that the second clients of Figg and Wombat share: they import nothing from headrace.

`Wire` is one connection, message by message, for tests of a protocol. `Client` behaves as the seeds ask of an
SDK: it reconnects, resends, resumes and pings. Elsewhere: the messages of each protocol, in `figg/foreign.py`
and `wombat/foreign.py`.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Self

Address = tuple[str, int]


class Kinds(NamedTuple):
    """Numbers of the types of messages that a protocol's servers send."""

    attached: int
    detached: int
    ack: int
    data: int
    pong: int


class Wire:
    """One blocking connection that sends given bytes and returns message by message."""

    def __init__(
        self, address: Address, timeout_s: float = 30.0, receive_buffer_bytes: int | None = None
    ) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(timeout_s)
        self._messages: deque[Any] = deque()
        try:
            self.socket.connect(address)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open()
        except BaseException:
            self.socket.close()
            raise

    def _open(self) -> None:
        """Do what comes before the first message."""

    def _feed(self, data: bytes) -> list[Any]:
        """Return the messages in these bytes; empty bytes mean the end of the connection."""
        raise NotImplementedError

    def _closed(self) -> EOFError:
        """Return the error that says how the server has closed."""
        return EOFError("the server closed the connection")

    def receive(self) -> Any:
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
        self._messages.extend(self._feed(data))
        if not data:
            raise self._closed()
        return len(data)

    def taken(self) -> list[Any]:
        """Return the messages that have been read and not yet received, without waiting."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def read_slowly(self, wanted: set[tuple[int, int]], bytes_min: int = 0) -> int:
        """Read 64 KiB every 10 ms until all wanted types and numbers came; return the bytes read."""
        read = 0
        while wanted or read < bytes_min:
            read += self.read(65536)
            time.sleep(0.01)
            wanted = wanted - {(found.type, int(found.number)) for found in self.taken()}
        return read

    def expect(self, kind: int) -> Any:
        message = self.receive()
        assert message.type == kind, f"wanted type {kind}, got {message}"
        return message

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending:
    """A publish that is not acknowledged."""

    __slots__ = ("data", "note", "number", "sent_s", "topic")

    def __init__(self, number: int, topic: Any, data: bytes, note: object) -> None:
        self.number = number
        self.topic = topic
        self.data = data
        self.note = note
        self.sent_s = 0.0


class Client:
    """Client that keeps its promises over any number of connections.

    One thread does all input and output, and runs the callbacks. `on_send` is called when a publish is
    written to a connection for the first time; it returns the note that `on_ack` gets. It is not called for a
    publish that is resent on the same connection: the server must not store it again. `on_attached` gets the
    positions that were asked for and answered. `on_data` is called for each record.
    """

    kinds: Kinds
    numbers = 2**64
    """Number after which the publishes are counted from 0 again."""

    def __init__(
        self,
        address: Address,
        *,
        on_send: Callable[[Any, bytes], object] = lambda topic, data: None,
        on_ack: Callable[[Any, Any], None] = lambda topic, note: None,
        on_attached: Callable[[Any, Any, Any], None] = lambda topic, asked, got: None,
        on_data: Callable[[Any, Any, bytes], None] = lambda topic, position, data: None,
        window: int = 256,
        first_number: int = 0,
        ping_s: float = 2.0,
        pings_unanswered_max: int = 2,
        resend_s: float = 86_400.0,
        backoff_s: tuple[float, float] = (0.02, 0.5),
        receive_buffer_bytes: int | None = None,
    ) -> None:
        self.address = address
        self.connections = 0
        self.dropped_by_pings = 0
        self.resent = 0
        self.error: BaseException | None = None
        self.closed: list[EOFError] = []
        """Each close by the server."""
        self.latencies_s: list[float] = []
        self._on_send, self._on_ack = on_send, on_ack
        self._on_attached, self._on_data = on_attached, on_data
        self._window = window
        self._ping_s = ping_s
        self._pings_max = pings_unanswered_max
        self._resend_s = resend_s
        self._backoff_s = backoff_s
        self._receive_buffer_bytes = receive_buffer_bytes
        self._changed = threading.Condition()
        self._closing = False
        self._next_number = first_number
        self._queued: deque[tuple[Any, bytes]] = deque()  # accepted, not yet numbered
        self._unacked: deque[Pending] = deque()
        self._attachments: dict[Any, _Attachment] = {}
        self._detaching: set[Any] = set()
        self._orders: deque[bytes] = deque()  # ATTACH and DETACH asked for while connected
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # The protocol

    def _connect(self) -> Wire:
        raise NotImplementedError

    def _attach(self, topic: Any, position: Any) -> bytes:
        raise NotImplementedError

    def _detach(self, topic: Any) -> bytes:
        raise NotImplementedError

    def _publish(self, topic: Any, number: int, data: bytes) -> bytes:
        raise NotImplementedError

    def _ping(self, timestamp: int) -> bytes:
        raise NotImplementedError

    def _position_of(self, message: Any) -> Any:
        """Return the position in an ATTACHED or a record."""
        raise NotImplementedError

    def _covers(self, ack: Any, pending: Pending) -> bool:
        """True if an ACK is for this publish."""
        return (ack.number - pending.number) % self.numbers < self.numbers // 2

    # The application's side

    def publish(self, topic: Any, data: bytes, timeout_s: float = 60.0) -> None:
        """Queue one message; wait while the window is full."""
        self._wait(lambda: self.unacknowledged < self._window, timeout_s, "room in the window")
        with self._changed:
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

    def attach(self, topic: Any, position: Any = None) -> None:
        with self._changed:
            self._attachments[topic] = _Attachment(position)
            self._detaching.discard(topic)
            self._orders.append(self._attach(topic, position))
        self._wake()

    def detach(self, topic: Any) -> None:
        with self._changed:
            self._attachments.pop(topic, None)
            self._detaching.add(topic)
            self._orders.append(self._detach(topic))
        self._wake()

    def position(self, topic: Any) -> Any:
        """Position of the last message received, or the one in ATTACHED, or None before that."""
        state = self._attachments.get(topic)
        return state.position if state is not None and state.attached else None

    def close(self) -> None:
        with self._changed:
            self._closing = True
        self._wake()
        self._thread.join(30)
        self._wake_send.close()
        self._wake_receive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: condition() or self.error, timeout_s)
            if not reached or self.error:
                raise TimeoutError(f"waited in vain for {what}") from self.error

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_send.send(b"!")

    def _run(self) -> None:
        failures = 0
        try:
            while not self._closing:
                try:
                    wire = self._connect()
                except (OSError, EOFError):
                    self._pause(failures)
                    failures += 1
                    continue
                failures = 0
                self.connections += 1
                with wire:
                    try:
                        _Connection(self, wire).run()
                    except EOFError as closed:
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
    def __init__(self, asked: Any) -> None:
        self.asked = asked
        self.attached = False
        self.position: Any = None


class _Connection:
    """One connection of a Client: the loop of the client's thread while the connection lasts."""

    def __init__(self, client: Client, wire: Wire) -> None:
        self.client = client
        self.wire = wire
        self.output = bytearray()
        self.pings: deque[float] = deque()
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
                    state.asked, state.attached = state.position, False
                self.output += client._attach(topic, state.asked)
            for topic in client._detaching:
                self.output += client._detach(topic)
            for pending in client._unacked:
                client._on_send(pending.topic, pending.data)
                self._publish(pending)

    def _take_work(self) -> None:
        client = self.client
        with client._changed:
            while client._orders:
                self.output += client._orders.popleft()
            self._resend()
            while client._queued:
                topic, data = client._queued.popleft()
                note = client._on_send(topic, data)
                client._unacked.append(Pending(client._next_number, topic, data, note))
                self._publish(client._unacked[-1])
                client._next_number = (client._next_number + 1) % client.numbers

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
        self.output += self.client._publish(pending.topic, pending.number, pending.data)

    def _ping(self) -> bool:
        now = time.monotonic()
        if now < self.next_ping:
            return True
        if len(self.pings) >= self.client._pings_max:
            self.client.dropped_by_pings += 1
            return False
        self.pings.append(now)
        self.output += self.client._ping(int(now * 1e9))
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

    def _handle(self, found: Any) -> None:
        client, kinds = self.client, self.client.kinds
        state = client._attachments.get(found.topic)
        if found.type == kinds.ack:
            self._acknowledged(found)
        elif found.type == kinds.pong:
            client.latencies_s.append(time.monotonic() - self.pings.popleft())
        elif found.type == kinds.detached:
            client._detaching.discard(found.topic)
        elif found.type == kinds.attached and state is not None:
            position = client._position_of(found)
            client._on_attached(found.topic, state.asked, position)
            state.attached, state.position = True, position
        elif found.type == kinds.data and state is not None and state.attached:
            state.position = client._position_of(found)
            client._on_data(found.topic, state.position, found.data)

    def _acknowledged(self, ack: Any) -> None:
        client = self.client
        kept: deque[Pending] = deque()
        for pending in client._unacked:
            if client._covers(ack, pending):
                client._on_ack(pending.topic, pending.note)
            else:
                kept.append(pending)
        client._unacked = kept
