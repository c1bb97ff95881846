"""Which files of a lake count, in a database in the lake: for a lake that is no table of a known format.

Each commit is one transaction, that holds the database's lock from its first look to its end: so of two that
want the same number, or replace the same files, the second sees what the first has done. SQLite syncs it.
"""

import sqlite3
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from headrace.lake.columns import columns_text, parse_columns
from headrace.lake.format import FORMAT, Shape, check_format
from headrace.lake.trouble import in_a_sentence
from headrace.lake.writing import Bounds, Written

_WAIT_S = 60.0
"""For others who write: their transactions are short."""

_DAMAGE = (sqlite3.Error, TypeError, ValueError)
"""What may be raised when a value is not what was written. Others are of what is done meanwhile."""

_TABLES = """
create table if not exists lake (format integer, id text, by_topic integer, decode text, decoded text);
create table if not exists numbers (app text primary key, last integer);
create table if not exists batches (number integer primary key, notes text);
create table if not exists files (
    path text primary key, bytes integer, least_topic text, most_topic text, most_offset integer
);
"""


class Registry:
    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self, shape: Shape) -> None:
        self._path.touch()
        with self.alone() as database:
            for statement in _TABLES.split(";"):
                database.execute(statement)
            if database.execute("select 1 from lake").fetchone() is None:
                row = (FORMAT, str(uuid.uuid4()), shape.by_topic, shape.decode)
                database.execute(
                    "insert into lake values (?, ?, ?, ?, ?)", (*row, columns_text(shape.decoded))
                )

    def shape(self) -> Shape | None:
        """None where none was made, or only half."""
        if not self._path.exists():
            return None
        with self._open() as database:
            if not database.execute("select 1 from sqlite_schema where name = 'lake'").fetchone():
                return None
            (number,) = database.execute("select format from lake").fetchone()
            check_format(number, str(self._path.parent.parent))
            by_topic, decode, decoded = database.execute(
                "select by_topic, decode, decoded from lake"
            ).fetchone()
            return Shape(
                bool(by_topic), decode, parse_columns(decoded) if decoded else Shape().decoded
            )

    def id(self) -> str:
        with self._open() as database:
            return str(database.execute("select id from lake").fetchone()[0])

    def last(self, app: str) -> int | None:
        with self._open() as database:
            return _last(database, app)

    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[Written],
        notes: Mapping[str, str],
        replaced: Collection[str],
    ) -> bool:
        """As that of `table.Table`."""
        with self.alone() as database:
            last = _last(database, app)
            if last is not None and last >= number:
                return False
            if not _files(database).keys() >= set(replaced):
                return False
            database.execute("insert or replace into numbers values (?, ?)", (app, number))
            if not replaced:
                database.execute(
                    "insert or replace into batches values (?, ?)",
                    (number, msgspec.json.encode(dict(notes)).decode()),
                )
            database.executemany("delete from files where path = ?", [(path,) for path in replaced])
            database.executemany("insert into files values (?, ?, ?, ?, ?)", map(_row, files))
            return True

    def notes(self, number: int) -> Mapping[str, str] | None:
        with self._open() as database:
            asked = database.execute("select notes from batches where number = ?", (number,))
            found = asked.fetchone()
            return _notes(found[0]) if found is not None else None

    def all_notes(self) -> list[tuple[int, Mapping[str, str]]]:
        """The last ones first."""
        with self._open() as database:
            found = database.execute("select number, notes from batches order by number desc")
            return [(number, _notes(notes)) for number, notes in found.fetchall()]

    def files(self) -> dict[str, int]:
        with self._open() as database:
            return _files(database)

    def files_of(self, topic: str, offset: int) -> list[str]:
        with self._open() as database:
            found = database.execute(
                "select path from files where least_topic <= ? and most_topic >= ? and most_offset >= ?",
                (topic, topic, offset),
            )
            return [path for (path,) in found.fetchall()]

    def bounds(self) -> dict[str, Bounds]:
        with self._open() as database:
            found = database.execute(
                "select path, least_topic, most_topic, most_offset from files"
            ).fetchall()
            rows = msgspec.convert(found, list[tuple[str, str, str, int]])
            return {
                path: {"topic": (least, most), "offset": (None, offset)}
                for path, least, most, offset in rows
            }

    @contextmanager
    def alone(self) -> Iterator[sqlite3.Connection]:
        """Nobody else changes anything meanwhile."""
        with self._open() as database:
            database.execute("begin immediate")
            with database:
                yield database

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        lake = self._path.parent.parent
        # Never made here; one that may not be written to is read.
        address = f"{self._path.absolute().as_uri()}?mode=rw"
        with (
            in_a_sentence(lake, str(self._path.relative_to(lake)), _DAMAGE),
            closing(
                sqlite3.connect(address, timeout=_WAIT_S, isolation_level=None, uri=True)
            ) as database,
        ):
            yield database


def _last(database: sqlite3.Connection, app: str) -> int | None:
    found = database.execute("select last from numbers where app = ?", (app,)).fetchone()
    return None if found is None else int(found[0])


def _notes(text: str) -> dict[str, str]:
    return msgspec.json.decode(text, type=dict[str, str])


def _files(database: sqlite3.Connection) -> dict[str, int]:
    found = database.execute("select path, bytes from files").fetchall()
    return msgspec.convert(dict(found), dict[str, int])


def _row(one: Written) -> tuple[str, int, str, str, int]:
    least, most = one.statistics
    return one.path, one.bytes, least.topic, most.topic, most.offset
