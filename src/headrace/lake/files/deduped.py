"""Writer of deduplicated rows: sorted Parquet files by date, fsynced and verified before use."""

import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headrace.lake.files.checksums import crc_of_records
from headrace.lake.files.reading import read_groups
from headrace.lake.files.sorted_file import SortedFile
from headrace.lake.files.writing import Statistics, Values, WrittenFile, time_text
from headrace.lake.format import LakeError

_DAY_US = 86_400_000_000
_1970 = datetime.date(1970, 1, 1)


class DedupedWriter:
    """Writer of the files of one task."""

    def __init__(self, directory: Path, name: str, columns: pa.Schema) -> None:
        self._directory, self._name, self._columns = directory, name, columns
        self._open: dict[int, _File] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows that follow all earlier ones in the order of topic and offset."""
        days = rows["timestamp"].cast(pa.int64()).to_numpy() // _DAY_US
        for day in np.unique(days).tolist():
            if day not in self._open:
                date = str(_1970 + datetime.timedelta(days=day))
                self._open[day] = _File(self._directory, date, self._name, self._columns)
            is_of_day = days == day
            some = rows if is_of_day.all() else rows.filter(pa.array(is_of_day))
            self._open[day].add(some)

    def finish(self) -> list[WrittenFile]:
        return [self._open[day].finish() for day in sorted(self._open)]


class _File:
    def __init__(self, directory: Path, date: str, name: str, columns: pa.Schema) -> None:
        self._directory, self._date = directory, date
        self._file = SortedFile(directory, f"date={date}/{name}.parquet", columns)
        self._added = _Sums()
        self._found: list[Values] = []
        """Least and greatest values of each batch of rows."""

    def add(self, rows: pa.RecordBatch) -> None:
        self._added = self._added.and_of(rows)
        self._found += _values(rows)
        self._file.add(rows, rows["payload"].nbytes)

    def finish(self) -> WrittenFile:
        path = self._file.finish({})
        held = _Sums()
        for rows in read_groups(self._directory / path, ("offset", "payload")):
            held = held.and_of(rows)
        if held != self._added:
            raise LakeError(f"{self._directory / path} does not hold what was written to it")
        columns = list(zip(*self._found, strict=True))
        statistics = Statistics(Values(*map(min, columns)), Values(*map(max, columns)))
        size = (self._directory / path).stat().st_size
        return WrittenFile(path, size, held.rows, {"date": self._date}, statistics, ())


class _Sums(NamedTuple):
    """Checksums that are equal for equal rows, independent of how the rows are divided into batches."""

    rows: int = 0
    payloads: int = 0
    offsets: int = 0

    def and_of(self, rows: pa.RecordBatch) -> "_Sums":
        return _Sums(
            self.rows + rows.num_rows,
            crc_of_records(rows["payload"], self.payloads),
            crc32c(rows["offset"].to_numpy().tobytes(), self.offsets),
        )


def _values(rows: pa.RecordBatch) -> list[Values]:
    found = {name: pc.min_max(rows[name]).as_py() for name in Values._fields}
    return [
        Values(
            **{name: one[which] for name, one in found.items() if name != "timestamp"},
            timestamp=time_text(_ms(found["timestamp"][which])),
        )
        for which in ("min", "max")
    ]


def _ms(moment: datetime.datetime) -> int:
    return int(moment.timestamp() * 1000)
