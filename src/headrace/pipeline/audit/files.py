"""Tasks of an audit that check files of a lake: their rows must be those of the log, byte for byte.

A file's footer names its ranges of records. A task reads each range, converts the rows to the log's format
and compares their checksum with the footer. It also compares the bytes with the log, as far as the log still
has these records.
"""

import datetime
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from io import FileIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c
from msgspec import Struct

from headrace.lake.files.reading import records_of
from headrace.lake.files.writing import Bounds, crc_in_name, crc_of_file
from headrace.lake.format import RANGES_KEY, SCHEMA, has_old_names, ranges_in
from headrace.lake.format import RecordRange as LakeRange
from headrace.lake.storage.storage import LakeFile, Storage, directory_of
from headrace.log.verify.checks import VerifiedRange
from headrace.model import RECORD_HEADER_BYTES, legacy_name
from headrace.pipeline.audit.plan import Finding
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.view import LogLocation

_DAY_US = 86_400_000_000
_1970 = datetime.date(1970, 1, 1)
_NOT_FOUND, _GONE = 404, 410
_WRONG_BYTES = "its bytes have another checksum than its name says"

_BOUNDED = ("epoch", "offset", "ordinal", "timestamp")

_Numbers = npt.NDArray[np.int64]


class Kept(NamedTuple):
    """Range of offsets of a topic that the log has, and its file; `file` is empty for a server's log."""

    offset: int
    end: int
    file: str = ""


class FileWork(NamedTuple):
    storage: Storage
    path: str
    shown: str
    """Visible name of the file for readers that do not use the table; empty if it equals `path`."""
    bytes: int
    """Size of the file according to the table."""
    bounds: Bounds
    """Smallest and largest values of the file's columns according to the table."""
    place: LogLocation
    kept: Mapping[str, Iterable[Kept]]
    """Ranges of the log for the topics in the file, by topic."""

    @property
    def file(self) -> LakeFile:
        return self.storage.file(self.path)


class FileCheck(Struct):
    path: str
    ranges: list[LakeRange] = []
    """Ranges that the file's footer names; empty when the footer cannot be read."""
    findings: list[Finding] = []
    differing: list[Finding] = []
    """Ranges where the log has other bytes; the damage may be in the log."""
    compared: dict[str, int] = {}
    """Number of bytes, by topic, that the log has too and that are equal there."""
    unreadable: Finding | None = None
    """Reason why the file's ranges are unknown; None when they are known."""

    @property
    def is_missing(self) -> bool:
        """True if the file or its visible name is missing."""
        found = [*self.findings, self.unreadable]
        return any(one is not None and one.kind == "missing" for one in found)


def check_files(works: Sequence[FileWork]) -> list[FileCheck]:
    checks = []
    for work in works:
        found = _check_file(work)
        found.findings += _check_shown(work)
        checks.append(found)
    return checks


def _check_shown(work: FileWork) -> Iterator[Finding]:
    """Check the file under its visible name, which readers without the table use."""
    if not work.shown:
        return
    lake = directory_of(work.storage, "a lake with visible names")
    path, shown = lake / work.path, lake / work.shown
    try:
        # In a copy of the lake, the path and the visible name may be two separate files.
        if path.exists() and shown.samefile(path):
            return
        with work.storage.open(work.shown) as content:
            is_right = crc_of_file(content) == crc_in_name(work.shown)
        if not is_right:
            yield Finding("damaged", _WRONG_BYTES, work.shown)
    except FileNotFoundError:
        reason = (
            "readers without the table miss these rows; the next export or compaction restores it"
        )
        yield Finding("missing", reason, work.shown)
    except OSError as error:
        yield Finding("damaged", f"it cannot be read: {error.strerror}", work.shown)


