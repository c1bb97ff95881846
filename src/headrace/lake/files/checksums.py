"""Rows of a table as the log has their records, and checksums of those; of two stretches from theirs too."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headrace.lake.format import Range
from headrace.model import RECORD_HEADER_BYTES

_READ_BYTES = 1 << 20
_POLYNOMIAL = 0x82F63B78
"""CRC-32C, with the lowest bit first."""


def crc_of_records(payloads: pa.BinaryArray, crc: int = 0) -> int:
    """What the log has of these records: each a size and its payload."""
    return int(crc32c(records_of(payloads), crc))


def records_of(payloads: pa.BinaryArray) -> memoryview:
    """The very bytes that the log has of these records."""
    count = len(payloads)
    lengths = pc.binary_length(payloads).to_numpy(zero_copy_only=False)
    places = np.arange(0, (count + 1) * RECORD_HEADER_BYTES, RECORD_HEADER_BYTES, dtype=np.int32)
    sizes = pa.BinaryArray.from_buffers(
        pa.binary(),
        count,
        [None, pa.py_buffer(places), pa.py_buffer(lengths.astype(">u4").tobytes())],
    )
    records = pc.binary_join_element_wise(sizes, payloads, b"")
    total = int(lengths.sum(dtype=np.int64)) + count * RECORD_HEADER_BYTES
    return memoryview(records.buffers()[2])[:total]


def crc_of_file(path: Path) -> int:
    """Of all its bytes."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while some := file.read(_READ_BYTES):
            crc = crc32c(some, crc)
    return crc


def joined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two stretches that follow each other, from those of each.

    That of the first, moved on by as many zeros as the second is long, and that of the second. One zero bit
    is a linear map of 32 bits, twice as many are the map applied to itself.
    """
    matrix = [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    # From one zero bit to eight, which are a byte.
    for _ in range(3):
        matrix = [_times(matrix, row) for row in matrix]
    while second_bytes:
        if second_bytes & 1:
            first = _times(matrix, first)
        matrix = [_times(matrix, row) for row in matrix]
        second_bytes >>= 1
    return first ^ second


def joined_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Those that follow each other as one, in the order of topic and offset, without their files.

    Nothing is read for it, and yet it is what the log had. Raises ValueError where two have the same records.
    """
    found: list[Range] = []
    for one in sorted(ranges):
        last = found[-1] if found else None
        if last is None or last.topic != one.topic:
            found.append(one._replace(file=0))
        elif (last.epoch, last.end, last.end_ordinal) == (one.epoch, one.offset, one.ordinal):
            crc = joined(last.crc, one.crc, one.end - one.offset)
            found[-1] = last._replace(end=one.end, end_ordinal=one.end_ordinal, crc=crc)
        elif one.offset < last.end:
            raise ValueError(
                f"offsets {one.offset} to {one.end} of topic {one.topic!r} are there twice"
            )
        else:
            found.append(one._replace(file=0))
    return found


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    for row in matrix:
        if vector & 1:
            total ^= row
        vector >>= 1
    return total
