"""A local log that is open: its store in a thread, its connections, and `LoguxSync` between them."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from inspect import isawaitable
from typing import Any, Self

from headrace.client.backoff import exponential
from headrace.client.connection import MakeConnection
from headrace.client.link import Link
from headrace.client.logux_options import LoguxOptions
from headrace.client.logux_store import Facts, Job, LoguxStore
from headrace.client.logux_sync import LoguxSync
from headrace.client.logux_thread import StoreThread
from headrace.errors import LocalStoreError, RefusedError
from headrace.printing import described
from headrace.session.client import ConnectionState
from headrace.session.logux_client import LoguxClientSession, LoguxEvent, Refused, Verify


class OpenLog:
    """Implements `Shell`."""

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
        """Open the store, and begin to connect."""
        thread = StoreThread(LoguxStore(options.store))
        try:
            facts = await thread.open(log, options.host)
        except BaseException:
            await thread.close()
            raise
        return cls(facts, thread, make_connection, options, changed, state_changed, failed)

    async def close(self) -> None:
        """Hang up, and close the store when everything that was asked of it is done."""
        self._verify_no_more()
        await self.link.stop(abort=False)
        if self.session.state is not ConnectionState.CLOSED:
            self.session.close()
            self._tell_state(ConnectionState.CLOSED)
        with suppress(LocalStoreError):  # only positions, which are found again
            await self._thread.close()

    # What the synchronisation asks for

    def ask(self, job: Job, done: Callable[[Any], None]) -> None:
        self._thread.ask(job, done)

    def take(self, events: list[LoguxEvent]) -> None:
        self.link.take(events)

    def read(self, reading: bool) -> None:
        self.link.read(reading)

    def changed(self) -> None:
        self._changed()

    def refused(self, refusal: Refused) -> None:
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
        except Exception as error:  # theirs; whoever cannot be checked is not let in
            reason = f"the server could not be verified: {described(error)}"
        self._verifying = None
        self.sync.verified(reason, time.monotonic())

    # What the link says

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
    """The clock of the wall less the one that sessions are told."""
    return (time.time() - time.monotonic()) * 1000
