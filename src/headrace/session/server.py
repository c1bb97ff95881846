"""Interface of every server session, regardless of its protocol: the commands, and what awaits its ACK.

A connection (`headrace.server`) drives any session through this interface, so a new protocol needs only a new
session and a way to receive.

    open ──bad input──▶ refused ──every accepted publish acknowledged──▶ finished
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from headrace.errors import LocalProtocolError
from headrace.model import Refusal, RefusedPublish
from headrace.wire import readers, tokens, websocket


class NumberRange(NamedTuple):
    """A range of numbers. The numbers never wrap around."""

    lowest: int
    highest: int


@dataclass(slots=True, eq=False)
class Unit:
    """Publishes that came in one read. Their numbers never wrap around, so they can be compared."""

    lowest: int
    highest: int
    topics: Mapping[str, NumberRange] | None = None
    """By topic: the range of the topic's own numbers, if the protocol acknowledges by topic."""
    size: int = 0
    """Memory for the publishes in bytes, if the protocol remembers them."""
    arrival: int = 0
    """Number of units that came before this one."""
    durable_at: int | None = None
    """Number of units that had come when this one became durable; None before."""


REPEATS_MAX = 1024
"""Limit of topics whose repeated publishes are remembered until they may be acknowledged again."""


class Units:
    """The publishes of one connection that are not acknowledged yet; decides which may be acknowledged now.

    A *unit* is the publishes of one read. Units may become durable out of order, because topics may differ in
    durability. A durable unit waits for other units until its ACK is true for both kinds of clients:

    - A client with one counter for all topics takes ACK n as everything up to n. So no pending unit may hold
      a number at or below n. Where topics are acknowledged one by one, units that came after this unit was
      durable do not count: with one counter their numbers are higher, and with a counter for each topic they
      must not keep the other topics waiting forever.
    - A client with a counter for each topic takes ACK n of a topic as everything up to n in that topic. So no
      pending unit may hold a number at or below n in the same topic.
    """

    __slots__ = ("_arrived", "_news", "_repeats", "_units", "size")

    def __init__(self) -> None:
        self._units: list[Unit] = []
        """Units in the order of arrival."""
        self._arrived = 0
        self._repeats: dict[str, Unit] = {}
        """By topic: the highest number that was repeated. Its first copy is stored or being stored."""
        self._news = False
        """True if a unit has become durable, or a publish was repeated, since the last `take_ready`."""
        self.size = 0
        """Memory for the publishes of all units in bytes."""

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit) -> None:
        unit.arrival = self._arrived
        self._arrived += 1
        self._units.append(unit)
        self.size += unit.size

    def repeat(self, topic: str, number: int, number_of_topic: int) -> None:
        """Note a repeated publish. It is acknowledged again, like a durable unit."""
        known = self._repeats.get(topic)
        if known is None and len(self._repeats) >= REPEATS_MAX:
            return
        if known is not None and known.topics is not None:
            number = max(number, known.highest)
            number_of_topic = max(number_of_topic, known.topics[topic].highest)
        again = Unit(number, number, {topic: NumberRange(number_of_topic, number_of_topic)})
        again.durable_at = self._arrived
        self._repeats[topic] = again
        self._news = True

    def stored(self, unit: Unit) -> None:
        if unit.durable_at is not None:
            raise LocalProtocolError("a unit is stored once")
        unit.durable_at = self._arrived
        self._news = True

    def discard(self, unit: Unit) -> None:
        if unit in self._units:  # it is gone if a publish below it was refused
            self._units.remove(unit)
            self.size -= unit.size
        # Repeated publishes may belong to this unit, which is never stored.
        self._repeats.clear()

    def refuse(self, number: int) -> None:
        """Acknowledge nothing at or above this number, now or later: the publish with this number is refused.

        A client takes the acknowledgement of a higher number as one of this number too. Units are not split:
        if a client sends out of order and a unit also holds higher numbers, the client sends the unit again.
        """
        self._units = [one for one in self._units if one.highest < number]
        self.size = sum(one.size for one in self._units)
        self._repeats = {topic: one for topic, one in self._repeats.items() if one.highest < number}

    def take_ready(self) -> list[Unit]:
        """Remove and return the units that may be acknowledged now."""
        if not self._news:
            return []
        self._news = False
        waiting = [one for one in self._units if one.durable_at is None]
        if not waiting:
            ready, self._units = self._units, []
            ready += self._repeats.values()
            self._repeats = {}
        else:
            pending = _PendingUnits(waiting)
            ready = [one for one in self._units if pending.allow(one)]
            self._units = [one for one in self._units if not pending.allow(one)]
            for topic, one in list(self._repeats.items()):
                if pending.allow(one):
                    ready.append(self._repeats.pop(topic))
        self.size -= sum(one.size for one in ready)
        return ready


