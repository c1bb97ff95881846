"""Reading of a lake's files without Spark: verify a file's content, and read one topic in order."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from headrace.lake.format import (
    RANGES_KEY,
    LakeError,
    RecordRange,
    decode_ranges,
    has_old_names,
    ranges_in,
    stored_names,
)
from headrace.lake.storage.storage import LakeFile, Storage
from headrace.model import RECORD_HEADER_BYTES

_COLUMNS = ("topic", "epoch", "offset", "ordinal", "payload")

Record = tuple[int, bytes]
"""The record's next offset, which clients use, and its payload."""


_Places = npt.NDArray[np.int64]


class FilesOf(Protocol):
    """The part of `table.Table` that finds a topic's files."""

    def files_of(self, topic: str, offset: int) -> list[str]: ...


class Source(Protocol):
    """A file to read, which errors name: a `LakeFile`, or one that its writer has not sent yet."""

    def open(self) -> AbstractContextManager[pa.NativeFile | BinaryIO]: ...


class Checked(NamedTuple):
    """Rows of a file that match the file's ranges."""

    range: RecordRange
    rows: pa.RecordBatch
    records: memoryview
    """The same records in the log's format."""


def check_file(source: Source, ranges: Sequence[RecordRange]) -> None:
    """Raise `LakeError` unless a file's rows are exactly these ranges, byte for byte as in the log."""
    for _ in read_checked(source, ranges):
        pass


def read_checked(
    source: Source, ranges: Sequence[RecordRange], columns: Sequence[str] = _COLUMNS
) -> Generator[Checked, None, None]:
    """Yield the rows of a file, which must be exactly these ranges.

    The last rows of a range are yielded only after its checksum matches. Topics have the names in the file,
    also if an earlier version wrote it.
    """
    with _open(source) as file:
        rows = sum(one.rows for one in ranges)
        if file.metadata.num_rows != rows:
            raise LakeError(f"{source} has {file.metadata.num_rows} rows instead of {rows}")
        if ranges_of(source, file.metadata, as_stored=True) != list(ranges):
            raise LakeError(f"{source} has a footer that names other records")
        check = _Check(source, ranges)
        for batch in _row_groups(source, file, columns, range(file.metadata.num_row_groups)):
            yield from check.add(batch)
        if check.row != rows:
            raise LakeError(f"{source} has {check.row} rows instead of {rows}")


def read_ranges(source: LakeFile, *, as_stored: bool = False) -> list[RecordRange]:
    """Return the ranges in a file's footer; with `as_stored`, topics have the names in the file."""
    with _open(source) as file:
        return ranges_of(source, file.metadata, as_stored=as_stored)


def are_names_old(source: LakeFile) -> bool:
    """True if an earlier version wrote the topic names in a file."""
    with _open(source) as file:
        return has_old_names(file.metadata)


def ranges_of(
    source: Source, footer: pq.FileMetaData, *, as_stored: bool = False
) -> list[RecordRange]:
    """Return the ranges that the footer of a file names; raise LakeError if it names none."""
    text = (footer.metadata or {}).get(RANGES_KEY.encode())
    if text is None:
        raise LakeError(
            f"{source} does not say which records it has: it is damaged, or not a file of Headrace"
        )
    with _sentences(source):
        return decode_ranges(text) if as_stored else ranges_in(footer)


