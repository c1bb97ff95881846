"""The subscription of a named reader: its messages, for an iteration or a handler, and acknowledgements."""

import asyncio
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Literal, NamedTuple

from headrace.client.lifecycle import report
from headrace.client.topics.subscription import Handler, Message, Subscription
from headrace.errors import ClientError, LocalProtocolError, ReaderLostError
from headrace.session.topics.events import ReadMessages

if TYPE_CHECKING:
    from headrace.client.topics.client import Client

Start = Literal["oldest", "newest"]
"""Start of a reader that has no cursor."""
Acknowledge = Literal["auto", "manual"]
"""`auto`: taking the next message acknowledges the one before it. `manual`: the application does."""


TURN_S = 0.01
"""Seconds for which messages are delivered without checking the connection and without yielding to the event
loop. Without this limit, an application that never waits would keep the loop from sending
acknowledgements."""


class ReaderChange(NamedTuple):
    """The state of a named reader of this client, for `client.on("reader", …)`."""

    topic: str
    reader: str
    state: Literal["waiting", "active", "lost"]
    reason: str = ""


class ReaderSubscription(Subscription):
    """An async iterator over the messages of one topic that a named reader has not acknowledged.

    With `ack="auto"`, taking the next message (or batch) acknowledges those taken before. With
    `ack="manual"`, the application calls `ack`, in any order.
    """

    def __init__(self, client: "Client", topic: str, reader: str, *, is_auto: bool) -> None:
        super().__init__(client, topic, None, 0)
        self.reader = reader
        self.acknowledged: int | None = None
        """Offset up to which every message is durably acknowledged. None until the reader is first active."""
        self.losses = 0
        """Number of times that unacknowledged messages went to another process."""
        self._session = client._session
        self._link = client._require_link()
        self._is_auto = is_auto
        self._fresh: deque[deque[Message]] = deque()
        """Received messages that are not taken yet, in the batches in which they arrived."""
        self._taken: list[Message] = []
        """With `ack="auto"`: messages that the application took and that are not acknowledged yet."""
        self._waiters = 0
        self._turn_at = 0.0
        """Monotonic time until which messages are delivered at once (see `TURN_S`)."""

    async def batch(self) -> list[Message]:
        """Wait for messages and return all that arrived together; empty if the subscription has ended."""
        await self._next_fresh()
        if not self._fresh:
            return []
        batch = list(self._fresh.popleft())
        self._took(batch)
        return batch

    async def __anext__(self) -> Message:
        await self._next_fresh()
        if not self._fresh:
            raise StopAsyncIteration
        message = self._pop_message()
        self._took([message])
        return message

    def ack(self, message: Message) -> None:
        """Acknowledge a message. The acknowledgement is sent soon, and stored with others; see `flush`.

        The reader resumes at the first message that is not acknowledged. Raises ReaderLostError if another
        process reads now: that process may handle the message again.
        """
        if message.topic != self.topic or message.next_offset is None:
            raise LocalProtocolError(f"this is not a message of {self.topic!r}")
        if not self._handled(message.next_offset):
            if self.acknowledged is not None and message.next_offset <= self.acknowledged:
                return
            raise self._lost_error()

    async def flush(self) -> None:
        """Wait until the reader's new position is stored: messages before it are never delivered again.

        It does not wait for acknowledged messages that follow an unacknowledged one.
        """
        losses = self.losses
        until = self._session.handled_up_to(self.topic)
        while (self.acknowledged or 0) < until:
            if self.losses != losses:
                raise self._lost_error()
            if self.ended:
                raise self._failure or ClientError(f"the subscription of {self.topic!r} has ended")
            await self._news.wait()

    def receive(self, event: ReadMessages) -> None:
        """Buffer messages. The window that the client gave the server limits them."""
        topic, epoch, ordinal, ms, messages = event
        time = ms / 1000
        self._fresh.append(
            deque(
                Message(topic, offset, payload, ordinal=number, epoch=epoch, time=time)
                for number, (offset, payload) in enumerate(messages, ordinal)
            )
        )
        self._wake()

    def stored(self, offset: int) -> None:
        self.acknowledged = offset
        self._wake()

    @property
    def is_sure(self) -> bool:
        """True while no other process can have received the messages buffered here. Thread-safe."""
        return self._session.is_sure(self.topic, monotonic())

    async def until_sure(self) -> None:
        """Wait until `is_sure`, the messages went to another process, or the subscription has ended."""
        losses = self.losses
        while not (self.is_sure or self.ended or self.losses != losses):
            self._session.make_sure(self.topic, monotonic())
            self._link.send_soon()
            await self._news.wait()

    def doubt(self) -> None:
        """Called when the connection is lost: another process may receive the buffered messages."""
        self._turn_at = 0.0

    def lost(self) -> None:
        """Forget buffered and unacknowledged messages: another process receives them."""
        self.losses += 1
        self._fresh.clear()
        self._taken.clear()
        self._wake()

    def end(self) -> None:
        self._fresh.clear()
        super().end()

    async def _next_fresh(self) -> None:
        self._check_no_handler()
        await self._wait_for_fresh()

    async def _wait_for_fresh(self) -> None:
        if self._waiters and self._is_auto:
            raise LocalProtocolError(
                f"several tasks take messages of {self.topic!r}, so it is not known which of them "
                'has handled which: subscribe with ack="manual"'
            )
        for message in self._taken:
            assert message.next_offset is not None
            self._handled(message.next_offset)
        self._taken.clear()
        if self._fresh and monotonic() < self._turn_at:
            return
        self._waiters += 1
        try:
            await asyncio.sleep(0)
            while not self.ended:
                if not self._fresh:
                    await self._news.wait()
                elif self.is_sure:
                    self._turn_at = monotonic() + TURN_S
                    break
                else:
                    await self.until_sure()
        finally:
            self._waiters -= 1
        if self._failure is not None:
            raise self._failure

    def _handled(self, offset: int) -> bool:
        """Mark a message as handled; return False if it is no longer this client's."""
        is_ours = self._session.handled(self.topic, offset)
        if is_ours:
            self._link.send_soon()
        return is_ours

    def _took(self, messages: list[Message]) -> None:
        self._place = messages[-1].next_offset
        if self._is_auto:
            self._taken += messages

    async def _hand_out(self, handler: Handler) -> None:
        """Pass messages to a handler, in order.

        If the handler fails, the subscription ends and the message is not acknowledged.
        """
        while True:
            try:
                await self._wait_for_fresh()
            except ClientError as error:
                report(f"{self.topic!r} cannot be read", error)
            if self.ended:
                return
            message = self._pop_message()
            losses = self.losses
            if not await self._call(handler, message):
                if not self.ended:
                    self._client.unsubscribe_nowait(self.topic)
                return
            if losses == self.losses:
                self._took([message])
            if not self._fresh:
                await asyncio.sleep(0)  # let other tasks run, even if the handler never waits

    def _pop_message(self) -> Message:
        first = self._fresh[0]
        message = first.popleft()
        if not first:
            self._fresh.popleft()
        return message

    def _lost_error(self) -> ReaderLostError:
        return ReaderLostError(
            f"the reader {self.reader!r} of {self.topic!r} is, or was, active in another process: "
            "messages that were not acknowledged are delivered there"
        )
