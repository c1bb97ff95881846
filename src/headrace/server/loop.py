"""Work on the event loop: turns of busy connections, and threads that report back to it.

Every callback that a connection schedules for itself runs once per iteration. With 40 busy connections an
iteration would take 40 times as long, and a publish, which takes a few iterations, would wait for all of
them. So busy connections take turns: one after the other does a small piece of work, until the turn is over.

The store waits for the disk in threads: one writes commits, and a few do other work.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

TURN_S_MAX = 0.005
"""Time for the work of all busy connections in one iteration of the loop."""
TURN_PIECES_MAX = 10
"""Pieces of work in one iteration, however short they are."""


class Turns:
    """Pieces of work that wait for their turn: of a connection at most its commands and its deliveries."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._ended = False

    def later(self, piece: Callable[[], None]) -> None:
        """Call `piece` when its turn comes; a connection with more to do calls this again."""
        self._waiting.append(piece)
        self._schedule()

    def end(self) -> None:
        """End the turn after the current piece, which has caused work outside turns, such as a large read."""
        self._ended = True

    def _schedule(self) -> None:
        if not self._scheduled and self._waiting:
            self._scheduled = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._scheduled = self._ended = False
        until_s = time.monotonic() + TURN_S_MAX
        try:
            for _ in range(TURN_PIECES_MAX):
                if self._ended or not self._waiting:
                    break
                self._waiting.popleft()()
                if time.monotonic() > until_s:
                    break
        finally:
            # The others continue also after an internal error of one connection, which the loop reports.
            self._schedule()


_BACKGROUND_THREADS = 4


class LoopRunner:
    """Implements the store's `Runner`: one thread for commits, a few for other work."""

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
        self._pool.submit(self._run, work, done)

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
            self._run(*item)

    def _run(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        """Do the work in this thread. The loop calls `done` with the result or the exception."""
        result: T | BaseException
        try:
            result = work()
        except BaseException as error:
            result = error
        self._loop.call_soon_threadsafe(self._call, done, result)
