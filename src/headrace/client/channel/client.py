"""The channel client of an application: send, receive, snapshots. Elsewhere: frames and sockets.

A client belongs to one event loop and is not safe to use from other threads.
"""

import asyncio
from collections.abc import Callable, Generator
from inspect import isawaitable
from types import TracebackType
from typing import Any, Literal, Self, overload

from headrace.client.channel.connection import ProcessorConnection
from headrace.client.channel.events import ChannelMessage, Inbox, Snapshot
from headrace.client.channel.options import ChannelOptions
from headrace.client.entering import wait_for_connection
from headrace.client.lifecycle import Handlers
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
from headrace.session.channel import membership as told
from headrace.session.channel.client import ChannelClientEvent, ConnectionRefused
from headrace.session.topics.client import ConnectionState
from headrace.wire.channel.answers import Delivered, MissedMessages, SnapshotBody


class ChannelClient:
    """A member of a channel: an async iterator over the messages of others, and a way to send to them.

    Use `async with join(url, processor=name) as channel`, or `channel = await join(...)` and
    `channel.close()`. Closing ends the connection but not the membership: the server keeps messages for the
    next connection.
    """

    def __init__(self, name: str, connection: ProcessorConnection, options: ChannelOptions) -> None:
        """Create a member that is not joined yet. `connection` ends with the channel, unless it is shared."""
        assert options.processor is not None
        self.url = connection.url
        self.name = name
        self.processor = options.processor
        self.options = options
        self.restored: Snapshot | None = None
        """The last snapshot that replaced messages; set when the application reaches it."""
        self._connection = connection
        self._session = connection.session
        self._handlers = Handlers("state", "missed")
        self._link: Link[ChannelClientEvent] | None = None
        self._inbox = Inbox()
        self._taken: int | None = None
        """Offset of the last entry that the application took and that is not acknowledged yet."""
        self._told: object = None
        """The entry whose missed messages were already reported to the application."""
        self._is_taking = self._is_joined = self._is_leaving = self._is_closing = False
        self._is_gone = False
        """True once the channel has left a shared connection, which other channels may still use."""
        self._sends: dict[int, asyncio.Future[int | None]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._over: ClientError | None = None
        """Error that ended the channel for good; None before its end."""
        self._unaccepted = 0
        """Number of messages that were not accepted when the channel ended."""
        # Set and cleared in one step: this wakes all waiting tasks, which then check their condition again.
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
        """Reason why the last connection or attempt ended; empty while connected."""
        return self._connection.last_error

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
                break
            except QueueFullError:
                await self.room()
        return await sent

    def send_nowait(self, content: Any) -> "asyncio.Future[int | None]":
        """Queue a message and return a future of its offset, which need not be awaited.

        Raises QueueFullError if too many messages are not accepted yet: `await channel.room()` first.
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
        """Wait until every message sent so far is stored or refused."""
        self._entered()
        last = next(reversed(self._sends), 0)
        await self._wait(lambda: next(iter(self._sends), last + 1) > last)

    # Receiving

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChannelMessage:
        """Return the next message; with `auto_ack`, acknowledge the one before it."""
        if self._is_taking:
            raise LocalProtocolError("one task at a time takes the messages of a channel")
        self._is_taking = True
        try:
            if self.options.auto_ack:
                self._done_with_taken()
            return await self._next()
        finally:
            self._is_taking = False

    async def ack(self, upto: "ChannelMessage | Snapshot | int") -> None:
        """Acknowledge everything up to a message; return when the server has recorded it."""
        link = self._entered()
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
        link = self._entered()
        state: SnapshotBody | None = await self._answer(link, self._session.snapshot(self.name))
        return None if state is None else Snapshot.of(state)

    async def upload(self, state: Any, offset: int) -> int:
        """Upload the state that covers everything up to an offset, a JSON value or bytes.

        Returns the offset of the upload that is kept. Raises ChannelRefusedError unless the channel has the
        reducer `uploaded`.
        """
        link = self._entered()
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 1 << 63:
            raise LocalProtocolError(f"an offset is a number from 0 on, not {offset!r}")
        kept: int = await self._answer(link, self._session.upload(self.name, offset, state))
        return kept

    # Leaving and closing

    async def leave(self) -> None:
        """End the membership once all sent messages are stored, then close the channel.

        After this, the server keeps nothing for this processor. Waits for a connection if there is none.
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

        Raises UnacknowledgedError if the server does not have all messages by then. With 0 it neither waits
        nor raises. The iteration ends; futures and waiting calls raise ClientClosedError.
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
        """Wait until the channel is joined; raise if it never will be."""
        self._entered()
        await self._wait(lambda: self._is_joined)

    @overload
    def on(
        self, event: Literal["state"], handler: Callable[[ConnectionState], object]
    ) -> Callable[[], None]: ...
    @overload
    def on(
        self, event: Literal["missed"], handler: Callable[[MissedMessages], object]
    ) -> Callable[[], None]: ...
    def on(self, event: str, handler: Callable[[Any], object]) -> Callable[[], None]:
        """Call `handler` with every event of a kind; return a function that removes the handler.

        `state`: a ConnectionState, at every change. `missed`: a Missed, where messages are lost for this
        processor; `restored` is the snapshot that replaces them, if there is one.
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
        # Waiting would delay the error that is being raised, and a second error would hide it.
        await self.close(flush_s=None if error is None else 0)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    # Taking entries from the inbox

    async def _next(self) -> ChannelMessage:
        while True:
            if isinstance(self._over, ClientClosedError):
                raise StopAsyncIteration
            link = self._entered()
            first = self._inbox.first
            if isinstance(first, Delivered):
                self._inbox.take(first)
                self._taken = first.offset
                return ChannelMessage.of(first, self)
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
        """Pass a state to the application. If that is cancelled or fails, the next call passes it again."""
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

    # Events of the session and the link

    def happened(self, event: ChannelClientEvent) -> None:
        """Handle an event of the session. The caller calls `wake` afterwards."""
        if isinstance(event, told.ReceivedMessages | told.Restored | told.LostMessages):
            self._inbox.put(event)
        elif isinstance(event, told.SendAccepted):
            _settle(self._sends.pop(event.ticket, None), event.offset)
        elif isinstance(event, told.Rejected):
            futures = self._sends if event.ticket in self._sends else self._questions
            _fail(futures.pop(event.ticket, None), ChannelRefusedError(event.code, event.text))
        elif isinstance(event, told.Answered):
            _settle(self._questions.pop(event.ticket, None), event.answer)
        elif isinstance(event, told.JoinedChannel):
            self._is_joined = True
        elif isinstance(event, told.LeftChannel):
            self._end(ClientClosedError(f"channel {self.name!r} is left"))
        elif isinstance(event, told.Ended | ConnectionRefused):
            self._end(_error_of(event))
        # The link handles the other events; tasks that wait for them check the session.

    def state_changed(self, state: ConnectionState) -> None:
        if state is not ConnectionState.CONNECTED:
            self._is_joined = False
        self.wake()
        self._handlers.tell("state", state)

    def ended(self, error: ClientError) -> None:
        """Called when the connection has failed, which ends all its channels."""
        self._end(error)
        self._handlers.tell("state", ConnectionState.CLOSED)

    def _end(self, error: ClientError) -> None:
        """Refuse everything from now on, and fail all pending calls."""
        if self._over is not None:
            return
        self._over = error
        self._inbox.clear()
        self._unaccepted = len(self._sends)
        for future in (*self._sends.values(), *self._questions.values()):
            _fail(future, error)
            if not future.cancelled():
                future.exception()  # no warning if nothing awaits it: the channel has ended
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
            # Do not wait for a connection to send acknowledgements: messages are only delivered again.
            noted = self._session.is_acknowledged(self.name) or not self._is_joined
            return not self._sends and noted

        try:
            if self._over is None:
                async with asyncio.timeout(flush_s):
                    await self._wait(is_over)
        except (TimeoutError, ClientError):  # ClientError: the channel has ended meanwhile
            pass
        if self.unacknowledged:
            raise UnacknowledgedError(self.unacknowledged)

    def wake(self) -> None:
        """Let all waiting tasks check their condition again."""
        self._changes.set()
        self._changes.clear()


def _error_of(event: told.Ended | ConnectionRefused) -> ClientError:
    if isinstance(event, ConnectionRefused):
        return RefusedError(event.kind, event.reason)
    if event.code == told.REPLACED:
        return ReplacedError(f"{event.text}: give every processor a name of its own")
    if event.code == told.ELSEWHERE:
        return LeftError(event.text)
    return ChannelRefusedError(event.code, event.text)


def _settle(future: "asyncio.Future[Any] | None", result: object) -> None:
    if future is not None and not future.done():  # else it was cancelled, or the channel ended
        future.set_result(result)


def _fail(future: "asyncio.Future[Any] | None", error: ClientError) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
