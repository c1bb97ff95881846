"""Server side of one Logux connection, without I/O: the base of all protocols, and the 0.x protocols.

Protocol 5 is in `server5.py`. The 0.x protocols have two dialects, that of the first specification (0.0) and
that of the npm packages (0.1). They differ in the form of errors and credentials, and the first message tells
the dialect. A client's `sync` may have several events; each of ours has one.

`synced` is the only acknowledgement. It answers one `sync`, repeats that message's number, and waits until
the events of this and every earlier `sync` are durable. The numbers in a client's `ping` and `pong` say how
far the client's own log reaches, which may be far ahead of what it has sent: they are never answered with
`synced`.

Clients raise the position they ask for next time to any number they see, so no `ping` or `pong` may name a
number above `sent`. When the last `sync` is answered, a `pong` tells the client that number. It covers the
client's own events, so that the client does not ask for them when it connects again. A `ping` would not do,
because npm clients fail if a message that they have to answer arrives while they disconnect.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.payload.logux import (
    BadEnvelopeError,
    Created,
    Envelope,
    Event,
    Number,
    encode_envelope,
    raw_event,
    stamp_of,
)
from headrace.session.server import Close, GreetedSession, PeerState, Unit
from headrace.wire import websocket
from headrace.wire.logux import messages as logux

MAJOR = 0


class AuthenticatePeer(NamedTuple):
    """Check the peer's credentials, then call `let_in` or `turn_away`."""

    host: str | Number
    credentials: Any


class Incoming(NamedTuple):
    event: Event
    created: Created
    payload: bytes


class AddEvents(NamedTuple):
    """Store the events that are not stored yet; call `stored` with the unit when all are durable."""

    events: list[Incoming]
    unit: Unit


class LoguxSession(GreetedSession):
    """Base of the server sessions of all Logux protocols."""

    __slots__ = ("_connected_ms", "_count", "_host", "_numbers", "_told", "peer", "sent")

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host
        self._connected_ms = 0
        self._count = 0
        self._numbers: dict[int, Number] = {}
        """Number of each unanswered `sync`, by the number of its unit."""
        self.peer: str | Number = ""
        self.sent = 0
        """Number of records of the log that the peer has, or is not to see. The sending code sets it."""
        self._told: Number = 0
        """Last value of `sent` that the peer was told, or the number that the peer named itself."""

    def receive_messages(self, messages: Sequence[bytes | str], now_ms: int) -> list[NamedTuple]:
        commands: list[NamedTuple] = []
        plain_synced, synced = logux.plain_synced, 0
        for message in messages:
            if self.closed:
                break
            if type(message) is str and self._state is PeerState.OPEN and plain_synced(message):
                synced += 1
                continue
            if synced:
                self._synced_came(synced)
                synced = 0
            self.binary = isinstance(message, bytes)
            data = message if isinstance(message, bytes) else message.encode()
            try:
                self._receive(logux.decode(data, binary=self.binary), now_ms, commands)
            except (logux.BadLoguxMessageError, BadEnvelopeError) as error:
                commands.append(self._bad(str(error)))
        if synced and not self.closed:
            self.binary = False
            self._synced_came(synced)
        return commands

    def let_in(self, now_ms: int, credentials: Any = None) -> list[NamedTuple]:
        """Accept the peer, and handle the messages that it sent in the meantime."""
        held = self._let_in()
        commands = self._welcome(now_ms, credentials)
        try:
            for one in held:
                self._receive(one, now_ms, commands)
        except (logux.BadLoguxMessageError, BadEnvelopeError) as error:
            commands.append(self._bad(str(error)))
        return commands

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        if self._state is PeerState.OPEN:
            self._tell("ping")

    def discard(self, command: object) -> None:
        if isinstance(command, AddEvents):
            self._publishes_under_way().discard(command.unit)
            del self._numbers[command.unit.lowest]

    # Hooks for the protocols

    @abstractmethod
    def _begin(self, message: logux.Connect) -> NamedTuple:
        """Handle a `connect`. Returns `AuthenticatePeer` or `Close`."""

    @abstractmethod
    def _welcome(self, now_ms: int, credentials: Any) -> list[NamedTuple]: ...

    @abstractmethod
    def _heard(self, message: logux.Message, now_ms: int, commands: list[NamedTuple]) -> None:
        """Handle a message of an accepted peer."""

    @abstractmethod
    def _synced_came(self, count: int) -> None:
        """Note that the peer has stored the next `count` messages that were sent."""

    @abstractmethod
    def _bad(self, reason: str) -> Close: ...

    # Messages

    def _receive(self, message: logux.Message, now_ms: int, commands: list[NamedTuple]) -> None:
        if self._state is PeerState.AUTHENTICATING:
            self._held.append(message)
        elif self._state is PeerState.OPEN:
            if isinstance(message, logux.Connect):
                commands.append(self._bad("connect comes once"))
            elif isinstance(message, logux.Ping):
                self._tell("pong")
            elif isinstance(message, logux.Synced):
                self._synced_came(1)
            elif not isinstance(message, logux.Error):
                self._heard(message, now_ms, commands)
        elif isinstance(message, logux.Connect):
            self._connected_ms, self.peer = now_ms, message.host
            command = self._begin(message)
            if isinstance(command, AuthenticatePeer):
                self._state = PeerState.AUTHENTICATING
            commands.append(command)
        elif not isinstance(message, logux.Headers):
            self._send(["error", "missed-auth", "auth"])

    def _unit(self, number: Number) -> Unit:
        """Create the unit of a `sync`: it is answered when this unit and all units before it are stored."""
        self._count += 1
        unit = Unit(self._count, self._count)
        self._numbers[self._count] = number
        self._publishes_under_way().add(unit)
        return unit

    def _tell(self, name: str) -> None:
        """Send a `ping` or `pong` that says how much of the log the peer has."""
        self._told = self.sent
        self._send([name, self.sent])

    def _send(self, message: list[Any]) -> None:
        self._out.append(logux.encode(message, binary=self.binary))


