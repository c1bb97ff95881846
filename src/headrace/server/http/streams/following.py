"""Live readers of streams, which are subscriptions of the broker: long polls and server-sent events.

Elsewhere: the encoding of events (`events.py`), the answers themselves (`api.py`).
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.broker.broker import BrokerSubscription, Encode, Slice, SubscriptionState
from headrace.log.store import Topic
from headrace.model import Position
from headrace.server.peers.connections import Connections


def nothing(topic: str, at: Position, records: Sequence[bytes], ms: int) -> bytes:
    """Encoding of a subscription that only learns that there are records."""
    return b""


class Follower:
    """A live reader of one topic: the broker's sink. Wakes its request for each thing that happens."""

    protocol = "http"

    def __init__(self, shared: Connections, peer: str) -> None:
        self.peer = peer
        self._shared = shared
        self._news = asyncio.Event()
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._subscription: BrokerSubscription | None = None
        self.offset = 0
        """Offset behind the records that were taken or wait here."""
        self.is_told = False
        """True once the stream was closed or deleted, or the server stops."""
        self.is_over = False
        """True if the reader cannot continue here: it has to ask again, and learns why."""

    @contextmanager
    def following(self, topic: Topic, offset: int, encode: Encode) -> Iterator[None]:
        broker = self._shared.broker
        self.offset = offset
        self._subscription = broker.subscribe(self, topic.name, offset, encode)
        try:
            yield
        finally:
            self._unqueue()
            if self._subscription is not None:
                broker.unsubscribe(self._subscription)

    def told(self) -> None:
        self.is_told = True
        self.wake()

    def end(self) -> None:
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        self._news.set()

    async def news(self, until_s: float) -> bool:
        """Wait until something happens. Return False if nothing has happened at this time of the loop."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def take(self) -> bytes:
        """Return the next encoded records; empty if there are none now."""
        if self._queue:
            return self._unqueue()
        subscription = self._subscription
        if subscription is None or subscription.state is not SubscriptionState.RESUMING:
            return b""
        data = self._shared.broker.pull(subscription)
        self.offset = subscription.offset
        return data

    def _unqueue(self) -> bytes:
        found = b"".join(self._queue)
        self._queue.clear()
        self._shared.output_bytes -= self._queued_bytes
        self._queued_bytes = 0
        return found

    # Calls from the broker

    def attached(self, subscription: BrokerSubscription, offset: int, exact: bool) -> None:
        if self.offset < subscription.topic.start_offset:
            self.end()  # retention was faster

    def live(self, subscription: BrokerSubscription) -> None:
        self.wake()

    def deliver(self, subscription: BrokerSubscription, slices: Sequence[Slice]) -> bool:
        for end, end_ordinal, data in slices:
            if not self._shared.has_room_for_output(self._queued_bytes):
                return False  # the rest is read from the log
            self._queue.append(data)
            self._queued_bytes += len(data)
            self._shared.output_bytes += len(data)
            subscription.offset, subscription.ordinal = end, end_ordinal
            self.offset = end
        self.wake()
        return True

    def overtaken(self, subscription: BrokerSubscription) -> None:
        if subscription.offset >= subscription.topic.start_offset:
            return  # damage is skipped; only retention can be ahead of a slow reader
        self._subscription = None
        self._shared.broker.unsubscribe(subscription)
        self.end()

    def broken(self, subscription: BrokerSubscription) -> None:
        self.end()

    def ready(self, subscription: BrokerSubscription) -> None:
        self.wake()