def _check_file(work: FileWork) -> FileCheck:
    crc = crc_in_name(work.path)
    is_right = True
    try:
        if crc is not None:
            with work.file.open() as content:
                is_right = crc_of_file(content) == crc
    except OSError:
        pass  # the file is gone or unreadable: `_Check` reports that below
    if is_right:
        return _Check(work).run()
    wrong = Finding("damaged", _WRONG_BYTES, work.path)
    found = _in_another_process(work)
    if found is None:
        return FileCheck(work.path, unreadable=wrong)
    if not found.findings and found.unreadable is None:
        found.findings.append(wrong)
    return found


# An executor may have got this package with the job, somewhere on its path only.
_SCRIPT = """\
import sys
sys.path[:] = sys.argv[1:]
from headrace.pipeline.audit.files import main
main()
"""


def _in_another_process(work: FileWork) -> FileCheck | None:
    """Examine a damaged file in a new process: reading it may crash the Parquet library."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *sys.path],
        input=pickle.dumps(work),
        capture_output=True,
        check=False,
    )
    return pickle.loads(done.stdout) if done.returncode == 0 else None


def main() -> None:
    """Check the file that standard input describes."""
    work = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(_Check(work).run()))


def known_ranges(file: LakeFile) -> list[LakeRange]:
    """Return the ranges that a file's footer names, or none if it cannot be read."""
    try:
        with file.open() as content:
            return _ranges(pq.read_metadata(content))
    except _UNREADABLE:
        return []  # the task that reads the file reports the reason


_UNREADABLE = (OSError, ValueError, TypeError, KeyError, pa.ArrowException)
"""Exceptions that reading a damaged file may raise."""


def _ranges(footer: pq.FileMetaData) -> list[LakeRange]:
    if RANGES_KEY.encode() not in (footer.metadata or {}):
        raise ValueError("its footer does not name its ranges")
    return ranges_in(footer)


class _Check:
    def __init__(self, work: FileWork) -> None:
        self._work = work
        self._found = FileCheck(work.path)
        self._done = 0
        """Number of ranges that are checked."""
        self._old_names = False

    def run(self) -> FileCheck:
        try:
            self._check()
        except FileNotFoundError:
            self._found.unreadable = Finding("missing", "the file is gone", self._work.path)
        except _UNREADABLE as error:
            reason = f"it cannot be read: {' '.join(str(error).split())}"
            if self._found.ranges:
                # The footer is sound, so the affected rows are known.
                self._all_left(reason)
            else:
                self._found.unreadable = Finding("damaged", reason, self._work.path)
        return self._found

    def _check(self) -> None:
        size = self._work.file.size()
        if size != self._work.bytes:
            self._damaged(f"it has {size:,} bytes, the table says {self._work.bytes:,}")
        with (
            self._work.file.open() as content,
            pq.ParquetFile(content, page_checksum_verification=True) as file,
            closing(_Log(self._work)) as log,
        ):
            ranges = self._found.ranges = _ranges(file.metadata)
            self._old_names = has_old_names(file.metadata)
            if sorted(ranges, key=lambda one: (self._named(one), one.offset)) != ranges:
                self._damaged("its ranges are not in the order of topics and offsets")
            rows = sum(one.rows for one in ranges)
            if file.metadata.num_rows != rows:
                self._damaged(f"it has {file.metadata.num_rows:,} rows, its footer names {rows:,}")
            for field in _fields(file.schema_arrow):
                if field != SCHEMA.field(field.name):
                    self._damaged(f"its column {field.name} is of another type, {field.type}")
            self._check_bounds(file.metadata)
            self._check_rows(file, log)

    def _check_bounds(self, footer: pq.FileMetaData) -> None:
        """Check the bounds in the table: a query skips files whose bounds exclude the values it looks for."""
        topics = [self._named(one) for one in self._found.ranges]
        for name, (first, last) in _held(footer, topics, _day_of(self._work.path)).items():
            least, most = self._work.bounds.get(name, (None, None))
            if (least is not None and first < least) or (most is not None and last > most):
                self._damaged(
                    f"the table says that its {name} is between {least!r} and {most!r}, but it is between "
                    f"{first!r} and {last!r}"
                )

    def _check_rows(self, file: pq.ParquetFile, log: "_Log") -> None:
        names = [field.name for field in _fields(file.schema_arrow)]
        day = _day_of(self._work.path)
        ranges = self._found.ranges
        check: _RangeCheck | None = None
        for number in range(file.metadata.num_row_groups):
            group = file.read_row_group(number, columns=names, use_threads=False).combine_chunks()
            for batch in group.to_batches():
                at = 0
                while at < batch.num_rows and self._done < len(ranges):
                    one = ranges[self._done]
                    check = check or _RangeCheck(one, self._named(one), day, log)
                    count = min(check.left, batch.num_rows - at)
                    check.add(batch.slice(at, count))
                    at += count
                    if not check.left:
                        self._finish(check)
                        check = None
        self._all_left("the file ends before these rows")

    def _finish(self, check: "_RangeCheck") -> None:
        found, one = self._found, self._found.ranges[self._done]
        self._done += 1
        reason = check.finish()
        if reason is not None:
            found.findings.append(_found(found.path, one, reason, check.differing))
        elif check.differing is not None:
            reason = "log and lake have different bytes here, and both checksums are right"
            found.differing.append(_found(found.path, one, reason, check.differing))
        found.compared[one.topic] = found.compared.get(one.topic, 0) + check.compared

    def _named(self, one: LakeRange) -> str:
        """Return the topic of a range, as the file names it."""
        return legacy_name(one.topic) if self._old_names else one.topic

    def _damaged(self, reason: str) -> None:
        self._found.findings.append(Finding("damaged", reason, self._work.path))

    def _all_left(self, reason: str) -> None:
        """Report all ranges that are not checked yet."""
        left = self._found.ranges[self._done :]
        self._found.findings += [_found(self._work.path, one, reason) for one in left]


