"""The Logux client of an application: its options, a log of events, and the iterator over it.

Elsewhere: frames, stores and sockets. A client belongs to one event loop and is not safe to use from other
threads.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Any, Self

from headrace.client.lifecycle import Lifecycle, settle
from headrace.client.link import LinkOptions, LinkOptionsDict, check_json
from headrace.client.logux.store import Facts, LogEvent, LoguxStore, StoreThread, is_in_memory
from headrace.client.logux.sync import LoguxSync
from headrace.client.transport import MakeConnection
from headrace.errors import (
    BadEventError,
    ClientClosedError,
    ConfigError,
    LocalStoreError,
    PayloadTooLargeError,
    RefusedError,
    UnacknowledgedError,
)
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload.logux import (
    BadEnvelopeError,
    Created,
    Envelope,
    Event,
    Number,
    encode_envelope,
    raw_event,
)
from headrace.printing import described
from headrace.session.client import ConnectionRefused, ConnectionState
from headrace.session.logux import client as logux_client
from headrace.session.logux.client import LoguxClientSession, LoguxEvent, Verify
from headrace.wire.logux import messages as logux
from headrace.wire.logux.messages import HOST_BYTES_MAX

Verifier = Callable[[str | Number, Any], bool | Awaitable[bool]]
"""Function of a server's host and credentials (None: it sent none) that returns True if it is trusted."""


@dataclass(frozen=True, kw_only=True)
class LoguxOptions(LinkOptions):
    """The options of `connect` for `logux://` and `loguxs://`. Times are seconds."""

    store: str | os.PathLike[str] | None = None
    """File that holds the log, created if it does not exist. None: the log is in memory and is lost with the
    client."""

    host: str | None = None
    """Name of this client, which must be unique. None: a UUID, kept in the store."""

    credentials: Any = None
    """Any JSON value that the client sends to the server with `connect`, over any connection. None: the
    `token`."""

    verify: Verifier | None = None
    """Called with the server's host and credentials, also if it sends none. If the result is false, the
    server is refused for good."""

    connect_timeout_s: float | None = None
    """Seconds that entering the client waits for its first connection; None: it does not wait."""

    ping_interval_s: float = logux_client.PING_INTERVAL_S
    """Seconds without data from the server before it is pinged."""

    pings_unanswered_max: int = logux_client.PINGS_UNANSWERED_MAX
    """If this many pings are unanswered when the next one is due, the client gives up the connection. It also
    does so if `connect` is not answered in that time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.host is None or (isinstance(self.host, str) and self.host)):
            raise ConfigError(f"host must be a name, not {self.host!r}")
        if self.host is not None and len(self.host.encode(errors="replace")) > HOST_BYTES_MAX:
            raise ConfigError(f"host may have at most {HOST_BYTES_MAX} bytes")
        self._check_function("verify")
        self._check_numbers("ping_interval_s", "pings_unanswered_max")
        check_json("host", self.host)
        check_json("credentials", self.credentials)
        if self.token is not None and self.credentials is not None:
            raise ConfigError("pass `token` or `credentials`, not both: a server gets one of them")


class LoguxOptionsDict(LinkOptionsDict, total=False):
    """The same options as keyword arguments, except `store`."""

    host: str | None
    credentials: Any
    verify: Verifier | None
    ping_interval_s: float
    pings_unanswered_max: int


_TIME = [-(10**15) - 0.5, "", 10**9]
"""A time whose encoding is longer than that of any real event."""


class LoguxClient(Lifecycle[LoguxEvent]):
    """A local log of events that is synchronised with a server's log while the two are connected.

    Use `async with connect(url, store=path) as log`, or `log = await connect(...)` and `log.close()`. A file
    keeps unsent events, so with a file closing does not wait while disconnected. A store in memory loses
    them: UnacknowledgedError says how many.
    """

    options: LoguxOptions

    def __init__(
        self, url: str, log: str, make_connection: MakeConnection, options: LoguxOptions
    ) -> None:
        super().__init__(url, options)
        self.log = log
        self._make_connection = make_connection
        self._open: OpenLog | None = None
        self._opening = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    @property
    def host(self) -> str:
        """Name of this client, as it appears in the times of its events."""
        return self._opened().host

    @property
    def last_error(self) -> str:
        """Reason why the last connection or attempt ended; while connected, the server's last complaint."""
        return super().last_error or (
            self._open.session.complaint if self._open is not None else ""
        )

    @property
    def unacknowledged(self) -> int:
        """Number of own events that the server has not acknowledged."""
        return self._open.sync.unacknowledged if self._open is not None else 0

    async def add(self, event: Event) -> Created:
        """Add an event to the log, also without a connection; return its time once it is stored.

        Raises BadEventError or PayloadTooLargeError if a log cannot hold the event, LocalStoreError if
        storing it failed. If the call is cancelled, the event may still be added.
        """
        log = self._opened()
        added: asyncio.Future[LogEvent] = asyncio.get_running_loop().create_future()
        data = check_event(event, log.host)
        log.sync.add(data, int(time.time() * 1000), partial(settle, added))
        return (await added).created

    def events(self, after: int = 0) -> "LogEvents":
        """Iterate over all events after a number, in this log's order, then wait for new ones.

        The events are those of this client and of others. If the iteration would wait although the connection
        is refused for good, it raises RefusedError.
        """
        self._require_link()
        return LogEvents(self, after)

    async def synced(self) -> None:
        """Wait until the server has every event added so far; raise RefusedError if it never will."""
        sync = self._opened().sync
        until = sync.added
        await self._wait(lambda: sync.acknowledged >= until)

    async def page(self, behind: int) -> list[LogEvent]:
        """For iterators: wait for the next events after a number; return none if the client is closed."""
        try:
            log = self._opened()
            await self._wait(lambda: log.sync.last > behind)
        except ClientClosedError:
            return []
        page: asyncio.Future[list[LogEvent]] = asyncio.get_running_loop().create_future()
        log.ask(lambda store: store.read(behind), partial(settle, page))
        return await page

    def _opened(self) -> "OpenLog":
        self._require_link()
        assert self._open is not None
        return self._open

    # The lifecycle

    async def _start(self) -> None:
        async with self._opening:
            if self._open is None:
                thread = StoreThread(LoguxStore(self.options.store))
                facts = await thread.open(self.log, self.options.host)
                self._open = OpenLog(self, facts, thread)

    async def _flush(self, flush_s: float) -> None:
        if self._final_error is not None:
            return
        in_memory = is_in_memory(self.options.store)

        def is_over() -> bool:
            # A running attempt may succeed. The backoff before the next attempt is not worth waiting for.
            no_hope = self.state is ConnectionState.DISCONNECTED and not in_memory
            return no_hope or self.unacknowledged == 0

        with suppress(TimeoutError, ClientClosedError, RefusedError):
            async with asyncio.timeout(flush_s):
                await self._wait(is_over)
        if in_memory and self.unacknowledged:
            raise UnacknowledgedError(self.unacknowledged)

    async def _stop(self, abort: bool) -> None:
        if self._open is not None:
            if self._closing is None:
                self._closing = asyncio.get_running_loop().create_task(self._close(self._open))
            await asyncio.shield(self._closing)

    async def _close(self, log: "OpenLog") -> None:
        log.stop_verifying()
        await super()._stop(abort=False)
        with suppress(LocalStoreError):  # only positions are lost; they are found again
            await log.thread.close()

    def _state_changed(self, state: ConnectionState) -> None:
        is_over = state in (ConnectionState.DISCONNECTED, ConnectionState.REFUSED)
        if is_over and self._open is not None:
            self._open.stop_verifying()
            self._open.sync.disconnected()
        super()._state_changed(state)


