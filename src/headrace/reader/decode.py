"""Decoding of a log's bytes: the rows of an index, and the records of its runs as Arrow batches.

Numpy and Arrow do the work per record.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headrace.log.read.index import ROW_BYTES
from headrace.model import JUMP, RECORD_HEADER_BYTES
from headrace.reader.view import DamagedRange, LogBlock, LogRange, Rows, SourceError

logger = logging.getLogger(__name__)

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

_CRC_BYTES = 4


# Index rows


class Index(NamedTuple):
    """The index rows whose checksum matches, and the places where damaged rows were removed."""

    rows: Rows
    gaps: frozenset[int]
    """Row numbers that follow a damaged row. The number equals `len(rows)` if the last row is damaged."""

    @property
    def end_offset(self) -> int:
        return int(self.rows["offset"][-1]) + int(self.rows["length"][-1])

    @property
    def end_ordinal(self) -> int:
        return int(self.rows["ordinal"][-1]) + int(self.rows["count"][-1])


class Stretch(NamedTuple):
    """Consecutive rows without a gap."""

    rows: Rows
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


def stretches(
    index: Index, start: int, end: int, bytes_max: int, place: str
) -> Iterator[Stretch | DamagedRange]:
    """Yield the stretches that cover `start` to `end`, and the ranges whose rows are damaged or missing.

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
            yield DamagedRange(position, int(offsets[begin]), place)
        at = begin
        while at < stop:
            until = int(np.searchsorted(offsets, offsets[at] + bytes_max, "left"))
            until = min(max(until, at + 1), stop)
            yield Stretch(rows[at:until], int(offsets[at]), int(ends[until - 1]))
            at = until
        if stop > first:
            position = int(ends[stop - 1])
    if is_gap(position, end):
        yield DamagedRange(position, end, place)


def is_gap(offset: int, next_offset: int) -> bool:
    """True if records between the two offsets are missing. A topic that jumped ahead has none there."""
    return offset < next_offset and (next_offset - offset) % JUMP != 0


# Records

BATCH_RECORDS_MAX = 65_536
"""Large enough to make the cost per batch negligible, small enough for a worker's memory."""

BATCH_BYTES_MAX = 32 << 20

_SLICE_STOP = (1 << 31) - 1

_Positions = npt.NDArray[np.int64]


class DecodedRecords(NamedTuple):
    """Consecutive records of a topic."""

    topic: str
    boundaries: _Positions
    """Topic offset where each record begins, followed by the offset where the last record ends."""
    ordinal: int
    ms: _Positions
    data: pa.Buffer
    data_offset: int
    """Topic offset of the first byte in `data`."""
    epoch: int
    """Epoch of the topic when the records were read."""

    @property
    def record_count(self) -> int:
        return len(self.boundaries) - 1

    def payloads(self) -> pa.BinaryArray:
        starts = (self.boundaries - self.data_offset).astype(np.int32)
        whole = pa.BinaryArray.from_buffers(
            pa.binary(), self.record_count, [None, pa.py_buffer(starts), self.data]
        )
        return pc.binary_slice(whole, RECORD_HEADER_BYTES, _SLICE_STOP)


class DamageError(SourceError):
    """A checksum fails, or bytes cannot be parsed as records."""


def decode(
    part: LogRange, blocks: Iterator[LogBlock | DamagedRange], *, verify: bool
) -> Iterator[DecodedRecords]:
    """Yield exactly the records of a part.

    With `verify`, damage raises `DamageError`, which names the damaged range. Without it, damaged ranges are
    skipped and logged.
    """
    ordinal = part.start.ordinal
    for block in blocks:
        if isinstance(block, DamagedRange):
            _damage(part, block, "the index is damaged or too short", verify=verify)
            continue
        for rows, data in _sound(part, block, verify=verify):
            records = _records(part, block, rows, data, verify=verify)
            if records is not None:
                # Runs may overlap: records of the tail are grouped into other runs when they are applied.
                yield from _portions(_clipped(records, ordinal, part.end.ordinal))
                ordinal = max(ordinal, records.ordinal + records.record_count)


def _sound(part: LogRange, block: LogBlock, *, verify: bool) -> Iterator[tuple[Rows, memoryview]]:
    """Yield the consecutive rows of a block whose checksums match, with their bytes."""
    rows, data = block.rows, memoryview(block.data)
    base = int(rows["offset"][0])
    ends = np.cumsum(rows["length"].astype(np.int64))
    first = position = 0
    for number, (end, crc) in enumerate(zip(ends.tolist(), rows["crc"].tolist(), strict=True)):
        if crc32c(data[position:end]) != crc or end > len(data):
            damaged = DamagedRange(base + position, base + end, block.place)
            _damage(part, damaged, "a checksum fails", verify=verify)
            if first < number:
                yield rows[first:number], data[int(ends[first - 1]) if first else 0 : position]
            first = number + 1
        position = end
    if first < len(rows):
        yield rows[first:], data[int(ends[first - 1]) if first else 0 : position]


def _records(
    part: LogRange, block: LogBlock, rows: Rows, data: memoryview, *, verify: bool
) -> DecodedRecords | None:
    offset = int(rows["offset"][0])
    counts = rows["count"].astype(np.int64)
    found = boundaries(data, rows["length"].astype(np.int64), counts)
    if found is None:
        damaged = DamagedRange(offset, offset + len(data), block.place)
        _damage(part, damaged, "these bytes are not records", verify=verify)
        return None
    ms = np.repeat(rows["ms"].astype(np.int64), counts)
    return DecodedRecords(
        topic=part.topic,
        boundaries=found + offset,
        ordinal=int(rows["ordinal"][0]),
        ms=ms,
        data=pa.py_buffer(data),
        data_offset=offset,
        epoch=part.end.epoch,
    )