def _fields(schema: pa.Schema) -> list[pa.Field]:
    """Return the fields that all lakes have. Files do not contain a table's partition columns."""
    return [schema.field(name) for name in SCHEMA.names if name in schema.names]


def _held(
    footer: pq.FileMetaData, topics: Sequence[str], day: int | None
) -> dict[str, tuple[Any, Any]]:
    """Return the smallest and greatest values in a file, by the column names that tables use."""
    held: dict[str, tuple[Any, Any]] = {"rows": (footer.num_rows, footer.num_rows)}
    if topics:
        held["topic"] = (min(topics), max(topics))
    if day is not None:
        held["date"] = (day, day)
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            name, found = column.path_in_schema, column.statistics
            if name in _BOUNDED and found is not None and found.has_min_max:
                least, most = held.get(name, (found.min_raw, found.max_raw))
                held[name] = (min(least, found.min_raw), max(most, found.max_raw))
    return held


def _found(path: str, one: LakeRange, reason: str, part: VerifiedRange | None = None) -> Finding:
    return Finding("damaged", reason, path, one.topic, one.epoch, part or range_of(one))


def range_of(one: LakeRange) -> VerifiedRange:
    return VerifiedRange(one.offset, one.end, one.ordinal, one.end_ordinal)


def _day_of(path: str) -> int | None:
    """Return the date of the file's partition in days since 1970, or None without such a partition."""
    for name in path.split("/"):
        if name.startswith("date="):
            return (datetime.date.fromisoformat(name.removeprefix("date=")) - _1970).days
    return None


