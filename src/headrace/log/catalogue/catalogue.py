"""The catalogue: topics, their segments and their ends, in one SQLite file beside the segments.

Only the applier writes it, in one transaction per journal file; any process may read it. Every row has a
checksum, so that a damaged row is noticed and not used. Elsewhere: the meaning of rows
(`log/apply/applier.py`).
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import msgspec

from headrace.errors import DataDirectoryError
from headrace.log.catalogue.rows import (
    ADDED,
    FORMAT,
    NAMED,
    RENAMED_FORMAT,
    RESERVED,
    TABLES,
    BatchRow,
    CursorRow,
    DirectoryMeta,
    MetaRow,
    NoteRow,
    ProducerRow,
    R,
    SegmentRow,
    TombstoneRow,
    TopicRow,
    checksum,
    present,
    row_key,
)
from headrace.log.disk import Disk
from headrace.log.store import NOTE_KEY_BYTES_MAX
from headrace.model import OLD_PREFIXES, RESERVED_TOPIC_BYTES_MAX, Position, Span

FILE_NAME = "catalogue.sqlite"
BACKUP_NAME = "catalogue.backup.sqlite"

INTEGER_MAX = (1 << 63) - 1
"""Largest number in SQLite. An offset from a client may be larger, and is then past every end."""

TOMBSTONES_MAX = 10_000
"""Largest number of destroyed names with a tombstone each; older tombstones are merged into the floor."""

BATCHES_NAME = b""
"""Replaces the topic in rows of `producers` that hold numbers of batches. No topic has this name."""

_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master"
_encode = msgspec.msgpack.encode
_OLD = tuple(prefix.encode() for prefix in OLD_PREFIXES)
_OLD_OR_RESERVED = (*_OLD, *RESERVED)


class DamagedCatalogueError(DataDirectoryError):
    """The catalogue is not usable: it must be rebuilt from the index files and the last backup."""


class UnreadableCatalogueError(DamagedCatalogueError):
    """The disk cannot read the catalogue, perhaps only temporarily."""


DATABASE_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors that a damaged file may cause. SQLite quotes damaged text in its messages: it may not be UTF-8."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_UNREADABLE = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_IOERR_READ,
    sqlite3.SQLITE_IOERR_SHORT_READ,
    sqlite3.SQLITE_IOERR_CORRUPTFS,
)
"""SQLite's error codes for a file that the disk could not read."""


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Translate errors of SQLite: a full disk or a missing permission is not damage."""
    try:
        yield
    except (*DATABASE_ERRORS, msgspec.MsgspecError) as error:
        # Errors that Python raises itself, for instance for invalid text, have no code.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code in _UNREADABLE:
            raise UnreadableCatalogueError(f"{path}: {error}") from error
        damaged = code & 0xFF in _DAMAGED
        kind = DamagedCatalogueError if damaged else DataDirectoryError
        raise kind(f"{path}: {error}") from error


class Catalogue:
    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path
        self._has_present_names = False
        """True once the file is known to have a format with present names, which it then keeps."""

    @classmethod
    def create(cls, directory: Path, *, name: str = FILE_NAME) -> Self:
        catalogue = cls.open(directory, name=name)
        catalogue.make()
        return catalogue

    @classmethod
    def open(cls, directory: Path, *, name: str = FILE_NAME) -> Self:
        """Open the catalogue for writing."""
        path = directory / name
        with _errors_of(path):
            db = sqlite3.connect(path, isolation_level=None, timeout=30)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            # Freed pages are overwritten, because `pages.py` would find old rows in them.
            db.execute("PRAGMA secure_delete=ON")
        return cls(db, path)

    @classmethod
    def open_for_reading(cls, directory: Path, *, name: str = FILE_NAME) -> Self:
        """Open the catalogue of a server for reading, while another process may write to it."""
        return cls(_connect(directory / name, directory / name, "mode=ro"), directory / name)

    def close(self) -> None:
        self._db.close()

    def is_blank(self) -> bool:
        """True if the file has no tables yet."""
        return not self._schema()

    def make(self) -> None:
        """Create the tables, and the row that describes an empty directory."""
        with self.transaction():
            self._add(*ADDED)
            self.put_meta(DirectoryMeta())

    def migrate(self) -> None:
        """Convert a catalogue of an earlier format to the present one, in place and without any loss."""
        meta = self.meta()
        if meta.format < FORMAT:
            with self.transaction():
                self._add(*(version for version in ADDED if version > meta.format))
                if meta.format < RENAMED_FORMAT:
                    self._rename()
                self.change_meta(format=FORMAT)

    def names_in_file(self) -> dict[int, bytes]:
        """Return the names of all topics exactly as stored in the file, by number."""
        return {row.id: row.name for row in self._raw(TopicRow)}

    def _rename(self) -> None:
        """Give all rows the present names of their topics."""
        topics = [row for row in self._raw(TopicRow) if row.name.startswith(_OLD)]
        self._replace(topics, [present(row) for row in topics])
        # Ordinary topics with a reserved name were deleted before. Cursors and producers that are left of
        # them must not become positions in a channel.
        cursors = [row for row in self._raw(CursorRow) if row.name.startswith(_OLD_OR_RESERVED)]
        self._replace(cursors, [present(row) for row in cursors if row.name.startswith(_OLD)])
        producers = [row for row in self._raw(ProducerRow) if row.name.startswith(_OLD_OR_RESERVED)]
        self._replace(producers, [present(row) for row in producers if row.name.startswith(_OLD)])
        graves = [row for row in self._raw(TombstoneRow) if row.name.startswith(_OLD_OR_RESERVED)]
        merged: dict[bytes, TombstoneRow] = {}
        for row in map(present, graves):
            # A name that was used twice continues after both ends.
            _, *known = merged.get(row.name, row)
            merged[row.name] = TombstoneRow(row.name, *map(max, known, row[1:]))
        for topic in topics:
            merged.pop(present(topic).name, None)  # the name is in use again
        self._replace(graves, merged.values())

    def _replace(self, old: Sequence[R], new: Collection[R]) -> None:
        """Replace rows of one kind by others."""
        for row in old:
            self.drop(type(row), [row_key(row)])
        self.put(new)

    def _add(self, *versions: int) -> None:
        for statement in "".join(ADDED[version] for version in versions).split(";"):
            self._db.execute(statement)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the changes; any other exit than a successful commit rolls back everything."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            # A failed commit is rolled back too; on a full disk, SQLite may have rolled it back by itself.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        # Journal files are recycled after this commit. If the commit were only in SQLite's write-ahead log, a
        # flipped bit there would silently bring back the previous state of the catalogue.
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let several reads see the same state."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def meta(self) -> DirectoryMeta:
        row = self._one(MetaRow, "WHERE key = ?", b"meta")
        if row is None:
            raise DamagedCatalogueError(
                f"{self.path}: the row that describes the directory is missing"
            )
        meta = msgspec.msgpack.decode(row.value, type=DirectoryMeta)
        if meta.format not in ADDED:
            raise DataDirectoryError(
                f"{self.path} has format {meta.format}, and this version reads formats up to {FORMAT}: "
                "use a later version of Headrace"
            )
        return meta

    def put_meta(self, meta: DirectoryMeta) -> None:
        self.put([MetaRow(b"meta", _encode(meta))])

    def change_meta(self, **changes: Any) -> DirectoryMeta:
        """Change some fields, and return all of them."""
        meta = msgspec.structs.replace(self.meta(), **changes)
        self.put_meta(meta)
        return meta

    def put(self, rows: Collection[R]) -> None:
        """Insert or replace rows of one kind."""
        values: list[tuple[object, ...]] = [row + (checksum(row),) for row in rows]  # noqa: RUF005
        if values:
            marks = ",".join("?" * len(values[0]))
            table = TABLES[type(next(iter(rows)))].name
            self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)

    def drop(self, kind: type[R], keys: Iterable[tuple[object, ...]]) -> None:
        """Delete the rows of one kind with these keys."""
        table = TABLES[kind]
        key = " AND ".join(f"{column} = ?" for column in kind._fields[: table.keys])
        self._db.executemany(f"DELETE FROM {table.name} WHERE {key}", keys)

    def topic(self, name: bytes) -> TopicRow | None:
        return self._one(TopicRow, "WHERE name = ?", self._stored(name))

    def topic_by_id(self, topic_id: int) -> TopicRow | None:
        return self._one(TopicRow, "WHERE id = ?", topic_id)

    def topics(self, prefix: bytes = b"", after: bytes = b"") -> Iterator[TopicRow]:
        """Return topics in the order of their names."""
        if self._is_old:
            rows = [row for row in self._all(TopicRow, "") if row.name.startswith(prefix)]
            return iter(sorted((row for row in rows if row.name > after), key=attrgetter("name")))
        # The query has one lower bound: with two, SQLite seeks the first and reads all rows up to the second.
        first, bound = (after, ">") if after >= prefix else (prefix, ">=")
        past = prefix + b"\xff" * RESERVED_TOPIC_BYTES_MAX  # UTF-8 never contains this byte
        return self._all(TopicRow, f"WHERE name {bound} ? AND name < ? ORDER BY name", first, past)

    def count(self, prefix: str) -> int:
        """Return the number of topics with a prefix."""
        if not prefix:
            (count,) = self._db.execute("SELECT count(*) FROM topics").fetchone()
            return int(count)
        return sum(1 for _ in self.topics(prefix.encode()))

    def segments(self, topic_id: int) -> list[SegmentRow]:
        return list(self._all(SegmentRow, "WHERE topic_id = ? ORDER BY base", topic_id))

    def last_segment(self, topic_id: int) -> SegmentRow | None:
        return self._one(SegmentRow, "WHERE topic_id = ? ORDER BY base DESC LIMIT 1", topic_id)

    def stored(self, topic_id: int, first: Position, last: Position) -> Span:
        """Return the span that a topic's segments hold between two positions, without skipped offsets."""
        low, high = (min(at.offset, INTEGER_MAX) for at in (first, last))
        low_ordinal, high_ordinal = (min(at.ordinal, INTEGER_MAX) for at in (first, last))
        found = self._db.execute(
            "SELECT coalesce(sum(max(0, min(end_ordinal, ?) - max(first_ordinal, ?))), 0), "
            "coalesce(sum(min(end, ?) - max(base, ?)), 0) "
            "FROM segments WHERE topic_id = ? AND base < ? AND end > ?",
            (high_ordinal, low_ordinal, high, low, topic_id, high, low),
        )
        return Span(*found.fetchone())

    def all_segments(self) -> Iterator[SegmentRow]:
        return self._all(SegmentRow, "")

    def segment_bytes(self, topic_ids: Collection[int] | None) -> int:
        """Return the size in bytes of all segments of these topics, or of all topics if None."""
        if topic_ids is not None:
            rows = (row for topic_id in topic_ids for row in self.segments(topic_id))
            return sum(row.end - row.base for row in rows)
        (total,) = self._db.execute("SELECT total(end - base) FROM segments").fetchone()
        return int(total)

    def newest_ms(self) -> int:
        """Return the time of the newest record of all topics, also if it is deleted; 0 without topics."""
        (ms,) = self._db.execute("SELECT coalesce(max(last_ms), 0) FROM topics").fetchone()
        return int(ms)

    def segments_older_than(self, ms: int) -> Iterator[SegmentRow]:
        return self._all(SegmentRow, "WHERE last_ms < ? ORDER BY last_ms", ms)

    def tombstone(self, name: bytes) -> TombstoneRow | None:
        return self._one(TombstoneRow, "WHERE name = ?", self._stored(name))

    def grave(self, name: bytes) -> tuple[Position, int]:
        """Return the position at which a name without a topic starts its next life, and its last time."""
        row = self.tombstone(name)
        if row is not None:
            return Position(row.epoch, row.end_offset, row.end_ordinal), row.ms
        meta = self.meta()
        return Position(meta.floor_epoch, meta.floor_offset, meta.floor_ordinal), 0

    def tombstones(self) -> Iterator[TombstoneRow]:
        return self._all(TombstoneRow, "ORDER BY ms")

    def cursors(self, name: bytes | None = None) -> Iterator[CursorRow]:
        if name is None:
            return self._all(CursorRow, "")
        return self._all(CursorRow, "WHERE name = ?", self._stored(name))

    def producer(self, name: bytes, producer: bytes) -> ProducerRow | None:
        return self._one(
            ProducerRow, "WHERE name = ? AND producer = ?", self._stored(name), producer
        )

    def producers(self) -> Iterator[ProducerRow]:
        return self._all(ProducerRow, "")

    def batch(self, producer: bytes, number: int) -> BatchRow | None:
        return self._one(BatchRow, "WHERE producer = ? AND number = ?", producer, number)

    def batches(self) -> Iterator[BatchRow]:
        """Return the batches that are not completely appended."""
        if self.meta().format == 1:  # read-only: a process that writes has migrated it
            return iter(())
        return self._all(BatchRow, "WHERE file < files")

    def appended_batches(self) -> list[BatchRow]:
        """Return the completely appended batches, whose staged files may still exist."""
        return list(self._all(BatchRow, "WHERE file >= files"))

    def note(self, key: bytes) -> NoteRow | None:
        return self._one(NoteRow, "WHERE key = ?", key)

    def notes(self, prefix: bytes = b"", after: bytes = b"") -> Iterator[NoteRow]:
        """Yield notes in the order of their keys, and read them lazily."""
        first, bound = (after, ">") if after >= prefix else (prefix, ">=")  # as for topics
        past = prefix + b"\xff" * (NOTE_KEY_BYTES_MAX + 1)
        return self._all(NoteRow, f"WHERE key {bound} ? AND key < ? ORDER BY key", first, past)

    def due_notes(self, first: tuple[int, bytes], until_ms: int) -> Iterator[tuple[int, bytes]]:
        """Yield due time and key of notes, in the order of both, from `first` on: the index has no more."""
        # SQLite seeks by the first condition; the second lets it use the partial index.
        return self._db.execute(
            "SELECT due_ms, key FROM notes WHERE (due_ms, key) >= (?, ?) AND due_ms > 0 "
            "AND due_ms <= ? ORDER BY due_ms, key",
            (*first, min(until_ms, INTEGER_MAX)),
        )

    def drop_topic(self, topic_id: int) -> None:
        """Delete a topic's row and those of its segments."""
        self.drop(TopicRow, [(topic_id,)])
        self._db.execute("DELETE FROM segments WHERE topic_id = ?", (topic_id,))

    def drop_producers(self, before_ms: int, keep_max: int) -> None:
        """Forget producers silent since `before_ms`, and above `keep_max` those silent for longest."""
        self._db.execute("DELETE FROM producers WHERE ms < ?", (before_ms,))
        self._db.execute(
            "DELETE FROM producers WHERE (name, producer) IN "
            "(SELECT name, producer FROM producers ORDER BY ms DESC LIMIT -1 OFFSET ?)",
            (keep_max,),
        )

    def check(self) -> None:
        """Read the whole catalogue; raise DamagedCatalogueError if anything in it is wrong."""
        with _errors_of(self.path):
            (verdict,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise DamagedCatalogueError(f"{self.path}: {verdict}")
            schema = self._schema()
            if schema not in map(_sound_schema, ADDED):
                raise DamagedCatalogueError(f"{self.path}: its tables are not those of a catalogue")
            if schema != _sound_schema(self.meta().format):
                raise DamagedCatalogueError(f"{self.path}: its tables are not those of its format")
            names = {name for _, name, _, _ in schema}
            for kind, table in TABLES.items():
                for _ in self._raw(kind) if table.name in names else ():
                    pass

    def salvage(self, kind: type[R]) -> tuple[list[R], bool]:
        """Return the readable rows of a kind with a correct checksum, and True if no row is missing."""
        rows: list[R] = []
        whole = True
        try:
            for values in self._db.execute(f"SELECT * FROM {TABLES[kind].name}"):
                row = kind(*values[:-1])
                if checksum(row) == values[-1]:
                    rows.append(row)
                else:
                    whole = False
        except (*DATABASE_ERRORS, TypeError):
            whole = False
        return rows, whole

    def back_up(self, path: Path, disk: Disk) -> None:
        """Copy everything into a new file at `path`."""
        disk.unlink(path)
        with closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)

    def keep_backup(self, disk: Disk) -> None:
        """Replace the backup beside this file by a copy of the present content."""
        made = self.path.with_name(BACKUP_NAME + ".new")
        self.back_up(made, disk)
        disk.rename(made, self.path.with_name(BACKUP_NAME))
        disk.sync_directory(self.path.parent)

    def _schema(self) -> list[tuple[object, ...]]:
        with _errors_of(self.path):
            return list(self._db.execute(_SCHEMA))

    def _one(self, kind: type[R], where: str, *values: object) -> R | None:
        return next(self._all(kind, where, *values), None)

    @property
    def _is_old(self) -> bool:
        """True if the names in the file are those of an earlier version."""
        if not self._has_present_names:
            self._has_present_names = self.meta().format >= RENAMED_FORMAT
        return not self._has_present_names

    def _stored(self, name: bytes) -> bytes:
        """Return a topic's name as it is stored in the file."""
        if not self._is_old:
            return name
        if name.startswith(_OLD):
            return b"\xff"  # no topic had this name, and this is not a valid name
        return name.removeprefix(b"$") if name.startswith(RESERVED) else name

    def _all(self, kind: type[R], where: str, *values: object) -> Iterator[R]:
        """Yield rows with the present names of their topics."""
        rows = self._raw(kind, where, *values)
        return map(present, rows) if kind in NAMED and self._is_old else rows

    def _raw(self, kind: type[R], where: str = "", *values: object) -> Iterator[R]:
        """Yield rows exactly as stored in the file."""
        table = TABLES[kind].name
        for found in self._db.execute(f"SELECT * FROM {table} {where}", values):
            row = kind(*found[:-1])
            if checksum(row) != found[-1]:
                raise DamagedCatalogueError(f"{self.path}: a row of {table} is damaged")
            yield row


