"""A Delta table of a lake's rows with duplicates removed: its files, and the note that each run leaves.

A run counts once the table has committed its number, in the same step as its files. The commit names the
run's note, which is durable before. The note says up to which offset each topic is covered, and which files
have the keys that the next run needs.
"""

import datetime
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    UnsentFile,
    Values,
    WrittenFile,
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
from headrace.lake.formats.delta import LOG, DeltaLake, can_open, make_delta
from headrace.lake.storage.storage import HIDDEN, LakeFile, Storage
from headrace.model import legacy_name

APP = "headrace-dedupe"
"""Name of the Delta application whose transaction numbers are the numbers of runs."""

_FORMAT_KEY = "headrace.deduped"

KEYS = f"{HIDDEN}/keys"
_NOTES = f"{HIDDEN}/runs"
_KEPT_S = 7 * 86_400.0
"""Time that files stay after the table has dropped them, because readers may still use them."""

_OURS = re.compile(
    rf"{HIDDEN}/(?:(?:runs|keys)/([0-9]{{12,}})-"
    r"(?:[0-9a-f]{8}\.json(?:\.[0-9a-f]{12}\.tmp)?|[0-9]{4,}-[0-9a-f]{12}\.parquet)"
    r"|staging/.+\.arrow)"
)
"""Paths of notes, also of partly written ones, and of key files, with the number of their run.

Also those of files that tasks of an earlier version left for each other, without a number.
"""

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
    secret: str | msgspec.UnsetType = msgspec.UNSET
    """Secret of the keys' hashes. Tables that an earlier version has made have none."""
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
    def __init__(self, storage: Storage, shape: Shape) -> None:
        self._storage = storage
        self._table = DeltaLake(storage, shape)

    @classmethod
    def open(cls, storage: Storage, shape: Shape) -> Self | None:
        """Open the table; None if it can be created. Raise LakeError for other content. Changes nothing."""
        found = can_open(storage, _FORMAT_KEY, "deduped rows of Headrace")
        return cls(storage, shape) if found else None

    @classmethod
    def make(cls, storage: Storage, shape: Shape) -> Self:
        columns = shape.columns.append(DATE)
        make_delta(storage, "headrace deduped", columns, {_FORMAT_KEY: str(FORMAT)}, ["date"])
        return cls(storage, shape)

    def last(self) -> RunNote | None:
        """Return the note of the last committed run."""
        last = self._table.last(APP)
        if last is None:
            return None
        if last.token is not None:
            paths = [_path_of(last.number, last.token)]
        else:
            # An earlier version has not stored the checksum. Usually there is one note with this number.
            found = self._storage.list(f"{_NOTES}/{last.number:012}-")
            paths = [one.path for one in found if one.path.endswith(".json")]
        if len(paths) == 1:
            with suppress(FileNotFoundError):
                return read_note(self._storage.file(paths[0]))
        raise LakeError(
            f"{self._storage.address}: the note of run {last.number} is missing, so it is unknown how far "
            f"the run came: {_RESTORE}"
        )

    def commit(
        self, note: RunNote, files: Sequence[WrittenFile], here: Callable[[str], None]
    ) -> bool:
        """Add files to the table, once for the note's number.

        Return False if another run has committed the number. `here` is called with "noted" when the note is
        durable.
        """
        data = note.encode()
        path = note_path(note)
        if not self._storage.create(path, data):
            return False  # another run has this number
        here("noted")
        return self._table.commit(APP, note.number, files, crc32c(data))

    def sweep(self, note: RunNote) -> None:
        """Delete notes and key files that `note`, the last one, does not name, up to its number.

        Also delete files of rows that the table has not named for a week. Files with a later number may
        belong to a run on another machine, so they stay.
        """
        named = {note_path(note), *(one.path for one in note.buckets)}
        found = [one.path for one in self._storage.list(f"{HIDDEN}/") if one.path not in named]
        ours = ((path, _OURS.fullmatch(path)) for path in found)
        self._storage.delete(
            path for path, one in ours if one and (one[1] is None or int(one[1]) <= note.number)
        )
        self._table.sweep(_KEPT_S, dry_run=False)


def is_table(storage: Storage) -> bool:
    """True if there is a table, as seen from this machine."""
    return storage.has(LOG)


def note_path(note: RunNote) -> str:
    """Return the path of a note, which contains its number and its checksum.

    Thanks to the checksum, a note whose commit fails is not taken for the note of another run.
    """
    return _path_of(note.number, crc32c(note.encode()))


def _path_of(number: int, crc: int) -> str:
    return f"{_NOTES}/{number:012}-{crc:08x}.json"


def read_note(file: LakeFile) -> RunNote:
    """Read a note; raise FileNotFoundError if it is missing, and LakeError if it is damaged."""
    reason = "its checksum fails"
    data = file.storage.read(file.path)
    try:
        note = decode_versioned(data, RunNote, str(file))
        if file.path.endswith(f"-{crc32c(data):08x}.json"):
            return note.present()
    except ValueError as error:
        reason = str(error)
    raise LakeError(f"{file} is damaged ({reason}): {_RESTORE}")


# Files

_DAY_US = 86_400_000_000
_1970 = datetime.date(1970, 1, 1)


class DedupedWriter:
    """Writer of the files of one task."""

    def __init__(self, storage: Storage, name: str, columns: pa.Schema) -> None:
        self._storage, self._name, self._columns = storage, name, columns
        self._open: dict[int, _File] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows that follow all earlier ones in the order of topic and offset."""
        days = rows["timestamp"].cast(pa.int64()).to_numpy() // _DAY_US
        for day in np.unique(days).tolist():
            if day not in self._open:
                date = str(_1970 + datetime.timedelta(days=day))
                self._open[day] = _File(self._storage, date, self._name, self._columns)
            is_of_day = days == day
            some = rows if is_of_day.all() else rows.filter(pa.array(is_of_day))
            self._open[day].add(some)

    def finish(self) -> list[WrittenFile]:
        return [self._open[day].finish() for day in sorted(self._open)]


class _File:
    def __init__(self, storage: Storage, date: str, name: str, columns: pa.Schema) -> None:
        self._date = date
        self._file = SortedFile(storage, f"date={date}/{name}.parquet", columns)
        self._added = _Sums()
        self._found: list[Values] = []
        """Least and greatest values of each batch of rows."""

    def add(self, rows: pa.RecordBatch) -> None:
        self._added = self._added.and_of(rows)
        self._found += _values(rows)
        self._file.add(rows, rows["payload"].nbytes)

    def finish(self) -> WrittenFile:
        path, size = self._file.finish({}, self._check)
        columns = list(zip(*self._found, strict=True))
        statistics = Statistics(Values(*map(min, columns)), Values(*map(max, columns)))
        rows = self._added.rows
        return WrittenFile(path, size, rows, {"date": self._date}, statistics, ())

    def _check(self, file: UnsentFile) -> None:
        held = _Sums()
        for rows in read_groups(file, ("offset", "payload")):
            held = held.and_of(rows)
        if held != self._added:
            raise LakeError(f"{file} does not have the rows that were written to it")


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
