"""Planning of reads: from options, topics and offsets to the parts that each task reads. Knows no Spark."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from headrace.errors import OptionError
from headrace.model import Position, Span
from headrace.reader.view import (
    DataLossError,
    LogLocation,
    LogRange,
    LogView,
    TopicState,
    despite_loss,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

CUT_TOPICS_MAX = 64
"""Number of topics that one micro-batch reads partly. Each needs a look-up, so other topics must wait."""

PARTITION_BYTES = 64 << 20
"""Maximum bytes that a task reads, unless `maxBytesPerPartition` says otherwise."""

EARLIEST, LATEST = -2, -1
"""The numbers that Kafka uses for these positions where an offset is expected."""


class Where(NamedTuple):
    """Start or end of a read, as the user gave it."""

    everywhere: int | None = None
    """An offset, EARLIEST or LATEST, for topics that `topics` does not name."""
    topics: Mapping[str, int] = {}
    ms: int | None = None


class TopicSelection(NamedTuple):
    """The topics to read: a list of names, or a pattern."""

    names: tuple[str, ...] | None = None
    pattern: str = ""

    def matches(self, name: str) -> bool:
        if self.names is not None:
            return name in self.names
        return re.fullmatch(self.pattern, name) is not None


class SourceOptions(NamedTuple):
    place: LogLocation
    topics: TopicSelection
    starting: Where | None
    ending: Where | None
    rows_max: int | None
    bytes_max: int | None
    partitions_min: int
    partition_bytes: int
    fail_on_data_loss: bool
    verify: bool
    group: str
    decode: str

    def leave_out(self, loss: DataLossError) -> None:
        """Log a loss of records; raise it with `failOnDataLoss`."""
        if self.fail_on_data_loss:
            raise loss
        logger.warning("%s; these records are left out", loss)


Positions = dict[str, Position]


def find_topics(log: LogView, topics: TopicSelection) -> dict[str, TopicState]:
    """Return the selected topics that exist, sorted by name."""
    found = log.topics(topics.names)
    return {name: state for name, state in sorted(found.items()) if topics.matches(name)}


class Narrows(Protocol):
    """Filters that exclude topics or narrow the range that is read of a topic."""

    def matches(self, topic: str) -> bool: ...

    def narrow(self, log: LogView, state: TopicState, whole: LogRange) -> LogRange: ...


def plan_batch(
    log: LogView, options: SourceOptions, narrowing: Narrows | None = None
) -> list[LogRange]:
    """Return the range of each topic that a batch read covers, without empty ranges."""
    states = find_topics(log, options.topics)
    missing = [name for name in options.topics.names or () if name not in states]
    if missing:
        raise OptionError(f"there is no topic {missing[0]!r} to read")
    ranges = []
    for state in states.values():
        if narrowing is not None and not narrowing.matches(state.name):
            continue
        start = locate(log, state, options.starting or Where(), options, EARLIEST)
        end = locate(log, state, options.ending or Where(), options, LATEST)
        one = LogRange(state.name, start, end)
        if narrowing is not None:
            one = narrowing.narrow(log, state, one)
        if one.start.ordinal < one.end.ordinal:
            ranges.append(one)
    return ranges


def locate(
    log: LogView, state: TopicState, where: Where, options: SourceOptions, otherwise: int
) -> Position:
    """Return the position that the user asked for; raise `DataLossError` if it is no longer kept.

    With `failOnDataLoss` set to false, return the oldest position that is kept instead.
    """
    if where.ms is not None:
        return log.at_time(state, where.ms)
    offset = where.topics.get(state.name, where.everywhere)
    if offset is None:
        offset = otherwise
    if offset == EARLIEST:
        return state.start
    if offset == LATEST:
        return state.end
    if offset < state.start.offset and options.fail_on_data_loss:
        raise DataLossError(
            f"topic {state.name!r}: offset {offset} is no longer kept, the oldest is "
            f"{state.start.offset}; set failOnDataLoss to false to begin there"
        )
    return log.at_offset(state, offset)


def parts_of(
    log: LogView, ranges: Sequence[LogRange], options: SourceOptions
) -> list[list[LogRange]]:
    """Divide the ranges among tasks: large ranges are split, small ones share a task."""
    total = sum(one.bytes for one in ranges)
    bytes_max = min(options.partition_bytes, max(1, -(-total // options.partitions_min)))
    parts = (
        part
        for one in ranges
        for part in despite_loss(one, options.leave_out, lambda rest: log.split(rest, bytes_max))
    )
    return list(groups(parts, lambda part: part.bytes, bytes_max))


def groups(
    items: Iterable[T], size: Callable[[T], int], bytes_max: int, count_max: int | None = None
) -> Iterator[list[T]]:
    """Yield groups of items in their order, of at most `bytes_max` unless a single item is larger."""
    gathered: list[T] = []
    total = 0
    for item in items:
        length = size(item)
        if gathered and (total + length > bytes_max or len(gathered) == count_max):
            yield gathered
            gathered, total = [], 0
        gathered.append(item)
        total += length
    if gathered:
        yield gathered


def check_positions(
    start: Positions, states: Mapping[str, TopicState], ends: Positions | None
) -> None:
    """Raise `DataLossError` if records after `start` are missing or no longer kept.

    `ends` is given for a batch that was planned before: all its records up to `ends` must exist.
    """
    gone: dict[str, int] = {}
    why = "retention has overtaken the query"
    for name, at in start.items():
        state = states.get(name)
        if state is None:
            if ends is not None:
                gone[name] = Span.between(at, ends[name]).records
                why = "it was destroyed"
            continue
        reached = at if ends is None else ends[name]
        if at.ordinal < state.start.ordinal:
            gone[name] = Span.between(at, state.start).records
            if at.epoch != state.start.epoch:
                why = "it was destroyed and created again"
        elif at.epoch != state.end.epoch and at.ordinal > state.start.ordinal:
            raise DataLossError(
                f"topic {name!r} is not the one that the query has read: its epoch is "
                f"{state.end.epoch}, the checkpoint's {at.epoch}; this is another log than the checkpoint "
                "was made with, or one that had a crash; set failOnDataLoss to false to go on with it"
            )
        elif reached.ordinal > state.end.ordinal:
            raise DataLossError(
                f"topic {name!r} ends at ordinal {state.end.ordinal}, before the query's "
                f"{reached.ordinal}: this is another log than the checkpoint was made with, or an older copy"
            )
    if gone:
        raise DataLossError(gone_error(gone, why))


def kept(log: LogView, state: TopicState, at: Position) -> Position:
    """Return where to continue: `at` if that position exists, otherwise the oldest position that is kept."""
    if state.start.ordinal <= at.ordinal <= state.end.ordinal:
        if at.epoch == state.end.epoch or at.ordinal == state.start.ordinal:
            return at
        found = log.at_offset(state, at.offset)
        if (found.offset, found.ordinal) == (at.offset, at.ordinal):
            return at
    return state.start


def gone_error(gone: Mapping[str, int], why: str = "retention has overtaken the query") -> str:
    records = sum(gone.values())
    name = next(iter(gone))
    more = f" and {len(gone) - 1} other topics" if len(gone) > 1 else ""
    # A topic that jumped ahead may have lost an unknown number of records.
    what = f"{records} records" if records else "perhaps records"
    return (
        f"{what} of topic {name!r}{more} are gone that the query has not read: {why}; "
        "set failOnDataLoss to false to go on with what is kept"
    )


def limit_rows(
    log: LogView, start: Positions, states: Mapping[str, TopicState], rows_max: int
) -> Positions:
    """Return where a micro-batch of at most `rows_max` rows ends, with a fair share for each topic."""
    return _limit(start, states, rows_max, lambda at: at.ordinal, log.at_ordinal)


def limit_bytes(
    log: LogView, start: Positions, states: Mapping[str, TopicState], bytes_max: int
) -> Positions:
    """Like `limit_rows`, but by bytes, rounded up to the next record: a batch has at least one record."""
    return _limit(start, states, bytes_max, lambda at: at.offset, log.at_offset)


def _limit(
    start: Positions,
    states: Mapping[str, TopicState],
    total_max: int,
    measure: Callable[[Position], int],
    look_up: Callable[[TopicState, int], Position],
) -> Positions:
    backlog = {
        name: size
        for name, state in states.items()
        if (size := measure(state.end) - measure(start[name])) > 0
    }
    ends = dict(start)
    for name, share in _shares(backlog, total_max):
        state = states[name]
        whole = share == backlog[name]
        ends[name] = state.end if whole else look_up(state, measure(start[name]) + share)
    return ends


def _shares(backlog: Mapping[str, int], total_max: int) -> Iterator[tuple[str, int]]:
    """Yield the share of each topic: small backlogs completely, large ones in equal shares."""
    left = total_max
    waiting = sorted(backlog.items(), key=lambda item: item[1], reverse=True)
    while waiting and waiting[-1][1] <= left // len(waiting):
        name, size = waiting.pop()
        left -= size
        yield name, size
    # The largest backlogs come first. A topic that gets nothing now grows until it is among the largest. If
    # one topic of a group is cut, so are all larger ones of the group, and nothing is left for another.
    for begin in range(0, len(waiting), CUT_TOPICS_MAX):
        group = waiting[begin : begin + CUT_TOPICS_MAX]
        for others, (name, size) in reversed(list(enumerate(group))):
            share = min(size, left // (others + 1))
            if share:
                yield name, share
                left -= share


def ranges_between(start: Positions, end: Positions) -> list[LogRange]:
    return [
        LogRange(name, start[name], position)
        for name, position in end.items()
        if position.ordinal > start[name].ordinal
    ]


def earlier(one: Position, other: Position) -> Position:
    return min(one, other, key=lambda position: position.ordinal)
