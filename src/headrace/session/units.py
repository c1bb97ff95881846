"""Which publishes of a connection are not acknowledged yet, and which may be now.

A *unit* is the publishes of one read. Units that finish out of turn (topics may differ in durability) wait
for the others, until an ACK is true whichever way the client takes it:

- A client with one counter for all topics takes ACK n for everything up to n. So no unit under way may hold a
  number at or below n. Where topics are acknowledged one by one, a unit that came when this one was durable
  already does not count: with one counter its numbers are higher, and with a counter for each topic it
  must not keep the other topics waiting for ever.
- A client with a counter for each topic takes ACK n of a topic for everything up to n in that topic. So no
  unit under way may hold a number at or below n in the same topic.
"""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from headrace.errors import LocalProtocolError


class Range(NamedTuple):
    """Numbers as they are: never wrapped."""

    lowest: int
    highest: int


class Unit:
    """Publishes that came in one read. Numbers are compared as they are: never wrapped."""

    __slots__ = ("came", "done", "highest", "lowest", "size", "topics")

    def __init__(
        self,
        lowest: int,
        highest: int,
        topics: Mapping[str, Range] | None = None,
        size: int = 0,
    ) -> None:
        self.lowest = lowest
        self.highest = highest
        self.topics = topics
        """The same for each topic by its own numbers, where a protocol acknowledges by topic."""
        self.size = size
        """What it takes to remember its publishes, where a protocol does."""
        self.came = 0
        """How many units came before it."""
        self.done: int | None = None
        """When it became durable: how many units had come until then."""


REPEATS_MAX = 1024
"""Topics of publishes that came again which are remembered until they may be acknowledged again."""


class Units:
    """The publishes of one connection that are not acknowledged yet."""

    __slots__ = ("_came", "_news", "_repeats", "_units", "size")

    def __init__(self) -> None:
        self._units: list[Unit] = []
        """In the order in which they came."""
        self._came = 0
        self._repeats: dict[str, Unit] = {}
        """For each topic the highest number that came again, stored before or being stored."""
        self._news = False
        """Whether a unit has become durable since the last answer."""
        self.size = 0
        """What it takes to remember them."""

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit) -> None:
        unit.came = self._came
        self._came += 1
        self._units.append(unit)
        self.size += unit.size

    def repeat(self, topic: str, number: int, number_of_topic: int) -> None:
        """A publish has come again: it is acknowledged again, like a unit that is durable."""
        known = self._repeats.get(topic)
        if known is None and len(self._repeats) >= REPEATS_MAX:
            return
        if known is not None and known.topics is not None:
            number = max(number, known.highest)
            number_of_topic = max(number_of_topic, known.topics[topic].highest)
        again = Unit(number, number, {topic: Range(number_of_topic, number_of_topic)})
        again.done = self._came
        self._repeats[topic] = again
        self._news = True

    def stored(self, unit: Unit) -> None:
        if unit.done is not None:
            raise LocalProtocolError("a unit is stored once")
        unit.done = self._came
        self._news = True

    def discard(self, unit: Unit) -> None:
        if unit in self._units:  # not if something below it was refused
            self._units.remove(unit)
            self.size -= unit.size
        # What came again may be of this unit, which is never stored.
        self._repeats.clear()

    def refuse(self, number: int) -> None:
        """A publish with this number is refused: acknowledge nothing at or above it, now or later.

        A client takes an acknowledgement of a higher number for this one too. Units are not cut: one that
        holds higher numbers as well, of a client that sends out of order, is sent again.
        """
        kept = [one for one in self._units if one.highest < number]
        self.size -= sum(one.size for one in self._units) - sum(one.size for one in kept)
        self._units = kept
        self._repeats = {topic: one for topic, one in self._repeats.items() if one.highest < number}

    def take(self) -> list[Unit]:
        """The units that may be acknowledged by now; they are forgotten here."""
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
    """Units under way, in the order in which they came."""

    def __init__(self, waiting: list[Unit]) -> None:
        self._came = [one.came for one in waiting]
        self._lowest = list(accumulate((one.lowest for one in waiting), min))
        """The lowest number of each and those before it."""
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
