"""What every server session offers, whatever its protocol: one interface and its commands.

A connection (`headrace.server`) drives any session through this interface, so that a further protocol is a
further session and a way to receive. Here too is what they share about publishes: a *unit* is the publishes
of one read. ACK n may go out when no unit that is still under way holds a number at or below n, so units
that finish out of turn (topics may differ in durability) wait for the others.
"""

from typing import NamedTuple, Protocol

from headrace.errors import LocalProtocolError
from headrace.wire import websocket


class Unit:
    """Publishes that came in one read. Numbers are compared as they are: never wrapped."""

    __slots__ = ("done", "highest", "lowest", "topics")

    def __init__(self, lowest: int, highest: int, topics: dict[str, int] | None = None) -> None:
        self.lowest = lowest
        self.highest = highest
        self.topics = topics
        """The highest number of each topic, where a protocol acknowledges by topic."""
        self.done = False


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


Command = Publish | Attach | Detach | Close


class ServerSession(Protocol):
    """The protocol state of one peer, on the server's side."""

    def refuse(self, reason: str, code: int = websocket.POLICY_VIOLATION) -> Close:
        """Take nothing more from this peer."""

    def stored(self, unit: Unit) -> None:
        """All publishes of the unit are durable."""

    def discard(self, unit: Unit) -> None:
        """The unit is not stored, and never acknowledged: its connection is being closed."""

    def attaching(self, command: Attach) -> None:
        """This is being done now: the next `attached` of its topic answers it, and none before."""

    def attached(self, topic: str, epoch: int, offset: int, exact: bool) -> None:
        """Delivery begins here. `exact`: nothing lies between this and what was asked for."""

    def detached(self, topic: str) -> None: ...

    def data_to_send(self) -> bytes:
        """Answers; they go out ahead of any records that still wait."""

    @property
    def finished(self) -> bool:
        """Whether every publish that was accepted is acknowledged."""


REPEATS_MAX = 1024
"""Topics of publishes that came again which are remembered until they may be acknowledged again."""


class Units:
    """The publishes of one connection that are not acknowledged yet."""

    __slots__ = ("_news", "_repeats", "_units")

    def __init__(self) -> None:
        self._units: list[Unit] = []
        self._repeats: dict[str, int] = {}
        """The highest number of each topic that came again, stored before or being stored."""
        self._news = False
        """Whether a unit has become durable since the last answer."""

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit) -> None:
        self._units.append(unit)

    def repeat(self, topic: str, number: int) -> None:
        """A number has come again: it is acknowledged again, as soon as nothing below it is under way."""
        if topic in self._repeats or len(self._repeats) < REPEATS_MAX:
            self._repeats[topic] = max(number, self._repeats.get(topic, 0))
            self._news = True

    def stored(self, unit: Unit) -> None:
        if unit.done:
            raise LocalProtocolError("a unit is stored once")
        unit.done = self._news = True

    def discard(self, unit: Unit) -> None:
        self._units.remove(unit)

    def take(self) -> list[Unit]:
        """The units that may be acknowledged by now; they are forgotten here."""
        if not self._news:
            return []
        self._news = False
        waiting = min((one.lowest for one in self._units if not one.done), default=None)
        ready: list[Unit] = []
        kept: list[Unit] = []
        for one in self._units:
            may = one.done and (waiting is None or one.highest < waiting)
            (ready if may else kept).append(one)
        self._units = kept
        for topic, number in list(self._repeats.items()):
            if waiting is None or number < waiting:
                del self._repeats[topic]
                ready.append(Unit(number, number, {topic: number}))
        return ready
