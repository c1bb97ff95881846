"""An open local log: its store in a thread, its session, and `LoguxSync` between them.

The thread is there so that the event loop never waits for the disk. Jobs that arrive during a transaction
form the next transaction: many events cost one write.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from inspect import isawaitable
from typing import Any, NamedTuple

from headrace.client.lifecycle import settle
from headrace.client.link import Link
from headrace.client.logux.options import LoguxOptions
from headrace.client.logux.store import Facts, Job, LoguxStore
from headrace.client.logux.sync import LoguxSync
from headrace.errors import LocalStoreError, RefusedError
from headrace.printing import described
from headrace.session.logux.client import LogRefused, LoguxClientSession, LoguxEvent, Verify

logger = logging.getLogger(__name__)

JOBS_MAX = 1000
"""Number of jobs in one transaction."""

Done = Callable[[Any], None]
"""Called in the event loop with the result or the exception of a job."""


class _Asked(NamedTuple):
    job: Job
    done: Done


class StoreThread:
    """A thread that runs jobs, and reports their results, in the order in which they were requested."""

    def __init__(self, store: LoguxStore) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._opened: asyncio.Future[Facts] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._thread: threading.Thread | None = None

    async def open(self, log: str, host: str | None) -> Facts:
        """Start the thread and open the store; raise LocalStoreError if that fails, and end the thread."""
        # A daemon thread: reported results are durable, even if the program ends without closing.
        name = f"headrace store {self._store.path or 'in memory'}"
        self._thread = threading.Thread(target=self._run, args=(log, host), name=name, daemon=True)
        self._thread.start()
        try:
            return await self._opened
        except BaseException:
            await self.close()
            raise

    def ask(self, job: Job, done: Done) -> None:
        self._asked.put(_Asked(job, done))

    async def close(self) -> None:
        """Finish all jobs and end the thread; raise LocalStoreError if closing the store fails."""
        if self._thread is not None:
            self._asked.put(None)
            await self._closed

    # Run in the thread

    def _run(self, log: str, host: str | None) -> None:
        try:
            facts = self._store.open(log, host)
        except BaseException as error:  # raised again in `open`
            self._tell(settle, self._opened, error)
            self._tell(settle, self._closed, None)
            return
        self._tell(settle, self._opened, facts)
        while self._work():
            pass
        try:
            self._store.close()
        except BaseException as error:  # raised again in `close`
            self._tell(settle, self._closed, error)
        else:
            self._tell(settle, self._closed, None)

    def _work(self) -> bool:
        """Run one transaction; return False after the last."""
        asked: list[_Asked] = []
        is_last = False
        while not is_last and len(asked) < JOBS_MAX and not (asked and self._asked.empty()):
            one = self._asked.get()
            if one is None:
                is_last = True
            else:
                asked.append(one)
        if asked:
            try:
                results = self._store.run([one.job for one in asked])
            except Exception as error:  # reported to the callers
                results = [error] * len(asked)
            self._tell(_report, asked, results)
        return not is_last

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # a program may end its loop without closing us
            self._loop.call_soon_threadsafe(function, *args)


def _report(asked: list[_Asked], results: list[Any]) -> None:
    for one, result in zip(asked, results, strict=True):
        try:
            one.done(result)
        except Exception:  # one failing callback must not keep the others waiting
            logger.exception("internal error in a callback of the local store")


class OpenLog:
    """An open log. Implements `Shell`."""

    link: Link[LoguxEvent]
    """The client sets the link before anything else happens."""

    def __init__(
        self,
        facts: Facts,
        thread: StoreThread,
        options: LoguxOptions,
        changed: Callable[[], None],
        refused: Callable[[RefusedError], None],
    ) -> None:
        """Prepare the first connection. `changed` and `refused` inform the client."""
        self.host = facts.host
        self.changed = changed
        self.ask = thread.ask
        self._thread = thread
        self._refused = refused
        self._verifier = options.verify
        self._verifying: asyncio.Task[None] | None = None
        self.session = LoguxClientSession(
            facts.host,
            options.credentials,
            verifies=options.verify is not None,
            received=facts.received,
            last=facts.last,
            unsent=facts.unsent,
            ping_interval_s=options.ping_interval_s,
            pings_unanswered_max=options.pings_unanswered_max,
        )
        self.sync = LoguxSync(self.session, facts, self, _offset_ms)

    def disconnected(self) -> None:
        """Forget what belongs to the connection that has ended."""
        self.stop_verifying()
        self.sync.disconnected()

    async def close(self) -> None:
        """Close the store once all its jobs are done. The link must have ended."""
        with suppress(LocalStoreError):  # only positions are lost; they are found again
            await self._thread.close()

    # Requests of `LoguxSync`

    def take(self, events: list[LoguxEvent]) -> None:
        self.link.take(events)

    def read(self, reading: bool) -> None:
        self.link.read(reading)

    def refused(self, refusal: LogRefused) -> None:
        self._refused(RefusedError(refusal.kind, refusal.reason))

    def verify(self, question: Verify) -> None:
        self._verifying = self.link.loop.create_task(self._verify(question))

    async def _verify(self, question: Verify) -> None:
        reason = None
        try:
            assert self._verifier is not None
            answer = self._verifier(question.host, question.credentials)
            if isawaitable(answer):
                answer = await answer
            if not answer:
                reason = f"the credentials of the server {question.host!r} are wrong"
        except Exception as error:  # of the verifier: refuse a server that cannot be checked
            reason = f"the server could not be verified: {described(error)}"
        self._verifying = None
        self.sync.verified(reason, time.monotonic())

    def stop_verifying(self) -> None:
        """Forget the question whether the server is the right one."""
        if self._verifying is not None:
            self._verifying.cancel()
            self._verifying = None


def _offset_ms() -> float:
    """Return the wall clock minus the monotonic clock that sessions use, in milliseconds."""
    return (time.time() - time.monotonic()) * 1000
