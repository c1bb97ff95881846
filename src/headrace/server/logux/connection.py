"""Logux over WebSocket: the connections of one server, the logs that they follow, and silent clients."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from headrace.access.operations import Operation
from headrace.access.principals import OPEN, Principal
from headrace.broker.broker import BrokerSubscription, Encode, Slice
from headrace.broker.logux.event_ids import EventIds
from headrace.broker.logux.log import LoguxLog, NewEvent
from headrace.config.protocols import LoguxSettings
from headrace.errors import BadTopicNameError
from headrace.log.store import Runner, Topic
from headrace.model import LOGUX_PREFIX, Position, Refusal, RefusedPublish, check_topic_name
from headrace.payload.logux import Event, stamp_of
from headrace.server.access import (
    Refused,
    Verify,
    application_principal,
    token_in,
    user_of,
    verified,
)
from headrace.server.logux.feeds import Feed, LoguxChannels, WholeLog
from headrace.server.peers.connection import COMMAND_OVERHEAD_BYTES
from headrace.server.peers.connections import Connections
from headrace.server.peers.pause import Pause
from headrace.server.peers.throttle import Cost
from headrace.server.websocket import PingedConnection, PingedConnections
from headrace.session.logux.server import (
    AddEvents,
    AuthenticatePeer,
    Incoming,
    LoguxServerSession,
    LoguxSession,
)
from headrace.session.logux.server5 import Ledger, Logux5ServerSession, is_protocol_5
from headrace.session.server import Close, Unit
from headrace.wire import websocket
from headrace.wire.logux import messages as logux
from headrace.wire.logux.events import ChannelEvents, OutgoingEvent, outgoing

logger = logging.getLogger(__name__)

_LOGS_REMEMBERED = 1000
_NODES_REMEMBERED = 10_000
"""Clients of protocol 5 whose ledger of received events is kept."""
_COMPLAINTS_EVERY_S = 1.0
_MEMORY_PER_BYTE = 8
_COMMITS_REMEMBERED = 16
"""Commits whose events are decoded once for all connections that follow their log live."""

EventFilter = Callable[[str, Event, dict[str, Any], dict[str, Any]], bool]
"""Function of "send" or "see", the event, its meta and the peer. Returns True if the peer may do that."""


class _Commit:
    """The events that one commit has added to one log."""

    def __init__(self, events: list[OutgoingEvent]) -> None:
        self.events = events
        self.channels: dict[str, ChannelEvents] = {}
        for one in events:
            if one.channel is not None:
                self.channels.setdefault(one.channel, ChannelEvents()).add(one)


class Logux(PingedConnections):
    """State that the Logux connections of one server share."""

    def __init__(
        self,
        shared: Connections,
        runner: Runner,
        ids: EventIds,
        settings: LoguxSettings,
        verify: Verify | None,
        event_filter: EventFilter | None,
        clock_ms: Callable[[], int],
    ) -> None:
        super().__init__(shared, ping_s=settings.ping_s, timeout_s=settings.timeout_s)
        self.settings = settings
        self.verify = verify
        self.event_filter = event_filter
        self.clock_ms = clock_ms
        self.complained_s = -_COMPLAINTS_EVERY_S
        """Time when an error of the application was last logged."""
        self.runner = runner
        self._ids = ids
        self._logs: dict[str, LoguxLog] = {}
        """Logs to which events were added. Above `_LOGS_REMEMBERED`, idle logs are forgotten."""
        self._ledgers: OrderedDict[tuple[str, str], Ledger] = OrderedDict()
        self._commits: OrderedDict[tuple[str, int, int], _Commit] = OrderedDict()

    def route(self, path: str) -> "Callable[[], LoguxConnection] | None":
        """Return the factory of connections for this path; None if the path names no log."""
        if path == logux.PATH:
            name = "main"
        elif path.startswith(f"{logux.PATH}/"):
            name = unquote(path.removeprefix(f"{logux.PATH}/"), errors="surrogateescape")
        else:
            return None
        topic = LOGUX_PREFIX + name
        try:
            check_topic_name(topic)
        except BadTopicNameError:
            return None
        return (lambda: LoguxConnection(self, topic)) if name else None

    def ledger(self, topic: Topic, session: Logux5ServerSession) -> Ledger:
        """Return the ledger of a node that connects. The new connection updates it from now on."""
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
            count = partial(self.shared.metrics.count, "duplicates_refused_total")
            log = self._logs[topic] = LoguxLog(handle, store, self.runner, self._ids, count)
        return log

    def commit(self, topic: str, at: Position, records: Sequence[bytes]) -> _Commit:
        """Return the events of a commit, as the same objects for every caller."""
        key = topic, at.offset, len(records)
        found = self._commits.get(key)
        if found is None:
            found = self._commits[key] = _Commit(list(outgoing(at, records)))
            if len(self._commits) > _COMMITS_REMEMBERED:
                self._commits.popitem(last=False)
        return found

    def tick(self, now: float) -> None:
        for topic, log in list(self._logs.items()):
            log.tick()
            if log.idle and len(self._logs) > _LOGS_REMEMBERED:
                del self._logs[topic]
        super().tick(now)

    def close(self) -> None:
        self._ids.close()


class LoguxConnection(PingedConnection):
    __slots__ = ("_checking", "_feed", "_user", "topic")
    hub: Logux
    protocol = "logux"
    message_bytes_max = logux.MESSAGE_BYTES_MAX
    takes_text = True
    _session: LoguxSession

    def __init__(self, hub: Logux, topic: str) -> None:
        self.topic = topic
        self._checking: asyncio.Task[None] | None = None
        self._user = ""
        session = LoguxServerSession(hub.settings.host)
        self._feed: Feed = WholeLog(self, session)
        super().__init__(hub, session)

    @property
    def names(self) -> tuple[str, ...]:
        return *super().names, str(self._session.peer)

    @property
    def only_topic(self) -> str:
        return self.topic

    def messages_received(self, messages: Sequence[bytes | str]) -> None:
        self._was_heard()
        if self._session.is_new and any(map(is_protocol_5, messages)):
            settings = self.hub.settings
            session = Logux5ServerSession(settings.host, settings.subprotocol_min)
            self._session, self._feed = session, LoguxChannels(self, session)
        commands = self._session.receive_messages(messages, self.hub.clock_ms())
        if commands:
            self.handle(commands, sum(map(len, messages)))
        else:
            self._answer()

    def _do(self, command: object, size: int) -> None:
        if isinstance(command, AddEvents):
            self._add(command, size)
        elif isinstance(command, AuthenticatePeer):
            self._checking = self._shared.loop.create_task(self._authenticate(command))
            # Later messages must wait, and need not be held in memory.
            self.pause(Pause.CHECKING)
        else:
            self._feed.do(command)

    async def _authenticate(self, command: AuthenticatePeer) -> None:
        try:
            principal = await self._principal_of(command)
        except Exception:
            logger.exception("%s: logux.verify failed", self.peer)
            principal = None
        if self.is_gone or self._goodbye is not None:
            return
        self._resume(Pause.CHECKING)
        if principal is not None:
            self.identified(principal)
            self._user = user_of(command.host)
        if (
            principal is not None
            and self.rights.is_granted(Operation.ACT, self._user)
            and self.rights.is_granted(Operation.SUBSCRIBE, self.topic)
        ):
            self._feed.let_in()
            credentials = self.hub.settings.credentials or None
            self.handle(self._session.let_in(self.hub.clock_ms(), credentials), 0)
        else:
            self.handle([self._session.turn_away()], 0)

    def _cost(self, command: object, size: int) -> Cost | None:
        if not isinstance(command, AddEvents) or not command.events:
            return (
                None  # a request for a channel comes with no events, and readers are not held back
            )
        return Cost(
            len(command.events), sum(len(one.payload) for one in command.events), (self.topic,)
        )

    def _weight(self, command: object, size: int) -> int:
        if not isinstance(command, AddEvents):
            return super()._weight(command, size)
        # Decoded events take several times the memory of their text.
        return _MEMORY_PER_BYTE * size + COMMAND_OVERHEAD_BYTES * (1 + len(command.events))

    async def _principal_of(self, command: AuthenticatePeer) -> Principal | None:
        """Return who a peer is by its credentials; None if they are wrong."""
        if self.hub.verify is not None:
            is_known = await verified(self.hub.verify, command.host, command.credentials)
            return application_principal(user_of(command.host), self.topic) if is_known else None
        token = token_in(command.credentials)
        if token is None:
            return self.rights.principal
        shared = self._shared
        found = shared.access.identify(token, self.address, shared.loop.time(), self.protocol)
        if isinstance(found, Refused):
            await asyncio.sleep(found.delay_s)
            return None
        return found

    def _turned_away(self, reason: str) -> Close:
        return self._session.turn_away()

    def _forbidden(self, events: Sequence[Incoming]) -> bool:
        """True if the peer may not add events, or one of them names the client of another user."""
        if self.rights.principal is OPEN:
            return False
        if self.rights.publishable.get(self.topic) is not True and not self.rights.may_publish(
            self.topic
        ):
            return True
        users = {user_of(node) for one in events for node in one.created[1:] if type(node) is str}
        # A node may be a number. In the form of protocol 5, number and string are the same node.
        users |= {user_of(stamp.host) for one in events if (stamp := stamp_of(one.created))}
        return any(
            user != self._user and not self.rights.is_granted(Operation.ACT, user) for user in users
        )

    def _add(self, command: AddEvents, size: int) -> None:
        events, unit = command
        if events and self._forbidden(events):
            if not self._feed.can_undo:
                # The 0.x protocols cannot refuse an event. Without an answer, the peer keeps it.
                self._session.discard(command)
                self.handle([self._session.turn_away()], 0)
                return
            self._feed.refuse(unit, [False] * len(events))
            events = []
        if events and (why := self._shared.why_not_created((self.topic,))):
            refused = RefusedPublish(Refusal.TOPICS_MAX, unit.lowest)
            close = self._session.refuse_publish(why, websocket.POLICY_VIOLATION, refused)
            self._refuse(close._replace(refused=None))  # nobody counts refusals of this protocol
            return
        self._shared.metrics.count("records_published_total", len(events))
        if self.hub.event_filter is not None:
            origin = self._session.peer
            may = [
                self.may("send", one.event, {"created": one.created, "origin": origin})
                for one in events
            ]
            if not all(may):
                self._feed.refuse(unit, may)
            events = [one for one, is_allowed in zip(events, may, strict=True) if is_allowed]
        self._under_way(size)
        self._feed.sift(events, lambda kept: self._store(kept, unit, size))

    def _store(self, events: Sequence[Incoming], unit: Unit, size: int) -> None:
        if events:
            new = [NewEvent.of(one.payload, one.created) for one in events]
            self.hub.log(self.topic).add(new, lambda: self._stored(unit, size))
        else:
            self._stored(unit, size)

    # Decisions of the application

    def may_see(self, one: OutgoingEvent) -> bool:
        if self.hub.event_filter is None:
            return True
        return self.may("see", one.event, {"created": one.created, "origin": one.origin})

    def may(self, what: str, event: Event, meta: dict[str, Any]) -> bool:
        hub = self.hub
        if hub.event_filter is None:
            return True
        peer = {"host": self._session.peer, "log": self.topic.removeprefix(LOGUX_PREFIX)}
        try:
            return bool(hub.event_filter(what, event, meta, peer))
        except Exception:
            now = self._shared.loop.time()
            if now >= hub.complained_s + _COMPLAINTS_EVERY_S:
                hub.complained_s = now
                logger.exception("%s: logux.filter failed: the event is dropped", self.peer)
            return False

    # Subscriptions, by the names that the feed gives them

    def follow(self, name: str, ordinal: int, encode: Encode) -> BrokerSubscription:
        """Subscribe to the log: send all records from `ordinal` on, and new records as they are committed."""
        self._shared.metrics.count("subscriptions_total")
        if self._subscriptions is None:
            self._subscriptions = {}
        subscription = self._shared.broker.follow(self, self.topic, ordinal, encode)
        self._subscriptions[name] = subscription
        self._count_subscriptions()
        return subscription

    def refuse_peer(self, reason: str) -> None:
        """End the connection before any further command of the peer."""
        self._refuse(self._session.refuse(reason))

    def why_not_subscribed(self) -> str:
        """Return the reason why one more subscription is refused; empty if it is accepted."""
        return self._why_not_subscribed()

    def unfollow(self, name: str) -> None:
        if self._subscriptions and name in self._subscriptions:
            self._drop(name)

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Call `do` after a delay, if the peer is still connected then."""

        def now() -> None:
            if not self.is_gone:
                do()
                self._answer()

        self._shared.loop.call_later(delay_s, now)

    @property
    def store_topic(self) -> Topic:
        return self._shared.broker.store.topic(self.topic)

    def answer_soon(self) -> None:
        self._answer_soon()

    # Sink for the broker

    def attached(self, subscription: BrokerSubscription, offset: int, exact: bool) -> None:
        self._feed.passed(subscription)

    def live(self, subscription: BrokerSubscription) -> None:
        self._feed.live(subscription)
        self._answer()

    def deliver(self, subscription: BrokerSubscription, slices: Sequence[Slice]) -> bool:
        for piece in slices:
            if not self._output.is_writable:
                self._feed.fell_back(subscription)
                return False
            self.write(piece.data)
            subscription.offset, subscription.ordinal = piece.end, piece.end_ordinal
            self._feed.passed(subscription)
        return True

    def pulled(self, subscription: BrokerSubscription) -> None:
        self._feed.passed(subscription)

    def lost(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        super().lost()

    # Silent peers

    def _ping(self) -> None:
        self._session.ping()
        self._answer()

    def _stays_silent(self, reason: str) -> None:
        self.count_refusal(reason)
        super()._stays_silent(reason)
