"""Requests that wait until a topic changes. They are woken, none of them looks again and again."""

import asyncio

from headrace.errors import HeadraceError
from headrace.log.store import Store

WAITING_MAX = 1000
"""Requests that wait at once; each is woken by every commit."""


class TooManyWaitingError(HeadraceError):
    """No more requests can wait now: ask again in a while."""


class Waiting:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._count = 0
        self._changed = asyncio.Event()
        self._closed = False
        store.watch(self._wake)

    async def change(self, since: int, timeout_s: float) -> bool:
        """Whether the store's version is another than `since`, now or within the time given."""
        if self._store.version != since or self._closed or not timeout_s:
            return self._store.version != since
        if self._count >= WAITING_MAX:
            raise TooManyWaitingError
        self._count += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._count -= 1
        return self._store.version != since

    def close(self) -> None:
        """Let all of them go: the server stops."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._count:
            self._changed.set()
            self._changed = asyncio.Event()
