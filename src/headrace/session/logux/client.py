"""The Logux protocol (0.0) of one client over all its connections, without I/O, stores or clocks.

    closed ──opened()──▶ greeting ──connected──▶ verifying ──accept()──▶ open        any ──▶ over, closed

`connect` is said first, and nothing else before `connected`. Where the peer is to be verified, what it says
meanwhile waits. An `auth` error, or a peer of another version, is the end of all connections.

Two positions are kept, each in the numbers of one log:

- `received`: how much of the peer's log we have. It follows the numbers of its `sync`, when their events are
  stored; a number of `ping` or `pong` may raise it, once everything that came before it is stored.
- How much of ours the peer has. One `sync` is on its way at a time: what is added meanwhile goes with the
  next. Our own `ping` and `pong` never name an event that was not sent yet, because a peer takes
  what they name for sent.

Whoever drives the session stores what `Received` brings and calls `stored`, looks with `wants` for
events to `offer`, and tells of every event that comes into the local log (`added`).
"""

from collections import deque
from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import Any, NamedTuple

from headrace.logux_envelope import Created, Event, Number, plain
from headrace.session.client import Broken, ConnectionState, Finished
from headrace.wire import logux

VERSION = (0, 0)

PING_INTERVAL_S = 5.0
PINGS_UNANSWERED_MAX = 4

_ANSWERS_MAX = 1000
"""Messages that wait to be sent: to a peer that asks and does not read, no more is said."""
_NAME_MAX = 100

NUMBER_MAX = 1 << 53
"""Positions and times of the peer are at most this: up to here every number is exact in any language."""

AUTH = "auth"
PROTOCOL = "protocol"

_AUTH_ERRORS = ("wrong-credentials",)
_VERSION_ERRORS = ("wrong-protocol", "wrong-subprotocol")


class Verify(NamedTuple):
    """Find out whether this is the peer that is meant, and say so with `accept` or `reject`."""

    host: str | Number
    credentials: Any


class Opened(NamedTuple):
    """Events can be exchanged."""

    shift_ms: float
    """What must be added to the clock we were told, in milliseconds, to get the peer's."""


class Received(NamedTuple):
    """Store these unless they are there, and the number, together; then call `stored`."""

    number: Number
    events: list[tuple[Event, Created]]


class Passed(NamedTuple):
    """There is nothing more to get up to here: remember it when there is occasion."""

    received: Number


class Acknowledged(NamedTuple):
    """The peer has all our events up to this number, and so many of them since it last said so."""

    number: int
    events: int


class Refused(NamedTuple):
    """No connection will be of use: the peer does not take us, or we do not take it."""

    kind: str
    """`auth` or `protocol`."""
    reason: str


LoguxEvent = Verify | Opened | Received | Passed | Acknowledged | Refused | Broken | Finished


class _Stage(Enum):
    CLOSED = "closed"
    GREETING = "greeting"
    VERIFYING = "verifying"
    OPEN = "open"
    OVER = "over"
    """The last word is said; the connection is about to close."""


