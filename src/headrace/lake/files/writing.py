"""Writer of a lake's records: sorted Parquet files by date, fsynced and verified before use.

The caller passes records in the order of topic and offset, so each file is sorted without a sort.
"""

import datetime
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from headrace.lake.files.reading import check_file, lengths_of
from headrace.lake.format import (
    FORMAT,
    NAMES_KEY,
    RANGES_KEY,
    RecordRange,
    Shape,
    encode_ranges,
    writing,
)
from headrace.lake.storage.storage import LakeFile, Storage
from headrace.model import RECORD_HEADER_BYTES

_READ_BYTES = 1 << 20


def crc_of_file(file: BinaryIO | pa.NativeFile) -> int:
    """Return the checksum of a file's bytes, from its current position on."""
    crc = 0
    while some := file.read(_READ_BYTES):
        crc = crc32c(some, crc)
    return crc


ROW_GROUP_ROWS = 131_072
ROW_GROUP_BYTES = 64 << 20
"""A row group is written when either limit is reached: readers load a whole row group at once."""

_NUMBERS = ("epoch", "offset", "ordinal", "timestamp")
_NAMED = re.compile(r"-([0-9a-f]{8})\.(?:parquet|data)$")

NAME = r"c?([0-9]{8,})-[0-9a-f]{12}-([0-9]{4,})(?:-[0-9a-f]{8})?\.(?:parquet|data)"
"""Names that jobs give to files, with batch and task; each is used once. Other files are left alone."""

DATED = rf"date=[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}/{NAME}"
"""The same, in the directory of its date."""

_DAY_US = 86_400_000_000
_1970 = datetime.date(1970, 1, 1)


class RecordRows(NamedTuple):
    """Records of topics as columns, and the log's bytes of the same records."""

    columns: pa.RecordBatch
    data: memoryview


class Values(NamedTuple):
    topic: str
    epoch: int
    offset: int
    ordinal: int
    timestamp: str


class Statistics(NamedTuple):
    """Least and greatest value of each column by which readers find records."""

    least: Values
    most: Values


Bounds = Mapping[str, tuple[Any, Any]]
"""A table's least and greatest values for a file, None if unknown, by column.

Times are in microseconds and dates in days since 1970. The key `rows` has the number of rows.
"""


class WrittenFile(NamedTuple):
    """A file that is durable and verified, but not in the table yet."""

    path: str
    bytes: int
    rows: int
    partition: Mapping[str, str]
    statistics: Statistics
    ranges: tuple[RecordRange, ...]


class FileLayout(NamedTuple):
    """Location of a table's files in its lake, and their columns."""

    directory: str = ""
    """Path below the lake."""
    suffix: str = ".parquet"
    has_topic: bool = False
    """True if files contain the topic even when partitioned by it: their readers have no other source."""


