"""The channel an application uses: sending, receiving, snapshots. Frames and sockets are elsewhere.

It belongs to one event loop and is not safe to use from other threads.
"""

import asyncio
from collections.abc import Callable, Generator
from inspect import isawaitable
from types import TracebackType
from typing import Any, Literal, Self, overload

from headrace.client.channel_connection import ChannelConnection
from headrace.client.channel_events import Inbox, Message, Snapshot
from headrace.client.channel_options import ChannelOptions
from headrace.client.entering import wait_for_connection
from headrace.client.events import Handlers
from headrace.client.link import Link
from headrace.errors import (
    ChannelRefusedError,
    ClientClosedError,
    ClientError,
    LeftError,
    LocalProtocolError,
    QueueFullError,
    RefusedError,
    ReplacedError,
    UnacknowledgedError,
)
from headrace.session import client_channel as told
from headrace.session.channel_client import ChannelClientEvent, Refused
from headrace.session.client import ConnectionState
from headrace.wire.channel_answers import Delivered, Missed, State


class Channel:
    """A member of a channel: an async iterator over the messages of others, and a way to send to them.

    Use `async with join(url, processor=name) as channel`, or `channel = await join(...)` and
    `channel.close()`. Closing ends the connection and not the membership: messages wait for the next time.
    """

    def __init__(self, name: str, connection: ChannelConnection, options: ChannelOptions) -> None:
        """`connection` ends with the channel, unless it is shared."""
        assert options.processor is not None
        self.url = connection.url
        self.name = name
        self.processor = options.processor
        self.options = options
        self.restored: Snapshot | None = None
        """The last snapshot that came in place of messages, as soon as it is its turn."""
        self._connection = connection
        self._session = connection.session
        self._handlers = Handlers("state", "missed")
        self._link: Link[ChannelClientEvent] | None = None
        self._inbox = Inbox()
        self._taken: int | None = None
        """The offset of what the application has and is not done with."""
        self._told: object = None
        """What the application has been told that it missed."""
        self._is_taking = self._is_joined = self._is_leaving = self._is_closing = False
        self._is_gone = False
        """Whether the connection, which others use too, goes on without it."""
        self._sends: dict[int, asyncio.Future[int | None]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._over: ClientError | None = None
        """Why nothing more happens, for good."""
        self._unaccepted = 0
        """Messages that were not accepted when it was over."""
        # Only ever set and cleared at once: it wakes all who wait, to look again.
        self._changes = asyncio.Event()

    @property
    def state(self) -> ConnectionState:
        return ConnectionState.CLOSED if self._is_gone else self._session.state

    @property
    def latency_s(self) -> float | None:
        """Round trip to the server, from the last answered ping; None before the first."""
        return self._session.latency_s

    @property
    def last_error(self) -> str:
        """Why the last connection, or attempt at one, ended; empty while connected."""
        return self._connection.last_error

    @property
    def unacknowledged(self) -> int:
        """How many messages of this client the server is not known to have."""
        return len(self._sends) + self._unaccepted

    # Sending

    async def send(self, content: Any) -> int | None:
        """Send a JSON value or bytes, and wait until it is durable; returns the offset just past it.

        Without a connection it waits for the next one. Whatever is lost on the way, it is stored once; the
        offset is None when the answer got lost. Raises ChannelRefusedError for what the server does not take,
        BadMessageError or PayloadTooLargeError for what no server takes. Cancelled, it may be sent all the
        same.
        """
        while True:
            try:
                sent = self.send_nowait(content)
                break
            except QueueFullError:
                await self.room()
        return await sent

    def send_nowait(self, content: Any) -> "asyncio.Future[int | None]":
        """Queue a message and return a future of its offset. It need not be awaited.

        Raises QueueFullError when too many are not accepted yet: `await channel.room()` first.
        """
        link = self._entered()
        if self._is_leaving:
            raise ClientClosedError("the channel is being left")
        ticket = self._session.send(self.name, content)
        sent: asyncio.Future[int | None] = link.loop.create_future()
        self._sends[ticket] = sent
        link.send_soon()
        return sent

    async def room(self) -> None:
        """Wait until `send_nowait` has room."""
        self._entered()
        await self._wait(lambda: self._session.has_room(self.name))

    async def flush(self) -> None:
        """Wait until everything that was sent so far is stored, or refused."""
        self._entered()
        last = next(reversed(self._sends), 0)
        await self._wait(lambda: next(iter(self._sends), last + 1) > last)

    # Receiving

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message of another processor; with `auto_ack`, the one before it is done with."""
        if self._is_taking:
            raise LocalProtocolError("one task at a time takes the messages of a channel")
        self._is_taking = True
        try:
            if self.options.auto_ack:
                self._done_with_taken()
            return await self._next()
        finally:
            self._is_taking = False

    async def ack(self, upto: "Message | Snapshot | int") -> None:
        """Everything up to a message is done with; returns when the server has noted that."""
        link = self._entered()
        offset = upto if isinstance(upto, int) else upto.offset
        self._session.ack(self.name, offset)
        link.send_soon()
        await self._wait(lambda: self._session.acked(self.name) >= offset)

    # The last known state

    async def snapshot(self) -> Snapshot | None:
        """The state as of now, or the last upload; None when there is none."""
        link = self._entered()
        state: State | None = await self._answer(link, self._session.snapshot(self.name))
        return None if state is None else Snapshot.of(state)

    async def upload(self, state: Any, offset: int) -> int:
        """Give the state that covers everything up to an offset, a JSON value or bytes.

        Returns the offset of the upload that is kept. For channels with the reducer `uploaded`:
        ChannelRefusedError for others.
        """
        link = self._entered()
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 1 << 63:
            raise LocalProtocolError(f"an offset is a number from 0 on, not {offset!r}")
        kept: int = await self._answer(link, self._session.upload(self.name, offset, state))
        return kept

    # The end

    async def leave(self) -> None:
        """Be a member no more, when what was sent is stored; then nothing is kept for this processor.

        Waits for a connection if there is none.
        """
        link = self._entered()
        await self.flush()
        self._is_leaving = True
        self._session.leave(self.name)
        link.send_soon()
        while self._over is None:
            await self._changes.wait()
        if not isinstance(self._over, ClientClosedError):
            raise self._over.with_traceback(None)
        await self.close()

    async def close(self, flush_s: float | None = None) -> None:
        """Wait up to `flush_s` (default `flush_timeout_s`) for the server to have everything, then end.

        Raises UnacknowledgedError when it does not have all messages; with 0 nothing is waited for and
        nothing raised. The iteration ends; futures and waiting calls get ClientClosedError.
        """
        flush_s = self.options.flush_timeout_s if flush_s is None else flush_s
        is_first, self._is_closing = not self._is_closing, True
        try:
            if flush_s > 0 and is_first and self._link is not None:
                await self._flush(flush_s)
        finally:
            self._end(ClientClosedError("the client is closed"))
            if self._connection.is_shared:
                self._part()
            else:
                await self._connection.stop(abort=flush_s == 0)

    def _part(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._connection.part(self)
            if self._link is not None:
                self._handlers.tell("state", ConnectionState.CLOSED)

    async def connected(self) -> None:
        """Wait until the channel is joined; raises when it never will be."""
        self._entered()
        await self._wait(lambda: self._is_joined)

    @overload
    def on(
        self, event: Literal["state"], handler: Callable[[ConnectionState], object]
    ) -> Callable[[], None]: ...
    @overload
    def on(
        self, event: Literal["missed"], handler: Callable[[Missed], object]
    ) -> Callable[[], None]: ...
    def on(self, event: str, handler: Callable[[Any], object]) -> Callable[[], None]:
        """Call `handler` with every event of a kind; returns a function that ends that.

        `state`: a ConnectionState, at every change. `missed`: a Missed, where messages did not and will
        not come; `restored` is what is in their place.
        """
        return self._handlers.add(event, handler)

    async def __aenter__(self) -> Self:
        if self._over is not None:
            raise self._over.with_traceback(None)
        if self._link is None:
            self._link = self._connection.enter(self)
        try:
            await wait_for_connection(
                self.options.connect_timeout_s,
                self.connected,
                what=f"channel {self.name!r} was not joined at {self.url}",
                last_error=lambda: self.last_error,
            )
            if self.options.connect_timeout_s is not None:
                while isinstance(first := self._inbox.first, told.Restored):
                    await self._restore(first)
        except BaseException:
            await self.close(flush_s=0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None and self.options.auto_ack and self._over is None:
            self._done_with_taken()
        # With an error on its way out, waiting would delay it and a second error would hide it.
        await self.close(flush_s=None if error is None else 0)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    # Taking

    async def _next(self) -> Message:
        while True:
            if isinstance(self._over, ClientClosedError):
                raise StopAsyncIteration
            link = self._entered()
            first = self._inbox.first
            if isinstance(first, Delivered):
                self._inbox.take(first)
                self._taken = first.offset
                return Message.of(first, self)
            if isinstance(first, told.Restored):
                await self._restore(first)
            elif first is not None:
                self._inbox.take(first)
                self._handlers.tell("missed", first.missed)
            else:
                self._session.more(self.name)
                link.send_soon()
                await self._changes.wait()

    async def _restore(self, entry: told.Restored) -> None:
        """Give a state to the application. Cancelled, or failed, it is given again."""
        snapshot = None
        if entry.snapshot is not None:
            snapshot = self.restored = Snapshot.of(entry.snapshot, entry.missed)
        if entry.missed is not None and self._told is not entry:
            self._told = entry
            self._handlers.tell("missed", entry.missed)
        restore = self.options.restore
        if snapshot is not None and restore is not None:
            result = restore(snapshot)
            if isawaitable(result):
                await result
        self._inbox.take(entry)
        self._taken = entry.offset
        if restore is not None and self._over is None:
            self._done_with_taken()

    def _done_with_taken(self) -> None:
        if self._taken is not None and self._over is None:
            taken, self._taken = self._taken, None
            self._session.ack(self.name, taken)
            if self._link is not None:
                self._link.send_soon()

    # What the session and the link say

    def happened(self, event: ChannelClientEvent) -> None:
        """Take an event of the session; `wake` follows."""
        if isinstance(event, told.Received | told.Restored | told.Lost):
            self._inbox.put(event)
        elif isinstance(event, told.Accepted):
            _settle(self._sends.pop(event.ticket, None), event.offset)
        elif isinstance(event, told.Rejected):
            futures = self._sends if event.ticket in self._sends else self._questions
            _fail(futures.pop(event.ticket, None), ChannelRefusedError(event.code, event.text))
        elif isinstance(event, told.Answered):
            _settle(self._questions.pop(event.ticket, None), event.answer)
        elif isinstance(event, told.Joined):
            self._is_joined = True
        elif isinstance(event, told.Left):
            self._end(ClientClosedError(f"channel {self.name!r} is left"))
        elif isinstance(event, told.Ended | Refused):
            self._end(_error_of(event))
        # Of what else there is, a link takes care, and whoever waits for it looks at the session.

    def state_changed(self, state: ConnectionState) -> None:
        if state is not ConnectionState.CONNECTED:
            self._is_joined = False
        self.wake()
        self._handlers.tell("state", state)

    def ended(self, error: ClientError) -> None:
        """The connection is over, and with it every channel."""
        self._end(error)
        self._handlers.tell("state", ConnectionState.CLOSED)

    def _end(self, error: ClientError) -> None:
        """Refuse everything from now on, and let everyone who waits know."""
        if self._over is not None:
            return
        self._over = error
        self._inbox.clear()
        self._unaccepted = len(self._sends)
        for future in (*self._sends.values(), *self._questions.values()):
            _fail(future, error)
            if not future.cancelled():
                future.exception()  # whoever does not await it need not be warned: the channel is over
        self._sends.clear()
        self._questions.clear()
        self.wake()

    # Waiting

    def _entered(self) -> Link[ChannelClientEvent]:
        if self._over is not None:
            raise self._over.with_traceback(None)
        if self._link is None:
            raise LocalProtocolError("enter the channel first: `async with` or `await` it")
        return self._link

    async def _answer(self, link: Link[ChannelClientEvent], ticket: int) -> Any:
        answer: asyncio.Future[Any] = link.loop.create_future()
        self._questions[ticket] = answer
        link.send_soon()
        return await answer

    async def _wait(self, done: Callable[[], bool]) -> None:
        while not done():
            await self._changes.wait()
            self._entered()

    async def _flush(self, flush_s: float) -> None:
        def is_over() -> bool:
            # Acknowledgements are worth no waiting for a connection: messages only come again.
            noted = self._session.is_acknowledged(self.name) or not self._is_joined
            return not self._sends and noted

        try:
            if self._over is None:
                async with asyncio.timeout(flush_s):
                    await self._wait(is_over)
        except (TimeoutError, ClientError):  # the latter: over meanwhile
            pass
        if self.unacknowledged:
            raise UnacknowledgedError(self.unacknowledged)

    def wake(self) -> None:
        """Let everyone who waits look again."""
        self._changes.set()
        self._changes.clear()


def _error_of(event: told.Ended | Refused) -> ClientError:
    if isinstance(event, Refused):
        return RefusedError(event.kind, event.reason)
    if event.code == told.REPLACED:
        return ReplacedError(f"{event.text}: give every processor a name of its own")
    if event.code == told.ELSEWHERE:
        return LeftError(event.text)
    return ChannelRefusedError(event.code, event.text)


def _settle(future: "asyncio.Future[Any] | None", result: object) -> None:
    if future is not None and not future.done():  # else cancelled, or told that it is over
        future.set_result(result)


def _fail(future: "asyncio.Future[Any] | None", error: ClientError) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
