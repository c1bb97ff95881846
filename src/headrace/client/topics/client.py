"""The client of an application, for every protocol that has topics. Elsewhere: frames, sockets and retries.

`Client`, with its `Options`, adds publishes, subscriptions and named readers to the lifecycle of every
client. A client belongs to one event loop and is not safe to use from other threads; the one in `blocking.py`
is.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from secrets import randbits
from typing import Any, Literal, overload

from msgspec import UNSET, UnsetType

from headrace.client.lifecycle import EventHandler, Lifecycle, Remove, fail_quietly
from headrace.client.link import LinkOptions, LinkOptionsDict
from headrace.client.topics.lake import LakeGap, open_lake
from headrace.client.topics.reader import Acknowledge, ReaderChange, ReaderSubscription, Start
from headrace.client.topics.subscription import Flow, Handler, Subscription, check_handler
from headrace.client.transport import MakeConnection
from headrace.errors import (
    ClientClosedError,
    ClientError,
    ConfigError,
    LocalProtocolError,
    PublishRefusedError,
    ReaderRefusedError,
    RefusedError,
    UnacknowledgedError,
)
from headrace.session.client import ConnectionRefused, ConnectionState
from headrace.session.topics import window as client_window
from headrace.session.topics.client import ClientSession
from headrace.session.topics.events import (
    Event,
    Missed,
    PublishesAcknowledged,
    PublishRefused,
    ReaderActive,
    ReaderEvent,
    ReaderLost,
    ReaderStored,
    ReaderSure,
    ReaderWaiting,
    ReadMessages,
    TopicAttached,
    TopicDetached,
    TopicMessages,
)


@dataclass(frozen=True, kw_only=True)
class Options(LinkOptions):
    """The options of `connect` and `connect_blocking`. Times are seconds."""

    window_max: int = client_window.WINDOW_MAX
    """Largest number of unacknowledged publishes. Beyond it, `publish` waits and `publish_nowait` raises
    WindowFullError."""

    window_bytes_max: int = client_window.WINDOW_BYTES_MAX
    """The same limit in bytes; the last publish may exceed it."""

    receive_bytes_max: int = 8 * 1024 * 1024
    """Bytes that one subscription may buffer until the application takes them. Above this limit the client
    stops reading; nothing is lost."""

    receive_pause_s: float = 1.0
    """Seconds for which a slow subscription may keep the client from reading. After that only its own topic
    waits: it is detached, and attached again where it stopped once the application has caught up."""

    ping_interval_s: float | UnsetType | None = UNSET
    """Seconds between pings. Figg: 2; None: no pings, for servers that do not answer pings or disconnect
    because of them. Wombat: 5; its servers disconnect a client that is silent for longer than their
    `limits.silence_s`, 10 by default."""

    pings_unanswered_max: int | None = None
    """If this many pings are unanswered when the next one is due, the client gives up the connection. Figg:
    2, Wombat: 1."""

    resend_s: float | None = None
    """Seconds without acknowledgement after which a publish is resent on the same connection; it is stored
    once. Wombat only: 2."""

    lake: str | PathLike[str] | None = None
    """Directory or address of a lake to which the server's topics are exported: records that a topic no
    longer has are read from the lake instead. Needs the extra `headrace[lake]`."""

    lake_options: Mapping[str, str] | None = field(default=None, repr=False)
    """Options of the lake's object storage, named as its library does, such as `AWS_ENDPOINT_URL`."""

    lake_catalog: Mapping[str, str] | None = field(default=None, repr=False)
    """Properties of the lake's Iceberg catalogue, named as pyiceberg does, such as `uri`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lake is not None and not isinstance(self.lake, str | PathLike):
            raise ConfigError(f"lake must be a directory or an address, not {self.lake!r}")
        self._check_numbers("window_max", "window_bytes_max", "receive_bytes_max")
        self._check_numbers("receive_pause_s", may_be_zero=True)
        self._check_numbers("pings_unanswered_max", "resend_s", may_be_none=True)
        if self.ping_interval_s is not UNSET:
            self._check_numbers("ping_interval_s", may_be_none=True)

    def for_session(self) -> dict[str, Any]:
        """Return the arguments of a session that the application has set; the others have defaults there."""
        names = ("window_max", "window_bytes_max", "pings_unanswered_max", "resend_s")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.ping_interval_s is not UNSET:
            given["ping_interval_s"] = self.ping_interval_s
        return given


class OptionsDict(LinkOptionsDict, total=False):
    """The same options as keyword arguments."""

    window_max: int
    window_bytes_max: int
    receive_bytes_max: int
    receive_pause_s: float
    ping_interval_s: float | None
    pings_unanswered_max: int | None
    resend_s: float | None
    lake: str | PathLike[str] | None
    lake_options: Mapping[str, str] | None
    lake_catalog: Mapping[str, str] | None


Payload = bytes | bytearray | memoryview


class Client(Lifecycle[Event]):
    """A client that publishes and subscribes to topics of one server, and reconnects when necessary.

    Use `async with connect(url) as client`, or `client = await connect(url)` and `client.close()`.
    """

    options: Options
    _flow: Flow
    """Set with the link."""

    def __init__(
        self, url: str, session: ClientSession, make_connection: MakeConnection, options: Options
    ) -> None:
        super().__init__(url, options, "missed", "reader")
        self._session = session
        self._make_connection = make_connection
        self._read_lake = (
            None
            if options.lake is None
            else open_lake(options.lake, options.lake_options, options.lake_catalog)
        )
        # Not from `random`: forked processes would get the same number.
        self._instance = randbits(53)
        """Number by which the server recognises this client on a later connection."""
        self._subscriptions: dict[str, Subscription] = {}
        self._detaching: set[str] = set()
        # One future per unacknowledged publish, in the session's order.
        self._publishes: deque[asyncio.Future[None]] = deque()
        self._acknowledged = 0
        self._refused: PublishRefusedError | None = None
        """The first refusal that neither `publish` nor `flush` has raised yet."""

    @property
    def unacknowledged(self) -> int:
        """Number of publishes that are not acknowledged yet."""
        return self._session.unacknowledged

    async def publish(self, topic: str, payload: Payload) -> None:
        """Publish a message and wait until the server has acknowledged it.

        Raises PublishRefusedError if the server refuses the message.

        The call first waits for room in the window; if it is cancelled there, nothing is published. If it is
        cancelled later, the message is published nevertheless.
        """
        await self.window()
        try:
            await self.publish_nowait(topic, payload)
        except PublishRefusedError as error:
            if self._refused is error:
                self._refused = None
            raise

    def publish_nowait(self, topic: str, payload: Payload) -> "asyncio.Future[None]":
        """Publish a message; return a future that its acknowledgement resolves. It need not be awaited.

        The future fails with PublishRefusedError if the server refuses the message; `flush` raises it too.

        Messages that are published in one step of the event loop are sent together, in order. Raises
        WindowFullError if too much is unacknowledged: `await client.window()` first.
        """
        link = self._link
        if link is None or self._final_error is not None:
            link = self._require_link()
        if type(payload) is not bytes:
            payload = as_bytes(payload)
        self._session.publish(topic, payload)
        future = link.loop.create_future()
        self._publishes.append(future)
        link.send_soon()
        if not link.reading:
            # Reading is paused for a slow subscription, but an acknowledgement is now expected.
            self._flow.step_aside()
        return future

    async def window(self) -> None:
        """Wait until `publish_nowait` has room."""
        self._require_link()
        if not self._session.has_room:
            await self._wait(lambda: self._session.has_room)

    async def flush(self) -> None:
        """Wait until everything published so far is acknowledged.

        Raises PublishRefusedError if the server refused one of the messages; the others are acknowledged.
        """
        await self._settled()
        if self._refused is not None:
            refusal, self._refused = self._refused, None
            raise refusal

    async def _settled(self) -> None:
        until = self._acknowledged + len(self._publishes)
        await self._wait(lambda: self._acknowledged >= until)

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

        A serial comes from a `Message` that was received over Wombat, in this process or another. Iterate
        over the subscription, or pass a `handler`, which is called with each message in order, and awaited if
        it is asynchronous. After a lost connection, the subscription continues where it stopped. If the
        server cannot start at the requested position, the `missed` event reports it. A client can have one
        subscription per topic; a second one raises LocalProtocolError.

        With `reader`, the server stores the reader's position: the subscription starts there, or, for a new
        reader, at `start`. Only one process at a time receives the messages. With `ack="auto"`, taking the
        next message acknowledges the one before it, and a handler acknowledges its message by returning. With
        `ack="manual"`, the application calls the subscription's `ack`.
        """
        check_handler(handler)
        link = self._require_link()
        if topic in self._subscriptions:
            raise LocalProtocolError(f"{topic!r} is already subscribed on this client")
        subscription: Subscription
        if reader is None:
            subscription = self._attach(topic, offset, serial)
        elif offset is None and serial is None:
            subscription = self._read(topic, reader, start, ack)
        else:
            raise LocalProtocolError(
                "a reader starts at its stored position: pass neither offset nor serial"
            )
        link.send_soon()
        self._subscriptions[topic] = subscription
        if handler is not None:
            subscription.hand_to(handler)
        return subscription

    def _attach(self, topic: str, offset: int | None, serial: str | None) -> Subscription:
        if offset is not None and serial is not None:
            raise LocalProtocolError("pass `offset` or `serial`, not both")
        if serial is not None and not isinstance(serial, str):
            raise TypeError(f"a serial is str, not {type(serial).__name__}")
        place = self._session.attach(topic, offset if serial is None else serial)
        if topic in self._detaching:
            self._detaching.discard(topic)
            self._wake()
        return Subscription(self, topic, place, self.options.receive_bytes_max)

    def _read(self, topic: str, reader: str, start: Start, ack: Acknowledge) -> Subscription:
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
        return ReaderSubscription(self, topic, reader, is_auto=ack == "auto")

    async def unsubscribe(self, topic: str) -> None:
        """End the subscription of a topic at once; do nothing if there is none.

        Returns when the server has confirmed it. Does not wait without a connection.
        """
        self.unsubscribe_nowait(topic)
        while topic in self._detaching:
            await self._changes.wait()

    def unsubscribe_nowait(self, topic: str) -> None:
        """End the subscription of a topic without waiting for the server; nothing more is delivered."""
        link = self._require_link()
        subscription = self._subscriptions.pop(topic, None)
        if subscription is not None:
            self._flow.forget(subscription)
            subscription.end()
            if self._session.detach(topic):
                self._detaching.add(topic)
            link.send_soon()

    @overload
    def on(self, event: Literal["state"], handler: EventHandler[ConnectionState]) -> Remove: ...
    @overload
    def on(self, event: Literal["missed"], handler: EventHandler[Missed]) -> Remove: ...
    @overload
    def on(self, event: Literal["reader"], handler: EventHandler[ReaderChange]) -> Remove: ...
    def on(self, event: str, handler: EventHandler[Any]) -> Remove:
        """Call `handler` with every event of a kind; return a function that removes the handler.

        `state`: a ConnectionState, at every change. `missed`: a Missed, when messages of a topic are lost for
        this client. `reader`: a ReaderChange, when a named reader of this client waits, becomes active, or is
        superseded.
        """
        return self._add_handler(event, handler)

    async def flush_readers(self) -> None:
        """Wait until the server has stored the readers' acknowledgements; do not wait for a connection."""
        for subscription in list(self._subscriptions.values()):
            connected = self.state is ConnectionState.CONNECTED
            if isinstance(subscription, ReaderSubscription) and connected:
                with suppress(ClientError):
                    await subscription.flush()

    def caught_up(self, subscription: Subscription) -> None:
        """For subscriptions: called when a subscription that exceeded its limit has room again."""
        self._flow.caught_up(subscription)

    async def _start(self) -> None:
        if self._link is None:
            link = self._connect(self._session, self._make_connection, self._handle)
            self._flow = Flow(link, self._session, self.options.receive_pause_s)

    async def _flush(self, flush_s: float) -> None:
        if self._final_error is not None:
            return
        try:
            async with asyncio.timeout(flush_s):
                await self.flush_readers()
                if self.unacknowledged:
                    await self._settled()
        except (TimeoutError, ClientClosedError):  # the second: closed by another call
            if self.unacknowledged:
                raise UnacknowledgedError(self.unacknowledged) from None

    async def _stop(self, abort: bool) -> None:
        await super()._stop(abort=self.unacknowledged > 0)

    def _handle(self, events: list[Event]) -> None:
        if self._final_error is not None:
            return
        for event in events:
            if isinstance(event, TopicMessages):
                subscription = self._subscriptions[event.topic]
                if not subscription.deliver(event.messages):
                    self._flow.over(subscription)
            elif isinstance(event, PublishesAcknowledged):
                self._acknowledge(event.publishes)
            elif isinstance(event, PublishRefused):
                self._refuse(PublishRefusedError(event.reason, event.times))
            elif isinstance(event, Missed):
                self._missed(event)
            elif isinstance(event, TopicAttached):
                self._subscriptions[event.topic].begin(event.place)
            elif isinstance(event, TopicDetached):
                self._detaching.discard(event.topic)
                self._wake()
            elif isinstance(event, ReaderEvent):
                self._of_reader(event)
            elif isinstance(event, ConnectionRefused):
                self._end(RefusedError(event.kind, event.reason))
                return

    def _of_reader(self, event: ReaderEvent) -> None:
        subscription = self._subscriptions.get(event.topic)
        if not isinstance(subscription, ReaderSubscription):
            return  # a handler of an earlier event has ended the subscription
        tell = partial(self._tell, "reader")
        change = partial(ReaderChange, event.topic, subscription.reader)
        if isinstance(event, ReadMessages):
            subscription.receive(event)
        elif isinstance(event, ReaderStored):
            subscription.stored(event.offset)
        elif isinstance(event, ReaderActive):
            subscription.begin(event.position.offset)
            subscription.stored(event.position.offset)
            tell(change("active"))
        elif isinstance(event, ReaderSure):
            subscription._wake()  # `until_sure` asks the session
        elif isinstance(event, ReaderWaiting):
            tell(change("waiting"))
        elif isinstance(event, ReaderLost):
            subscription.lost()
            tell(change("lost", event.reason))
        else:
            del self._subscriptions[event.topic]
            reason = f"{event.topic!r} cannot be read as {subscription.reader!r}: {event.reason}"
            subscription.fail(ReaderRefusedError(reason))

    def _missed(self, event: Missed) -> None:
        tell = partial(self._tell, "missed")
        asked, got = event.asked, event.got
        # A reader's cursor is a position in the log, so messages from a lake could not be acknowledged.
        is_read = isinstance(self._subscriptions.get(event.topic), ReaderSubscription)
        if self._read_lake is None or is_read or asked is None or got is None or got <= asked:
            tell(event)
            return
        has_serials = event.got_serial is not None
        gap = LakeGap(self._read_lake, event.topic, asked, got, has_serials=has_serials, tell=tell)
        self._subscriptions[event.topic].deliver_from_lake(gap)

    def _acknowledge(self, publishes: int) -> None:
        self._acknowledged += publishes
        for _ in range(publishes):
            future = self._publishes.popleft()
            if not future.done():
                future.set_result(None)
        self._wake()

    def _refuse(self, error: PublishRefusedError) -> None:
        """Give up the oldest publish."""
        self._acknowledged += 1
        self._refused = self._refused or error
        fail_quietly([self._publishes.popleft()], error)  # `flush` raises the error too
        self._wake()

    def _state_changed(self, state: ConnectionState) -> None:
        if state is ConnectionState.DISCONNECTED:
            self._detaching.clear()
            for subscription in self._subscriptions.values():
                if isinstance(subscription, ReaderSubscription):
                    subscription.doubt()
            self._flow.disconnected()
        super()._state_changed(state)

    def _fail_pending(self, error: ClientError) -> None:
        if self._link is not None:
            self._flow.stop()
        for subscription in self._subscriptions.values():
            if isinstance(error, RefusedError):
                subscription.fail(error)
            else:
                subscription.end()
        fail_quietly(self._publishes, error)
        self._publishes.clear()
        self._detaching.clear()


def as_bytes(payload: Payload) -> bytes:
    try:
        return bytes(memoryview(payload))
    except TypeError:
        kind = type(payload).__name__
        hint = ": encode it" if kind == "str" else ""
        raise TypeError(f"a payload is bytes, not {kind}{hint}") from None
