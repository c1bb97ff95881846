"""The Logux protocol (0.0) of one client over all its connections, without I/O, stores or clocks.

    closed ──opened()──▶ greeting ──connected──▶ verifying ──accept()──▶ open        any ──▶ over, closed

The client sends `connect` first, and nothing else before `connected`. If the peer has to be verified, its
messages wait until then. An `auth` error, or a peer of another version, ends all connections.

The session keeps two positions, each in the numbers of one log:

- `received`: how much of the peer's log we have. It follows the numbers of the peer's `sync` messages when
  their events are stored. A number in `ping` or `pong` may raise it when everything before it is stored.
- How much of our log the peer has. One `sync` is under way at a time, and events that are added meanwhile go
  with the next. Our own `ping` and `pong` never name an event that was not sent yet, because a peer regards
  the events up to that number as sent.

The driver of the session stores the events of `ReceivedEvents` and calls `stored`. It looks for the events
that the session `wants`, calls `offer` with them, and calls `added` for every new event in the local log.
"""

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from headrace.payload.logux import Created, Event, Number, plain
from headrace.session.client import (
    AUTH,
    PROTOCOL,
    Broken,
    ConnectionRefused,
    Finished,
    GreetingSession,
    Stage,
)
from headrace.wire.logux import messages as logux

VERSION = (0, 0)

PING_INTERVAL_S = 5.0
PINGS_UNANSWERED_MAX = 4

_ANSWERS_MAX = 1000
"""Limit of messages that wait to be sent: a peer that asks and does not read gets no more answers."""
_NAME_MAX = 100

NUMBER_MAX = 1 << 53
"""Limit of the peer's positions and times: up to here, every integer is exact in any language."""

_VERSION_ERRORS = ("wrong-protocol", "wrong-subprotocol")


class Verify(NamedTuple):
    """Check that this is the intended peer, then call `accept` or `reject`."""

    host: str | Number
    credentials: Any


class Opened(NamedTuple):
    """The connection is open: events can be exchanged."""

    shift_ms: float
    """Milliseconds to add to our clock, as `now` tells it, to get the peer's clock."""


class ReceivedEvents(NamedTuple):
    """Store the events that are not stored yet, together with the number; then call `stored`."""

    number: Number
    events: list[tuple[Event, Created]]


class Passed(NamedTuple):
    """The peer's log has nothing more for us up to `received`: store the number at some later time."""

    received: Number


class EventsAcknowledged(NamedTuple):
    """The peer has all our events up to `number`; `events` of them are newly acknowledged."""

    number: int
    events: int


LoguxEvent = (
    Verify
    | Opened
    | ReceivedEvents
    | Passed
    | EventsAcknowledged
    | ConnectionRefused
    | Broken
    | Finished
)


