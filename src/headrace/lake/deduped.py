"""A Delta table of a lake's rows with duplicates removed: its files, and the note that each run leaves.

A run counts once the table has committed its number, in the same step as its files. The run's note is on disk
before that. The note says up to which offset each topic is covered, and which files have the keys that the
next run needs.
"""

import datetime
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headrace.lake.files.reading import crc_of_records, read_groups
from headrace.lake.files.writing import (
    SortedFile,
    Statistics,
    Values,
    WrittenFile,
    make_directory,
    replace,
    time_text,
)
from headrace.lake.format import (
    DATE,
    FORMAT,
    RENAMED_FORMAT,
    LakeError,
    Shape,
    decode_versioned,
    present_topic,
)
from headrace.lake.formats.delta import DeltaLake, can_open, make_delta
from headrace.lake.manifests import HIDDEN
from headrace.model import legacy_name

APP = "headrace-dedupe"
"""Name of the Delta application whose transaction numbers are the numbers of runs."""

_FORMAT_KEY = "headrace.deduped"
_NOTE_KEY = "headrace.note"

KEYS = "keys"
_NOTES = "runs"
_KEPT_S = 7 * 86_400.0
"""Time that files stay after the table has dropped them, because readers may still use them."""

_OURS = re.compile(
    r"([0-9]{12,})-([0-9a-f]{8}\.json(\.[0-9a-f]{12}\.tmp)?|[0-9]{4,}-[0-9a-f]{12}\.parquet)"
)
"""Names of notes, also of partly written ones, and of key files."""

_RESTORE = "restore it, or dedupe into a new directory"


class Bucket(NamedTuple):
    """One part of the keys by which rows were identified."""

    path: str = ""
    """Path of the key file below the directory; empty for a bucket without keys."""
    keys: int = 0


class RunNote(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run, as the next run needs it."""

    format: int = FORMAT
    number: int
    lake: str
    """Identity of the lake's table."""
    key: str
    window_ms: int | None
    """Time window for duplicates; None means unlimited."""
    ends: dict[str, int]
    """Offset up to which each topic is covered."""
    done: tuple[str, ...]
    """Files of the lake that are completely processed: a file never changes."""
    buckets: tuple[Bucket, ...]

    def encode(self) -> bytes:
        # A note of an earlier format keeps its bytes on disk, because the file is named after their checksum.
        is_old = self.format < RENAMED_FORMAT
        return msgspec.json.encode(self._renamed(legacy_name) if is_old else self)

    def present(self) -> "RunNote":
        """Return the note with present topic names, also if an earlier version wrote it."""
        return self._renamed(present_topic) if self.format < RENAMED_FORMAT else self

    def _renamed(self, name: Callable[[str], str]) -> "RunNote":
        ends = {name(topic): end for topic, end in self.ends.items()}
        return msgspec.structs.replace(self, ends=ends)


class DedupedTable:
    def __init__(self, directory: Path, shape: Shape) -> None:
        self._directory = directory
        self._table = DeltaLake(directory, shape)

    @classmethod
    def open(cls, directory: Path, shape: Shape) -> Self | None:
        """Open the table; None if it can be created. Raise LakeError for other content. Changes nothing."""
        found = can_open(directory, _FORMAT_KEY, "deduped rows of Headrace")
        return cls(directory, shape) if found else None

    @classmethod
    def make(cls, directory: Path, shape: Shape) -> Self:
        columns = shape.columns.append(DATE)
        make_delta(directory, "headrace deduped", columns, {_FORMAT_KEY: str(FORMAT)}, ["date"])
        return cls(directory, shape)

    def last(self) -> RunNote | None:
        """Return the note of the last committed run."""
        number = self._table.last(APP)
        if number is None:
            return None
        noted = (self._table.notes(number) or {}).get(_NOTE_KEY)
        # Other notes with this number were never committed, and are swept soon.
        paths = list((self._directory / HIDDEN / _NOTES).glob(f"{noted or f'{number:012}-*'}.json"))
        if len(paths) != 1:
            raise LakeError(
                f"{self._directory}: the note of run {number} is missing, so it is unknown how far the run "
                f"came: {_RESTORE}"
            )
        return read_note(paths[0])

    def commit(
        self, note: RunNote, files: Sequence[WrittenFile], here: Callable[[str], None]
    ) -> bool:
        """Add files to the table, once for the note's number.

        Return False if the number is already committed.

        `here` is called with "noted" when the note is on disk.
        """
        path = note_path(self._directory, note)
        make_directory(path.parent)
        replace(path, note.encode())
        here("noted")
        return self._table.commit(APP, note.number, files, {_NOTE_KEY: path.stem})

    def sweep(self, note: RunNote) -> None:
        """Delete notes and key files that `note`, the last one, does not name, up to its number.

        Also delete files of rows that the table has not named for a week. Files with a later number may
        belong to a run on another machine, so they stay.
        """
        hidden = self._directory / HIDDEN
        named = {self._directory / one.path for one in note.buckets}
        named.add(note_path(self._directory, note))
        for path in (*hidden.glob(f"{_NOTES}/*"), *hidden.glob(f"{KEYS}/*")):
            ours = _OURS.fullmatch(path.name)
            if ours and int(ours[1]) <= note.number and path not in named:
                path.unlink(missing_ok=True)
        self._table.sweep(_KEPT_S, dry_run=False)


def note_path(directory: Path, note: RunNote) -> Path:
    """Return the path of a note, which contains its number and its checksum.

    Thanks to the checksum, a note whose commit fails does not overwrite the note of another run.
    """
    data = note.encode()
    return directory / HIDDEN / _NOTES / f"{note.number:012}-{crc32c(data):08x}.json"


def read_note(path: Path) -> RunNote:
    reason = "its checksum fails"
    try:
        data = path.read_bytes()
        note = decode_versioned(data, RunNote, str(path))
        if path.stem.endswith(f"-{crc32c(data):08x}"):
            return note.present()
    except ValueError as error:
        reason = str(error)
    raise LakeError(f"{path} is damaged ({reason}): {_RESTORE}")


# Files

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
            raise LakeError(
                f"{self._directory / path} does not have the rows that were written to it"
            )
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
