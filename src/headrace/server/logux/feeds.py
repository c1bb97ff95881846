"""Feeds of a Logux connection: the whole log, or in protocol 5 the channels that the peer asks for."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.broker.broker import BrokerSubscription, SubscriptionState
from headrace.broker.logux.echoes import Echoes, Origin, SentEvent
from headrace.model import Position
from headrace.payload.logux import BadEnvelopeError, Created, Event, keys_of_id
from headrace.session.logux.server import Follow, Incoming, LoguxServerSession
from headrace.session.logux.server5 import (
    DENIED,
    LogMark,
    Logux5ServerSession,
    Since,
    Subscribe,
    Unsubscribe,
)
from headrace.session.server import Unit
from headrace.wire.logux.events import OutgoingEvent, outgoing_of
from headrace.wire.logux.messages import client_of

if TYPE_CHECKING:
    from headrace.server.logux.connection import LoguxConnection

_TOO_MANY = "tooManyChannels"

_HELD_S = 30.0
"""Time that answers wait for a history that is being sent. Clients give up after 70 s."""

_UNANSWERED_MAX = 100
"""Unanswered requests for a channel while its history is being sent. Further requests are refused."""

FILTERS_MAX = 100
"""Filters of one channel of a peer. Requests with further ones are refused."""


class Feed:
    """Base of the feeds. Does nothing where not every protocol has something to do."""

    can_undo = False
    """True if the protocol can refuse an event and keep the connection."""

    def __init__(self, connection: "LoguxConnection") -> None:
        self._connection = connection

    def do(self, command: object) -> None:
        """Execute a command that only this version of the protocol has."""
        raise NotImplementedError

    def refuse(self, unit: Unit, may: Sequence[bool]) -> None:
        """Called when the application refuses some of a unit's events: those with False in `may`."""

    def sift(self, events: Sequence[Incoming], keep: Callable[[list[Incoming]], None]) -> None:
        """Call `keep` with the events that the log may lack, in the order in which messages came."""
        raise NotImplementedError

    def let_in(self) -> None:
        """Called when the peer is authenticated."""

    def passed(self, subscription: BrokerSubscription) -> None:
        """Called when the visible events up to the subscription's position are being written."""
        raise NotImplementedError

    def fell_back(self, subscription: BrokerSubscription) -> None:
        """Called when the frames that were encoded last are not written. They will be encoded again."""

    def live(self, subscription: BrokerSubscription) -> None:
        """Called when the subscription has reached the end of the log."""


class WholeLog(Feed):
    """Feed of all events that the peer may see and has not sent itself."""

    def __init__(self, connection: "LoguxConnection", session: LoguxServerSession) -> None:
        super().__init__(connection)
        self._session = session
        self._born = 0
        """Number of records when the peer came. The peer already has its own later events."""
        self._echoes: Echoes | None = None

    def do(self, command: object) -> None:
        assert isinstance(command, Follow)
        connection, hub = self._connection, self._connection.hub
        if why := connection.why_not_subscribed():
            connection.refuse_peer(why)
            return
        topic = connection.store_topic
        self._born = topic.end_ordinal
        self._echoes = Echoes(
            topic,
            hub.shared.broker.store,
            hub.runner,
            host=self._session.peer,
            synced=command.ordinal,
            may_see=self._may_see,
        )
        connection.follow(connection.topic, command.ordinal, self._encode)

    def sift(self, events: Sequence[Incoming], keep: Callable[[list[Incoming]], None]) -> None:
        assert self._echoes is not None

        def found(echoes: list[bool]) -> None:
            keep([one for one, is_echo in zip(events, echoes, strict=True) if not is_echo])

        self._echoes.sift([SentEvent(one.event, one.created) for one in events], found)

    def _may_see(self, event: Event, created: Created, origin: Origin) -> bool:
        return self._connection.may("see", event, {"created": created, "origin": origin})

    def passed(self, subscription: BrokerSubscription) -> None:
        self._session.sent = subscription.ordinal

    def _encode(self, topic: str, at: Position, records: Sequence[bytes], _ms: int) -> bytes:
        binary = self._session.binary
        events = self._connection.hub.commit(topic, at, records).events
        return b"".join([one.sync(binary=binary) for one in events if self._shows(one)])

    def _shows(self, one: OutgoingEvent) -> bool:
        is_own = one.origin == self._session.peer and not one.envelope.batch
        if is_own and one.ordinal >= self._born:
            return False
        return self._connection.may_see(one)


