"""The thread in which a blocking client runs its asynchronous client, and calls from other threads.

It is independent of the kind of client.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from headrace.errors import ClientClosedError, LocalProtocolError

T = TypeVar("T")


class ClientThread:
    def __init__(
        self,
        name: str,
        enter: Callable[[], Awaitable[object]],
        leave: Callable[[], Awaitable[None]],
        advice: str,
    ) -> None:
        """Prepare the thread. `enter` runs in it first and `leave` last.

        `advice` is the message of the error for methods that would make the thread wait for itself.
        """
        self.lock = threading.Condition()
        """Guards `is_closed` and all that the blocking client shares with the thread; notified at changes."""
        self.is_closed = False
        self.loop = new_event_loop()
        self._enter = enter
        self._leave = leave
        self._advice = advice
        self._stop = asyncio.Event()
        self._entered: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Wait until the client is entered; raise any exception that `enter` raises."""
        self._thread.start()
        try:
            self._entered.result()
        except BaseException:
            self.is_closed = True
            if self._entered.done():
                self._thread.join()
            else:  # interrupted: the thread ends when `enter` returns or raises
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
            await self._enter()
        except BaseException as error:  # raised again in `start`
            self._entered.set_exception(error)
            return
        self._entered.set_result(None)
        await self._stop.wait()
        await self._leave()


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not available on every system; asyncio's loop is slower but equivalent
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
