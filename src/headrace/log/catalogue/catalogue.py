"""The catalogue: what topics there are and how far they reach, in one SQLite file beside the segments.

Written by the applier only, one transaction per journal file; read by anyone. Every row carries a checksum,
so that a damaged one is noticed and not believed. What rows mean is `applier.py`'s business.
"""

import sqlite3
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Self

import msgspec

from headrace.errors import DataDirectoryError
from headrace.log.catalogue_rows import (
    ADDED,
    FORMAT,
    NAMED,
    RENAMED_FORMAT,
    TABLES,
    BatchRow,
    CursorRow,
    Meta,
    MetaRow,
    NoteRow,
    ProducerRow,
    R,
    SegmentRow,
    TombstoneRow,
    TopicRow,
    checksum,
    present,
)
from headrace.log.disk import Disk
from headrace.log.store import NOTE_KEY_BYTES_MAX
from headrace.model import (
    ENVELOPE_PREFIXES,
    OLD_PREFIXES,
    RESERVED_TOPIC_BYTES_MAX,
    Position,
    Span,
)

FILE_NAME = "catalogue.sqlite"
BACKUP_NAME = "catalogue.backup.sqlite"

INTEGER_MAX = (1 << 63) - 1
"""The largest number SQLite holds; an offset on the wire may be larger and then lies past every end."""

TOMBSTONES_MAX = 10_000
"""Destroyed names remembered one by one; older ones fold into the floor."""

BATCHES_NAME = b""
"""Stands in `producers` where others have a topic: the numbers of batches. No topic is called so."""

_encode = msgspec.msgpack.encode
_RESERVED = tuple(prefix.encode() for prefix in ENVELOPE_PREFIXES)
_OLD = tuple(prefix.encode() for prefix in OLD_PREFIXES)
_OLD_OR_RESERVED = (*_OLD, *_RESERVED)

_Named = TopicRow | TombstoneRow | CursorRow | ProducerRow


class DamagedCatalogueError(DataDirectoryError):
    """The catalogue cannot be believed: it is rebuilt from the index files and the last backup."""


class UnreadableCatalogueError(DamagedCatalogueError):
    """The disk cannot read the catalogue, perhaps only for now."""


_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_UNREADABLE = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_IOERR_READ,
    sqlite3.SQLITE_IOERR_SHORT_READ,
    sqlite3.SQLITE_IOERR_CORRUPTFS,
)
"""What SQLite says of a file that the disk could not read."""


def unreadable(path: Path, error: sqlite3.Error) -> DataDirectoryError:
    """What SQLite's error means: a full disk or a missing permission is no damage."""
    # Python's own errors, such as of a text that is none, have no code.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code in _UNREADABLE:
        return UnreadableCatalogueError(f"{path}: {error}")
    damaged = code & 0xFF in _DAMAGED
    return (DamagedCatalogueError if damaged else DataDirectoryError)(f"{path}: {error}")


