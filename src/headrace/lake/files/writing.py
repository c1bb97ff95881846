"""Records → Parquet files of a lake: by date, sorted, on disk and read back before anyone is told of them.

Whoever feeds it keeps the order of topics and offsets; so each file is sorted without a sort.
"""

import datetime
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from headrace.lake.format import FORMAT, NAMES_KEY, RANGES_KEY, Range, Shape, encode_ranges
from headrace.lake.reading import check_file
from headrace.lake.sorted_file import SortedFile

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


Bounds = Mapping[str, tuple[Any, Any]]
"""What a table says of the least and the greatest in a file, None where it says nothing: of columns, times in
microseconds and dates in days since 1970, and of `rows`, which is their number."""


class Written(NamedTuple):
    """A file that is on disk and was read back, and that nobody knows of yet."""

    path: str
    bytes: int
    rows: int
    partition: Mapping[str, str]
    statistics: Statistics
    ranges: tuple[Range, ...]


class Layout(NamedTuple):
    """Where the files of a table lie in its lake, and what is in them."""

    directory: str = ""
    """Below the lake."""
    suffix: str = ".parquet"
    has_topic: bool = False
    """Also where files are kept apart by topic: their readers know it from nowhere else."""


class Writer:
    """The files of one task.

    With `old_names` their topics are named as earlier versions did, and the footers say so.
    """

    def __init__(
        self,
        lake: Path,
        name: str,
        shape: Shape,
        layout: Layout = Layout(),  # noqa: B008
        *,
        old_names: bool = False,
    ) -> None:
        self._lake, self._name, self._shape, self._layout = lake, name, shape, layout
        self._footer = {} if old_names else {NAMES_KEY: str(FORMAT)}
        self._open: dict[str, _File] = {}
        self._topic = ""
        self._written: list[Written] = []

    def add(self, rows: Rows) -> None:
        """Records that come behind all that were added, in the order of topic and offset."""
        if self._shape.by_topic and rows.topic != self._topic:
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
        path = f"date={date}/{self._name}{self._layout.suffix}"
        partition = {"date": date}
        if self._shape.by_topic:
            # A topic's name may hold anything, also `/`: readers take it from the table, not from here.
            path = f"t-{hashlib.sha256(topic.encode()).hexdigest()[:16]}/{path}"
            partition = {"topic": topic, **partition}
        path = f"{self._layout.directory}{path}"
        fields = [
            field
            for field in self._shape.columns
            if field.name not in partition or self._layout.has_topic
        ]
        return _File(self._lake, path, partition, pa.schema(fields), self._footer)

    def _finish(self) -> None:
        for file in self._open.values():
            self._written.append(file.finish())
        self._open.clear()


class _File:
    def __init__(
        self,
        lake: Path,
        path: str,
        partition: Mapping[str, str],
        columns: pa.Schema,
        footer: Mapping[str, str],
    ) -> None:
        self._lake, self._partition, self._footer = lake, partition, footer
        self._file = SortedFile(lake, path, columns)
        self._ranges: list[Range] = []
        self._least: Values | None = None
        self._most: Values | None = None

    def add(self, rows: Rows) -> None:
        self._note(rows)
        self._file.add(rows.columns, len(rows.data))

    def finish(self) -> Written:
        path = self._file.finish({RANGES_KEY: encode_ranges(self._ranges), **self._footer})
        check_file(self._lake / path, self._ranges)
        assert self._least is not None and self._most is not None
        return Written(
            path,
            (self._lake / path).stat().st_size,
            sum(one.rows for one in self._ranges),
            self._partition,
            Statistics(self._least, self._most),
            tuple(self._ranges),
        )

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
        first = Values(rows.topic, rows.epoch, offset, rows.ordinal, time_text(int(rows.ms[0])))
        final = Values(
            *(rows.topic, rows.epoch, int(rows.boundaries[-2]), rows.ordinal + count - 1),
            time_text(int(rows.ms[-1])),
        )
        self._least = Values(*_each(min, self._least, first)) if self._least else first
        self._most = Values(*_each(max, self._most, final)) if self._most else final


def _each(choose: Any, one: Values, other: Values) -> Any:
    return (choose(pair) for pair in zip(one, other, strict=True))


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


def time_text(ms: int) -> str:
    moment = datetime.datetime.fromtimestamp(ms // 1000, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z"
