"""Filters of a batch read that reduce what is read: on topic, offset, ordinal and timestamp.

They only save work. Spark applies every filter again, so a filter that is not understood here costs time and
nothing else.
"""

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from headrace.model import Position
from headrace.reader.view import LogRange, LogView, TopicState

_NUMBERS = ("offset", "ordinal", "timestamp")


@dataclass
class Narrowing:
    """Topics and ranges that pass the filters. `least` bounds are inclusive, `below` bounds exclusive."""

    topics: set[str] | None = None
    prefixes: list[str] = field(default_factory=list)
    least: dict[str, int] = field(default_factory=dict)
    below: dict[str, int] = field(default_factory=dict)

    def matches(self, topic: str) -> bool:
        if self.topics is not None and topic not in self.topics:
            return False
        return all(topic.startswith(prefix) for prefix in self.prefixes)

    def narrow(self, log: LogView, state: TopicState, whole: LogRange) -> LogRange:
        start, end = whole.start, whole.end
        for column, value in self.least.items():
            start = max(start, _at(log, state, column, value), key=_ordinal)
        for column, value in self.below.items():
            end = min(end, _at(log, state, column, value), key=_ordinal)
        return whole._replace(start=start, end=end)


def narrowing_of(filters: Iterable[Filter]) -> Narrowing:
    found = Narrowing()
    for one in filters:
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        if len(attribute) != 1:
            continue
        if attribute[0] == "topic":
            _narrow_topic(found, one)
        elif attribute[0] in _NUMBERS:
            _narrow_number(found, attribute[0], one)
    return found


def _narrow_topic(found: Narrowing, one: Filter) -> None:
    if isinstance(one, EqualTo):
        names = {str(one.value)}
    elif isinstance(one, In):
        names = {str(value) for value in one.value}
    elif isinstance(one, StringStartsWith):
        found.prefixes.append(one.value)
        return
    else:
        return
    found.topics = names if found.topics is None else found.topics & names


def _narrow_number(found: Narrowing, column: str, one: Filter) -> None:
    if isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        value = one.value
        # Times have a resolution of one millisecond. A bound between two milliseconds is rounded up to the
        # later one.
        number, exact = _milliseconds(value) if column == "timestamp" else (value, True)
        if not isinstance(number, int) or isinstance(number, bool) or number is None:
            return
        if isinstance(one, EqualTo | GreaterThanOrEqual):
            least = number if exact else number + 1
            found.least[column] = max(least, found.least.get(column, least))
        elif isinstance(one, GreaterThan):
            found.least[column] = max(number + 1, found.least.get(column, number + 1))
        if isinstance(one, EqualTo | LessThanOrEqual):
            found.below[column] = min(number + 1, found.below.get(column, number + 1))
        elif isinstance(one, LessThan):
            below = number if exact else number + 1
            found.below[column] = min(below, found.below.get(column, below))


def _milliseconds(value: object) -> tuple[int | None, bool]:
    if not isinstance(value, datetime.datetime):
        return None, True
    if value.tzinfo is None:
        value = value.replace(tzinfo=datetime.UTC)
    delta = value - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    microseconds = delta // datetime.timedelta(microseconds=1)
    return microseconds // 1000, microseconds % 1000 == 0


def _at(log: LogView, state: TopicState, column: str, value: int) -> Position:
    if value <= 0:
        return state.start
    look_up = {"offset": log.at_offset, "ordinal": log.at_ordinal, "timestamp": log.at_time}
    return look_up[column](state, value)


def _ordinal(position: Position) -> int:
    return position.ordinal
