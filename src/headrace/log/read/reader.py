"""The reading side of the embedded store: tails first, then segments, by offset, ordinal or time.

Changes nothing except its cache of topics' segments.

The tail of a topic is its journal entries in memory that segments do not hold yet.
"""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import cast

from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.catalogue.rows import SegmentRow
from headrace.log.commit.journal import decode_entry, entry_end, entry_offset
from headrace.log.read.segment import DamagedRun, Segments
from headrace.log.records import boundary, nth
from headrace.log.store import Chunk, Run, SegmentInfo, Topic
from headrace.model import JUMP, Durability, Position, Span
from headrace.printing import quoted

logger = logging.getLogger(__name__)


class ReadSide:
    def __init__(self, catalogue: Catalogue, files: Segments) -> None:
        self._catalogue = catalogue
        self.files = files
        self._damage_seen: set[tuple[Path, int]] = set()

    @property
    def damage_count(self) -> int:
        """Number of damaged ranges that readers have found."""
        return len(self._damage_seen)

    def reader(self, topic: Topic) -> "TopicReader":
        return TopicReader(self, topic)

    def locate_offset(self, topic: Topic, offset: int) -> Position:
        # The first record is looked up too: if it is damaged, the next readable record comes first.
        offset = max(offset, topic.start_offset)
        run = self._run_at(topic, offset)
        return topic.end if run is None else _position_in(run, topic.epoch, offset=offset)

    def locate_ordinal(self, topic: Topic, ordinal: int) -> Position:
        if ordinal <= topic.start_ordinal:
            return topic.start
        if ordinal >= topic.end_ordinal:
            return topic.end
        if ordinal >= _tail_begin(topic).ordinal:
            return _ordinal_in_tail(topic, ordinal)
        for segment in self.segment_rows(topic):
            if segment.end_ordinal > ordinal:
                row = self.files.first_row(segment, lambda row: row.end_ordinal > ordinal)
                run = self._run_at(topic, row.offset) if row is not None else None
                if run is not None:
                    return _position_in(run, topic.epoch, ordinal=ordinal)
        # The record is lost, or its ordinal was skipped: return the next existing record.
        return _time_in_tail(topic, 0)

    def locate_time(self, topic: Topic, ms: int) -> Position:
        for segment in self.segment_rows(topic):
            if segment.last_ms >= ms and segment.end > topic.start_offset:
                row = self.files.first_row(segment, lambda row: row.ms >= ms)
                if row is not None:
                    found = Position(topic.epoch, row.offset, row.ordinal)
                    return found if found.offset > topic.start_offset else topic.start
        return _time_in_tail(topic, ms)

    def locate_last(self, topic: Topic, records: int) -> Position:
        tail = _tail_begin(topic)
        missing = records - (topic.end_ordinal - tail.ordinal)
        if missing <= 0:
            return self.locate_ordinal(topic, topic.end_ordinal - records)
        for segment in reversed(self.segment_rows(topic)):
            end = min(segment.end_ordinal, tail.ordinal)
            first = max(segment.first_ordinal, topic.start_ordinal)
            if missing <= end - first:
                return self.locate_ordinal(topic, end - missing)
            missing -= max(0, end - first)
        return topic.start

    def kept(self, topic: Topic, after: Position | None = None) -> Span:
        if not topic.exists:
            return Span(0, 0)
        begin = topic.start
        if after is not None:
            begin = Position(
                topic.epoch, max(begin.offset, after.offset), max(begin.ordinal, after.ordinal)
            )
        # The applier may be ahead of the tails: records in both count once.
        tail = _tail_begin(topic)
        records = max(0, topic.end_ordinal - max(tail.ordinal, begin.ordinal))
        size = max(0, topic.end_offset - max(tail.offset, begin.offset))
        if topic.durability is Durability.MEMORY or begin.offset >= tail.offset:
            return Span(records, size)
        stored = self._catalogue.stored(topic.id, begin, tail)
        return Span(records + stored.records, size + stored.bytes)

    def segments(self, topic: Topic) -> list[SegmentInfo]:
        # Segments before the topic's start are trimmed, and will be deleted soon.
        rows = self.segment_rows(topic)
        return [segment_info(row) for row in rows if row.end > topic.start_offset]

    def segment_rows(self, topic: Topic) -> list[SegmentRow]:
        if not topic.exists or topic.durability is Durability.MEMORY:
            return []
        if topic.segments is None:
            topic.segments = cast(list[object], self._catalogue.segments(topic.id))
        return cast(list[SegmentRow], topic.segments)

    def _run_at(self, topic: Topic, offset: int) -> Run | None:
        """Return the run that contains `offset`, or the next run that can be read."""
        runs = TopicReader(self, topic).read_runs(offset, 1).runs
        return runs[0] if runs else None

    def report(self, topic: Topic, damaged: Sequence[DamagedRun]) -> None:
        for one in damaged:
            key = (one.segment, one.offset)
            if key not in self._damage_seen:
                self._damage_seen.add(key)
                logger.error("topic %s: damage skipped: %s", quoted(topic.name), one)


