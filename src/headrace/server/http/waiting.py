"""Requests that wait until a topic changes. A change wakes them; none of them polls the store."""

import asyncio

from headrace.errors import HeadraceError
from headrace.log.store import Store

WAITING_MAX = 1000
"""Requests that wait at the same time. Every commit wakes all of them."""


class TooManyWaitingError(HeadraceError):
    """No more requests can wait now. The client asks again in a while."""


class LongPolls:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._count = 0
        self._changed = asyncio.Event()
        self._closed = False
        store.watch(self._wake)

    async def change(self, since: int, timeout_s: float) -> bool:
        """Return True if the store's version differs from `since`, now or within `timeout_s`."""
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
        """Wake all requests: the server stops."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._count:
            self._changed.set()
            self._changed = asyncio.Event()
