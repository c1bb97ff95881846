"""What one topic brings to a named reader: to iterate over or for a handler, and to acknowledge."""

import asyncio
from collections import deque
from typing import Literal, NamedTuple, Protocol

from headrace.client.events import Message
from headrace.client.handler import Handler, call_handler
from headrace.client.subscription import Subscriber, Subscription
from headrace.errors import ClientError, LocalProtocolError, ReaderLostError
from headrace.session.reader_events import ReadMessages

Start = Literal["oldest", "newest"]
"""Where a reader without a cursor starts."""
Acknowledge = Literal["auto", "manual"]
"""Whether asking for the next message acknowledges the one before it."""


class ReaderChange(NamedTuple):
    """The state of a named reader of this client, for `client.on("reader", …)`."""

    topic: str
    reader: str
    state: Literal["waiting", "active", "lost"]
    reason: str = ""


class ReadingClient(Subscriber, Protocol):
    """The client, as its readers see it."""

    def handled(self, topic: str, offset: int) -> bool:
        """A message was handled; False if it is no longer this client's."""

    def handled_up_to(self, topic: str) -> int:
        """The offset up to which every message was handled."""

    def unsubscribe_nowait(self, topic: str) -> None: ...


class ReaderSubscription(Subscription):
    """An async iterator over the messages of one topic that a named reader has not acknowledged.

    With `ack="auto"`, asking for the next message (or batch) acknowledges what was taken before. With
    `ack="manual"`, `ack` does, in any order.
    """

    def __init__(
        self, client: ReadingClient, topic: str, reader: str, acknowledge: Acknowledge
    ) -> None:
        super().__init__(client, topic, None, 0)
        self.reader = reader
        self.acknowledged: int | None = None
        """The offset up to which everything is acknowledged, durably. None before the first connection."""
        self.losses = 0
        """How often unacknowledged messages went to another process."""
        self._reading_client = client
        self._is_auto = acknowledge == "auto"
        self._fresh: deque[deque[Message]] = deque()
        """Received and not taken, as it came together."""
        self._taken: list[Message] = []
        """Given to the application, and not acknowledged, where that happens by itself."""
        self._waiters = 0
        self._failure: ClientError | None = None

    async def batch(self) -> list[Message]:
        """Wait for messages and take all that came together; empty when the subscription has ended."""
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
        """Say that a message was handled. It is sent soon, and stored with others; see `flush`.

        The reader resumes behind the last message before which all were handled. Raises
        ReaderLostError when another process reads now: the message may be handled there again.
        """
        if message.topic != self.topic or message.offset is None:
            raise LocalProtocolError(f"this is not a message of {self.topic!r}")
        if not self._reading_client.handled(self.topic, message.offset):
            if self.acknowledged is not None and message.offset <= self.acknowledged:
                return
            raise self._lost_error()

    async def flush(self) -> None:
        """Wait until everything that `ack` allows is stored: it is never delivered again.

        Messages behind one that was not handled are not waited for.
        """
        losses = self.losses
        until = self._reading_client.handled_up_to(self.topic)
        while (self.acknowledged or 0) < until:
            if self.losses != losses:
                raise self._lost_error()
            if self.ended:
                raise self._failure or ClientError(f"the subscription of {self.topic!r} has ended")
            await self._news.wait()

    def receive(self, event: ReadMessages) -> None:
        """Buffer messages. The server sends no more than the window that it was told."""
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

    def lost(self) -> None:
        """Forget what the application has not taken: another process gets it."""
        self.losses += 1
        self._fresh.clear()
        self._taken.clear()
        self._wake()

    def fail(self, error: ClientError) -> None:
        """End with an error."""
        self._failure = error
        self.end()

    def end(self) -> None:
        self._fresh.clear()
        super().end()

    async def _next_fresh(self) -> None:
        if self._handing is not None:
            raise LocalProtocolError(
                f"{self.topic!r} was subscribed with a handler: its messages go there only"
            )
        await self._wait_for_fresh()

    async def _wait_for_fresh(self) -> None:
        if self._waiters and self._is_auto:
            raise LocalProtocolError(
                f"several tasks take messages of {self.topic!r}, so it is not known which of them "
                'has handled which: subscribe with ack="manual"'
            )
        for message in self._taken:
            assert message.offset is not None
            self._reading_client.handled(self.topic, message.offset)
        self._taken.clear()
        self._waiters += 1
        try:
            while not self._fresh and not self.ended:
                await self._news.wait()
        finally:
            self._waiters -= 1
        if self._failure is not None:
            raise self._failure

    def _took(self, messages: list[Message]) -> None:
        self._place = messages[-1].offset
        if self._is_auto:
            self._taken += messages

    async def _hand_out(self, handler: Handler) -> None:
        """Give messages to a handler, in order. One that fails ends the subscription, unacknowledged."""
        while True:
            try:
                await self._wait_for_fresh()
            except ClientError as error:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"{self.topic!r} cannot be read", "exception": error}
                )
            if self.ended:
                return
            message = self._pop_message()
            losses = self.losses
            if not await call_handler(handler, message, lambda: self.ended):
                if not self.ended:
                    self._reading_client.unsubscribe_nowait(self.topic)
                return
            if losses == self.losses:
                self._took([message])
            if not self._fresh:
                await asyncio.sleep(0)  # where the handler never waits, others are to run as well

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