class Catalogue:
    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path
        self._has_present_names = False
        """Known to be of a format whose names are the present ones, which it stays for good."""

    @classmethod
    def create(cls, directory: Path, *, name: str = FILE_NAME) -> Self:
        """A new, empty catalogue."""
        catalogue = cls.open(directory, name=name)
        catalogue.make()
        return catalogue

    @classmethod
    def open(cls, directory: Path, *, name: str = FILE_NAME) -> Self:
        """Open for writing."""
        path = directory / name
        try:
            db = sqlite3.connect(path, isolation_level=None, timeout=30)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            # Pages that are freed hold no rows any more, which `catalogue_pages.py` would find.
            db.execute("PRAGMA secure_delete=ON")
        except sqlite3.DatabaseError as error:
            raise unreadable(path, error) from error
        return cls(db, path)

    @classmethod
    def open_for_reading(cls, directory: Path, *, name: str = FILE_NAME) -> Self:
        """Open without changing anything, beside the process that writes."""
        path = directory / name
        try:
            uri = f"{path.resolve().as_uri()}?mode=ro"
            db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
            db.execute("SELECT 1 FROM meta").fetchone()
        except sqlite3.DatabaseError as error:
            raise unreadable(path, error) from error
        return cls(db, path)

    def close(self) -> None:
        self._db.close()

    def is_blank(self) -> bool:
        """Whether nothing was ever made here."""
        return not self._schema()

    def make(self) -> None:
        """Make the tables, and say that there is nothing yet."""
        with self.transaction():
            self._add(*ADDED)
            self.put_meta(Meta())

    def migrate(self) -> None:
        """Bring a catalogue of an earlier format to this one, in place and losing nothing."""
        meta = self.meta()
        if meta.format < FORMAT:
            with self.transaction():
                self._add(*(version for version in ADDED if version > meta.format))
                if meta.format < RENAMED_FORMAT:
                    self._rename()
                self.put_meta(msgspec.structs.replace(meta, format=FORMAT))

    def names_in_file(self) -> dict[int, bytes]:
        """Return the names of all topics as they stand in the file, by number."""
        return {row.id: row.name for row in self._raw(TopicRow)}

    def _rename(self) -> None:
        """Give all rows the present names of their topics."""
        topics = [row for row in self._raw(TopicRow) if row.name.startswith(_OLD)]
        self._replace("topics", topics, [present(row) for row in topics])
        # Ordinary topics that had a reserved name were deleted before: what readers and producers have left
        # of them must not come to mean a place in a channel.
        cursors = [row for row in self._raw(CursorRow) if row.name.startswith(_OLD_OR_RESERVED)]
        kept = [present(row) for row in cursors if row.name.startswith(_OLD)]
        self._replace("cursors", cursors, kept)
        producers = [row for row in self._raw(ProducerRow) if row.name.startswith(_OLD_OR_RESERVED)]
        numbers = [present(row) for row in producers if row.name.startswith(_OLD)]
        self._replace("producers", producers, numbers)
        graves = [row for row in self._raw(TombstoneRow) if row.name.startswith(_OLD_OR_RESERVED)]
        merged: dict[bytes, TombstoneRow] = {}
        for row in map(present, graves):
            # A name that was used twice goes on behind both.
            _, *known = merged.get(row.name, row)
            merged[row.name] = TombstoneRow(row.name, *map(max, known, row[1:]))
        living = {present(row).name for row in topics}
        self._replace(
            "tombstones", graves, [row for row in merged.values() if row.name not in living]
        )

    def _replace(self, table: str, old: Iterable[_Named], new: Collection[R]) -> None:
        """Put rows in the place of others, which are known by their topics' names."""
        self._db.executemany(
            f"DELETE FROM {table} WHERE name = ?", {(row.name,): None for row in old}
        )
        self.put(new)

    def _add(self, *versions: int) -> None:
        for statement in "".join(ADDED[version] for version in versions).split(";"):
            self._db.execute(statement)

    def transaction(self) -> "_Transaction":
        return _Transaction(self._db)

    def meta(self) -> Meta:
        row = self._one(MetaRow, "WHERE key = ?", b"meta")
        if row is None:
            raise DamagedCatalogueError(f"{self.path}: the row of the whole is missing")
        meta = msgspec.msgpack.decode(row.value, type=Meta)
        if meta.format not in ADDED:
            raise DataDirectoryError(
                f"{self.path} has format {meta.format}, this version reads up to {FORMAT}"
            )
        return meta

    def put_meta(self, meta: Meta) -> None:
        self.put([MetaRow(b"meta", _encode(meta))])

    def put(self, rows: Collection[R]) -> None:
        """Insert or replace rows of one kind."""
        values: list[tuple[object, ...]] = [row + (checksum(row),) for row in rows]  # noqa: RUF005
        if values:
            marks = ",".join("?" * len(values[0]))
            table = TABLES[type(next(iter(rows)))]
            self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)

    def topic(self, name: bytes) -> TopicRow | None:
        return self._one(TopicRow, "WHERE name = ?", self._stored(name))

    def topic_by_id(self, topic_id: int) -> TopicRow | None:
        return self._one(TopicRow, "WHERE id = ?", topic_id)

    def topics(
        self, prefix: bytes = b"", after: bytes = b"", limit: int = -1
    ) -> Iterator[TopicRow]:
        """Topics in the order of their names."""
        if self._is_old:
            rows = [row for row in self._all(TopicRow, "") if row.name.startswith(prefix)]
            rows = sorted((row for row in rows if row.name > after), key=attrgetter("name"))
            return iter(rows if limit < 0 else rows[:limit])
        # One bound from below: of two, SQLite looks for the first and reads all up to the second.
        first, bound = (after, ">") if after >= prefix else (prefix, ">=")
        past = prefix + b"\xff" * RESERVED_TOPIC_BYTES_MAX  # no UTF-8 contains this byte
        where = f"WHERE name {bound} ? AND name < ? ORDER BY name LIMIT ?"
        return self._all(TopicRow, where, first, past, limit)

    def segments(self, topic_id: int) -> list[SegmentRow]:
        return list(self._all(SegmentRow, "WHERE topic_id = ? ORDER BY base", topic_id))

    def last_segment(self, topic_id: int) -> SegmentRow | None:
        return self._one(SegmentRow, "WHERE topic_id = ? ORDER BY base DESC LIMIT 1", topic_id)

    def stored(self, topic_id: int, first: Position, last: Position) -> Span:
        """What the segments of a topic hold between two positions: offsets may skip where they end."""
        low, high = (min(at.offset, INTEGER_MAX) for at in (first, last))
        low_ordinal, high_ordinal = (min(at.ordinal, INTEGER_MAX) for at in (first, last))
        (records, size) = self._db.execute(
            "SELECT coalesce(sum(max(0, min(end_ordinal, ?) - max(first_ordinal, ?))), 0), "
            "coalesce(sum(min(end, ?) - max(base, ?)), 0) "
            "FROM segments WHERE topic_id = ? AND base < ? AND end > ?",
            (high_ordinal, low_ordinal, high, low, topic_id, high, low),
        ).fetchone()
        return Span(records, size)

    def all_segments(self) -> Iterator[SegmentRow]:
        return self._all(SegmentRow, "")

    def segments_older_than(self, ms: int) -> Iterator[SegmentRow]:
        return self._all(SegmentRow, "WHERE last_ms < ? ORDER BY last_ms", ms)

    def tombstone(self, name: bytes) -> TombstoneRow | None:
        return self._one(TombstoneRow, "WHERE name = ?", self._stored(name))

    def grave(self, name: bytes) -> Position:
        """Where a new life of a name begins that has none now."""
        row = self.tombstone(name)
        if row is not None:
            return Position(row.epoch, row.end_offset, row.end_ordinal)
        meta = self.meta()
        return Position(meta.floor_epoch, meta.floor_offset, meta.floor_ordinal)

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
        """Those that are not appended to their end."""
        if self.meta().format == 1:  # only ever read: whoever writes has migrated it
            return iter(())
        return self._all(BatchRow, "WHERE file < files")

    def appended_batches(self) -> list[BatchRow]:
        """Those that are, whose staged files may still be there."""
        return list(self._all(BatchRow, "WHERE file >= files"))

    def drop_batches(self, rows: Collection[BatchRow]) -> None:
        self._db.executemany(
            "DELETE FROM batches WHERE producer = ? AND number = ?", [row[:2] for row in rows]
        )

    def note(self, key: bytes) -> NoteRow | None:
        return self._one(NoteRow, "WHERE key = ?", key)

    def notes(self, prefix: bytes = b"", after: bytes = b"") -> Iterator[NoteRow]:
        """Notes in the order of their keys, read as far as they are asked for."""
        first, bound = (after, ">") if after >= prefix else (prefix, ">=")  # as for topics
        past = prefix + b"\xff" * (NOTE_KEY_BYTES_MAX + 1)
        return self._all(NoteRow, f"WHERE key {bound} ? AND key < ? ORDER BY key", first, past)

    def due_notes(self, first: tuple[int, bytes], until_ms: int) -> Iterator[tuple[int, bytes]]:
        """When they are due, and keys, in this order and from such a place on; the index knows no more."""
        # The first condition is the one that SQLite looks for; with the second it may use the index.
        return self._db.execute(
            "SELECT due_ms, key FROM notes WHERE (due_ms, key) >= (?, ?) AND due_ms > 0 "
            "AND due_ms <= ? ORDER BY due_ms, key",
            (*first, min(until_ms, INTEGER_MAX)),
        )

    def drop_notes(self, keys: Collection[bytes]) -> None:
        self._db.executemany("DELETE FROM notes WHERE key = ?", [(key,) for key in keys])

    def drop_topic(self, topic_id: int) -> None:
        self._db.execute("DELETE FROM topics WHERE id = ?", (topic_id,))
        self._db.execute("DELETE FROM segments WHERE topic_id = ?", (topic_id,))

    def drop_segment(self, topic_id: int, base: int) -> None:
        self._db.execute("DELETE FROM segments WHERE topic_id = ? AND base = ?", (topic_id, base))

    def drop_tombstone(self, name: bytes) -> None:
        self._db.execute("DELETE FROM tombstones WHERE name = ?", (name,))

    def drop_cursors(self, keys: Collection[tuple[bytes, bytes]]) -> None:
        self._db.executemany("DELETE FROM cursors WHERE name = ? AND reader = ?", keys)

    def drop_producers(self, before_ms: int, keep_max: int) -> None:
        """Forget producers that were silent since, and the most silent ones of too many."""
        self._db.execute("DELETE FROM producers WHERE ms < ?", (before_ms,))
        self._db.execute(
            "DELETE FROM producers WHERE (name, producer) IN "
            "(SELECT name, producer FROM producers ORDER BY ms DESC LIMIT -1 OFFSET ?)",
            (keep_max,),
        )

    def check(self) -> None:
        """Read the whole catalogue; raise DamagedCatalogueError when anything in it is not right."""
        try:
            (verdict,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise DamagedCatalogueError(f"{self.path}: {verdict}")
            schema = self._schema()
            if schema not in map(_sound_schema, ADDED):
                raise DamagedCatalogueError(f"{self.path}: its tables are not what they should be")
            if schema != _sound_schema(self.meta().format):
                raise DamagedCatalogueError(f"{self.path}: its tables are not those of its format")
            names = {name for _, name, _, _ in schema}
            for kind, table in TABLES.items():
                for _ in self._raw(kind) if table in names else ():
                    pass
        except sqlite3.DatabaseError as error:
            raise unreadable(self.path, error) from error
        except msgspec.MsgspecError as error:
            raise DamagedCatalogueError(f"{self.path}: {error}") from error

    def salvage(self, kind: type[R]) -> list[R]:
        """The rows of a kind whose checksum holds, as far as the file can be read."""
        return self.salvage_all(kind)[0]

    def salvage_all(self, kind: type[R]) -> tuple[list[R], bool]:
        """The same, and whether these are all there are."""
        rows: list[R] = []
        whole = True
        try:
            for values in self._db.execute(f"SELECT * FROM {TABLES[kind]}"):
                row = kind(*values[:-1])
                if checksum(row) == values[-1]:
                    rows.append(row)
                else:
                    whole = False
        except (sqlite3.DatabaseError, TypeError):
            whole = False
        return rows, whole

    def back_up(self, path: Path) -> None:
        """Copy everything into a new file at `path`."""
        path.unlink(missing_ok=True)
        copy = sqlite3.connect(path)
        try:
            self._db.backup(copy)
        finally:
            copy.close()

    def _schema(self) -> list[tuple[object, ...]]:
        try:
            return list(self._db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
        except sqlite3.DatabaseError as error:
            raise unreadable(self.path, error) from error

    def keep_backup(self, disk: Disk) -> None:
        """Replace the backup beside this file by a copy of what it holds now."""
        made = self.path.with_name(BACKUP_NAME + ".new")
        self.back_up(made)
        disk.rename(made, self.path.with_name(BACKUP_NAME))
        disk.sync_directory(self.path.parent)

    def _one(self, kind: type[R], where: str, *values: object) -> R | None:
        for row in self._all(kind, where, *values):
            return row
        return None

    @property
    def _is_old(self) -> bool:
        """True if the names in the file are those of an earlier version."""
        if not self._has_present_names:
            self._has_present_names = self.meta().format >= RENAMED_FORMAT
        return not self._has_present_names

    def _stored(self, name: bytes) -> bytes:
        """Return a topic's name as it stands in the file."""
        if not self._is_old:
            return name
        if name.startswith(_OLD):
            return b"\xff"  # no topic had this name, and no name is like this
        return name.removeprefix(b"$") if name.startswith(_RESERVED) else name

    def _all(self, kind: type[R], where: str, *values: object) -> Iterator[R]:
        """Rows with the present names of their topics."""
        rows = self._raw(kind, where, *values)
        return map(present, rows) if kind in NAMED and self._is_old else rows

    def _raw(self, kind: type[R], where: str = "", *values: object) -> Iterator[R]:
        """Rows as they stand in the file."""
        table = TABLES[kind]
        for found in self._db.execute(f"SELECT * FROM {table} {where}", values):
            row = kind(*found[:-1])
            if checksum(row) != found[-1]:
                raise DamagedCatalogueError(f"{self.path}: a row of {table} is damaged")
            yield row


class _Transaction:
    """All or nothing: SQLite's own, with the commit as the only exit that keeps anything."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            # Also after a commit that failed; on a full disk SQLite may have ended it by itself.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        # The journal is freed on the word of this commit. Were it only in SQLite's write-ahead log, a
        # flipped bit there would quietly bring back the catalogue as it was before.
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")


@cache
def _sound_schema(version: int) -> list[tuple[object, ...]]:
    db = sqlite3.connect(":memory:")
    try:
        db.executescript("".join(ADDED[one] for one in range(1, version + 1)))
        return list(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
    finally:
        db.close()
