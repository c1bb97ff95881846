"""The life of a client: enter, connect, tell states, wait, close. It serves topics, Logux logs and channels.

A protocol supplies a session, a way to dial and a function that handles the session's events. It begins with
`_start`, says with `_flush` what closing waits for, and fails its pending calls in `_fail_pending`.
Connections, retries and pings are the business of `link.py` and of the session.
"""

import asyncio
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, Literal, Self, TypeVar

from headrace.client.link import Link, LinkOptions
from headrace.client.transport import MakeConnection
from headrace.errors import (
    ClientClosedError,
    ClientError,
    ConnectTimeoutError,
    LocalProtocolError,
    RefusedError,
)
from headrace.printing import described
from headrace.session.client import ConnectionState, E, LinkedSession

T = TypeVar("T")
EventHandler = Callable[[T], object]
"""Function that is called with every event of a kind; its result is ignored."""
Remove = Callable[[], None]
"""Function that removes a handler."""


class Lifecycle(Generic[E]):
    """A client that an application enters, uses and closes. It belongs to one event loop."""

    _noun = "client"
    """Name of the client in error messages."""

    def __init__(self, url: str, options: LinkOptions, *events: str) -> None:
        """Prepare the client. `events` are the kinds of events besides `state` that it has handlers for."""
        self.url = url
        self.options = options
        self._handlers: dict[str, list[EventHandler[Any]]] = {
            name: [] for name in ("state", *events)
        }
        self._link: Link[E] | None = None
        self._is_closed = False
        """True after `close` has finished waiting for acknowledgements."""
        self._final_error: ClientError | None = None
        """Error that ended the client for good; None before its end."""
        self._refusal: RefusedError | None = None
        """Reason why the client does not connect again, set by subclasses. Other calls still work."""
        # Set and cleared in one step: this wakes all waiting tasks, which then check their condition again.
        self._changes = asyncio.Event()

    @property
    def state(self) -> ConnectionState:
        if self._link is not None:
            return self._link.session.state
        return ConnectionState.DISCONNECTED if self._final_error is None else ConnectionState.CLOSED

    @property
    def latency_s(self) -> float | None:
        """Round trip to the server, from the last answered ping; None before the first."""
        return self._link.session.latency_s if self._link is not None else None

    @property
    def last_error(self) -> str:
        """Reason why the last connection or attempt ended; empty while connected."""
        return self._link.last_error if self._link is not None else ""

    def on(self, event: Literal["state"], handler: EventHandler[ConnectionState]) -> Remove:
        """Call `handler` with the state at every change; return a function that removes the handler."""
        return self._add_handler(event, handler)

    async def connected(self) -> None:
        """Wait until there is a connection; raise RefusedError if there will be none."""
        await self._wait(lambda: self.state is ConnectionState.CONNECTED)

    async def close(self, flush_s: float | None = None) -> None:
        """Wait up to `flush_s` (default `flush_timeout_s`) for the server to have everything, then end.

        Raises UnacknowledgedError if the server does not have all messages by then. With 0 it neither waits
        nor raises. Iterations end; futures and waiting calls raise ClientClosedError.
        """
        flush_s = self.options.flush_timeout_s if flush_s is None else flush_s
        try:
            if flush_s > 0 and self._link is not None and not self._is_closed:
                await self._flush(flush_s)
        finally:
            self._is_closed = True
            self._end(ClientClosedError(f"the {self._noun} is closed"))
            await self._stop(abort=flush_s == 0)

    async def __aenter__(self) -> Self:
        if self._final_error is not None:
            raise self._final_error.with_traceback(None)
        await self._start()
        try:
            self._require_link()  # the client may have been closed meanwhile
            await self._first_connection()
        except BaseException:
            await self.close(flush_s=0)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Waiting would delay the error that is being raised, and a second error would hide it.
        await self.close(flush_s=None if error is None else 0)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    # Methods that each protocol implements

    async def _start(self) -> None:
        """Prepare everything and connect; do nothing if that was done before."""
        raise NotImplementedError

    async def _flush(self, flush_s: float) -> None:
        """Wait up to `flush_s` until the server has everything; raise UnacknowledgedError if it has not."""

    def _fail_pending(self, error: ClientError) -> None:
        """Fail all calls that wait for the server, because the client has ended."""

    # Methods that protocols call

    def _connect(
        self,
        session: LinkedSession[E],
        make_connection: MakeConnection,
        handle: Callable[[list[E]], None],
    ) -> Link[E]:
        """Connect the session, and keep it connected until the client ends."""
        self._link = Link(
            session,
            make_connection,
            self.options,
            handle=handle,
            changed=self._state_changed,
            failed=self._failed,
        )
        return self._link

    def _require_link(self) -> Link[E]:
        """Return the link; raise if the client is not entered yet, or has ended."""
        if self._final_error is not None:
            raise self._final_error.with_traceback(None)
        if self._link is None:
            raise LocalProtocolError(f"enter the {self._noun} first: `async with` or `await` it")
        return self._link

    async def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done` returns True; raise if the client ends, or there will be no connection."""
        self._require_link()
        while not done():
            if self._refusal is not None:
                raise self._refusal.with_traceback(None)
            await self._changes.wait()
            self._require_link()

    def _wake(self) -> None:
        """Let all waiting tasks check their condition again."""
        self._changes.set()
        self._changes.clear()

    def _end(self, error: ClientError) -> None:
        """Refuse everything from now on, and fail all pending calls."""
        if self._final_error is None:
            self._final_error = error
            self._fail_pending(error)
            self._wake()

    async def _stop(self, abort: bool) -> None:
        """Disconnect for good. With `abort`, bytes that are not sent yet are dropped."""
        link = self._link
        if link is not None:
            await link.stop(abort)
            if link.session.state is not ConnectionState.CLOSED:
                link.session.close()
                self._state_changed(ConnectionState.CLOSED)

    def _not_connected_text(self) -> str:
        """Return the beginning of the error for a client that was not connected in time."""
        return f"no connection to {self.url}"

    async def _first_connection(self) -> None:
        timeout_s = self.options.connect_timeout_s
        if timeout_s is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.connected()
        except TimeoutError:
            reason = self.last_error or "no answer"
            raise ConnectTimeoutError(
                f"{self._not_connected_text()} within {timeout_s:g} s: {reason}"
            ) from None

    def _add_handler(self, name: str, handler: EventHandler[Any]) -> Remove:
        if name not in self._handlers:
            raise ValueError(f"there is no event {name!r}, only {', '.join(self._handlers)}")
        handlers = self._handlers[name]
        handlers.append(handler)

        def remove() -> None:
            if handler in handlers:
                handlers.remove(handler)

        return remove

    def _tell(self, name: str, event: object) -> None:
        """Call the handlers at once, so that they learn of a gap before the messages after it are taken."""
        for handler in tuple(self._handlers[name]):
            try:
                handler(event)
            except Exception as error:  # of the handler, and not of the connection
                report(f"a handler of {name!r} events failed", error)

    # Reports of the link

    def _state_changed(self, state: ConnectionState) -> None:
        self._wake()
        self._tell("state", state)

    def _failed(self, error: BaseException) -> None:
        """Called when the link has failed because of an internal error."""
        closed = ClientClosedError(f"the client failed: {described(error)}")
        closed.__cause__ = error
        self._end(closed)
        if self._link is not None:
            self._link.session.close()
        self._state_changed(ConnectionState.CLOSED)


def report(message: str, error: BaseException) -> None:
    """Report an error of the application's code to the event loop."""
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


def fail_quietly(futures: "Iterable[asyncio.Future[Any]]", error: Exception) -> None:
    """Fail all futures that are not done, without a warning if nothing awaits them."""
    for future in futures:
        if not future.done():
            future.set_exception(error)
            future.exception()


def settle(future: "asyncio.Future[Any] | None", result: object) -> None:
    """Resolve a future with a result or an exception, unless it is None or was cancelled."""
    if future is None or future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
