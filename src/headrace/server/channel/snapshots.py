"""Snapshots of channels in a PostgreSQL database: one thread executes all calls in order. Knows no SQL.

    loop: load, save ──▶ queue ──▶ thread: connect if need be, try ──▶ loop: done or failed

Every call is answered within `CALL_S_MAX`, whatever the database does. While the database is unavailable,
calls fail at once, and now and then one of them tries to connect again. A failed call may have taken effect
in the database; calls may be repeated.

If the server kept its snapshots as notes before, a note that is later than the database's snapshot counts.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from headrace.broker.channel.channel import Done, Failed, Loaded
from headrace.broker.channel.notes import StoredSnapshot, read_snapshot
from headrace.broker.channel.snapshots import OLDER_MAX, Older
from headrace.errors import ConfigError
from headrace.log.store import Store
from headrace.model import CHANNEL_PREFIX
from headrace.printing import described, quoted

logger = logging.getLogger(__name__)

CALL_S_MAX = 10.0
CALLS_MAX = 10_000
"""Calls that are not answered yet. Further calls fail."""
CALLS_BYTES_MAX = 64 << 20
"""Bytes of snapshots in calls that are not answered yet. Further calls fail."""

BACKOFF_S_MIN, BACKOFF_S_MAX = 0.25, 5.0
"""Shortest and longest delay before the next attempt to connect. The delay doubles each time."""

_CLOSE_S_MAX = 2.0
_NOT_AVAILABLE = "PostgreSQL is not available"

T = TypeVar("T")


class DatabaseError(Exception):
    """Error of the database. The text is for operators: it may contain the database's address and user."""

    def __init__(self, text: str, *, is_down: bool) -> None:
        super().__init__(text)
        self.is_down = is_down
        """True if any other call would fail too."""


class Database(Protocol):
    """An open connection. All methods except `cut` may raise `DatabaseError`."""

    @property
    def is_lost(self) -> bool: ...

    def load(self, channel: str) -> StoredSnapshot | None: ...

    def save(self, channel: str, snapshot: StoredSnapshot) -> None: ...

    def remove(self, channel: str) -> None: ...

    def older(self, before_ms: int, after: str, limit: int) -> list[str]:
        """Return names of channels with a snapshot from before a time, in the order of their bytes."""

    def cut(self) -> None:
        """End the current call with an error. Called from another thread."""

    def close(self) -> None: ...


class PostgresSnapshots:
    """Implements `Snapshots`."""

    are_notes = False

    def __init__(self, store: Store, connect: Callable[[], Database]) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._calls = self._bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Event()
        self._is_closed = False
        self._thread = _Thread(connect, self._on_loop, self._ended.set)
        # An empty call connects, so that the server knows from the start if the database is available.
        self._ask(lambda _: None, lambda _: None, lambda _: None)

    def load(self, channel: str, done: Loaded, failed: Failed) -> None:
        def loaded(found: StoredSnapshot | None) -> None:
            topic = CHANNEL_PREFIX + channel
            if found is not None and found.offset > self._store.look(topic).end_offset:
                # If the snapshot were used, it would hide every message before its offset.
                name = quoted(channel)
                failed(f"PostgreSQL has a snapshot of {name} from another data directory")
                return
            note = read_snapshot(self._store, channel)
            is_later = note is not None and (found is None or found.offset < note.offset)
            done(note if is_later else found)

        self._ask(lambda database: database.load(channel), loaded, failed)

    def save(self, channel: str, snapshot: StoredSnapshot, done: Done, failed: Failed) -> None:
        size = len(snapshot.content.data)
        self._ask(lambda database: database.save(channel, snapshot), lambda _: done(), failed, size)

    def remove(self, channel: str, done: Done, failed: Failed) -> None:
        self._ask(lambda database: database.remove(channel), lambda _: done(), failed)

    def older(
        self, before_ms: int, after: str, done: Callable[[Older], None], failed: Failed
    ) -> None:
        def found(names: list[str]) -> None:
            done(Older(names, names[-1] if len(names) == OLDER_MAX else None))

        self._ask(lambda database: database.older(before_ms, after, OLDER_MAX), found, failed)

    async def close(self) -> None:
        """End the thread after all calls, and after the calls that their callbacks make at once."""
        while self._calls:
            await self._idle.wait()
        self._is_closed = True
        self._thread.calls.put(None)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _CLOSE_S_MAX)

    def _ask(
        self,
        work: Callable[[Database], T],
        done: Callable[[T], None],
        failed: Failed,
        size: int = 0,
    ) -> None:
        if self._is_closed:
            failed("the server is stopping")
            return
        if self._calls >= CALLS_MAX or self._bytes + size > CALLS_BYTES_MAX:
            failed(f"{self._calls} calls are already waiting for PostgreSQL")
            return
        self._calls += 1
        self._bytes += size
        self._idle.clear()
        call: _Call

        def answer(result: T | str, is_done: bool) -> None:
            if call.is_over:
                return
            call.is_over = True
            timer.cancel()
            self._bytes -= size
            try:
                done(result) if is_done else failed(result)  # type: ignore[arg-type]
            finally:
                # The count falls only now, so that `close` also waits for calls that the callback has made.
                self._calls -= 1
                if not self._calls:
                    self._idle.set()

        def too_late() -> None:
            self._thread.give_up(call)
            answer(f"PostgreSQL has not answered within {CALL_S_MAX:g} s", False)

        call = _Call(work, answer)
        timer = self._loop.call_later(CALL_S_MAX, too_late)
        self._thread.calls.put(call)

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            self._loop.call_soon_threadsafe(call, *args)


