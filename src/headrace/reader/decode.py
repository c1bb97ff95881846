"""Decoding of a log's bytes: the rows of an index, and the records of its runs as Arrow batches.

Numpy and Arrow do the work per record.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headrace.log.read.index import ROW_BYTES
from headrace.model import JUMP, RECORD_HEADER_BYTES
from headrace.reader.view import (
    DamagedRange,
    DataLossError,
    LogBlock,
    LogRange,
    LogView,
    Rows,
    SourceError,
    despite_loss,
)

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
    if _is_one_stretch(offsets, ends, start, end, bytes_max):
        yield Stretch(rows, int(offsets[0]), int(ends[-1]))
        return
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


def _is_one_stretch(
    offsets: "_Positions", ends: "_Positions", start: int, end: int, bytes_max: int
) -> bool:
    """True if all rows are needed and have no gap: small parts are read faster that way."""
    if not len(offsets) or not (offsets[0] <= start < ends[0] and offsets[-1] < end <= ends[-1]):
        return False
    return offsets[-1] < offsets[0] + bytes_max and bool((offsets[1:] == ends[:-1]).all())


def is_gap(offset: int, next_offset: int) -> bool:
    """True if records between the two offsets are missing. A topic that jumped ahead has none there."""
    return offset < next_offset and (next_offset - offset) % JUMP != 0


# Records

BATCH_RECORDS_MAX = 65_536
"""Large enough to make the cost per batch negligible, small enough for a worker's memory."""

BATCH_BYTES_MAX = 32 << 20

_GATHERED_BYTES = 8 << 20
"""Bytes of small blocks that are decoded together, because each call of numpy or Arrow has a fixed cost."""

_SLICE_STOP = (1 << 31) - 1

_Positions = npt.NDArray[np.int64]


class DecodedRecords(NamedTuple):
    """Records of parts, in the order of the parts."""

    parts: Sequence[LogRange]
    which: _Positions
    """Index into `parts` for each record."""
    offsets: _Positions
    ordinals: _Positions
    ms: _Positions
    boundaries: _Positions
    """Position in `data` where each record begins, followed by the position where the last record ends."""
    data: memoryview

    @property
    def record_count(self) -> int:
        return len(self.which)

    @property
    def bytes(self) -> memoryview:
        """Exactly the log's bytes of these records."""
        return self.data[int(self.boundaries[0]) : int(self.boundaries[-1])]

    def payloads(self) -> pa.BinaryArray:
        starts = pa.py_buffer(self.boundaries.astype(np.int32))
        whole = pa.BinaryArray.from_buffers(
            pa.binary(), self.record_count, [None, starts, pa.py_buffer(self.data)]
        )
        return pc.binary_slice(whole, RECORD_HEADER_BYTES, _SLICE_STOP)

    def stretches(self) -> Iterator["DecodedRecords"]:
        """Yield the records cut where the next record does not follow in its part."""
        follows = (
            (np.diff(self.which) == 0)
            & (np.diff(self.ordinals) == 1)
            & (np.diff(self.offsets) == np.diff(self.boundaries)[:-1])
        )
        cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), self.record_count]
        return (_slice(self, first, last) for first, last in pairwise(cuts))


class DamageError(SourceError):
    """A checksum fails, or bytes cannot be parsed as records."""


def read_records(
    log: LogView,
    parts: Sequence[LogRange],
    on_loss: Callable[[DataLossError], object],
    *,
    verify: bool,
) -> Iterator[DecodedRecords]:
    """Yield exactly the records of these parts, with many small parts together.

    If records are no longer kept, `on_loss` is called; unless it raises, the part's rest is read. With
    `verify`, damage raises `DamageError`, which names the damaged range. Without it, damaged ranges are
    skipped and logged.
    """
    log.expect(parts)
    return decode(_blocks(log, parts, on_loss), verify=verify)


PartBlock = tuple[LogRange, LogBlock]


def _blocks(
    log: LogView, parts: Iterable[LogRange], on_loss: Callable[[DataLossError], object]
) -> Iterator[tuple[LogRange, LogBlock | DamagedRange]]:
    for part in parts:
        yield from despite_loss(
            part, on_loss, lambda rest: ((rest, block) for block in log.read(rest))
        )


