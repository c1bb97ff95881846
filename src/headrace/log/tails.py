"""Reading the tail of a topic: journal entries in memory that segments do not hold yet."""

from bisect import bisect_left, bisect_right

from headrace.log.journal import decode_entry, entry_end, entry_offset
from headrace.log.records import boundary, nth
from headrace.log.store import Run, Topic
from headrace.model import Position


def tail_start(topic: Topic) -> int:
    """Where the tail begins; the topic's end when there is none."""
    return entry_offset(topic.tail[0]) if topic.tail else topic.end_offset


def tail_begin(topic: Topic) -> Position:
    """The position where the tail begins; the topic's end when there is none."""
    if not topic.tail:
        return topic.end
    entry = decode_entry(topic.tail[0])
    return Position(topic.epoch, entry.offset, entry.ordinal)


def read_tail(topic: Topic, offset: int, bytes_max: int) -> list[Run]:
    """Runs from the entry that contains `offset`, at least one where there is any."""
    runs: list[Run] = []
    taken = 0
    tail = topic.tail
    number = bisect_right(tail, offset, key=entry_end)
    while number < len(tail) and taken < bytes_max:
        runs.append(_run(tail[number]))
        taken += len(tail[number])
        number += 1
    return runs


def drop_tail(topic: Topic, end: int) -> None:
    """Forget the entries that lie before `end`."""
    count = bisect_right(topic.tail, end, key=entry_end)
    if count:
        del topic.tail[:count]


def locate_ordinal(topic: Topic, ordinal: int) -> Position | None:
    """Where the record with `ordinal` before it begins; None when it is not in the tail."""
    if not topic.tail or ordinal < decode_entry(topic.tail[0]).ordinal:
        return None
    number = bisect_right(topic.tail, ordinal, key=_entry_end_ordinal)
    if number == len(topic.tail):
        return topic.end
    run = _run(topic.tail[number])
    return position_in(run, topic.epoch, ordinal=ordinal)


def locate_time(topic: Topic, ms: int) -> Position:
    """Where the first record at or after `ms` begins."""
    number = bisect_left(topic.tail, ms, key=_entry_ms)
    if number == len(topic.tail):
        return topic.end
    entry = decode_entry(topic.tail[number])
    if entry.offset < topic.start_offset:
        return topic.start
    return Position(topic.epoch, entry.offset, entry.ordinal)


def position_in(
    run: Run, epoch: int, *, offset: int | None = None, ordinal: int | None = None
) -> Position:
    """The record boundary of a run at an ordinal, or at or after an offset."""
    # Where a run before the wanted one was found, for lack of a better one, its end is the nearest.
    if ordinal is not None:
        before = min(max(0, ordinal - run.ordinal), run.record_count)
        return Position(epoch, run.offset + nth(run.data, before), run.ordinal + before)
    assert offset is not None
    at, passed = boundary(run.data, min(offset - run.offset, len(run.data)))
    return Position(epoch, run.offset + at, run.ordinal + passed)


def _run(encoded: bytes) -> Run:
    _, _, offset, ordinal, count, ms, _, data = decode_entry(encoded)
    return Run(offset, ordinal, count, ms, bytes(data))


def _entry_end_ordinal(encoded: bytes) -> int:
    entry = decode_entry(encoded)
    return entry.ordinal + entry.record_count


def _entry_ms(encoded: bytes) -> int:
    return decode_entry(encoded).ms
