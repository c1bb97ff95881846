"""Rows of a table as the log has their records, and checksums of those; of two stretches from theirs too."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headrace.model import RECORD_HEADER_BYTES

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


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    for row in matrix:
        if vector & 1:
            total ^= row
        vector >>= 1
    return total
