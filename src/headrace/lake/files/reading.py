"""Reading of a lake's files without Spark: verify a file's content, and read one topic in order."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

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


class Checked(NamedTuple):
    """Rows of a file that match the file's ranges."""

    range: RecordRange
    rows: pa.RecordBatch
    records: memoryview
    """The same records in the log's format."""


def check_file(source: LakeFile, ranges: Sequence[RecordRange]) -> None:
    """Raise `LakeError` unless a file's rows are exactly these ranges, byte for byte as in the log."""
    for _ in read_checked(source, ranges):
        pass


def read_checked(
    source: LakeFile, ranges: Sequence[RecordRange], columns: Sequence[str] = _COLUMNS
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
        checks = iter([_Check(source, one) for one in ranges])
        check = next(checks, None)
        for batch in _row_groups(source, file, columns, range(file.metadata.num_row_groups)):
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


def read_ranges(source: LakeFile, *, as_stored: bool = False) -> list[RecordRange]:
    """Return the ranges in a file's footer; with `as_stored`, topics have the names in the file."""
    with _open(source) as file:
        return ranges_of(source, file.metadata, as_stored=as_stored)


def are_names_old(source: LakeFile) -> bool:
    """True if an earlier version wrote the topic names in a file."""
    with _open(source) as file:
        return has_old_names(file.metadata)


def ranges_of(
    source: LakeFile, footer: pq.FileMetaData, *, as_stored: bool = False
) -> list[RecordRange]:
    """Return the ranges that the footer of a file names; raise LakeError if it names none."""
    text = (footer.metadata or {}).get(RANGES_KEY.encode())
    if text is None:
        raise LakeError(
            f"{source} does not say which records it has: it is damaged, or not a file of Headrace"
        )
    with _sentences(source):
        return decode_ranges(text) if as_stored else ranges_in(footer)


def read_groups(source: LakeFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
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
    """Comparison of rows with the range that they should be."""

    def __init__(self, source: LakeFile, expected: RecordRange) -> None:
        self._source, self.expected = source, expected
        self._crc = 0
        self._offset, self._ordinal = expected.offset, expected.ordinal

    @property
    def left(self) -> int:
        return self.expected.end_ordinal - self._ordinal

    def add(self, rows: pa.RecordBatch) -> memoryview:
        """Check the next rows and return them in the log's format."""
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
            return True  # files do not contain the columns that the table is partitioned by
        return bool(
            pc.all(pc.equal(rows[name], pa.scalar(value, rows.schema.field(name).type))).as_py()
        )

    def _error(self, reason: str) -> LakeError:
        one = self.expected
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
    source: LakeFile, file: pq.ParquetFile, columns: Collection[str], numbers: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """Yield each row group as one batch. The writer limits its size."""
    names = [name for name in columns if name in file.schema_arrow.names]
    for number in numbers:
        with _sentences(source):
            table = file.read_row_group(number, columns=names, use_threads=False)
        yield from table.combine_chunks().to_batches()


@contextmanager
def _open(source: LakeFile) -> Iterator[pq.ParquetFile]:
    with ExitStack() as stack:
        with _sentences(source):
            content = stack.enter_context(source.open())
            file = pq.ParquetFile(content, page_checksum_verification=True)
        yield file


@contextmanager
def _sentences(source: LakeFile) -> Iterator[None]:
    """Translate any error from reading a damaged file into one sentence."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise LakeError(f"{source} cannot be read: {' '.join(str(error).split())}") from None


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
