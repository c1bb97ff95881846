"""Keeps a local log and a server's the same: what a session receives is stored, what is added it is offered.

Waits for nothing: jobs of the store are asked for, and what comes of them is told later, in their order. A
connection may be gone by then. What it has brought is stored all the same, and answered no more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from headrace.client.logux_store import Facts, Job, LogEvent, Place, Unsent
from headrace.logux_envelope import Number
from headrace.session.client import Broken
from headrace.session.logux_client import (
    Acknowledged,
    LoguxClientSession,
    LoguxEvent,
    Opened,
    Passed,
    Received,
    Refused,
    Verify,
)

UNSTORED_EVENTS_MAX = 2000
"""Received and not stored yet. Above it the client stops reading."""


class Shell(Protocol):
    """Who has the connection, the thread and the application."""

    def ask(self, job: Job, done: Callable[[Any], None]) -> None:
        """Have something done with the store; `done` with its result, or the exception."""

    def take(self, events: list[LoguxEvent]) -> None:
        """What the session said when it was told something: comes back to `handle`."""

    def read(self, reading: bool) -> None:
        """Go on reading, or stop."""

    def changed(self) -> None:
        """Events were added or acknowledged."""

    def verify(self, question: Verify) -> None:
        """Answer with `accept` or `reject`; nothing is read until then."""

    def refused(self, refusal: Refused) -> None: ...


class Add(NamedTuple):
    """An event of the application that is to be added."""

    event: bytes
    now_ms: int
    done: Callable[[LogEvent | Exception], None]


class LoguxSync:
    def __init__(
        self,
        session: LoguxClientSession,
        facts: Facts,
        shell: Shell,
        offset_ms: Callable[[], float],
    ) -> None:
        """`offset_ms`: the local clock less the one that the session is told."""
        self.last = facts.last
        """The number of the last event."""
        self.added = facts.unacknowledged
        self.acknowledged = 0
        """How many events of our own there are for the server, and how many of them it has: both counted
        from those that it was not known to have when the store was opened."""
        self._session = session
        self._shell = shell
        self._offset_ms = offset_ms
        self._difference_ms: int | None = None
        """The local clock less the server's, on this connection."""
        self._connection = 0
        """Which it is: what was asked for on another is not answered on this one."""
        self._receives = 0
        """How many receptions there were on this connection."""
        self._unstored = 0
        self._is_verifying = False
        self._is_looking = False
        """Whether the store is being asked for events to send."""

    @property
    def unacknowledged(self) -> int:
        return self.added - self.acknowledged

    def add(self, addition: Add) -> None:
        difference_ms = self._difference_ms
        self._shell.ask(
            lambda store: store.add(addition.event, addition.now_ms, difference_ms),
            partial(self._added, addition),
        )

    def handle(self, events: list[LoguxEvent]) -> None:
        for event in events:
            if isinstance(event, Received):
                self._receive(event)
            elif isinstance(event, Passed):
                self._note(received=event.received)
            elif isinstance(event, Acknowledged):
                self._acknowledge(event)
            elif isinstance(event, Opened):
                self._open(event)
            elif isinstance(event, Verify):
                self._is_verifying = True
                self._shell.read(False)
                self._shell.verify(event)
            elif isinstance(event, Refused):
                self._shell.refused(event)
        self._look()

    def verified(self, reason: str | None, now: float) -> None:
        """The peer is the one that is meant, or there is a reason why not."""
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

    def _added(self, addition: Add, result: LogEvent | Exception) -> None:
        if isinstance(result, LogEvent):
            self.last = result.added
            self.added += 1
            self._session.added(result.added, own=True)
            self._shell.changed()
            self._look()
        addition.done(result)

    def _look(self) -> None:
        """Look for events to send, if the session wants some."""
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

    def _acknowledge(self, event: Acknowledged) -> None:
        self.acknowledged += event.events
        self._note(sent=event.number)
        self._shell.changed()

    # From the server to the application

    def _open(self, event: Opened) -> None:
        self._difference_ms = round(self._offset_ms() - event.shift_ms)
        if self._unstored > UNSTORED_EVENTS_MAX:
            self._shell.read(False)  # what an earlier connection has brought

    def _receive(self, event: Received) -> None:
        difference_ms = self._difference_ms
        assert difference_ms is not None
        place = Place(self._connection, self._receives)
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
        # When it fails, a later one takes its place; until then more is exchanged than need be.
        self._shell.ask(lambda store: store.note(sent=sent, received=received), lambda _: None)

    def _give_up(self, error: Exception) -> None:
        """The store fails: what the server has sent must be asked for again."""
        self._shell.take([Broken(str(error))])
