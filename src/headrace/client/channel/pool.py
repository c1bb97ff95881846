"""Many channels over one connection, as an application uses them; and the blocking twin.

What a channel does is in `channel_client.py`.
"""

import asyncio
from collections.abc import Callable, Generator
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from headrace.client.channel_blocking import ADVICE, BlockingChannel
from headrace.client.channel_client import Channel
from headrace.client.channel_connection import ChannelConnection
from headrace.client.channel_options import ChannelOptions, JoinOptionsDict
from headrace.client.client_thread import ClientThread
from headrace.client.entering import wait_for_connection
from headrace.client.events import ConnectionState
from headrace.errors import (
    BadTopicNameError,
    ClientClosedError,
    ConfigError,
    LocalProtocolError,
    UnacknowledgedError,
)
from headrace.model import CHANNEL_PREFIX, check_topic_name


class Connection:
    """One connection of a processor, for as many channels as it joins.

    Use `async with connect(url, processor=name) as connection`, then `await connection.join("room")`.
    Closing ends the connection and no membership. It belongs to one event loop.
    """

    def __init__(self, connection: ChannelConnection, options: ChannelOptions) -> None:
        assert options.processor is not None
        self.url = connection.url
        self.processor = options.processor
        self.options = options
        self._connection = connection
        self._joined: dict[str, Channel] = {}
        self._is_entered = self._is_closed = False
        # Only ever set and cleared at once: it wakes all who wait, to look again.
        self._changes = asyncio.Event()

    @property
    def state(self) -> ConnectionState:
        return self._connection.session.state

    @property
    def latency_s(self) -> float | None:
        """Round trip to the server, from the last answered ping; None before the first."""
        return self._connection.session.latency_s

    @property
    def last_error(self) -> str:
        """Why the last connection, or attempt at one, ended; empty while connected."""
        return self._connection.last_error

    async def join(self, name: str, **options: Unpack[JoinOptionsDict]) -> Channel:
        """Join a channel; returns when that is done, as entering `headrace.channels.join` does.

        The options are those of the connection where they are not given. `close` of the channel ends its
        messages and keeps the connection; the processor stays a member, and `leave` ends that.
        """
        self._check_open()
        try:
            check_topic_name(CHANNEL_PREFIX + name)
            if not name:
                raise BadTopicNameError("a channel's name must not be empty")
        except BadTopicNameError as error:
            raise ConfigError(str(error)) from None
        unknown = set(options) - set(JoinOptionsDict.__annotations__)
        if unknown:
            raise TypeError(f"{min(unknown)} is no option of a channel that shares its connection")
        channel = await Channel(name, self._connection, replace(self.options, **options))
        self._joined[name] = channel
        return channel

    async def connected(self) -> None:
        """Wait until the server has let this processor in; raises when it never will."""
        self._check_open()
        while self.state is not ConnectionState.CONNECTED:
            await self._changes.wait()
            self._check_open()

    def on(
        self, event: Literal["state"], handler: Callable[[ConnectionState], object]
    ) -> Callable[[], None]:
        """Call `handler` with every state of the connection; returns a function that ends that."""
        return self._connection.handlers.add(event, handler)

    async def close(self, flush_s: float | None = None) -> None:
        """Close every channel, as `Channel.close` does, and then the connection."""
        await self._close(lambda channel: channel.close(flush_s), is_abort=flush_s == 0)

    async def _close(self, close: Callable[[Channel], Any], *, is_abort: bool) -> None:
        self._is_closed = self._connection.is_closing = True
        joined, self._joined = list(self._joined.values()), {}
        try:
            ends = await asyncio.gather(*map(close, joined), return_exceptions=True)
        finally:
            await self._connection.stop(abort=is_abort)
            self._wake()
        failures = [end for end in ends if isinstance(end, BaseException)]
        for failure in failures:
            if not isinstance(failure, UnacknowledgedError):
                raise failure
        if failures:
            raise UnacknowledgedError(sum(channel.unacknowledged for channel in joined))

    async def __aenter__(self) -> Self:
        if self._is_closed:
            raise ClientClosedError("the connection is closed")
        if not self._is_entered:
            self._is_entered = True
            self._connection.handlers.add("state", lambda _: self._wake())
            self._connection.start()
        try:
            await wait_for_connection(
                self.options.connect_timeout_s,
                self.connected,
                what=f"no connection to {self.url}",
                last_error=lambda: self.last_error,
            )
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
        await self._close(
            lambda channel: channel.__aexit__(kind, error, traceback), is_abort=error is not None
        )

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def _check_open(self) -> None:
        if self._connection.over is not None:
            raise self._connection.over.with_traceback(None)
        if self._is_closed:
            raise ClientClosedError("the connection is closed")
        if not self._is_entered:
            raise LocalProtocolError("enter the connection first: `async with` or `await` it")

    def _wake(self) -> None:
        self._changes.set()
        self._changes.clear()


class BlockingConnection:
    """The same for scripts and threads. Its channels share one thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._thread = ClientThread(
            f"headrace {connection.url}",
            lambda: connection,
            lambda: connection.close(flush_s=0),
            ADVICE,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return self._connection.url

    @property
    def processor(self) -> str:
        return self._connection.processor

    @property
    def state(self) -> ConnectionState:
        return self._connection.state

    @property
    def last_error(self) -> str:
        """Why the last connection, or attempt at one, ended; empty while connected."""
        return self._connection.last_error

    def join(self, name: str, **options: Unpack[JoinOptionsDict]) -> BlockingChannel:
        """Join a channel; returns when that is done."""
        channel = self._thread.call(lambda: self._connection.join(name, **options))
        return BlockingChannel(channel, self._thread)

    def close(self, flush_s: float | None = None) -> None:
        """Close every channel, as `BlockingChannel.close` does, and then the connection."""
        self._end(lambda: self._connection.close(flush_s))

    def _end(self, close: Callable[[], Any]) -> None:
        self._thread.check()
        try:
            if not self._thread.is_closed:
                self._thread.call(close)
        except ClientClosedError:
            pass  # by another thread
        finally:
            self._thread.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(lambda: self._connection.__aexit__(kind, error, traceback))
