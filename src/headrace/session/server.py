"""Interface of every server session, regardless of its protocol: the commands and the shared state.

A connection (`headrace.server`) drives any session through this interface, so a new protocol needs only a new
session and a way to receive.

    open ──bad input──▶ refused ──every accepted publish acknowledged──▶ finished
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from headrace.model import Refusal, RefusedPublish
from headrace.session.units import Unit, Units
from headrace.wire import readers, websocket


class Publish(NamedTuple):
    """Store these records, and call `stored` with the unit when all of them are durable."""

    records: dict[str, list[bytes]]
    unit: Unit


class AttachCommand(NamedTuple):
    topic: str
    offset: int | None
    """None: from the end of the topic."""
    epoch: int | None = None
    """Epoch that the offset belongs to, if the peer named one."""
    serial: str | None = None
    """Epoch and offset as the peer wrote them, if the answer may repeat this text."""


class DetachCommand(NamedTuple):
    topic: str


class Close(NamedTuple):
    """The peer broke the protocol: read no more, and close the connection when `finished`."""

    reason: str
    code: int = websocket.POLICY_VIOLATION
    """Close code, for protocols that can tell the peer a reason."""
    is_peers_fault: bool = True
    refused: Refusal | None = None
    """Reason why a publish of the peer is refused every time; None if it is closed for another reason."""


Command = Publish | AttachCommand | DetachCommand | readers.ToServer | Close


class Decoder(Protocol):
    closed: bool
    """True if all further input is ignored."""


class ServerSession(ABC):
    """The protocol state of one peer, on the server's side."""

    __slots__ = ("_decoder", "_out", "_units")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._units: Units | None = None
        self._out: list[bytes] = []

    @abstractmethod
    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        """Answer for units that may be acknowledged now."""

    def refuse(self, reason: str, code: int = websocket.POLICY_VIOLATION) -> Close:
        """Accept nothing more from this peer."""
        self._decoder.closed = True
        return Close(reason, code)

    def refuse_publish(self, reason: str, code: int, refused: RefusedPublish | None) -> Close:
        """Refuse a bad message. A refused publish and all publishes above it are never acknowledged."""
        if refused is None:
            return self.refuse(reason, code)
        if refused.number is not None and self._units is not None:
            self._units.refuse(refused.number)
        return self.refuse(reason, code)._replace(refused=refused.why)

    def stored(self, unit: Unit) -> None:
        """Note that all publishes of the unit are durable."""
        self._publishes_under_way().stored(unit)

    def discard(self, command: object) -> None:
        """Drop a command that is not carried out and never acknowledged: its connection is being closed."""
        if isinstance(command, Publish):
            self._publishes_under_way().discard(command.unit)

    def data_to_send(self) -> bytes:
        """Return the answers to send. They go out before any records that still wait."""
        if self._units is not None and (ready := self._units.take()):
            self._acknowledge(ready)
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    @property
    def closing(self) -> bool:
        """True if nothing more is accepted from this peer."""
        return self._decoder.closed

    @property
    def finished(self) -> bool:
        """True if every accepted publish is acknowledged."""
        return not self._units

    def _publishes_under_way(self) -> Units:
        # Created for the first publish: most connections never publish.
        if self._units is None:
            self._units = Units()
        return self._units


class TopicSession(ServerSession):
    """A session whose peer attaches to topics."""

    __slots__ = ()

    @abstractmethod
    def attaching(self, command: AttachCommand) -> None:
        """Note that this is carried out now: the next `attached` of its topic answers it, and none before."""

    @abstractmethod
    def attached(self, topic: str, epoch: int, offset: int, exact: bool) -> None:
        """Answer that delivery begins here. `exact`: nothing lies between this and the place asked for."""

    @abstractmethod
    def detached(self, topic: str) -> None: ...

    @abstractmethod
    def tell_reader(self, message: readers.ToClient) -> None:
        """Send a message about a named reader. Records are sent separately."""


class PeerState(Enum):
    NEW = "new"
    AUTHENTICATING = "authenticating"
    OPEN = "open"


class GreetedSession(ServerSession):
    """A session whose peer says who it is, before anything else.

    new ──greeting──▶ authenticating ──let in──▶ open        any ──refused──▶ closing
    """

    __slots__ = ("_held", "_state", "binary", "closed")

    def __init__(self) -> None:
        self.closed = False
        super().__init__(self)
        self._state = PeerState.NEW
        self._held: list[Any] = []
        """Messages that came while the peer's credentials were being checked."""
        self.binary = False
        """True if the peer uses MessagePack; the answers use the same encoding."""

    @property
    def is_new(self) -> bool:
        """True while the peer has not identified itself."""
        return self._state is PeerState.NEW

    @abstractmethod
    def turn_away(self) -> Close:
        """Refuse the peer: its credentials are wrong."""

    def _let_in(self) -> list[Any]:
        """Accept the peer. Returns the messages that it sent in the meantime."""
        assert self._state is PeerState.AUTHENTICATING
        self._state = PeerState.OPEN
        held, self._held = self._held, []
        return held
