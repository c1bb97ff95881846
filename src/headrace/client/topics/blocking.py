"""The blocking client for topics, for scripts and threads: it runs a `Client` in a thread of its own.

Publishes go through a queue, so that many of them cost one wake-up of that thread.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Self, overload

from headrace.client.blocking import Blocking
from headrace.client.lifecycle import EventHandler, Remove
from headrace.client.topics.client import Client, Payload, as_bytes
from headrace.client.topics.reader import Acknowledge, ReaderChange, ReaderSubscription, Start
from headrace.client.topics.subscription import Handler, Message, Subscription
from headrace.errors import (
    ClientClosedError,
    PublishRefusedError,
    ReaderLostError,
    UnacknowledgedError,
    WindowFullError,
)
from headrace.model import check_publish_topic
from headrace.session.client import ConnectionState
from headrace.session.topics.events import Missed, check_payload, check_topic_type

GATHER_S = 0.001
"""Seconds for which `publish_nowait` collects messages before the client's thread gets them: waking the
thread for each message would cost more than all other work. A call that waits for acknowledgements ends the
delay."""


class BlockingClient(Blocking[Client]):
    """A client whose methods wait. `timeout_s` is in seconds everywhere; None means no limit."""

    _advice = (
        "a handler runs in the client's own thread, which would wait here for itself: "
        "call publish_nowait, or use another thread"
    )

    def __init__(self, client: Client) -> None:
        # The lock of the thread guards these fields. It is notified when publishes are settled.
        self._queue: deque[tuple[str, bytes, Future[None]]] = deque()
        self._drain_scheduled = False
        self._published = 0
        self._acknowledged = 0
        self._in_flight_bytes = 0
        self._refusal: PublishRefusedError | None = None
        """The first refusal that neither `publish` nor `flush` has raised yet."""
        client.on("state", self._state_changed)
        super().__init__(client)
        self._lock = self._thread.lock

    @property
    def unacknowledged(self) -> int:
        """Number of publishes that are not acknowledged yet."""
        return self._published - self._acknowledged

    def publish(self, topic: str, payload: Payload, timeout_s: float | None = None) -> None:
        """Publish a message and wait until the server has acknowledged it.

        After a TimeoutError the message may still be published, unless the window had no room for it.
        """
        self._thread.check()
        deadline = _deadline(timeout_s)
        while True:
            try:
                future = self.publish_nowait(topic, payload)
                break
            except WindowFullError:
                self.window(_left(deadline))
        self._hurry()
        try:
            future.result(_left(deadline))
        except PublishRefusedError as error:
            with self._lock:
                if self._refusal is error:
                    self._refusal = None
            raise

    def publish_nowait(self, topic: str, payload: Payload) -> "Future[None]":
        """Publish a message; return a future that its acknowledgement resolves. It need not be waited for.

        Raises WindowFullError if too much is unacknowledged: call `window` first.
        """
        payload = as_bytes(payload)
        check_topic_type(topic)
        check_publish_topic(topic)
        check_payload(payload)
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a publish cannot be cancelled
        with self._lock:
            self._thread.check_open()
            if not self._has_room():
                raise WindowFullError(f"{self.unacknowledged} publishes are unacknowledged")
            self._published += 1
            self._in_flight_bytes += len(payload)
            self._queue.append((topic, payload, future))
            if not self._drain_scheduled:
                self._drain_scheduled = True
                self._thread.loop.call_soon_threadsafe(
                    self._thread.loop.call_later, GATHER_S, self._drain
                )
        return future

    def window(self, timeout_s: float | None = None) -> None:
        """Wait until `publish_nowait` has room."""
        self._wait(self._has_room, timeout_s, "room in the window")

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything published so far, by any thread, is acknowledged.

        Raises PublishRefusedError if the server refused one of the messages; the others are acknowledged.
        """
        self._settled(timeout_s)
        with self._lock:
            refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def _settled(self, timeout_s: float | None) -> None:
        until = self._published
        self._hurry()
        self._wait(lambda: self._acknowledged >= until, timeout_s, "acknowledgements")

    @overload
    def subscribe(
        self,
        topic: str,
        handler: Handler | None = None,
        *,
        offset: int | None = None,
        serial: str | None = None,
        timeout_s: float | None = None,
    ) -> "BlockingSubscription": ...
    @overload
    def subscribe(
        self,
        topic: str,
        handler: Handler | None = None,
        *,
        reader: str,
        start: Start = "oldest",
        ack: Acknowledge = "auto",
        timeout_s: float | None = None,
    ) -> "BlockingReaderSubscription": ...
    def subscribe(
        self,
        topic: str,
        handler: Handler | None = None,
        *,
        offset: int | None = None,
        serial: str | None = None,
        reader: str | None = None,
        start: Start = "oldest",
        ack: Acknowledge = "auto",
        timeout_s: float | None = None,
    ) -> "BlockingSubscription":
        """Subscribe from an offset (0: from the oldest message kept), a serial, or from now on.

        Iterate over the subscription, or pass a `handler`, which is called with each message in order, in the
        client's thread. The iteration ends if no message arrives for `timeout_s`. `reader`, `start` and `ack`
        are those of `Client.subscribe`.
        """
        # An iteration acknowledges single messages, although it fetches batches.
        is_manual = reader is not None and handler is None and ack == "auto"
        options: Any = {"offset": offset, "serial": serial, "reader": reader, "start": start}
        options["ack"] = "manual" if is_manual else ack

        async def subscribe() -> Subscription:
            made: Subscription = self._client.subscribe(topic, handler, **options)
            return made

        found = self._thread.call(subscribe)
        if isinstance(found, ReaderSubscription):
            return BlockingReaderSubscription(self, found, timeout_s, is_auto=ack == "auto")
        return BlockingSubscription(self, found, timeout_s)

    def unsubscribe(self, topic: str) -> None:
        """End the subscription of a topic; do nothing if there is none.

        Returns when the server has confirmed it, or at once if a handler calls it.
        """
        if self._thread.is_current:
            self._client.unsubscribe_nowait(topic)
        else:
            self._thread.call(lambda: self._client.unsubscribe(topic))

    @overload
    def on(self, event: Literal["state"], handler: EventHandler[ConnectionState]) -> Remove: ...
    @overload
    def on(self, event: Literal["missed"], handler: EventHandler[Missed]) -> Remove: ...
    @overload
    def on(self, event: Literal["reader"], handler: EventHandler[ReaderChange]) -> Remove: ...
    def on(self, event: Any, handler: EventHandler[Any]) -> Remove:
        """Call `handler`, in the client's thread, with every event of a kind, as `Client.on` does."""
        return self._client.on(event, handler)

    def close(self, flush_s: float | None = None) -> None:
        """Wait up to `flush_s` (default `flush_timeout_s`) for acknowledgements, then disconnect.

        Raises UnacknowledgedError for publishes without one. With 0 it neither waits nor raises.
        """
        flush_s = self._client.options.flush_timeout_s if flush_s is None else flush_s
        try:
            if flush_s > 0 and not self._thread.is_closed:
                self._settled(flush_s)
                if not self._thread.is_current:
                    self._thread.call(self._client.flush_readers, flush_s)
        except (TimeoutError, ClientClosedError):  # the second: closed by another thread
            if self.unacknowledged:
                raise UnacknowledgedError(self.unacknowledged) from None
        finally:
            self._thread.end()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(flush_s=None if error is None else 0)

    def _has_room(self) -> bool:
        options = self._client.options
        return (
            self.unacknowledged < options.window_max
            and self._in_flight_bytes < options.window_bytes_max
        )

    def _hurry(self) -> None:
        """Pass collected publishes to the client's thread now."""
        if self._queue:
            self._thread.soon(self._drain)

    def _wait(self, done: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        with self._lock:
            self._thread.check_open()
            if done():
                return
            self._thread.check()
            if not self._lock.wait_for(lambda: done() or self._thread.is_closed, timeout_s):
                raise TimeoutError(f"no {what} within {timeout_s} s")
            if not done():
                self._thread.check_open()

    # Run in the client's thread

    def _state_changed(self, state: ConnectionState) -> None:
        if state is ConnectionState.CLOSED:  # also when the client failed on its own
            self._thread.close()
            while self._queue:
                self._queue.popleft()[2].set_exception(ClientClosedError("the client is closed"))

    def _drain(self) -> None:
        with self._lock:
            self._drain_scheduled = False
        batch: list[tuple[Future[None], asyncio.Future[None]]] = []
        batch_bytes = 0
        last: asyncio.Future[None] | None = None
        # Full: `_settle` calls this again after an acknowledgement. Closed: the queued publishes fail.
        with suppress(WindowFullError, ClientClosedError):
            while self._queue:
                topic, payload, future = self._queue[0]
                last = self._client.publish_nowait(topic, payload)
                self._queue.popleft()
                batch.append((future, last))
                batch_bytes += len(payload)
        if last is not None:
            # Acknowledgements arrive in order and a batch is sent together: the last one settles all.
            last.add_done_callback(partial(self._settle, batch, batch_bytes))

    def _settle(
        self,
        batch: "list[tuple[Future[None], asyncio.Future[None]]]",
        batch_bytes: int,
        last: "asyncio.Future[None]",
    ) -> None:
        refusal: PublishRefusedError | None = None
        for future, publish in batch:
            error = publish.exception()
            if error is None:
                future.set_result(None)
                continue
            future.set_exception(error)
            if isinstance(error, PublishRefusedError):
                refusal = refusal or error
        if isinstance(last.exception(), ClientClosedError):
            return
        with self._lock:
            self._refusal = self._refusal or refusal
            self._acknowledged += len(batch)
            self._in_flight_bytes -= batch_bytes
            self._lock.notify_all()
        if self._queue:
            self._drain()


class BlockingSubscription:
    """An iterator over the messages of one topic; it ends when unsubscribed, closed or timed out.

    After a timeout it can be iterated again. As a context manager it unsubscribes on exit.
    """

    def __init__(
        self, client: BlockingClient, subscription: Subscription, timeout_s: float | None
    ) -> None:
        self.topic = subscription.topic
        self.timeout_s = timeout_s
        self._client = client
        self._thread = client._thread
        self._subscription = subscription
        self._last: Message | None = None
        # Filled by the client's thread, so that messages which arrive after a timeout are not lost.
        self._ready: deque[Message] = deque()

    @property
    def next_offset(self) -> int | None:
        """Offset after the last message taken, or where delivery began: see `Subscription.next_offset`."""
        return self._subscription.next_offset if self._last is None else self._last.next_offset

    @property
    def serial(self) -> str | None:
        """The same position as a serial: see `Subscription.serial`. Wombat only."""
        return self._subscription.serial if self._last is None else self._last.serial

    def attached(self) -> int | None:
        """Wait until the server delivers this topic; return the offset, as `Subscription.attached` does."""
        return self._thread.call(self._subscription.attached)

    def unsubscribe(self) -> None:
        """End this subscription, as `client.unsubscribe` does."""
        if not self._subscription.ended:
            self._client.unsubscribe(self.topic)

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        while True:
            try:
                self._last = message = self._ready.popleft()
                return message
            except IndexError:
                if not self._fetch():
                    raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ClientClosedError):  # the subscription has ended with the client
            self.unsubscribe()

    def _fetch(self) -> bool:
        async def fetch() -> bool:
            batch = await self._subscription.batch()
            self._ready.extend(batch)
            return bool(batch)

        try:
            return self._thread.call(fetch, self.timeout_s)
        except (TimeoutError, ClientClosedError):
            return False


