"""Rows of an index as a numpy array: checksums, gaps, and stretches without a gap."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from headrace.log.read.index import ROW_BYTES
from headrace.model import JUMP

ROW = np.dtype(
    [
        ("offset", ">u8"),
        ("length", ">u4"),
        ("ordinal", ">u8"),
        ("count", ">u4"),
        ("ms", ">u8"),
        ("crc", ">u4"),
        ("row_crc", ">u4"),
    ]
)
"""Format of a row, as packed by `log/read/index.py`."""

Rows = npt.NDArray[np.void]

_CRC_BYTES = 4


class Index(NamedTuple):
    """The index rows whose checksum matches, and the places where damaged rows were removed."""

    rows: Rows
    gaps: frozenset[int]
    """Row numbers that follow a damaged row. The number equals `len(rows)` if the last row is damaged."""

    @property
    def end_offset(self) -> int:
        return int(self.rows["offset"][-1]) + int(self.rows["length"][-1])


class Stretch(NamedTuple):
    """Consecutive rows without a gap."""

    rows: Rows
    offset: int
    end: int


class RowGap(NamedTuple):
    """A range of offsets whose rows are damaged or missing."""

    offset: int
    end: int


def parse(data: bytes) -> Index:
    """Parse consecutive rows of an index file."""
    count = len(data) // ROW_BYTES
    rows = np.frombuffer(data, ROW, count)
    view = memoryview(data)
    crcs = rows["row_crc"].tolist()
    bad = [
        number
        for number, at in enumerate(range(0, count * ROW_BYTES, ROW_BYTES))
        if crc32c(view[at : at + ROW_BYTES - _CRC_BYTES]) != crcs[number]
    ]
    if not bad:
        return Index(rows, frozenset())
    gaps = frozenset(number - before for before, number in enumerate(bad))
    return Index(np.delete(rows, bad), gaps)


def stretches(index: Index, start: int, end: int, bytes_max: int) -> Iterator[Stretch | RowGap]:
    """Yield the stretches and gaps that cover `start` to `end`.

    A stretch is about `bytes_max` long; it exceeds that by less than a run.
    """
    rows = index.rows
    offsets = rows["offset"].astype(np.int64)
    ends = offsets + rows["length"]
    first = int(np.searchsorted(ends, start, "right"))
    last = int(np.searchsorted(offsets, end, "left"))
    inside = np.flatnonzero(offsets[first + 1 : last] != ends[first : max(first, last - 1)])
    breaks = [int(one) + first + 1 for one in inside]
    position = start
    for begin, stop in zip([first, *breaks], [*breaks, last], strict=True):
        if begin < stop and is_gap(position, int(offsets[begin])):
            yield RowGap(position, int(offsets[begin]))
        at = begin
        while at < stop:
            until = int(np.searchsorted(offsets, offsets[at] + bytes_max, "left"))
            until = min(max(until, at + 1), stop)
            yield Stretch(rows[at:until], int(offsets[at]), int(ends[until - 1]))
            at = until
        if stop > first:
            position = int(ends[stop - 1])
    if is_gap(position, end):
        yield RowGap(position, end)


def is_gap(offset: int, next_offset: int) -> bool:
    """True if records between the two offsets are missing. A topic that jumped ahead has none there."""
    return offset < next_offset and (next_offset - offset) % JUMP != 0
