"""Records out of a lake: whether a file holds what it says, and one topic in its order, without Spark."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from headrace.lake.checksums import records_of
from headrace.lake.format import (
    RANGES_KEY,
    LakeError,
    Range,
    decode_ranges,
    has_old_names,
    ranges_in,
    stored_names,
)
from headrace.model import RECORD_HEADER_BYTES

_COLUMNS = ("topic", "epoch", "offset", "ordinal", "payload")

Record = tuple[int, bytes]
"""The offset just past it, as clients know it, and its payload."""


_Places = npt.NDArray[np.int64]


class FilesOf(Protocol):
    """The part of `table.Table` that finds a topic's files."""

    def files_of(self, topic: str, offset: int) -> list[str]: ...


class Checked(NamedTuple):
    """Rows of a file that are what it says."""

    range: Range
    rows: pa.RecordBatch
    records: memoryview
    """The same as the log had them."""


def check_file(path: Path, ranges: Sequence[Range]) -> None:
    """Raise `LakeError` unless the rows of a file are these ranges, byte for byte as the log had them."""
    for _ in read_checked(path, ranges):
        pass


def read_checked(
    path: Path, ranges: Sequence[Range], columns: Sequence[str] = _COLUMNS
) -> Generator[Checked, None, None]:
    """The rows of a file, which must be these ranges; the last of each only when its checksum holds.

    Topics are named as they are in the file, whatever version has written it.
    """
    with _open(path) as file:
        rows = sum(one.rows for one in ranges)
        if file.metadata.num_rows != rows:
            raise LakeError(f"{path} has {file.metadata.num_rows} rows instead of {rows}")
        if _said(path, file.metadata, as_stored=True) != list(ranges):
            raise LakeError(f"{path} says in its footer that it holds something else")
        checks = iter([_Check(path, one) for one in ranges])
        check = next(checks, None)
        for batch in _row_groups(path, file, columns, range(file.metadata.num_row_groups)):
            at = 0
            while at < batch.num_rows:
                assert check is not None
                some = batch.slice(at, min(check.left, batch.num_rows - at))
                records = check.add(some)
                if not check.left:
                    check.finish()
                yield Checked(check.expected, some, records)
                at += some.num_rows
                if not check.left:
                    check = next(checks, None)


def read_ranges(path: Path, *, as_stored: bool = False) -> list[Range]:
    """What a file says of itself; with `as_stored`, topics are named as they are in the file."""
    with _sentences(path):
        footer = pq.read_metadata(path)
    return _said(path, footer, as_stored=as_stored)


def are_names_old(path: Path) -> bool:
    """Return whether an earlier version named the topics in a file."""
    with _sentences(path):
        return has_old_names(pq.read_metadata(path))


def _said(path: Path, footer: pq.FileMetaData, *, as_stored: bool = False) -> list[Range]:
    text = (footer.metadata or {}).get(RANGES_KEY.encode())
    if text is None:
        raise LakeError(f"{path} does not say what it holds: it is damaged, or not one of ours")
    with _sentences(path):
        return decode_ranges(text) if as_stored else ranges_in(footer)