class _RangeCheck:
    """Check of rows against the range that they should form, and against the log."""

    def __init__(self, expected: LakeRange, named: str, day: int | None, log: "_Log") -> None:
        """`named` is the topic's name in the rows."""
        self._expected, self._named, self._day, self._log = expected, named, day, log
        self._offset, self._ordinal = expected.offset, expected.ordinal
        self._us = 0
        self._crc = 0
        self._reason: str | None = None
        self.compared = 0
        self.differing: VerifiedRange | None = None
        """Records from the first to the last one whose bytes differ in the log."""

    @property
    def left(self) -> int:
        return self._expected.end_ordinal - self._ordinal

    def add(self, rows: pa.RecordBatch) -> None:
        payloads = rows["payload"]
        lengths = pc.binary_length(payloads).to_numpy(zero_copy_only=False).astype(np.int64)
        places = self._offset + np.concatenate(([0], np.cumsum(lengths + RECORD_HEADER_BYTES)))
        self._reason = self._reason or self._wrong(rows, places)
        data = records_of(payloads)
        self._crc = crc32c(data, self._crc)
        if self._reason is None:
            self._compare(data, places)
        self._offset, self._ordinal = int(places[-1]), self._ordinal + rows.num_rows

    def finish(self) -> str | None:
        """Return the reason why the range is wrong, or None."""
        is_right = (self._offset, self._crc) == (self._expected.end, self._expected.crc)
        return self._reason or (None if is_right else "the checksum is wrong")

    def _wrong(self, rows: pa.RecordBatch, places: _Numbers) -> str | None:
        ordinals = np.arange(self._ordinal, self._ordinal + rows.num_rows)
        if not np.array_equal(rows["offset"].to_numpy(), places[:-1]):
            return "the rows are not at their offsets"
        if not np.array_equal(rows["ordinal"].to_numpy(), ordinals):
            return "the ordinals do not follow each other"
        for name, value in (("topic", self._named), ("epoch", self._expected.epoch)):
            # Files do not contain a table's partition columns.
            if name in rows.schema.names and pc.any(pc.not_equal(rows[name], value)).as_py():
                return f"the rows are of another {name}"
        us = rows["timestamp"].cast(pa.int64()).to_numpy()
        if us[0] < self._us or (np.diff(us) < 0).any():
            return "the time goes back"
        self._us = int(us[-1])
        if self._day is not None and {int(us[0]) // _DAY_US, self._us // _DAY_US} != {self._day}:
            return "the rows are of another date"
        return None

    def _compare(self, data: memoryview, places: _Numbers) -> None:
        ours = np.frombuffer(data, np.uint8)
        for at, piece in self._log.read(self._expected.topic, int(places[0]), int(places[-1])):
            theirs = np.frombuffer(piece, np.uint8)
            here = ours[at - int(places[0]) :][: len(theirs)]
            if np.array_equal(here, theirs):
                self.compared += len(theirs)
                continue
            wrong = at + np.flatnonzero(here != theirs)[[0, -1]]
            first, last = (np.searchsorted(places, wrong, "right") - 1).tolist()
            offset, ordinal = int(places[first]), self._ordinal + first
            if self.differing is not None:
                offset, ordinal = self.differing.offset, self.differing.ordinal
            end, end_ordinal = int(places[last + 1]), self._ordinal + last + 1
            self.differing = VerifiedRange(offset, end, ordinal, end_ordinal)


class _Log:
    """Bytes of the log, in a data directory or behind a server."""

    def __init__(self, work: FileWork) -> None:
        self._kept = work.kept
        self._http = HttpClient(work.place) if work.place.urls else None

    def close(self) -> None:
        if self._http is not None:
            self._http.close()

    def read(self, topic: str, offset: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of each piece between two offsets; skip what is gone or cannot be read."""
        for one in self._kept.get(topic, ()):
            at, stop = max(offset, one.offset), min(end, one.end)
            while at < stop:
                data = self._piece(topic, one, at, stop)
                if not data:
                    break
                yield at, data
                at += len(data)

    def _piece(self, topic: str, one: Kept, at: int, stop: int) -> bytes:
        # Retention may have deleted these bytes meanwhile. The check of the log reports other damage.
        try:
            if self._http is None:
                with FileIO(one.file) as file:
                    return os.pread(file.fileno(), stop - at, at - one.offset)
            return self._http.send("GET", "/v1/range", {"topic": topic, "from": at, "to": stop})
        except ServerError as error:
            if error.status not in (_NOT_FOUND, _GONE):
                raise
        except OSError:
            pass
        return b""
