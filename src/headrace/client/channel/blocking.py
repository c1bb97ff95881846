"""The blocking channel client, for scripts and threads: it runs a `ChannelClient` in a thread of its own.

Every method may be called from any thread, but only one thread at a time may take messages. `restore` and
handlers run in the channel's thread and must not block it: there, methods that wait raise LocalProtocolError.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self, overload

from headrace.client.channel.client import ChannelClient
from headrace.client.channel.events import ChannelMessage, MissedMessages, Snapshot
from headrace.client.client_thread import ClientThread
from headrace.client.topics.events import ConnectionState
from headrace.errors import ClientClosedError

ADVICE = (
    "`restore` and handlers run in the channel's own thread, and would wait here for itself: "
    "use send_nowait, or another thread"
)


class BlockingChannel:
    """A channel whose methods wait. `timeout_s` is in seconds everywhere; None means no limit."""

    def __init__(self, channel: ChannelClient, shared: ClientThread | None = None) -> None:
        """Use `shared`, the thread of a connection in which the channel is already entered, or start one.

        A shared thread keeps running when the channel is closed.
        """
        self._channel = channel
        self._is_shared = shared is not None
        if shared is not None:
            self._thread = shared
            return
        self._thread = ClientThread(
            f"headrace {channel.url}", lambda: channel, lambda: channel.close(flush_s=0), ADVICE
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return self._channel.url

    @property
    def name(self) -> str:
        return self._channel.name

    @property
    def processor(self) -> str:
        return self._channel.processor

    @property
    def restored(self) -> Snapshot | None:
        """The last snapshot that replaced messages; set when the application reaches it."""
        return self._channel.restored

    @property
    def state(self) -> ConnectionState:
        return self._channel.state

    @property
    def latency_s(self) -> float | None:
        """Round trip to the server, from the last answered ping; None before the first."""
        return self._channel.latency_s

    @property
    def last_error(self) -> str:
        """Reason why the last connection or attempt ended; empty while connected."""
        return self._channel.last_error

    @property
    def unacknowledged(self) -> int:
        """Number of sent messages that the server has not acknowledged."""
        return self._channel.unacknowledged

    def send(self, content: Any, timeout_s: float | None = None) -> int | None:
        """Send a JSON value or bytes, wait until it is durable, and return the offset just past it.

        After a TimeoutError the message may still be sent.
        """
        return self._thread.call(lambda: self._channel.send(content), timeout_s)

    def send_nowait(self, content: Any) -> "Future[int | None]":
        """Queue a message and return a future of its offset, which need not be waited for.

        The future raises the error of an invalid message, and QueueFullError.
        """

        async def send() -> int | None:
            return await self._channel.send_nowait(content)

        return self._thread.begin(send)

    def room(self, timeout_s: float | None = None) -> None:
        """Wait until `send_nowait` has room."""
        self._thread.call(self._channel.room, timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every message sent so far is stored or refused."""
        self._thread.call(self._channel.flush, timeout_s)

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
            return self._thread.call(lambda: anext(self._channel, None), timeout_s)
        except ClientClosedError:
            return None

    def __iter__(self) -> Iterator[ChannelMessage]:
        return self.messages()

    def ack(self, upto: ChannelMessage | Snapshot | int, timeout_s: float | None = None) -> None:
        """Acknowledge everything up to a message; return when the server has recorded it."""
        self._thread.call(lambda: self._channel.ack(upto), timeout_s)

    def snapshot(self, timeout_s: float | None = None) -> Snapshot | None:
        """Return the current state or the last upload; None if there is none."""
        return self._thread.call(self._channel.snapshot, timeout_s)

    def upload(self, state: Any, offset: int, timeout_s: float | None = None) -> int:
        """Upload the state that covers everything up to an offset; return the offset that is kept."""
        return self._thread.call(lambda: self._channel.upload(state, offset), timeout_s)

    def connected(self, timeout_s: float | None = None) -> None:
        """Wait until the channel is joined; raise if it never will be."""
        self._thread.call(self._channel.connected, timeout_s)

    @overload
    def on(
        self, event: Literal["state"], handler: Callable[[ConnectionState], object]
    ) -> Callable[[], None]: ...
    @overload
    def on(
        self, event: Literal["missed"], handler: Callable[[MissedMessages], object]
    ) -> Callable[[], None]: ...
    def on(self, event: Any, handler: Callable[[Any], object]) -> Callable[[], None]:
        """Call `handler`, in the channel's thread, with every event of a kind, as `Channel.on` does."""
        return self._channel.on(event, handler)

    def leave(self, timeout_s: float | None = None) -> None:
        """End the membership once all sent messages are stored, then close the channel."""
        self._thread.call(self._channel.leave, timeout_s)
        self._end_thread()

    def close(self, flush_s: float | None = None) -> None:
        """Wait up to `flush_s` (default `flush_timeout_s`) for the server to have everything, then end.

        Raises UnacknowledgedError if the server does not have all messages by then. With 0 it neither waits
        nor raises.
        """
        self._thread.check()
        try:
            if not self._thread.is_closed:
                self._thread.call(lambda: self._channel.close(flush_s))
        except ClientClosedError:
            pass  # closed by another thread
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        if not self._is_shared:
            self._thread.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread.is_closed:
            return
        try:
            self._thread.call(lambda: self._channel.__aexit__(kind, error, traceback))
        finally:
            self._end_thread()
