"""The store's runner on a real event loop: one thread for commits, a few for other work."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_BACKGROUND_THREADS = 4


class LoopRunner:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._writes: queue.SimpleQueue[
            tuple[Callable[[], None], Callable[[BaseException | None], None]] | None
        ] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="commit", daemon=True)
        self._writer.start()
        self._pool = ThreadPoolExecutor(_BACKGROUND_THREADS, "background")
        self._closed = False

    def soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(self._call, call)

    def write(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self._writes.put((work, done))

    def background(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        def run() -> None:
            result: T | BaseException
            try:
                result = work()
            except BaseException as error:
                result = error
            self._loop.call_soon_threadsafe(self._call, done, result)

        self._pool.submit(run)

    def close(self) -> None:
        """Wait until the threads are done. Results are not reported any more: the store is closed next."""
        self._writes.put(None)
        self._writer.join()
        self._pool.shutdown()
        self._closed = True

    def _call(self, call: Callable[..., None], *results: object) -> None:
        if not self._closed:
            call(*results)

    def _write_all(self) -> None:
        while (item := self._writes.get()) is not None:
            work, done = item
            error: BaseException | None = None
            try:
                work()
            except BaseException as caught:
                error = caught
            self._loop.call_soon_threadsafe(self._call, done, error)