@contextmanager
def open_unchanged(data_dir: Path, name: str = FILE_NAME) -> Iterator[Catalogue]:
    """Open the catalogue of a directory that may be read-only, in use, or copied from elsewhere.

    SQLite's own read-only mode would leave its log and shared memory files behind.
    """
    path = data_dir / name
    if not path.exists():
        what = "there is no such directory" if not data_dir.exists() else f"there is no {name}"
        raise DataDirectoryError(f"{data_dir} holds no Headrace log: {what}")
    log = path.with_name(f"{name}-wal")
    file, mode = path, "mode=ro"
    with ExitStack() as stack:
        # If the shared memory file exists, a server runs or was killed: SQLite creates no other file.
        if not path.with_name(f"{name}-shm").exists():
            if log.exists():
                # The write-ahead log may hold the latest changes.
                copy = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                file = shutil.copyfile(path, copy / name)
                shutil.copyfile(log, copy / log.name)
            else:
                mode = "immutable=1"
        db = stack.enter_context(closing(_connect(path, file, mode)))
        yield Catalogue(db, path)


def _connect(path: Path, file: Path, mode: str) -> sqlite3.Connection:
    """Open a file, which may be a copy of the catalogue at `path`, for reading."""
    uri = f"{file.resolve().as_uri()}?{mode}"
    with _errors_of(path):
        db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
        try:
            db.execute("SELECT 1 FROM meta").fetchone()
        except BaseException:
            db.close()
            raise
        return db


@cache
def _sound_schema(version: int) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript("".join(ADDED[one] for one in range(1, version + 1)))
        return list(db.execute(_SCHEMA))
