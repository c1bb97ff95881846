"""How far a topic may be trimmed while readers are waited for. Knows neither clocks nor files.

Whoever wants to trim offers the places where it could, from the oldest on, and says of each whether the
waiting is over. Whoever needs the records holds the topic at its position.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from headrace.log.store import Store, Topic
from headrace.model import LAKE_READER, Position, Span


class Place(NamedTuple):
    """Somewhere a topic could begin anew."""

    position: Position
    overdue: bool
    """Whether what lies before it goes even if someone still needs it."""


class Hold(NamedTuple):
    """A reader that needs everything from a position on."""

    reader: str
    position: Position


def waited_for(store: Store, topic: Topic, readers: Iterable[str]) -> list[Hold]:
    """How readers of `wait_for` hold a topic: from their cursors on.

    Without a cursor in it they do not, since they may never come; but all of it waits for the lake.
    """
    holds: list[Hold] = []
    for reader in readers:
        cursors = store.cursors(topic.name, reader, limit=1)
        if cursors:
            holds.append(Hold(reader, cursors[0].position))
        elif reader == LAKE_READER:
            holds.append(Hold(reader, topic.start))
    return holds


class Missed(NamedTuple):
    reader: str
    records: int


class Trimming(NamedTuple):
    start: Position
    """Where the topic begins from now on."""
    missed: list[Missed]
    """Who needed what goes."""


def trimming(places: Iterable[Place], holds: Collection[Hold], start: Position) -> Trimming:
    """The furthest place that nobody holds back, or that is overdue; else `start`, where it begins now.

    Offsets never go backwards, so a hold from an earlier life of the topic holds all of this one.
    """
    needed = min((hold.position.offset for hold in holds), default=None)
    best = start
    for position, overdue in places:
        if (overdue or needed is None or position.offset <= needed) and (
            position.offset > best.offset
        ):
            best = position
    missed = [
        Missed(
            hold.reader,
            Span.between(max(hold.position, start, key=lambda at: at.ordinal), best).records,
        )
        for hold in holds
        if hold.position.offset < best.offset and best.offset > start.offset
    ]
    return Trimming(best, missed)
