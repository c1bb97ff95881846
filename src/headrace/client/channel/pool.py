"""Many channels over one connection, asynchronous and blocking.

Elsewhere: a single channel (`client.py`).
"""

import asyncio
from collections.abc import Callable, Generator
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from headrace.client.channel.blocking import ADVICE, BlockingChannel
from headrace.client.channel.client import ChannelClient
from headrace.client.channel.connection import ProcessorConnection
from headrace.client.channel.options import ChannelOptions, JoinOptionsDict
from headrace.client.client_thread import ClientThread
from headrace.client.entering import wait_for_connection
from headrace.client.topics.events import ConnectionState
from headrace.errors import (
    BadTopicNameError,
    ClientClosedError,
    ConfigError,
    LocalProtocolError,
    UnacknowledgedError,
)
from headrace.model import CHANNEL_PREFIX, check_topic_name


class ChannelPool:
    """One connection of a processor, for any number of channels.

    Use `async with connect(url, processor=name) as connection`, then `await connection.join("room")`.
    Closing ends the connection but no membership. The pool belongs to one event loop.
    """

    def __init__(self, connection: ProcessorConnection, options: ChannelOptions) -> None:
        assert options.processor is not None
        self.url = connection.url
        self.processor = options.processor
        self.options = options
        self._connection = connection
        self._joined: dict[str, ChannelClient] = {}
        self._is_entered = self._is_closed = False
        # Set and cleared in one step: this wakes all waiting tasks, which then check their condition again.
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
        """Reason why the last connection or attempt ended; empty while connected."""
        return self._connection.last_error

    async def join(self, name: str, **options: Unpack[JoinOptionsDict]) -> ChannelClient:
        """Join a channel, and return once it is joined, as entering `headrace.channels.join` does.

        Options that are not given are those of the connection. `close` of the channel ends its messages but
        neither the connection nor the membership; `leave` ends the membership.
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
        channel = await ChannelClient(name, self._connection, replace(self.options, **options))
        self._joined[name] = channel
        return channel

    async def connected(self) -> None:
        """Wait until the server has accepted this processor; raise if it never will."""
        self._check_open()
        while self.state is not ConnectionState.CONNECTED:
            await self._changes.wait()
            self._check_open()

    def on(
        self, event: Literal["state"], handler: Callable[[ConnectionState], object]
    ) -> Callable[[], None]:
        """Call `handler` with every state of the connection; return a function that removes the handler."""
        return self._connection.handlers.add(event, handler)

    async def close(self, flush_s: float | None = None) -> None:
        """Close every channel, as `Channel.close` does, and then the connection."""
        await self._close(lambda channel: channel.close(flush_s), is_abort=flush_s == 0)

    async def _close(self, close: Callable[[ChannelClient], Any], *, is_abort: bool) -> None:
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


class BlockingChannelPool:
    """The blocking `ChannelPool`, for scripts and threads. Its channels share one thread."""

    def __init__(self, connection: ChannelPool) -> None:
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
        """Reason why the last connection or attempt ended; empty while connected."""
        return self._connection.last_error

    def join(self, name: str, **options: Unpack[JoinOptionsDict]) -> BlockingChannel:
        """Join a channel, and return once it is joined."""
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
            pass  # closed by another thread
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