class TopicReader:
    """Implementation of `store.Reader`."""

    __slots__ = ("_base", "_next", "_ordinal", "_row", "_side", "_topic")

    def __init__(self, side: ReadSide, topic: Topic) -> None:
        self._side = side
        self._topic = topic
        self._base = self._row = self._next = -1
        self._ordinal: int | None = None

    def read(self, offset: int, bytes_max: int) -> Chunk:
        offset = max(offset, self._topic.start_offset)
        chunk = self.read_runs(offset, bytes_max)
        if chunk.runs and chunk.runs[0].offset < offset:
            first = chunk.runs[0]
            at = _position_in(first, 0, offset=offset)
            left = first.record_count - (at.ordinal - first.ordinal)
            rest = first.data[at.offset - first.offset :]
            if left:
                chunk.runs[0] = Run(at.offset, at.ordinal, left, first.ms, rest)
            else:
                del chunk.runs[0]
        return chunk

    def read_runs(self, offset: int, bytes_max: int) -> Chunk:
        """Return whole runs; the first may begin before `offset`."""
        topic, side = self._topic, self._side
        offset = max(offset, topic.start_offset)
        while offset < topic.end_offset:
            if topic.tail and offset >= tail_start(topic):
                runs = read_tail(topic, offset, bytes_max)
                return self._chunk(runs, runs[-1].end)
            segments = side.segment_rows(topic)
            number = bisect_right(segments, offset, key=attrgetter("end"))
            if number == len(segments):
                offset = tail_start(topic)
                continue
            segment = segments[number]
            offset = max(offset, segment.base)
            known = self._row if (self._base, self._next) == (segment.base, offset) else None
            block = side.files.read(segment, offset, bytes_max, known)
            self._base, self._next, self._row = segment.base, block.next_offset, block.row
            if block.damaged:
                side.report(topic, block.damaged)
                first = block.damaged[0]
                # Damage at the very beginning counts too, if its row says how many records are lost.
                leads = not block.runs or first.offset < block.runs[0].offset
                if self._ordinal is None and leads and first.record_count:
                    self._ordinal = first.ordinal
            if block.runs:
                return self._chunk(block.runs, block.next_offset)
            offset = max(block.next_offset, offset + 1)
        return Chunk([], offset, 0)

    def _chunk(self, runs: list[Run], next_offset: int) -> Chunk:
        lost = runs[0].ordinal - self._ordinal if self._ordinal is not None else 0
        for before, after in pairwise(runs):
            lost += after.ordinal - before.ordinal - before.record_count
        self._ordinal = runs[-1].ordinal + runs[-1].record_count
        # Nothing was ever stored where the topic has jumped ahead: a jump does not count as lost.
        return Chunk(runs, next_offset, max(0, lost) % JUMP)


def segment_info(row: SegmentRow) -> SegmentInfo:
    return SegmentInfo(
        base=row.base,
        end=row.end,
        first_ordinal=row.first_ordinal,
        records=row.end_ordinal - row.first_ordinal,
        bytes=row.end - row.base,
        first_ms=row.first_ms,
        last_ms=row.last_ms,
    )


def tail_start(topic: Topic) -> int:
    """Return the offset at which the tail begins; the topic's end if the tail is empty."""
    return entry_offset(topic.tail[0]) if topic.tail else topic.end_offset


def read_tail(topic: Topic, offset: int, bytes_max: int) -> list[Run]:
    """Return runs from the entry that contains `offset` on, at least one if there is any."""
    runs: list[Run] = []
    taken = 0
    tail = topic.tail
    number = bisect_right(tail, offset, key=entry_end)
    while number < len(tail) and taken < bytes_max:
        runs.append(_run(tail[number]))
        taken += len(tail[number])
        number += 1
    return runs


def empty(topic: Topic) -> None:
    """Forget all records of a topic that was destroyed."""
    topic.id = 0
    topic.start_offset, topic.start_ordinal = topic.end_offset, topic.end_ordinal
    topic.tail.clear()
    topic.segments = None


def drop_tail(topic: Topic, end: int) -> None:
    """Drop the entries that end at or before `end`."""
    del topic.tail[: bisect_right(topic.tail, end, key=entry_end)]


def _tail_begin(topic: Topic) -> Position:
    """Return the position at which the tail begins; the topic's end if the tail is empty."""
    if not topic.tail:
        return topic.end
    entry = decode_entry(topic.tail[0])
    return Position(topic.epoch, entry.offset, entry.ordinal)


def _ordinal_in_tail(topic: Topic, ordinal: int) -> Position:
    """Return the position of the record at `ordinal`, which is not before the tail."""
    number = bisect_right(topic.tail, ordinal, key=_entry_end_ordinal)
    if number == len(topic.tail):
        return topic.end
    return _position_in(_run(topic.tail[number]), topic.epoch, ordinal=ordinal)


def _time_in_tail(topic: Topic, ms: int) -> Position:
    """Return the position of the first entry at or after `ms`; the topic's end if there is none."""
    number = bisect_left(topic.tail, ms, key=lambda encoded: decode_entry(encoded).ms)
    if number == len(topic.tail):
        return topic.end
    entry = decode_entry(topic.tail[number])
    if entry.offset < topic.start_offset:
        return topic.start
    return Position(topic.epoch, entry.offset, entry.ordinal)


def _position_in(
    run: Run, epoch: int, *, offset: int | None = None, ordinal: int | None = None
) -> Position:
    """Return the record boundary of a run at an ordinal, or at or after an offset."""
    # If only a run before the wanted place was found, the end of this run is the nearest boundary.
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
