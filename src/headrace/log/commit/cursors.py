"""Cursors: the position of each named reader in each topic, and the reader's lag. Writes nothing itself.

All cursors are in memory. They are read from the catalogue at the start and changed when a commit is durable.
Their number is bounded. Listing cursors, or finding out which records retention must keep, needs no disk
access. A cursor belongs to the topic's name and so outlives the topic.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

from headrace.errors import BadCursorError, TooManyCursorsError
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.store import Cursor, Topic
from headrace.model import Position, Span

CURSORS_MAX = 100_000
"""Largest number of cursors, over all readers and topics; further new cursors are refused."""


class Lag(NamedTuple):
    """The distance between a cursor and the end of its topic."""

    records: int
    bytes: int
    gone_records: int
    """Number of unread records that the reader can never read because they precede the topic's start."""

    @classmethod
    def of(cls, at: Position, start: Position, behind: Span) -> "Lag":
        """Return the lag of a cursor at `at`; `behind` is the span of stored records after the cursor.

        The cursor's position may be from an earlier epoch of the topic.
        """
        return cls(behind.records, behind.bytes, Span.between(at, start).records)


def check_position(topic: Topic, at: Position) -> None:
    """Raise BadCursorError for a position that the topic cannot have given to a reader.

    Checks only what is known without disk access. It does not check that a record begins at the position.
    """
    if at.offset > topic.end_offset or at.ordinal > topic.end_ordinal:
        raise BadCursorError(
            f"offset {at.offset} and ordinal {at.ordinal} lie past the end of topic {topic.name!r}, "
            f"which is at offset {topic.end_offset} and ordinal {topic.end_ordinal}"
        )
    if at.epoch > topic.epoch:
        raise BadCursorError(
            f"topic {topic.name!r} has not had the epoch {at.epoch}: its last is {topic.epoch}"
        )


class Cursors:
    def __init__(self, catalogue: Catalogue, cursors_max: int = CURSORS_MAX) -> None:
        self._cursors_max = cursors_max
        self._by_topic: dict[str, dict[str, Cursor]] = {}
        self._by_reader: dict[str, dict[str, Cursor]] = {}
        self._count = 0
        self._asked: set[tuple[str, str]] = set()
        """Topic and reader of new cursors whose commit is not durable yet."""
        for row in catalogue.cursors():
            at = Position(row.epoch, row.offset, row.ordinal)
            self.put(Cursor(row.name.decode(), row.reader.decode(), at, row.ms))

    def reserve(self, reader: str, topics: Collection[str]) -> None:
        """Reserve room for a reader's new cursors before their commit; raise TooManyCursorsError if full."""
        known = self._by_reader.get(reader, {})
        new = {(topic, reader) for topic in topics if topic not in known} - self._asked
        if self._count + len(self._asked) + len(new) > self._cursors_max:
            raise TooManyCursorsError(
                f"there are {self._count} cursors, and no more than {self._cursors_max} are kept: "
                "drop those of readers that are gone"
            )
        self._asked |= new

    def put(self, cursor: Cursor) -> None:
        """Store a cursor whose commit is durable."""
        readers = self._by_topic.setdefault(cursor.topic, {})
        self._count += cursor.reader not in readers
        readers[cursor.reader] = cursor
        self._by_reader.setdefault(cursor.reader, {})[cursor.topic] = cursor
        self._asked.discard((cursor.topic, cursor.reader))

    def drop(self, topic: str, reader: str) -> None:
        """Remove a cursor after the commit that drops it is durable."""
        if self.get(topic, reader) is None:
            return
        self._count -= 1
        for index, first, second in (
            (self._by_topic, topic, reader),
            (self._by_reader, reader, topic),
        ):
            del index[first][second]
            if not index[first]:
                del index[first]

    def get(self, topic: str, reader: str) -> Cursor | None:
        return self._by_topic.get(topic, {}).get(reader)

    def list(
        self, topic: str | None, reader: str | None, after: tuple[str, str], limit: int
    ) -> list[Cursor]:
        """Return the cursors of a topic, of a reader or all, ordered by the bytes of topic and reader."""
        if topic is not None and reader is not None:
            one = self.get(topic, reader)
            found: Iterator[Cursor] = iter((one,) if one is not None else ())
        elif topic is not None:
            found = _sorted(self._by_topic.get(topic, {}))
        elif reader is not None:
            found = _sorted(self._by_reader.get(reader, {}))
        else:
            found = self._all(after[0])
        return list(
            islice((one for one in found if (one.topic, one.reader) > after), max(0, limit))
        )

    def _all(self, first: str) -> Iterator[Cursor]:
        topics = sorted(self._by_topic)
        begin = bisect_right(topics, first)
        if first in self._by_topic:
            begin -= 1
        for topic in topics[begin:]:
            yield from _sorted(self._by_topic[topic])


def _sorted(cursors: dict[str, Cursor]) -> Iterator[Cursor]:
    """Return the cursors by name: strings sort by code point, which is also their UTF-8 order."""
    return (cursors[name] for name in sorted(cursors))
