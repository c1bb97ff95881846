"""The subscription of one topic: buffered messages, for an iteration or a handler, and flow control.

A subscription over its limit first pauses reading on the whole connection: that costs nothing and suits a
reader that is a little slower than the log. But acknowledgements, pongs and other topics wait too. So if
publishes are unacknowledged, or the pause has lasted long enough, the topic steps aside: the client detaches
it, and attaches it again where it stopped once the application has caught up.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from inspect import isawaitable
from typing import TYPE_CHECKING, Self

import msgspec

from headrace.client.lifecycle import report
from headrace.client.link import Link
from headrace.client.topics.lake import Batch, LakeGap
from headrace.errors import ClientClosedError, ClientError, LocalProtocolError
from headrace.model import RECORD_HEADER_BYTES
from headrace.session.topics.client import ClientSession
from headrace.session.topics.events import Event, Place, epoch_of, offset_of, serial_of

if TYPE_CHECKING:
    from headrace.client.topics.client import Client


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of a topic, as a subscription delivers it."""

    # A struct instead of a tuple: one is created per received message, in a quarter of the time.
    topic: str
    next_offset: int | None
    """Offset of the next record, just past this message: subscribe from here to continue after it. None over
    Wombat if the server's serials do not contain offsets; those of a Headrace server do."""
    payload: bytes
    serial: str | None = None
    """Opaque serial of the message: subscribe from it to continue after the message. Wombat only."""
    ordinal: int | None = None
    """Number of records of the topic that precede this one. Named readers only."""
    epoch: int | None = None
    """Epoch of the topic: a topic that is destroyed and made again has another one. Set for named readers,
    and over Wombat with the serials of a Headrace server."""
    time: float | None = None
    """Time at which the server stored the message, in Unix seconds. Named readers only."""

    @property
    def offset(self) -> int | None:
        """Offset of this record, as in the lake and in Spark: subscribe from here to receive it again."""
        if self.next_offset is None:
            return None
        return self.next_offset - RECORD_HEADER_BYTES - len(self.payload)


Handler = Callable[[Message], object]
"""Called with each message in order. An awaitable result is awaited; any other result is ignored."""


MESSAGE_OVERHEAD_BYTES = 128
"""Assumed bytes of memory per received message besides its payload, for the limit on buffering."""


