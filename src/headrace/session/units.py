"""Which publishes of a connection are not acknowledged yet, and which may be now.

A *unit* is the publishes of one read. ACK n may go out when no unit that is still under way holds a number
at or below n, so units that finish out of turn (topics may differ in durability) wait for the others.
"""

from headrace.errors import LocalProtocolError


class Unit:
    """Publishes that came in one read. Numbers are compared as they are: never wrapped."""

    __slots__ = ("done", "highest", "lowest", "topics")

    def __init__(self, lowest: int, highest: int, topics: dict[str, int] | None = None) -> None:
        self.lowest = lowest
        self.highest = highest
        self.topics = topics
        """The highest number of each topic, where a protocol acknowledges by topic."""
        self.done = False


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
