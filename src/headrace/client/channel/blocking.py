"""The blocking channel client, for scripts and threads: one channel, or many over one connection.

Only one thread at a time may take messages. `restore` and handlers run in the channel's thread and must not
block it.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Literal, Unpack, overload

from headrace.client.blocking import Blocking
from headrace.client.channel.client import ChannelClient, JoinOptionsDict
from headrace.client.channel.events import ChannelMessage, Snapshot
from headrace.client.channel.pool import ChannelPool
from headrace.client.lifecycle import EventHandler, Remove
from headrace.errors import ClientClosedError
from headrace.session.client import ConnectionState
from headrace.wire.channel import MissedMessages

ADVICE = (
    "`restore` and handlers run in the channel's own thread, which would wait here for itself: "
    "call send_nowait, or use another thread"
)


class BlockingChannel(Blocking[ChannelClient]):
    """A channel whose methods wait. `timeout_s` is in seconds everywhere; None means no limit."""

    _advice = ADVICE

    @property
    def name(self) -> str:
        return self._client.name

    @property
    def processor(self) -> str:
        return self._client.processor

    @property
    def restored(self) -> Snapshot | None:
        """The last snapshot that replaced messages; set when the application reaches it."""
        return self._client.restored

    @property
    def unacknowledged(self) -> int:
        """Number of sent messages that the server has not acknowledged."""
        return self._client.unacknowledged

    def send(self, content: Any, timeout_s: float | None = None) -> int | None:
        """Send a message, as `Channel.send` does. After a TimeoutError it may still be sent."""
        return self._thread.call(lambda: self._client.send(content), timeout_s)

    def send_nowait(self, content: Any) -> "Future[int | None]":
        """Queue a message and return a future of its offset, and of the errors of `Channel.send_nowait`."""

        async def send() -> int | None:
            return await self._client.send_nowait(content)

        return self._thread.begin(send)

    def room(self, timeout_s: float | None = None) -> None:
        """Wait until `send_nowait` has room."""
        self._thread.call(self._client.room, timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every message sent so far is stored or refused."""
        self._thread.call(self._client.flush, timeout_s)

    def messages(self, timeout_s: float | None = None) -> Iterator[ChannelMessage]:
        """Iterate over messages until none arrives for `timeout_s`, or the channel is closed."""
        while True:
            try:
                message = self.take(timeout_s)
            except TimeoutError:
                return
            if message is None:
                return
            yield message

    def take(self, timeout_s: float | None = None) -> ChannelMessage | None:
        """Return the next message, or None if the channel is closed; raise TimeoutError after `timeout_s`."""
        try:
            return self._thread.call(lambda: anext(self._client, None), timeout_s)
        except ClientClosedError:
            return None

    def __iter__(self) -> Iterator[ChannelMessage]:
        return self.messages()

    def ack(self, upto: ChannelMessage | Snapshot | int, timeout_s: float | None = None) -> None:
        """Acknowledge everything up to a message; return when the server has recorded it."""
        self._thread.call(lambda: self._client.ack(upto), timeout_s)

    def snapshot(self, timeout_s: float | None = None) -> Snapshot | None:
        """Return the current state or the last upload; None if there is none."""
        return self._thread.call(self._client.snapshot, timeout_s)

    def upload(self, state: Any, offset: int, timeout_s: float | None = None) -> int:
        """Upload the state that covers everything up to an offset; return the offset that is kept."""
        return self._thread.call(lambda: self._client.upload(state, offset), timeout_s)

    def connected(self, timeout_s: float | None = None) -> None:
        """Wait until the channel is joined; raise if it never will be."""
        self._thread.call(self._client.connected, timeout_s)

    @overload
    def on(self, event: Literal["state"], handler: EventHandler[ConnectionState]) -> Remove: ...
    @overload
    def on(self, event: Literal["missed"], handler: EventHandler[MissedMessages]) -> Remove: ...
    def on(self, event: Any, handler: EventHandler[Any]) -> Remove:
        """Call `handler`, in the channel's thread, with every event of a kind, as `Channel.on` does."""
        return self._client.on(event, handler)

    def leave(self, timeout_s: float | None = None) -> None:
        """End the membership once all sent messages are stored, then close the channel."""
        self._thread.call(self._client.leave, timeout_s)
        self._end_thread()


class BlockingChannelPool(Blocking[ChannelPool]):
    """The blocking `ChannelPool`, for scripts and threads. Its channels share one thread."""

    _advice = ADVICE

    @property
    def processor(self) -> str:
        return self._client.processor

    def join(self, name: str, **options: Unpack[JoinOptionsDict]) -> BlockingChannel:
        """Join a channel, and return once it is joined."""
        channel = self._thread.call(lambda: self._client.join(name, **options))
        return BlockingChannel(channel, self._thread)
