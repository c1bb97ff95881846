"""The rows of the catalogue and their tables, format by format."""

from typing import Any, NamedTuple, TypeVar

import msgspec
from crc32c import crc32c

from headrace.model import ENVELOPE_PREFIXES, present_name

FORMAT = 5

RENAMED_FORMAT = 5
"""First format with reserved topics named `$channel/…` and `$logux/…`; before, they had no `$`."""

RESERVED = tuple(prefix.encode() for prefix in ENVELOPE_PREFIXES)
"""Prefixes of the names of channels and logs of Logux."""

_SCHEMA_1 = """
CREATE TABLE meta (key BLOB PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE topics (
  id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, epoch INTEGER NOT NULL, durability BLOB NOT NULL,
  start_offset INTEGER NOT NULL, start_ordinal INTEGER NOT NULL,
  end_offset INTEGER NOT NULL, end_ordinal INTEGER NOT NULL, last_ms INTEGER NOT NULL,
  crc INTEGER NOT NULL);
CREATE TABLE segments (
  topic_id INTEGER NOT NULL, base INTEGER NOT NULL, end INTEGER NOT NULL, rows INTEGER NOT NULL,
  first_ordinal INTEGER NOT NULL, end_ordinal INTEGER NOT NULL,
  first_ms INTEGER NOT NULL, last_ms INTEGER NOT NULL,
  crc INTEGER NOT NULL, PRIMARY KEY (topic_id, base)) WITHOUT ROWID;
CREATE INDEX segments_by_age ON segments (last_ms);
CREATE TABLE tombstones (
  name BLOB PRIMARY KEY, epoch INTEGER NOT NULL, end_offset INTEGER NOT NULL,
  end_ordinal INTEGER NOT NULL, ms INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE cursors (
  name BLOB NOT NULL, reader BLOB NOT NULL, epoch INTEGER NOT NULL, offset INTEGER NOT NULL,
  ordinal INTEGER NOT NULL, ms INTEGER NOT NULL, crc INTEGER NOT NULL,
  PRIMARY KEY (name, reader)) WITHOUT ROWID;
CREATE TABLE producers (
  name BLOB NOT NULL, producer BLOB NOT NULL, last INTEGER NOT NULL, recent BLOB NOT NULL,
  ms INTEGER NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (name, producer)) WITHOUT ROWID;
CREATE INDEX producers_by_age ON producers (ms);
"""

_SCHEMA_2 = """
CREATE TABLE batches (
  producer BLOB NOT NULL, number INTEGER NOT NULL, staged BLOB NOT NULL, files INTEGER NOT NULL,
  file INTEGER NOT NULL, position INTEGER NOT NULL, ms INTEGER NOT NULL, crc INTEGER NOT NULL,
  PRIMARY KEY (producer, number)) WITHOUT ROWID;
"""

_SCHEMA_3 = """
CREATE TABLE notes (
  key BLOB PRIMARY KEY, value BLOB NOT NULL, due_ms INTEGER NOT NULL, ms INTEGER NOT NULL,
  crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX notes_by_due ON notes (due_ms) WHERE due_ms > 0;
"""

ADDED = {1: _SCHEMA_1, 2: _SCHEMA_2, 3: _SCHEMA_3, 4: "", 5: ""}
"""Tables that each format adds to the one before. Since format 4, journal files have format 2. Since format
5, reserved names begin with `$`."""


class TopicRow(NamedTuple):
    id: int
    name: bytes
    epoch: int
    durability: bytes
    start_offset: int
    start_ordinal: int
    end_offset: int
    end_ordinal: int
    last_ms: int


class SegmentRow(NamedTuple):
    topic_id: int
    base: int
    end: int
    rows: int
    first_ordinal: int
    end_ordinal: int
    first_ms: int
    last_ms: int


class TombstoneRow(NamedTuple):
    name: bytes
    epoch: int
    end_offset: int
    end_ordinal: int
    ms: int


class CursorRow(NamedTuple):
    name: bytes
    reader: bytes
    epoch: int
    offset: int
    ordinal: int
    ms: int


class ProducerRow(NamedTuple):
    """The last number of a producer; `recent` is MessagePack of (number, offset) of its last appends."""

    name: bytes
    producer: bytes
    last: int
    recent: bytes
    ms: int


class BatchRow(NamedTuple):
    """A decided batch and its progress: it is appended up to `position` in its staged file `file`."""

    producer: bytes
    number: int
    staged: bytes
    """Staged files of the batch: MessagePack of (id, size)."""
    files: int
    file: int
    """Index of the staged file; equal to `files` if the whole batch is appended."""
    position: int
    ms: int


class NoteRow(NamedTuple):
    key: bytes
    value: bytes
    due_ms: int
    ms: int


class MetaRow(NamedTuple):
    key: bytes
    value: bytes


class DirectoryMeta(msgspec.Struct, frozen=True):
    """The state of the whole directory."""

    applied: int = 0
    """Last commit of the journal that segments and catalogue hold."""
    next_topic_id: int = 1
    floor_offset: int = 0
    floor_ordinal: int = 0
    floor_epoch: int = 0
    """With the two fields before: the start of a topic whose name has no tombstone."""
    clean: bool = True
    """True if the last server stopped with everything applied."""
    boot_id: bytes = b""
    """Boot of the machine on which the last server ran."""
    jump_due: bool = False
    """True if unknown records were lost: before anything is served, topics jump ahead."""
    restored_jumps: int = 0
    """In a backup, or a log restored from one: the number of jumps due at the first start."""
    rebuilt_from: int = 0
    """While the catalogue is rebuilt: the last commit that the old catalogue knew; else 0."""
    generation: int = 0
    """Generation of all journal files that the last server put to use; 0 if they have format 1."""
    journal_files: dict[str, int] = {}
    """Sizes of the journal files by name. A file is listed here before it is put to use."""
    journal_headers: bool = False
    """True if each of these files had a header before it was listed: a file of zeros is damaged."""
    format: int = FORMAT


def checksum(row: tuple[object, ...]) -> int:
    """Return the checksum of a row, which is stored after the row's other columns."""
    return crc32c(msgspec.msgpack.encode(row))


class CatalogueTable(NamedTuple):
    name: str
    keys: int
    """Number of leading columns that are the key of a row."""
    ages: tuple[str, ...]
    """Columns that together grow with every change of a row."""


TABLES: dict[type[Any], CatalogueTable] = {
    TopicRow: CatalogueTable("topics", 1, ("end_offset", "start_offset", "epoch")),
    SegmentRow: CatalogueTable("segments", 2, ("end", "rows")),
    TombstoneRow: CatalogueTable("tombstones", 1, ("ms",)),
    CursorRow: CatalogueTable("cursors", 2, ("ms",)),
    ProducerRow: CatalogueTable("producers", 2, ("last", "ms")),
    MetaRow: CatalogueTable("meta", 1, ()),
    BatchRow: CatalogueTable("batches", 2, ("file", "position")),
    NoteRow: CatalogueTable("notes", 1, ("ms",)),
}
R = TypeVar(
    "R", TopicRow, SegmentRow, TombstoneRow, CursorRow, ProducerRow, MetaRow, BatchRow, NoteRow
)


def row_key(row: tuple[object, ...]) -> tuple[object, ...]:
    return row[: TABLES[type(row)].keys]


NAMED = (TopicRow, TombstoneRow, CursorRow, ProducerRow)
"""Kinds of rows that name a topic."""


def present(row: R) -> R:
    """Return the row with the present name of its topic, for rows of an earlier format."""
    if isinstance(row, NAMED):
        return row._replace(name=present_name(row.name))
    return row
