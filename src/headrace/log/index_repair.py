"""Restores index rows that are damaged: an index only repeats what its segment says. Writes nothing.

Rows follow each other without a gap, from the segment's first record to its last. So the rows that count
are those which lead from the beginning, and those which lead to the end. Where these do not meet, the sizes
of the records say where each begins. They are believed if following them leads exactly to the next sound row.
"""

from collections.abc import Callable, Sequence

from crc32c import crc32c

from headrace.log.catalogue_rows import SegmentRow
from headrace.log.index import HEADER_BYTES, ROW_BYTES, RUN_BYTES_MAX, RUN_RECORDS_MAX, Row
from headrace.log.records import walk

_BLOCK_BYTES = 4096

Read = Callable[[int, int], bytes]
"""Reads a number of bytes of the segment from an offset on; fewer where it ends."""


def distrust_first_block(rows: Sequence[Row | None]) -> list[Row | None]:
    """Rows without those that share a block with the header, which is that of another segment."""
    shared = (_BLOCK_BYTES - HEADER_BYTES) // ROW_BYTES + 1
    return [*[None] * min(shared, len(rows)), *rows[shared:]]


def restore_rows(rows: Sequence[Row | None], segment: SegmentRow, read: Read) -> list[Row | None]:
    """The rows of a whole index, None for each that cannot be restored."""
    first = _lead_on(rows, segment)
    last = _lead_back(rows, segment, first)
    gap = _gap(rows, segment, first, last)
    if first == last and (gap.base, gap.first_ordinal) == (gap.end, gap.end_ordinal):
        return list(rows)
    # A row of another place may fit to one side: if the records do not, its neighbours are doubted too.
    for before, after in ((first, last), (max(0, first - 1), min(len(rows), last + 1))):
        made = _rows_of(_gap(rows, segment, before, after), read)
        if made is not None:
            return [*rows[:before], *made, *rows[after:]]
    # The segment is damaged there too: what holds by itself is all there is.
    return [
        *rows[:first],
        *(_if_inside(row, gap) for row in rows[first:last]),
        *rows[last:],
    ]


def _gap(rows: Sequence[Row | None], segment: SegmentRow, first: int, last: int) -> SegmentRow:
    """Describe the records between two rows, as if they were a segment."""
    before = rows[first - 1] if first else None
    after = rows[last] if last < len(rows) else None
    return SegmentRow(
        segment.topic_id,
        before.end if before else segment.base,
        after.offset if after else segment.end,
        last - first,
        before.ordinal + before.record_count if before else segment.first_ordinal,
        after.ordinal if after else segment.end_ordinal,
        before.ms if before else segment.first_ms,
        # No earlier than they were: who asks for a time gets a few records more, and misses none.
        after.ms if after else segment.last_ms,
    )


def _if_inside(row: Row | None, gap: SegmentRow) -> Row | None:
    return row if row is not None and gap.base <= row.offset < row.end <= gap.end else None


def _lead_on(rows: Sequence[Row | None], segment: SegmentRow) -> int:
    """The number of the first row that does not follow from the beginning."""
    offset, ordinal = segment.base, segment.first_ordinal
    for number, row in enumerate(rows):
        if row is None or (row.offset, row.ordinal) != (offset, ordinal) or row.end > segment.end:
            return number
        offset, ordinal = row.end, row.ordinal + row.record_count
    return len(rows)


def _lead_back(rows: Sequence[Row | None], segment: SegmentRow, first: int) -> int:
    """The number of the first row from which rows lead to the end, `first` at least."""
    offset, ordinal = segment.end, segment.end_ordinal
    for number in range(len(rows), first, -1):
        row = rows[number - 1]
        if row is None or (row.end, row.ordinal + row.record_count) != (offset, ordinal):
            return number
        offset, ordinal = row.offset, row.ordinal
    return first


def _rows_of(gap: SegmentRow, read: Read) -> list[Row | None] | None:
    """As many rows as are missing, from the records between two offsets; None if these do not fit."""
    rows: list[Row | None] = []
    offset, ordinal = gap.base, gap.first_ordinal
    for left in range(gap.rows, 0, -1):
        # Each row that follows takes one record at least.
        count_max = min(RUN_RECORDS_MAX, gap.end_ordinal - ordinal - (left - 1))
        block = read(offset, min(gap.end - offset, RUN_BYTES_MAX))
        length, count = walk(block, count_max)
        if not count:
            return None
        rows.append(Row(offset, length, ordinal, count, gap.last_ms, crc32c(block[:length])))
        offset += length
        ordinal += count
    return rows if rows and (offset, ordinal) == (gap.end, gap.end_ordinal) else None
