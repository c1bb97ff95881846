"""Many small ranges of topics in one answer: the rows and bytes of each, one behind the other. Pure."""

import struct
from collections.abc import Iterator

RANGES_MAX = 256
"""Ranges in one request."""

RANGES_BYTES_MAX = 4 * 1024 * 1024
"""Bytes in one answer to it: what does not fit is asked for alone."""

_HEAD = struct.Struct(">IIQ")
"""Before each: bytes of rows, bytes of records, the offset of the first of those."""

NOTHING = _HEAD.pack(0, 0, 0)


def pack(rows: bytes, data: bytes, offset: int) -> bytes:
    return _HEAD.pack(len(rows), len(data), offset) + rows + data


def unpack(answer: bytes) -> Iterator[tuple[memoryview, memoryview, int]]:
    """Rows, bytes and the offset of those, for each range."""
    view, at = memoryview(answer), 0
    while at < len(view):
        rows, data, offset = _HEAD.unpack_from(view, at)
        begin = at + _HEAD.size
        at = begin + rows + data
        yield view[begin : begin + rows], view[begin + rows : at], offset
