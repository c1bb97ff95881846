"""Checks of the segments of one topic: every byte, checksum, ordinal, time and boundary. Changes nothing.

Each segment is first checked alone against its row of the catalogue. Then all segments are checked against
each other and against the topic's row. So if segments vanish meanwhile, the others need not be read again.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from headrace.log.catalogue.rows import SegmentRow, TopicRow
from headrace.log.layout import Layout
from headrace.log.read.index import (
    HEADER_BYTES,
    ROW_BYTES,
    Row,
    decode_header,
    decode_rows,
    distrust_first_block,
    restore_rows,
)
from headrace.log.records import boundary, holds
from headrace.log.verify.report import Findings, VerifiedRange
from headrace.model import JUMP

Advance = Callable[[int], None]
"""Called with the number of bytes checked since the last call."""


class SegmentWork(NamedTuple):
    """A segment to check, and its topic."""

    topic: TopicRow
    segment: SegmentRow


CheckSegments = Callable[[Layout, Sequence[SegmentWork], Advance], Iterable["SegmentCheck"]]
"""Function that checks segments of any topics, as `SegmentCheck` does."""

_BLOCK_BYTES = 4 << 20
_ROWS_AT_ONCE = 1024


class SegmentCheck(Findings):
    """Check of one segment: the runs in its index against the catalogue's row for the segment."""

    def __init__(self, layout: Layout, topic: TopicRow, segment: SegmentRow) -> None:
        super().__init__(topic.name.decode())
        self.segment = segment
        self.epoch = topic.epoch
        self._row = topic
        self._path = layout.segment(segment.topic_id, segment.base)
        self._log = str(self._path.relative_to(layout.root))
        self._index = str(self._path.with_suffix(".idx").relative_to(layout.root))
        self._offset, self._ordinal = segment.base, segment.first_ordinal
        self._ms = segment.first_ms
        self._bad_rows = 0
        self._foreign = False
        """True if the index begins with a block of another index."""

    def run(self, advance: Advance) -> None:
        segment = self.segment
        with ExitStack() as stack:
            index = stack.enter_context(_File(self._path.with_suffix(".idx")))
            log = stack.enter_context(_File(self._path))
            if log.missing:
                rest = self._until(segment.end, segment.end_ordinal)
                self.bad(self._log, "the file is missing", rest)
                return
            if index.missing:
                self.bad(self._index, "the file is missing")
            else:
                self._check_header(index.read(0, HEADER_BYTES))
            for row in self._sound_rows(index, log):
                if row is None:
                    self._bad_rows += 1
                    continue
                self._check_place(row.offset, row.ordinal)
                self._check_run(row, log.read(row.offset - segment.base, row.length))
                advance(row.length)
        self._check_place(segment.end, segment.end_ordinal)
        if not self.damages and self._ms != segment.last_ms:
            self.bad(self._index, "the last row's time is not the catalogue's")

    def _sound_rows(self, index: "_File", log: "_File") -> Iterator[Row | None]:
        """Yield the rows of the index; from the first damaged row on, yield restored rows."""
        segment = self.segment
        end = segment.base
        for number, row in enumerate(_rows(index, segment.rows)):
            if row is None or row.offset != end or row.end > segment.end or self._foreign:
                self.bad(self._index, "the index rows are damaged")
                rows = list(_rows(index, segment.rows))
                restored = restore_rows(
                    distrust_first_block(rows) if self._foreign else rows,
                    segment,
                    lambda at, length: log.read(at - segment.base, length),
                )
                yield from restored[number:]
                return
            yield row
            end = row.end

    def _check_header(self, data: bytes) -> None:
        header = decode_header(data)
        if header is None:
            self.bad(self._index, "the header is damaged")
            return
        segment, topic = self.segment, self._row
        self.epoch = header.epoch
        said = header.topic_id, header.base, header.first_ordinal, header.name.encode()
        if said != (topic.id, segment.base, segment.first_ordinal, topic.name):
            self.bad(self._index, "the header does not agree with the catalogue")
            self._foreign = said[:2] != (topic.id, segment.base)
        elif header.epoch > topic.epoch:
            self.bad(
                self._index,
                f"the header's epoch {header.epoch} is after the catalogue's {topic.epoch}",
            )

    def _check_place(self, offset: int, ordinal: int) -> None:
        """Check that the next run, or the segment's end, begins where the last run ended."""
        if self._bad_rows:
            self.bad(self._index, "the index rows are damaged", self._until(offset, ordinal))
            self._bad_rows = 0
        elif (offset, ordinal) != (self._offset, self._ordinal):
            self.bad(self._index, "no index row holds these", self._until(offset, ordinal))
        self._offset, self._ordinal = offset, ordinal

    def _check_run(self, row: Row, data: bytes) -> None:
        here = VerifiedRange(row.offset, row.end, row.ordinal, row.ordinal + row.record_count)
        if len(data) < row.length:
            self.bad(self._log, "the file ends before it, or cannot be read there", here)
        elif crc32c(data) != row.crc:
            self.bad(self._log, "the checksum is wrong", here)
        elif not holds(data, row.record_count):
            self.bad(self._log, "the records do not fill their run", here)
        elif not _starts_at_a_record(self._row, row, data):
            self.bad(self._log, "the topic does not start at a record", here)
        else:
            self.good(here)
        if row.ms < self._ms:
            self.bad(self._index, f"the time goes back from {self._ms} to {row.ms} ms", here)
        self._ms = max(self._ms, row.ms)
        self._offset, self._ordinal = here.end, here.end_ordinal

    def _until(self, offset: int, ordinal: int) -> VerifiedRange:
        return VerifiedRange(self._offset, offset, self._ordinal, ordinal)


