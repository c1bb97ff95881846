"""A lake of plain Parquet files: reading the whole directory gives every row once, without a table.

Files are first written under hidden names that are not recognised as Parquet. A committed file gets a second,
visible name. When a file is replaced, its visible name is removed before the new file gets one. A reader in
between misses rows, but never sees a row twice. The next job that writes repairs what a killed job has left:
it compares the visible names with the committed files. Our own readers use the hidden names, which stay for a
while.

A database inside the lake knows the files that count. Each commit is one transaction, which holds the
database's lock from its first read to its end. If two commits use the same number, or replace the same files,
the second sees the result of the first. SQLite makes commits durable.
"""

import os
import re
import sqlite3
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Self

import msgspec

from headrace.lake.columns import columns_text
from headrace.lake.files.writing import (
    DATED,
    Bounds,
    FileLayout,
    WrittenFile,
)
from headrace.lake.format import (
    FORMAT,
    Committed,
    LakeError,
    Oddity,
    Shape,
    check_format,
    in_a_sentence,
)
from headrace.lake.storage.storage import (
    HIDDEN,
    Storage,
    check_links,
    directory_of,
    make_directory,
    sync,
)

_WAIT_S = 60.0
"""Time to wait for other writers: their transactions are short."""

_DAMAGE = (sqlite3.Error, TypeError, ValueError)
"""Errors that a damaged value may raise. Other errors come from the caller's code."""

_TABLES = """
create table if not exists lake (format integer, id text, by_topic integer, decode text, decoded text);
create table if not exists numbers (app text primary key, last integer);
create table if not exists files (
    path text primary key, bytes integer, least_topic text, most_topic text, most_offset integer
);
"""

MARK = f"{HIDDEN}/files.db"
_WHAT = "a lake of plain Parquet files"

_OURS = re.compile(rf"{HIDDEN}/files/(t-[0-9a-f]{{16}}/)?{DATED}")
"""Hidden names of files that Headrace writes."""


