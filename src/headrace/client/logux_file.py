"""The SQLite file of a local log: one process uses it at a time, and what is another's is left alone.

Knows nothing of events. Errors of SQLite become LocalStoreError here.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import LocalStoreError

MEMORY = ":memory:"

_FORMAT = 1
_APPLICATION = 0x4C6F6778
"""Says whose file it is, in SQLite's header: "Logx"."""

_LOCK_WAIT_S = 1.0


class LogFile:
    """Use it in one thread."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None or is_in_memory(path) else Path(path).absolute()
        self.name = "the store in memory" if self.path is None else str(self.path)
        self._connection: sqlite3.Connection | None = None

    def open(self) -> bool:
        """Take the file for this process; returns whether it is new. Then it must be made, with `made`."""
        with self.told_plainly():
            file = MEMORY if self.path is None else self.path
            self._connection = sqlite3.connect(file, timeout=_LOCK_WAIT_S, isolation_level=None)
            # Locks are kept until the file is closed, and no file is needed for memory that processes share.
            self.do("PRAGMA locking_mode = EXCLUSIVE")
            self.do("BEGIN EXCLUSIVE")
            [application] = self.one("PRAGMA application_id")
            [version] = self.one("PRAGMA user_version")
            [tables] = self.one("SELECT count(*) FROM sqlite_master")
            self.do("COMMIT")
            is_new = (application, version, tables) == (0, 0, 0)
            if not is_new and (application, version) != (_APPLICATION, _FORMAT):
                raise LocalStoreError(f"{self.name} is no store of a Logux client")
            self.do("PRAGMA journal_mode = WAL")
            self.do("PRAGMA synchronous = FULL")
            return is_new

    def made(self) -> None:
        """In the transaction that makes the tables: from now on it is a store."""
        self.do(f"PRAGMA application_id = {_APPLICATION}")
        self.do(f"PRAGMA user_version = {_FORMAT}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it, on disk when this returns, or nothing."""
        with self.told_plainly():
            self.do("BEGIN")
            try:
                yield
                self.do("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # it may be rolled back already
                    self.do("ROLLBACK")
                raise

    def do(self, statement: str, *values: Any) -> sqlite3.Cursor:
        assert self._connection is not None
        return self._connection.execute(statement, values)

    def one(self, statement: str, *values: Any) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self.do(statement, *values).fetchone()
        return row

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def told_plainly(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.DecodeError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise LocalStoreError(
                    f"{self.name} is in use by another client: close it, or give each its own store"
                ) from None
            raise LocalStoreError(f"{self.name}: {error}") from error


def is_in_memory(path: str | os.PathLike[str] | None) -> bool:
    return path is None or os.fspath(path) == MEMORY