def decode(
    blocks: Iterable[tuple[LogRange, LogBlock | DamagedRange]], *, verify: bool
) -> Iterator[DecodedRecords]:
    """Yield the records of parts from their blocks, as `read_records` does."""
    reached: tuple[LogRange | None, int] = None, 0
    for some in _gathered(blocks, verify=verify):
        records = _records(some, reached, verify=verify)
        if records is not None:
            reached = records.parts[records.which[-1]], int(records.ordinals[-1]) + 1
            yield from _portions(records)


def _gathered(
    blocks: Iterable[tuple[LogRange, LogBlock | DamagedRange]], *, verify: bool
) -> Iterator[list[PartBlock]]:
    """Yield groups of blocks, which have exactly the bytes of their runs."""
    gathered: list[PartBlock] = []
    size = 0
    for part, block in blocks:
        if isinstance(block, DamagedRange):
            _damage(part, block, "the index is damaged or too short", verify=verify)
            continue
        whole = _whole_runs(part, block, verify=verify)
        length = len(whole.data)
        if gathered and size + length > _GATHERED_BYTES:
            yield gathered
            gathered, size = [], 0
        if length > _GATHERED_BYTES:
            yield [(part, whole)]
        else:
            # The copy stays valid when the next block is requested.
            gathered.append((part, whole._replace(data=bytes(whole.data))))
            size += length
    if gathered:
        yield gathered


def _whole_runs(part: LogRange, block: LogBlock, *, verify: bool) -> LogBlock:
    """Return a block without the runs that lie behind the end of a file that was cut."""
    if len(block.data) == block.rows["length"].sum():
        return block
    ends = np.cumsum(block.rows["length"], dtype=np.int64)
    count = int(np.searchsorted(ends, len(block.data), "right"))
    for row in block.rows[count:]:
        _damage_run(part, block, row, "a checksum fails", verify=verify)
    end = int(ends[count - 1]) if count else 0
    return block._replace(rows=block.rows[:count], data=block.data[:end])


class _Runs(NamedTuple):
    """Runs of records, one after another in `data`."""

    blocks: Sequence[PartBlock]
    which: _Positions
    """Index into `blocks` for each run."""
    rows: Rows
    data: memoryview

    @property
    def lengths(self) -> _Positions:
        return self.rows["length"].astype(np.int64)

    @property
    def counts(self) -> _Positions:
        return self.rows["count"].astype(np.int64)

    def each(self) -> list[memoryview]:
        """Return the bytes of each run."""
        ends = np.cumsum(self.lengths).tolist()
        return [self.data[first:last] for first, last in pairwise([0, *ends])]

    def without(self, damaged: Sequence[int], reason: str, *, verify: bool) -> "_Runs":
        if not damaged:
            return self
        for number in damaged:
            part, block = self.blocks[self.which[number]]
            _damage_run(part, block, self.rows[number], reason, verify=verify)
        sound = np.delete(np.arange(len(self.rows)), damaged)
        every = self.each()
        data = memoryview(b"".join(every[number] for number in sound))
        return self._replace(which=self.which[sound], rows=self.rows[sound], data=data)


def _records(
    blocks: Sequence[PartBlock], reached: tuple[LogRange | None, int], *, verify: bool
) -> DecodedRecords | None:
    """Return the records of the parts that lie in these blocks; None if there are none.

    `reached` is the part of the records before, and the ordinal behind them.
    """
    found = [block for _, block in blocks]
    data = found[0].data if len(found) == 1 else b"".join(block.data for block in found)
    runs = _Runs(
        blocks=blocks,
        which=np.repeat(np.arange(len(found)), [len(block.rows) for block in found]),
        rows=np.frombuffer(b"".join(block.rows.tobytes() for block in found), ROW),
        data=memoryview(data),
    )
    crcs = zip(runs.each(), runs.rows["crc"].tolist(), strict=True)
    damaged = [number for number, (run, crc) in enumerate(crcs) if crc32c(run) != crc]
    runs = runs.without(damaged, "a checksum fails", verify=verify)
    places = boundaries(runs.data, runs.lengths, runs.counts) if len(runs.rows) else None
    if places is None:
        shapes = zip(runs.each(), runs.lengths[:, None], runs.counts[:, None], strict=True)
        damaged = [number for number, run in enumerate(shapes) if boundaries(*run) is None]
        runs = runs.without(damaged, "these bytes are not records", verify=verify)
        places = boundaries(runs.data, runs.lengths, runs.counts) if len(runs.rows) else None
    return None if places is None else _clipped(runs, places, reached)


