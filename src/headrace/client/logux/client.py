"""The Logux client of an application: a log of events. Elsewhere: frames, stores and sockets.

A client belongs to one event loop and is not safe to use from other threads.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from headrace.client.entering import wait_for_connection
from headrace.client.lifecycle import Handlers
from headrace.client.logux.events import LogEvents, check_event
from headrace.client.logux.open import OpenLog
from headrace.client.logux.options import LoguxOptions
from headrace.client.logux.store import LogEvent, is_in_memory
from headrace.client.logux.sync import LocalAdd
from headrace.client.transport.connection import MakeConnection
from headrace.errors import (
    ClientClosedError,
    LocalProtocolError,
    RefusedError,
    UnacknowledgedError,
)
from headrace.payload.logux import Created, Event
from headrace.printing import described
from headrace.session.topics.client import ConnectionState

T = TypeVar("T")


class LoguxClient:
    """A local log of events that is synchronised with a server's log while the two are connected.

    Use `async with connect(url, store=path) as log`, or `log = await connect(...)` and `log.close()`.
    """

    def __init__(
        self, url: str, log: str, make_connection: MakeConnection, options: LoguxOptions
    ) -> None:
        self.url = url
        self.log = log
        self.options = options
        self._make_connection = make_connection
        self._handlers = Handlers("state")
        self._open: OpenLog | None = None
        self._opening = asyncio.Lock()
        self._closed: ClientClosedError | None = None
        self._closing: asyncio.Task[None] | None = None
        # Set and cleared in one step: this wakes all waiting tasks, which then check their condition again.
        self._changes = asyncio.Event()

    @property
    def host(self) -> str:
        """Name of this client, as it appears in the times of its events."""
        return self._entered().host

    @property
    def state(self) -> ConnectionState:
        if self._open is not None:
            return self._open.session.state
        return ConnectionState.CLOSED if self._closed else ConnectionState.DISCONNECTED

    @property
    def latency_s(self) -> float | None:
        """Round trip to the server, from the last answered ping; None before the first."""
        return self._open.session.latency_s if self._open is not None else None

    @property
    def last_error(self) -> str:
        """Reason why the last connection or attempt ended; while connected, the server's last complaint."""
        if self._open is None:
            return ""
        return self._open.link.last_error or self._open.session.complaint

    @property
    def unacknowledged(self) -> int:
        """Number of own events that the server has not acknowledged."""
        return self._open.sync.unacknowledged if self._open is not None else 0

    async def add(self, event: Event) -> Created:
        """Add an event to the log, also without a connection; return its time once it is stored.

        Raises BadEventError or PayloadTooLargeError if a log cannot hold the event, LocalStoreError if
        storing it failed. If the call is cancelled, the event may still be added.
        """
        log = self._entered()
        added: asyncio.Future[LogEvent] = asyncio.get_running_loop().create_future()
        data = check_event(event, log.host)
        log.sync.add(LocalAdd(data, int(time.time() * 1000), lambda result: _settle(added, result)))
        return (await added).created

    def events(self, after: int = 0) -> LogEvents:
        """Iterate over all events after a number, in this log's order, then wait for new ones.

        The events are those of this client and of others. If the iteration would wait although the connection
        is refused for good, it raises RefusedError.
        """
        self._entered()
        return LogEvents(self, after)

    async def synced(self) -> None:
        """Wait until the server has every event added so far; raise RefusedError if it never will."""
        sync = self._entered().sync
        until = sync.added
        await self._wait(lambda: sync.acknowledged >= until)

    async def connected(self) -> None:
        """Wait until there is a connection; raise RefusedError if there will be none."""
        await self._wait(lambda: self.state is ConnectionState.CONNECTED)

    def on(
        self, event: Literal["state"], handler: Callable[[ConnectionState], object]
    ) -> Callable[[], None]:
        """Call `handler` with the state at every change; return a function that removes the handler."""
        return self._handlers.add(event, handler)

    async def close(self, flush_s: float | None = None) -> None:
        """Wait up to `flush_s` (default `flush_timeout_s`) for the server to have everything, then end.

        A file keeps unsent events, so with a file it does not wait while disconnected. A store in memory
        loses them: UnacknowledgedError says how many. With 0 it neither waits nor raises.
        """
        flush_s = self.options.flush_timeout_s if flush_s is None else flush_s
        try:
            if flush_s > 0 and self._open is not None and self._closed is None:
                await self._flush(flush_s)
        finally:
            self._shut(ClientClosedError("the client is closed"))
            if self._open is not None:
                if self._closing is None:
                    self._closing = asyncio.get_running_loop().create_task(self._open.close())
                await asyncio.shield(self._closing)

    async def page(self, behind: int) -> list[LogEvent]:
        """For iterators: wait for the next events after a number; return none if the client is closed."""
        try:
            log = self._entered()
            await self._wait(lambda: log.sync.last > behind)
        except ClientClosedError:
            return []
        page: asyncio.Future[list[LogEvent]] = asyncio.get_running_loop().create_future()
        log.ask(lambda store: store.read(behind), lambda result: _settle(page, result))
        return await page

    async def __aenter__(self) -> Self:
        if self._closed is not None:
            raise self._closed
        async with self._opening:
            if self._open is None:
                self._open = await OpenLog.open(
                    self.log,
                    self._make_connection,
                    self.options,
                    changed=self._wake,
                    state_changed=self._state_changed,
                    failed=self._failed,
                )
        try:
            self._entered()  # the client may have been closed meanwhile
            await wait_for_connection(
                self.options.connect_timeout_s,
                self.connected,
                what=f"no connection to {self.url}",
                last_error=lambda: self.last_error,
            )
        except BaseException:
            await self.close(flush_s=0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Waiting would delay the error that is being raised, and a second error would hide it.
        await self.close(flush_s=None if error is None else 0)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def _entered(self) -> OpenLog:
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        if self._open is None:
            raise LocalProtocolError("enter the client first: `async with` or `await` it")
        return self._open

    async def _wait(self, done: Callable[[], bool]) -> None:
        log = self._entered()
        while not done():
            if log.refusal is not None:
                raise log.refusal.with_traceback(None)
            await self._changes.wait()
            self._entered()

    async def _flush(self, flush_s: float) -> None:
        in_memory = is_in_memory(self.options.store)

        def is_over() -> bool:
            # A running attempt may succeed. The backoff before the next attempt is not worth waiting for.
            no_hope = self.state is ConnectionState.DISCONNECTED and not in_memory
            return no_hope or self.unacknowledged == 0

        with suppress(TimeoutError, ClientClosedError, RefusedError):
            async with asyncio.timeout(flush_s):
                await self._wait(is_over)
        if in_memory and self.unacknowledged:
            raise UnacknowledgedError(self.unacknowledged)

    def _wake(self) -> None:
        self._changes.set()
        self._changes.clear()

    def _state_changed(self, state: ConnectionState) -> None:
        self._wake()
        self._handlers.tell("state", state)

    def _failed(self, error: BaseException) -> None:
        closed = ClientClosedError(f"the client failed: {described(error)}")
        closed.__cause__ = error
        self._shut(closed)
        if self._open is not None:
            self._open.session.close()
        self._handlers.tell("state", ConnectionState.CLOSED)

    def _shut(self, error: ClientClosedError) -> None:
        """Refuse everything from now on, and wake all waiting tasks."""
        if self._closed is None:
            self._closed = error
            self._wake()


def _settle(future: "asyncio.Future[T]", result: T | Exception) -> None:
    if future.done():  # cancelled
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