def read_groups(source: Source, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a file, one row group at a time."""
    with _open(source) as file:
        yield from _row_groups(source, file, columns, range(file.metadata.num_row_groups))


class Chosen(NamedTuple):
    """The requested rows of a row group."""

    places: _Places
    """Row numbers within the file."""
    topics: Sequence[str]
    which: _Places
    """Index into `topics` for each row."""
    columns: pa.RecordBatch


def read_chosen(
    source: LakeFile, columns: Collection[str], starts: Callable[[str], int | None]
) -> Iterator[Chosen]:
    """Yield the rows of each topic from the offset that `starts` returns; None skips a topic.

    The footer says which rows belong to which topic, so row groups without wanted rows are not read.
    """
    with _open(source) as file:
        ranges = ranges_of(source, file.metadata)
        ends = np.cumsum([one.rows for one in ranges], dtype=np.int64)
        if file.metadata.num_rows != (ends[-1] if len(ends) else 0):
            raise LakeError(f"{source} does not have the number of rows that its footer says")
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
                (batch,) = _row_groups(source, file, {"offset", *columns}, [number])
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
    """Return the rows between `begin` and `stop` that belong to a stretch, and the stretch of each row."""
    left, right = np.searchsorted(lasts, begin, "right"), np.searchsorted(firsts, stop)
    some = np.maximum(firsts[left:right], begin)
    counts = np.minimum(lasts[left:right], stop) - some
    rows = np.repeat(some - (np.cumsum(counts) - counts), counts)
    return rows + np.arange(len(rows)), np.repeat(np.arange(left, right), counts)


class _Check:
    """Comparison of a file's rows with the ranges that they should be, one row group at a time."""

    def __init__(self, source: Source, ranges: Sequence[RecordRange]) -> None:
        self._source, self._ranges = source, ranges
        counts = np.array([one.rows for one in ranges], np.int64)
        self._lasts = np.cumsum(counts)
        self._firsts = self._lasts - counts
        self.row = 0
        """Number of rows that were checked."""
        self._offset = self._crc = 0
        """Offset and checksum with which the next row group continues a range."""

    def add(self, batch: pa.RecordBatch) -> Iterator[Checked]:
        """Check the next rows of the file, and yield those of each range."""
        rows, which = _between(self._firsts, self._lasts, self.row, self.row + batch.num_rows)
        if len(rows) < batch.num_rows:
            raise LakeError(f"{self._source} has more rows than its ranges")
        first, last = int(which[0]), int(which[-1]) + 1
        which -= first
        ranges, lasts = self._ranges[first:last], self._lasts[first:last].tolist()
        offsets = np.array([one.offset for one in ranges], np.int64)
        ordinals = np.array([one.ordinal for one in ranges], np.int64) - self._firsts[first:last]
        if self.row > self._firsts[first]:
            offsets[0] = self._offset
        cuts = [*np.flatnonzero(np.diff(which, prepend=-1)).tolist(), batch.num_rows]
        sizes = lengths_of(batch["payload"]) + RECORD_HEADER_BYTES
        positions = np.concatenate([[0], np.cumsum(sizes)])
        offsets -= positions[cuts[:-1]]
        expected = {
            "topic": pa.array([one.topic for one in ranges]).take(pa.array(which)),
            "epoch": np.array([one.epoch for one in ranges], np.int64)[which],
            "offset": positions[:-1] + offsets[which],
            "ordinal": rows + ordinals[which],
        }
        are_right = [
            pc.equal(batch[name], pa.array(values))
            for name, values in expected.items()
            if name in batch.schema.names  # files lack the columns that the table is partitioned by
        ]
        for is_right in (batch["payload"].is_valid(), *are_right):
            if is_right.null_count or not pc.all(is_right).as_py():
                wrong = pc.index(is_right.fill_null(False), False).as_py()
                raise self._error(ranges[which[wrong]], "rows are not in their places")
        records = records_of(batch["payload"])
        places = positions[cuts].tolist()
        for number, one in enumerate(ranges):
            begin, end = cuts[number : number + 2]
            some = records[places[number] : places[number + 1]]
            self._crc = int(crc32c(some, self._crc))
            self._offset = int(offsets[number]) + places[number + 1]
            if self.row + end == lasts[number]:
                if (self._offset, self._crc) != (one.end, one.crc):
                    raise self._error(one, "a checksum fails")
                self._crc = 0
            yield Checked(one, batch.slice(begin, end - begin), some)
        self.row += batch.num_rows

    def _error(self, one: RecordRange, reason: str) -> LakeError:
        return LakeError(
            f"{self._source}, topic {one.topic!r}, offsets {one.offset} to {one.end}: {reason}"
        )


class StoredRange(NamedTuple):
    """A range of a topic, and the location of its rows."""

    range: RecordRange
    file: LakeFile
    row: int


def read_topic(
    storage: Storage, table: FilesOf, topic: str, offset: int = 0
) -> Iterator[list[Record]]:
    """Yield the records of a topic from an offset on, in order, one list for each row group."""
    files = [storage.file(path) for path in files_of(table, topic, offset)]
    for piece in pieces_of(files, topic, offset):
        for found in read_piece(piece, offset):
            yield [
                (at + RECORD_HEADER_BYTES + len(payload), payload)
                for at, payload in zip(
                    found["offset"].to_pylist(), found["payload"].to_pylist(), strict=True
                )
            ]


def files_of(table: FilesOf, topic: str, offset: int) -> list[str]:
    """Return the files that may hold records of a topic, under its present or its earlier name."""
    found = (path for name in stored_names(topic) for path in table.files_of(name, offset))
    return list(dict.fromkeys(found))


def pieces_of(
    files: Iterable[LakeFile], topic: str, offset: int = 0, end: int | None = None
) -> list[StoredRange]:
    """Return the ranges in these files with records of a topic between two offsets, sorted by offset."""
    found = []
    for file in files:
        row = 0
        for one in read_ranges(file):
            if one.topic == topic and one.end > offset and (end is None or one.offset < end):
                found.append(StoredRange(one, file, row))
            row += one.rows
    return sorted(found, key=lambda piece: piece.range.offset)


def read_piece(
    piece: StoredRange, offset: int = 0, end: int | None = None, column: str = "payload"
) -> Iterator[pa.RecordBatch]:
    """Yield the offsets, and one other column, of a piece's records that begin between two offsets."""
    first, last = piece.row, piece.row + piece.range.rows
    with _open(piece.file) as file:
        begin = 0
        for number in range(file.metadata.num_row_groups):
            stop = begin + file.metadata.row_group(number).num_rows
            if begin < last and first < stop and _may_have(file, number, offset, end):
                (batch,) = _row_groups(piece.file, file, ("offset", column), [number])
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
    source: Source, file: pq.ParquetFile, columns: Collection[str], numbers: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """Yield each row group as one batch. The writer limits its size."""
    names = [name for name in columns if name in file.schema_arrow.names]
    for number in numbers:
        with _sentences(source):
            table = file.read_row_group(number, columns=names, use_threads=False)
        yield from table.combine_chunks().to_batches()


@contextmanager
def _open(source: Source) -> Iterator[pq.ParquetFile]:
    with ExitStack() as stack:
        with _sentences(source):
            content = stack.enter_context(source.open())
            file = pq.ParquetFile(content, page_checksum_verification=True)
        yield file


@contextmanager
def _sentences(source: Source) -> Iterator[None]:
    """Translate any error from reading a damaged file into one sentence."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise LakeError(f"{source} cannot be read: {' '.join(str(error).split())}") from None


def crc_of_records(payloads: pa.BinaryArray, crc: int = 0) -> int:
    """Return the checksum of these records in the log's format: a size and a payload each."""
    return int(crc32c(records_of(payloads), crc))


def lengths_of(payloads: pa.BinaryArray) -> npt.NDArray[np.int64]:
    """Return the length of each payload, 0 for null."""
    lengths = pc.binary_length(payloads).fill_null(0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def records_of(payloads: pa.BinaryArray) -> memoryview:
    """Return exactly the bytes that the log has for these records."""
    count = len(payloads)
    lengths = lengths_of(payloads)
    places = np.arange(0, (count + 1) * RECORD_HEADER_BYTES, RECORD_HEADER_BYTES, dtype=np.int32)
    sizes = pa.BinaryArray.from_buffers(
        pa.binary(),
        count,
        [None, pa.py_buffer(places), pa.py_buffer(lengths.astype(">u4").tobytes())],
    )
    records = pc.binary_join_element_wise(sizes, payloads, b"")
    total = int(lengths.sum()) + count * RECORD_HEADER_BYTES
    return memoryview(records.buffers()[2])[:total]
