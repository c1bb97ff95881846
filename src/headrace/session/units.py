"""Unacknowledged publishes of a connection, and the decision which of them may be acknowledged now.

A *unit* is the publishes of one read. Units may become durable out of order, because topics may differ in
durability. A durable unit waits for other units until its ACK is true for both kinds of clients:

- A client with one counter for all topics takes ACK n as everything up to n. So no pending unit may hold a
  number at or below n. Where topics are acknowledged one by one, units that came after this unit was durable
  do not count: with one counter their numbers are higher, and with a counter for each topic they must not
  keep the other topics waiting forever.
- A client with a counter for each topic takes ACK n of a topic as everything up to n in that topic. So no
  pending unit may hold a number at or below n in the same topic.
"""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from headrace.errors import LocalProtocolError


class NumberRange(NamedTuple):
    """A range of numbers. The numbers never wrap around."""

    lowest: int
    highest: int


class Unit:
    """Publishes that came in one read. Their numbers never wrap around, so they can be compared."""

    __slots__ = ("came", "done", "highest", "lowest", "size", "topics")

    def __init__(
        self,
        lowest: int,
        highest: int,
        topics: Mapping[str, NumberRange] | None = None,
        size: int = 0,
    ) -> None:
        self.lowest = lowest
        self.highest = highest
        self.topics = topics
        """By topic: the range of the topic's own numbers, if the protocol acknowledges by topic."""
        self.size = size
        """Memory for the publishes in bytes, if the protocol remembers them."""
        self.came = 0
        """Number of units that came before this one."""
        self.done: int | None = None
        """Number of units that had come when this one became durable; None before."""


REPEATS_MAX = 1024
"""Limit of topics whose repeated publishes are remembered until they may be acknowledged again."""


class Units:
    """The publishes of one connection that are not acknowledged yet."""

    __slots__ = ("_came", "_news", "_repeats", "_units", "size")

    def __init__(self) -> None:
        self._units: list[Unit] = []
        """Units in the order of arrival."""
        self._came = 0
        self._repeats: dict[str, Unit] = {}
        """By topic: the highest number that was repeated. Its first copy is stored or being stored."""
        self._news = False
        """True if a unit has become durable, or a publish was repeated, since the last `take`."""
        self.size = 0
        """Memory for the publishes of all units in bytes."""

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit) -> None:
        unit.came = self._came
        self._came += 1
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
        again.done = self._came
        self._repeats[topic] = again
        self._news = True

    def stored(self, unit: Unit) -> None:
        if unit.done is not None:
            raise LocalProtocolError("a unit is stored once")
        unit.done = self._came
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
        kept = [one for one in self._units if one.highest < number]
        self.size -= sum(one.size for one in self._units) - sum(one.size for one in kept)
        self._units = kept
        self._repeats = {topic: one for topic, one in self._repeats.items() if one.highest < number}

    def take(self) -> list[Unit]:
        """Remove and return the units that may be acknowledged now."""
        if not self._news:
            return []
        self._news = False
        waiting = [one for one in self._units if one.done is None]
        if not waiting:
            ready, self._units = self._units, []
            ready += self._repeats.values()
            self._repeats = {}
        else:
            obstacles = _Obstacles(waiting)
            ready = [one for one in self._units if obstacles.let_pass(one)]
            self._units = [one for one in self._units if not obstacles.let_pass(one)]
            for topic, one in list(self._repeats.items()):
                if obstacles.let_pass(one):
                    ready.append(self._repeats.pop(topic))
        self.size -= sum(one.size for one in ready)
        return ready


class _Obstacles:
    """Pending units, in the order of arrival."""

    def __init__(self, waiting: list[Unit]) -> None:
        self._came = [one.came for one in waiting]
        self._lowest = list(accumulate((one.lowest for one in waiting), min))
        """Parallel to `_came`: the lowest number of this unit and all units before it."""
        self._by_topic: dict[str, int] = {}
        for one in waiting:
            for topic, numbers in (one.topics or {}).items():
                known = self._by_topic.get(topic, numbers.lowest)
                self._by_topic[topic] = min(known, numbers.lowest)

    def let_pass(self, one: Unit) -> bool:
        if one.done is None:
            return False
        if one.topics is None:
            return one.highest < self._lowest[-1]
        before = bisect_left(self._came, one.done)
        if before and self._lowest[before - 1] <= one.highest:
            return False
        by_topic = self._by_topic
        return all(
            topic not in by_topic or numbers.highest < by_topic[topic]
            for topic, numbers in one.topics.items()
        )
