"""A topic's raw bytes and index rows, for readers that decode them elsewhere. Decodes and checks nothing.

A `RawTopic` is the event loop's state of a topic at one moment. A thread uses it for all work that waits for
the disk. Visible bytes never change, so the state stays valid later, unless files were deleted meanwhile.

Many small ranges of topics are packed into one answer: the rows and bytes of each, in sequence.
"""

import struct
from bisect import bisect_right
from collections.abc import Generator, Iterator
from contextlib import closing
from io import FileIO
from itertools import islice, takewhile
from operator import attrgetter
from typing import NamedTuple

from headrace.log.catalogue.rows import SegmentRow
from headrace.log.commit.journal import decode_entry, entry_end
from headrace.log.disk import read_patiently
from headrace.log.layout import Layout
from headrace.log.read.index import ROW_BYTES, Row, encode_row, join_runs
from headrace.log.read.reader import ReadSide
from headrace.log.read.segment import Segments
from headrace.log.store import Topic
from headrace.model import Position

_READ_BYTES = 1 << 20
_OPEN_FILES = 2


class GoneError(Exception):
    """The requested data is no longer stored."""


class RawTopic(NamedTuple):
    layout: Layout
    end: Position
    segments: list[SegmentRow]
    tail: list[bytes]
    """Journal entries after the segments. Some may be in segments already."""

    @classmethod
    def of(cls, layout: Layout, store: ReadSide, topic: Topic) -> "RawTopic":
        """Return the topic's present state. Call this in the event loop's thread."""
        return cls(layout, topic.end, list(store.segment_rows(topic)), list(topic.tail))

    def rows(self, start: int, end: int, rows_max: int) -> bytes:
        """Return the rows that cover these offsets, packed as in an index file."""
        found = bytearray()
        position, left = start, rows_max if start < end else 0
        for segment in self._segments_from(start):
            if segment.base >= end or not left:
                break
            if segment.end <= position:
                continue
            data = self._segment_rows(segment, position, end, left)
            left -= len(data) // ROW_BYTES
            found += data
            position = segment.end
        if left and position < end:
            found += self._tail_rows(position, end, left)
        return bytes(found)

    def pieces(self, start: int, end: int) -> Generator[bytes, None, None]:
        """Yield the bytes from `start` to `end`, or to the next gap, or to data that is deleted meanwhile."""
        position = start
        for segment in self._segments_from(start):
            if segment.base > position or position >= end:
                break
            stop = min(end, segment.end)
            with self._open(segment) as file:
                while position < stop:
                    length = min(_READ_BYTES, stop - position)
                    # Unreadable pages are zeros: a reader that checks the runs sees which are damaged.
                    data, _ = read_patiently(file.fileno(), length, position - segment.base)
                    if not data:
                        return  # the file was truncated: the reader sees that bytes are missing
                    position += len(data)
                    yield data
        tail = self.tail
        for encoded in tail[bisect_right(tail, position, key=entry_end) :]:
            entry = decode_entry(encoded)
            if entry.offset > position or position >= end:
                return
            part = bytes(entry.data[position - entry.offset : end - entry.offset])
            position += len(part)
            yield part

    def splits(self, start: int, end: int, step_bytes: int, splits_max: int) -> list[Position]:
        """Return positions between these offsets where runs begin, about `step_bytes` apart."""
        found: list[Position] = []
        wanted = start + step_bytes
        for segment in self._segments_from(start):
            while wanted < min(segment.end, end) and len(found) < splits_max:
                row = self._first_row(segment, wanted)
                if row is None or row.offset >= end:
                    break
                found.append(Position(self.end.epoch, row.offset, row.ordinal))
                wanted = row.offset + step_bytes
        for encoded in self.tail:
            entry = decode_entry(encoded)
            if wanted <= entry.offset < end and len(found) < splits_max:
                found.append(Position(self.end.epoch, entry.offset, entry.ordinal))
                wanted = entry.offset + step_bytes
        return found

    def _segments_from(self, offset: int) -> list[SegmentRow]:
        return self.segments[bisect_right(self.segments, offset, key=attrgetter("end")) :]

    def _segment_rows(self, segment: SegmentRow, start: int, end: int, rows_max: int) -> bytes:
        first, last = 0, segment.rows
        with closing(self._files()) as files:
            if start > segment.base or end < segment.end:
                if not files.packed_rows(segment, 0, 1):
                    raise GoneError
                first = files.find(segment, lambda row: row.end > start)
                last = files.find(segment, lambda row: row.offset >= end)
                # Damaged rows before `last` may belong to the requested range: the reader must see them.
                while last < segment.rows and files.is_damaged(segment, last):
                    last += 1
            count = min(max(0, last - first), rows_max)
            data = files.packed_rows(segment, first, count)
        if len(data) < count * ROW_BYTES:
            raise GoneError
        return data

    def _first_row(self, segment: SegmentRow, offset: int) -> Row | None:
        with closing(self._files()) as files:
            return files.first_row(segment, lambda row: row.offset >= offset)

    def _tail_rows(self, start: int, end: int, rows_max: int) -> bytes:
        tail = self.tail
        entries = map(decode_entry, tail[bisect_right(tail, start, key=entry_end) :])
        wanted = takewhile(lambda entry: entry.offset < end, entries)
        return b"".join(encode_row(row) for row, _ in islice(join_runs(wanted), rows_max))

    def _files(self) -> Segments:
        # The store's own files belong to the event loop's thread.
        return Segments(self.layout, _OPEN_FILES)

    def _open(self, segment: SegmentRow) -> FileIO:
        try:
            return FileIO(self.layout.segment(segment.topic_id, segment.base))
        except FileNotFoundError:
            raise GoneError from None


RANGES_MAX = 256
"""Largest number of ranges in one request."""

RANGES_BYTES_MAX = 4 * 1024 * 1024
"""Largest number of bytes in one answer: a range that does not fit must be requested alone."""

_HEAD = struct.Struct(">IIQ")
"""Header of each range: size of the rows, size of the records, offset of the first record."""

NOTHING = _HEAD.pack(0, 0, 0)


def pack(rows: bytes, data: bytes, offset: int) -> bytes:
    return _HEAD.pack(len(rows), len(data), offset) + rows + data


def unpack(answer: bytes) -> Iterator[tuple[memoryview, memoryview, int]]:
    """Yield the rows, the bytes and the offset of the bytes, for each range."""
    view, at = memoryview(answer), 0
    while at < len(view):
        rows, data, offset = _HEAD.unpack_from(view, at)
        begin = at + _HEAD.size
        at = begin + rows + data
        yield view[begin : begin + rows], view[begin + rows : at], offset
