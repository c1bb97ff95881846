"""The client an application uses, whatever the protocol. Frames, sockets and retries are elsewhere.

`Client` joins a session (what the protocol says), a link (connections and time) and a flow (what a
slow subscription does), and keeps what belongs to the application: futures, subscriptions and
handlers. It belongs to one event loop and is not safe to use from other threads; `blocking.py` is.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from secrets import randbits
from types import TracebackType
from typing import Any, Literal, Self, overload

from headrace.client.connection import MakeConnection
from headrace.client.entering import wait_for_connection
from headrace.client.events import Handlers
from headrace.client.flow import Flow
from headrace.client.handler import Handler, check_handler
from headrace.client.lake import Gap, open_lake
from headrace.client.link import Link
from headrace.client.options import Options, Pace
from headrace.client.reader import Acknowledge, ReaderChange, ReaderSubscription, Start
from headrace.client.subscription import Subscription
from headrace.errors import (
    ClientClosedError,
    ClientError,
    LocalProtocolError,
    PublishRefusedError,
    ReaderRefusedError,
    UnacknowledgedError,
)
from headrace.printing import described
from headrace.session.client import (
    Acknowledged,
    Attached,
    ClientSession,
    ConnectionState,
    Detached,
    Event,
    Messages,
    Missed,
    Refused,
)
from headrace.session.reader_events import (
    ReaderActive,
    ReaderEvent,
    ReaderFailed,
    ReaderLost,
    ReaderStored,
    ReaderWaiting,
    ReadMessages,
)

Payload = bytes | bytearray | memoryview


class Client:
    """Publishes to and subscribes to topics of one server, over as many connections as it takes.

    Use `async with connect(url) as client`, or `client = await connect(url)` and `client.close()`.
    """

    def __init__(
        self,
        url: str,
        session: ClientSession,
        make_connection: MakeConnection,
        options: Options,
        pace: Pace,
    ) -> None:
        self.url = url
        self.options = options
        self._session = session
        self._make_connection = make_connection
        self._pace = pace
        self._lake = open_lake(options.lake) if options.lake is not None else None
        self._handlers = Handlers("state", "missed", "reader")
        # Not of `random`: processes that were forked would have the same.
        self._instance = randbits(53)
        """A number by which the server knows this client on another connection."""
        self._subscriptions: dict[str, Subscription] = {}
        self._detaching: set[str] = set()
        # One per unacknowledged publish, in the session's order.
        self._publishes: deque[asyncio.Future[None]] = deque()
        self._published = 0
        self._acknowledged = 0
        self._refusal: PublishRefusedError | None = None
        """The first refusal that nobody was told of by `publish` or `flush`."""
        self._closed: ClientClosedError | None = None
        # Both are only ever set and cleared at once: they wake all who wait, to look again.
        self._acks = asyncio.Event()
        self._changes = asyncio.Event()
        self._link: Link[Event] | None = None
        self._flow: Flow | None = None

    @property
    def state(self) -> ConnectionState:
        return self._session.state

    @property
    def latency_s(self) -> float | None:
        """Round trip to the server, from the last answered ping; None before the first."""
        return self._session.latency_s

    @property
    def last_error(self) -> str:
        """Why the last connection, or attempt at one, ended; empty while connected."""
        return self._link.last_error if self._link is not None else ""

    @property
    def unacknowledged(self) -> int:
        """How many publishes wait for their acknowledgement."""
        return self._session.unacknowledged

    async def publish(self, topic: str, payload: Payload) -> None:
        """Publish and wait until the server has acknowledged it.

        Raises PublishRefusedError when the server does not take it.

        Waits for room in the window first; cancelled there, nothing is published. Cancelled later,
        the message is published all the same and only nobody waits for it.
        """
        await self.window()
        try:
            await self.publish_nowait(topic, payload)
        except PublishRefusedError as error:
            if self._refusal is error:
                self._refusal = None
            raise

    def publish_nowait(self, topic: str, payload: Payload) -> "asyncio.Future[None]":
        """Publish and return a future that the acknowledgement resolves. It need not be awaited.

        It fails with PublishRefusedError when the server does not take this publish; `flush` tells too.

        What is published in one step of the event loop is sent together, in order. Raises
        WindowFullError when too much is unacknowledged: `await client.window()` first.
        """
        link = self._link
        if link is None or self._closed is not None:
            link = self._running()[0]
        if type(payload) is not bytes:
            payload = as_bytes(payload)
        self._session.publish(topic, payload)
        future = link.loop.create_future()
        self._publishes.append(future)
        self._published += 1
        link.send_soon()
        if not link.reading:
            self._step_aside()
        return future

    async def window(self) -> None:
        """Wait until `publish_nowait` has room."""
        self._running()
        while not self._session.has_room:
            await self._acks.wait()
            self._running()

    async def flush(self) -> None:
        """Wait until everything published so far is acknowledged.

        Raises PublishRefusedError if the server did not take one of them; the others are acknowledged.
        """
        await self._settled()
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal

    async def _settled(self) -> None:
        self._running()
        until = self._published
        while self._acknowledged < until:
            await self._acks.wait()
            self._running()

    @overload
    def subscribe(
        self,
        topic: str,
        handler: Handler | None = None,
        *,
        offset: int | None = None,
        serial: str | None = None,
    ) -> Subscription: ...
    @overload
    def subscribe(
        self,
        topic: str,
        handler: Handler | None = None,
        *,
        reader: str,
        start: Start = "oldest",
        ack: Acknowledge = "auto",
    ) -> ReaderSubscription: ...
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
    ) -> Subscription:
        """Subscribe from an offset (0: from the oldest message kept), a serial, or from now on.

        A serial is that of a `Message` that was received over Wombat, in this process or another.
        Iterate over what is returned, or give a `handler`, which is called with each message in
        turn, and awaited if it is asynchronous. After a lost connection it goes on where it
        stopped. Where the server cannot start at the place, the `missed` event tells. One
        subscription per topic: LocalProtocolError otherwise.

        With `reader`, the server remembers how far this reader has come: the subscription starts
        there, or, for a new reader, where `start` says. One process at a time is given the
        messages. With `ack="auto"` the next message acknowledges the one before it, and a handler that
        returns acknowledges its message; with `ack="manual"` the subscription's `ack` does.
        """
        check_handler(handler)
        link, _ = self._running()
        if topic in self._subscriptions:
            raise LocalProtocolError(f"{topic!r} is already subscribed on this client")
        if reader is not None:
            if offset is not None or serial is not None:
                raise LocalProtocolError(
                    "a reader starts at its own place: give no offset or serial"
                )
            return self._read(link, topic, handler, reader, start, ack)
        if offset is not None and serial is not None:
            raise LocalProtocolError("give one of `offset` and `serial`")
        if serial is not None and not isinstance(serial, str):
            raise TypeError(f"a serial is str, not {type(serial).__name__}")
        place = self._session.attach(topic, offset if serial is None else serial)
        link.send_soon()
        if topic in self._detaching:
            self._detaching.discard(topic)
            _wake(self._changes)
        subscription = Subscription(self, topic, place, self.options.receive_bytes_max)
        self._subscriptions[topic] = subscription
        if handler is not None:
            subscription.hand_to(handler)
        return subscription

    def _read(
        self,
        link: Link[Event],
        topic: str,
        handler: Handler | None,
        reader: str,
        start: Start,
        ack: Acknowledge,
    ) -> ReaderSubscription:
        if start not in ("oldest", "newest"):
            raise ValueError(f'start is "oldest" or "newest", not {start!r}')
        if ack not in ("auto", "manual"):
            raise ValueError(f'ack is "auto" or "manual", not {ack!r}')
        self._session.read(
            topic,
            reader,
            newest=start == "newest",
            window=self.options.receive_bytes_max,
            instance=self._instance,
        )
        link.send_soon()
        subscription = ReaderSubscription(self, topic, reader, ack)
        self._subscriptions[topic] = subscription
        if handler is not None:
            subscription.hand_to(handler)
        return subscription

    async def unsubscribe(self, topic: str) -> None:
        """End the subscription of a topic at once; without one, do nothing.

        Returns when the server has confirmed it, or there is no connection to hear it from.
        """
        self.unsubscribe_nowait(topic)
        while topic in self._detaching:
            await self._changes.wait()

    def unsubscribe_nowait(self, topic: str) -> None:
        """The same without waiting for the server; nothing more is delivered."""
        link, flow = self._running()
        subscription = self._subscriptions.pop(topic, None)
        if subscription is not None:
            flow.forget(subscription)
            subscription.end()
            if self._session.detach(topic):
                self._detaching.add(topic)
            link.send_soon()

    @overload
    def on(
        self, event: Literal["state"], handler: Callable[[ConnectionState], object]
    ) -> Callable[[], None]: ...
    @overload
    def on(
        self, event: Literal["missed"], handler: Callable[[Missed], object]
    ) -> Callable[[], None]: ...
    @overload
    def on(
        self, event: Literal["reader"], handler: Callable[[ReaderChange], object]
    ) -> Callable[[], None]: ...
    def on(self, event: str, handler: Callable[[Any], object]) -> Callable[[], None]:
        """Call `handler` with every event of a kind; returns a function that ends that.

        `state`: a ConnectionState, at every change. `missed`: a Missed, when messages of a topic
        did not and will not come. `reader`: a ReaderChange, when a named reader of this client waits,
        becomes active, or is superseded.
        """
        return self._handlers.add(event, handler)

    async def connected(self) -> None:
        """Wait until there is a connection."""
        self._running()
        while self.state is not ConnectionState.CONNECTED:
            await self._changes.wait()
            self._running()

    async def close(self, flush_s: float | None = None) -> None:
        """Wait up to `flush_s` (default `flush_timeout_s`) for acknowledgements, then disconnect.

        Raises UnacknowledgedError when they did not all come; with 0 nothing is waited for and
        nothing raised. Iterations end; futures and waiting calls get ClientClosedError.
        """
        if self._link is None or self._closed is not None:
            self._shut(ClientClosedError("the client is closed"))
            return
        flush_s = self.options.flush_timeout_s if flush_s is None else flush_s
        try:
            if flush_s > 0:
                async with asyncio.timeout(flush_s):
                    await self.flush_readers()
                    if self.unacknowledged:
                        await self._settled()
        except (TimeoutError, ClientClosedError):  # the latter: closed by another call meanwhile
            if self.unacknowledged:
                raise UnacknowledgedError(self.unacknowledged) from None
        finally:
            aborting = self.unacknowledged > 0
            self._shut(ClientClosedError("the client is closed"))
            await self._link.stop(abort=aborting)
            if self._session.state is not ConnectionState.CLOSED:
                self._session.close()
                self._handlers.tell("state", ConnectionState.CLOSED)

    async def __aenter__(self) -> Self:
        self._start()
        try:
            await wait_for_connection(
                self.options.connect_timeout_s,
                self.connected,
                what=f"no connection to {self.url}",
                last_error=lambda: self.last_error,
            )
        except BaseException:
            await self.close(flush_s=0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # With an error on its way out, waiting would delay it and a second error would hide it.
        await self.close(flush_s=None if error is None else 0)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def handled(self, topic: str, offset: int) -> bool:
        """For subscriptions: a message of a reader was handled; False if it is no longer ours."""
        is_ours = self._session.handled(topic, offset)
        if is_ours and self._link is not None:
            self._link.send_soon()
        return is_ours

    def handled_up_to(self, topic: str) -> int:
        """For subscriptions: the offset up to which every message of a reader was handled."""
        return self._session.handled_up_to(topic)

    async def flush_readers(self) -> None:
        """Wait until the server has stored what readers have acknowledged, where there is a connection."""
        for subscription in list(self._subscriptions.values()):
            connected = self.state is ConnectionState.CONNECTED
            if isinstance(subscription, ReaderSubscription) and connected:
                with suppress(ClientError):
                    await subscription.flush()

    def caught_up(self, subscription: Subscription) -> None:
        """For subscriptions: one that was over its bound has room again."""
        if self._flow is not None:
            self._flow.caught_up(subscription)

    def _start(self) -> None:
        if self._closed is not None:
            raise self._closed
        if self._link is None:
            self._link = Link(
                self._session,
                self._make_connection,
                backoff=self._pace.backoff,
                attempt_timeout_s=self.options.attempt_timeout_s,
                handle=self._handle,
                changed=self._state_changed,
                failed=self._failed,
            )
            self._flow = Flow(self._link, self._session, self.options.receive_pause_s)

    def _running(self) -> tuple[Link[Event], Flow]:
        if self._closed is not None:
            raise self._closed
        if self._link is None or self._flow is None:
            raise LocalProtocolError("enter the client first: `async with` or `await` it")
        return self._link, self._flow

    def _handle(self, events: list[Event]) -> None:
        if self._closed is not None:
            return
        for event in events:
            if isinstance(event, Messages):
                self._messages(event)
            elif isinstance(event, Acknowledged):
                self._acknowledge(event.publishes)
            elif isinstance(event, Refused):
                self._refuse(PublishRefusedError(event.reason, event.times))
            elif isinstance(event, Missed):
                self._missed(event)
            elif isinstance(event, Attached):
                self._subscriptions[event.topic].begin(event.place)
            elif isinstance(event, Detached):
                self._detaching.discard(event.topic)
                _wake(self._changes)
            elif isinstance(event, ReaderEvent):
                self._of_reader(event)

    def _of_reader(self, event: ReaderEvent) -> None:
        subscription = self._subscriptions.get(event.topic)
        if not isinstance(subscription, ReaderSubscription):
            return  # a handler of an event before this one has ended it
        tell = partial(self._handlers.tell, "reader")
        change = partial(ReaderChange, event.topic, subscription.reader)
        if isinstance(event, ReadMessages):
            subscription.receive(event)
        elif isinstance(event, ReaderStored):
            subscription.stored(event.offset)
        elif isinstance(event, ReaderActive):
            subscription.begin(event.position.offset)
            subscription.stored(event.position.offset)
            tell(change("active"))
        elif isinstance(event, ReaderWaiting):
            tell(change("waiting"))
        elif isinstance(event, ReaderLost):
            subscription.lost()
            tell(change("lost", event.reason))
        else:
            self._end_reader(event, subscription)

    def _end_reader(self, event: ReaderFailed, subscription: ReaderSubscription) -> None:
        del self._subscriptions[event.topic]
        reason = f"{event.topic!r} cannot be read as {subscription.reader!r}: {event.reason}"
        subscription.fail(ReaderRefusedError(reason))

    def _missed(self, event: Missed) -> None:
        tell = partial(self._handlers.tell, "missed")
        asked, got = event.asked, event.got
        # The cursor of a reader lies in the log: messages of a lake would have no place to acknowledge.
        is_read = isinstance(self._subscriptions.get(event.topic), ReaderSubscription)
        if self._lake is None or is_read or asked is None or got is None or got <= asked:
            tell(event)
            return
        has_serials = event.got_serial is not None
        gap = Gap(self._lake, event.topic, asked, got, has_serials=has_serials, tell=tell)
        self._subscriptions[event.topic].deliver_from_lake(gap)

    def _messages(self, event: Messages) -> None:
        subscription = self._subscriptions[event.topic]
        if not subscription.deliver(event.messages) and self._flow is not None:
            self._flow.over(subscription)

    def _acknowledge(self, publishes: int) -> None:
        self._acknowledged += publishes
        for _ in range(publishes):
            future = self._publishes.popleft()
            if not future.done():
                future.set_result(None)
        _wake(self._acks)

    def _refuse(self, error: PublishRefusedError) -> None:
        """The oldest publish is given up."""
        self._acknowledged += 1
        self._refusal = self._refusal or error
        future = self._publishes.popleft()
        if not future.done():
            future.set_exception(error)
            future.exception()  # `flush` tells of it, if nobody awaits it
        _wake(self._acks)

    def _state_changed(self, state: ConnectionState) -> None:
        if state is ConnectionState.DISCONNECTED:
            self._detaching.clear()
            if self._flow is not None:
                self._flow.disconnected()
        _wake(self._changes)
        self._handlers.tell("state", state)

    def _failed(self, error: BaseException) -> None:
        closed = ClientClosedError(f"the client failed: {described(error)}")
        closed.__cause__ = error
        self._shut(closed)
        self._session.close()
        self._handlers.tell("state", ConnectionState.CLOSED)

    def _step_aside(self) -> None:
        # Reading is paused for a slow subscription, and an acknowledgement is now waited for.
        if self._flow is not None:
            self._flow.step_aside()

    def _shut(self, error: ClientClosedError) -> None:
        """Refuse everything from now on, and let everyone who waits know."""
        if self._closed is not None:
            return
        self._closed = error
        if self._flow is not None:
            self._flow.stop()
        for subscription in self._subscriptions.values():
            subscription.end()
        for future in self._publishes:
            if not future.done():
                future.set_exception(error)
                future.exception()  # a future nobody awaits is no reason for a warning
        self._publishes.clear()
        self._detaching.clear()
        _wake(self._acks)
        _wake(self._changes)


def as_bytes(payload: Payload) -> bytes:
    try:
        return bytes(memoryview(payload))
    except TypeError:
        kind = type(payload).__name__
        hint = ": encode it" if kind == "str" else ""
        raise TypeError(f"a payload is bytes, not {kind}{hint}") from None


def _wake(event: asyncio.Event) -> None:
    event.set()
    event.clear()
