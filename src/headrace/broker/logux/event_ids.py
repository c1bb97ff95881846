"""SQLite table with the ids of a topic's events, which shows if an event was stored before.

The records are authoritative: the table is rebuilt from them if the file is missing or damaged, or belongs to
another life of the topic. The table only has records that are committed. Its methods are called from threads.
"""

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.model import Position

logger = logging.getLogger(__name__)

FILE_NAME = "event-ids.sqlite"

_FORMAT = 2
_RENAME = "UPDATE logs SET name = CAST('$' || name AS BLOB)"
"""Migration to format 2, in which names of logs begin with `$logux/`. Before, they began with `logux/`."""
_ASKED_AT_ONCE = 500
_CACHE_KIB = 16 << 10
_BUSY_S = 30.0

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, None)
"""SQLite error codes that mean damage. None stands for our own errors, which have no code."""

_SCHEMA = """
CREATE TABLE logs (
  log INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE,
  epoch INTEGER NOT NULL, offset INTEGER NOT NULL, ordinal INTEGER NOT NULL);
CREATE TABLE ids (log INTEGER NOT NULL, id BLOB NOT NULL, ordinal INTEGER NOT NULL,
  PRIMARY KEY (log, id)) WITHOUT ROWID;
CREATE TABLE hosts (log INTEGER NOT NULL, host BLOB NOT NULL, ms NUMERIC NOT NULL, number NUMERIC NOT NULL,
  PRIMARY KEY (log, host)) WITHOUT ROWID;
"""

_MOVE = "UPDATE logs SET epoch = ?, offset = ?, ordinal = ? WHERE log = ?"

Time = tuple[float, float]
"""Milliseconds and number of a time; both are integers if their values are whole."""


class Known(NamedTuple):
    """Result of a lookup: ordinals by id, and the latest time by host. Unknown ids and hosts are missing."""

    ordinals: dict[bytes, int]
    latest: dict[bytes, Time]


class EventIds:
    """Event ids of all topics in one file. A topic is identified by its name."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE_NAME
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self.generation = 0
        """Number that changes whenever the file is discarded."""

    def indexed(self, topic: str) -> Position | None:
        """Return the position up to which a topic is in the table; None if the table lacks the topic."""
        with self._open() as connection:
            asked = "SELECT epoch, offset, ordinal FROM logs WHERE name = ?"
            row = connection.execute(asked, (topic.encode(),)).fetchone()
            return Position(*row) if row is not None else None

    def add(
        self,
        topic: str,
        ids: Iterable[tuple[bytes, int]],
        latest: Mapping[bytes, Time],
        position: Position,
    ) -> None:
        """Add ids with their ordinals, and the latest time of each host, for records up to `position`."""
        with self._open() as connection, connection:
            log = _log_of(connection, topic)
            connection.executemany(
                "INSERT OR REPLACE INTO ids VALUES (?, ?, ?)",
                ((log, one, ordinal) for one, ordinal in ids),
            )
            connection.executemany(
                "INSERT INTO hosts VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE"
                " SET ms = excluded.ms, number = excluded.number"
                " WHERE (excluded.ms, excluded.number) > (ms, number)",
                ((log, host, *time) for host, time in latest.items()),
            )
            connection.execute(_MOVE, (*position, log))

    def find(self, topic: str, ids: Collection[bytes], hosts: Collection[bytes]) -> Known:
        """Return the ordinals of those ids that the table has, and the latest time of each host."""
        with self._open() as connection:
            log = _find_log(connection, topic)
            if log is None:
                return Known({}, {})
            found = _select(connection, "id, ordinal FROM ids WHERE log = ? AND id", log, ids)
            ordinals: dict[bytes, int] = dict(found)
            where = "host, ms, number FROM hosts WHERE log = ? AND host"
            found = _select(connection, where, log, hosts)
            return Known(ordinals, {host: (ms, number) for host, ms, number in found})

    def forget_before(self, topic: str, ordinal: int) -> None:
        """Delete the ids of records before `ordinal`, which are no longer kept."""
        with self._open() as connection, connection:
            log = _log_of(connection, topic)
            connection.execute("DELETE FROM ids WHERE log = ? AND ordinal < ?", (log, ordinal))

    def reset(self, topic: str, position: Position) -> None:
        """Delete everything about a topic. Its records will be added again from `position`."""
        with self._open() as connection, connection:
            log = _log_of(connection, topic)
            connection.execute("DELETE FROM ids WHERE log = ?", (log,))
            connection.execute("DELETE FROM hosts WHERE log = ?", (log,))
            connection.execute(_MOVE, (*position, log))

    def close(self) -> None:
        with self._lock:
            self._forget_connection()

    def discard(self) -> None:
        """Delete a file that cannot be used; the next call starts with an empty one."""
        with self._lock:
            self._forget_connection()
            self.generation += 1
            logger.warning("%s is damaged: it is deleted and rebuilt from the records", self._path)
            for suffix in ("", "-wal", "-shm"):
                self._path.with_name(FILE_NAME + suffix).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection, for one caller at a time. Errors of SQLite become EventIdsError."""
        with self._lock:
            try:
                yield self._connection or self._connect()
            except sqlite3.DatabaseError as error:
                self._forget_connection()
                is_damage = getattr(error, "sqlite_errorcode", None) in _DAMAGE
                raise EventIdsError(f"{self._path}: {error}", is_damage=is_damage) from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, check_same_thread=False)
        self._connection = connection
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version in (0, 1):
            change = f"{_RENAME};" if version else _SCHEMA
            connection.executescript(f"BEGIN; {change} PRAGMA user_version = {_FORMAT}; COMMIT")
        elif version != _FORMAT:
            raise sqlite3.NotSupportedError(f"format {version}")
        return connection

    def _forget_connection(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


class EventIdsError(OSError):
    """The file cannot be read or written."""

    def __init__(self, message: str, *, is_damage: bool) -> None:
        super().__init__(message)
        self.is_damage = is_damage
        """True if the file is damaged for good. Otherwise the reason may pass, for example a full disk."""


def _find_log(connection: sqlite3.Connection, topic: str) -> int | None:
    row = connection.execute("SELECT log FROM logs WHERE name = ?", (topic.encode(),)).fetchone()
    return row[0] if row is not None else None


def _log_of(connection: sqlite3.Connection, topic: str) -> int:
    """Return the number of a topic's log, or insert a new one: so call this only inside a transaction."""
    connection.execute("INSERT OR IGNORE INTO logs VALUES (NULL, ?, 0, 0, 0)", (topic.encode(),))
    log = _find_log(connection, topic)
    assert log is not None
    return log


def _select(
    connection: sqlite3.Connection, what: str, log: int, wanted: Collection[bytes]
) -> Iterator[Any]:
    rest = list(wanted)
    while rest:
        some, rest = rest[:_ASKED_AT_ONCE], rest[_ASKED_AT_ONCE:]
        marks = ",".join("?" * len(some))
        yield from connection.execute(f"SELECT {what} IN ({marks})", (log, *some))
