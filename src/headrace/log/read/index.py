"""The index beside a segment: a header that names the topic, then one fixed-width row per run.

A run is a sequence of records with one checksum and one time. Rows are only appended. Readers trust only
rows: bytes of a segment that no row covers are ignored.

Damaged rows are restored from the segment, which holds the same facts. Rows follow each other without a gap,
from the segment's first record to its last. So the valid rows are those that continue from the beginning, and
those that lead to the end. Between these two, the sizes of the records tell where each record begins. The
sizes are trusted if following them leads exactly to the next valid row.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from headrace.log.catalogue.rows import SegmentRow
from headrace.log.disk import PAGE_BYTES
from headrace.log.records import walk
from headrace.model import RESERVED_TOPIC_BYTES_MAX, TOPIC_BYTES_MAX, present_name

if TYPE_CHECKING:
    from headrace.log.commit.journal import Entry

RUN_RECORDS_MAX = 500
"""Limit that keeps the search for record boundaries in a run fast without a table of positions."""
RUN_BYTES_MAX = 1 << 20
RUN_MS_MAX = 100
"""Precision of record times: records of one run share one time, which the journal's entries already have."""

_MAGIC = b"HRINDEX2"
_OLD_MAGIC = b"HRINDEX1"
"""Magic of earlier versions: names under `channel/` and `logux/` have become reserved names since."""
# A name has at least one byte: its length minus one fits into a byte, and both headers have one size.
_HEADER = struct.Struct(f">8sQQQQB{RESERVED_TOPIC_BYTES_MAX}s")
_OLD_HEADER = struct.Struct(f">8sQQQQH{TOPIC_BYTES_MAX}s")
assert _HEADER.size == _OLD_HEADER.size
_CRC = struct.Struct(">I")
_ROW = struct.Struct(">QIQIQI")
HEADER_BYTES = _HEADER.size + 4
ROW_BYTES = _ROW.size + 4


class Header(NamedTuple):
    topic_id: int
    epoch: int
    base: int
    """Offset of the segment's first byte."""
    first_ordinal: int
    name: str


class Row(NamedTuple):
    offset: int
    length: int
    ordinal: int
    record_count: int
    ms: int
    crc: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def end_ordinal(self) -> int:
        return self.ordinal + self.record_count


def encode_header(header: Header) -> bytes:
    name = header.name.encode()
    packed = _HEADER.pack(_MAGIC, *header[:4], len(name) - 1, name)
    return packed + _CRC.pack(crc32c(packed))


def decode_header(data: bytes) -> Header | None:
    """Return the header, or None if it is cut off or damaged."""
    if len(data) < HEADER_BYTES:
        return None
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    if data[:8] not in (_MAGIC, _OLD_MAGIC) or crc != crc32c(data[: _HEADER.size]):
        return None
    name = name_in_header(data)
    if is_old_header(data):
        name = present_name(name)
    _, topic_id, epoch, base, first_ordinal, *_ = _HEADER.unpack_from(data)
    return Header(topic_id, epoch, base, first_ordinal, name.decode())


def name_in_header(data: bytes) -> bytes:
    """Return the name in a valid header, exactly as stored."""
    is_old = is_old_header(data)
    *_, length, name = (_OLD_HEADER if is_old else _HEADER).unpack_from(data)
    return bytes(name[: length if is_old else length + 1])


def is_old_header(data: bytes) -> bool:
    """True if an earlier version wrote the header; `decode_header` then returns the topic's present name."""
    return data[:8] == _OLD_MAGIC


def encode_row(row: Row) -> bytes:
    packed = _ROW.pack(*row)
    return packed + _CRC.pack(crc32c(packed))


def decode_row(data: bytes, at: int = 0) -> Row | None:
    """Return the row at `at`, or None if it is damaged."""
    (crc,) = _CRC.unpack_from(data, at + _ROW.size)
    if crc != crc32c(data[at : at + _ROW.size]):
        return None
    return Row._make(_ROW.unpack_from(data, at))


def decode_rows(data: bytes) -> Iterator[Row | None]:
    """Yield every whole row of a block; None for a damaged row."""
    for at in range(0, len(data) - ROW_BYTES + 1, ROW_BYTES):
        yield decode_row(data, at)


def row_position(number: int) -> int:
    return HEADER_BYTES + number * ROW_BYTES


