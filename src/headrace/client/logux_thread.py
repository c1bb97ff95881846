"""The thread that a local log is kept in, so that the event loop never waits for the disk.

What was asked for while a transaction is under way is the next one: many events cost one write.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.client.logux_store import Facts, Job, LoguxStore

logger = logging.getLogger(__name__)

JOBS_MAX = 1000
"""In one transaction."""

Done = Callable[[Any], None]
"""Called in the event loop with what came of a job: its result, or the exception."""


class _Asked(NamedTuple):
    job: Job
    done: Done


class StoreThread:
    """Jobs are done in their order, and what came of them is told in it."""

    def __init__(self, store: LoguxStore) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._opened: asyncio.Future[Facts] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._thread: threading.Thread | None = None

    async def open(self, log: str, host: str | None) -> Facts:
        """Raises LocalStoreError."""
        # A daemon: what was told to be durable is, also when a program ends without closing.
        name = f"headrace store {self._store.path or 'in memory'}"
        self._thread = threading.Thread(target=self._run, args=(log, host), name=name, daemon=True)
        self._thread.start()
        return await self._opened

    def ask(self, job: Job, done: Done) -> None:
        self._asked.put(_Asked(job, done))

    async def close(self) -> None:
        """Do what was asked for, and end. Raises LocalStoreError when the last of it was not possible."""
        if self._thread is not None:
            self._asked.put(None)
            await self._closed

    # In the thread

    def _run(self, log: str, host: str | None) -> None:
        try:
            facts = self._store.open(log, host)
        except BaseException as error:  # raised again where it was opened
            self._tell(_settle, self._opened, error)
            self._tell(_settle, self._closed, None)
            return
        self._tell(_settle, self._opened, facts)
        going_on = True
        while going_on:
            going_on = self._work()
        try:
            self._store.close()
        except BaseException as error:  # raised again where it was closed
            self._tell(_settle, self._closed, error)
        else:
            self._tell(_settle, self._closed, None)

    def _work(self) -> bool:
        """One transaction; False after the last."""
        asked: list[_Asked] = []
        going_on = True
        while going_on and len(asked) < JOBS_MAX and not (asked and self._asked.empty()):
            one = self._asked.get()
            if one is None:
                going_on = False
            else:
                asked.append(one)
        if asked:
            try:
                results = self._store.run([one.job for one in asked])
            except Exception as error:  # for whoever has asked
                results = [error] * len(asked)
            self._tell(_report, asked, results)
        return going_on

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # a program may end its loop without closing us
            self._loop.call_soon_threadsafe(function, *args)


def _report(asked: list[_Asked], results: list[Any]) -> None:
    for one, result in zip(asked, results, strict=True):
        try:
            one.done(result)
        except Exception:  # of one, which must not keep the others waiting
            logger.exception("internal error while what came of a job was told")


def _settle(future: "asyncio.Future[Any]", result: Any) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
