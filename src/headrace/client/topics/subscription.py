"""What one topic brings, to iterate over or for a handler. Buffers; knows no protocol."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator
from types import TracebackType
from typing import Protocol, Self

from headrace.client.events import Message
from headrace.client.handler import Handler, call_handler
from headrace.client.lake import Batch, Gap
from headrace.errors import ClientError, LocalProtocolError
from headrace.session.client import Place, offset_of, serial_of

MESSAGE_OVERHEAD_BYTES = 128
"""What a received message takes in memory beside its payload, for the bound on buffering."""


class Subscriber(Protocol):
    """The client, as its subscriptions see it."""

    def caught_up(self, subscription: "Subscription") -> None:
        """A subscription that was over its bound has room again."""

    def unsubscribe(self, topic: str) -> Awaitable[None]: ...


class Subscription:
    """An async iterator over the messages of one topic; it ends when unsubscribed or closed.

    Use it as a context manager to unsubscribe on leaving. Several tasks may iterate over it; each
    message goes to one of them.
    """

    def __init__(
        self, client: Subscriber, topic: str, place: Place | None, receive_bytes_max: int
    ) -> None:
        self.topic = topic
        self.ended = False
        self._client = client
        self._place = place
        self._attached_at: Place | None = None
        self._receive_bytes_max = receive_bytes_max
        self._batches: deque[Batch | Gap] = deque()
        self._batches_bytes = 0
        self._over = False
        self._current: Iterator[tuple[Place, bytes]] = iter(())
        self._news = asyncio.Event()
        self._handing: asyncio.Task[None] | None = None
        self._one_reads = asyncio.Lock()

    @property
    def offset(self) -> int | None:
        """Just past the last message taken, or where delivery began: store it to resume later.

        None while the server has not said where the topic ends, and over Wombat when the server's
        serials do not tell offsets; those of a Headrace server do.
        """
        return None if self._place is None else offset_of(self._place)

    @property
    def serial(self) -> str | None:
        """The serial of the last message taken, or of where delivery began: store it to resume later.

        Wombat only; None while the server has not said where the topic ends.
        """
        return None if self._place is None else serial_of(self._place)

    async def attached(self) -> int | None:
        """Wait until the server delivers this topic, and return the offset it began from.

        None over Wombat when the server's serials do not tell offsets: see `serial`.
        """
        while self._attached_at is None:
            if self.ended:
                raise ClientError(f"the subscription of {self.topic!r} ended before it began")
            await self._news.wait()
        return offset_of(self._attached_at)

    async def batch(self) -> list[Message]:
        """Wait for messages and take all that came together: the cheapest way to take many.

        Empty only when the subscription has ended. Cancelling it loses nothing.
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.unsubscribe()

    def begin(self, place: Place) -> None:
        """The server has attached the topic; also called for every later connection."""
        if self._attached_at is None:
            self._attached_at = place
        if self._place is None:
            self._place = place
        self._wake()

    def hand_to(self, handler: Handler) -> None:
        """Give every message to a handler, and to nobody else."""
        self._handing = asyncio.get_running_loop().create_task(self._hand_out(handler))

    def deliver(self, batch: Batch) -> bool:
        """Buffer messages. False asks to hold back until `caught_up`."""
        self._batches.append(batch)
        self._batches_bytes += _size(batch)
        self._wake()
        self._over = self._over or self._batches_bytes > self._receive_bytes_max
        return not self._over

    def deliver_from_lake(self, gap: Gap) -> None:
        """Read this before what is delivered from now on."""
        self._batches.append(gap)
        self._wake()

    def end(self) -> None:
        """Let the iteration end at once; what was not taken is dropped."""
        self.ended = True
        self._batches.clear()
        self._current = iter(())
        self._wake()

    async def _hand_out(self, handler: Handler) -> None:
        while batch := await self._next():
            for place, payload in batch:
                if self.ended:
                    return
                self._place = place
                message = _message(self.topic, place, payload)
                await call_handler(handler, message, lambda: self.ended)
            await asyncio.sleep(0)  # where the handler never waits, others are to run as well

    async def _take(self) -> Batch:
        if self._handing is not None:
            raise LocalProtocolError(
                f"{self.topic!r} was subscribed with a handler: its messages go there only"
            )
        return await self._next()

    async def _next(self) -> Batch:
        while True:
            if not self._batches:
                if self.ended:
                    return []
                await self._news.wait()
            elif isinstance(gap := self._batches[0], Gap):
                if found := await self._read(gap):
                    return found
            else:
                return self._pop()

    async def _read(self, gap: Gap) -> Batch:
        async with self._one_reads:
            if not self._batches or self._batches[0] is not gap:
                return []  # others have read all of it
            found = await gap.next()
            if not found and self._batches:
                self._batches.popleft()
            return found if not self.ended else []

    def _pop(self) -> Batch:
        batch = self._batches.popleft()
        assert not isinstance(batch, Gap)
        self._batches_bytes -= _size(batch)
        if self._over and self._batches_bytes <= self._receive_bytes_max // 2:
            self._over = False
            self._client.caught_up(self)
        return batch

    def _wake(self) -> None:
        self._news.set()
        self._news.clear()


def _messages(topic: str, pairs: Batch) -> list[Message]:
    """Make messages of a batch: the fast way if all are offsets, or serials of one life of a topic."""
    first = pairs[0][0]
    if isinstance(first, int):
        # A topic has one protocol.
        return [Message(topic, offset, payload) for offset, payload in pairs]  # type: ignore[arg-type]
    life = first[: first.find("@") + 1]
    size = len(life)
    tails = [place[size:] for place, _ in pairs if place.startswith(life)]  # type: ignore[index, union-attr]
    is_plain = len(tails) == len(pairs) and "" not in tails and "".join(tails).isdecimal()
    if not is_plain or not life or offset_of(first) is None or max(map(len, tails)) > 20:
        return [_message(topic, place, payload) for place, payload in pairs]
    return [
        Message(topic, offset, payload, serial)  # type: ignore[arg-type]
        for offset, (serial, payload) in zip(map(int, tails), pairs, strict=True)
    ]


def _message(topic: str, place: Place, payload: bytes) -> Message:
    return Message(topic, offset_of(place), payload, serial_of(place))


def _size(batch: Batch) -> int:
    first, last = batch[0][0], batch[-1][0]
    if isinstance(first, int) and isinstance(last, int):
        # Offsets are byte positions: their difference is the payloads' bytes, without adding them up.
        size = last - first + len(batch[0][1])
    else:
        size = sum([len(payload) for _, payload in batch])
    return size + MESSAGE_OVERHEAD_BYTES * len(batch)
