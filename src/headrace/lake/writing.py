"""Records → Parquet files of a lake: by date, sorted, on disk and read back before anyone is told of them.

Whoever feeds it keeps the order of topics and offsets; so each file is sorted without a sort.
"""

import datetime
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from headrace.lake.checksums import crc_of_file
from headrace.lake.format import SCHEMA, Range, encode_ranges
from headrace.lake.reading import RANGES_KEY, check_file
from headrace.lake.syncing import make_directory, sync

ROW_GROUP_ROWS = 131_072
ROW_GROUP_BYTES = 64 << 20
"""A row group is written when either is reached: readers take in a whole one at a time."""

_NUMBERS = ("epoch", "offset", "ordinal", "timestamp")
_NAMED = re.compile(r"-([0-9a-f]{8})\.parquet$")
_DAY_MS = 86_400_000
_1970 = datetime.date(1970, 1, 1)


class Rows(NamedTuple):
    """Records that follow each other in a topic, as the log has them and as columns."""

    topic: str
    epoch: int
    ordinal: int
    boundaries: npt.NDArray[np.int64]
    """Where each begins, as offsets of the topic, and where the last ends."""
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
    """The least and the greatest value of each column that readers look for records by."""

    least: Values
    most: Values


class Written(NamedTuple):
    """A file that is on disk and was read back, and that nobody knows of yet."""

    path: str
    bytes: int
    rows: int
    partition: Mapping[str, str]
    statistics: Statistics
    ranges: tuple[Range, ...]


class Writer:
    """The files of one task."""

    def __init__(self, lake: Path, name: str, *, by_topic: bool) -> None:
        self._lake, self._name, self._by_topic = lake, name, by_topic
        self._open: dict[str, _File] = {}
        self._topic = ""
        self._written: list[Written] = []

    def add(self, rows: Rows) -> None:
        """Records that come behind all that were added, in the order of topic and offset."""
        if self._by_topic and rows.topic != self._topic:
            # Nothing more comes for it: ten thousand topics are not ten thousand open files.
            self._finish()
            self._topic = rows.topic
        # Times never decrease within a topic.
        days = rows.ms // _DAY_MS
        first = 0
        while first < len(days):
            last = int(np.searchsorted(days, days[first], "right"))
            date = str(_1970 + datetime.timedelta(days=int(days[first])))
            if date not in self._open:
                self._open[date] = self._new_file(rows.topic, date)
            self._open[date].add(_slice(rows, first, last))
            first = last

    def finish(self) -> list[Written]:
        self._finish()
        return self._written

    def _new_file(self, topic: str, date: str) -> "_File":
        path = f"date={date}/{self._name}.parquet"
        partition = {"date": date}
        if self._by_topic:
            # A topic's name may hold anything, also `/`: readers take it from the table, not from here.
            path = f"t-{hashlib.sha256(topic.encode()).hexdigest()[:16]}/{path}"
            partition = {"topic": topic, **partition}
        make_directory((self._lake / path).parent)
        return _File(self._lake, path, partition)

    def _finish(self) -> None:
        for file in self._open.values():
            self._written.append(file.finish())
        self._open.clear()


class _File:
    def __init__(self, lake: Path, path: str, partition: Mapping[str, str]) -> None:
        self._lake, self._path, self._partition = lake, path, partition
        fields = [field for field in SCHEMA if field.name not in partition]
        self._schema = pa.schema(fields)
        names = self._schema.names
        self._writer = pq.ParquetWriter(
            lake / path,
            self._schema,
            compression="snappy",
            use_dictionary=[name for name in ("topic",) if name in names],
            column_encoding={**dict.fromkeys(_NUMBERS, "DELTA_BINARY_PACKED"), "payload": "PLAIN"},
            write_statistics=[name for name in names if name != "payload"],
            sorting_columns=[
                pq.SortingColumn(names.index(name)) for name in ("topic", "offset") if name in names
            ],
            store_schema=False,
            # Times are in no checksum of the log's bytes.
            write_page_checksum=True,
        )
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = self._gathered_bytes = 0
        self._ranges: list[Range] = []
        self._least: Values | None = None
        self._most: Values | None = None

    def add(self, rows: Rows) -> None:
        self._note(rows)
        self._gathered.append(rows.columns.select(self._schema.names))
        self._gathered_rows += rows.columns.num_rows
        self._gathered_bytes += len(rows.data)
        if self._gathered_rows >= ROW_GROUP_ROWS or self._gathered_bytes >= ROW_GROUP_BYTES:
            self._write_group()

    def finish(self) -> Written:
        self._write_group()
        self._writer.add_key_value_metadata({RANGES_KEY: encode_ranges(self._ranges)})
        self._writer.close()
        path = self._lake / self._path
        sync(path)
        # So every byte can be checked, of the footer too, wherever the file has come to.
        self._path = named_after(self._path, crc_of_file(path))
        path = path.rename(self._lake / self._path)
        sync(path.parent)
        check_file(path, self._ranges)
        assert self._least is not None and self._most is not None
        return Written(
            self._path,
            path.stat().st_size,
            sum(one.rows for one in self._ranges),
            self._partition,
            Statistics(self._least, self._most),
            tuple(self._ranges),
        )

    def _write_group(self) -> None:
        if self._gathered:
            table = pa.Table.from_batches(self._gathered, schema=self._schema)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
            self._gathered, self._gathered_rows, self._gathered_bytes = [], 0, 0

    def _note(self, rows: Rows) -> None:
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
                Range(rows.topic, rows.epoch, offset, end, rows.ordinal, rows.ordinal + count, crc)
            )
        first = Values(rows.topic, rows.epoch, offset, rows.ordinal, _time(int(rows.ms[0])))
        final = Values(
            *(rows.topic, rows.epoch, int(rows.boundaries[-2]), rows.ordinal + count - 1),
            _time(int(rows.ms[-1])),
        )
        self._least = Values(*_each(min, self._least, first)) if self._least else first
        self._most = Values(*_each(max, self._most, final)) if self._most else final


def _each(choose: Any, one: Values, other: Values) -> Any:
    return (choose(pair) for pair in zip(one, other, strict=True))


def named_after(path: str, crc: int) -> str:
    return f"{path.removesuffix('.parquet')}-{crc:08x}.parquet"


def crc_in_name(path: str) -> int | None:
    """The checksum that a file was written with; None where its name has none."""
    found = _NAMED.search(path)
    return int(found[1], 16) if found else None


def _slice(rows: Rows, first: int, last: int) -> Rows:
    if first == 0 and last == len(rows.ms):
        return rows
    begin = int(rows.boundaries[0])
    return Rows(
        rows.topic,
        rows.epoch,
        rows.ordinal + first,
        rows.boundaries[first : last + 1],
        rows.ms[first:last],
        rows.data[int(rows.boundaries[first]) - begin : int(rows.boundaries[last]) - begin],
        rows.columns.slice(first, last - first),
    )


def _time(ms: int) -> str:
    moment = datetime.datetime.fromtimestamp(ms // 1000, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z"
