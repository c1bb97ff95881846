"""Reading of segments: finds runs through the index, checks them, and skips damaged ones. Writes nothing.

Reads never wait for the disk in the event loop: bytes that are not in the page cache raise `ColdError`, whose
`warm` loads them in a thread, after which the same call succeeds. A disk error raises `ColdError` too: the
thread retries such a read (`log/disk.py`), and bytes that it cannot read either count as damaged for a
while.
"""

import errno
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from headrace.log.catalogue.rows import SegmentRow
from headrace.log.disk import PAGE_BYTES, read_once, read_patiently
from headrace.log.layout import Layout
from headrace.log.read.index import (
    HEADER_BYTES,
    ROW_BYTES,
    Row,
    decode_header,
    decode_rows,
    distrust_first_block,
    restore_rows,
    row_position,
)
from headrace.log.store import ColdError, Run

_ROWS_AT_ONCE = 128
_RESTORED_MAX = 100
"""Number of damaged indexes whose restored rows are cached; above it, the cache is cleared."""

UNREADABLE_S = 60.0
"""Seconds after which unreadable pages are read from the disk again."""


class DamagedRun(NamedTuple):
    """A range of a segment that its index or its checksum does not confirm."""

    segment: Path
    reason: str
    offset: int
    end: int
    ordinal: int = 0
    record_count: int = 0

    def __str__(self) -> str:
        count = self.record_count
        lost = f"{count} records " if count != 1 else "1 record "
        where = f"from offset {self.offset} to {self.end}, in {self.segment.name}"
        return f"{lost if count else ''}{where}: {self.reason}"


class SegmentBlock(NamedTuple):
    runs: list[Run]
    next_offset: int
    """Offset for the next read: the end of the last run, or of the damage after it."""
    row: int
    """Number of the index row for the next read."""
    damaged: list[DamagedRun]


class Unreadable:
    """Pages that the disk cannot read: they are read as zeros, and so as damage. Usable from any thread."""

    def __init__(self) -> None:
        self._pages: dict[Path, tuple[float, frozenset[int]]] = {}

    def add(self, path: Path, pages: Iterable[int]) -> None:
        self._pages[path] = (time.monotonic(), self.of(path).union(pages))

    def of(self, path: Path) -> frozenset[int]:
        if path not in self._pages:
            return frozenset()
        since_s, pages = self._pages[path]
        if time.monotonic() - since_s < UNREADABLE_S:
            return pages
        self._pages.pop(path, None)
        return frozenset()


class ColdFileError(ColdError):
    """Bytes of a file are not in memory, or could not be read without retries."""

    def __init__(self, path: Path, position: int, length: int, unreadable: Unreadable) -> None:
        super().__init__(f"{length} bytes of {path} at {position} are not in memory")
        self._path = path
        self._position = position
        self._length = length
        self._unreadable = unreadable

    def warm(self) -> None:
        try:
            with FileIO(self._path) as file:
                _, bad = read_patiently(file.fileno(), self._length, self._position)
        except FileNotFoundError:
            return  # deleted meanwhile: the next attempt finds out why
        if bad:
            # Otherwise the same call would raise ColdFileError for ever.
            self._unreadable.add(self._path, bad)