class LoguxChannels(Feed):
    """Feed of channels. Each channel is a subscription with its own position in the log until it is live."""

    can_undo = True

    def __init__(self, connection: "LoguxConnection", session: Logux5ServerSession) -> None:
        super().__init__(connection)
        self._session = session
        self._channels: dict[str, _Channel] = {}

    def do(self, command: object) -> None:
        if isinstance(command, Subscribe):
            self._subscribe(command)
        elif isinstance(command, Unsubscribe):
            self._unsubscribe(command)

    def refuse(self, unit: Unit, may: Sequence[bool]) -> None:
        self._session.denied(unit, may)

    def sift(self, events: Sequence[Incoming], keep: Callable[[list[Incoming]], None]) -> None:
        keep(list(events))  # ids never change: the log recognises duplicates

    def let_in(self) -> None:
        session = self._session
        session.ledger = self._connection.hub.ledger(self._connection.store_topic, session)

    def passed(self, subscription: BrokerSubscription) -> None:
        self._session.sent = max(self._session.sent, subscription.ordinal)
        channel = subscription.encode
        assert isinstance(channel, _Channel)
        channel.written(subscription)

    def fell_back(self, subscription: BrokerSubscription) -> None:
        channel = subscription.encode
        assert isinstance(channel, _Channel)
        channel.made.clear()

    def live(self, subscription: BrokerSubscription) -> None:
        channel = subscription.encode
        assert isinstance(channel, _Channel)
        channel.answer(LogMark(subscription.topic.epoch, subscription.ordinal))

    def _subscribe(self, command: Subscribe) -> None:
        connection = self._connection
        action = command.action
        meta = {"created": action.meta.created, "origin": self._session.node}
        known = self._channels.get(command.channel)
        if not connection.may("send", action.event, meta):
            self._session.undo(command, DENIED)
        elif known is not None and known.has_room(command):
            # The peer has, or is getting, the whole history of the channel. Sending it once is enough.
            known.ask(command)
            subscription = known.subscription
            if subscription is not None and subscription.state is SubscriptionState.LIVE:
                self.live(subscription)
        elif known is not None or self._is_full():
            self._session.undo(command, _TOO_MANY)
        else:
            channel = _Channel(connection, self._session, command.channel)
            channel.ask(command)
            self._channels[command.channel] = channel
            connection.later(_HELD_S, channel.let_go)
            self._locate(channel, command.since)

    def _is_full(self) -> bool:
        """True if the peer may have no further channel."""
        shared = self._connection.hub.shared
        if len(self._channels) >= shared.limits.topics_attached_max:
            shared.metrics.count_limit("topics_attached_max")
            return True
        return bool(self._connection.why_not_subscribed())

    def _unsubscribe(self, command: Unsubscribe) -> None:
        channel = self._channels.get(command.channel)
        if channel is None:
            return
        channel.filters.discard(_key(command.filter))
        if not channel.filters:
            del self._channels[command.channel]
            self._connection.unfollow(command.channel)
            self._session.ledger.forget(command.channel)
            # Requests for the channel that are still unanswered get an answer.
            topic = self._connection.store_topic
            channel.answer(LogMark(topic.epoch, topic.end_ordinal))

    def _locate(self, channel: "_Channel", since: Since | None) -> None:
        """Find the position at which the channel begins, and begin there."""
        connection = self._connection
        topic = connection.store_topic
        channel.is_resumed = since is not None
        channel.born = topic.end_ordinal
        ledger = self._session.ledger
        known = ledger.place(channel.name, is_resumed=channel.is_resumed)
        ledger.begun(channel.name)
        if since is None:
            self._begin(channel, known)
            return
        mark = since.mark
        # If the position that the peer names is unknown too, the peer's history is not the history of this
        # log. Position 0 is the same in every epoch of a log, also before the first epoch.
        otherwise = None
        if mark is not None and (mark.epoch == topic.epoch or not mark.ordinal):
            otherwise = mark.ordinal if mark.ordinal <= topic.end_ordinal else None

        def found(ordinal: int | None) -> None:
            is_wanted = self._channels.get(channel.name) is channel
            if is_wanted and not connection.is_gone:
                place = ordinal + 1 if ordinal is not None else otherwise
                self._begin(channel, max(place, known) if place is not None else 0)
                connection.answer_soon()

        try:
            keys = keys_of_id(since.id)
        except BadEnvelopeError:
            found(None)
            return
        connection.hub.log(connection.topic).locate(keys, found)

    def _begin(self, channel: "_Channel", ordinal: int) -> None:
        channel.subscription = self._connection.follow(channel.name, ordinal, channel)