def make_postgres(url: str, store: Store) -> PostgresSnapshots | None:
    """Return the store of snapshots at a URL; None without a URL. Raises `ConfigError`."""
    if not url:
        return None
    try:
        from headrace.server.channel import postgres
    except ImportError as error:
        raise ConfigError(
            f"channels.snapshots_url needs psycopg, which cannot be loaded ({error}): "
            "pip install 'headrace[postgres]'"
        ) from None
    return PostgresSnapshots(store, postgres.connector(url))


@dataclass(slots=True, eq=False)
class _Call:
    work: Callable[[Database], Any]
    answer: Callable[[Any, bool], None]
    """Called on the loop, with a result and True or with a reason and False."""
    is_over: bool = False
    """True once the call is answered. Only the loop sets it."""


class _Thread:
    """The thread and its state, which no other thread touches except through `calls` and `give_up`."""

    def __init__(
        self, connect: Callable[[], Database], on_loop: Callable[..., None], ended: Done
    ) -> None:
        self._connect = connect
        self._on_loop = on_loop
        self._ended = ended
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """Calls in their order. None ends the thread."""
        self._database: Database | None = None
        self._call: _Call | None = None
        """The call that is being executed."""
        self._backoff_s = 0.0
        self._away_until_s = 0.0
        self._trouble = ""
        threading.Thread(target=self._run, name="snapshots", daemon=True).start()

    def give_up(self, call: _Call) -> None:
        """Abort a call. Called on the loop. If that hits the next call instead, the next call is retried."""
        database = self._database
        if self._call is call and database is not None:
            database.cut()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            if call.is_over:
                continue
            self._call = call
            try:
                result = self._try(call)
            except Exception as error:
                self._on_loop(call.answer, self._failed(error, is_late=call.is_over), False)
            else:
                self._succeeded()
                self._on_loop(call.answer, result, True)
            self._call = None
        self._drop()
        self._on_loop(self._ended)

    def _try(self, call: _Call) -> Any:
        if self._database is not None:
            try:
                return call.work(self._database)
            except DatabaseError:
                if call.is_over or not self._database.is_lost:
                    raise
                self._drop()  # it may have ended long ago, so try a new connection
        if time.monotonic() < self._away_until_s:
            raise _AwayError
        self._database = self._connect()
        return call.work(self._database)

    def _failed(self, error: Exception, *, is_late: bool) -> str:
        """Log the error, and return the reason for the caller."""
        if isinstance(error, _AwayError):
            return _NOT_AVAILABLE
        self._drop()
        is_down = not isinstance(error, DatabaseError) or error.is_down
        if is_down:
            self._backoff_s = min(max(2 * self._backoff_s, BACKOFF_S_MIN), BACKOFF_S_MAX)
            self._away_until_s = time.monotonic() + self._backoff_s
        trouble = str(error) if isinstance(error, DatabaseError) else described(error)
        if is_late:
            trouble = "PostgreSQL has not answered in time"  # `cut` caused the error
        if trouble != self._trouble:
            self._trouble = trouble
            logger.warning(
                "PostgreSQL does not store snapshots of channels at the moment: %s", trouble
            )
        return _NOT_AVAILABLE if is_down else "PostgreSQL refuses the snapshot"

    def _succeeded(self) -> None:
        self._backoff_s = 0.0
        if self._trouble:
            self._trouble = ""
            logger.info("PostgreSQL stores snapshots of channels again")

    def _drop(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(Exception):
                database.close()


class _AwayError(Exception):
    """Raised if it is too early to connect again."""
