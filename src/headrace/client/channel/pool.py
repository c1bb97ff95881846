"""Many channels over one connection: the session of a processor, and the channels that get its events.

Elsewhere: a single channel (`client.py`). It has a connection of its own, which is not shared.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

from headrace.client.channel.client import ChannelClient, ChannelOptions, JoinOptionsDict
from headrace.client.lifecycle import Lifecycle
from headrace.client.link import Link
from headrace.client.transport import MakeConnection
from headrace.errors import (
    BadTopicNameError,
    ClientClosedError,
    ConfigError,
    RefusedError,
    UnacknowledgedError,
)
from headrace.model import CHANNEL_PREFIX, check_topic_name
from headrace.session.channel.client import ChannelClientEvent, ChannelClientSession
from headrace.session.client import Broken, ConnectionRefused, ConnectionState, Finished


class ChannelPool(Lifecycle[ChannelClientEvent]):
    """One connection of a processor, for any number of channels.

    Use `async with connect(url, processor=name) as connection`, then `await connection.join("room")`.
    Closing ends the connection but no membership. The pool belongs to one event loop.
    """

    options: ChannelOptions
    _noun = "connection"

    def __init__(
        self, url: str, make_connection: MakeConnection, options: ChannelOptions, *, is_shared: bool
    ) -> None:
        """Prepare a connection. One that is not shared has a single channel and ends with it."""
        assert options.processor is not None
        super().__init__(url, options)
        self.processor = options.processor
        self.session = ChannelClientSession(
            options.processor,
            None if callable(options.token) else options.token,
            instance=secrets.token_hex(8),
            ping_interval_s=options.ping_interval_s,
            pings_unanswered_max=options.pings_unanswered_max,
            queue_max=options.queue_max,
            queue_bytes_max=options.queue_bytes_max,
            poll_interval_s=options.poll_interval_s,
            is_shared=is_shared,
        )
        self._make_connection = make_connection
        self._is_shared = is_shared
        self._channels: dict[str, ChannelClient] = {}

    async def join(self, name: str, **options: Unpack[JoinOptionsDict]) -> ChannelClient:
        """Join a channel, and return once it is joined, as entering `headrace.channels.join` does.

        Options that are not given are those of the connection. `close` of the channel ends its messages but
        neither the connection nor the membership; `leave` ends the membership.
        """
        self._require_link()
        try:
            check_topic_name(CHANNEL_PREFIX + name)
            if not name:
                raise BadTopicNameError("a channel's name must not be empty")
        except BadTopicNameError as error:
            raise ConfigError(str(error)) from None
        unknown = set(options) - set(JoinOptionsDict.__annotations__)
        if unknown:
            raise TypeError(
                f"{min(unknown)} is not an option of a channel that shares its connection"
            )
        return await ChannelClient(name, self, replace(self.options, **options))

    async def close(self, flush_s: float | None = None) -> None:
        """Close every channel, as `Channel.close` does, and then the connection."""
        await self._close(lambda channel: channel.close(flush_s), flush_s)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._close(
            lambda channel: channel.__aexit__(kind, error, trace), None if error is None else 0
        )

    async def _close(self, close: Callable[[ChannelClient], Any], flush_s: float | None) -> None:
        self._is_closed = True
        self._end(ClientClosedError("the connection is closed"))
        channels = list(self._channels.values())
        try:
            ends = await asyncio.gather(*map(close, channels), return_exceptions=True)
        finally:
            # The channels have waited for their messages. Only `close(0)` and an error cut off the rest.
            await self._stop(abort=flush_s == 0)
        failures = [end for end in ends if isinstance(end, BaseException)]
        for failure in failures:
            if not isinstance(failure, UnacknowledgedError):
                raise failure
        if failures:
            raise UnacknowledgedError(sum(channel.unacknowledged for channel in channels))

    # For its channels

    def enter(self, channel: ChannelClient) -> Link[ChannelClientEvent]:
        """Join a channel; raise LocalProtocolError if it is already joined."""
        options = channel.options
        self.session.join(
            channel.name,
            options.receive,
            from_state=options.start_at == "state",
            lease_s=options.lease_s,
        )
        self._channels[channel.name] = channel
        link = self._link or self._connect(self.session, self._make_connection, self._handle)
        link.send_soon()
        return link

    async def remove(self, channel: ChannelClient, abort: bool) -> None:
        """Remove a channel from a shared connection; the processor stays a member. Else disconnect."""
        if not self._is_shared:
            await self._stop(abort)
        elif self._channels.get(channel.name) is channel:
            del self._channels[channel.name]
            if not self._is_closed:  # else the server sees the end of the whole connection
                self.session.part(channel.name)
                if self._link is not None:
                    self._link.send_soon()

    # The lifecycle

    async def _start(self) -> None:
        if self._link is None:
            self._connect(self.session, self._make_connection, self._handle)

    def _require_link(self) -> Link[ChannelClientEvent]:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        return super()._require_link()

    def _handle(self, events: list[ChannelClientEvent]) -> None:
        for event in events:
            if isinstance(event, ConnectionRefused):
                self._refusal = RefusedError(event.kind, event.reason)
                for channel in list(self._channels.values()):
                    channel.happened(event)
            elif not isinstance(event, Broken | Finished):
                found = self._channels.get(event.channel)
                if found is not None:
                    found.happened(event)
        for channel in list(self._channels.values()):
            channel._wake()

    def _state_changed(self, state: ConnectionState) -> None:
        over = self._final_error if state is ConnectionState.CLOSED else None
        for channel in list(self._channels.values()):
            channel.state_changed(state, over)
        super()._state_changed(state)