def boundaries(data: memoryview, lengths: _Positions, counts: _Positions) -> _Positions | None:
    """Return where each record of these runs begins and the last one ends; None if these are not records."""
    total = int(counts.sum())
    length = int(lengths.sum())
    if length > len(data):
        return None
    raw = np.frombuffer(data, np.uint8, length)
    stride, rest = divmod(length, total)
    if not rest and stride >= RECORD_HEADER_BYTES and np.array_equal(lengths, counts * stride):
        # All records very likely have the same size. If so, the sizes need not be followed one by one.
        sizes = raw.reshape(total, stride)[:, :RECORD_HEADER_BYTES]
        expected = np.frombuffer((stride - RECORD_HEADER_BYTES).to_bytes(4, "big"), np.uint8)
        if (sizes == expected).all():
            return np.arange(0, length + 1, stride, dtype=np.int64)
    return _in_lockstep(raw, lengths, counts)


def _in_lockstep(
    raw: npt.NDArray[np.uint8], lengths: _Positions, counts: _Positions
) -> _Positions | None:
    """Follow the record sizes in all runs at once: each step finds the next record of every run."""
    ends = np.cumsum(lengths)
    firsts = np.cumsum(counts) - counts
    # Runs with the most records come first, so the runs that still have records are always a prefix.
    order = np.argsort(-counts, kind="stable")
    places = (ends - lengths)[order]
    stops, targets, left = ends[order], firsts[order], counts[order]
    found = np.empty(int(counts.sum()) + 1, np.int64)
    found[-1] = ends[-1]
    if len(raw) < RECORD_HEADER_BYTES:
        return None
    # The value at each byte position if a size field started there: one lookup reads any record's size.
    limit = len(raw) - RECORD_HEADER_BYTES
    sizes = np.ndarray((limit + 1,), ">u4", raw, strides=(1,))
    running = len(left)
    for step in range(int(left[0])):
        while left[running - 1] <= step:
            running -= 1
        here = places[:running]
        found[targets[:running] + step] = here
        # A wrong size moves the run past its expected end: the final comparison with `stops` detects that.
        here += sizes[np.minimum(here, limit)]
        here += RECORD_HEADER_BYTES
    return found if np.array_equal(places, stops) else None


def _clipped(records: DecodedRecords, start: int, end: int) -> DecodedRecords:
    """Return the records without those before ordinal `start` and those from ordinal `end` on."""
    first = min(records.record_count, max(0, start - records.ordinal))
    last = min(records.record_count, end - records.ordinal)
    if first == 0 and last == records.record_count:
        return records
    return _slice(records, first, max(first, last))


def _slice(records: DecodedRecords, first: int, last: int) -> DecodedRecords:
    return records._replace(
        boundaries=records.boundaries[first : last + 1],
        ordinal=records.ordinal + first,
        ms=records.ms[first:last],
    )


def _portions(records: DecodedRecords) -> Iterator[DecodedRecords]:
    """Yield slices that respect the limits of a batch; a larger record is a slice of its own."""
    first = 0
    while first < records.record_count:
        start = int(records.boundaries[first])
        by_bytes = int(np.searchsorted(records.boundaries, start + BATCH_BYTES_MAX, "right")) - 1
        last = min(records.record_count, first + BATCH_RECORDS_MAX, max(by_bytes, first + 1))
        yield _slice(records, first, last)
        first = last


def _damage(part: LogRange, damaged: DamagedRange, reason: str, *, verify: bool) -> None:
    start, end, place = damaged
    text = f"topic {part.topic!r}, {place}, offsets {start} to {end}: {reason}"
    if verify:
        raise DamageError(
            f"{text}; set verifyChecksums to false to read the rest without them, and run "
            "`headrace verify` for the whole picture"
        )
    logger.warning("%s; these records are left out", text)


def to_batch(
    records: DecodedRecords,
    columns: Sequence[str],
    decoded: Mapping[str, pa.Array],
    schema: pa.Schema,
) -> pa.RecordBatch:
    """Return a batch with these columns, in this order."""
    arrays = [decoded[name] if name in decoded else _COLUMNS[name](records) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _topic(records: DecodedRecords) -> pa.Array:
    # One buffer with repeated names and computed offsets is faster than creating a Python string per row.
    name = records.topic.encode()
    offsets = np.arange(0, (records.record_count + 1) * len(name), len(name), dtype=np.int32)
    values = pa.py_buffer(name * records.record_count)
    return pa.StringArray.from_buffers(records.record_count, pa.py_buffer(offsets), values)


def _numbers(values: _Positions) -> pa.Array:
    return pa.array(values, pa.int64())


_COLUMNS: dict[str, Callable[[DecodedRecords], pa.Array]] = {
    "topic": _topic,
    "offset": lambda records: _numbers(records.boundaries[:-1]),
    "next_offset": lambda records: _numbers(records.boundaries[1:]),
    "ordinal": lambda records: _numbers(
        np.arange(records.ordinal, records.ordinal + records.record_count, dtype=np.int64)
    ),
    "timestamp": lambda records: pa.array(records.ms * 1000, pa.timestamp("us", tz="UTC")),
    "payload": lambda records: records.payloads(),
    "epoch": lambda records: _numbers(np.full(records.record_count, records.epoch, np.int64)),
}
