"""The channel client of an application: its options, send, receive, snapshots. Elsewhere: frames, sockets.

A client belongs to one event loop and is not safe to use from other threads.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Literal, Required, Self, TypedDict, overload

from headrace.client.channel.events import ChannelMessage, Inbox, Received, Snapshot
from headrace.client.lifecycle import EventHandler, Lifecycle, Remove, fail_quietly, settle
from headrace.client.link import LinkOptions, LinkOptionsDict, check_json
from headrace.client.token import Token
from headrace.errors import (
    ChannelRefusedError,
    ClientClosedError,
    ClientError,
    ConfigError,
    LeftError,
    LocalProtocolError,
    QueueFullError,
    RefusedError,
    ReplacedError,
    UnacknowledgedError,
)
from headrace.payload.channel import BadMessageError, check_processor
from headrace.session.channel import client as channel_client
from headrace.session.channel import membership
from headrace.session.channel.client import ChannelClientEvent
from headrace.session.client import ConnectionRefused, ConnectionState
from headrace.wire.channel import LEASE_S_MAX, LEASE_S_MIN, Delivered, MissedMessages, SnapshotBody

if TYPE_CHECKING:
    from headrace.client.channel.pool import ChannelPool


Receive = Literal["push", "signal", "poll"]
StartAt = Literal["cursor", "state"]
WAYS = ("push", "signal", "poll")

Restore = Callable[[Snapshot], object]
"""Function that takes over a state. An awaitable result is awaited; any other result is ignored."""

_NO_PROCESSOR = (
    "processor must be a name: under it the server remembers, over all connections and restarts, what "
    "this client has sent and what it has acknowledged. Choose one that no other client has, and keep it"
)


@dataclass(frozen=True, kw_only=True)
class ChannelOptions(LinkOptions):
    """The options of `join` and `join_blocking`. Times are seconds."""

    processor: str | None = None
    """Name of this client. Required. It must be unique, and must always stay the same."""

    token: Any = field(default=None, repr=False)
    """Token that the client sends to the server with `hello`, or a function that returns one and may be
    asynchronous; the function is called for each connection. Any other JSON value is sent as it is. None:
    nothing."""

    receive: Receive = "push"
    """`push`: the server sends messages. `signal`: the server announces messages and the client fetches them.
    `poll`: the client asks for messages every `poll_interval_s`."""

    start_at: StartAt = "cursor"
    """`state`: begin with the current state, then receive every later message, own messages included.
    `cursor`: begin after the last acknowledged message, without own messages."""

    lease_s: float | None = None
    """Seconds that the membership lasts without a connection, at least 1; None: the server's default."""

    restore: Restore | None = None
    """Called with the last known state if it replaces messages, before any later message is delivered. May be
    asynchronous."""

    auto_ack: bool = True
    """True: taking the next message acknowledges the one before it. False: the application acknowledges."""

    poll_interval_s: float = channel_client.POLL_INTERVAL_S
    """Seconds between requests for messages, with `receive="poll"`."""

    queue_max: int = membership.QUEUE_MAX
    """Largest number of messages that the server has not acknowledged. Beyond it, `send` waits and
    `send_nowait` raises QueueFullError."""

    queue_bytes_max: int = membership.QUEUE_BYTES_MAX
    """The same limit in bytes; the last message may exceed it."""

    ping_interval_s: float | None = None
    """Seconds without data from the server before it is pinged. None: the server's value, 15 by default."""

    pings_unanswered_max: int = channel_client.PINGS_UNANSWERED_MAX
    """If this many pings are unanswered when the next one is due, the client gives up the connection."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.processor, str):
            raise ConfigError(_NO_PROCESSOR)
        try:
            check_processor(self.processor)
        except BadMessageError as error:
            raise ConfigError(f"{error}; {_NO_PROCESSOR}") from None
        if self.receive not in WAYS:
            raise ConfigError(f"receive must be push, signal or poll, not {self.receive!r}")
        if self.start_at not in ("cursor", "state"):
            raise ConfigError(f"start_at must be cursor or state, not {self.start_at!r}")
        self._check_function("restore")
        if not isinstance(self.auto_ack, bool):
            raise ConfigError(f"auto_ack must be True or False, not {self.auto_ack!r}")
        self._check_numbers(
            "poll_interval_s", "queue_max", "queue_bytes_max", "pings_unanswered_max"
        )
        self._check_numbers("ping_interval_s", "lease_s", may_be_none=True)
        if self.lease_s is not None and not LEASE_S_MIN <= self.lease_s <= LEASE_S_MAX:
            bounds = f"{LEASE_S_MIN:g} to {LEASE_S_MAX:.0f}"
            raise ConfigError(f"lease_s must be {bounds}, not {self.lease_s!r}")

    def _check_token(self) -> None:
        if not callable(self.token):
            check_json("token", self.token)

    @property
    def shown_token(self) -> Token | None:
        return self.token if isinstance(self.token, str) or callable(self.token) else None


class JoinOptionsDict(TypedDict, total=False):
    """The options that each channel of a shared connection may set for itself."""

    receive: Receive
    start_at: StartAt
    lease_s: float | None
    restore: Restore | None
    auto_ack: bool


class ChannelOptionsDict(LinkOptionsDict, JoinOptionsDict, total=False):
    """The same options as keyword arguments."""

    processor: Required[str]
    token: Any
    poll_interval_s: float
    queue_max: int
    queue_bytes_max: int
    ping_interval_s: float | None
    pings_unanswered_max: int


class ChannelClient(Lifecycle[ChannelClientEvent]):
    """A member of a channel: an async iterator over the messages of others, and a way to send to them.

    Use `async with join(url, processor=name) as channel`, or `channel = await join(...)` and
    `channel.close()`. Closing ends the connection but not the membership: the server keeps messages for the
    next connection.
    """

    options: ChannelOptions
    _noun = "channel"

    def __init__(self, name: str, pool: "ChannelPool", options: ChannelOptions) -> None:
        """Create a member that is not joined yet. `pool` ends with the channel, unless it is shared."""
        assert options.processor is not None
        super().__init__(pool.url, options, "missed")
        self.name = name
        self.processor = options.processor
        self.restored: Snapshot | None = None
        """The last snapshot that replaced messages; set when the application reaches it."""
        self._pool = pool
        self._session = pool.session
        self._inbox = Inbox()
        self._taken: int | None = None
        """Offset of the last entry that the application took and that is not acknowledged yet."""
        self._told: object = None
        """The entry whose missed messages were already reported to the application."""
        self._is_taking = self._is_joined = self._is_leaving = False
        self._is_gone = False
        """True once the channel has left its connection, which other channels may still use."""
        self._sends: dict[int, asyncio.Future[int | None]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._unaccepted = 0
        """Number of messages that were not accepted when the channel ended."""

    @property
    def state(self) -> ConnectionState:
        return ConnectionState.CLOSED if self._is_gone else super().state

    @property
    def unacknowledged(self) -> int:
        """Number of sent messages that the server has not acknowledged."""
        return len(self._sends) + self._unaccepted

    # Sending

    async def send(self, content: Any) -> int | None:
        """Send a JSON value or bytes, wait until it is durable, and return the offset just past it.

        Without a connection, the message waits for the next one. It is stored exactly once, even if
        connections are lost. The offset is None if the server's answer was lost. Raises ChannelRefusedError
        if the server refuses the message, BadMessageError or PayloadTooLargeError if every server would.
        If the call is cancelled, the message may still be sent.
        """
        while True:
            try:
                sent = self.send_nowait(content)
            except QueueFullError:
                await self.room()
            else:
                return await sent

    def send_nowait(self, content: Any) -> "asyncio.Future[int | None]":
        """Queue a message and return a future of its offset, which need not be awaited.

        Raises QueueFullError if too many messages are not accepted yet: `await channel.room()` first.
        """
        link = self._require_link()
        if self._is_leaving:
            raise ClientClosedError("the channel is being left")
        ticket = self._session.send(self.name, content)
        sent: asyncio.Future[int | None] = link.loop.create_future()
        self._sends[ticket] = sent
        link.send_soon()
        return sent

    async def room(self) -> None:
        """Wait until `send_nowait` has room."""
        await self._wait(lambda: self._session.has_room(self.name))

    async def flush(self) -> None:
        """Wait until every message sent so far is stored or refused."""
        last = next(reversed(self._sends), 0)
        await self._wait(lambda: next(iter(self._sends), last + 1) > last)

    # Receiving

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChannelMessage:
        """Return the next message; with `auto_ack`, acknowledge the one before it."""
        if self._is_taking:
            raise LocalProtocolError("only one task at a time may take the messages of a channel")
        self._is_taking = True
        try:
            if self.options.auto_ack:
                self._done_with_taken()
            return await self._next()
        finally:
            self._is_taking = False

    async def ack(self, upto: "ChannelMessage | Snapshot | int") -> None:
        """Acknowledge everything up to a message; return when the server has recorded it."""
        link = self._require_link()
        if isinstance(upto, int):
            offset = upto
        else:
            offset = upto.next_offset if isinstance(upto, ChannelMessage) else upto.offset
        self._session.ack(self.name, offset)
        link.send_soon()
        await self._wait(lambda: self._session.acked(self.name) >= offset)

    # Snapshots

    async def snapshot(self) -> Snapshot | None:
        """Return the current state or the last upload; None if there is none."""
        self._require_link()
        state: SnapshotBody | None = await self._answer(self._session.snapshot(self.name))
        return None if state is None else Snapshot.of(state)

    async def upload(self, state: Any, offset: int) -> int:
        """Upload the state that covers everything up to an offset, a JSON value or bytes.

        Returns the offset of the upload that is kept. Raises ChannelRefusedError unless the channel has the
        reducer `uploaded`.
        """
        self._require_link()
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 1 << 63:
            raise LocalProtocolError(f"an offset is a number from 0 on, not {offset!r}")
        kept: int = await self._answer(self._session.upload(self.name, offset, state))
        return kept

    # Leaving and closing

    async def leave(self) -> None:
        """End the membership once all sent messages are stored, then close the channel.

        After this, the server keeps nothing for this processor. Waits for a connection if there is none.
        """
        link = self._require_link()
        await self.flush()
        self._is_leaving = True
        self._session.leave(self.name)
        link.send_soon()
        while self._final_error is None:
            await self._changes.wait()
        if not isinstance(self._final_error, ClientClosedError):
            raise self._final_error.with_traceback(None)
        await self.close()

    async def connected(self) -> None:
        """Wait until the channel is joined; raise if it never will be."""
        await self._wait(lambda: self._is_joined)

    @overload
    def on(self, event: Literal["state"], handler: EventHandler[ConnectionState]) -> Remove: ...
    @overload
    def on(self, event: Literal["missed"], handler: EventHandler[MissedMessages]) -> Remove: ...
    def on(self, event: str, handler: EventHandler[Any]) -> Remove:
        """Call `handler` with every event of a kind; return a function that removes the handler.

        `state`: a ConnectionState, at every change. `missed`: a Missed, where messages are lost for this
        processor; `restored` is the snapshot that replaces them, if there is one.
        """
        return self._add_handler(event, handler)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self.options.auto_ack:
            self._done_with_taken()
        await super().__aexit__(kind, error, trace)

    # The lifecycle

    async def _start(self) -> None:
        if self._link is None:
            self._link = self._pool.enter(self)

    def _not_connected_text(self) -> str:
        return f"channel {self.name!r} was not joined at {self.url}"

    async def _first_connection(self) -> None:
        await super()._first_connection()
        if self.options.connect_timeout_s is not None:
            while isinstance(first := self._inbox.first, membership.Restored):
                await self._restore(first)

    async def _flush(self, flush_s: float) -> None:
        def is_over() -> bool:
            # Do not wait for a connection to send acknowledgements: messages are only delivered again.
            noted = self._session.is_acknowledged(self.name) or not self._is_joined
            return not self._sends and noted

        try:
            async with asyncio.timeout(flush_s):
                await self._wait(is_over)
        except (TimeoutError, ClientError):  # ClientError: the channel has ended
            if self.unacknowledged:
                raise UnacknowledgedError(self.unacknowledged) from None

    async def _stop(self, abort: bool) -> None:
        await self._pool.remove(self, abort)
        if not self._is_gone:
            was_closed = self.state is ConnectionState.CLOSED
            self._is_gone = True
            if self._link is not None and not was_closed:
                self._tell("state", ConnectionState.CLOSED)

    def _fail_pending(self, error: ClientError) -> None:
        self._inbox.clear()
        self._unaccepted = len(self._sends)
        fail_quietly((*self._sends.values(), *self._questions.values()), error)
        self._sends.clear()
        self._questions.clear()

    # Taking entries from the inbox

    async def _next(self) -> ChannelMessage:
        while True:
            if isinstance(self._final_error, ClientClosedError):
                raise StopAsyncIteration
            link = self._require_link()
            first = self._inbox.first
            if isinstance(first, Delivered):
                self._inbox.take(first)
                self._taken = first.offset
                return ChannelMessage.of(first, self)
            if isinstance(first, membership.Restored):
                await self._restore(first)
            elif first is not None:
                self._inbox.take(first)
                self._tell("missed", first.missed)
            else:
                self._session.more(self.name)
                link.send_soon()
                await self._changes.wait()

    async def _restore(self, entry: membership.Restored) -> None:
        """Pass a state to the application. If that is cancelled or fails, the next call passes it again."""
        snapshot = None
        if entry.snapshot is not None:
            snapshot = self.restored = Snapshot.of(entry.snapshot, entry.missed)
        if entry.missed is not None and self._told is not entry:
            self._told = entry
            self._tell("missed", entry.missed)
        restore = self.options.restore
        if snapshot is not None and restore is not None:
            result = restore(snapshot)
            if isawaitable(result):
                await result
        self._inbox.take(entry)
        self._taken = entry.offset
        if restore is not None:
            self._done_with_taken()

    def _done_with_taken(self) -> None:
        if self._taken is not None and self._final_error is None:
            taken, self._taken = self._taken, None
            self._session.ack(self.name, taken)
            if self._link is not None:
                self._link.send_soon()

    # Reports of the connection

    def happened(self, event: ChannelClientEvent) -> None:
        """Handle an event of the session. The caller wakes waiting tasks afterwards."""
        if isinstance(event, Received):
            self._inbox.put(event)
        elif isinstance(event, membership.SendAccepted):
            settle(self._sends.pop(event.ticket, None), event.offset)
        elif isinstance(event, membership.Rejected):
            futures = self._sends if event.ticket in self._sends else self._questions
            settle(futures.pop(event.ticket, None), ChannelRefusedError(event.code, event.text))
        elif isinstance(event, membership.Answered):
            settle(self._questions.pop(event.ticket, None), event.answer)
        elif isinstance(event, membership.JoinedChannel):
            self._is_joined = True
        elif isinstance(event, membership.LeftChannel):
            self._end(ClientClosedError(f"channel {self.name!r} is left"))
        elif isinstance(event, membership.Ended | ConnectionRefused):
            self._end(_error_of(event))
        # The link handles the other events; tasks that wait for them check the session.

    def state_changed(self, state: ConnectionState, over: ClientError | None) -> None:
        """Tell a new state of the connection. `over` is the error that ended the connection for good."""
        if state is not ConnectionState.CONNECTED:
            self._is_joined = False
        if over is not None:
            self._end(over)
        self._state_changed(state)

    async def _answer(self, ticket: int) -> Any:
        link = self._require_link()
        answer = self._questions[ticket] = link.loop.create_future()
        link.send_soon()
        return await answer


def _error_of(event: membership.Ended | ConnectionRefused) -> ClientError:
    if isinstance(event, ConnectionRefused):
        return RefusedError(event.kind, event.reason)
    if event.code == membership.REPLACED:
        return ReplacedError(f"{event.text}: give every processor a name of its own")
    if event.code == membership.ELSEWHERE:
        return LeftError(event.text)
    return ChannelRefusedError(event.code, event.text)
