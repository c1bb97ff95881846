"""One connection to a PostgreSQL database, and the table of snapshots in it. Everything here waits for it.

Needs the extra `postgres`: nothing else imports psycopg, and this is imported where a URL is configured.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from headrace.broker.channel_notes import Snapshot
from headrace.channel_envelope import Content
from headrace.errors import ConfigError
from headrace.printing import MASK, masked
from headrace.server.postgres_snapshots import DatabaseError

_STATEMENT_MS_MAX = 8_000

_PARAMETERS = {
    "application_name": "headrace",
    "connect_timeout": 5,  # seconds
    # A machine that has vanished is noticed while nothing is asked of it.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": _STATEMENT_MS_MAX,
}
"""What a URL need not say."""

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


def connector(url: str) -> Callable[[], "Connection"]:
    """What opens a connection; raises `ConfigError`, without the URL, for one that cannot be right."""
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
    return lambda: Connection(parameters)


def _has_stray_at(url: str) -> bool:
    """Whether a part of the password would be taken for the host or the database, and be told in errors."""
    authority, _, rest = url.partition("://")[2].partition("/")
    return authority.count("@") > 1 or "@" in rest.partition("?")[0]


class Connection:
    """Raises `DatabaseError` wherever it is used."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        secret = str(parameters.get("password", ""))
        with _translated(is_down=True, secret=secret):
            connection = self._connection = psycopg.connect(**parameters, autocommit=True)
        # Of our own, so that it is not another file's when the connection is closed meanwhile.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        try:
            with _translated(is_down=True):
                connection.execute("SET synchronous_commit TO on")
                connection.execute(f"SET statement_timeout TO {_STATEMENT_MS_MAX}")
                # Who may not make tables may use the one that was made for them.
                if connection.execute(_IS_MISSING).fetchone() == (True,):
                    connection.execute(_CREATE)
        except DatabaseError:
            self.close()
            raise

    @property
    def is_lost(self) -> bool:
        return self._connection.closed

    def load(self, channel: str) -> Snapshot | None:
        with _translated():
            row = self._connection.execute(_LOAD, [channel.encode()], binary=True).fetchone()
        if row is None:
            return None
        epoch, offset, ordinal, ms, is_json, data = row
        return Snapshot(epoch, offset, ordinal, ms, Content(data, is_json))

    def save(self, channel: str, snapshot: Snapshot) -> None:
        *place, content = snapshot
        with _translated():
            self._connection.execute(
                _SAVE, [channel.encode(), *place, content.is_json, content.data]
            )

    def remove(self, channel: str) -> None:
        with _translated():
            self._connection.execute(_REMOVE, [channel.encode()])

    def older(self, before_ms: int, after: str, limit: int) -> list[str]:
        with _translated():
            rows = self._connection.execute(
                _OLDER, [after.encode(), before_ms, limit], binary=True
            ).fetchall()
        return [bytes(name).decode() for (name,) in rows]

    def cut(self) -> None:
        """From another thread: end what this one waits for."""
        with suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        self._socket.close()


@contextmanager
def _translated(*, is_down: bool = False, secret: str = "") -> Iterator[None]:
    """Raise `DatabaseError` in one line, in which `secret` is masked: drivers quote what they were given."""
    try:
        yield
    except psycopg.Error as error:
        text = masked(" ".join(str(error).split())) or type(error).__name__
        text = text.replace(secret, MASK) if secret else text
        # A bad row is the trouble of one channel; everything else is of all.
        is_down |= isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        raise DatabaseError(text, is_down=is_down) from None