class BlockingReaderSubscription(BlockingSubscription):
    """An iterator over the messages that a named reader has not acknowledged.

    As in `ReaderSubscription`, with `ack="auto"` taking the next message acknowledges the one before it.
    """

    _subscription: ReaderSubscription

    def __init__(
        self,
        client: BlockingClient,
        subscription: ReaderSubscription,
        timeout_s: float | None,
        *,
        is_auto: bool,
    ) -> None:
        super().__init__(client, subscription, timeout_s)
        self.reader = subscription.reader
        self._is_auto = is_auto
        self._unhandled: Message | None = None
        """The message that taking the next one acknowledges."""
        self._handled: deque[Message] = deque()
        """Handled messages that the client's thread has not acknowledged yet."""
        self._losses = subscription.losses

    @property
    def acknowledged(self) -> int | None:
        """Offset up to which every message is durably acknowledged."""
        return self._subscription.acknowledged

    @property
    def losses(self) -> int:
        """Number of times that unacknowledged messages went to another process."""
        return self._subscription.losses

    def ack(self, message: Message) -> None:
        """Acknowledge a message, as `ReaderSubscription.ack` does."""

        async def ack() -> None:
            self._subscription.ack(message)

        self._thread.call(ack)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until acknowledgements are stored, as `ReaderSubscription.flush` does."""

        async def flush() -> None:
            self._tell_handled()
            await self._subscription.flush()

        self._thread.call(flush, timeout_s)

    def unsubscribe(self) -> None:
        if not self._subscription.ended:
            # Runs in the same thread before unsubscribing, so that handled messages are acknowledged.
            self._thread.soon(self._tell_handled)
        super().unsubscribe()

    def __next__(self) -> Message:
        if self._unhandled is not None:
            self._handled.append(self._unhandled)
            self._unhandled = None
            if len(self._handled) == 1:
                self._thread.soon(self._tell_handled)
        if self._ready and not self._subscription.is_sure and not self._make_sure():
            raise StopIteration
        if self._losses != self._subscription.losses:
            self._losses = self._subscription.losses
            self._ready.clear()  # another process receives these messages
        message = super().__next__()
        if self._is_auto:
            self._unhandled = message
        return message

    def _make_sure(self) -> bool:
        """Ask the server whether fetched messages are still ours; return False if it does not answer."""
        try:
            self._thread.call(self._subscription.until_sure, self.timeout_s)
        except (TimeoutError, ClientClosedError):
            return False
        return True

    def _tell_handled(self) -> None:
        """Acknowledge handled messages. Runs in the client's thread."""
        while self._handled:
            with suppress(ReaderLostError):
                self._subscription.ack(self._handled.popleft())


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