def read_groups(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """All rows of a file, a row group at a time."""
    with _open(path) as file:
        yield from _row_groups(path, file, columns, range(file.metadata.num_row_groups))


class Chosen(NamedTuple):
    """Rows of a row group that were asked for."""

    places: _Places
    """Which rows of the file they are."""
    topics: Sequence[str]
    which: _Places
    """The place of each row's topic in `topics`."""
    columns: pa.RecordBatch


def read_chosen(
    path: Path, columns: Collection[str], starts: Callable[[str], int | None]
) -> Iterator[Chosen]:
    """Rows of topics from an offset on, which `starts` says of each, or None where there is none wanted.

    The footer says which rows are of which topic: row groups without any are not read.
    """
    with _open(path) as file:
        ranges = _said(path, file.metadata)
        ends = np.cumsum([one.rows for one in ranges], dtype=np.int64)
        if file.metadata.num_rows != (ends[-1] if len(ends) else 0):
            raise LakeError(f"{path} has not the rows that it says it has")
        wanted = [
            (place, one.topic, start)
            for place, one in enumerate(ranges)
            if (start := starts(one.topic)) is not None and start < one.end
        ]
        if not wanted:
            return
        places, topics, starting = (list(some) for some in zip(*wanted, strict=True))
        lasts, least = ends[places], np.array(starting, np.int64)
        firsts = lasts - [ranges[place].rows for place in places]
        begin = 0
        for number in range(file.metadata.num_row_groups):
            stop = begin + file.metadata.row_group(number).num_rows
            rows, which = _between(firsts, lasts, begin, stop)
            if len(rows):
                (batch,) = _row_groups(path, file, {"offset", *columns}, [number])
                offsets = batch["offset"].to_numpy()[rows - begin]
                is_behind = offsets >= least[which]
                rows, which = rows[is_behind], which[is_behind]
            if len(rows):
                is_all = len(rows) == batch.num_rows
                taken = batch if is_all else batch.take(pa.array(rows - begin))
                first, last = int(which[0]), int(which[-1])
                yield Chosen(rows, topics[first : last + 1], which - first, taken)
            begin = stop


def _between(firsts: _Places, lasts: _Places, begin: int, stop: int) -> tuple[_Places, _Places]:
    """The rows of stretches that lie between two, and which stretch each is of."""
    left, right = np.searchsorted(lasts, begin, "right"), np.searchsorted(firsts, stop)
    some = np.maximum(firsts[left:right], begin)
    counts = np.minimum(lasts[left:right], stop) - some
    rows = np.repeat(some - (np.cumsum(counts) - counts), counts)
    return rows + np.arange(len(rows)), np.repeat(np.arange(left, right), counts)


class _Check:
    """Rows against the range that they are to be."""

    def __init__(self, path: Path, expected: Range) -> None:
        self._path, self.expected = path, expected
        self._crc = 0
        self._offset, self._ordinal = expected.offset, expected.ordinal

    @property
    def left(self) -> int:
        return self.expected.end_ordinal - self._ordinal

    def add(self, rows: pa.RecordBatch) -> memoryview:
        """The rows as the log had them."""
        payloads = rows["payload"]
        lengths = pc.binary_length(payloads).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = self._offset + np.cumsum(lengths + RECORD_HEADER_BYTES)
        offsets = rows["offset"].to_numpy()
        ordinals = rows["ordinal"].to_numpy()
        sound = (
            offsets[0] == self._offset
            and np.array_equal(offsets[1:], ends[:-1])
            and np.array_equal(ordinals, np.arange(self._ordinal, self._ordinal + len(ordinals)))
            and self._is_constant(rows, "epoch", self.expected.epoch)
            and self._is_constant(rows, "topic", self.expected.topic)
        )
        if not sound:
            raise self._error("rows are not in their places")
        records = records_of(payloads)
        self._crc = int(crc32c(records, self._crc))
        self._offset = int(ends[-1])
        self._ordinal += len(ordinals)
        return records

    def finish(self) -> None:
        if self._offset != self.expected.end or self._crc != self.expected.crc:
            raise self._error("a checksum fails")

    def _is_constant(self, rows: pa.RecordBatch, name: str, value: object) -> bool:
        if name not in rows.schema.names:
            return True  # what a table is partitioned by is in no file
        return bool(
            pc.all(pc.equal(rows[name], pa.scalar(value, rows.schema.field(name).type))).as_py()
        )

    def _error(self, reason: str) -> LakeError:
        one = self.expected
        return LakeError(
            f"{self._path}, topic {one.topic!r}, offsets {one.offset} to {one.end}: {reason}"
        )


class Piece(NamedTuple):
    """A range of a topic, and where its rows lie."""

    range: Range
    path: Path
    row: int


def read_topic(lake: Path, table: FilesOf, topic: str, offset: int = 0) -> Iterator[list[Record]]:
    """The records of a topic from an offset on, in their order, some thousands at a time."""
    paths = [lake / path for path in files_of(table, topic, offset)]
    for piece in pieces_of(paths, topic, offset):
        for found in read_piece(piece, offset):
            yield [
                (at + RECORD_HEADER_BYTES + len(payload), payload)
                for at, payload in zip(
                    found["offset"].to_pylist(), found["payload"].to_pylist(), strict=True
                )
            ]


def files_of(table: FilesOf, topic: str, offset: int) -> list[str]:
    """The files that may hold records of a topic, under whichever name."""
    found = (path for name in stored_names(topic) for path in table.files_of(name, offset))
    return list(dict.fromkeys(found))


def pieces_of(
    paths: Iterable[Path], topic: str, offset: int = 0, end: int | None = None
) -> list[Piece]:
    """Those in files that have records of a topic between two offsets, in its order."""
    found = []
    for path in paths:
        row = 0
        for one in read_ranges(path):
            if one.topic == topic and one.end > offset and (end is None or one.offset < end):
                found.append(Piece(one, path, row))
            row += one.rows
    return sorted(found, key=lambda piece: piece.range.offset)


def read_piece(
    piece: Piece, offset: int = 0, end: int | None = None, column: str = "payload"
) -> Iterator[pa.RecordBatch]:
    """Its records that begin between two offsets: where each begins, and another column."""
    first, last = piece.row, piece.row + piece.range.rows
    with _open(piece.path) as file:
        begin = 0
        for number in range(file.metadata.num_row_groups):
            stop = begin + file.metadata.row_group(number).num_rows
            if begin < last and first < stop and _may_have(file, number, offset, end):
                (batch,) = _row_groups(piece.path, file, ("offset", column), [number])
                found = batch.slice(max(first - begin, 0), min(last, stop) - max(first, begin))
                found = found.filter(pc.greater_equal(found["offset"], offset))
                if end is not None:
                    found = found.filter(pc.less(found["offset"], end))
                if found.num_rows:
                    yield found
            begin = stop


def _may_have(file: pq.ParquetFile, number: int, offset: int, end: int | None) -> bool:
    group = file.metadata.row_group(number)
    known = group.column(file.schema_arrow.names.index("offset")).statistics
    if known is None or not known.has_min_max:
        return True
    return bool(known.max >= offset and (end is None or known.min < end))


def _row_groups(
    path: Path, file: pq.ParquetFile, columns: Collection[str], numbers: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """Each as one batch: their size is bounded when they are written."""
    names = [name for name in columns if name in file.schema_arrow.names]
    for number in numbers:
        with _sentences(path):
            table = file.read_row_group(number, columns=names, use_threads=False)
        yield from table.combine_chunks().to_batches()


def _open(path: Path) -> pq.ParquetFile:
    with _sentences(path):
        return pq.ParquetFile(path, page_checksum_verification=True)


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    """What reading a damaged file raises, as one sentence."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise LakeError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
