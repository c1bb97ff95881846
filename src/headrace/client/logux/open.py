"""An open local log: its store in a thread, its connections, and `LoguxSync` between them.

The thread is there so that the event loop never waits for the disk. Jobs that arrive during a transaction
form the next transaction: many events cost one write.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from inspect import isawaitable
from typing import Any, NamedTuple, Self

from headrace.client.link import Link
from headrace.client.logux.options import LoguxOptions
from headrace.client.logux.store import Facts, Job, LoguxStore
from headrace.client.logux.sync import LoguxSync
from headrace.client.options import exponential
from headrace.client.transport.connection import MakeConnection
from headrace.errors import LocalStoreError, RefusedError
from headrace.printing import described
from headrace.session.logux.client import LogRefused, LoguxClientSession, LoguxEvent, Verify
from headrace.session.topics.client import ConnectionState

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
        """Start the thread and open the store; raise LocalStoreError if that fails."""
        # A daemon thread: reported results are durable, even if the program ends without closing.
        name = f"headrace store {self._store.path or 'in memory'}"
        self._thread = threading.Thread(target=self._run, args=(log, host), name=name, daemon=True)
        self._thread.start()
        return await self._opened

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
            self._tell(_settle, self._opened, error)
            self._tell(_settle, self._closed, None)
            return
        self._tell(_settle, self._opened, facts)
        going_on = True
        while going_on:
            going_on = self._work()
        try:
            self._store.close()
        except BaseException as error:  # raised again in `close`
            self._tell(_settle, self._closed, error)
        else:
            self._tell(_settle, self._closed, None)

    def _work(self) -> bool:
        """Run one transaction; return False after the last."""
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
            except Exception as error:  # reported to the callers
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
        except Exception:  # one failing callback must not keep the others waiting
            logger.exception("internal error while what came of a job was told")


def _settle(future: "asyncio.Future[Any]", result: Any) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


class OpenLog:
    """An open log. Implements `Shell`."""

    def __init__(
        self,
        facts: Facts,
        thread: StoreThread,
        make_connection: MakeConnection,
        options: LoguxOptions,
        changed: Callable[[], None],
        state_changed: Callable[[ConnectionState], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.host = facts.host
        self.refusal: RefusedError | None = None
        self._thread = thread
        self._verifier = options.verify
        self._verifying: asyncio.Task[None] | None = None
        self._changed = changed
        self._tell_state = state_changed
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
        self.link: Link[LoguxEvent] = Link(
            self.session,
            make_connection,
            backoff=options.backoff or exponential(),
            attempt_timeout_s=options.attempt_timeout_s,
            handle=self.sync.handle,
            changed=self._state_changed,
            failed=failed,
        )

    @classmethod
    async def open(
        cls,
        log: str,
        make_connection: MakeConnection,
        options: LoguxOptions,
        *,
        changed: Callable[[], None],
        state_changed: Callable[[ConnectionState], None],
        failed: Callable[[BaseException], None],
    ) -> Self:
        """Open the store and start to connect."""
        thread = StoreThread(LoguxStore(options.store))
        try:
            facts = await thread.open(log, options.host)
        except BaseException:
            await thread.close()
            raise
        return cls(facts, thread, make_connection, options, changed, state_changed, failed)

    async def close(self) -> None:
        """Disconnect, and close the store once all its jobs are done."""
        self._verify_no_more()
        await self.link.stop(abort=False)
        if self.session.state is not ConnectionState.CLOSED:
            self.session.close()
            self._tell_state(ConnectionState.CLOSED)
        with suppress(LocalStoreError):  # only positions are lost; they are found again
            await self._thread.close()

    # Requests of `LoguxSync`

    def ask(self, job: Job, done: Callable[[Any], None]) -> None:
        self._thread.ask(job, done)

    def take(self, events: list[LoguxEvent]) -> None:
        self.link.take(events)

    def read(self, reading: bool) -> None:
        self.link.read(reading)

    def changed(self) -> None:
        self._changed()

    def refused(self, refusal: LogRefused) -> None:
        self.refusal = RefusedError(refusal.kind, refusal.reason)
        self._changed()

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

    # State of the link

    def _state_changed(self, state: ConnectionState) -> None:
        if state in (ConnectionState.DISCONNECTED, ConnectionState.REFUSED):
            self._verify_no_more()
            self.sync.disconnected()
        self._tell_state(state)

    def _verify_no_more(self) -> None:
        if self._verifying is not None:
            self._verifying.cancel()
            self._verifying = None


def _offset_ms() -> float:
    """Return the wall clock minus the monotonic clock that sessions use, in milliseconds."""
    return (time.time() - time.monotonic()) * 1000
