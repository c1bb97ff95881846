"""One connection to a PostgreSQL database, and the table of snapshots in it. All calls block.

Needs the extra `postgres`: no other module imports psycopg, and this one is imported if a URL is configured.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from headrace.broker.channel.notes import StoredSnapshot
from headrace.errors import ConfigError
from headrace.payload.channel import Content
from headrace.printing import MASK, masked
from headrace.server.channel.snapshots import DatabaseError

_STATEMENT_MS_MAX = 8_000

_PARAMETERS = {
    "application_name": "headrace",
    "connect_timeout": 5,  # seconds
    # Keepalives detect a machine that has vanished while the connection is idle.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": _STATEMENT_MS_MAX,
}
"""Default parameters, which the URL may override."""

_IS_MISSING = "SELECT to_regclass('headrace_snapshots') IS NULL"

_CREATE = """
CREATE TABLE IF NOT EXISTS headrace_snapshots (
    channel bytea PRIMARY KEY,
    epoch bigint NOT NULL,
    "offset" bigint NOT NULL,
    ordinal bigint NOT NULL,
    ms bigint NOT NULL,
    is_json boolean NOT NULL,
    data bytea NOT NULL
)
"""

_LOAD = """
SELECT epoch, "offset", ordinal, ms, is_json, data FROM headrace_snapshots WHERE channel = %b
"""

_SAVE = """
INSERT INTO headrace_snapshots AS kept (channel, epoch, "offset", ordinal, ms, is_json, data)
VALUES (%b, %s, %s, %s, %s, %s, %b)
ON CONFLICT (channel) DO UPDATE SET
    epoch = excluded.epoch, "offset" = excluded."offset", ordinal = excluded.ordinal,
    ms = excluded.ms, is_json = excluded.is_json, data = excluded.data
WHERE kept."offset" < excluded."offset"
    OR (kept."offset" = excluded."offset" AND kept.ms < excluded.ms)
"""

_REMOVE = "DELETE FROM headrace_snapshots WHERE channel = %b"

_OLDER = """
SELECT channel FROM headrace_snapshots WHERE channel > %b AND ms < %s ORDER BY channel LIMIT %s
"""


def connector(url: str) -> Callable[[], "SnapshotDatabase"]:
    """Return a function that opens a connection. Raises `ConfigError`, without the URL, for a wrong URL."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.Error:
        given = {}
    if not given or _has_stray_at(url):
        raise ConfigError(
            "channels.snapshots_url cannot be read: it names a parameter that PostgreSQL does not know, or "
            "special characters of a password that are not written with %, such as %40 for @ and %2F for /"
        )
    parameters = _PARAMETERS | given
    return lambda: SnapshotDatabase(parameters)


def _has_stray_at(url: str) -> bool:
    """True if a part of the password would be taken for the host or the database, and appear in errors."""
    authority, _, rest = url.partition("://")[2].partition("/")
    return authority.count("@") > 1 or "@" in rest.partition("?")[0]


class SnapshotDatabase:
    """Implements `Database`. Opening a connection may raise `DatabaseError` too."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        secret = str(parameters.get("password", ""))
        with _translated(is_down=True, secret=secret):
            connection = self._connection = psycopg.connect(**parameters, autocommit=True)
        # A duplicate descriptor: the original may be another file's once the connection is closed.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        try:
            with _translated(is_down=True):
                connection.execute("SET synchronous_commit TO on")
                connection.execute(f"SET statement_timeout TO {_STATEMENT_MS_MAX}")
                # A user without the right to create tables can use a table that someone else has created.
                if connection.execute(_IS_MISSING).fetchone() == (True,):
                    connection.execute(_CREATE)
        except DatabaseError:
            self.close()
            raise

    @property
    def is_lost(self) -> bool:
        return self._connection.closed

    def load(self, channel: str) -> StoredSnapshot | None:
        with _translated():
            row = self._connection.execute(_LOAD, [channel.encode()], binary=True).fetchone()
        if row is None:
            return None
        epoch, offset, ordinal, ms, is_json, data = row
        return StoredSnapshot(epoch, offset, ordinal, ms, Content(data, is_json))

    def save(self, channel: str, snapshot: StoredSnapshot) -> None:
        *place, content = snapshot
        row = [channel.encode(), *place, content.is_json, content.data]
        with _translated():
            self._connection.execute(_SAVE, row)

    def remove(self, channel: str) -> None:
        with _translated():
            self._connection.execute(_REMOVE, [channel.encode()])

    def older(self, before_ms: int, after: str, limit: int) -> list[str]:
        values = [after.encode(), before_ms, limit]
        with _translated():
            rows = self._connection.execute(_OLDER, values, binary=True).fetchall()
        return [bytes(name).decode() for (name,) in rows]

    def cut(self) -> None:
        with suppress(OSError):  # the connection has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        self._socket.close()


@contextmanager
def _translated(*, is_down: bool = False, secret: str = "") -> Iterator[None]:
    """Raise `DatabaseError` with one line of text. `secret` is masked, because drivers quote parameters."""
    try:
        yield
    except psycopg.Error as error:
        text = masked(" ".join(str(error).split())) or type(error).__name__
        text = text.replace(secret, MASK) if secret else text
        # Errors of the connection affect all channels. Other errors, such as a bad row, affect one.
        is_down |= isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        raise DatabaseError(text, is_down=is_down) from None
