"""How far a topic may be trimmed while readers are waited for. Knows neither clocks nor files.

Whoever wants to trim offers the places where it could, from the oldest on, and says of each whether the
waiting is over. Whoever needs the records holds the topic at its position.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from headrace.model import Position


class Place(NamedTuple):
    """Somewhere a topic could begin anew."""

    position: Position
    overdue: bool
    """Whether what lies before it goes even if someone still needs it."""


class Hold(NamedTuple):
    """A reader that needs everything from a position on."""

    reader: str
    position: Position


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
        Missed(hold.reader, max(0, best.ordinal - max(hold.position.ordinal, start.ordinal)))
        for hold in holds
        if hold.position.offset < best.offset and best.offset > start.offset
    ]
    return Trimming(best, missed)
