"""Server side of one Logux connection of the 0.x protocols, without I/O: messages in, commands out.

There are two dialects, the seed's (0.0) and that of the npm packages (0.1). They differ in the form of errors
and credentials, and the first message tells the dialect. A client's `sync` may have several events; each of
ours has one.

`synced` is the only acknowledgement. It answers one `sync`, repeats that message's number, and waits until
the events of this and every earlier `sync` are durable. The numbers in a client's `ping` and `pong` say how
far the client's own log reaches, which may be far ahead of what it has sent: they are never answered with
`synced`.

Clients raise the position they ask for next time to any number they see, so no `ping` or `pong` may name a
number above `sent`. When the last `sync` is answered, a `pong` tells the client that number. It covers the
client's own events, so that the client does not ask for them when it connects again. A `ping` would not do,
because npm clients fail if a message that they have to answer arrives while they disconnect.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from headrace.payload.logux import Envelope, Number, Stamp, encode_envelope, raw_event, stamp_of
from headrace.session.logux.shared import (
    AddEvents,
    AuthenticatePeer,
    Incoming,
    LoguxSession,
    message_name,
)
from headrace.session.server import Close
from headrace.session.units import Unit
from headrace.wire import websocket
from headrace.wire.logux import messages as logux

MAJOR = 0


class Follow(NamedTuple):
    """Send all records behind the first `ordinal` records of the log, and every new record."""

    ordinal: int


class _Dialect(Enum):
    UNKNOWN = "unknown"
    SEED = "0.0"
    NPM = "0.1"


class LoguxServerSession(LoguxSession):
    __slots__ = ("_dialect", "_synced")

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self._dialect = _Dialect.UNKNOWN
        self._synced: Number = 0
        """Number of records of our log that the peer had when it connected."""

    def turn_away(self) -> Close:
        self._error("Wrong credentials", "auth", ["wrong-credentials"])
        return self.refuse("wrong credentials")

    def _begin(self, message: logux.Connect) -> AuthenticatePeer | Close:
        major, minor = message.version
        options = message.options
        is_npm = isinstance(options, dict) and bool(options.keys() & {"credentials", "subprotocol"})
        if major == MAJOR:
            is_npm = minor >= 1
        self._dialect = _Dialect.NPM if is_npm else _Dialect.SEED
        if major != MAJOR:
            text = f"Only {MAJOR}.x protocols are supported, but you use {major}.{minor}"
            facts = {"supported": [MAJOR], "used": [major, minor]}
            self._error(text, "protocol", ["wrong-protocol", facts])
            return self.refuse(text)
        credentials = options
        if is_npm:
            credentials = options.get("credentials") if isinstance(options, dict) else None
        self._synced = self._told = message.synced
        return AuthenticatePeer(message.host, credentials)

    def _welcome(self, now_ms: int, credentials: Any) -> list[NamedTuple]:
        version = [MAJOR, 1 if self._dialect is _Dialect.NPM else 0]
        message: list[Any] = ["connected", version, self._host, [self._connected_ms, now_ms]]
        if credentials is not None:
            is_npm = self._dialect is _Dialect.NPM
            message.append({"credentials": credentials} if is_npm else credentials)
        self._send(message)
        return [Follow(int(self._synced))]

    def _synced_came(self, count: int) -> None:
        """Do nothing: the next `connect` tells how much of our log the peer has."""

    def _heard(self, message: logux.Message, now_ms: int, commands: list[NamedTuple]) -> None:
        if isinstance(message, logux.Sync):
            commands.append(self._sync(message))
        elif not isinstance(message, logux.Pong):
            name = message_name(message)
            text = f"Unknown message type `{name}`"
            self._error(text, "protocol", ["unknown-message", name])

    def _sync(self, message: logux.Sync) -> AddEvents:
        events = []
        for event, time in message.events:
            created = logux.check_created(time)
            envelope = Envelope(raw_event(event), created=created, origin=self.peer)
            events.append(Incoming(event, created, encode_envelope(envelope)))
        # Clients of npm 0.1 send the events that they had to keep in reverse order, the newest first.
        stamps = [stamp_of(one.created) for one in events]
        if all(stamp is not None for stamp in stamps):
            events = [one for _, one in sorted(zip(stamps, events, strict=True), key=_age)]
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
        if self._dialect is _Dialect.NPM:
            self._send(["error", *npm])
        elif self._dialect is _Dialect.SEED:
            self._send(["error", text, kind])
        else:
            self._send(["error", npm[0], kind])


def _age(item: tuple[Stamp | None, Incoming]) -> tuple[Number, Number]:
    stamp, _ = item
    assert stamp is not None
    return stamp.ms, stamp.number
