"""Synchronise a local log with a server's: store received events, and offer added events to the session.

Nothing here waits. The store's jobs are requested, and their results arrive later, in order. The connection
may have ended by then. Its events are stored nevertheless, but no longer answered.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from headrace.client.logux.store import Done, Facts, Job, LogEvent, ReceptionPlace, Unsent
from headrace.payload.logux import Number
from headrace.session.client import Broken, ConnectionRefused
from headrace.session.logux.client import (
    EventsAcknowledged,
    LoguxClientSession,
    LoguxEvent,
    Opened,
    Passed,
    ReceivedEvents,
    Verify,
)

UNSTORED_EVENTS_MAX = 2000
"""Number of received events that are not stored yet. Above it the client stops reading."""


class Shell(Protocol):
    """The owner of the connection and the store's thread; it also informs the application."""

    def ask(self, job: Job, done: Done) -> None:
        """Run a job in the store."""

    def take(self, events: list[LoguxEvent]) -> None:
        """Process events that the session returned; the shell passes them to `handle`."""

    def read(self, reading: bool) -> None:
        """Resume or pause reading."""

    def changed(self) -> None:
        """Called when events were added or acknowledged."""

    def verify(self, question: Verify) -> None:
        """Verify the server, then call `LoguxSync.verified`. Reading is paused until then."""

    def refused(self, refusal: ConnectionRefused) -> None: ...


class LoguxSync:
    def __init__(
        self,
        session: LoguxClientSession,
        facts: Facts,
        shell: Shell,
        offset_ms: Callable[[], float],
    ) -> None:
        """Prepare for the first connection. `offset_ms` returns the local clock minus the session's clock."""
        self.last = facts.last
        """Number of the last event."""
        self.added = facts.unacknowledged
        self.acknowledged = 0
        """`added`: number of own events for the server. `acknowledged`: how many of them it has. Both count
        from the first event that was not acknowledged when the store was opened."""
        self._session = session
        self._shell = shell
        self._offset_ms = offset_ms
        self._difference_ms: int | None = None
        """Local clock minus server's clock, measured on this connection; None: not known yet."""
        self._connection = 0
        """Number of the connection: results of another connection's requests are not answered on this one."""
        self._receives = 0
        """Number of receptions on this connection."""
        self._unstored = 0
        self._is_verifying = False
        self._is_looking = False
        """True while the store looks for events to send."""

    @property
    def unacknowledged(self) -> int:
        return self.added - self.acknowledged

    def add(self, event: bytes, now_ms: int, done: Done) -> None:
        """Add an event of the application, in JSON; `done` gets the stored `LogEvent`."""
        difference_ms = self._difference_ms
        self._shell.ask(
            lambda store: store.add(event, now_ms, difference_ms), partial(self._added, done)
        )

    def handle(self, events: list[LoguxEvent]) -> None:
        for event in events:
            if isinstance(event, ReceivedEvents):
                self._receive(event)
            elif isinstance(event, Passed):
                self._note(received=event.received)
            elif isinstance(event, EventsAcknowledged):
                self.acknowledged += event.events
                self._note(sent=event.number)
                self._shell.changed()
            elif isinstance(event, Opened):
                self._open(event)
            elif isinstance(event, Verify):
                self._is_verifying = True
                self._shell.read(False)
                self._shell.verify(event)
            elif isinstance(event, ConnectionRefused):
                self._shell.refused(event)
        self._look()

    def verified(self, reason: str | None, now: float) -> None:
        """Accept the server, or reject it for a reason."""
        self._is_verifying = False
        self._shell.read(True)
        session = self._session
        self._shell.take(session.accept(now) if reason is None else session.reject(reason))

    def disconnected(self) -> None:
        self._connection += 1
        self._receives = 0
        self._is_verifying = False
        self._difference_ms = None

    # From the application to the server

    def _added(self, done: Done, result: LogEvent | Exception) -> None:
        if isinstance(result, LogEvent):
            self.last = result.added
            self.added += 1
            self._session.added(result.added, own=True)
            self._shell.changed()
            self._look()
        done(result)

    def _look(self) -> None:
        """Ask the store for events to send, if the session wants some."""
        start = self._session.wants
        difference_ms = self._difference_ms
        if start is None or difference_ms is None or self._is_looking:
            return
        self._is_looking = True
        self._shell.ask(
            lambda store: store.unsent(start, difference_ms), partial(self._found, self._connection)
        )

    def _found(self, connection: int, result: Unsent | Exception) -> None:
        self._is_looking = False
        if connection != self._connection or self._session.wants is None:
            self._look()
        elif isinstance(result, Exception):
            self._give_up(result)
        else:
            self._session.offer(result.events, result.rest)
            self._shell.take([])

    # From the server to the application

    def _open(self, event: Opened) -> None:
        self._difference_ms = round(self._offset_ms() - event.shift_ms)
        if self._unstored > UNSTORED_EVENTS_MAX:
            self._shell.read(False)  # events of an earlier connection are not stored yet

    def _receive(self, event: ReceivedEvents) -> None:
        difference_ms = self._difference_ms
        assert difference_ms is not None
        place = ReceptionPlace(self._connection, self._receives)
        self._receives += 1
        count = len(event.events)
        self._unstored += count
        if self._unstored > UNSTORED_EVENTS_MAX:
            self._shell.read(False)
        self._shell.ask(
            lambda store: store.receive(event.number, event.events, difference_ms, place),
            partial(self._stored, place.connection, event.number, count),
        )

    def _stored(self, connection: int, number: Number, count: int, result: int | Exception) -> None:
        if isinstance(result, int) and result > self.last:
            self.last = result
            self._session.added(result, own=False)
            self._shell.changed()
        self._unstored -= count
        if self._unstored <= UNSTORED_EVENTS_MAX // 2 and not self._is_verifying:
            self._shell.read(True)
        if connection != self._connection:
            return
        if isinstance(result, Exception):
            self._give_up(result)
            return
        self._shell.take(self._session.stored(number))

    def _note(self, *, sent: int | None = None, received: Number | None = None) -> None:
        # If this fails, a later note replaces it. Until then, some events may be exchanged again.
        self._shell.ask(lambda store: store.note(sent=sent, received=received), lambda _: None)

    def _give_up(self, error: Exception) -> None:
        """End the connection because the store failed: the next one asks for the server's events again."""
        self._shell.take([Broken(str(error))])
