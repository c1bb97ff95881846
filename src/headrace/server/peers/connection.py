"""A connection of any protocol: executes the commands of a session, and decides when its peer is read.

Answers (ACK, PONG, ATTACHED) are written at once. Elsewhere: records that wait for room (`output.py`), who
the peer is (`rights.py`), what all connections share (`connections.py`); `topic_connection.py` and
`websocket.py` turn bytes into commands.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from headrace.access.principals import Principal
from headrace.broker.broker import BrokerSubscription
from headrace.broker.readers import Claim
from headrace.server.peers.connections import CROWDED_BYTES_MAX, Connections
from headrace.server.peers.hangup import hang_up, peer_name
from headrace.server.peers.held import PARKED_S_MAX, TOO_MUCH
from headrace.server.peers.newcomers import GAVE_WAY
from headrace.server.peers.output import Output
from headrace.server.peers.pause import Pause
from headrace.server.peers.rights import PeerRights
from headrace.server.peers.sink import QuietSink
from headrace.server.peers.sockets import tune
from headrace.server.peers.tally import Who
from headrace.server.peers.throttle import Cost
from headrace.server.tls.transport import peer_certificate
from headrace.session.server import Close, ServerSession, Unit
from headrace.wire import websocket

logger = logging.getLogger(__name__)

ANSWERS_BYTES_MAX = 1 << 20
"""Unread answers of a peer, in bytes, above which the peer is not read either."""

COMMANDS_AT_ONCE_MAX = 20
"""Commands of one read that are executed at once. The rest take turns with other connections' commands."""
COMMAND_OVERHEAD_BYTES = 1024
"""Memory for a pending command besides what the peer has sent."""
_TURN_S = 0.005
GOODBYE_TIMEOUT_S = 30.0
"""Longest wait for the last acknowledgements after the peer stopped sending or the server stopped reading."""