class OpenLog:
    """An open log: its store in a thread, its session, and `LoguxSync` between them. Implements `Shell`."""

    def __init__(self, client: LoguxClient, facts: Facts, thread: StoreThread) -> None:
        """Connect the log. The link must end before the thread does."""
        self.host = facts.host
        self.thread = thread
        self.ask = thread.ask
        self.changed = client._wake
        self._client = client
        self._verifying: asyncio.Task[None] | None = None
        options = client.options
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
        link = client._connect(self.session, client._make_connection, self.sync.handle)
        self.take = link.take
        self.read = link.read

    def refused(self, refusal: ConnectionRefused) -> None:
        self._client._refusal = RefusedError(refusal.kind, refusal.reason)
        self.changed()

    def verify(self, question: Verify) -> None:
        self._verifying = asyncio.create_task(self._verify(question))

    async def _verify(self, question: Verify) -> None:
        reason = None
        try:
            verifier = self._client.options.verify
            assert verifier is not None
            answer = verifier(question.host, question.credentials)
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


class LogEvents:
    """An async iterator over a local log, in order and without end, until the client is closed.

    Several tasks may iterate over it; each event goes to one of them.
    """

    def __init__(self, client: LoguxClient, after: int) -> None:
        self.after = after
        """Number of the last event taken: pass it to `events` to continue after it later."""
        self._client = client
        self._read = after
        self._ready: deque[LogEvent] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LogEvent:
        while not self._ready:
            page = await self._client.page(self._read)
            if not page:
                raise StopAsyncIteration
            # Another task may have received the same page.
            self._ready.extend(one for one in page if one.added > self._read)
            self._read = max(self._read, page[-1].added)
        taken = self._ready.popleft()
        self.after = taken.added
        return taken


def check_event(event: Any, host: str) -> bytes:
    """Return the event as JSON; raise BadEventError or PayloadTooLargeError if no server would accept it."""
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadEventError("an event must be a dict with a string `type`")
    try:
        # Decode the event as a server will.
        found = logux.decode(logux.pack(["sync", 1, event, _TIME], binary=True), binary=True)
        assert isinstance(found, logux.Sync)
        [(same, _)] = found.events
    except (logux.BadLoguxMessageError, TypeError, ValueError, RecursionError) as error:
        raise BadEventError(f"an event may contain only JSON values: {error}") from None
    if same != event:
        raise BadEventError(
            "an event may contain only JSON values: None, bool, int, float, str, list, dict"
        )
    created = [_TIME[0], host, _TIME[2]]
    envelope = Envelope(raw_event(event), created=created, origin=host)
    try:
        encode_envelope(envelope)
    except BadEnvelopeError:
        raise PayloadTooLargeError(
            f"an event may have about {PAYLOAD_BYTES_MAX} bytes of JSON with its time and host, "
            f"this one has {len(envelope.event)} without them"
        ) from None
    return bytes(envelope.event)


def _offset_ms() -> float:
    """Return the wall clock minus the monotonic clock that sessions use, in milliseconds."""
    return (time.time() - time.monotonic()) * 1000
