"""A Figg connection: one socket, one session, its subscriptions. Decides only how much goes out when.

Answers (ACK, PONG, ATTACHED) are written at once; records wait in this connection's own queue until the
transport has room, so that an answer has at most a bounded amount of them ahead of it.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence
from enum import IntFlag
from typing import cast

from headrace.broker.broker import Broker
from headrace.broker.subscription import Slice, State, Subscription
from headrace.config import Limits
from headrace.errors import StoreFailedError
from headrace.server.metrics import Metrics
from headrace.session.figg_server import (
    Attach,
    Close,
    Command,
    Detach,
    FiggServerSession,
    Publish,
    Unit,
)
from headrace.wire import figg

logger = logging.getLogger(__name__)

UNSENT_BYTES_MAX = 1 << 18
"""What may lie in the transport ahead of an answer."""
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_KERNEL_UNSENT_BYTES_MAX = 1 << 17

UNACKNOWLEDGED_BYTES_MAX = 4 << 20
"""Publishes of one connection under way before it is no longer read: the next commit is milliseconds away."""
HELD_BACK_BYTES_MAX = 72 << 20
"""The same while commits are held back: the largest window a client has, 256 of the largest payloads, so
that a PING behind them is still read and answered."""
CROWDED_BYTES_MAX = 1 << 16
"""The same while all connections together have reached `publish_bytes_max`."""

ANSWERS_BYTES_MAX = 1 << 20
"""A peer that lets so much lie unread is not read from either."""

_COMMANDS_AT_ONCE = 100
_PUMP_BYTES = 1 << 20
_PUMP_ITEMS = 500
"""What is done for one connection before the others have their turn."""
_CLOSE_TIMEOUT_S = 5.0
_REFUSALS_LOGGED_EVERY_S = 1.0


class FiggListener:
    """What the connections of one server share."""

    def __init__(self, broker: Broker, limits: Limits, metrics: Metrics) -> None:
        self.broker = broker
        self.limits = limits
        self.metrics = metrics
        self.loop = asyncio.get_running_loop()
        self.connections: set[FiggConnection] = set()
        self.paused: set[FiggConnection] = set()
        self.draining = False
        self._refusal_logged_s = -_REFUSALS_LOGGED_EVERY_S

    def __call__(self) -> "FiggConnection":
        return FiggConnection(self)

    def may_read(self, unacknowledged_bytes: int) -> bool:
        """Whether a connection with so much under way is read from."""
        store = self.broker.store
        if store.pending_bytes > self.limits.publish_bytes_max:
            return unacknowledged_bytes <= CROWDED_BYTES_MAX
        held_back = bool(store.held_back)
        return unacknowledged_bytes <= (
            HELD_BACK_BYTES_MAX if held_back else UNACKNOWLEDGED_BYTES_MAX
        )

    def tick(self) -> None:
        """Read again from those that are no longer over a limit which has changed meanwhile."""
        for connection in list(self.paused):
            connection.read_again()

    def refused(self, peer: str) -> None:
        """Count a connection that was turned away; a flood of them is one line a second."""
        self.metrics.count("connections_refused_total")
        now_s = self.loop.time()
        if now_s - self._refusal_logged_s >= _REFUSALS_LOGGED_EVERY_S:
            self._refusal_logged_s = now_s
            logger.warning("%s: refused, connections_max is reached", peer)

    def drain(self) -> None:
        """Read no more from anyone."""
        self.draining = True
        for connection in self.connections:
            connection.pause(Pause.CLOSING)

    def close(self) -> None:
        for connection in list(self.connections):
            connection.close()


class Pause(IntFlag):
    """Why a connection is not read from."""

    PUBLISHES = 1
    ANSWERS = 2
    COMMANDS = 4
    CLOSING = 8


class FiggConnection(asyncio.Protocol):
    """Implements the broker's `Sink`."""

    __slots__ = (
        "_answering",
        "_listener",
        "_paused",
        "_pulling",
        "_pumping",
        "_queue",
        "_queued_bytes",
        "_refused",
        "_session",
        "_subscriptions",
        "_transport",
        "_unacknowledged_bytes",
        "_writable",
        "peer",
    )
    protocol = "figg"

    def __init__(self, listener: FiggListener) -> None:
        self._listener = listener
        self._session = FiggServerSession()
        self._subscriptions: dict[str, Subscription] | None = None
        self._queue: deque[tuple[Subscription, bytes]] | None = None
        self._pulling: dict[Subscription, None] | None = None
        self._queued_bytes = 0
        self._unacknowledged_bytes = 0
        self._writable = True
        self._paused = Pause(0)
        self._pumping = False
        self._answering = False
        self._refused = False

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else "unknown"
        listener = self._listener
        listener.metrics.count("connections_total")
        if listener.draining or len(listener.connections) >= listener.limits.connections_max:
            listener.refused(self.peer)
            self._transport.abort()
            return
        listener.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _KERNEL_UNSENT_BYTES_MAX)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX, low=UNSENT_BYTES_MAX // 4)

    def connection_lost(self, error: Exception | None) -> None:
        listener = self._listener
        listener.connections.discard(self)
        listener.paused.discard(self)
        for subscription in (self._subscriptions or {}).values():
            listener.broker.unsubscribe(subscription)
        self._subscriptions = self._queue = self._pulling = None
        self._writable = False

    def data_received(self, data: bytes) -> None:
        self._handle(deque(self._session.receive_data(data)), len(data))

    def _handle(self, commands: deque[Command], size: int) -> None:
        """Carry out what one read brought, a part at a time when it is much."""
        if self._transport.is_closing():
            return
        for _ in range(min(_COMMANDS_AT_ONCE, len(commands))):
            if self._refused:
                self._discard(commands)
                break
            command = commands.popleft()
            if isinstance(command, Publish):
                self._publish(command, size)
            elif isinstance(command, Attach):
                self._attach(command)
            elif isinstance(command, Detach):
                self._detach(command.topic)
            else:
                self._refuse(command)
        if commands:
            self.pause(Pause.COMMANDS)
            self._listener.loop.call_soon(self._handle, commands, size)
        else:
            self._resume(Pause.COMMANDS)
        self._answer()

    def _discard(self, commands: deque[Command]) -> None:
        """Nothing behind a refusal counts."""
        for command in commands:
            if isinstance(command, Publish):
                self._session.discard(command.unit)
        commands.clear()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._resume(Pause.ANSWERS)
        self._pump()

    # Commands

    def _publish(self, command: Publish, size: int) -> None:
        listener = self._listener
        records, unit = command
        listener.metrics.count("records_published_total", sum(map(len, records.values())))
        self._unacknowledged_bytes += size
        try:
            listener.broker.publish(records, lambda: self._stored(unit, size))
        except StoreFailedError:
            # Nothing is stored any more: without an acknowledgement the peer sends it again elsewhere.
            self._transport.abort()
            return
        if not listener.may_read(self._unacknowledged_bytes):
            self.pause(Pause.PUBLISHES)
            listener.paused.add(self)

    def _stored(self, unit: Unit, size: int) -> None:
        self._unacknowledged_bytes -= size
        self._session.stored(unit)
        if not self._answering:
            # One ACK for everything that one commit made durable.
            self._answering = True
            self._listener.loop.call_soon(self._answer)
        if self._paused & Pause.PUBLISHES:
            self.read_again()

    def read_again(self) -> None:
        """After a pause for publishes, with some room, so that not every commit pauses it anew."""
        if self._listener.may_read(2 * self._unacknowledged_bytes):
            self._listener.paused.discard(self)
            self._resume(Pause.PUBLISHES)

    def _attach(self, command: Attach) -> None:
        if self._subscriptions is None:
            self._subscriptions = {}
        if command.topic in self._subscriptions:
            self._drop(command.topic)
        elif len(self._subscriptions) >= self._listener.limits.topics_attached_max:
            self._refuse(self._session.refuse("topics_attached_max is reached"))
            return
        broker = self._listener.broker
        self._listener.metrics.count("subscriptions_total")
        # The broker answers through `attached`, which needs to know whose answer it is.
        self._subscriptions[command.topic] = broker.subscribe(
            self, command.topic, command.offset, figg.encode_data
        )

    def _detach(self, topic: str) -> None:
        if self._subscriptions and topic in self._subscriptions:
            self._drop(topic)
        self._session.detached(topic)

    def _drop(self, topic: str) -> None:
        """End a subscription; what of it still waits here is passed over when its turn comes."""
        assert self._subscriptions is not None
        subscription = self._subscriptions.pop(topic)
        self._listener.broker.unsubscribe(subscription)
        if self._pulling:
            self._pulling.pop(subscription, None)

    def _refuse(self, command: Close) -> None:
        logger.warning("%s: closing: %s", self.peer, command.reason)
        self._listener.metrics.count("connections_closed_for_bad_input_total")
        self._refused = True
        self.pause(Pause.CLOSING)

    def _answer(self) -> None:
        self._answering = False
        data = self._session.data_to_send()
        if data:
            self._write(data)
            if self._transport.get_write_buffer_size() > ANSWERS_BYTES_MAX:
                self.pause(Pause.ANSWERS)
        if self._refused and self._session.finished:
            self.close()

    def _write(self, data: bytes) -> None:
        # A peer may be gone before its publishes are durable, and uvloop raises on a closed transport.
        if not self._transport.is_closing():
            self._transport.write(data)

    def pause(self, why: Pause) -> None:
        """Read nothing until every reason not to is gone."""
        if not self._paused and not self._transport.is_closing():
            self._transport.pause_reading()
        self._paused |= why

    def _resume(self, why: Pause) -> None:
        if self._paused & why:
            self._paused &= ~why
            if not self._paused and not self._transport.is_closing():
                self._transport.resume_reading()

    def close(self) -> None:
        """Close when what was answered is out, but do not wait for a peer that never reads."""
        if not self._transport.is_closing():
            data = self._session.data_to_send()
            if data:
                self._transport.write(data)
            self._transport.close()
            self._listener.loop.call_later(_CLOSE_TIMEOUT_S, self._transport.abort)

    # The broker's sink

    def attached(self, subscription: Subscription, offset: int) -> None:
        self._session.attached(subscription.topic.name, offset)
        self._answer()

    def deliver(self, subscription: Subscription, slices: Sequence[Slice]) -> bool:
        for piece in slices:
            if self._writable and not self._queue:
                self._write(piece.data)
            else:
                if self._queued_bytes >= self._listener.limits.output_bytes_max:
                    return False
                if self._queue is None:
                    self._queue = deque()
                self._queue.append((subscription, piece.data))
                self._queued_bytes += len(piece.data)
            subscription.offset = piece.end
        return True

    def ready(self, subscription: Subscription) -> None:
        if self._pulling is None:
            self._pulling = {}
        self._pulling[subscription] = None
        self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._listener.loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping = False
        self._pump()

    def _pump(self) -> None:
        """Write what waits while there is room; live records first, they were first."""
        written = 0
        for _ in range(_PUMP_ITEMS):
            if not self._writable or written > _PUMP_BYTES:
                break
            if self._queue:
                subscription, data = self._queue.popleft()
                self._queued_bytes -= len(data)
                if subscription.state is State.CLOSED:
                    continue
            elif self._pulling:
                subscription = next(iter(self._pulling))
                del self._pulling[subscription]
                data = self._listener.broker.pull(subscription)
                if data and subscription.state is State.RESUMING:
                    self._pulling[subscription] = None
            else:
                return
            if data:
                self._write(data)
                written += len(data)
        if self._writable:
            self._pump_soon()
