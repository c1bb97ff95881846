"""A real PostgreSQL for tests: a cluster in its own directory, without network access, and its databases."""

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from headrace.testing import wait_until
from tests.tools import without

USER, PASSWORD = "headrace", "p@ss/word"

_SETTINGS = """
fsync = off
full_page_writes = off
shared_buffers = 16MB
max_connections = 40
listen_addresses = ''
unix_socket_directories = '{socket}'
"""


class Cluster:
    """PostgreSQL cluster.

    PostgreSQL refuses to run as root, so root runs it as another user, who owns the directory.
    """

    def __init__(self) -> None:
        self._programs = _programs()
        self.directory = Path(tempfile.mkdtemp(prefix="headrace-pg-"))
        self._data = self.directory / "data"
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = _other_user()
            self._as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.directory, user.pw_uid, user.pw_gid)
        secret = self.directory / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run(
            *("initdb", f"--pgdata={self._data}", f"--username={USER}", f"--pwfile={secret}"),
            *("--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync"),
        )
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(_SETTINGS.format(socket=self.directory))
        self._names = itertools.count(1)
        self.start()

    def start(self) -> None:
        self._run("pg_ctl", f"--pgdata={self._data}", f"--log={self._data}/log", "--wait", "start")

    def stop(self) -> None:
        self._run("pg_ctl", f"--pgdata={self._data}", "--mode=immediate", "--wait", "stop")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)

    def database(self) -> "Database":
        """Create an empty database."""
        name = f"test{next(self._names)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return Database(self.url(name))

    def url(self, database: str, *, password: str = PASSWORD) -> str:
        return (
            f"postgresql://{USER}:{quote(password, safe='')}@/{database}"
            f"?host={quote(str(self.directory), safe='')}"
        )

    def _run(self, program: str, *args: str) -> None:
        done = subprocess.run(
            [self._programs / program, *args],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            # The output is a file, because the server would keep a pipe open.
            stdout=(output := tempfile.TemporaryFile()),  # noqa: SIM115
            stderr=subprocess.STDOUT,
            timeout=120,
            check=False,
            **self._as_user,
        )
        output.seek(0)
        said = output.read().decode()
        output.close()
        assert done.returncode == 0, f"{program}: {said}"


class Database:
    def __init__(self, url: str) -> None:
        self.url = url

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(query, values)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def snapshot(self, channel: str) -> tuple[int, bytes] | None:
        """Return offset and content of a channel's snapshot."""
        found = self.rows(
            'SELECT "offset", data FROM headrace_snapshots WHERE channel = %s', channel.encode()
        )
        return found[0] if found else None

    def wait_for_table(self) -> None:
        """Wait until a server has connected and created the table."""
        query = "SELECT to_regclass('headrace_snapshots') IS NOT NULL"
        wait_until(lambda: self.rows(query) == [(True,)], what="the table of snapshots")

    @contextlib.contextmanager
    def held(self, mode: str) -> Iterator[None]:
        """Let writes of snapshots wait while the block runs; with "ACCESS EXCLUSIVE", reads wait too."""
        with psycopg.connect(self.url) as connection:
            connection.execute(f"LOCK TABLE headrace_snapshots IN {mode} MODE")  # type: ignore[call-overload]
            yield
            connection.rollback()

    def waiting_writes(self) -> list[int]:
        """Return the PostgreSQL processes that wait to write a snapshot."""
        found = self.rows(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND wait_event_type = 'Lock' AND query LIKE '%%INSERT INTO headrace_snapshots%%'"
        )
        return [pid for (pid,) in found]

    def wait_for_write(self) -> int:
        wait_until(self.waiting_writes, what="a write that waits for the lock")
        return self.waiting_writes()[0]


def _programs() -> Path:
    """Return the directory of the programs. Debian keeps them outside PATH."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if elsewhere := shutil.which("initdb"):
        found.append(Path(elsewhere).resolve().parent)
    if not found:
        without("PostgreSQL is not installed (Debian: apt install postgresql)")
    return max(found, key=lambda path: (path.parent.name.isdecimal(), path.parent.name.zfill(4)))


def _other_user() -> pwd.struct_passwd:
    found = {user.pw_name: user for user in pwd.getpwall()}
    return (
        found.get("postgres")
        or found.get("nobody")
        or without("PostgreSQL does not run as root, and there is no user postgres or nobody")
    )
