"""The local log of a Logux client, in a SQLite file or in memory, and the thread that works on it.

The thread is there so that the event loop never waits for the disk. Jobs that arrive during a transaction
form the next transaction: many events cost one write.

The log contains every event once: an event that arrives again is recognised by its wire time.
`run` does several jobs in one transaction, which is durable when `run` returns. The positions `sent` and
`received` may be noted in memory, and are written with the next event. If a crash loses noted positions, some
events are exchanged again and recognised.

The file belongs to one log and one host, and to one process at a time.

An event has two times. `created` is by the local clock. The *wire time* is by the server's clock, and other
clients identify the event by it. The wire time is assigned once: a later connection may measure another
difference between the clocks, and the same event must not appear as another one.

Errors of SQLite become LocalStoreError, and files of other programs are refused.
"""

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.client.lifecycle import settle
from headrace.errors import LocalStoreError
from headrace.payload.logux import Created, Event, Number, plain, stamp_of

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Tick(NamedTuple):
    """A time of one host without its name: milliseconds, and a number within the millisecond."""

    ms: Number
    number: Number


NEVER = Tick(0, -1)

AHEAD_MS_MAX = 60_000
"""Milliseconds that times may be ahead of the clock. Times keep growing if the clock is set back a little."""


def following(last: Tick, wanted: Tick) -> Tick:
    """Return the wanted tick if it is later than the last, else the next tick after the last.

    If the last tick is more than `AHEAD_MS_MAX` ahead, the wanted one is returned: a clock that was once far
    ahead must not determine the times for ever.
    """
    if wanted > last or wanted.ms < last.ms - AHEAD_MS_MAX:
        return wanted
    return Tick(last.ms, last.number + 1)


def shifted(created: Created, ms: int) -> Created:
    """Return the time by another clock. Times that are not of the standard timer are returned unchanged."""
    if stamp_of(created) is None:
        return created
    return [plain(created[0] + ms), *created[1:]]


def after(created: Created) -> Created:
    """Return the next time of the standard timer in the same millisecond."""
    # As an integer: adding 1 to a large float does not change it, and a search for a free time would not end.
    return [*created[:2], int(created[2]) + 1]


def text_of(created: Created) -> str:
    """Return a text that is the same for equal times only: numbers are compared by value."""
    return _encode([one if isinstance(one, str) else plain(one) for one in created]).decode()


MEMORY = ":memory:"

_FORMAT = 1
_APPLICATION = 0x4C6F6778
"""Application id in SQLite's header that marks a file as ours: "Logx"."""

_LOCK_WAIT_S = 1.0