def _key(chosen: object) -> bytes:
    """Return a hash of a filter. Clients have one subscription per filter; filters narrow nothing here."""
    return hashlib.blake2b(msgspec.json.encode(chosen), digest_size=16).digest()


class _Channel:
    """A channel of one peer. Called as a function, it is the broker's encoding for the channel."""

    def __init__(
        self, connection: "LoguxConnection", session: Logux5ServerSession, name: str
    ) -> None:
        self._connection = connection
        self._session = session
        self._client = client_of(session.node)
        self.name = name
        self.asked: list[Subscribe] = []
        """Requests for the channel that are not answered yet."""
        self.filters: set[bytes] = set()
        self.subscription: BrokerSubscription | None = None
        self.is_resumed = False
        """True if the peer had a part of the channel before."""
        self.born = 0
        """Number of records in the log when the peer asked for the channel."""
        self.made: deque[int] = deque()
        """Numbers of events that were encoded into frames and may not be written yet."""

    def ask(self, command: Subscribe) -> None:
        self.asked.append(command)
        self.filters.add(_key(command.filter))

    def has_room(self, command: Subscribe) -> bool:
        """True if the peer may ask for the channel once more, with this filter."""
        is_known = _key(command.filter) in self.filters
        return len(self.asked) < _UNANSWERED_MAX and (is_known or len(self.filters) < FILTERS_MAX)

    def answer(self, mark: LogMark) -> None:
        asked, self.asked = self.asked, []
        for command in asked:
            self._session.subscribed(command, mark)

    def written(self, subscription: BrokerSubscription) -> None:
        """Enter the events up to the subscription's position in the ledger as sent."""
        epoch = subscription.topic.epoch
        while self.made and self.made[0] <= subscription.ordinal:
            self._session.ledger.sent(self.name, self.made.popleft(), epoch)

    def let_go(self) -> None:
        """Let the peer's other messages be answered meanwhile, because the history takes long."""
        for command in self.asked:
            self._session.let_go(command)

    def takes(self, topic: str, at: Position, records: Sequence[bytes]) -> bool:
        """True if a commit has events for this channel."""
        return self.name in self._connection.hub.commit(topic, at, records).channels

    def __call__(self, topic: str, at: Position, records: Sequence[bytes], _ms: int) -> bytes:
        base, binary = self._session.base, self._session.binary
        events: Iterable[OutgoingEvent]
        if self.subscription is not None and self.subscription.state is SubscriptionState.LIVE:
            hub = self._connection.hub
            found = hub.commit(topic, at, records).channels.get(self.name)
            if found is None:
                return b""
            is_filtered = hub.event_filter is not None
            if not (binary or is_filtered or self._client in found.clients):
                self.made.extend(found.added)
                return found.syncs(base)
            events = found.events
        else:
            events = outgoing_of(self.name, at, records)
        shown = [one for one in events if self._shows(one)]
        self.made.extend([one.added for one in shown])
        return b"".join([one.sync5(base, binary=binary) for one in shown])

    def _shows(self, one: OutgoingEvent) -> bool:
        """True if the peer may see the event and is not its author.

        A client that begins anew may have forgotten what it did before. So it gets the older events of its
        other nodes.
        """
        shown = one.shown
        if one.ordinal < self.born and not self.is_resumed:
            is_own = shown.node == self._session.node
        else:
            is_own = shown.client == self._client
        return not is_own and self._connection.may_see(one)