def _clipped(
    runs: _Runs, places: _Positions, reached: tuple[LogRange | None, int]
) -> DecodedRecords | None:
    """Return the records of the parts, without records that the runs have besides."""
    counts, ordinals = runs.counts, runs.rows["ordinal"].astype(np.int64)
    offsets = runs.rows["offset"].astype(np.int64) - np.cumsum(runs.lengths) + runs.lengths
    firsts = np.cumsum(counts) - counts
    records = DecodedRecords(
        parts=[part for part, _ in runs.blocks],
        which=np.repeat(runs.which, counts),
        offsets=np.repeat(offsets, counts) + places[:-1],
        ordinals=np.repeat(ordinals - firsts, counts) + np.arange(len(places) - 1),
        ms=np.repeat(runs.rows["ms"].astype(np.int64), counts),
        boundaries=places,
        data=runs.data,
    )
    skipped, taken = _wanted(runs, reached)
    if not any(skipped) and taken == counts.tolist():
        return records
    begins, ends = firsts + skipped, firsts + taken
    pieces = zip(places[begins].tolist(), places[ends].tolist(), strict=True)
    numbers = np.arange(len(places) - 1)
    keep = (numbers >= np.repeat(begins, counts)) & (numbers < np.repeat(ends, counts))
    if not keep.any():
        return None
    return DecodedRecords(
        parts=records.parts,
        which=records.which[keep],
        offsets=records.offsets[keep],
        ordinals=records.ordinals[keep],
        ms=records.ms[keep],
        boundaries=np.concatenate([[0], np.cumsum(np.diff(places)[keep])]),
        data=memoryview(b"".join(runs.data[begin:end] for begin, end in pieces)),
    )


def _wanted(runs: _Runs, reached: tuple[LogRange | None, int]) -> tuple[list[int], list[int]]:
    """Return for each run the number of records before the first wanted one, and up to the last."""
    skipped, taken = [], []
    current, done = reached
    ordinals, counts = runs.rows["ordinal"].tolist(), runs.rows["count"].tolist()
    for which, ordinal, count in zip(runs.which.tolist(), ordinals, counts, strict=True):
        part, _ = runs.blocks[which]
        if part is not current:
            current, done = part, part.start.ordinal
        # Runs may overlap: records of the tail are grouped into other runs when they are applied.
        skipped.append(min(count, max(0, done - ordinal)))
        taken.append(max(skipped[-1], min(count, part.end.ordinal - ordinal)))
        done = max(done, ordinal + count)
    return skipped, taken


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


def _slice(records: DecodedRecords, first: int, last: int) -> DecodedRecords:
    return records._replace(
        which=records.which[first:last],
        offsets=records.offsets[first:last],
        ordinals=records.ordinals[first:last],
        ms=records.ms[first:last],
        boundaries=records.boundaries[first : last + 1],
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


def _damage_run(
    part: LogRange, block: LogBlock, row: np.void, reason: str, *, verify: bool
) -> None:
    start = int(row["offset"])
    damaged = DamagedRange(start, start + int(row["length"]), block.place)
    _damage(part, damaged, reason, verify=verify)


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


def _numbers(values: _Positions) -> pa.Array:
    return pa.array(values, pa.int64())


_COLUMNS: dict[str, Callable[[DecodedRecords], pa.Array]] = {
    "topic": lambda records: pa.array([part.topic for part in records.parts]).take(
        pa.array(records.which)
    ),
    "offset": lambda records: _numbers(records.offsets),
    "next_offset": lambda records: _numbers(records.offsets + np.diff(records.boundaries)),
    "ordinal": lambda records: _numbers(records.ordinals),
    "timestamp": lambda records: pa.array(records.ms * 1000, pa.timestamp("us", tz="UTC")),
    "payload": lambda records: records.payloads(),
    "epoch": lambda records: _numbers(
        np.array([part.end.epoch for part in records.parts], np.int64)[records.which]
    ),
}