class Segments:
    """Open segment files, with a limit on their number."""

    def __init__(self, layout: Layout, open_files_max: int, *, wait_for_disk: bool = True) -> None:
        self._layout = layout
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._open_max = max(2, open_files_max)
        self._wait = wait_for_disk
        self._unreadable = Unreadable()
        self._restored: dict[tuple[int, int, int], tuple[list[Row | None], float | None]] = {}
        """Rows of damaged indexes, restored as far as their segments allow; and, if the disk could not read
        some page, the time of the restoration."""

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def close_deleted(self) -> None:
        """Close files that are deleted, so that the disk space is freed."""
        for path, fd in list(self._open.items()):
            if os.fstat(fd).st_nlink == 0:
                del self._open[path]
                os.close(fd)

    def read(
        self, segment: SegmentRow, offset: int, bytes_max: int, row: int | None = None
    ) -> SegmentBlock:
        """Return runs from the one that contains `offset` on, at least one if there is any.

        `row` is the row at which an earlier block ended, which saves the search.
        """
        if row is None or self._index_key(segment) in self._restored:
            row = self.find(segment, lambda candidate: candidate.end > offset)
        restored = self._index_key(segment) in self._restored
        path = self._layout.segment(segment.topic_id, segment.base)
        runs: list[Run] = []
        damaged: list[DamagedRun] = []
        taken = 0
        position = offset
        while row < segment.rows and taken < bytes_max:
            rows = self._rows(segment, row, min(_ROWS_AT_ONCE, segment.rows - row))
            if self._index_key(segment) in self._restored:
                if not restored:
                    return self.read(segment, offset, bytes_max)  # damaged rows led here
                reason = "its rows are damaged: records are found by their sizes"
                damaged.append(DamagedRun(path.with_suffix(".idx"), reason, position, position))
            chosen: list[Row] = []
            for candidate in rows:
                if taken >= bytes_max:
                    break
                row += 1
                if candidate is None:
                    damaged.append(DamagedRun(path, "an index row is damaged", position, position))
                    continue
                if candidate.end <= offset:
                    continue  # a damaged row may have misled the search
                chosen.append(candidate)
                taken += candidate.length
                position = candidate.end
            bad = len(damaged)
            self._read_runs(segment, path, chosen, runs, damaged)
            if len(damaged) > bad and self._is_foreign(segment):
                return self.read(segment, offset, bytes_max)
        return SegmentBlock(runs, position if row < segment.rows else segment.end, row, damaged)

    def find(self, segment: SegmentRow, wanted: Callable[[Row], bool]) -> int:
        """Return the number of the first row that is wanted; all rows after it must be wanted too."""
        restored = self._index_key(segment) in self._restored
        low, high = 0, segment.rows
        while low < high:
            middle = (low + high) // 2
            row = self._good_row(segment, middle, high)
            if row is None or wanted(row):
                high = middle
            else:
                low = middle + 1
        if restored:
            return low
        # Wrong rows mislead the search: reading the rows around the result restores them if they are wrong.
        first = max(0, low - 1)
        self._rows(segment, first, min(2, segment.rows - first))
        return low if self._index_key(segment) not in self._restored else self.find(segment, wanted)

    def first_row(self, segment: SegmentRow, wanted: Callable[[Row], bool]) -> Row | None:
        """Return the row that `find` finds, or the next one that is not damaged."""
        return self._good_row(segment, self.find(segment, wanted), segment.rows)

    def is_damaged(self, segment: SegmentRow, number: int) -> bool:
        return self._rows(segment, number, 1)[0] is None

    def _good_row(self, segment: SegmentRow, number: int, stop: int) -> Row | None:
        """Return the row, or the next one that is not damaged."""
        while number < stop:
            row = self._rows(segment, number, 1)[0]
            if row is not None:
                return row
            number += 1
        return None

    def packed_rows(self, segment: SegmentRow, first: int, count: int) -> bytes:
        """Return rows exactly as in the index file, including damaged ones; fewer at the end of the file."""
        path = self._layout.index(segment.topic_id, segment.base)
        return self._pread(path, count * ROW_BYTES, row_position(first))

    def _rows(self, segment: SegmentRow, first: int, count: int) -> list[Row | None]:
        key = self._index_key(segment)
        if key in self._restored:
            restored, since_s = self._restored[key]
            if since_s is None or time.monotonic() - since_s < UNREADABLE_S:
                return restored[first : first + count]
            del self._restored[key]  # the pages that the disk could not read are read again
        rows = self._rows_on_disk(segment, first, count)
        if _are_sound(rows, segment, first):
            return rows
        restored = self._restore(segment, self._rows_on_disk(segment, 0, segment.rows))
        return restored[first : first + count]

    def _restore(self, segment: SegmentRow, rows: list[Row | None]) -> list[Row | None]:
        path = self._layout.segment(segment.topic_id, segment.base)
        restored = restore_rows(
            rows, segment, lambda at, length: self._pread(path, length, at - segment.base)
        )
        if len(self._restored) >= _RESTORED_MAX:
            self._restored.clear()
        is_unreadable = self._unreadable.of(path) or self._unreadable.of(path.with_suffix(".idx"))
        since_s = time.monotonic() if is_unreadable else None
        self._restored[self._index_key(segment)] = restored, since_s
        return restored

    def _is_foreign(self, segment: SegmentRow) -> bool:
        """True if the index begins with a block of another index; then its rows are restored."""
        if self._index_key(segment) in self._restored:
            return False
        path = self._layout.index(segment.topic_id, segment.base)
        header = decode_header(self._pread(path, HEADER_BYTES, 0))
        if header is None or (header.topic_id, header.base) == (segment.topic_id, segment.base):
            return False
        rows = self._rows_on_disk(segment, 0, segment.rows)
        self._restore(segment, distrust_first_block(rows))
        return True

    def _rows_on_disk(self, segment: SegmentRow, first: int, count: int) -> list[Row | None]:
        rows = list(decode_rows(self.packed_rows(segment, first, count)))
        return rows + [None] * (count - len(rows))

    @staticmethod
    def _index_key(segment: SegmentRow) -> tuple[int, int, int]:
        return segment.topic_id, segment.base, segment.rows

    def _read_runs(
        self,
        segment: SegmentRow,
        path: Path,
        rows: list[Row],
        runs: list[Run],
        damaged: list[DamagedRun],
    ) -> None:
        if not rows:
            return
        first, last = rows[0].offset, rows[-1].end
        data = self._pread(path, last - first, first - segment.base)
        for row in rows:
            body = data[row.offset - first : row.end - first]
            if len(body) == row.length and crc32c(body) == row.crc:
                runs.append(Run(row.offset, row.ordinal, row.record_count, row.ms, body))
            else:
                reason = "bad checksum"
                if self._unreadable.of(path):
                    reason = "bad checksum, or the disk cannot read it"
                damaged.append(
                    DamagedRun(path, reason, row.offset, row.end, row.ordinal, row.record_count)
                )

    def _pread(self, path: Path, length: int, position: int) -> bytes:
        """Return up to `length` bytes, fewer at the end of the file."""
        try:
            fd = self._fd(path)
        except FileNotFoundError:
            return b""
        bad = self._unreadable.of(path)
        if not bad:
            return self._read(fd, path, length, position)
        data = bytearray()
        for start, stop in _stretches(bad, position, position + length):
            if start // PAGE_BYTES in bad:
                data += bytes(stop - start)
                continue
            data += self._read(fd, path, stop - start, start)
            if len(data) < stop - position:
                break
        return bytes(data)

    def _read(self, fd: int, path: Path, length: int, position: int) -> bytes:
        if self._wait:
            data, bad = read_patiently(fd, length, position)
            if bad:
                self._unreadable.add(path, bad)
            return data
        try:
            return _read_now(fd, length, position)
        except OSError:
            raise ColdFileError(path, position, length, self._unreadable) from None

    def _fd(self, path: Path) -> int:
        fd = self._open.get(path)
        if fd is None:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open[path] = fd
            if len(self._open) > self._open_max:
                os.close(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(path)
        return fd


def _are_sound(rows: list[Row | None], segment: SegmentRow, first: int) -> bool:
    """True if no row is missing, the rows follow each other, and they match the segment's ends."""
    end = segment.base if first == 0 else -1
    for row in rows:
        if row is None or (row.offset != end and end >= 0):
            return False
        end = row.offset + row.length
    return first + len(rows) < segment.rows or end == segment.end


def _read_now(fd: int, length: int, position: int) -> bytes:
    """Return the bytes if all are in memory; raise OSError if some are not, or cannot be read."""
    buffer = bytearray(length)
    try:
        count = os.preadv(fd, [buffer], position, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EIO):
            raise
        # The file system cannot tell which pages are in memory.
        return read_once(fd, length, position)
    if count < length and position + count < os.fstat(fd).st_size:
        raise BlockingIOError
    del buffer[count:]
    return bytes(buffer)


def _stretches(bad: frozenset[int], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Split a range into parts with only unreadable pages and parts without any."""
    while start < end:
        page = start // PAGE_BYTES
        is_bad = page in bad
        while page * PAGE_BYTES < end and (page in bad) is is_bad:
            page += 1
        stop = min(end, page * PAGE_BYTES)
        yield start, stop
        start = stop
