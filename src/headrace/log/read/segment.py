"""Reading segments: finds runs through the index, checks them, skips damaged ones. Writes nothing.

Reads never wait for the disk in the event loop: bytes that are not in the page cache raise `ColdError`, whose
`warm` brings them there in a thread, after which the same call succeeds. So does an error of the disk, which
the thread looks at with more patience (`file_reads.py`): what it cannot read either is damage for a while.
"""

import errno
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from headrace.log.catalogue_rows import SegmentRow
from headrace.log.file_reads import PAGE_BYTES, read_once, read_patiently
from headrace.log.index import (
    HEADER_BYTES,
    ROW_BYTES,
    Row,
    decode_header,
    decode_row,
    row_position,
)
from headrace.log.index_repair import distrust_first_block, restore_rows
from headrace.log.layout import Layout
from headrace.log.store import ColdError, Run

_ROWS_AT_ONCE = 128
_RESTORED_MAX = 100
"""Damaged indexes that are remembered; of more, all are restored again."""

UNREADABLE_S = 60.0
"""After so long the disk is asked again for what it could not read."""


class DamagedRun(NamedTuple):
    """A stretch of a segment that its index or its checksum does not vouch for."""

    segment: Path
    offset: int
    end: int
    ordinal: int
    record_count: int
    reason: str


class Block(NamedTuple):
    runs: list[Run]
    next_offset: int
    """Where to read on: the end of the last run, or of the damage behind it."""
    row: int
    """The number of the index row to read on from."""
    damaged: list[DamagedRun]


class Unreadable:
    """Pages of files that the disk cannot read: zeros instead of them, and so damage. For any thread."""

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
    """Bytes of a file that are not in memory, or could not be read without patience."""

    def __init__(self, path: Path, position: int, length: int, unreadable: Unreadable) -> None:
        super().__init__(f"{length} bytes of {path} at {position} are not in memory")
        self._path = path
        self._position = position
        self._length = length
        self._unreadable = unreadable

    def warm(self) -> None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # deleted meanwhile: the next attempt sees why
        try:
            _, bad = read_patiently(fd, self._length, self._position)
        finally:
            os.close(fd)
        if bad:
            # Or the same call would find it cold for ever.
            self._unreadable.add(self._path, bad)