class ParquetLake:
    """Implementation of `table.Table` for plain Parquet."""

    kind = "parquet"
    layout = FileLayout(f"{HIDDEN}/files/", ".data", has_topic=True)

    def __init__(self, storage: Storage, shape: Shape) -> None:
        self._storage, self.shape = storage, shape
        self._lake = directory_of(storage, _WHAT)
        self._has_links = False
        """True once a commit has found that the file system has hard links: a lake may have been moved."""

    @classmethod
    def open(cls, storage: Storage) -> Self | None:
        if not storage.has(MARK):
            return None
        with _database(storage) as database:
            if not database.execute("select 1 from sqlite_schema where name = 'lake'").fetchone():
                return None
            (number,) = database.execute("select format from lake").fetchone()
            check_format(number, storage.address)
            by_topic, decode, decoded = database.execute(
                "select by_topic, decode, decoded from lake"
            ).fetchone()
            return cls(storage, Shape.stored(bool(by_topic), decode, decoded))

    @classmethod
    def make(cls, storage: Storage, shape: Shape) -> None:
        lake = directory_of(storage, _WHAT)
        storage.prepare()
        check_links(storage, cls.kind)
        (lake / MARK).touch()
        with _locked(storage) as database:
            for statement in _TABLES.split(";"):
                database.execute(statement)
            if database.execute("select 1 from lake").fetchone() is None:
                row = (FORMAT, str(uuid.uuid4()), shape.by_topic, shape.decode)
                database.execute(
                    "insert into lake values (?, ?, ?, ?, ?)", (*row, columns_text(shape.decoded))
                )
        sync(lake / HIDDEN)

    @property
    def id(self) -> str:
        with _database(self._storage) as database:
            return str(database.execute("select id from lake").fetchone()[0])

    def last(self, app: str) -> Committed | None:
        with _database(self._storage) as database:
            return _last(database, app)

    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[WrittenFile],
        token: int,
        *,
        replaced: Collection[str] = (),
    ) -> bool:
        if not self._has_links:
            check_links(self._storage, self.kind)
            self._has_links = True
        with _locked(self._storage) as database:
            last, wanted = _last(database, app), Committed(number, token)
            if last is not None and last.number >= number:
                return last == wanted
            if not _files(database).keys() >= set(replaced):
                return False
            numbers = wanted.numbers(app).items()
            database.executemany("insert or replace into numbers values (?, ?)", numbers)
            database.executemany("delete from files where path = ?", [(path,) for path in replaced])
            database.executemany("insert into files values (?, ?, ?, ?, ?)", map(_row, files))
        changed = [*(one.path for one in files), *replaced]
        self._show({_directory(self.shown(path)) for path in changed})
        return True

    def files(self) -> dict[str, int]:
        with _database(self._storage) as database:
            return _files(database)

    def files_of(self, topic: str, offset: int) -> list[str]:
        with _database(self._storage) as database:
            found = database.execute(
                "select path from files where least_topic <= ? and most_topic >= ? and most_offset >= ?",
                (topic, topic, offset),
            )
            return [path for (path,) in found.fetchall()]

    def bounds(self) -> dict[str, Bounds]:
        with _database(self._storage) as database:
            found = database.execute(
                "select path, least_topic, most_topic, most_offset from files"
            ).fetchall()
            rows = msgspec.convert(found, list[tuple[str, str, str, int]])
            return {
                path: {"topic": (least, most), "offset": (None, offset)}
                for path, least, most, offset in rows
            }

    def oddities(self) -> list[Oddity]:
        live = {self.shown(path) for path in self.files()}
        every = (str(path.relative_to(self._lake)) for path in self._lake.rglob("*.parquet"))
        others = sorted(name for name in every if name not in live and not self._is_ours(name))
        if not others:
            return []
        reason = "it is not a file of the lake, but readers that take every file read its rows too"
        if len(others) > 1:
            reason = f"{reason}; there are {len(others)} of them"
        return [Oddity("note", others[0], reason)]

    def shown(self, path: str) -> str:
        # Dates come first in visible paths. Otherwise Spark would take each topic's directory for a table.
        *directories, name = path.removeprefix(self.layout.directory).split("/")
        return "/".join([*reversed(directories), f"{name.removesuffix('.data')}.parquet"])

    def sweep(self, after_s: float, *, dry_run: bool) -> int:
        live = self.files()
        until = time.time() - after_s
        old = [
            one.path
            for one in self._storage.list(self.layout.directory)
            if _OURS.fullmatch(one.path) and one.path not in live and one.modified_s < until
        ]
        if not dry_run:
            self._storage.delete(old)
        return len(old)

    def sync(self) -> None:
        self._show()

    # Visible names

    def _show(self, only: Collection[str] | None = None) -> None:
        """Make exactly the committed files visible, in all directories or in `only`."""
        with _locked(self._storage):
            live = {self.shown(path): path for path in self.files()}
            wanted = {name for name in live if only is None or _directory(name) in only}
            found = set(self._in_sight(only))
            hidden = {name for name in found - wanted if self._is_ours(name)}
            shown = wanted - found
            for name in hidden:
                self._hide(name)
            for name in shown:
                self._link(live[name], name)
            for directory in {_directory(name) for name in hidden | shown}:
                sync(self._lake / directory)

    def _in_sight(self, only: Collection[str] | None) -> Iterator[str]:
        every = self._lake.glob("date=*/t-*" if self.shape.by_topic else "date=*")
        for directory in every if only is None else map(self._lake.joinpath, only):
            if directory.is_dir():
                yield from (str(path.relative_to(self._lake)) for path in directory.iterdir())

    def _is_ours(self, name: str) -> bool:
        """True if a visible name belongs to a file of Headrace, and not to a foreign file."""
        path = self._first_name(name)
        return _OURS.fullmatch(path) is not None and (self._lake / path).exists()

    def _hide(self, name: str) -> None:
        with suppress(FileNotFoundError, PermissionError):
            # The time for sweeping counts from now.
            os.utime(self._lake / self._first_name(name))
        (self._lake / name).unlink(missing_ok=True)

    def _first_name(self, name: str) -> str:
        *directories, name = name.split("/")
        path = "/".join([*reversed(directories), f"{name.removesuffix('.parquet')}.data"])
        return f"{self.layout.directory}{path}"

    def _link(self, path: str, name: str) -> None:
        make_directory((self._lake / name).parent)
        try:
            (self._lake / name).hardlink_to(self._lake / path)
        except FileNotFoundError:
            raise LakeError(
                f"{self._lake / path} is missing, which the table names: restore it"
            ) from None
        except OSError as error:
            raise LakeError(f"{self._lake / name} cannot be made: {error.strerror}") from None


def _directory(name: str) -> str:
    return name.rpartition("/")[0]


# The database


@contextmanager
def _locked(storage: Storage) -> Iterator[sqlite3.Connection]:
    """Open the database and lock it against other writers."""
    with _database(storage) as database:
        database.execute("begin immediate")
        with database:
            yield database


@contextmanager
def _database(storage: Storage) -> Iterator[sqlite3.Connection]:
    # Opening never creates the database. A read-only one can still be read.
    address = f"{(directory_of(storage, _WHAT) / MARK).as_uri()}?mode=rw"
    with (
        in_a_sentence(storage, MARK, _DAMAGE),
        closing(
            sqlite3.connect(address, timeout=_WAIT_S, isolation_level=None, uri=True)
        ) as database,
    ):
        yield database


def _last(database: sqlite3.Connection, app: str) -> Committed | None:
    return Committed.find(app, dict(database.execute("select app, last from numbers")).get)


def _files(database: sqlite3.Connection) -> dict[str, int]:
    found = database.execute("select path, bytes from files").fetchall()
    return msgspec.convert(dict(found), dict[str, int])


def _row(one: WrittenFile) -> tuple[str, int, str, str, int]:
    least, most = one.statistics
    return one.path, one.bytes, least.topic, most.topic, most.offset