class LoguxClientSession:
    """Times are seconds of one clock."""

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
        """Numbers of the local log: of its `last` event, and of the first that is `unsent`, if one is."""
        self.state = ConnectionState.DISCONNECTED
        self.latency_s: float | None = None
        self.complaint = ""
        """What the peer has last said of us, on this connection."""
        self.received = received
        self._host = host
        self._credentials = credentials
        self._verifies = verifies
        self._ping_interval_s = ping_interval_s
        self._pings_unanswered_max = pings_unanswered_max
        self._last = last
        self._unsent = inf if unsent is None else float(unsent)
        """The first event of ours that the peer is not known to have."""
        self._stage = _Stage.CLOSED
        self._refused = False
        self._out: list[bytes] = []
        self._greeted_at = self._ping_at = inf
        self._pinged_at: float | None = None
        self._pings_unanswered = 0
        self._shift_ms = 0.0
        self._held: list[logux.Message] = []
        """What came while the peer was being verified."""
        self._unstored: deque[Number] = deque()
        """Numbers of its `sync` messages that are not answered."""
        self._passed: Number | None = None
        """What `received` may be raised to when they are."""
        self._under_way: tuple[int, int] | None = None
        """The number of our `sync` that is not answered, and how many events it has."""
        self._next = self._unsent
        """The first event of ours that was not sent on this connection."""

    # What a link asks of any session

    @property
    def tick_at(self) -> float:
        return self._ping_at

    def connecting(self) -> None:
        assert self.state is ConnectionState.DISCONNECTED, self.state
        self.state = ConnectionState.CONNECTING

    def opened(self, now: float) -> None:
        assert self.state is ConnectionState.CONNECTING and self._stage is _Stage.CLOSED
        self._stage = _Stage.GREETING
        self.complaint = ""
        self._greeted_at = now
        self._ping_at = now + self._ping_interval_s * self._pings_unanswered_max
        message: list[Any] = ["connect", VERSION, self._host, self.received]
        if self._credentials is not None:
            message.append(self._credentials)
        self._say(message)

    def hung_up(self, reason: str, now: float) -> list[LoguxEvent]:
        return []  # this protocol has words for what it does not take

    def disconnected(self) -> None:
        assert self.state is not ConnectionState.CLOSED
        refused = ConnectionState.REFUSED
        self.state = refused if self._refused else ConnectionState.DISCONNECTED
        self._forget_connection()

    def close(self) -> None:
        self.state = ConnectionState.CLOSED
        self._forget_connection()

    def receive_data(self, chunks: Sequence[bytes], now: float) -> list[LoguxEvent]:
        """Each chunk is a message in MessagePack."""
        events: list[LoguxEvent] = []
        for chunk in chunks:
            self._heard(now)
            self._hear(chunk, now, events)
        return events

    def tick(self, now: float, reading: bool = True) -> list[LoguxEvent]:
        if now < self._ping_at:
            return []
        if not reading:
            # What it says is not heard, so silence proves nothing. It is to hear of us, though.
            self._ping_at = now + self._ping_interval_s
            if self._stage is _Stage.OPEN:
                self._say(["ping", self._position])
            return []
        if self._stage is not _Stage.OPEN:
            self._ping_at = inf
            return [Broken("the server does not answer `connect`")]
        if self._pings_unanswered >= self._pings_unanswered_max:
            self._ping_at = inf
            return [Broken(f"{self._pings_unanswered} pings are unanswered")]
        self._pings_unanswered += 1
        self._pinged_at = now
        self._ping_at = now + self._ping_interval_s
        self._say(["ping", self._position])
        return []

    def data_to_send(self, bytes_max: int, now: float) -> list[bytes]:
        messages, self._out = self._out, []
        return messages

    # What the driver tells

    def accept(self, now: float) -> list[LoguxEvent]:
        """The peer is the one that is meant; what it has said meanwhile is heard now."""
        events: list[LoguxEvent] = []
        if self._stage is _Stage.VERIFYING:
            self._begin(now, events)
            held, self._held = self._held, []
            for message in held:
                self._hear(message, now, events)
        return events

    def reject(self, reason: str) -> list[LoguxEvent]:
        """It is not."""
        events: list[LoguxEvent] = []
        if self._stage is _Stage.VERIFYING:
            self._say(["error", "Wrong credentials", AUTH])
            self._refuse(AUTH, reason, events)
        return events

    def stored(self, number: Number) -> list[LoguxEvent]:
        """The oldest `Received` of this connection that was not stored yet is."""
        assert number == self._unstored[0], (number, self._unstored)
        self._unstored.popleft()
        # Also when it is smaller than before: a peer that counts anew is followed from the start.
        self.received = number
        self._say(["synced", number])
        return self._pass()

    def added(self, number: int, *, own: bool) -> None:
        """The local log has one more event; `own`: for the peer."""
        self._last = number
        if own:
            self._unsent = min(self._unsent, number)
            self._next = min(self._next, number)

    @property
    def wants(self) -> int | None:
        """From which number on events for the peer should be looked for, and given with `offer`."""
        if self._stage is not _Stage.OPEN or self._under_way is not None or self._next == inf:
            return None
        return int(self._next)

    def offer(self, events: Sequence[tuple[int, Event, Created]], rest: int | None) -> None:
        """Events for the peer from `wants` on, with their numbers; `rest`: the number of the next."""
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
        if self._stage in (_Stage.CLOSED, _Stage.OVER):
            return
        try:
            if isinstance(message, bytes):
                message = logux.decode(message, binary=True)
            self._take(message, now, events)
        except logux.BadMessageError as error:
            self._bad(str(error), events)

    def _take(self, message: logux.Message, now: float, events: list[LoguxEvent]) -> None:
        if isinstance(message, logux.Error):
            self._error(message.fields, events)
        elif self._stage is _Stage.VERIFYING:
            self._held.append(message)
        elif isinstance(message, logux.Connected):
            self._connected(message, now, events)
        elif isinstance(message, logux.Sync | logux.Synced | logux.Ping | logux.Pong):
            if self._stage is _Stage.OPEN:
                self._exchange(message, now, events)
            else:
                self._say(["error", "missed-auth", AUTH])
        else:
            name = _name(message)[:_NAME_MAX]
            self._answer(["error", f"Unknown message type `{name}`", PROTOCOL])

    def _connected(self, message: logux.Connected, now: float, events: list[LoguxEvent]) -> None:
        if self._stage is not _Stage.GREETING:
            raise logux.BadMessageError("connected comes once")
        major, minor = message.version
        if major != VERSION[0]:
            text = f"Only {VERSION[0]}.x protocols are supported, but you use {major}.{minor}"
            self._say(["error", text, PROTOCOL])
            self._refuse(PROTOCOL, f"the server speaks version {major}.{minor}, not 0.x", events)
            return
        start, end = map(_check_number, message.times)
        # Half of what the way there and back took, without what the peer took itself, was one way.
        self._shift_ms = ((start + end) - (self._greeted_at + now) * 1000) / 2
        if self._verifies:
            self._stage = _Stage.VERIFYING
            self._ping_at = inf
            events.append(Verify(message.host, message.options))
        else:
            self._begin(now, events)

    def _begin(self, now: float, events: list[LoguxEvent]) -> None:
        self._stage = _Stage.OPEN
        self._ping_at = now + self._ping_interval_s
        self.state = ConnectionState.CONNECTED
        events.append(Opened(self._shift_ms))

    def _exchange(
        self,
        message: logux.Sync | logux.Synced | logux.Ping | logux.Pong,
        now: float,
        events: list[LoguxEvent],
    ) -> None:
        if isinstance(message, logux.Sync):
            number = _check_number(message.added)
            pairs = [(event, logux.check_created(time)) for event, time in message.events]
            self._unstored.append(number)
            events.append(Received(number, pairs))
        elif isinstance(message, logux.Synced):
            self._synced(message.synced, events)
        else:
            self._passed = _check_number(message.synced)
            events += self._pass()
            if isinstance(message, logux.Ping):
                self._answer(["pong", self._position])
            elif self._pinged_at is not None:
                self.latency_s = now - self._pinged_at
                self._pinged_at = None

    def _synced(self, number: Number, events: list[LoguxEvent]) -> None:
        # What is smaller says nothing of the one under way: it answers a `pong`.
        if self._under_way is not None and number >= self._under_way[0]:
            events.append(Acknowledged(*self._under_way))
            self._under_way = None
            self._unsent = self._next

    def _pass(self) -> list[LoguxEvent]:
        """Raise `received`, unless there is something that is not stored yet."""
        if self._passed is None or self._unstored:
            return []
        passed, self._passed = self._passed, None
        if passed <= self.received:
            return []
        self.received = passed
        return [Passed(passed)]

    def _error(self, fields: list[Any], events: list[LoguxEvent]) -> None:
        """In the words of 0.0 or, as a newer server may not know better, of 0.1."""
        text, kind = fields[0], fields[1] if len(fields) > 1 else None
        self.complaint = text
        if kind == AUTH or text in _AUTH_ERRORS:
            self._refuse(AUTH, f"the server refuses this client: {text}", events)
        elif text in _VERSION_ERRORS or (kind == PROTOCOL and self._stage is _Stage.GREETING):
            self._refuse(PROTOCOL, f"the server refuses this client: {text}", events)

    # Endings

    def _refuse(self, kind: str, reason: str, events: list[LoguxEvent]) -> None:
        self._refused = True
        self._stage = _Stage.OVER
        self._ping_at = inf
        events += (Refused(kind, reason), Finished(reason))

    def _bad(self, reason: str, events: list[LoguxEvent]) -> None:
        self._stage = _Stage.OVER
        self._ping_at = inf
        self._say(["error", reason, PROTOCOL])
        events.append(Finished(f"the server broke the protocol: {reason}"))

    def _forget_connection(self) -> None:
        self._stage = _Stage.CLOSED
        self._ping_at = inf
        self._pinged_at = None
        self._pings_unanswered = 0
        self._out.clear()
        self._held.clear()
        self._unstored.clear()
        self._passed = None
        self._under_way = None
        self._next = self._unsent

    @property
    def _position(self) -> int:
        """How far our log reaches for the peer."""
        return int(min(self._last, self._next - 1))

    def _heard(self, now: float) -> None:
        """Whatever the peer says, it is there; before it has answered, only an answer counts."""
        self._pings_unanswered = 0
        if self._stage is _Stage.OPEN:
            self._ping_at = now + self._ping_interval_s

    def _answer(self, message: list[Any]) -> None:
        """What a peer that does not read it need not get."""
        if len(self._out) < _ANSWERS_MAX:
            self._say(message)

    def _say(self, message: list[Any]) -> None:
        self._out.append(logux.pack(message, binary=True))


def _check_number(number: Number) -> Number:
    if abs(number) > NUMBER_MAX:
        raise logux.BadMessageError(f"{number} is larger than any position or time")
    return plain(number)


def _name(message: logux.Message) -> str:
    return message.type if isinstance(message, logux.Unknown) else type(message).__name__.lower()
