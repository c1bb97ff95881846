"""Logux over WebSocket: connections of one server, the logs they follow, and silent clients."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from headrace.broker.logux_echoes import Echoes, Origin
from headrace.broker.logux_log import LoguxLog, NewEvent
from headrace.broker.subscription import Encode, Slice, Subscription
from headrace.config_protocols import LoguxSettings
from headrace.errors import BadTopicNameError
from headrace.log.event_ids import EventIds
from headrace.log.runner import Runner
from headrace.log.store import Topic
from headrace.logux_envelope import Created, Event, Number
from headrace.model import LOGUX_PREFIX, Position, check_topic_name
from headrace.server.connection import Connections, Pause
from headrace.server.credentials import Credentials
from headrace.server.logux_feeds import Channels, Feed, WholeLog
from headrace.server.websocket import WebSocketConnection
from headrace.session.logux5_ledger import Ledger
from headrace.session.logux5_server import Logux5ServerSession, is_protocol_5
from headrace.session.logux_server import LoguxServerSession
from headrace.session.logux_session import Add, Authenticate, Incoming, LoguxSession
from headrace.session.units import Unit
from headrace.wire import logux, websocket
from headrace.wire.logux_events import ChannelEvents, Outgoing, outgoing

logger = logging.getLogger(__name__)

PREFIX = LOGUX_PREFIX
MAIN = "main"

_LOGS_REMEMBERED = 1000
_NODES_REMEMBERED = 10_000
"""Clients of protocol 5 of which it is known what they have got."""
_COMPLAINTS_EVERY_S = 1.0
_COMMITS_REMEMBERED = 16
"""Commits whose events are taken apart once for all who follow their log live."""

EventFilter = Callable[[str, Event, dict[str, Any], dict[str, Any]], bool]
"""Given "send" or "see", the event, its meta and the peer: whether the peer may."""


class _Commit:
    """The events that one commit has brought to one log."""

    def __init__(self, events: list[Outgoing]) -> None:
        self.events = events
        self.channels: dict[str, ChannelEvents] = {}
        for one in events:
            if one.channel is not None:
                self.channels.setdefault(one.channel, ChannelEvents()).add(one)


class Logux:
    """What the Logux connections of one server share."""

    def __init__(
        self,
        shared: Connections,
        runner: Runner,
        ids: EventIds,
        settings: LoguxSettings,
        credentials: Credentials,
        event_filter: EventFilter | None,
        clock_ms: Callable[[], int],
    ) -> None:
        self.shared = shared
        self.settings = settings
        self.credentials = credentials
        self.event_filter = event_filter
        self.clock_ms = clock_ms
        self.open: dict[LoguxConnection, None] = {}
        """In the order in which they were last heard of."""
        self._complained_s = -_COMPLAINTS_EVERY_S
        self._runner = runner
        self._ids = ids
        self._logs: dict[str, LoguxLog] = {}
        """Those that events were added to; of many, those that have nothing to do are forgotten."""
        self._ledgers: OrderedDict[tuple[str, str], Ledger] = OrderedDict()
        self._commits: OrderedDict[tuple[str, int, int], _Commit] = OrderedDict()

    def route(self, path: str) -> "Callable[[], LoguxConnection] | None":
        """What a WebSocket to this path becomes."""
        if path == logux.PATH:
            name = MAIN
        elif path.startswith(f"{logux.PATH}/"):
            name = unquote(path.removeprefix(f"{logux.PATH}/"), errors="surrogateescape")
        else:
            return None
        topic = PREFIX + name
        try:
            check_topic_name(topic)
        except BadTopicNameError:
            return None
        return (lambda: LoguxConnection(self, topic)) if name else None

    def ledger(self, topic: Topic, session: Logux5ServerSession) -> Ledger:
        """What is known of a node that connects; from now on it is written on."""
        key = topic.name, session.node
        known = self._ledgers.pop(key, None) or Ledger()
        made = self._ledgers[key] = known.connected(topic.epoch, session.synced)
        if len(self._ledgers) > _NODES_REMEMBERED:
            self._ledgers.popitem(last=False)
        return made

    def log(self, topic: str) -> LoguxLog:
        store = self.shared.broker.store
        handle = store.topic(topic)
        log = self._logs.get(topic)
        if log is None or log.topic is not handle:
            log = self._logs[topic] = LoguxLog(
                handle,
                store,
                self._runner,
                self._ids,
                partial(self.shared.metrics.count, "duplicates_refused_total"),
            )
        return log

    def echoes(
        self,
        topic: str,
        host: str | Number,
        synced: int,
        may_see: Callable[[Event, Created, Origin], bool],
    ) -> Echoes:
        """For a connection of a host that has so many records of the log."""
        store = self.shared.broker.store
        handle = store.topic(topic)
        return Echoes(handle, store, self._runner, host=host, synced=synced, may_see=may_see)

    def events(self, topic: str, at: Position, records: Sequence[bytes]) -> list[Outgoing]:
        """The events of a commit, the same objects for everyone who asks."""
        return self._commit(topic, at, records).events

    def events_of(
        self, channel: str, topic: str, at: Position, records: Sequence[bytes]
    ) -> ChannelEvents | None:
        """Those of them that go to a channel."""
        return self._commit(topic, at, records).channels.get(channel)

    def _commit(self, topic: str, at: Position, records: Sequence[bytes]) -> "_Commit":
        key = topic, at.offset, len(records)
        found = self._commits.get(key)
        if found is None:
            found = self._commits[key] = _Commit(list(outgoing(at, records)))
            if len(self._commits) > _COMMITS_REMEMBERED:
                self._commits.popitem(last=False)
        return found

    def may_complain(self) -> bool:
        """Whether a fault of the application is told: a flood of them is one a second."""
        now = self.shared.loop.time()
        may = now >= self._complained_s + _COMPLAINTS_EVERY_S
        if may:
            self._complained_s = now
        return may

    def tick(self, now: float) -> None:
        for topic, log in list(self._logs.items()):
            log.tick()
            if log.idle and len(self._logs) > _LOGS_REMEMBERED:
                del self._logs[topic]
        for connection in list(self.open):
            if not connection.tick(now):
                break

    def close(self) -> None:
        self._ids.close()


class LoguxConnection(WebSocketConnection):
    __slots__ = ("_checking", "_feed", "_heard", "_pinged", "logux", "topic")
    protocol = "logux"
    message_bytes_max = logux.MESSAGE_BYTES_MAX
    takes_text = True
    _session: LoguxSession

    def __init__(self, hub: Logux, topic: str) -> None:
        self.logux = hub
        self.topic = topic
        self._heard = hub.shared.loop.time()
        self._pinged = False
        self._checking: asyncio.Task[None] | None = None
        session = LoguxServerSession(hub.settings.host)
        self._feed: Feed = WholeLog(self, session)
        super().__init__(hub.shared, session)
        hub.open[self] = None

    def messages_received(self, messages: Sequence[bytes | str]) -> None:
        self._heard = self._shared.loop.time()
        self._pinged = False
        self._move_to_end()
        if self._session.is_new and any(map(is_protocol_5, messages)):
            settings = self.logux.settings
            session = Logux5ServerSession(settings.host, settings.subprotocol_min)
            self._session, self._feed = session, Channels(self, session)
        commands = self._session.receive_messages(messages, self.logux.clock_ms())
        if commands:
            self.handle(commands, sum(map(len, messages)))
        else:
            self._answer()

    def _do(self, command: object, size: int) -> None:
        if isinstance(command, Add):
            self._add(command, size)
        elif isinstance(command, Authenticate):
            self._checking = self._shared.loop.create_task(self._authenticate(command))
            # What comes behind must wait, and need not be held in memory.
            self.pause(Pause.CHECKING)
        else:
            self._feed.do(command)

    async def _authenticate(self, command: Authenticate) -> None:
        try:
            address = self.peer.rpartition(":")[0]
            allowed = await self.logux.credentials.allow(
                self.topic, command.host, command.credentials, address
            )
        except Exception:
            logger.exception("%s: logux.verify failed", self.peer)
            allowed = False
        if self._closed or self._transport.is_closing():
            return
        self._resume(Pause.CHECKING)
        if allowed:
            self._feed.let_in()
            credentials = self.logux.settings.credentials or None
            self.handle(self._session.let_in(self.logux.clock_ms(), credentials), 0)
        else:
            self.handle([self._session.turn_away()], 0)

    def _add(self, command: Add, size: int) -> None:
        self._shared.metrics.count("records_published_total", len(command.events))
        unit = command.unit
        may = [self._may_send(one) for one in command.events]
        if not all(may):
            self._feed.refuse(unit, may)
        events = [one for one, is_allowed in zip(command.events, may, strict=True) if is_allowed]
        self._under_way(size)
        self._feed.sift(events, lambda kept: self._store(kept, unit, size))

    def _store(self, events: Sequence[Incoming], unit: Unit, size: int) -> None:
        if events:
            new = [NewEvent.of(one.payload, one.created) for one in events]
            self.logux.log(self.topic).add(new, lambda: self._stored(unit, size))
        else:
            self._stored(unit, size)

    # What the application decides

    def _may_send(self, one: Incoming) -> bool:
        if self.logux.event_filter is None:
            return True
        return self.may("send", one.event, {"created": one.created, "origin": self._session.peer})

    def may_see(self, one: Outgoing) -> bool:
        if self.logux.event_filter is None:
            return True
        meta = {"created": one.created, "origin": one.origin}
        return self.may("see", one.event, meta)

    def may(self, what: str, event: Event, meta: dict[str, Any]) -> bool:
        if self.logux.event_filter is None:
            return True
        peer = {"host": self._session.peer, "log": self.topic.removeprefix(PREFIX)}
        try:
            return bool(self.logux.event_filter(what, event, meta, peer))
        except Exception:
            if self.logux.may_complain():
                logger.exception("%s: logux.filter failed, the event is hidden", self.peer)
            return False

    # Subscriptions, by the names that the feed gives them

    def follow(self, name: str, ordinal: int, encode: Encode) -> Subscription:
        """Send what lies behind so many records, and what comes."""
        broker = self._shared.broker
        self._shared.metrics.count("subscriptions_total")
        if self._subscriptions is None:
            self._subscriptions = {}
        subscription = broker.follow(self, self.topic, ordinal, encode)
        self._subscriptions[name] = subscription
        return subscription

    def unfollow(self, name: str) -> None:
        if self._subscriptions and name in self._subscriptions:
            self._drop(name)

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Do something in a while, if the peer is there then."""

        def now() -> None:
            if not self.is_gone:
                do()
                self._answer()

        self._shared.loop.call_later(delay_s, now)

    @property
    def store_topic(self) -> Topic:
        return self._shared.broker.store.topic(self.topic)

    @property
    def is_gone(self) -> bool:
        return self._closed or self._transport.is_closing()

    @property
    def channels_max(self) -> int:
        return self._shared.limits.topics_attached_max

    def answer_soon(self) -> None:
        self._answer_soon()

    # The broker's sink

    def attached(self, subscription: Subscription, offset: int, exact: bool) -> None:
        self._feed.passed(subscription)

    def live(self, subscription: Subscription) -> None:
        self._feed.live(subscription)
        self._answer()

    def deliver(self, subscription: Subscription, slices: Sequence[Slice]) -> bool:
        for piece in slices:
            if not self._writable:
                self._feed.fell_back(subscription)
                return False
            self._write(piece.data)
            subscription.offset, subscription.ordinal = piece.end, piece.end_ordinal
            self._feed.passed(subscription)
        return True

    def _pulled(self, subscription: Subscription) -> None:
        self._feed.passed(subscription)

    def lost(self) -> None:
        self.logux.open.pop(self, None)
        if self._checking is not None:
            self._checking.cancel()
        super().lost()

    # Silence

    def tick(self, now: float) -> bool:
        """Ask a silent peer whether it is there, give up one that is not; False when it was heard lately."""
        settings = self.logux.settings
        if now < self._heard + settings.ping_s:
            return False
        if self._paused & ~Pause.ANSWERS:
            self._heard = now  # we do not read, so we cannot have heard it
            self._move_to_end()
        elif now >= self._heard + settings.ping_s + settings.timeout_s:
            self.logux.open.pop(self, None)
            reason = f"nothing was heard for {now - self._heard:.0f} s"
            self.count_refusal(reason)
            self.close(reason, websocket.POLICY_VIOLATION)
        elif not self._pinged:
            self._pinged = True
            self._session.ping()
            self._answer()
        return True

    def _move_to_end(self) -> None:
        if self.logux.open.pop(self, self) is None:
            self.logux.open[self] = None
