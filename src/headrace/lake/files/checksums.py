"""Checksums of rows in the log's record format, and joining of the checksums of adjacent ranges."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headrace.lake.format import RecordRange
from headrace.model import RECORD_HEADER_BYTES

_READ_BYTES = 1 << 20
_POLYNOMIAL = 0x82F63B78
"""Polynomial of CRC-32C, lowest bit first."""


def crc_of_records(payloads: pa.BinaryArray, crc: int = 0) -> int:
    """Return the checksum of these records in the log's format: a size and a payload each."""
    return int(crc32c(records_of(payloads), crc))


def records_of(payloads: pa.BinaryArray) -> memoryview:
    """Return exactly the bytes that the log has for these records."""
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
    """Return the checksum of a file's bytes."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while some := file.read(_READ_BYTES):
            crc = crc32c(some, crc)
    return crc


def joined(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of two adjacent stretches, computed from their two checksums.

    It is the first checksum, advanced by as many zeros as the second stretch is long, XORed with the second.
    Appending one zero bit is a linear map of 32 bits. Applying the map to itself gives the map for twice as
    many bits.
    """
    matrix = [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    # Go from one zero bit to eight, which are a byte.
    for _ in range(3):
        matrix = [_times(matrix, row) for row in matrix]
    while second_bytes:
        if second_bytes & 1:
            first = _times(matrix, first)
        matrix = [_times(matrix, row) for row in matrix]
        second_bytes >>= 1
    return first ^ second


def joined_ranges(ranges: Iterable[RecordRange]) -> list[RecordRange]:
    """Join consecutive ranges, sorted by topic and offset; their file numbers are dropped.

    The joined checksums are those of the log's bytes, although no record is read. Raise ValueError if two
    ranges contain the same records.
    """
    found: list[RecordRange] = []
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