class Writer:
    """Writer of the files of one task.

    With `old_names`, topics have the names of earlier versions, and the footers say so.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        shape: Shape,
        layout: FileLayout = FileLayout(),  # noqa: B008
        *,
        old_names: bool = False,
    ) -> None:
        self._storage, self._name, self._shape, self._layout = storage, name, shape, layout
        self._footer = {} if old_names else {NAMES_KEY: str(FORMAT)}
        self._open: dict[int, _File] = {}
        """Files that are being written, by day since 1970."""
        self._topic = ""
        """Topic of all open files, if the lake is partitioned by topic."""
        self._written: list[WrittenFile] = []

    def add(self, rows: RecordRows) -> None:
        """Add records that follow all earlier ones in the order of topic and offset."""
        days = rows.columns["timestamp"].cast(pa.int64()).to_numpy() // _DAY_US
        pieces = _pieces(rows, days)
        if self._shape.by_topic:
            for one in pieces:
                if one.range.topic != self._topic:
                    # The previous topic is complete. Close its files, so that ten thousand topics do not
                    # need ten thousand open files.
                    self._finish()
                    self._topic = one.range.topic
                self._file(one.day).add(rows.columns.slice(one.row, one.range.rows), [one])
            return
        by_day: dict[int, list[_Piece]] = {}
        for one in pieces:
            by_day.setdefault(one.day, []).append(one)
        for day, some in by_day.items():
            is_all = len(by_day) == 1
            columns = rows.columns if is_all else rows.columns.filter(pa.array(days == day))
            self._file(day).add(columns, some)

    def finish(self) -> list[WrittenFile]:
        self._finish()
        return self._written

    def _file(self, day: int) -> "_File":
        if day not in self._open:
            self._open[day] = self._new_file(str(_1970 + datetime.timedelta(days=day)))
        return self._open[day]

    def _new_file(self, date: str) -> "_File":
        path = f"date={date}/{self._name}{self._layout.suffix}"
        partition = {"date": date}
        if self._shape.by_topic:
            # A topic's name may contain any character, including `/`. Readers take the name from the table,
            # not from the path.
            path = f"t-{hashlib.sha256(self._topic.encode()).hexdigest()[:16]}/{path}"
            partition = {"topic": self._topic, **partition}
        path = f"{self._layout.directory}{path}"
        fields = [
            field
            for field in self._shape.columns
            if field.name not in partition or self._layout.has_topic
        ]
        return _File(
            storage=self._storage,
            path=path,
            partition=partition,
            columns=pa.schema(fields),
            footer=self._footer,
        )

    def _finish(self) -> None:
        for file in self._open.values():
            self._written.append(file.finish())
        self._open.clear()


class _File:
    def __init__(
        self,
        storage: Storage,
        path: str,
        partition: Mapping[str, str],
        columns: pa.Schema,
        footer: Mapping[str, str],
    ) -> None:
        self._partition, self._footer = partition, footer
        self._file = SortedFile(storage, path, columns)
        self._ranges: list[RecordRange] = []
        self._least: Values | None = None
        self._most: Values | None = None

    def add(self, rows: pa.RecordBatch, pieces: Sequence["_Piece"]) -> None:
        """Add rows, which are exactly these pieces."""
        for one in pieces:
            self._note(one)
        least, most = _statistics(rows, [one.range.topic for one in pieces])
        self._least = Values(*_each(min, self._least, least)) if self._least else least
        self._most = Values(*_each(max, self._most, most)) if self._most else most
        self._file.add(rows, sum(len(one.data) for one in pieces))

    def finish(self) -> WrittenFile:
        footer = {RANGES_KEY: encode_ranges(self._ranges), **self._footer}
        made = self._file.finish(footer, lambda file: check_file(file, self._ranges))
        assert self._least is not None and self._most is not None
        return WrittenFile(
            path=made.path,
            bytes=made.bytes,
            rows=sum(one.rows for one in self._ranges),
            partition=self._partition,
            statistics=Statistics(self._least, self._most),
            ranges=tuple(self._ranges),
        )

    def _note(self, piece: "_Piece") -> None:
        one, last = piece.range, self._ranges[-1] if self._ranges else None
        place = (one.topic, one.epoch, one.offset, one.ordinal)
        if last is not None and (last.topic, last.epoch, last.end, last.end_ordinal) == place:
            crc = int(crc32c(piece.data, last.crc))
            self._ranges[-1] = last._replace(end=one.end, end_ordinal=one.end_ordinal, crc=crc)
        else:
            self._ranges.append(one._replace(crc=int(crc32c(piece.data))))


def _each(choose: Any, one: Values, other: Values) -> Any:
    return (choose(pair) for pair in zip(one, other, strict=True))


def _statistics(rows: pa.RecordBatch, topics: Sequence[str]) -> Statistics:
    *columns, timestamps = (rows[name] for name in Values._fields[1:])
    found = [pc.min_max(column).as_py() for column in (*columns, timestamps.cast(pa.int64()))]

    def values(topic: str, end: str) -> Values:
        *numbers, us = (one[end] for one in found)
        return Values._make([topic, *numbers, time_text(us // 1000)])

    return Statistics(values(min(topics), "min"), values(max(topics), "max"))


class _Piece(NamedTuple):
    """Consecutive records of one topic and one day."""

    row: int
    """Number of the first row."""
    day: int
    range: RecordRange
    """The records, still without their checksum."""
    data: memoryview


def _pieces(rows: RecordRows, days: npt.NDArray[np.int64]) -> list[_Piece]:
    """Cut records into pieces, all at once."""
    topics = rows.columns["topic"]
    epochs, offsets, ordinals = (
        rows.columns[name].to_numpy() for name in ("epoch", "offset", "ordinal")
    )
    sizes = lengths_of(rows.columns["payload"]) + RECORD_HEADER_BYTES
    positions = np.concatenate([[0], np.cumsum(sizes)])
    assert positions[-1] == len(rows.data), "the columns have other records than the log"
    count = len(days)
    follows = (
        (np.diff(days) == 0)
        & (np.diff(epochs) == 0)
        & (np.diff(ordinals) == 1)
        & (np.diff(offsets) == sizes[:-1])
        & pc.equal(topics.slice(1), topics.slice(0, count - 1)).to_numpy(zero_copy_only=False)
    )
    cuts = np.concatenate([[0], np.flatnonzero(~follows) + 1, [count]])
    firsts, lasts = cuts[:-1], cuts[1:]
    columns = [
        *(firsts, lasts, positions[firsts], positions[lasts]),
        *(column[firsts] for column in (days, epochs, offsets, ordinals)),
    ]
    return [
        _Piece(
            row=first,
            day=day,
            range=RecordRange(
                topic=topic,
                epoch=epoch,
                offset=offset,
                end=offset + stop - begin,
                ordinal=ordinal,
                end_ordinal=ordinal + last - first,
                crc=0,
            ),
            data=rows.data[begin:stop],
        )
        for topic, first, last, begin, stop, day, epoch, offset, ordinal in zip(
            topics.take(pa.array(firsts)).to_pylist(),
            *(column.tolist() for column in columns),
            strict=True,
        )
    ]


def time_text(ms: int) -> str:
    moment = datetime.datetime.fromtimestamp(ms // 1000, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z"


class MadeFile(NamedTuple):
    """A file that is durable."""

    path: str
    bytes: int


class UnsentFile(NamedTuple):
    """A complete file that is not in its storage yet, for reading."""

    place: LakeFile
    content: BinaryIO

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        self.content.seek(0)
        yield self.content

    def __str__(self) -> str:
        return str(self.place)


class SortedFile:
    def __init__(self, storage: Storage, path: str, schema: pa.Schema) -> None:
        self._place, self._schema = storage.file(path), schema
        names = schema.names
        with writing(self._place):
            self._file = storage.new_file(path)
            self._writer = pq.ParquetWriter(
                self._file.content,
                schema,
                compression="snappy",
                # Decoded columns are text, or small compared with the payload.
                use_dictionary=[name for name in names if name not in (*_NUMBERS, "payload")],
                column_encoding={
                    **dict.fromkeys(_NUMBERS, "DELTA_BINARY_PACKED"),
                    "payload": "PLAIN",
                },
                write_statistics=[name for name in names if name != "payload"],
                sorting_columns=[
                    pq.SortingColumn(names.index(name))
                    for name in ("topic", "offset")
                    if name in names
                ],
                store_schema=False,
                # The checksums of the log's bytes do not cover timestamps.
                write_page_checksum=True,
            )
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = self._gathered_bytes = 0

    def add(self, rows: pa.RecordBatch, size: int) -> None:
        """Add rows of about `size` bytes."""
        self._gathered.append(rows.select(self._schema.names))
        self._gathered_rows += rows.num_rows
        self._gathered_bytes += size
        if self._gathered_rows >= ROW_GROUP_ROWS or self._gathered_bytes >= ROW_GROUP_BYTES:
            self._write_group()

    def finish(self, footer: Mapping[str, str], check: Callable[[UnsentFile], object]) -> MadeFile:
        """Complete the file and make it durable, unless `check` raises an error.

        The check reads the file before it is sent. Object storage and HDFS then only have to prove that they
        have the same bytes, which `keep` asks of them, so nothing is fetched twice. A directory has the very
        file that was read.
        """
        self._write_group()
        self._writer.add_key_value_metadata(dict(footer))
        with writing(self._place):
            self._writer.close()
        check(UnsentFile(self._place, self._file.content))
        with writing(self._place):
            self._file.content.seek(0)
            # The name allows a check of every byte, including the footer, even after the file was copied.
            path = named_after(self._place.path, crc_of_file(self._file.content))
            return MadeFile(path, self._file.keep(path))

    def __del__(self) -> None:
        # A task that fails leaves nothing behind. The library completes its file when it is closed.
        if hasattr(self, "_writer"):
            with suppress(OSError, pa.ArrowException):
                self._writer.close()
        if hasattr(self, "_file"):
            self._file.discard()

    def _write_group(self) -> None:
        if self._gathered:
            table = pa.Table.from_batches(self._gathered, schema=self._schema)
            with writing(self._place):
                self._writer.write_table(table, row_group_size=max(1, table.num_rows))
            self._gathered, self._gathered_rows, self._gathered_bytes = [], 0, 0


def named_after(path: str, crc: int) -> str:
    name, _, suffix = path.rpartition(".")
    return f"{name}-{crc:08x}.{suffix}"


def crc_in_name(path: str) -> int | None:
    """Return the checksum in a file's name; None if the name has none."""
    found = _NAMED.search(path)
    return int(found[1], 16) if found else None
