"""A connection of any protocol: a transport, a session, its subscriptions. Decides how much goes out when.

Answers (ACK, PONG, ATTACHED) are written at once; records wait in this connection's own queue until the
transport has room, so that an answer has at most a bounded amount of them ahead of it. How bytes become
commands is left to `tcp.py` and `websocket.py`.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from headrace.broker.broker import Broker
from headrace.broker.readers import Claim, Readers
from headrace.broker.subscription import Slice, State, Subscription
from headrace.config import Limits
from headrace.model import Refusal
from headrace.server.health import Health
from headrace.server.metrics import Metrics
from headrace.server.refusals import Refusals
from headrace.server.turns import Turns
from headrace.session.server import Close, ServerSession
from headrace.session.units import Unit
from headrace.wire import websocket

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

COMMANDS_AT_ONCE_MAX = 20
"""Commands of one read that are carried out at once; others take turns with those of other connections."""
_PUMP_BYTES = 1 << 20
_PUMP_ITEMS = 500
"""What is done for one connection before the others have their turn."""
_TURN_S = 0.005
_CLOSE_TIMEOUT_S = 5.0
DISCARDED_BYTES_MAX = 16 << 20
"""Read and thrown away of a peer that goes on sending after the server has hung up."""
GOODBYE_TIMEOUT_S = 30.0
"""How long a peer that says no more, or is not listened to any more, may wait for its acknowledgements."""
_STOP_TIMEOUT_S = 1.0
_REFUSALS_LOGGED_EVERY_S = 1.0


class Connections:
    """What the connections of one server share, whatever their protocol."""

    def __init__(self, broker: Broker, limits: Limits, metrics: Metrics, health: Health) -> None:
        self.broker = broker
        self.readers = Readers(broker)
        self.health = health
        self.limits = limits
        self.metrics = metrics
        self.listeners: dict[str, str] = {}
        """The address of each listener, for peers that have come to the wrong one."""
        self.loop = asyncio.get_running_loop()
        self.turns = Turns(self.loop)
        self.open: set[Connection] = set()
        self.paused: set[Connection] = set()
        self.draining = False
        self._all_gone = asyncio.Event()
        self._refusal_logged_s: dict[str, float] = {}
        self.refusals = Refusals(self.loop, limits, metrics)

    @property
    def full(self) -> bool:
        """Whether a further connection is turned away."""
        return self.draining or len(self.open) >= self.limits.connections_max

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
        self.refusals.tick()

    def refused(self, peer: str, why: str = "connections_max is reached") -> None:
        """Count a connection that was turned away; a flood of them is one line a second."""
        self._count_refusal("connections_refused_total", f"{peer}: refused, {why}")

    def request_refused(self, peer: str, why: str) -> None:
        """The same for an HTTP request that breaks a limit."""
        self._count_refusal("http_requests_refused_total", f"{peer}: request refused, {why}")

    def _count_refusal(self, counter: str, message: str) -> None:
        self.metrics.count(counter)
        now_s = self.loop.time()
        if now_s >= self._refusal_logged_s.get(counter, 0.0) + _REFUSALS_LOGGED_EVERY_S:
            self._refusal_logged_s[counter] = now_s
            logger.warning("%s", message)

    def drain(self) -> None:
        """Read no more from anyone."""
        self.draining = True
        for connection in self.open:
            connection.pause(Pause.CLOSING)

    async def close(self) -> None:
        """Hang up on everyone, and wait a moment for them to hear it."""
        if self.open:
            self._all_gone.clear()
            for connection in list(self.open):
                connection.close("the server is stopping", websocket.GOING_AWAY)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), _STOP_TIMEOUT_S)
        self.refusals.close()

    def lost(self, connection: "Connection") -> None:
        self.open.discard(connection)
        self.paused.discard(connection)
        if not self.open:
            self._all_gone.set()


class Pause:
    """Why a connection is not read from: flags, as plain numbers, since they are asked for very often."""

    PUBLISHES = 1
    ANSWERS = 2
    COMMANDS = 4
    CLOSING = 8
    TURN = 16
    CHECKING = 32


class Connection:
    """Implements the broker's `Sink`."""

    __slots__ = (
        "_answering",
        "_claims",
        "_closed",
        "_commands",
        "_goodbye",
        "_goodbye_timer",
        "_heard_s",
        "_hold_timer",
        "_paused",
        "_pulling",
        "_pumping",
        "_queue",
        "_queued_bytes",
        "_session",
        "_shared",
        "_subscriptions",
        "_transport",
        "_turn_s",
        "_unacknowledged_bytes",
        "_writable",
        "peer",
    )
    protocol: str

    def __init__(self, shared: Connections, session: ServerSession) -> None:
        self._shared = shared
        self._session = session
        self._subscriptions: dict[str, Subscription] | None = None
        self._claims: dict[str, Claim] | None = None
        """Topics that are read, or waited for, under a name."""
        self._heard_s = shared.loop.time()
        """When the peer was last heard of, where its protocol has named readers."""
        self._queue: deque[tuple[Subscription, bytes]] | None = None
        self._pulling: dict[Subscription, None] | None = None
        self._queued_bytes = 0
        self._unacknowledged_bytes = 0
        self._writable = True
        self._paused = 0
        self._pumping = False
        self._turn_s = 0.0
        """When the first of several reads in a row was done; 0 in between."""
        self._answering = False
        self._closed = False
        self._commands: deque[tuple[object, int]] | None = None
        """What is still to be done, each with the size of the read that brought it."""
        self._goodbye: Close | None = None
        """Why this peer is being closed, as soon as what it published is acknowledged."""
        self._goodbye_timer: asyncio.TimerHandle | None = None
        self._hold_timer: asyncio.TimerHandle | None = None
        """While this peer is held for a publish that would be refused again: until when."""

    # The transport

    def opened(self, transport: asyncio.Transport) -> bool:
        """The peer is there; False when it was turned away."""
        self._transport = transport
        self.peer = peer_name(transport)
        shared = self._shared
        shared.metrics.count("connections_total")
        if shared.full:
            shared.refused(self.peer)
            transport.abort()
            return False
        shared.open.add(self)
        set_socket_options(transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX, low=UNSENT_BYTES_MAX // 4)
        return True

    def lost(self) -> None:
        self._shared.lost(self)
        for subscription in (self._subscriptions or {}).values():
            self._shared.broker.unsubscribe(subscription)
        self._subscriptions = self._queue = self._pulling = None
        self._writable = False
        self._release()
        if self._goodbye_timer is not None:
            self._goodbye_timer.cancel()

    def handle(self, commands: Sequence[object], size: int) -> None:
        """Carry out what one read of `size` bytes brought, behind what earlier ones did."""
        waiting = self._commands is not None
        if self._commands is None:
            self._commands = deque()
        self._commands.extend((command, size) for command in commands)
        if not waiting:
            self._carry_out()

    def _carry_out(self) -> None:
        """A part at a time when it is much."""
        commands = self._commands
        assert commands is not None
        is_over = self._goodbye is not None or self._closed or self._transport.is_closing()
        if self._closed or self._transport.is_closing():
            commands.clear()
        elif not commands and not is_over:
            commands.extend(self._decode_more())
        for _ in range(min(COMMANDS_AT_ONCE_MAX, len(commands))):
            if self._goodbye is not None:
                self._discard(commands)
                break
            command, size = commands.popleft()
            if isinstance(command, Close):
                self._refuse(command)
            else:
                self._do(command, size)
        if commands or (self._has_undecoded and not is_over):
            self.pause(Pause.COMMANDS)
            self._shared.turns.later(self._carry_out)
        else:
            self._commands = None
            if self._paused & Pause.COMMANDS:
                self._shared.turns.end()
                self._resume(Pause.COMMANDS)
        self._answer()

    @property
    def _has_undecoded(self) -> bool:
        """Whether there is more in what was read: a read may bring ten thousand commands."""
        return False

    def _decode_more(self) -> Sequence[tuple[object, int]]:
        """The next of these, each as in `_commands`."""
        return ()

    def _discard(self, commands: deque[tuple[object, int]]) -> None:
        """Nothing behind a refusal counts."""
        for command, _ in commands:
            self._session.discard(command)
        commands.clear()

    def more_to_read(self) -> None:
        """A read brought all it could: there is more, which others must not have to wait for.

        The loop goes on to read from this one, megabytes in one go; here that ends when it takes long.
        """
        now = time.monotonic()
        if not self._turn_s:
            self._turn_s = now
            self._shared.loop.call_soon(self._next_turn)
        elif now - self._turn_s > _TURN_S:
            self.pause(Pause.TURN)

    def _next_turn(self) -> None:
        self._turn_s = 0.0
        self._resume(Pause.TURN)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._resume(Pause.ANSWERS)
        if self._queue or self._pulling:
            self._pump_soon()

    # Commands

    def _do(self, command: object, size: int) -> None:
        """Carry out what a read of `size` bytes brought: a command of this connection's protocol."""
        raise NotImplementedError

    def _under_way(self, size: int) -> None:
        """So much was taken of the peer that is not stored yet."""
        self._unacknowledged_bytes += size
        if self._unacknowledged_bytes <= CROWDED_BYTES_MAX:
            return  # which is always little enough
        if not self._shared.may_read(self._unacknowledged_bytes):
            self.pause(Pause.PUBLISHES)
            self._shared.paused.add(self)

    def _stored(self, unit: Unit, size: int) -> None:
        self._unacknowledged_bytes -= size
        self._session.stored(unit)
        # One ACK for everything that one commit made durable.
        self._answer_soon()
        if self._paused & Pause.PUBLISHES:
            self.read_again()

    def read_again(self) -> None:
        """After a pause for publishes, with some room, so that not every commit pauses it anew."""
        if self._shared.may_read(2 * self._unacknowledged_bytes):
            self._shared.paused.discard(self)
            self._resume(Pause.PUBLISHES)

    def _drop(self, name: str) -> None:
        """End a subscription; what of it still waits here is passed over when its turn comes."""
        assert self._subscriptions is not None
        subscription = self._subscriptions.pop(name)
        self._shared.broker.unsubscribe(subscription)
        if self._pulling:
            self._pulling.pop(subscription, None)

    def _refuse(self, command: Close) -> None:
        held_s = 0.0
        if command.refused is not None:
            held_s = self._hold(command.reason, command.refused)
        elif command.is_peers_fault:
            self.count_refusal(command.reason)
        self._goodbye = command
        self.pause(Pause.CLOSING)
        # Commits may be held back for hours: nobody keeps a socket for so long who cannot use it.
        self._goodbye_timer = self._shared.loop.call_later(
            held_s + GOODBYE_TIMEOUT_S, self._transport.abort
        )

    def _hold(self, reason: str, why: Refusal) -> float:
        """Keep a peer that would send the same again from doing so at once; returns for how long."""
        shared = self._shared
        shared.metrics.count("connections_closed_for_bad_input_total")
        held_s = shared.refusals.hold(self, reason, why)
        if held_s:
            self._hold_timer = shared.loop.call_later(held_s, self.end_hold)
        return held_s

    def end_hold(self) -> None:
        """It was held long enough, or has left: close when what it published is acknowledged."""
        self._release()
        self._answer()

    def _release(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
            self._shared.refusals.release(self)

    @property
    def address(self) -> str:
        return self.peer.rpartition(":")[0]

    @property
    def fd(self) -> int:
        """The socket's; -1 without one."""
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def count_refusal(self, reason: str) -> None:
        logger.warning("%s: closing: %s", self.peer, reason)
        self._shared.metrics.count("connections_closed_for_bad_input_total")

    def _answer_soon(self) -> None:
        if not self._answering:
            self._answering = True
            self._shared.loop.call_soon(self._answer)

    def _answer(self) -> None:
        self._answering = False
        data = self._session.data_to_send()
        if data:
            self._write_answer(data)
        if self._goodbye is not None and self._hold_timer is None and self._session.finished:
            self.close(self._goodbye.reason, self._goodbye.code)

    def _write_answer(self, data: bytes) -> None:
        self._write(data)
        if self._transport.get_write_buffer_size() > ANSWERS_BYTES_MAX:
            self.pause(Pause.ANSWERS)

    def _write(self, data: bytes) -> None:
        # A peer may be gone before its publishes are durable, and uvloop raises on a closed transport.
        if data and not self._closed and not self._transport.is_closing():
            self._transport.write(data)

    def pause(self, why: int) -> None:
        """Read nothing until every reason not to is gone."""
        if not self._paused and not self._closed and not self._transport.is_closing():
            self._transport.pause_reading()
        self._paused |= why

    def _resume(self, why: int) -> None:
        if self._paused & why:
            self._paused &= ~why
            if not self._paused and not self._closed and not self._transport.is_closing():
                self._transport.resume_reading()
                self._reads_again(why)

    def _reads_again(self, why: int) -> None:
        """The pause is over: what the peer has sent meanwhile comes now."""

    def close(self, reason: str, code: int) -> None:
        """Say what is still to be said, and hang up."""
        if not self._closed and not self._transport.is_closing():
            self._write(self._session.data_to_send())
            self._say_goodbye(reason, code)
            self._hang_up()

    def _hang_up(self) -> None:
        self._release()
        self._closed = True
        hang_up(self._transport, self.lost)

    def _say_goodbye(self, reason: str, code: int) -> None:
        """Tell the peer why, where the protocol has words for it."""

    # The broker's sink

    def deliver(self, subscription: Subscription, slices: Sequence[Slice]) -> bool:
        for piece in slices:
            if self._writable and not self._queue:
                self._write(piece.data)
            else:
                if self._queued_bytes >= self._shared.limits.output_bytes_max:
                    return False
                if self._queue is None:
                    self._queue = deque()
                self._queue.append((subscription, piece.data))
                self._queued_bytes += len(piece.data)
            subscription.offset, subscription.ordinal = piece.end, piece.end_ordinal
        return True

    def live(self, subscription: Subscription) -> None:
        """Most protocols do not say so."""

    def broken(self, subscription: Subscription) -> None:
        self.close("a fault of the server", websocket.INTERNAL_ERROR)

    def overtaken(self, subscription: Subscription) -> None:
        """Frames say where they lie: whoever reads them sees what is missing."""

    def ready(self, subscription: Subscription) -> None:
        if self._pulling is None:
            self._pulling = {}
        self._pulling[subscription] = None
        self._pump_soon()

    def _wants_more(self, subscription: Subscription) -> bool:
        """False for a subscription that `ready` is called for when it may go on."""
        return True

    def _pulled(self, subscription: Subscription) -> None:
        """What a subscription has passed is being written."""

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._shared.turns.later(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping = False
        self._pump()

    def _pump(self) -> None:
        """Write what waits while there is room; live records first, they were first."""
        written = 0
        until = time.monotonic() + _TURN_S
        for _ in range(_PUMP_ITEMS):
            if not self._writable or written > _PUMP_BYTES or time.monotonic() > until:
                break
            if self._queue:
                subscription, data = self._queue.popleft()
                self._queued_bytes -= len(data)
                if subscription.state is State.CLOSED:
                    continue
            elif self._pulling:
                subscription = next(iter(self._pulling))
                del self._pulling[subscription]
                data = self._shared.broker.pull(subscription)
                self._pulled(subscription)
                if data and subscription.state is State.RESUMING and self._wants_more(subscription):
                    self._pulling[subscription] = None
            else:
                return
            if data:
                self._write(data)
                written += len(data)
        if self._writable:
            self._pump_soon()


def hang_up(transport: asyncio.Transport, lost: Callable[[], None]) -> None:
    """Send what is written, then end; `lost` is called when it has ended.

    Until the peer hangs up too, what it still sends is read and thrown away: a socket that is closed with
    unread data is reset by the kernel, and the peer loses what was said to it last.
    """
    # Reading is stopped and started so that the loop reads for the new protocol.
    transport.pause_reading()
    transport.set_protocol(_Ending(transport, lost))
    transport.resume_reading()
    transport.write_eof()
    # But nobody waits for a peer that never reads.
    asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, transport.abort)


class _Ending(asyncio.Protocol):
    __slots__ = ("_bytes", "_lost", "_transport")

    def __init__(self, transport: asyncio.Transport, lost: Callable[[], None]) -> None:
        self._transport = transport
        self._lost = lost
        self._bytes = 0

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes > DISCARDED_BYTES_MAX:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


def peer_name(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if name else "unknown"


def set_socket_options(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _KERNEL_UNSENT_BYTES_MAX)
