"""Records out of a lake: whether a file holds what it says, and one topic in its order, without Spark."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.checksums import crc_of_records
from headrace.lake.format import LakeError, Range, decode_ranges
from headrace.model import RECORD_HEADER_BYTES

RANGES_KEY = "headrace.ranges"

_COLUMNS = ("topic", "epoch", "offset", "ordinal", "payload")

Record = tuple[int, bytes]
"""The offset just past it, as clients know it, and its payload."""


class FilesOf(Protocol):
    """The part of `table.Table` that finds a topic's files."""

    def files_of(self, topic: str, offset: int) -> list[str]: ...


def check_file(path: Path, ranges: Sequence[Range]) -> None:
    """Raise `LakeError` unless the rows of a file are these ranges, byte for byte as the log had them."""
    with pq.ParquetFile(path) as file:
        rows = sum(one.rows for one in ranges)
        if file.metadata.num_rows != rows:
            raise LakeError(f"{path} has {file.metadata.num_rows} rows instead of {rows}")
        if decode_ranges(file.metadata.metadata[RANGES_KEY.encode()]) != list(ranges):
            raise LakeError(f"{path} says in its footer that it holds something else")
        checks = iter([_Check(path, one) for one in ranges])
        check = next(checks, None)
        for batch in _row_groups(file, _COLUMNS, range(file.metadata.num_row_groups)):
            at = 0
            while at < batch.num_rows:
                assert check is not None
                count = min(check.left, batch.num_rows - at)
                check.add(batch.slice(at, count))
                at += count
                if not check.left:
                    check.finish()
                    check = next(checks, None)


class _Check:
    """Rows against the range that they are to be."""

    def __init__(self, path: Path, expected: Range) -> None:
        self._path, self._expected = path, expected
        self._crc = 0
        self._offset, self._ordinal = expected.offset, expected.ordinal

    @property
    def left(self) -> int:
        return self._expected.end_ordinal - self._ordinal

    def add(self, rows: pa.RecordBatch) -> None:
        payloads = rows["payload"]
        lengths = pc.binary_length(payloads).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = self._offset + np.cumsum(lengths + RECORD_HEADER_BYTES)
        offsets = rows["offset"].to_numpy()
        ordinals = rows["ordinal"].to_numpy()
        sound = (
            offsets[0] == self._offset
            and np.array_equal(offsets[1:], ends[:-1])
            and np.array_equal(ordinals, np.arange(self._ordinal, self._ordinal + len(ordinals)))
            and self._is_constant(rows, "epoch", self._expected.epoch)
            and self._is_constant(rows, "topic", self._expected.topic)
        )
        if not sound:
            raise self._error("rows are not in their places")
        self._crc = crc_of_records(payloads, self._crc)
        self._offset = int(ends[-1])
        self._ordinal += len(ordinals)

    def finish(self) -> None:
        if self._offset != self._expected.end or self._crc != self._expected.crc:
            raise self._error("a checksum fails")

    def _is_constant(self, rows: pa.RecordBatch, name: str, value: object) -> bool:
        if name not in rows.schema.names:
            return True  # what a table is partitioned by is in no file
        return bool(
            pc.all(pc.equal(rows[name], pa.scalar(value, rows.schema.field(name).type))).as_py()
        )

    def _error(self, reason: str) -> LakeError:
        one = self._expected
        return LakeError(
            f"{self._path}, topic {one.topic!r}, offsets {one.offset} to {one.end}: {reason}"
        )


class _Piece(NamedTuple):
    """A range of a topic, and where its rows lie."""

    range: Range
    path: Path
    row: int


def read_topic(lake: Path, table: FilesOf, topic: str, offset: int = 0) -> Iterator[list[Record]]:
    """The records of a topic from an offset on, in their order, some thousands at a time."""
    pieces = [
        piece
        for path in table.files_of(topic, offset)
        for piece in _pieces(lake / path)
        if piece.range.topic == topic and piece.range.end > offset
    ]
    for piece in sorted(pieces, key=lambda piece: piece.range.offset):
        yield from _records(piece, offset)


def _pieces(path: Path) -> Iterator[_Piece]:
    footer = pq.read_metadata(path).metadata[RANGES_KEY.encode()]
    row = 0
    for one in decode_ranges(footer):
        yield _Piece(one, path, row)
        row += one.rows


def _records(piece: _Piece, offset: int) -> Iterator[list[Record]]:
    first, last = piece.row, piece.row + piece.range.rows
    with pq.ParquetFile(piece.path) as file:
        begin = 0
        for number in range(file.metadata.num_row_groups):
            end = begin + file.metadata.row_group(number).num_rows
            if begin < last and first < end:
                (batch,) = _row_groups(file, ("offset", "payload"), [number])
                found = batch.slice(max(first - begin, 0), min(last, end) - max(first, begin))
                found = found.filter(pc.greater_equal(found["offset"], offset))
                if found.num_rows:
                    yield [
                        (at + RECORD_HEADER_BYTES + len(payload), payload)
                        for at, payload in zip(
                            found["offset"].to_pylist(), found["payload"].to_pylist(), strict=True
                        )
                    ]
            begin = end


def _row_groups(
    file: pq.ParquetFile, columns: Sequence[str], numbers: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """Each as one batch: their size is bounded when they are written."""
    names = [name for name in columns if name in file.schema_arrow.names]
    for number in numbers:
        table = file.read_row_group(number, columns=names, use_threads=False)
        yield from table.combine_chunks().to_batches()