class LoguxClientSession(GreetingSession[LoguxEvent]):
    GREETING = "connect"

    def __init__(
        self,
        host: str,
        credentials: Any = None,
        *,
        verifies: bool = False,
        received: Number = 0,
        last: int = 0,
        unsent: int | None = None,
        ping_interval_s: float = PING_INTERVAL_S,
        pings_unanswered_max: int = PINGS_UNANSWERED_MAX,
    ) -> None:
        """Create a session that is not connected.

        In the local log, `last` is the number of the last event, and `unsent` the number of the first event
        that is not sent, if there is one.
        """
        super().__init__(ping_interval_s, pings_unanswered_max)
        self.complaint = ""
        """Last error that the peer has sent on this connection."""
        self.received = received
        self._host = host
        self._credentials = credentials
        self._verifies = verifies
        self._last = last
        self._unsent = inf if unsent is None else float(unsent)
        """First event of ours that the peer is not known to have; inf if there is none."""
        self._out: list[bytes] = []
        self._greeted_at = inf
        self._shift_ms = 0.0
        self._held: list[logux.Message] = []
        """Messages that came while the peer was being verified."""
        self._unstored: deque[Number] = deque()
        """Numbers of the peer's `sync` messages that are not answered."""
        self._passed: Number | None = None
        """Number to which `received` may be raised when all `_unstored` are answered."""
        self._under_way: tuple[int, int] | None = None
        """Number of our `sync` that is not answered, and the count of its events."""
        self._next = self._unsent
        """First event of ours that was not sent on this connection; inf if there is none."""

    # Interface of `LinkedSession`

    @property
    def tick_at(self) -> float:
        return self._ping_at

    def opened(self, now: float) -> None:
        self._begin_greeting(now + self._ping_s * self._pings_unanswered_max)
        self.complaint = ""
        self._greeted_at = now
        message: list[Any] = ["connect", VERSION, self._host, self.received]
        credentials = self._credentials if self.token is None else self.token
        if credentials is not None:
            message.append(credentials)
        self._say(message)

    def receive_data(self, chunks: Sequence[bytes], now: float) -> list[LoguxEvent]:
        """Each chunk is a message in MessagePack."""
        events: list[LoguxEvent] = []
        for chunk in chunks:
            self._heard(now)
            self._hear(chunk, now, events)
        return events

    def data_to_send(self, bytes_max: int, now: float) -> list[bytes]:
        messages, self._out = self._out, []
        return messages

    # Calls of the driver

    def accept(self, now: float) -> list[LoguxEvent]:
        """Accept the peer as the intended one, and handle the messages that it sent in the meantime."""
        events: list[LoguxEvent] = []
        if self._stage is Stage.VERIFYING:
            self._open(now, events)
            held, self._held = self._held, []
            for message in held:
                self._hear(message, now, events)
        return events

    def reject(self, reason: str) -> list[LoguxEvent]:
        """Reject the peer: it is not the intended one."""
        events: list[LoguxEvent] = []
        if self._stage is Stage.VERIFYING:
            self._say(["error", "Wrong credentials", AUTH])
            self._refuse(AUTH, reason, events)
        return events

    def stored(self, number: Number) -> list[LoguxEvent]:
        """Note that the oldest unstored `ReceivedEvents` of this connection is stored now."""
        assert number == self._unstored[0], (number, self._unstored)
        self._unstored.popleft()
        # The number may be smaller than before: if a peer starts to count again, we follow.
        self.received = number
        self._say(["synced", number])
        return self._pass()

    def added(self, number: int, *, own: bool) -> None:
        """Note a new event in the local log; `own`: the event is to be sent to the peer."""
        self._last = number
        if own:
            self._unsent = min(self._unsent, number)
            self._next = min(self._next, number)

    @property
    def wants(self) -> int | None:
        """Number of the first event to look for and give with `offer`; None if no event can be sent now."""
        if self._stage is not Stage.OPEN or self._under_way is not None or self._next == inf:
            return None
        return int(self._next)

    def offer(self, events: Sequence[tuple[int, Event, Created]], rest: int | None) -> None:
        """Send events with their numbers, beginning with `wants`; `rest`: the number of the next event."""
        assert self.wants == events[0][0]
        self._next = inf if rest is None else rest
        number = events[-1][0]
        self._under_way = number, len(events)
        message: list[Any] = ["sync", number]
        for _, event, created in events:
            message += (event, created)
        self._say(message)

    # Messages

    def _hear(self, message: bytes | logux.Message, now: float, events: list[LoguxEvent]) -> None:
        if self._stage in (Stage.CLOSED, Stage.OVER):
            return
        try:
            if isinstance(message, bytes):
                message = logux.decode(message, binary=True)
            self._take(message, now, events)
        except logux.BadLoguxMessageError as error:
            self._say(["error", str(error), PROTOCOL])
            self._finish(f"the server broke the protocol: {error}", events)

    def _take(self, message: logux.Message, now: float, events: list[LoguxEvent]) -> None:
        if isinstance(message, logux.Error):
            self._error(message.fields, events)
        elif self._stage is Stage.VERIFYING:
            self._held.append(message)
        elif isinstance(message, logux.Connected):
            self._connected(message, now, events)
        elif not isinstance(message, logux.Sync | logux.Synced | logux.Ping | logux.Pong):
            name = logux.type_of(message)[:_NAME_MAX]
            self._answer(["error", f"Unknown message type `{name}`", PROTOCOL])
        elif self._stage is not Stage.OPEN:
            self._say(["error", "missed-auth", AUTH])
        elif isinstance(message, logux.Sync):
            number = _check_number(message.added)
            pairs = [(event, logux.check_created(time)) for event, time in message.events]
            self._unstored.append(number)
            events.append(ReceivedEvents(number, pairs))
        elif isinstance(message, logux.Synced):
            self._synced(message.synced, events)
        else:
            self._passed = _check_number(message.synced)
            events += self._pass()
            if isinstance(message, logux.Ping):
                self._answer(["pong", self._position])
            else:
                self._pong(now)

    def _connected(self, message: logux.Connected, now: float, events: list[LoguxEvent]) -> None:
        if self._stage is not Stage.GREETING:
            raise logux.BadLoguxMessageError("connected comes once")
        major, minor = message.version
        if major != VERSION[0]:
            text = f"Only {VERSION[0]}.x protocols are supported, but you use {major}.{minor}"
            self._say(["error", text, PROTOCOL])
            self._refuse(PROTOCOL, f"the server speaks version {major}.{minor}, not 0.x", events)
            return
        start, end = map(_check_number, message.times)
        # One way took half of the round trip, without the time that the peer itself needed.
        self._shift_ms = ((start + end) - (self._greeted_at + now) * 1000) / 2
        if self._verifies:
            self._stage = Stage.VERIFYING
            self._ping_at = inf
            events.append(Verify(message.host, message.options))
        else:
            self._open(now, events)

    def _open(self, now: float, events: list[LoguxEvent]) -> None:
        self._begin_exchange(now)
        events.append(Opened(self._shift_ms))

    def _synced(self, number: Number, events: list[LoguxEvent]) -> None:
        # A smaller number does not answer the `sync` under way, but a `pong`.
        if self._under_way is not None and number >= self._under_way[0]:
            events.append(EventsAcknowledged(*self._under_way))
            self._under_way = None
            self._unsent = self._next

    def _pass(self) -> list[LoguxEvent]:
        """Raise `received`, unless some received events are not stored yet."""
        if self._passed is None or self._unstored:
            return []
        passed, self._passed = self._passed, None
        if passed <= self.received:
            return []
        self.received = passed
        return [Passed(passed)]

    def _error(self, fields: list[Any], events: list[LoguxEvent]) -> None:
        """Handle an error in the form of 0.0, or of 0.1, which a newer server may use."""
        text, kind = fields[0], fields[1] if len(fields) > 1 else None
        self.complaint = text
        if kind == AUTH or text == "wrong-credentials":
            self._refuse(AUTH, f"the server refuses this client: {text}", events)
        elif text in _VERSION_ERRORS or (kind == PROTOCOL and self._stage is Stage.GREETING):
            self._refuse(PROTOCOL, f"the server refuses this client: {text}", events)

    def _forget_connection(self) -> None:
        super()._forget_connection()
        self._out.clear()
        self._held.clear()
        self._unstored.clear()
        self._passed = None
        self._under_way = None
        self._next = self._unsent

    @property
    def _position(self) -> int:
        """Last number of our log that may be named to the peer: no unsent event is at or below it."""
        return int(min(self._last, self._next - 1))

    def _send_ping(self) -> None:
        self._say(["ping", self._position])

    def _answer(self, message: list[Any]) -> None:
        """Send a message that may be dropped if the peer does not read."""
        if len(self._out) < _ANSWERS_MAX:
            self._say(message)

    def _say(self, message: list[Any]) -> None:
        self._out.append(logux.pack(message, binary=True))


def _check_number(number: Number) -> Number:
    if abs(number) > NUMBER_MAX:
        raise logux.BadLoguxMessageError(f"{number} is larger than any position or time")
    return plain(number)