class Connection(QuietSink):
    """Implements the broker's `Sink`, besides `attached` and `deliver`, which depend on the protocol."""

    __slots__ = (
        "_answering",
        "_claims",
        "_closed",
        "_commands",
        "_counted",
        "_denial",
        "_goodbye",
        "_goodbye_timer",
        "_heard_s",
        "_held_bytes",
        "_hold_timer",
        "_is_held",
        "_is_looking",
        "_knows_tokens",
        "_output",
        "_paused",
        "_session",
        "_shared",
        "_subscriptions",
        "_transport",
        "_turn_s",
        "_unacknowledged_bytes",
        "peer",
        "rights",
        "who",
    )
    protocol: str

    def __init__(self, shared: Connections, session: ServerSession) -> None:
        self._shared = shared
        self._session = session
        self._subscriptions: dict[str, BrokerSubscription] | None = None
        self._claims: dict[str, Claim] | None = None
        """By topic: the claim of a named reader, which reads or waits for its turn."""
        self._heard_s = shared.loop.time()
        """Time when the peer was last heard."""
        self._output = Output(shared, self)
        self._counted = 0
        """Number of subscriptions that the limits of all connections count."""
        self._unacknowledged_bytes = 0
        self._paused = 0
        self._turn_s = 0.0
        """Time of the first of several large reads in a row; 0 outside such a series."""
        self._answering = False
        self._closed = False
        self._commands: deque[tuple[object, int]] | None = None
        """Pending commands, each with the size of the read that brought it."""
        self._goodbye: Close | None = None
        """Reason for closing this peer, which happens once its publishes are acknowledged."""
        self._goodbye_timer: asyncio.TimerHandle | None = None
        self._hold_timer: asyncio.TimerHandle | None = None
        """Timer that ends the hold after a publish that would be refused again; None while not held."""
        self._is_held = False
        """True while the first of the pending commands waits for its turn at a rate or a quota."""
        self._held_bytes = 0
        """Memory for the pending commands since the first of them had to wait."""
        self._is_looking = False
        """True if `_look_ahead` is scheduled."""
        self.rights = PeerRights(shared.access, shared.broker.store)
        self._knows_tokens = False
        """True if the peer has shown a token in a message of Figg or Wombat."""
        self._denial: tuple[str, int] | None = None
        """Reason and code of a refusal that the peer is still to be told."""

    # Transport

    def opened(self, transport: asyncio.Transport) -> None:
        """Register the connected peer, or refuse it."""
        self._transport = transport
        self.peer = peer_name(transport)
        shared = self._shared
        if self.rights.principal is shared.access.anonymous:
            self.rights.identify(shared.access.certified(peer_certificate(transport)))
        self.who = Who.of(self.address, self.rights.principal)
        shared.metrics.count("connections_total")
        if shared.trace is not None:
            shared.trace.opened(self)
        if why := shared.why_refused(self.who):
            shared.refused(self.peer, why)
            transport.abort()
            return
        shared.make_room(self.who)
        shared.open.add(self)
        shared.tally.add(self.who)
        if self.rights.are_none:
            shared.strangers.add(self, self.who.address)
        shared.access.hold(self.rights.principal, self.credentials_ended)
        tune(transport)

    def lost(self) -> None:
        shared = self._shared
        shared.lost(self)
        shared.access.release(self.rights.principal, self.credentials_ended)
        shared.strangers.forget(self)
        if shared.trace is not None:
            shared.trace.lost(self)
        for subscription in (self._subscriptions or {}).values():
            shared.broker.unsubscribe(subscription)
        self._output.close()
        self._subscriptions = self._claims = None
        self._count_subscriptions()
        self._drop_commands()
        shared.throttle.lost(self)
        self._release()
        if self._goodbye_timer is not None:
            self._goodbye_timer.cancel()

    def handle(self, commands: Sequence[object], size: int) -> None:
        """Execute the commands of one read of `size` bytes, after those of earlier reads."""
        if self._commands is None:
            self._commands = deque((command, size) for command in commands)
            self._carry_out()
            return
        self._append([(command, size) for command in commands])
        if self._is_held:
            self._look_ahead_soon()
            self._answer_soon()

    def _append(self, commands: Sequence[tuple[object, int]]) -> None:
        """Add commands to those that are pending."""
        assert self._commands is not None
        self._commands.extend(commands)
        if self._held_bytes:
            self._hold(sum(self._weight(*one) for one in commands))
            if any(isinstance(one[0], Close) for one in commands):
                self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        """End the connection soon: its peer has left. A rate may hold publishes back for hours."""
        if self._goodbye_timer is None:
            self._goodbye_timer = self._shared.loop.call_later(
                GOODBYE_TIMEOUT_S, self._transport.abort
            )

    def _carry_out(self) -> None:
        """Execute pending commands, at most `COMMANDS_AT_ONCE_MAX` in one turn."""
        commands = self._commands
        assert commands is not None
        is_gone = self.is_gone
        is_over = is_gone or self._goodbye is not None
        if is_gone:
            self._drop_commands()
        elif not commands and not is_over:
            commands.extend(self._decode_more())
        for _ in range(min(COMMANDS_AT_ONCE_MAX, len(commands))):
            if self._goodbye is not None:
                self._discard_commands()
            if not commands:
                break  # the last command has ended the connection
            command, size = commands[0]
            if not isinstance(command, Close) and self._must_wait(command, size):
                break
            commands.popleft()
            if self._held_bytes:
                self._unhold(self._weight(command, size))
            if isinstance(command, Close):
                self._refuse(command)
            else:
                self._do(command, size)
        if self._is_held:
            self._look_ahead_soon()
            self._end_pause_for_commands()
        elif commands or (self._has_undecoded and not is_over):
            self.pause(Pause.COMMANDS)
            self._shared.turns.later(self._carry_out)
        else:
            self._unhold(self._held_bytes)
            self._commands = None
            self._end_pause_for_commands()
        self._answer()

    def _end_pause_for_commands(self) -> None:
        if self._paused & Pause.COMMANDS:
            self._shared.turns.end()
            self._resume(Pause.COMMANDS)

    # Publishers that are held back by a rate or a quota

    def _must_wait(self, command: object, size: int) -> bool:
        """True if the command, the first of those that are pending, waits for its turn until `go_on`."""
        throttle = self._shared.throttle
        if not throttle.is_active:
            return False
        cost = self._cost(command, size)
        if cost is None or throttle.admit(self, cost):
            return False
        self._is_held = True
        if not self._held_bytes:
            assert self._commands is not None
            self._hold(sum(self._weight(*one) for one in self._commands))
        return True

    def go_on(self) -> None:
        """Ask again: it is this connection's turn."""
        self._is_held = False
        if self._commands is not None:
            self._carry_out()

    def _cost(self, command: object, size: int) -> Cost | None:
        """Return what a publish uses of rates and quotas; None for other commands."""
        return None

    def _weight(self, command: object, size: int) -> int:
        """Estimate the memory of a command of a read of `size` bytes, at least as high as it is."""
        return size + COMMAND_OVERHEAD_BYTES

    def _hold(self, weight: int) -> None:
        memory = self._shared.held
        if memory.is_full_for(self._held_bytes):
            self._park(self._held_bytes + weight)
            return
        self._held_bytes += weight
        memory.bytes += weight
        if self._held_bytes > memory.connection_bytes_max and not self._paused & Pause.HELD:
            memory.stop_reading(self)
            self.pause(Pause.HELD)

    def _unhold(self, weight: int) -> None:
        if weight:
            memory = self._shared.held
            self._held_bytes -= weight
            memory.bytes -= weight
            if self._paused & Pause.HELD:
                self.hear_again()

    def hear_again(self) -> None:
        """End a pause for publishes that wait, if there is memory for more."""
        memory = self._shared.held
        # Some room must be free, so that not every publish causes a new pause.
        if self._paused & Pause.HELD and self._held_bytes <= memory.connection_bytes_max // 2:
            memory.reads_again(self)
            self._resume(Pause.HELD)

    def _park(self, weight: int) -> None:
        """Drop what waits, and read nothing more. The connection ends when there is memory for it."""
        self._discard_commands()
        close = self._session.refuse(TOO_MUCH, websocket.TRY_AGAIN_LATER)
        self._refuse(close._replace(is_peers_fault=False), PARKED_S_MAX)
        self._hold_timer = self._shared.loop.call_later(PARKED_S_MAX, self.end_hold)
        self._shared.held.park(self, weight)

    def _discard_pending(self) -> None:
        """Discard the commands that are not executed yet, and publishes that wait among them."""
        was_held = self._is_held
        self._discard_commands()
        if was_held:
            self._commands = None  # otherwise, `_carry_out` is scheduled

    def _discard_commands(self) -> None:
        for command, _size in self._commands or ():
            self._session.discard(command)
        self._drop_commands()

    def _drop_commands(self) -> None:
        if self._commands:
            self._commands.clear()
        self._unhold(self._held_bytes)
        self._is_held = False
        self._shared.throttle.forget(self)

    def _look_ahead_soon(self) -> None:
        if self._has_undecoded and not self._is_looking:
            self._is_looking = True
            self._shared.turns.later(self._look_ahead)

    def _look_ahead(self) -> None:
        """Decode more of what came behind a publish that waits: a PING there is answered."""
        self._is_looking = False
        if self._is_held and not self.is_gone:
            self._append(self._decode_more())
            self._look_ahead_soon()
            self._answer()

    @property
    def _has_undecoded(self) -> bool:
        """True if received bytes are not decoded yet: one read may contain ten thousand commands."""
        return False

    def _decode_more(self) -> Sequence[tuple[object, int]]:
        """Return the next commands from received bytes, in the form of `_commands`."""
        return ()

    def more_to_read(self) -> None:
        """Pause reading if large reads in a row take longer than `_TURN_S`, so that others need not wait.

        Called after a large read, which means that more data waits. Without a pause, the loop would read
        megabytes in a row from this connection.
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
        self._output.pause()

    def resume_writing(self) -> None:
        self._output.resume()
        self._resume(Pause.ANSWERS)

    # Access

    def identified(self, principal: Principal) -> None:
        """Note who the peer is: it has shown its credentials."""
        access = self._shared.access
        access.release(self.rights.principal, self.credentials_ended)
        self.rights.identify(principal)
        access.hold(principal, self.credentials_ended)
        self._shared.strangers.forget(self)
        before, self.who = self.who, Who.of(self.address, principal)
        shared = self._shared
        if self in shared.open:
            shared.tally.move(before, self.who, 1)
            shared.subscriptions.move(before, self.who, self._counted)
            if why := shared.tally.excess(self.who):
                self.handle([self._session.refuse(why)], 0)

    def end_stranger(self, limit: str) -> None:
        """End the connection: the peer has reached this limit and has not shown its credentials."""
        if not self.is_gone and self._goodbye is None:
            self._shared.metrics.count_limit(limit)
            reason = f"no credentials were shown in time (limits.{limit})"
            self.count_refusal(reason)
            self._turn_away_now(reason)

    def give_way(self) -> None:
        """End the connection at once: its peer has shown no credentials, and another one gets its place."""
        self._shared.refused(self.peer, f"no credentials were shown yet: {GAVE_WAY}")
        self._transport.abort()

    def credentials_ended(self, reason: str) -> None:
        """End the connection: the peer's credentials were revoked or have expired."""
        self.rights.publishable.clear()
        if not self.is_gone and self._goodbye is None:
            logger.info("%s: closing: %s", self.peer, reason)
            self._turn_away_now(reason, keeps_pending=False)
        elif self._hold_timer is not None:
            self._shared.loop.call_soon(self.end_hold)

    def _turn_away_now(self, reason: str, *, keeps_pending: bool = True) -> None:
        """End the connection. An internal error in this must not end the periodic work, which calls it."""
        try:
            if not keeps_pending:
                self._discard_pending()
            self.handle([self._turned_away(reason)._replace(is_peers_fault=False)], 0)
        except Exception:
            logger.exception("%s: internal error in the end of a connection", self.peer)
            self._transport.abort()

    def _turned_away(self, reason: str) -> Close:
        """Refuse the peer in the protocol's own terms, because of its credentials."""
        return self._session.refuse(reason)

    # Commands

    def _do(self, command: object, size: int) -> None:
        """Execute a command of this connection's protocol, which a read of `size` bytes brought."""
        raise NotImplementedError

    def _under_way(self, size: int) -> None:
        """Count `size` received bytes that are not stored yet, and pause reading above the limit."""
        self._unacknowledged_bytes += size
        if self._unacknowledged_bytes <= CROWDED_BYTES_MAX:
            return  # every limit allows this much
        if not self._shared.may_read(self._unacknowledged_bytes):
            self.pause(Pause.PUBLISHES)
            self._shared.paused.add(self)

    def _stored(self, unit: Unit, size: int) -> None:
        self._unacknowledged_bytes -= size
        self._session.stored(unit)
        # One ACK covers everything that one commit made durable.
        self._answer_soon()
        if self._paused & Pause.PUBLISHES:
            self.read_again()

    def read_again(self) -> None:
        """End a pause for publishes once there is some room, so that not every commit causes a new pause."""
        if self._shared.may_read(2 * self._unacknowledged_bytes):
            self._shared.paused.discard(self)
            self._resume(Pause.PUBLISHES)

    def _drop(self, name: str) -> None:
        """End a subscription. Its queued data is skipped when its turn comes."""
        assert self._subscriptions is not None
        subscription = self._subscriptions.pop(name)
        self._shared.broker.unsubscribe(subscription)
        self._count_subscriptions()
        self._output.forget(subscription)

    @property
    def _subscription_count(self) -> int:
        """Number of open subscriptions, and of whatever counts as one."""
        return len(self._subscriptions or ()) + len(self._claims or ())

    def _count_subscriptions(self) -> None:
        """Count changes of the number of subscriptions for everyone's limits."""
        count = self._subscription_count
        if count != self._counted:
            self._shared.subscriptions.add(self.who, count - self._counted)
            self._counted = count

    def _why_not_subscribed(self) -> str:
        """Return the reason why one more subscription is refused; empty if it is accepted."""
        return self._shared.subscriptions.refusal(self.who, self._subscription_count)

    def _refuse(self, command: Close, held_s: float = 0.0) -> None:
        shared = self._shared
        if command.refused is not None:
            shared.metrics.count("connections_closed_for_bad_input_total")
            # The peer would send the same publish again at once.
            held_s = shared.refusals.delay_close(self, command.reason, command.refused)
            if held_s:
                self._hold_timer = shared.loop.call_later(held_s, self.end_hold)
        elif command.is_peers_fault:
            self.count_refusal(command.reason)
        self._goodbye = command
        self.pause(Pause.CLOSING)
        # Commits may be held back for hours. A socket that the peer cannot use is not kept open until then.
        wait_s = held_s + GOODBYE_TIMEOUT_S
        if self._goodbye_timer is not None:
            self._goodbye_timer.cancel()
        self._goodbye_timer = shared.loop.call_later(wait_s, self._transport.abort)

    def end_hold(self) -> None:
        """End the hold: its time is over, or the peer left. Close once its publishes are acknowledged."""
        if self._held_bytes and not self.is_gone:
            self._wait_no_longer()  # its publishes still wait
        self._release()
        self._answer()

    def _release(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
            self._shared.refusals.release(self)
            self._shared.held.release(self)

    @property
    def state(self) -> str:
        """State for the metrics: open, paused, held or closing."""
        if self._hold_timer is not None:
            return "held"
        if self._goodbye is not None or self._closed:
            return "closing"
        return "paused" if self._paused else "open"

    @property
    def is_gone(self) -> bool:
        return self._closed or self._transport.is_closing()

    @property
    def address(self) -> str:
        return self.peer.rpartition(":")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which a trace can follow this connection."""
        return self.peer, self.address, str(self.rights.principal)

    @property
    def unfinished(self) -> bytes:
        """The beginning of a message that has arrived in part, for a trace."""
        return b""

    @property
    def only_topic(self) -> str | None:
        """The topic of all messages, if the protocol has one."""
        return None

    @property
    def fd(self) -> int:
        """File descriptor of the socket; -1 without a socket."""
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def count_refusal(self, reason: str) -> None:
        self._shared.closes(self.peer, self.address, reason, is_known=not self.rights.are_none)

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
        self.write(data)
        if self._transport.get_write_buffer_size() > ANSWERS_BYTES_MAX:
            self.pause(Pause.ANSWERS)

    def pause(self, why: int) -> None:
        """Stop reading until every reason for a pause is gone."""
        if not self._paused and not self.is_gone:
            self._transport.pause_reading()
        self._paused |= why

    @property
    def _is_unread(self) -> bool:
        """True if the server does not read. A pause for unread answers does not count: the peer causes it."""
        return bool(self._paused & ~Pause.ANSWERS)

    def _resume(self, why: int) -> None:
        if self._paused & why:
            self._paused &= ~why
            if not self._paused and not self.is_gone:
                self._transport.resume_reading()
                self._reads_again(why)

    def _reads_again(self, why: int) -> None:
        """Called when a pause is over: data that the peer has sent meanwhile arrives now."""

    def close(self, reason: str, code: int) -> None:
        """Send pending answers and the reason, then hang up."""
        if not self.is_gone:
            self.write(self._session.data_to_send())
            if self._shared.trace is not None:
                self._shared.trace.closes(self, reason)
            self._say_goodbye(reason, code)
            self._hang_up()

    def internal_error(self) -> None:
        """Close after an internal error, which the caller has logged."""
        self.close("a fault of the server", websocket.INTERNAL_ERROR)

    def _hang_up(self) -> None:
        self._release()
        self._closed = True
        self._drop_commands()
        hang_up(self._transport, self.lost)

    def _say_goodbye(self, reason: str, code: int) -> None:
        """Send the reason to the peer, if the protocol has a message for it."""

    # Sink for the broker

    def broken(self, subscription: BrokerSubscription) -> None:
        self.internal_error()

    def ready(self, subscription: BrokerSubscription) -> None:
        self._output.ready(subscription)

    # Receiver of the output

    def write(self, data: bytes) -> None:
        # A peer may leave before its publishes are durable, and uvloop raises on a closed transport.
        if data and not self._closed and not self._transport.is_closing():
            if self._shared.trace is not None:
                self._shared.trace.sent(self, data)
            self._transport.write(data)
