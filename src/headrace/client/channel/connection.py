"""The connection of one processor: session, link, and the channels that receive their events."""

import secrets
from typing import Protocol

from headrace.client.channel.options import ChannelOptions
from headrace.client.lifecycle import Handlers
from headrace.client.link import Link
from headrace.client.options import exponential
from headrace.client.transport.connection import MakeConnection
from headrace.errors import ClientClosedError, ClientError, RefusedError
from headrace.printing import described
from headrace.session.channel.client import (
    ChannelClientEvent,
    ChannelClientSession,
    ConnectionRefused,
)
from headrace.session.topics.client import Broken, ConnectionState, Finished


class ConnectedChannel(Protocol):
    """A channel as its connection sees it."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> ChannelOptions: ...

    def happened(self, event: ChannelClientEvent) -> None: ...

    def state_changed(self, state: ConnectionState) -> None: ...

    def ended(self, error: ClientError) -> None: ...

    def wake(self) -> None: ...


class ProcessorConnection:
    """A connection with one channel, or with `is_shared` any number of channels.

    A single channel and its connection end together; channels can enter and leave a shared connection.
    """

    def __init__(
        self, url: str, make_connection: MakeConnection, options: ChannelOptions, *, is_shared: bool
    ) -> None:
        assert options.processor is not None
        self.url = url
        self.is_shared = is_shared
        self.session = ChannelClientSession(
            options.processor,
            options.token,
            instance=secrets.token_hex(8),
            ping_interval_s=options.ping_interval_s,
            pings_unanswered_max=options.pings_unanswered_max,
            queue_max=options.queue_max,
            queue_bytes_max=options.queue_bytes_max,
            poll_interval_s=options.poll_interval_s,
            is_shared=is_shared,
        )
        self.handlers = Handlers("state")
        self.is_closing = False
        """True once the whole connection ends, so that the server need not be told about single channels."""
        self.over: ClientError | None = None
        """Error that ended the connection for good, if the server refused it or the client failed."""
        self._make_connection = make_connection
        self._options = options
        self._link: Link[ChannelClientEvent] | None = None
        self._channels: dict[str, ConnectedChannel] = {}

    @property
    def last_error(self) -> str:
        return self._link.last_error if self._link is not None else ""

    @property
    def channels(self) -> list[ConnectedChannel]:
        return list(self._channels.values())

    def start(self) -> Link[ChannelClientEvent]:
        """Connect and stay connected."""
        if self._link is None:
            self._link = Link(
                self.session,
                self._make_connection,
                backoff=self._options.backoff or exponential(),
                attempt_timeout_s=self._options.attempt_timeout_s,
                handle=self._handle,
                changed=self._state_changed,
                failed=self._failed,
            )
        return self._link

    def enter(self, channel: ConnectedChannel) -> Link[ChannelClientEvent]:
        """Join a channel; raise LocalProtocolError if it is already joined."""
        options = channel.options
        self.session.join(
            channel.name,
            options.receive,
            from_state=options.start_at == "state",
            lease_s=options.lease_s,
        )
        self._channels[channel.name] = channel
        link = self.start()
        link.send_soon()
        return link

    def part(self, channel: ConnectedChannel) -> None:
        """Remove a channel from the connection; the processor stays a member of it."""
        if self._channels.get(channel.name) is channel:
            del self._channels[channel.name]
            if self.is_closing:
                return
            self.session.part(channel.name)
            if self._link is not None:
                self._link.send_soon()

    async def stop(self, *, abort: bool) -> None:
        """End for good. Without `abort`, pending bytes are sent first."""
        if self._link is not None:
            await self._link.stop(abort=abort)
        if self.session.state is not ConnectionState.CLOSED:
            self.session.close()
            if self._link is not None:
                self._tell(ConnectionState.CLOSED)

    # Events of the session and the link

    def _handle(self, events: list[ChannelClientEvent]) -> None:
        for event in events:
            if isinstance(event, ConnectionRefused):
                for channel in self.channels:
                    channel.happened(event)
                self.over = RefusedError(event.kind, event.reason)
            elif not isinstance(event, Broken | Finished):
                found = self._channels.get(event.channel)
                if found is not None:
                    found.happened(event)
        for channel in self.channels:
            channel.wake()

    def _state_changed(self, state: ConnectionState) -> None:
        self._tell(state)

    def _failed(self, error: BaseException) -> None:
        closed = ClientClosedError(f"the client failed: {described(error)}")
        closed.__cause__ = error
        self.over = closed
        self.session.close()
        for channel in self.channels:
            channel.ended(closed)
        self.handlers.tell("state", ConnectionState.CLOSED)

    def _tell(self, state: ConnectionState) -> None:
        for channel in self.channels:
            channel.state_changed(state)
        self.handlers.tell("state", state)
