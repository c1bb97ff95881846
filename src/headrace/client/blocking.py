"""The base of blocking clients: the thread of their asynchronous client, calls into it, and its end."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

from headrace.client.lifecycle import Lifecycle
from headrace.errors import ClientClosedError, LocalProtocolError
from headrace.session.client import ConnectionState

T = TypeVar("T")
C = TypeVar("C", bound=Lifecycle[Any])
"""Type of the asynchronous client."""


class Blocking(Generic[C]):
    """A client whose methods wait. Every method may be called from any thread.

    Handlers run in the client's thread and must not block it: there, methods that would make the thread wait
    for itself raise LocalProtocolError.
    """

    _advice: str
    """Text of that error: what to call instead."""

    def __init__(self, client: C, shared: "ClientThread | None" = None) -> None:
        """Enter the client in a new thread, or use `shared`, where it is entered and which outlives it."""
        self._client = client
        self._is_shared = shared is not None
        self._thread = shared or ClientThread(client, self._advice)
        if shared is None:
            self._thread.start()

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def state(self) -> ConnectionState:
        return self._client.state

    @property
    def latency_s(self) -> float | None:
        """Round trip to the server, from the last answered ping; None before the first."""
        return self._client.latency_s

    @property
    def last_error(self) -> str:
        """Reason why the last connection or attempt ended; empty while connected."""
        return self._client.last_error

    def close(self, flush_s: float | None = None) -> None:
        """Wait up to `flush_s` (default `flush_timeout_s`) for the server to have everything, then end.

        Raises UnacknowledgedError if the server does not have all messages by then. With 0 it neither waits
        nor raises.
        """
        self._close(lambda: self._client.close(flush_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(lambda: self._client.__aexit__(kind, error, trace))

    def _close(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._thread.check()
        try:
            with suppress(ClientClosedError):  # closed by another thread
                self._thread.call(close)
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        if not self._is_shared:
            self._thread.end()


class ClientThread:
    """A thread with an event loop, in which an asynchronous client is entered, used and closed."""

    def __init__(self, client: Lifecycle[Any], advice: str) -> None:
        """Prepare the thread. `advice` is the error for methods that would make it wait for itself."""
        import uvloop  # on first use: asynchronous clients do not need it

        self.lock = threading.Condition()
        """Guards `is_closed` and all that the blocking client shares with the thread; notified at changes."""
        self.is_closed = False
        self.loop = uvloop.new_event_loop()
        self._client = client
        self._advice = advice
        self._stop = asyncio.Event()
        self._entered: Future[None] = Future()
        name = f"headrace {client.url}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Wait until the client is entered; raise the exception of a client that cannot be entered."""
        self._thread.start()
        try:
            self._entered.result()
        except BaseException:
            self.is_closed = True
            if self._entered.done():
                self._thread.join()
            else:  # interrupted: the thread ends once the client is entered or has failed
                self.loop.call_soon_threadsafe(self._stop.set)
            raise

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def check(self) -> None:
        """Raise LocalProtocolError if the caller is this thread, which would wait for itself."""
        if self.is_current:
            raise LocalProtocolError(self._advice)

    def check_open(self) -> None:
        if self.is_closed:
            raise ClientClosedError("the client is closed")

    def begin(self, function: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Start a coroutine in the thread and return its future."""
        with self.lock:
            self.check_open()
            return asyncio.run_coroutine_threadsafe(function(), self.loop)

    def call(
        self, function: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None
    ) -> T:
        """Run a coroutine in the thread and wait for its result."""
        self.check()

        async def run() -> T:
            async with asyncio.timeout(timeout_s):
                return await function()

        try:
            return self.begin(run).result()
        except CancelledError:
            raise ClientClosedError("the client is closed") from None

    def soon(self, call: Callable[[], None]) -> None:
        """Schedule a call in the thread, unless the client is closed."""
        with self.lock:
            if not self.is_closed:
                self.loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Refuse new calls and let the thread end. Also used when the client has ended by itself."""
        with self.lock:
            if not self.is_closed:
                self.is_closed = True
                self.lock.notify_all()
                self.loop.call_soon_threadsafe(self._stop.set)

    def end(self) -> None:
        """Close, and wait until the thread has ended (unless the caller is the thread)."""
        self.close()
        if not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        try:
            await self._client
        except BaseException as error:  # raised again in `start`
            self._entered.set_exception(error)
            return
        self._entered.set_result(None)
        await self._stop.wait()
        await self._client.close(flush_s=0)
