"""Turns: shares each iteration of the event loop among busy connections. Knows nothing of their work.

Every callback that a connection schedules for itself runs once per iteration. With 40 busy connections an
iteration would take 40 times as long, and a publish, which takes a few iterations, would wait for all of
them. So busy connections queue here: one after the other does a small piece of work, until the turn is over.
The queue holds a connection at most twice: for its commands and for its deliveries.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

TURN_S_MAX = 0.005
"""Time for the work of all busy connections in one iteration of the loop."""
TURN_PIECES_MAX = 10
"""Pieces of work in one iteration, however short they are."""


class Turns:
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
