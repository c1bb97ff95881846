"""Boundaries of records in a block of bytes. A record is `[uint32 size][payload]`, nothing else."""

import struct
from functools import lru_cache

from headrace.model import PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES

_SIZE = struct.Struct(">I")


def pack_record(payload: bytes) -> bytes:
    return _SIZE.pack(len(payload)) + payload


def split_records(data: bytes, count: int) -> list[bytes]:
    """Split `data` into its `count` records. Raises ValueError if `data` is not exactly `count` records."""
    if count > 1 and len(data) % count == 0 and _uniform(data, count):
        return list(_uniform_struct(len(data) // count, count).unpack(data))
    records = []
    position, end = 0, len(data)
    unpack = _SIZE.unpack_from
    try:
        while position < end:
            stop = position + RECORD_HEADER_BYTES + unpack(data, position)[0]
            records.append(data[position:stop])
            position = stop
    except struct.error:
        raise ValueError("a record's size is cut off") from None
    if position != end or len(records) != count:
        raise ValueError(f"{len(records)} records, {count} expected")
    return records


def holds(data: bytes, count: int) -> bool:
    """True if `data` is exactly `count` records, none larger than a record may be."""
    if count > 1 and len(data) % count == 0 and _uniform(data, count):
        return len(data) // count - RECORD_HEADER_BYTES <= PAYLOAD_BYTES_MAX
    position = 0
    unpack = _SIZE.unpack_from
    try:
        if len(data) <= PAYLOAD_BYTES_MAX:
            # Data that is this short and ends at a record's end cannot contain a record that is too long.
            for _ in range(count):
                position += RECORD_HEADER_BYTES + unpack(data, position)[0]
            return position == len(data)
        for _ in range(count):
            (size,) = unpack(data, position)
            if size > PAYLOAD_BYTES_MAX:
                return False
            position += RECORD_HEADER_BYTES + size
    except struct.error:
        return False
    return position == len(data)


def boundary(data: bytes, position: int) -> tuple[int, int]:
    """Return the first record boundary at or after `position`, and the number of records before it."""
    at = passed = 0
    while at < position:
        at += RECORD_HEADER_BYTES + _SIZE.unpack_from(data, at)[0]
        passed += 1
    return at, passed


def nth(data: bytes, count: int) -> int:
    """Return the position of the record that has `count` records before it."""
    at = 0
    for _ in range(count):
        at += RECORD_HEADER_BYTES + _SIZE.unpack_from(data, at)[0]
    return at


def walk(data: bytes, count_max: int) -> tuple[int, int]:
    """Return the length of the whole records at the start of `data`, and their number."""
    at = count = 0
    while count < count_max and at + RECORD_HEADER_BYTES <= len(data):
        size = _SIZE.unpack_from(data, at)[0]
        stop = at + RECORD_HEADER_BYTES + size
        if size > PAYLOAD_BYTES_MAX or stop > len(data):
            break
        at, count = stop, count + 1
    return at, count


def _uniform(data: bytes, count: int) -> bool:
    """True if all records have the same size; compares the size fields one byte column at a time."""
    stride = len(data) // count
    if stride < RECORD_HEADER_BYTES:
        return False
    size = _SIZE.pack(stride - RECORD_HEADER_BYTES)
    return all(data[column::stride].count(size[column]) == count for column in range(4))


@lru_cache(maxsize=256)
def _uniform_struct(stride: int, count: int) -> struct.Struct:
    return struct.Struct(f"{stride}s" * count)
