"""What every server session offers, whatever its protocol: its commands, and what they share.

A connection (`headrace.server`) drives any session through this, so that a further protocol is a further
session and a way to receive.

    open ──bad input──▶ refused ──every accepted publish acknowledged──▶ finished
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.model import Refusal, RefusedPublish
from headrace.session.units import Unit, Units
from headrace.wire import readers, websocket


class Publish(NamedTuple):
    """Store these; call `stored` with the unit when all of them are durable."""

    records: dict[str, list[bytes]]
    unit: Unit


class Attach(NamedTuple):
    topic: str
    offset: int | None
    """None: from the end of the topic."""
    epoch: int | None = None
    """The life of the topic that the offset belongs to, where the peer named one."""
    serial: str | None = None
    """How the peer wrote both, where it is to be answered in its own words."""


class Detach(NamedTuple):
    topic: str


class Close(NamedTuple):
    """The peer broke the protocol: read no more, close when `finished`."""

    reason: str
    code: int = websocket.POLICY_VIOLATION
    """For protocols that can say why."""
    is_peers_fault: bool = True
    refused: Refusal | None = None
    """Why a publish of this peer is refused however often it comes; None: it is closed for another reason."""


Command = Publish | Attach | Detach | readers.ToServer | Close


class Decoder(Protocol):
    closed: bool
    """Whether everything that still comes is ignored."""


class BadPublish(Protocol):
    """What a decoder says of a message that it cannot take."""

    @property
    def reason(self) -> str: ...

    @property
    def refused(self) -> RefusedPublish | None: ...


class ServerSession(ABC):
    """The protocol state of one peer, on the server's side."""

    __slots__ = ("_decoder", "_out", "_units")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._units: Units | None = None
        self._out: list[bytes] = []

    @abstractmethod
    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        """Answer for units that may be acknowledged by now."""

    def refuse(self, reason: str, code: int = websocket.POLICY_VIOLATION) -> Close:
        """Take nothing more from this peer."""
        self._decoder.closed = True
        return Close(reason, code)

    def refuse_publish(self, bad: BadPublish, number: int | None, code: int) -> Close:
        """The same for what cannot be read; a refused publish is never acknowledged, nor what is above it."""
        if bad.refused is None:
            return self.refuse(bad.reason, code)
        if number is not None and self._units is not None:
            self._units.refuse(number)
        return self.refuse(bad.reason, code)._replace(refused=bad.refused.why)

    def stored(self, unit: Unit) -> None:
        """All publishes of the unit are durable."""
        self._publishes_under_way().stored(unit)

    def discard(self, command: object) -> None:
        """This is not carried out, and never acknowledged: its connection is being closed."""
        if isinstance(command, Publish):
            self._publishes_under_way().discard(command.unit)

    def data_to_send(self) -> bytes:
        """Answers; they go out ahead of any records that still wait."""
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
        """Whether nothing more is taken from this peer."""
        return self._decoder.closed

    @property
    def finished(self) -> bool:
        """Whether every publish that was accepted is acknowledged."""
        return not self._units

    def _publishes_under_way(self) -> Units:
        # Made when the first publish comes: most connections never send one.
        if self._units is None:
            self._units = Units()
        return self._units


class TopicSession(ServerSession):
    """A session whose peer attaches to topics."""

    __slots__ = ()

    @abstractmethod
    def attaching(self, command: Attach) -> None:
        """This is being done now: the next `attached` of its topic answers it, and none before."""

    @abstractmethod
    def attached(self, topic: str, epoch: int, offset: int, exact: bool) -> None:
        """Delivery begins here. `exact`: nothing lies between this and what was asked for."""

    @abstractmethod
    def detached(self, topic: str) -> None: ...

    @abstractmethod
    def tell_reader(self, message: readers.ToClient) -> None:
        """Say something about a named reader; records go out on their own."""
