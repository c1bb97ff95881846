"""The index beside a segment: a header that names the topic, then one fixed-width row per run.

A run is a sequence of records with one checksum and one time. Rows are only appended. Readers trust only
rows: bytes of a segment that no row covers are ignored.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crc32c import crc32c

from headrace.model import RESERVED_TOPIC_BYTES_MAX, TOPIC_BYTES_MAX, present_name

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


def encode_header(header: Header) -> bytes:
    name = header.name.encode()
    packed = _HEADER.pack(
        _MAGIC,
        header.topic_id,
        header.epoch,
        header.base,
        header.first_ordinal,
        len(name) - 1,
        name,
    )
    return packed + _CRC.pack(crc32c(packed))


def decode_header(data: bytes) -> Header | None:
    """Return the header, or None if it is cut off or damaged."""
    if len(data) < HEADER_BYTES:
        return None
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    if data[:8] not in (_MAGIC, _OLD_MAGIC) or crc != crc32c(data[: _HEADER.size]):
        return None
    _, topic_id, epoch, base, first_ordinal, *_ = _HEADER.unpack_from(data)
    name = name_in_header(data)
    if is_old_header(data):
        name = present_name(name)
    return Header(topic_id, epoch, base, first_ordinal, name.decode())


def name_in_header(data: bytes) -> bytes:
    """Return the name in a valid header, exactly as stored."""
    *_, length, name = (_OLD_HEADER if is_old_header(data) else _HEADER).unpack_from(data)
    found: bytes = name[: length if is_old_header(data) else length + 1]
    return found


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


class EntryRun(NamedTuple):
    """Records of one journal entry. They are never split, but joined with their neighbours."""

    offset: int
    ordinal: int
    record_count: int
    ms: int
    data: bytes | memoryview


def join_runs(pieces: Sequence[EntryRun]) -> Iterator[tuple[Row, list[bytes | memoryview]]]:
    """Join consecutive pieces to runs; yield each run's row and the bytes that the row covers."""
    parts: list[bytes | memoryview] = []
    offset = ordinal = count = length = ms = crc = 0
    for at, first, records, when, data in pieces:
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