class _PendingUnits:
    """Pending units, in the order of arrival."""

    def __init__(self, waiting: list[Unit]) -> None:
        self._arrived = [one.arrival for one in waiting]
        self._lowest = list(accumulate((one.lowest for one in waiting), min))
        """Parallel to `_arrived`: the lowest number of this unit and all units before it."""
        self._by_topic: dict[str, int] = {}
        for one in waiting:
            for topic, numbers in (one.topics or {}).items():
                known = self._by_topic.get(topic, numbers.lowest)
                self._by_topic[topic] = min(known, numbers.lowest)

    def allow(self, one: Unit) -> bool:
        if one.durable_at is None:
            return False
        if one.topics is None:
            return one.highest < self._lowest[-1]
        before = bisect_left(self._arrived, one.durable_at)
        if before and self._lowest[before - 1] <= one.highest:
            return False
        by_topic = self._by_topic
        return all(
            topic not in by_topic or numbers.highest < by_topic[topic]
            for topic, numbers in one.topics.items()
        )


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


class Authenticate(NamedTuple):
    """Check a token, and answer with `authenticated` or `refuse_credentials`.

    No later command of this connection may be carried out before that. A further token renews the
    credentials of the connection.
    """

    token: str

    def __repr__(self) -> str:
        return "Authenticate(...)"  # a token must not reach a log


class Close(NamedTuple):
    """The peer broke the protocol: read no more, and close the connection when `finished`."""

    reason: str
    code: int = websocket.POLICY_VIOLATION
    """Close code, for protocols that can tell the peer a reason."""
    is_peers_fault: bool = True
    refused: Refusal | None = None
    """Reason why a publish of the peer is refused every time; None if it is closed for another reason."""


Command = Publish | AttachCommand | DetachCommand | readers.ToServer | Authenticate | Close


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
            units = self._publishes_under_way()
            units.discard(command.unit)
            # Its client would take the acknowledgement of a higher number as one of this publish.
            units.refuse(command.unit.lowest)

    def data_to_send(self) -> bytes:
        """Acknowledge what may be acknowledged now, and return all answers to send.

        They go out before any records that still wait.
        """
        if self._units is not None and (ready := self._units.take_ready()):
            self._acknowledge(ready)
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

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
    """A session whose peer attaches to topics, and may show a token."""

    __slots__ = ("_last_words",)

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._last_words = b""
        """Message to send when every accepted publish is acknowledged."""

    def authenticated(self, valid_ms: int = 0) -> None:
        """Answer that a token is accepted. It expires in `valid_ms`; 0: it does not expire."""
        self._out.append(self._encode_auth_answer(tokens.AuthOk(valid_ms)))

    def refuse_credentials(self, reason: str, code: int = tokens.CREDENTIALS) -> Close:
        """Refuse a token, or end a connection that has none, or whose credentials have expired.

        `code`: CREDENTIALS, LATER or FORBIDDEN of `wire/tokens.py`. The peer is told after its accepted
        publishes are acknowledged.
        """
        self._last_words = self._encode_auth_answer(tokens.AuthRefused(code, reason))
        return self.refuse(reason)

    def data_to_send(self) -> bytes:
        data = super().data_to_send()
        if self._last_words and self.finished:
            data += self._last_words
            self._last_words = b""
        return data

    def _take_publish(self, command: Publish, commands: list[Command]) -> None:
        """Add a publish to the commands of its read, at the front: a refused message must not lose it.

        But a publish that comes together with a token is carried out with the rights of that token.
        """
        if any(type(one) is Authenticate for one in commands):
            commands.append(command)
        else:
            commands.insert(0, command)

    @abstractmethod
    def _encode_auth_answer(self, answer: tokens.ToClient) -> bytes: ...

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
