"""Which records are read and by which task: from options, topics and offsets to parts. Knows no Spark."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from headrace.model import Position, Span
from headrace.spark.log_view import DataLossError, LogView, Range, TopicState
from headrace.spark.options import EARLIEST, LATEST, OptionError, SourceOptions, Topics, Where

logger = logging.getLogger(__name__)

CUT_TOPICS_MAX = 64
"""How many topics one micro-batch reads in part. Each takes a look-up, so others wait for their turn."""

Positions = dict[str, Position]

_EARLIEST, _LATEST = Where(EARLIEST), Where(LATEST)


def find_topics(log: LogView, topics: Topics) -> dict[str, TopicState]:
    """Those that are to be read and exist, in the order of their names."""
    found = log.topics(topics.names)
    return {name: state for name, state in sorted(found.items()) if topics.matches(name)}


class Narrows(Protocol):
    """What filters leave of a topic."""

    def matches(self, topic: str) -> bool: ...

    def narrow(self, log: LogView, state: TopicState, whole: Range) -> Range: ...


def plan_batch(
    log: LogView, options: SourceOptions, narrowing: Narrows | None = None
) -> list[Range]:
    """What a batch read is of: every topic, from where it is to begin to where it is to end."""
    states = find_topics(log, options.topics)
    missing = [name for name in options.topics.names or () if name not in states]
    if missing:
        raise OptionError(f"there is no topic {missing[0]!r} to read")
    ranges = []
    for state in states.values():
        if narrowing is not None and not narrowing.matches(state.name):
            continue
        start = locate(log, state, options.starting or _EARLIEST, options, EARLIEST)
        end = locate(log, state, options.ending or _LATEST, options, LATEST)
        one = Range(state.name, start, end)
        if narrowing is not None:
            one = narrowing.narrow(log, state, one)
        if one.start.ordinal < one.end.ordinal:
            ranges.append(one)
    return ranges


def locate(
    log: LogView, state: TopicState, where: Where, options: SourceOptions, otherwise: int
) -> Position:
    """The position in a topic that the user meant; one that is no longer kept is data loss."""
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


def parts_of(log: LogView, ranges: Sequence[Range], options: SourceOptions) -> list[list[Range]]:
    """The ranges divided among tasks: large ones in parts, small ones together."""
    total = sum(one.bytes for one in ranges)
    bytes_max = min(options.partition_bytes, max(1, -(-total // options.partitions_min)))
    tasks: list[list[Range]] = []
    filled = bytes_max
    for one in ranges:
        for part in _split(log, one, bytes_max, options):
            if not tasks or filled + part.bytes > bytes_max:
                tasks.append([])
                filled = 0
            tasks[-1].append(part)
            filled += part.bytes
    return tasks


def _split(log: LogView, whole: Range, bytes_max: int, options: SourceOptions) -> Sequence[Range]:
    rest: Range | None = whole
    while rest is not None:
        try:
            return log.split(rest, bytes_max)
        except DataLossError as loss:
            if options.fail_on_data_loss:
                raise
            logger.warning("%s; these records are left out", loss)
            rest = loss.rest
    return ()


def check_positions(
    start: Positions, states: Mapping[str, TopicState], ends: Positions | None
) -> None:
    """Raise `DataLossError` when something is not there, or not any more, that lies behind `start`.

    With `ends`, of a batch that was planned before: up to there everything must be there.
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
                why = "it was made anew"
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
    """Where to go on: the position itself, or the oldest that is kept where it does not exist."""
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
    # A log that jumped ahead may have lost records that nobody can count.
    what = f"{records} records" if records else "perhaps records"
    return (
        f"{what} of topic {name!r}{more} are gone that the query has not read: {why}; "
        "set failOnDataLoss to false to go on with what is kept"
    )


def limit_rows(
    log: LogView, start: Positions, states: Mapping[str, TopicState], rows_max: int
) -> Positions:
    """Where a micro-batch of at most so many rows ends, with every topic getting its share."""
    return _limit(start, states, rows_max, lambda at: at.ordinal, log.at_ordinal)


def limit_bytes(
    log: LogView, start: Positions, states: Mapping[str, TopicState], bytes_max: int
) -> Positions:
    """The same by bytes, to the next record: a batch has at least one."""
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
    """How much each topic gives: small backlogs whole, large ones alike."""
    left = total_max
    waiting = sorted(backlog.items(), key=lambda item: item[1])
    while waiting and waiting[0][1] <= left // len(waiting):
        name, size = waiting.pop(0)
        left -= size
        yield name, size
    # The largest first: whoever gets nothing now has the largest backlog some day.
    cut = waiting[-CUT_TOPICS_MAX:][::-1][: max(1, left)]
    for number, (name, size) in enumerate(cut):
        share = min(size, left // (len(cut) - number))
        if share:
            yield name, share
            left -= share


def ranges_between(start: Positions, end: Positions) -> list[Range]:
    return [
        Range(name, start[name], position)
        for name, position in end.items()
        if position.ordinal > start[name].ordinal
    ]


def earlier(one: Position, other: Position) -> Position:
    return min(one, other, key=lambda position: position.ordinal)
