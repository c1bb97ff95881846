"""The server's side of one Logux connection of the 0.x protocols, without I/O: messages in, commands out.

    new ──connect──▶ authenticating ──let in──▶ open        any ──refused──▶ closing

Two dialects share it, the seed's (0.0) and that of the npm packages (0.1): they differ in the shape of errors
and credentials, and the first message says which it is. A `sync` of a client may have several events, ours
have one each.

Clients raise the position they ask for next time to any number they see, so no `ping` or `pong` may name one
above `sent`. And when they connect again they send back what they got from us since our last `synced`: so
after each exchange we ask by a `ping` how far its own log reaches, and say `synced` to that.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from headrace.logux_envelope import (
    BadEnvelopeError,
    Created,
    Envelope,
    Event,
    Number,
    Stamp,
    encode_envelope,
    raw_event,
    stamp_of,
)
from headrace.session.server import Close, ServerSession
from headrace.session.units import Unit
from headrace.wire import logux, websocket

MAJOR = 0


class Authenticate(NamedTuple):
    """Find out whether this peer is let in, and say so with `let_in` or `turn_away`."""

    host: str | Number
    credentials: Any


class Follow(NamedTuple):
    """Send everything behind so many records, and what comes."""

    ordinal: int


class Incoming(NamedTuple):
    event: Event
    created: Created
    payload: bytes


class Add(NamedTuple):
    """Store these unless they are there; call `stored` with the unit when all are durable."""

    events: list[Incoming]
    unit: Unit


LoguxCommand = Authenticate | Follow | Add | Close


class _State(Enum):
    NEW = "new"
    AUTHENTICATING = "authenticating"
    OPEN = "open"


class _Dialect(Enum):
    UNKNOWN = "unknown"
    SEED = "0.0"
    NPM = "0.1"


class LoguxServerSession(ServerSession):
    __slots__ = (
        "_ask_again",
        "_asked",
        "_binary",
        "_connect",
        "_connected_ms",
        "_count",
        "_dialect",
        "_held",
        "_host",
        "_numbers",
        "_pongs",
        "_state",
        "closed",
        "peer",
        "sent",
    )

    def __init__(self, host: str) -> None:
        self.closed = False
        super().__init__(self)
        self._host = host
        self._state = _State.NEW
        self._dialect = _Dialect.UNKNOWN
        self._binary = False
        self._connect: logux.Connect | None = None
        self._connected_ms = 0
        self._held: list[logux.Message] = []
        """What came while it was not known yet whether the peer is let in."""
        self._count = 0
        self._numbers: dict[int, Number] = {}
        """The number of each `sync` that is not answered, by its unit."""
        self._pongs: set[int] = set()
        """Units that answer a `pong`, and are no reason to ask again."""
        self._asked = self._ask_again = False
        """Whether the peer was asked how far its log reaches, and has got more since."""
        self.peer: str | Number = ""
        self.sent = 0
        """How many records of the log the peer has, or is not to see: set by whoever sends them."""

    @property
    def binary(self) -> bool:
        """Whether the peer speaks MessagePack: it is answered in kind."""
        return self._binary

    def receive_messages(self, messages: Sequence[bytes | str], now_ms: int) -> list[LoguxCommand]:
        commands: list[LoguxCommand] = []
        for message in messages:
            if self.closed:
                break
            self._binary = isinstance(message, bytes)
            data = message if isinstance(message, bytes) else message.encode()
            try:
                self._receive(logux.decode(data, binary=self._binary), now_ms, commands)
            except (logux.BadMessageError, BadEnvelopeError) as error:
                commands.append(self._bad(str(error)))
        return commands

    def let_in(self, now_ms: int, credentials: Any = None) -> list[LoguxCommand]:
        """The peer may come in; what it has said meanwhile is heard now."""
        assert self._connect is not None and self._state is _State.AUTHENTICATING
        self._state = _State.OPEN
        version = [MAJOR, 1 if self._dialect is _Dialect.NPM else 0]
        message: list[Any] = ["connected", version, self._host, [self._connected_ms, now_ms]]
        if credentials is not None:
            is_npm = self._dialect is _Dialect.NPM
            message.append({"credentials": credentials} if is_npm else credentials)
        self._send(message)
        commands: list[LoguxCommand] = [Follow(int(self._connect.synced))]
        held, self._held = self._held, []
        try:
            for one in held:
                self._receive(one, now_ms, commands)
        except (logux.BadMessageError, BadEnvelopeError) as error:
            commands.append(self._bad(str(error)))
        return commands

    def turn_away(self) -> Close:
        self._error("Wrong credentials", "auth", ["wrong-credentials"])
        return self.refuse("wrong credentials")

    def ping(self) -> None:
        """Ask whether the peer is there."""
        if self._state is _State.OPEN:
            self._send(["ping", self.sent])

    def discard(self, command: object) -> None:
        if isinstance(command, Add):
            self._publishes_under_way().discard(command.unit)
            del self._numbers[command.unit.lowest]

    # Messages

    def _receive(self, message: logux.Message, now_ms: int, commands: list[LoguxCommand]) -> None:
        if self._state is _State.AUTHENTICATING:
            self._held.append(message)
        elif isinstance(message, logux.Connect):
            commands.append(self._begin(message, now_ms))
        elif self._state is _State.NEW:
            self._send(["error", "missed-auth", "auth"])
        elif isinstance(message, logux.Sync):
            commands.append(self._sync(message))
        elif isinstance(message, logux.Synced):
            self._ask()
        elif isinstance(message, logux.Ping):
            self._send(["pong", self.sent])
        elif isinstance(message, logux.Pong):
            self._pong(message.synced)
        elif not isinstance(message, logux.Error):
            name = message.type if isinstance(message, logux.Unknown) else _name(message)
            text = f"Unknown message type `{name}`"
            self._error(text, "protocol", ["unknown-message", name])

    def _begin(self, message: logux.Connect, now_ms: int) -> LoguxCommand:
        if self._state is not _State.NEW:
            return self._bad("connect comes once")
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
        self._connect, self._connected_ms, self.peer = message, now_ms, message.host
        self._state = _State.AUTHENTICATING
        return Authenticate(message.host, credentials)

    def _sync(self, message: logux.Sync) -> Add:
        events = []
        for event, time in message.events:
            created = logux.check_created(time)
            envelope = Envelope(raw_event(event), created=created, origin=self.peer)
            events.append(Incoming(event, created, encode_envelope(envelope)))
        # Clients of npm 0.1 send what they had to keep newest first.
        stamps = [stamp_of(one.created) for one in events]
        if all(stamp is not None for stamp in stamps):
            events = [one for _, one in sorted(zip(stamps, events, strict=True), key=_age)]
        return Add(events, self._unit(message.added))

    def _ask(self) -> None:
        """How far does your log reach? And: so far have you got ours."""
        if self._asked:
            self._ask_again = True
        else:
            self._asked = True
            self._send(["ping", self.sent])

    def _pong(self, position: Number) -> None:
        if self._asked:
            # Behind what it has sent us before: until that is stored, nothing up to here is.
            unit = self._unit(position)
            self._publishes_under_way().stored(unit)
            self._pongs.add(unit.lowest)
            self._asked = False
        if self._ask_again:
            self._ask_again = False
            self._ask()

    def _unit(self, number: Number) -> Unit:
        self._count += 1
        unit = Unit(self._count, self._count)
        self._numbers[self._count] = number
        self._publishes_under_way().add(unit)
        return unit

    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        """One for each: clients count them."""
        stored = False
        for unit in sorted(ready, key=lambda one: one.lowest):
            self._send(["synced", self._numbers.pop(unit.lowest)])
            stored |= unit.lowest not in self._pongs
            self._pongs.discard(unit.lowest)
        if stored:
            # Its own events lie before `sent` now: it need not get them when it comes again.
            self._ask()

    # Refusals

    def _bad(self, reason: str) -> Close:
        self._error(reason, "protocol", ["wrong-format", reason])
        return self.refuse(reason, websocket.PROTOCOL_ERROR)

    def _error(self, text: str, kind: str, npm: list[Any]) -> None:
        """In the shape that the peer understands; before it has said which, in one that all do."""
        if self._dialect is _Dialect.NPM:
            self._send(["error", *npm])
        elif self._dialect is _Dialect.SEED:
            self._send(["error", text, kind])
        else:
            self._send(["error", npm[0], kind])

    def _send(self, message: list[Any]) -> None:
        self._out.append(logux.encode(message, binary=self._binary))


def _age(item: tuple[Stamp | None, Incoming]) -> tuple[Number, Number]:
    stamp, _ = item
    assert stamp is not None
    return stamp.ms, stamp.number


def _name(message: logux.Message) -> str:
    return type(message).__name__.lower()