def join_segments(topic: TopicRow, checks: Sequence[SegmentCheck]) -> Findings:
    """Check all segments of a topic together, from start to end: offsets, ordinals, times and epochs."""
    found = Findings(topic.name.decode())
    offset, ordinal = topic.start_offset, topic.start_ordinal
    ms = epoch = 0
    for number, check in enumerate(checks):
        segment = check.segment
        if number or segment.base > offset:
            _check_gap(found, offset, ordinal, segment.base, segment.first_ordinal)
        elif segment.base == offset and segment.first_ordinal != ordinal:
            found.bad("catalogue", "the topic's first ordinal is not its first segment's")
        if segment.first_ms < ms or check.epoch < epoch:
            found.bad(
                "catalogue", f"the segment at offset {segment.base} is older than the one before it"
            )
        found.add(check)
        offset, ordinal = segment.end, segment.end_ordinal
        ms, epoch = segment.last_ms, check.epoch
    _check_gap(found, offset, ordinal, topic.end_offset, topic.end_ordinal)
    if ms > topic.last_ms:
        found.bad("catalogue", "the topic's last time is before its last segment's")
    return found


def _check_gap(
    found: Findings, offset: int, ordinal: int, next_offset: int, next_ordinal: int
) -> None:
    skipped, records = next_offset - offset, next_ordinal - ordinal
    # After a crash that may have lost records, a topic continues a multiple of JUMP ahead, so that no
    # offset that a reader has seen is given to another record.
    jumped = skipped == records and skipped > 0 and skipped % JUMP == 0
    if (skipped or records) and not jumped:
        here = VerifiedRange(offset, next_offset, ordinal, next_ordinal)
        found.bad("catalogue", "no segment holds these", here)


def _starts_at_a_record(topic: TopicRow, row: Row, data: bytes) -> bool:
    if not row.offset < topic.start_offset < row.end:
        return True
    at, passed = boundary(data, topic.start_offset - row.offset)
    return (row.offset + at, row.ordinal + passed) == (topic.start_offset, topic.start_ordinal)


def _rows(index: "_File", count: int) -> Iterator[Row | None]:
    """Yield as many rows as the catalogue counts; None for a row that is damaged or cut off."""
    for first in range(0, count, _ROWS_AT_ONCE):
        wanted = min(_ROWS_AT_ONCE, count - first)
        rows = list(decode_rows(index.read(HEADER_BYTES + first * ROW_BYTES, wanted * ROW_BYTES)))
        yield from rows
        yield from [None] * (wanted - len(rows))


class _File:
    """A file that is read forwards in blocks. Treats an unreadable place as the end of the file."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._size = os.fstat(self._fd).st_size
        except FileNotFoundError:
            self._fd = -1
            self._size = 0
        self._at = 0
        self._block = b""

    @property
    def missing(self) -> bool:
        return self._fd < 0

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, position: int, length: int) -> bytes:
        begin = position - self._at
        if not 0 <= begin <= begin + length <= len(self._block):
            self._at, begin = position, 0
            ahead = min(_BLOCK_BYTES, self._size - position)
            self._block = self._pread(position, max(length, ahead))
            if len(self._block) < length:
                self._block = self._pread(position, length)
        return self._block[begin : begin + length]

    def _pread(self, position: int, length: int) -> bytes:
        try:
            return os.pread(self._fd, length, position)
        except OSError:
            # The disk cannot read a sector: the run with this sector is reported, and the next run is tried.
            return b""