class Follow(NamedTuple):
    """Send all records behind the first `ordinal` records of the log, and every new record."""

    ordinal: int


class LoguxServerSession(LoguxSession):
    __slots__ = ("_is_npm", "_synced")

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self._is_npm: bool | None = None
        """True for the dialect of npm (0.1), False for the seed's (0.0); None before the first message."""
        self._synced: Number = 0
        """Number of records of our log that the peer had when it connected."""

    def turn_away(self) -> Close:
        self._error("Wrong credentials", "auth", ["wrong-credentials"])
        return self.refuse("wrong credentials")

    def _begin(self, message: logux.Connect) -> AuthenticatePeer | Close:
        major, minor = message.version
        options = message.options
        is_object = isinstance(options, dict)
        self._is_npm = minor >= 1
        if major != MAJOR:
            self._is_npm = is_object and bool(options.keys() & {"credentials", "subprotocol"})
            text = f"Only {MAJOR}.x protocols are supported, but you use {major}.{minor}"
            facts = {"supported": [MAJOR], "used": [major, minor]}
            self._error(text, "protocol", ["wrong-protocol", facts])
            return self.refuse(text)
        if self._is_npm:
            options = options.get("credentials") if is_object else None
        self._synced = self._told = message.synced
        return AuthenticatePeer(message.host, options)

    def _welcome(self, now_ms: int, credentials: Any) -> list[NamedTuple]:
        version = [MAJOR, 1 if self._is_npm else 0]
        message: list[Any] = ["connected", version, self._host, [self._connected_ms, now_ms]]
        if credentials is not None:
            message.append({"credentials": credentials} if self._is_npm else credentials)
        self._send(message)
        return [Follow(int(self._synced))]

    def _synced_came(self, count: int) -> None:
        """Do nothing: the next `connect` tells how much of our log the peer has."""

    def _heard(self, message: logux.Message, now_ms: int, commands: list[NamedTuple]) -> None:
        if isinstance(message, logux.Sync):
            commands.append(self._sync(message))
        elif not isinstance(message, logux.Pong):
            name = logux.type_of(message)
            text = f"Unknown message type `{name}`"
            self._error(text, "protocol", ["unknown-message", name])

    def _sync(self, message: logux.Sync) -> AddEvents:
        events = []
        for event, time in message.events:
            created = logux.check_created(time)
            envelope = Envelope(raw_event(event), created=created, origin=self.peer)
            events.append(Incoming(event, created, encode_envelope(envelope)))
        # Clients of npm 0.1 send the events that they had to keep in reverse order, the newest first.
        if all(stamp_of(one.created) is not None for one in events):
            events.sort(key=lambda one: (one.created[0], one.created[2]))
        return AddEvents(events, self._unit(message.added))

    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        """Send one `synced` for each unit: clients count them."""
        for unit in sorted(ready, key=lambda one: one.lowest):
            self._send(["synced", self._numbers.pop(unit.lowest)])
        if self.finished and self.sent > self._told:
            self._tell("pong")

    # Refusals

    def _bad(self, reason: str) -> Close:
        self._error(reason, "protocol", ["wrong-format", reason])
        return self.refuse(reason, websocket.PROTOCOL_ERROR)

    def _error(self, text: str, kind: str, npm: list[Any]) -> None:
        """Send an error in the form of the peer's dialect; before this is known, in a form common to all."""
        if self._is_npm:
            self._send(["error", *npm])
        else:
            self._send(["error", npm[0] if self._is_npm is None else text, kind])
