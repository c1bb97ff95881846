"""The local log of a Logux client, in a SQLite file or in memory. Knows no connection and no thread.

Every event is in it once: one that comes again is recognised by its wire time (`logux_times.py`). What
belongs together is one transaction (`run`), and durable when that returns. The positions `sent` and
`received` may be noted without writing, and are written with the next event: what they lack after a crash
is exchanged again, and recognised.

The file belongs to one log and one host, and to one process at a time.
"""

import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.client.logux_file import LogFile
from headrace.client.logux_times import (
    NEVER,
    Tick,
    after,
    created_of_text,
    following,
    shifted,
    text_of,
)
from headrace.errors import LocalStoreError
from headrace.logux_envelope import Created, Event, Number

SYNC_EVENTS_MAX = 500
SYNC_BYTES_MAX = 1 << 20
"""What goes into one message; the last event may go beyond it."""

PAGE_EVENTS_MAX = 500
PAGE_BYTES_MAX = 1 << 20
"""What is read at once; the last event may go beyond it."""

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
# `created` is local, `wire` the server's; NULL for an event of our own that was never to be sent yet.

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class LogEvent(NamedTuple):
    """An event of a local log."""

    event: Event
    created: Created
    """When it was made, by the local clock; no other event of this log has the same."""
    added: int
    """Its number in this log, counted from 1: read on behind it with `events(after=added)`."""


class Facts(NamedTuple):
    """What there is when a store is opened."""

    host: str
    last: int
    """The number of the last event."""
    unsent: int | None
    """That of the first of our own that the server is not known to have."""
    unacknowledged: int
    """How many of those there are."""
    received: Number


class Place(NamedTuple):
    """Which reception of which connection something is."""

    connection: int
    number: int


class Unsent(NamedTuple):
    """Events for the server, oldest first, and the number of the next one."""

    events: list[tuple[int, Event, Created]]
    rest: int | None


Job = Callable[["LoguxStore"], Any]


class LoguxStore:
    """Open, use and close it in one thread."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._file = LogFile(path)
        self._host = ""
        self._last = 0
        self._sent = 0
        self._received: Number = 0
        self._made = self._told = NEVER
        """The last times that the local timer has given, and that were made for the server."""
        self._place: Place | None = None
        """The last reception that was stored."""
        self._unstamped = False
        """Whether the last events of our own have no wire time: they get theirs in their order."""
        self._written = False
        """Whether the transaction has changed events."""
        self._noted = False
        """Whether positions have changed that are not written."""
        self._doubtful = False
        """Whether a transaction has failed: what is above must be read again."""

    @property
    def path(self) -> Path | None:
        return self._file.path

    def open(self, log: str, host: str | None) -> Facts:
        """Raises LocalStoreError when it is another's, in use, or no store at all."""
        try:
            is_new = self._file.open()
            with self._file.told_plainly():
                if is_new:
                    self._make(log, host or str(uuid.uuid4()))
                self._load()
                self._check(log, host)
                pending = "SELECT min(added), count(*) FROM events WHERE own = 1 AND added > ?"
                unsent, count = self._file.one(pending, self._sent)
        except BaseException:
            self._file.close()
            raise
        return Facts(self._host, self._last, unsent, count, self._received)

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """Do all of this durably, and return what comes of each; or nothing of it, with LocalStoreError."""
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
        """Write what was only noted. Raises LocalStoreError, and is closed all the same."""
        try:
            if self._noted and not self._doubtful:
                with self._file.transaction():
                    self._save()
        finally:
            self._file.close()

    # Jobs: only inside of `run`

    def add(self, event: bytes, now_ms: int, difference_ms: int | None) -> LogEvent:
        """Add an event of our own, in JSON. `difference_ms`: the local clock less the server's, if known."""
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
        place: Place,
    ) -> int | LocalStoreError:
        """Add events of the server that are new; returns the number of the last event."""
        # What is behind one that could not be stored must not be: it would never be asked for again.
        if place.number and self._place != (place.connection, place.number - 1):
            # Not raised: other jobs of the transaction are not concerned.
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
        """The next events of our own from a number on; from now on their wire times are what they are."""
        rows = self._file.do(
            "SELECT added, event, created, wire FROM events WHERE own = 1 AND added >= ?"
            " ORDER BY added LIMIT ?",
            start,
            SYNC_EVENTS_MAX + 1,
        )
        found, size = [], 0
        for row in rows:
            found.append(row)
            if len(found) > SYNC_EVENTS_MAX or size >= SYNC_BYTES_MAX:
                rows.close()
                break
            size += len(row[1])
        events: list[tuple[int, Event, Created]] = []
        size = 0
        for added, event, created, known in found:
            if len(events) == SYNC_EVENTS_MAX or size >= SYNC_BYTES_MAX:
                return Unsent(events, added)
            size += len(event)
            wire = known
            if known is None:
                wire = self._wire(created_of_text(created), difference_ms)
                self._file.do("UPDATE events SET wire = ? WHERE added = ?", wire, added)
                self._written = True
            events.append((added, _decode(event), created_of_text(wire)))
        self._unstamped = False
        return Unsent(events, None)

    def read(self, behind: int) -> list[LogEvent]:
        """The next events behind a number."""
        rows = self._file.do(
            "SELECT event, created, added FROM events WHERE added > ? ORDER BY added LIMIT ?",
            behind,
            PAGE_EVENTS_MAX,
        )
        events: list[LogEvent] = []
        size = 0
        for event, created, added in rows:
            events.append(LogEvent(_decode(event), created_of_text(created), added))
            size += len(event)
            if size >= PAGE_BYTES_MAX:
                rows.close()
                break
        return events

    def note(self, *, sent: int | None = None, received: Number | None = None) -> None:
        """Positions to write when there is occasion."""
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
        """The server's time of an event of our own, behind all that were given before."""
        self._told = following(self._told, Tick(created[0] - difference_ms, created[2]))
        wire = self._free("wire", [self._told.ms, self._host, self._told.number])
        self._told = Tick(wire[0], wire[2])
        return text_of(wire)

    def _free(self, column: str, created: Created) -> Created:
        """The time, or the next that no event has: clocks that were corrected may give one twice."""
        while self._is_there(column, text_of(created)):
            created = after(created)
        return created

    def _is_there(self, column: str, text: str) -> bool:
        return (
            self._file.do(f"SELECT 1 FROM events WHERE {column} = ?", text).fetchone() is not None
        )

    # The state

    def _make(self, log: str, host: str) -> None:
        with self._file.transaction():
            for statement in _SCHEMA.split(";"):
                self._file.do(statement)
            state = (log, host, 0, 0, *NEVER, *NEVER)
            self._file.do("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *state)
            self._file.made()

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
            *(self._sent, self._received, *self._made, *self._told),
        )