class Subscription:
    """An async iterator over the messages of one topic; it ends when unsubscribed or closed.

    Use it as a context manager to unsubscribe on exit. Several tasks may iterate over it; each message goes
    to one of them.
    """

    def __init__(
        self, client: "Client", topic: str, place: Place | None, receive_bytes_max: int
    ) -> None:
        self.topic = topic
        self.ended = False
        self._client = client
        self._place = place
        self._attached_at: Place | None = None
        self._receive_bytes_max = receive_bytes_max
        self._batches: deque[Batch | LakeGap] = deque()
        self._batches_bytes = 0
        self._over = False
        self._current: Iterator[tuple[Place, bytes]] = iter(())
        self._news = asyncio.Event()
        self._handing: asyncio.Task[None] | None = None
        self._one_reads = asyncio.Lock()
        self._failure: ClientError | None = None
        """Error with which the server has ended a named reader, or refused the client."""

    @property
    def next_offset(self) -> int | None:
        """Offset just past the last message taken, or where delivery began: store it to resume later.

        None until the server has said where the topic ends, and over Wombat if the server's serials do not
        contain offsets; those of a Headrace server do.
        """
        return None if self._place is None else offset_of(self._place)

    @property
    def serial(self) -> str | None:
        """Serial of the last message taken, or of where delivery began: store it to resume later.

        Wombat only; None until the server has said where the topic ends.
        """
        return None if self._place is None else serial_of(self._place)

    async def attached(self) -> int | None:
        """Wait until the server delivers this topic, and return the offset at which delivery began.

        None over Wombat if the server's serials do not contain offsets: see `serial`. A named reader waits
        until this process is active, and raises ReaderRefusedError if the server refuses the reader.
        """
        while self._attached_at is None:
            if self.ended:
                text = f"the subscription of {self.topic!r} ended before it began"
                raise self._failure or ClientError(text)
            await self._news.wait()
        return offset_of(self._attached_at)

    async def batch(self) -> list[Message]:
        """Wait for messages and return all that arrived together: the cheapest way to take many.

        The list is empty only if the subscription has ended. If the call is cancelled, nothing is lost.
        """
        pairs = list(self._current) or await self._take()
        if not pairs:
            return []
        self._place = pairs[-1][0]
        return _messages(self.topic, pairs)

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Iterate over batches instead of messages."""
        while batch := await self.batch():
            yield batch

    async def unsubscribe(self) -> None:
        """End this subscription, as `client.unsubscribe` does."""
        if not self.ended:
            await self._client.unsubscribe(self.topic)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        pair = next(self._current, None)
        if pair is None:
            batch = await self._take()
            if not batch:
                raise StopAsyncIteration
            self._current = iter(batch)
            pair = next(self._current)
        self._place = pair[0]
        return _message(self.topic, *pair)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.unsubscribe()

    def begin(self, place: Place) -> None:
        """Called when the server has attached the topic, on the first and on every later connection."""
        if self._attached_at is None:
            self._attached_at = place
        if self._place is None:
            self._place = place
        self._wake()

    def hand_to(self, handler: Handler) -> None:
        """Pass every message to a handler only; iterating then raises LocalProtocolError."""
        self._handing = asyncio.get_running_loop().create_task(self._hand_out(handler))

    def deliver(self, batch: Batch) -> bool:
        """Buffer messages. Return False if the client must hold messages back until `caught_up`."""
        self._batches.append(batch)
        self._batches_bytes += _size(batch)
        self._wake()
        self._over = self._over or self._batches_bytes > self._receive_bytes_max
        return not self._over

    def deliver_from_lake(self, gap: LakeGap) -> None:
        """Queue a gap before the messages that are delivered after this call."""
        self._batches.append(gap)
        self._wake()

    def end(self) -> None:
        """End the iteration at once; messages that were not taken are dropped."""
        self.ended = True
        self._batches.clear()
        self._current = iter(())
        self._wake()

    def fail(self, error: ClientError) -> None:
        """End with an error."""
        self._failure = error
        self.end()

    async def _hand_out(self, handler: Handler) -> None:
        try:
            await self._hand_out_batches(handler)
        except ClientError as error:
            report(f"{self.topic!r} cannot be read", error)

    async def _hand_out_batches(self, handler: Handler) -> None:
        while batch := await self._next():
            for place, payload in batch:
                if self.ended:
                    return
                self._place = place
                message = _message(self.topic, place, payload)
                await self._call(handler, message)
            await asyncio.sleep(0)  # let other tasks run, even if the handler never waits

    async def _call(self, handler: Handler, message: Message) -> bool:
        """Call a handler and wait for it. If it fails, report the error and return False."""
        try:
            result = handler(message)
            if result is not None and isawaitable(result):
                await result
            return True
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # this task is cancelled, and not something that the handler waited for
            report(f"the handler of {self.topic!r} failed", cancelled)
        except Exception as error:  # of the handler: the next message may succeed
            # If the client closes while the handler publishes with it, the handler is not to blame.
            if not (isinstance(error, ClientClosedError) and self.ended):
                report(f"the handler of {self.topic!r} failed", error)
        return False

    async def _take(self) -> Batch:
        self._check_no_handler()
        return await self._next()

    def _check_no_handler(self) -> None:
        if self._handing is not None:
            raise LocalProtocolError(
                f"{self.topic!r} was subscribed with a handler, which gets all its messages"
            )

    async def _next(self) -> Batch:
        while True:
            if not self._batches:
                if self._failure is not None:
                    raise self._failure
                if self.ended:
                    return []
                await self._news.wait()
            elif isinstance(first := self._batches[0], LakeGap):
                if found := await self._read(first):
                    return found
            else:
                self._batches.popleft()
                self._batches_bytes -= _size(first)
                if self._over and self._batches_bytes <= self._receive_bytes_max // 2:
                    self._over = False
                    self._client.caught_up(self)
                return first

    async def _read(self, gap: LakeGap) -> Batch:
        async with self._one_reads:
            if not self._batches or self._batches[0] is not gap:
                return []  # other tasks have read the whole gap
            found = await gap.next()
            if not found and self._batches:
                self._batches.popleft()
            return found if not self.ended else []

    def _wake(self) -> None:
        self._news.set()
        self._news.clear()


class Flow:
    """Flow control. Every subscription over its limit is in exactly one of `_pausing` and `_aside`."""

    def __init__(self, link: Link[Event], session: ClientSession, pause_s: float) -> None:
        self._link = link
        self._session = session
        self._pause_s = pause_s
        self._pausing: set[Subscription] = set()
        self._aside: set[Subscription] = set()
        self._timer: asyncio.TimerHandle | None = None

    def over(self, subscription: Subscription) -> None:
        """Called when a subscription buffers more than it may."""
        if subscription in self._aside:
            return
        self._pausing.add(subscription)
        if self._session.unacknowledged:
            self.step_aside()
        elif self._timer is None:
            self._link.read(False)
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self.step_aside)

    def caught_up(self, subscription: Subscription) -> None:
        """Called when a subscription has room again."""
        if subscription in self._aside:
            self._session.resume(subscription.topic)
            self._link.send_soon()
        self.forget(subscription)

    def step_aside(self) -> None:
        """Resume reading at once, without the topics that have paused it."""
        for subscription in self._pausing:
            self._session.pause(subscription.topic)
        self._aside |= self._pausing
        self._pausing.clear()
        self._resume()
        self._link.send_soon()

    def forget(self, subscription: Subscription) -> None:
        """Forget a subscription that has ended, or is no longer over its limit."""
        self._aside.discard(subscription)
        self._pausing.discard(subscription)
        if not self._pausing:
            self._resume()

    def disconnected(self) -> None:
        # The next connection starts with reading: topics over their limit must not be attached to it.
        if self._pausing:
            self.step_aside()

    def stop(self) -> None:
        """Resume reading because the client is closing."""
        self._aside.clear()
        self._pausing.clear()
        self._resume()

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._link.read(True)


def check_handler(handler: object) -> None:
    if handler is not None and not callable(handler):
        raise TypeError(
            f"a handler is a function, not {type(handler).__name__}: "
            "to begin at an offset, subscribe(topic, offset=...)"
        )


def _messages(topic: str, pairs: Batch) -> list[Message]:
    """Make messages of a batch: the fast way if all places are offsets, or serials of one epoch."""
    first = pairs[0][0]
    if isinstance(first, int):
        # A topic's places come from one protocol, so all of them are offsets.
        return [Message(topic, offset, payload) for offset, payload in pairs]  # type: ignore[arg-type]
    life = first[: first.find("@") + 1]
    size = len(life)
    tails = [place[size:] for place, _ in pairs if place.startswith(life)]  # type: ignore[index, union-attr]
    is_plain = len(tails) == len(pairs) and "" not in tails and "".join(tails).isdecimal()
    if not is_plain or not life or offset_of(first) is None or max(map(len, tails)) > 20:
        return [_message(topic, place, payload) for place, payload in pairs]
    epoch = epoch_of(first)
    return [
        Message(topic, offset, payload, serial, None, epoch)  # type: ignore[arg-type]
        for offset, (serial, payload) in zip(map(int, tails), pairs, strict=True)
    ]


def _message(topic: str, place: Place, payload: bytes) -> Message:
    return Message(topic, offset_of(place), payload, serial_of(place), None, epoch_of(place))


def _size(batch: Batch) -> int:
    first, last = batch[0][0], batch[-1][0]
    if isinstance(first, int) and isinstance(last, int):
        # Offsets are byte positions: their difference gives the size without adding up the payloads.
        size = last - first + len(batch[0][1])
    else:
        size = sum([len(payload) for _, payload in batch])
    return size + MESSAGE_OVERHEAD_BYTES * len(batch)