class LogFile:
    """An open or closed file. Use it in one thread only."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None or is_in_memory(path) else Path(path).absolute()
        self.name = "the store in memory" if self.path is None else str(self.path)
        self._connection: sqlite3.Connection | None = None

    def open(self) -> bool:
        """Lock the file for this process; return True if it is new."""
        with self.plain_errors():
            file = MEMORY if self.path is None else self.path
            self._connection = sqlite3.connect(file, timeout=_LOCK_WAIT_S, isolation_level=None)
            # SQLite keeps its locks until the file is closed, and needs no file for shared memory.
            self.do("PRAGMA locking_mode = EXCLUSIVE")
            self.do("BEGIN EXCLUSIVE")
            [application] = self.one("PRAGMA application_id")
            [version] = self.one("PRAGMA user_version")
            [tables] = self.one("SELECT count(*) FROM sqlite_master")
            self.do("COMMIT")
            is_new = (application, version, tables) == (0, 0, 0)
            if not is_new and (application, version) != (_APPLICATION, _FORMAT):
                raise LocalStoreError(f"{self.name} is not a store of a Logux client")
            self.do("PRAGMA journal_mode = WAL")
            self.do("PRAGMA synchronous = FULL")
            return is_new

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all statements of the block durably, or none of them."""
        with self.plain_errors():
            self.do("BEGIN")
            try:
                yield
                self.do("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back already
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
    def plain_errors(self) -> Iterator[None]:
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


SYNC_EVENTS_MAX = 500
SYNC_BYTES_MAX = 1 << 20
"""Limits of one `sync` message; the last event may exceed the bytes."""

PAGE_EVENTS_MAX = 500
PAGE_BYTES_MAX = 1 << 20
"""Limits of one read; the last event may exceed the bytes."""

_SCHEMA = """
CREATE TABLE log (
  name TEXT NOT NULL, host TEXT NOT NULL, sent INTEGER NOT NULL, received NUMERIC NOT NULL,
  made_ms INTEGER NOT NULL, made_number INTEGER NOT NULL,
  told_ms INTEGER NOT NULL, told_number INTEGER NOT NULL);
CREATE TABLE events (
  added INTEGER PRIMARY KEY, event BLOB NOT NULL, created TEXT NOT NULL UNIQUE, wire TEXT UNIQUE,
  own INTEGER NOT NULL);
CREATE INDEX own_events ON events (added) WHERE own = 1;
"""
# `created` is by the local clock, `wire` by the server's. `wire` is NULL for an own event without a wire
# time: it gets one before it is first sent.


class LogEvent(NamedTuple):
    """An event of a local log."""

    event: Event
    created: Created
    """Time of the event by the local clock, unique in this log."""
    added: int
    """Number of the event in this log, counted from 1: continue after it with `events(after=added)`."""


class Facts(NamedTuple):
    """State of a store when it is opened."""

    host: str
    last: int
    """Number of the last event."""
    unsent: int | None
    """Number of the first own event that the server has not acknowledged."""
    unacknowledged: int
    """Number of own events that the server has not acknowledged."""
    received: Number


class ReceptionPlace(NamedTuple):
    """Identity of one reception: its connection, and its number on that connection."""

    connection: int
    number: int


class Unsent(NamedTuple):
    """Events for the server, oldest first, and the number of the next unsent event (`rest`)."""

    events: list[tuple[int, Event, Created]]
    rest: int | None


Job = Callable[["LoguxStore"], Any]


class LoguxStore:
    """The store of a local log. Open, use and close it in one thread."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._file = LogFile(path)
        self._host = ""
        self._last = 0
        self._sent = 0
        self._received: Number = 0
        self._made = self._told = NEVER
        """The last local time and the last wire time that were assigned to own events."""
        self._place: ReceptionPlace | None = None
        """The last reception that was stored."""
        self._unstamped = False
        """True if the last own events have no wire time yet: wire times are assigned in order."""
        self._written = False
        """True if the transaction has changed events."""
        self._noted = False
        """True if positions have changed and are not written yet."""
        self._doubtful = False
        """True after a failed transaction: the fields above must be read from the file again."""

    @property
    def path(self) -> Path | None:
        return self._file.path

    def open(self, log: str, host: str | None) -> Facts:
        """Open or create the store; raise LocalStoreError if it is in use or not of this log and host."""
        try:
            is_new = self._file.open()
            with self._file.plain_errors():
                if is_new:
                    self._make(log, host or str(uuid.uuid4()))
                self._load()
                self._check(log, host)
                pending = "SELECT min(added), count(*) FROM events WHERE own = 1 AND added > ?"
                unsent, count = self._file.one(pending, self._sent)
        except BaseException:
            self._file.close()
            raise
        return Facts(
            host=self._host,
            last=self._last,
            unsent=unsent,
            unacknowledged=count,
            received=self._received,
        )

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """Do all jobs durably and return their results; if that fails, do none and raise LocalStoreError."""
        try:
            with self._file.transaction():
                if self._doubtful:
                    self._load()
                results = [job(self) for job in jobs]
                if self._written:
                    self._save()
        except BaseException:
            self._doubtful = True
            self._place = None
            raise
        if self._written:
            self._written = self._noted = False
        return results

    def close(self) -> None:
        """Write noted positions and close. The store is closed even if this raises LocalStoreError."""
        try:
            if self._noted and not self._doubtful:
                with self._file.transaction():
                    self._save()
        finally:
            self._file.close()

    # Jobs: call them only in `run`

    def add(self, event: bytes, now_ms: int, difference_ms: int | None) -> LogEvent:
        """Add an own event, in JSON. `difference_ms`: local clock minus server's clock, None if unknown."""
        self._made = following(self._made, Tick(now_ms, 0))
        created = self._free("created", [self._made.ms, self._host, self._made.number])
        self._made = Tick(created[0], created[2])
        wire = None
        if difference_ms is None or self._unstamped:
            self._unstamped = True
        else:
            wire = self._wire(created, difference_ms)
        self._insert(event, text_of(created), wire, own=True)
        return LogEvent(_decode(event), created, self._last)

    def receive(
        self,
        number: Number,
        events: Sequence[tuple[Event, Created]],
        difference_ms: int,
        place: ReceptionPlace,
    ) -> int | LocalStoreError:
        """Add those events of the server that are new; return the number of the log's last event."""
        # If the reception before this one was not stored, this one must not be stored either:
        # the client would never ask for the missing events again.
        if place.number and self._place != (place.connection, place.number - 1):
            # Returned, not raised: other jobs of the transaction are not affected.
            return LocalStoreError("an earlier event could not be stored")
        self._place = place
        for event, wire in events:
            text = text_of(wire)
            if not self._is_there("wire", text):
                created = self._free("created", shifted(wire, difference_ms))
                self._insert(_encode(event), text_of(created), text, own=False)
        if self._received != number:
            self._received = number
            self._noted = True
        return self._last

    def unsent(self, start: int, difference_ms: int) -> Unsent:
        """Return the next own events from a number on. Events without a wire time get one, which is final."""
        rows = self._file.do(
            "SELECT added, event, created, wire FROM events WHERE own = 1 AND added >= ?"
            " ORDER BY added LIMIT ?",
            start,
            SYNC_EVENTS_MAX + 1,
        )
        found: list[Any] = []
        size, rest = 0, None
        for row in rows:
            if len(found) == SYNC_EVENTS_MAX or size >= SYNC_BYTES_MAX:
                rest = row[0]
                rows.close()
                break
            found.append(row)
            size += len(row[1])
        events: list[tuple[int, Event, Created]] = []
        for added, event, created, known in found:
            wire = known
            if wire is None:
                wire = self._wire(_decode(created), difference_ms)
                self._file.do("UPDATE events SET wire = ? WHERE added = ?", wire, added)
                self._written = True
            events.append((added, _decode(event), _decode(wire)))
        if rest is None:
            self._unstamped = False
        return Unsent(events, rest)

    def read(self, behind: int) -> list[LogEvent]:
        """Return the next events after a number."""
        rows = self._file.do(
            "SELECT event, created, added FROM events WHERE added > ? ORDER BY added LIMIT ?",
            behind,
            PAGE_EVENTS_MAX,
        )
        events: list[LogEvent] = []
        size = 0
        for event, created, added in rows:
            events.append(LogEvent(_decode(event), _decode(created), added))
            size += len(event)
            if size >= PAGE_BYTES_MAX:
                rows.close()
                break
        return events

    def note(self, *, sent: int | None = None, received: Number | None = None) -> None:
        """Note positions in memory; the next transaction that changes events, or `close`, writes them."""
        if sent is not None:
            self._sent = sent
        if received is not None:
            self._received = received
        self._noted = True

    # Events

    def _insert(self, event: bytes, created: str, wire: str | None, *, own: bool) -> None:
        self._last += 1
        self._file.do(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)", self._last, event, created, wire, own
        )
        self._written = True

    def _wire(self, created: Created, difference_ms: int) -> str:
        """Return a wire time for an own event, after the last one that was assigned (see `following`)."""
        self._told = following(self._told, Tick(created[0] - difference_ms, created[2]))
        wire = self._free("wire", [self._told.ms, self._host, self._told.number])
        self._told = Tick(wire[0], wire[2])
        return text_of(wire)

    def _free(self, column: str, created: Created) -> Created:
        """Return the time, or the next time that no event has: a corrected clock may repeat times."""
        while self._is_there(column, text_of(created)):
            created = after(created)
        return created

    def _is_there(self, column: str, text: str) -> bool:
        found = self._file.do(f"SELECT 1 FROM events WHERE {column} = ?", text)
        return found.fetchone() is not None

    # State

    def _make(self, log: str, host: str) -> None:
        with self._file.transaction():
            for statement in _SCHEMA.split(";"):
                self._file.do(statement)
            state = (log, host, 0, 0, *NEVER, *NEVER)
            self._file.do("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *state)
            self._file.do(f"PRAGMA application_id = {_APPLICATION}")
            self._file.do(f"PRAGMA user_version = {_FORMAT}")

    def _check(self, log: str, host: str | None) -> None:
        [found] = self._file.one("SELECT name FROM log")
        if found != log:
            raise LocalStoreError(
                f"{self._file.name} is the store of the log {found!r}, not {log!r}"
            )
        if host is not None and host != self._host:
            raise LocalStoreError(f"{self._file.name} is the store of {self._host!r}, not {host!r}")

    def _load(self) -> None:
        columns = "host, sent, received, made_ms, made_number, told_ms, told_number"
        row = self._file.one(f"SELECT {columns} FROM log")
        self._host, self._sent, self._received = row[:3]
        self._made, self._told = Tick(*row[3:5]), Tick(*row[5:7])
        [self._last] = self._file.one("SELECT coalesce(max(added), 0) FROM events")
        last = "SELECT wire IS NULL FROM events WHERE own = 1 ORDER BY added DESC LIMIT 1"
        self._unstamped = self._file.do(last).fetchone() == (1,)
        self._written = self._noted = self._doubtful = False

    def _save(self) -> None:
        self._file.do(
            "UPDATE log SET sent = ?, received = ?,"
            " made_ms = ?, made_number = ?, told_ms = ?, told_number = ?",
            self._sent,
            self._received,
            *self._made,
            *self._told,
        )


JOBS_MAX = 1000
"""Number of jobs in one transaction."""

Done = Callable[[Any], None]
"""Called in the event loop with the result or the exception of a job."""

Asked = tuple[Job, Done]


class StoreThread:
    """A thread that runs jobs, and reports their results, in the order in which they were requested."""

    def __init__(self, store: LoguxStore) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._opened: asyncio.Future[Facts] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()

    async def open(self, log: str, host: str | None) -> Facts:
        """Start the thread and open the store; raise LocalStoreError if that fails, and end the thread."""
        # A daemon thread: reported results are durable, even if the program ends without closing.
        name = f"headrace store {self._store.path or 'in memory'}"
        threading.Thread(target=self._run, args=(log, host), name=name, daemon=True).start()
        try:
            return await self._opened
        except BaseException:
            await self.close()
            raise

    def ask(self, job: Job, done: Done) -> None:
        self._asked.put((job, done))

    async def close(self) -> None:
        """Finish all jobs and end the thread; raise LocalStoreError if closing the store fails."""
        self._asked.put(None)
        await self._closed

    # Run in the thread

    def _run(self, log: str, host: str | None) -> None:
        try:
            facts = self._store.open(log, host)
        except BaseException as error:  # raised again in `open`
            self._tell(settle, self._opened, error)
            self._tell(settle, self._closed, None)
            return
        self._tell(settle, self._opened, facts)
        while self._work():
            pass
        try:
            self._store.close()
        except BaseException as error:  # raised again in `close`
            self._tell(settle, self._closed, error)
        else:
            self._tell(settle, self._closed, None)

    def _work(self) -> bool:
        """Run one transaction; return False after the last."""
        asked: list[Asked] = []
        while (one := self._asked.get()) is not None:
            asked.append(one)
            if len(asked) == JOBS_MAX or self._asked.empty():
                break
        if asked:
            try:
                results = self._store.run([job for job, _ in asked])
            except Exception as error:  # reported to the callers
                results = [error] * len(asked)
            self._tell(_report, asked, results)
        return one is not None

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # a program may end its loop without closing us
            self._loop.call_soon_threadsafe(function, *args)


def _report(asked: list[Asked], results: list[Any]) -> None:
    for (_, done), result in zip(asked, results, strict=True):
        try:
            done(result)
        except Exception:  # one failing callback must not keep the others waiting
            logger.exception("internal error in a callback of the local store")