class Segments:
    """Open segment files, at most so many at a time."""

    def __init__(self, layout: Layout, open_files_max: int, *, wait_for_disk: bool = True) -> None:
        self._layout = layout
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._open_max = max(2, open_files_max)
        self._wait = wait_for_disk
        self._unreadable = Unreadable()
        self._restored: dict[tuple[int, int, int], list[Row | None]] = {}
        """Rows of indexes that are damaged, as far as their segments say what these were."""
        self._passing: dict[tuple[int, int, int], float] = {}
        """Those of them that were restored while the disk could not read something, and when."""

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def close_deleted(self) -> None:
        """Let go of files that have no name any more, so that their space is given back."""
        for path, fd in list(self._open.items()):
            if os.fstat(fd).st_nlink == 0:
                del self._open[path]
                os.close(fd)

    def read(
        self, segment: SegmentRow, offset: int, bytes_max: int, row: int | None = None
    ) -> Block:
        """Runs from the one that contains `offset`, at least one where there is any.

        `row` is where an earlier block ended, which saves the search.
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
                    return self.read(segment, offset, bytes_max)  # other rows have led here
                index = path.with_suffix(".idx")
                damaged.append(
                    DamagedRun(
                        index,
                        position,
                        position,
                        0,
                        0,
                        "its rows are damaged: records are found by their sizes",
                    )
                )
            chosen: list[Row] = []
            for candidate in rows:
                if taken >= bytes_max:
                    break
                row += 1
                if candidate is None:
                    damaged.append(
                        DamagedRun(path, position, position, 0, 0, "an index row is damaged")
                    )
                    continue
                if candidate.end <= offset:
                    continue  # a row that could not be read may have led the search astray
                chosen.append(candidate)
                taken += candidate.length
                position = candidate.end
            bad = len(damaged)
            self._read_runs(segment, path, chosen, runs, damaged)
            if len(damaged) > bad and self._is_foreign(segment):
                return self.read(segment, offset, bytes_max)
        return Block(runs, position if row < segment.rows else segment.end, row, damaged)

    def find(self, segment: SegmentRow, wanted: Callable[[Row], bool]) -> int:
        """The number of the first row that is wanted; all rows after it must be wanted too."""
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
        # Rows that are wrong lead astray: those around the place that was found are restored if they are.
        first = max(0, low - 1)
        self._rows(segment, first, min(2, segment.rows - first))
        return low if self._index_key(segment) not in self._restored else self.find(segment, wanted)

    def row(self, segment: SegmentRow, number: int) -> Row | None:
        return self._good_row(segment, number, segment.rows)

    def is_damaged(self, segment: SegmentRow, number: int) -> bool:
        return self._rows(segment, number, 1)[0] is None

    def _good_row(self, segment: SegmentRow, number: int, stop: int) -> Row | None:
        """The row, or the next one that is not damaged."""
        while number < stop:
            row = self._rows(segment, number, 1)[0]
            if row is not None:
                return row
            number += 1
        return None

    def packed_rows(self, segment: SegmentRow, first: int, count: int) -> bytes:
        """Rows as the index file has them, damaged ones included; fewer where it ends."""
        path = self._layout.index(segment.topic_id, segment.base)
        return self._pread(path, count * ROW_BYTES, row_position(first))

    def _rows(self, segment: SegmentRow, first: int, count: int) -> list[Row | None]:
        if self._passing:
            self._forget_passing()
        restored = self._restored.get(self._index_key(segment))
        if restored is not None:
            return restored[first : first + count]
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
        self._restored[self._index_key(segment)] = restored
        if self._unreadable.of(path) or self._unreadable.of(path.with_suffix(".idx")):
            # What the disk cannot read now is asked for again later.
            self._passing[self._index_key(segment)] = time.monotonic()
        return restored

    def _forget_passing(self) -> None:
        """Forget rows that were restored while the disk could not read, when it is asked again."""
        for key, since_s in list(self._passing.items()):
            if time.monotonic() - since_s >= UNREADABLE_S:
                del self._passing[key]
                self._restored.pop(key, None)

    def _is_foreign(self, segment: SegmentRow) -> bool:
        """Return whether the index begins with a block of another index: its rows are restored then."""
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
        data = self.packed_rows(segment, first, count)
        whole = len(data) // ROW_BYTES
        rows: list[Row | None] = [decode_row(data, at * ROW_BYTES) for at in range(whole)]
        return rows + [None] * (count - whole)

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
                    DamagedRun(path, row.offset, row.end, row.ordinal, row.record_count, reason)
                )

    def _pread(self, path: Path, length: int, position: int) -> bytes:
        """Up to `length` bytes: fewer where the file ends."""
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
    """Return whether these rows are all there, follow each other, and fit to the segment's ends."""
    end = segment.base if first == 0 else -1
    for row in rows:
        if row is None or (row.offset != end and end >= 0):
            return False
        end = row.offset + row.length
    return first + len(rows) < segment.rows or end == segment.end


def _read_now(fd: int, length: int, position: int) -> bytes:
    """What is in memory, all of it; raises OSError where it is not, or cannot be read."""
    buffer = bytearray(length)
    try:
        count = os.preadv(fd, [buffer], position, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EIO):
            raise
        # The file system cannot say what is in memory.
        return read_once(fd, length, position)
    if count < length and position + count < os.fstat(fd).st_size:
        raise BlockingIOError
    del buffer[count:]
    return bytes(buffer)


def _stretches(bad: frozenset[int], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Parts of a range, each of unreadable pages or of none."""
    while start < end:
        page = start // PAGE_BYTES
        is_bad = page in bad
        while page * PAGE_BYTES < end and (page in bad) is is_bad:
            page += 1
        stop = min(end, page * PAGE_BYTES)
        yield start, stop
        start = stop
