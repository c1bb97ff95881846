"""Writer of a lake's records: sorted Parquet files by date, fsynced and verified before use.

The caller passes records in the order of topic and offset, so each file is sorted without a sort.
"""

import datetime
import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from headrace.lake.files.reading import check_file
from headrace.lake.format import (
    FORMAT,
    NAMES_KEY,
    RANGES_KEY,
    RecordRange,
    Shape,
    encode_ranges,
    writing,
)
from headrace.lake.storage.storage import Storage

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

_DAY_MS = 86_400_000
_1970 = datetime.date(1970, 1, 1)


class RecordRows(NamedTuple):
    """Consecutive records of a topic, in the log's format and as columns."""

    topic: str
    epoch: int
    ordinal: int
    boundaries: npt.NDArray[np.int64]
    """Topic offset where each record begins, followed by the offset where the last record ends."""
    ms: npt.NDArray[np.int64]
    data: memoryview
    columns: pa.RecordBatch


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
        self._open: dict[str, _File] = {}
        self._topic = ""
        self._written: list[WrittenFile] = []

    def add(self, rows: RecordRows) -> None:
        """Add records that follow all earlier ones in the order of topic and offset."""
        if self._shape.by_topic and rows.topic != self._topic:
            # The previous topic is complete. Close its files, so that ten thousand topics do not need ten
            # thousand open files.
            self._finish()
            self._topic = rows.topic
        # Timestamps never decrease within a topic.
        days = rows.ms // _DAY_MS
        first = 0
        while first < len(days):
            last = int(np.searchsorted(days, days[first], "right"))
            date = str(_1970 + datetime.timedelta(days=int(days[first])))
            if date not in self._open:
                self._open[date] = self._new_file(rows.topic, date)
            self._open[date].add(_slice(rows, first, last))
            first = last

    def finish(self) -> list[WrittenFile]:
        self._finish()
        return self._written

    def _new_file(self, topic: str, date: str) -> "_File":
        path = f"date={date}/{self._name}{self._layout.suffix}"
        partition = {"date": date}
        if self._shape.by_topic:
            # A topic's name may contain any character, including `/`. Readers take the name from the table,
            # not from the path.
            path = f"t-{hashlib.sha256(topic.encode()).hexdigest()[:16]}/{path}"
            partition = {"topic": topic, **partition}
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
        self._storage, self._partition, self._footer = storage, partition, footer
        self._file = SortedFile(storage, path, columns)
        self._ranges: list[RecordRange] = []
        self._least: Values | None = None
        self._most: Values | None = None

    def add(self, rows: RecordRows) -> None:
        self._note(rows)
        self._file.add(rows.columns, len(rows.data))

    def finish(self) -> WrittenFile:
        made = self._file.finish({RANGES_KEY: encode_ranges(self._ranges), **self._footer})
        check_file(self._storage.file(made.path), self._ranges)
        assert self._least is not None and self._most is not None
        return WrittenFile(
            path=made.path,
            bytes=made.bytes,
            rows=sum(one.rows for one in self._ranges),
            partition=self._partition,
            statistics=Statistics(self._least, self._most),
            ranges=tuple(self._ranges),
        )

    def _note(self, rows: RecordRows) -> None:
        offset, end = int(rows.boundaries[0]), int(rows.boundaries[-1])
        count = len(rows.ms)
        last = self._ranges[-1] if self._ranges else None
        place = (rows.topic, rows.epoch, offset, rows.ordinal)
        if last is not None and (last.topic, last.epoch, last.end, last.end_ordinal) == place:
            crc = int(crc32c(rows.data, last.crc))
            self._ranges[-1] = last._replace(end=end, end_ordinal=rows.ordinal + count, crc=crc)
        else:
            crc = int(crc32c(rows.data))
            self._ranges.append(
                RecordRange(
                    topic=rows.topic,
                    epoch=rows.epoch,
                    offset=offset,
                    end=end,
                    ordinal=rows.ordinal,
                    end_ordinal=rows.ordinal + count,
                    crc=crc,
                )
            )
        first = Values(
            topic=rows.topic,
            epoch=rows.epoch,
            offset=offset,
            ordinal=rows.ordinal,
            timestamp=time_text(int(rows.ms[0])),
        )
        final = Values(
            topic=rows.topic,
            epoch=rows.epoch,
            offset=int(rows.boundaries[-2]),
            ordinal=rows.ordinal + count - 1,
            timestamp=time_text(int(rows.ms[-1])),
        )
        self._least = Values(*_each(min, self._least, first)) if self._least else first
        self._most = Values(*_each(max, self._most, final)) if self._most else final


def _each(choose: Any, one: Values, other: Values) -> Any:
    return (choose(pair) for pair in zip(one, other, strict=True))


def _slice(rows: RecordRows, first: int, last: int) -> RecordRows:
    if first == 0 and last == len(rows.ms):
        return rows
    begin = int(rows.boundaries[0])
    return rows._replace(
        ordinal=rows.ordinal + first,
        boundaries=rows.boundaries[first : last + 1],
        ms=rows.ms[first:last],
        data=rows.data[int(rows.boundaries[first]) - begin : int(rows.boundaries[last]) - begin],
        columns=rows.columns.slice(first, last - first),
    )


def time_text(ms: int) -> str:
    moment = datetime.datetime.fromtimestamp(ms // 1000, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z"


class MadeFile(NamedTuple):
    """A file that is durable."""

    path: str
    bytes: int


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

    def finish(self, footer: Mapping[str, str]) -> MadeFile:
        """Complete the file and make it durable."""
        self._write_group()
        self._writer.add_key_value_metadata(dict(footer))
        with writing(self._place):
            self._writer.close()
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