def join_runs(appends: Iterable["Entry"]) -> Iterator[tuple[Row, list[bytes | memoryview]]]:
    """Join consecutive appends to runs; yield each run's row and the bytes that the row covers.

    The records of one entry of the journal are never split.
    """
    parts: list[bytes | memoryview] = []
    offset = ordinal = count = length = ms = crc = 0
    for _, _, at, first, records, when, _, data in appends:
        size = len(data)
        if parts and (
            at != offset + length
            or when != ms
            or count + records > RUN_RECORDS_MAX
            or length + size > RUN_BYTES_MAX
        ):
            yield Row(offset, length, ordinal, count, ms, crc), parts
            parts = []
        if not parts:
            offset, ordinal, count, length, ms, crc = at, first, 0, 0, when, 0
        parts.append(data)
        count += records
        length += size
        crc = crc32c(data, crc)
    if parts:
        yield Row(offset, length, ordinal, count, ms, crc), parts


Read = Callable[[int, int], bytes]
"""Function that reads a number of bytes of the segment from an offset on; fewer at the segment's end."""


def distrust_first_block(rows: Sequence[Row | None]) -> list[Row | None]:
    """Return the rows, with None for those in the header's block, which belongs to another segment."""
    shared = (PAGE_BYTES - HEADER_BYTES) // ROW_BYTES + 1
    return [*[None] * min(shared, len(rows)), *rows[shared:]]


def restore_rows(rows: Sequence[Row | None], segment: SegmentRow, read: Read) -> list[Row | None]:
    """Return the rows of a whole index; None for each row that cannot be restored."""
    first = _lead_on(rows, segment)
    last = _lead_back(rows, segment, first)
    gap = _gap(rows, segment, first, last)
    if first == last and (gap.base, gap.first_ordinal) == (gap.end, gap.end_ordinal):
        return list(rows)
    # A misplaced row may fit on one side. If the records do not fit, its neighbours are not trusted either.
    for before, after in ((first, last), (max(0, first - 1), min(len(rows), last + 1))):
        wider = _gap(rows, segment, before, after)
        made = list(rows_of_records(wider, read, count=wider.rows))
        ends = (made[-1].end, made[-1].end_ordinal) if made else None
        if len(made) == wider.rows and ends == (wider.end, wider.end_ordinal):
            return [*rows[:before], *made, *rows[after:]]
    # The segment is damaged there too: only the rows that are valid by themselves remain.
    inside = (
        row if row is not None and gap.base <= row.offset < row.end <= gap.end else None
        for row in rows[first:last]
    )
    return [*rows[:first], *inside, *rows[last:]]


def _gap(rows: Sequence[Row | None], segment: SegmentRow, first: int, last: int) -> SegmentRow:
    """Describe the records between two rows, as if they were a segment."""
    before = rows[first - 1] if first else None
    after = rows[last] if last < len(rows) else None
    return segment._replace(
        base=before.end if before else segment.base,
        end=after.offset if after else segment.end,
        rows=last - first,
        first_ordinal=before.end_ordinal if before else segment.first_ordinal,
        end_ordinal=after.ordinal if after else segment.end_ordinal,
        first_ms=before.ms if before else segment.first_ms,
        last_ms=after.ms if after else segment.last_ms,
    )


def _lead_on(rows: Sequence[Row | None], segment: SegmentRow) -> int:
    """Return the number of the first row that does not continue from the beginning."""
    offset, ordinal = segment.base, segment.first_ordinal
    for number, row in enumerate(rows):
        if row is None or (row.offset, row.ordinal) != (offset, ordinal) or row.end > segment.end:
            return number
        offset, ordinal = row.end, row.end_ordinal
    return len(rows)


def _lead_back(rows: Sequence[Row | None], segment: SegmentRow, first: int) -> int:
    """Return the number of the first row from which rows lead to the end, at least `first`."""
    offset, ordinal = segment.end, segment.end_ordinal
    for number in range(len(rows), first, -1):
        row = rows[number - 1]
        if row is None or (row.end, row.end_ordinal) != (offset, ordinal):
            return number
        offset, ordinal = row.offset, row.ordinal
    return first


def rows_of_records(gap: SegmentRow, read: Read, *, count: int | None = None) -> Iterator[Row]:
    """Yield rows for the records of a segment or gap, up to a size that no record can have.

    With `count`, yield at most that many rows, and keep at least one record for each of them.
    """
    offset, ordinal = gap.base, gap.first_ordinal
    for left in repeat(0) if count is None else range(count - 1, -1, -1):
        block = read(offset, min(max(0, gap.end - offset), RUN_BYTES_MAX))
        length, records = walk(block, min(RUN_RECORDS_MAX, gap.end_ordinal - ordinal - left))
        if not records:
            return
        # The time is never too early: a reader that asks for a time gets some extra records, and misses none.
        yield Row(offset, length, ordinal, records, gap.last_ms, crc32c(block[:length]))
        offset += length
        ordinal += records
