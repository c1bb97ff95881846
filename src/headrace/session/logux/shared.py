"""Shared base of the server sessions of all Logux protocols, without I/O: one peer and its messages.

new ──connect──▶ authenticating ──let in──▶ open        any ──refused──▶ closing
"""

from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from headrace.payload.logux import BadEnvelopeError, Created, Event, Number
from headrace.session.server import Close, ServerSession
from headrace.session.units import Unit
from headrace.wire.logux import messages as logux


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


class _State(Enum):
    NEW = "new"
    AUTHENTICATING = "authenticating"
    OPEN = "open"


class LoguxSession(ServerSession):
    __slots__ = (
        *("_binary", "_connected_ms", "_count", "_held", "_host", "_numbers", "_state"),
        *("_told", "closed", "peer", "sent"),
    )

    def __init__(self, host: str) -> None:
        self.closed = False
        super().__init__(self)
        self._host = host
        self._state = _State.NEW
        self._binary = False
        self._connected_ms = 0
        self._held: list[logux.Message] = []
        """Messages that came while the peer's credentials were being checked."""
        self._count = 0
        self._numbers: dict[int, Number] = {}
        """Number of each unanswered `sync`, by the number of its unit."""
        self.peer: str | Number = ""
        self.sent = 0
        """Number of records of the log that the peer has, or is not to see. The sending code sets it."""
        self._told: Number = 0
        """Last value of `sent` that the peer was told, or the number that the peer named itself."""

    @property
    def binary(self) -> bool:
        """True if the peer uses MessagePack; the answers use the same encoding."""
        return self._binary

    @property
    def is_new(self) -> bool:
        """True while the peer has not identified itself."""
        return self._state is _State.NEW

    def receive_messages(self, messages: Sequence[bytes | str], now_ms: int) -> list[NamedTuple]:
        commands: list[NamedTuple] = []
        plain_synced, synced = logux.plain_synced, 0
        for message in messages:
            if self.closed:
                break
            if type(message) is str and self._state is _State.OPEN and plain_synced(message):
                synced += 1
                continue
            if synced:
                self._synced_came(synced)
                synced = 0
            self._binary = isinstance(message, bytes)
            data = message if isinstance(message, bytes) else message.encode()
            try:
                self._receive(logux.decode(data, binary=self._binary), now_ms, commands)
            except (logux.BadLoguxMessageError, BadEnvelopeError) as error:
                commands.append(self._bad(str(error)))
        if synced and not self.closed:
            self._binary = False
            self._synced_came(synced)
        return commands

    def let_in(self, now_ms: int, credentials: Any = None) -> list[NamedTuple]:
        """Accept the peer, and handle the messages that it sent in the meantime."""
        assert self._state is _State.AUTHENTICATING
        self._state = _State.OPEN
        commands = self._welcome(now_ms, credentials)
        held, self._held = self._held, []
        try:
            for one in held:
                self._receive(one, now_ms, commands)
        except (logux.BadLoguxMessageError, BadEnvelopeError) as error:
            commands.append(self._bad(str(error)))
        return commands

    @abstractmethod
    def turn_away(self) -> Close:
        """Refuse the peer: its credentials are wrong."""

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        if self._state is _State.OPEN:
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
        if self._state is _State.AUTHENTICATING:
            self._held.append(message)
        elif self._state is _State.OPEN:
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
                self._state = _State.AUTHENTICATING
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
        self._out.append(logux.encode(message, binary=self._binary))


def message_name(message: logux.Message) -> str:
    return message.type if isinstance(message, logux.Unknown) else type(message).__name__.lower()
