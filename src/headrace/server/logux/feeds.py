"""What a Logux connection gets of its log: all of it, or in protocol 5 the channels that it asks for."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace.broker.logux_echoes import Echoes, Origin, Sent
from headrace.broker.subscription import State, Subscription
from headrace.logux_envelope import BadEnvelopeError, Created, Event, keys_of_id
from headrace.model import Position
from headrace.session.logux5_server import (
    DENIED,
    Logux5ServerSession,
    Mark,
    Since,
    Subscribe,
    Unsubscribe,
)
from headrace.session.logux_server import Follow, LoguxServerSession
from headrace.session.logux_session import Incoming
from headrace.session.units import Unit
from headrace.wire.logux5 import client_of
from headrace.wire.logux_events import Outgoing, outgoing_of

if TYPE_CHECKING:
    from headrace.server.logux import LoguxConnection

_TOO_MANY = "tooManyChannels"

_HELD_S = 30.0
"""How long answers wait for a history that is being sent. Clients give up after 70 s."""

_UNANSWERED_MAX = 100
"""How often a channel may be asked for while its history is being sent."""


class Feed(Protocol):
    def do(self, command: object) -> None:
        """A command of the protocol's own."""

    def refuse(self, unit: Unit, may: Sequence[bool]) -> None:
        """The application does not take all of what is to be stored."""

    def sift(self, events: Sequence[Incoming], keep: Callable[[list[Incoming]], None]) -> None:
        """Go on with those that the log may lack, in the order in which messages came."""

    def let_in(self) -> None:
        """The peer is who it says."""

    def passed(self, subscription: Subscription) -> None:
        """What the peer is to see of a subscription, up to where that is, is being written."""

    def fell_back(self, subscription: Subscription) -> None:
        """What was made for it last is not written: it is made again."""

    def live(self, subscription: Subscription) -> None:
        """It has everything up to now."""


class WholeLog:
    """Everything that the peer may see and has not sent itself."""

    def __init__(self, connection: "LoguxConnection", session: LoguxServerSession) -> None:
        self._connection = connection
        self._session = session
        self._born = 0
        """How many records there were when the peer came: later ones of its own it has."""
        self._echoes: Echoes | None = None

    def do(self, command: object) -> None:
        assert isinstance(command, Follow)
        connection = self._connection
        self._born = connection.store_topic.end_ordinal
        self._echoes = connection.logux.echoes(
            connection.topic, self._session.peer, command.ordinal, self._may_see
        )
        connection.follow(connection.topic, command.ordinal, self._encode)

    def refuse(self, unit: Unit, may: Sequence[bool]) -> None:
        """Peers are not told."""

    def sift(self, events: Sequence[Incoming], keep: Callable[[list[Incoming]], None]) -> None:
        assert self._echoes is not None

        def found(echoes: list[bool]) -> None:
            keep([one for one, is_echo in zip(events, echoes, strict=True) if not is_echo])

        self._echoes.sift([Sent(one.event, one.created) for one in events], found)

    def _may_see(self, event: Event, created: Created, origin: Origin) -> bool:
        return self._connection.may("see", event, {"created": created, "origin": origin})

    def let_in(self) -> None:
        """The peer says itself how far it is."""

    def passed(self, subscription: Subscription) -> None:
        self._session.sent = subscription.ordinal

    def fell_back(self, subscription: Subscription) -> None:
        """Nothing was noted."""

    def live(self, subscription: Subscription) -> None:
        """Peers are not told."""

    def _encode(self, topic: str, at: Position, records: Sequence[bytes], _ms: int) -> bytes:
        binary = self._session.binary
        events = self._connection.logux.events(topic, at, records)
        return b"".join([one.sync(binary=binary) for one in events if self._shows(one)])

    def _shows(self, one: Outgoing) -> bool:
        is_own = one.origin == self._session.peer and not one.envelope.batch
        if is_own and one.ordinal >= self._born:
            return False
        return self._connection.may_see(one)


class Channels:
    """Each channel is a subscription of its own: it has its own place in the log until it is live."""

    def __init__(self, connection: "LoguxConnection", session: Logux5ServerSession) -> None:
        self._connection = connection
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
        keep(list(events))  # ids never change

    def let_in(self) -> None:
        session = self._session
        session.ledger = self._connection.logux.ledger(self._connection.store_topic, session)

    def passed(self, subscription: Subscription) -> None:
        self._session.sent = max(self._session.sent, subscription.ordinal)
        channel = subscription.encode
        assert isinstance(channel, _Channel)
        channel.written(subscription)

    def fell_back(self, subscription: Subscription) -> None:
        channel = subscription.encode
        assert isinstance(channel, _Channel)
        channel.made.clear()

    def live(self, subscription: Subscription) -> None:
        channel = subscription.encode
        assert isinstance(channel, _Channel)
        channel.answer(Mark(subscription.topic.epoch, subscription.ordinal))

    def _subscribe(self, command: Subscribe) -> None:
        connection = self._connection
        action = command.action
        meta = {"created": action.meta.created, "origin": self._session.node}
        known = self._channels.get(command.channel)
        if not connection.may("send", action.event, meta):
            self._session.undo(command, DENIED)
        elif known is not None and len(known.asked) < _UNANSWERED_MAX:
            # It has, or is getting, all of it: once is enough.
            known.ask(command)
            if known.subscription is not None and known.subscription.state is State.LIVE:
                self.live(known.subscription)
        elif known is not None or len(self._channels) >= connection.channels_max:
            self._session.undo(command, _TOO_MANY)
        else:
            channel = _Channel(connection, self._session, command.channel)
            channel.ask(command)
            self._channels[command.channel] = channel
            connection.later(_HELD_S, channel.let_go)
            self._locate(channel, command.since)

    def _unsubscribe(self, command: Unsubscribe) -> None:
        channel = self._channels.get(command.channel)
        if channel is None:
            return
        channel.filters.discard(_key(command.filter))
        if not channel.filters:
            del self._channels[command.channel]
            self._connection.unfollow(command.channel)
            self._session.ledger.forget(command.channel)
            # Whoever asked for it and has no answer yet gets one.
            topic = self._connection.store_topic
            channel.answer(Mark(topic.epoch, topic.end_ordinal))

    def _locate(self, channel: "_Channel", since: Since | None) -> None:
        """Find where to begin."""
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
        # Where not even the place that it names is known, what it has is not what we have. The beginning is
        # the same in every life of a log, also before the first.
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
        connection.logux.log(connection.topic).locate(keys, found)

    def _begin(self, channel: "_Channel", ordinal: int) -> None:
        channel.subscription = self._connection.follow(channel.name, ordinal, channel)


def _key(chosen: object) -> bytes:
    """What a filter is known by: clients have a subscription for each, which narrow nothing here."""
    return msgspec.json.encode(chosen)


class _Channel:
    """A channel of one peer; as a function, the broker's encoding for it."""

    def __init__(
        self, connection: "LoguxConnection", session: Logux5ServerSession, name: str
    ) -> None:
        self._connection = connection
        self._session = session
        self._client = client_of(session.node)
        self.name = name
        self.asked: list[Subscribe] = []
        """Who asked for it and is not answered yet."""
        self.filters: set[bytes] = set()
        self.subscription: Subscription | None = None
        self.is_resumed = False
        """Whether the peer has had a part of it."""
        self.born = 0
        """How many records there were when it was asked for."""
        self.made: deque[int] = deque()
        """Numbers of events that frames were made of, and that may not be written yet."""

    def ask(self, command: Subscribe) -> None:
        self.asked.append(command)
        self.filters.add(_key(command.filter))

    def answer(self, mark: Mark) -> None:
        asked, self.asked = self.asked, []
        for command in asked:
            self._session.subscribed(command, mark)

    def written(self, subscription: Subscription) -> None:
        """What was made of the records up to where it is now."""
        epoch = subscription.topic.epoch
        while self.made and self.made[0] <= subscription.ordinal:
            self._session.ledger.sent(self.name, self.made.popleft(), epoch)

    def let_go(self) -> None:
        """Its history takes long: what else the peer has sent is answered meanwhile."""
        for command in self.asked:
            self._session.let_go(command)

    def takes(self, topic: str, at: Position, records: Sequence[bytes]) -> bool:
        """Whether a commit has anything for this channel."""
        return self._connection.logux.events_of(self.name, topic, at, records) is not None

    def __call__(self, topic: str, at: Position, records: Sequence[bytes], _ms: int) -> bytes:
        base, binary = self._session.base, self._session.binary
        events: Iterable[Outgoing]
        if self.subscription is not None and self.subscription.state is State.LIVE:
            found = self._connection.logux.events_of(self.name, topic, at, records)
            if found is None:
                return b""
            is_filtered = self._connection.logux.event_filter is not None
            if not (binary or is_filtered or self._client in found.clients):
                self.made.extend(found.added)
                return found.syncs(base)
            events = found.events
        else:
            events = outgoing_of(self.name, at, records)
        shown = [one for one in events if self._shows(one)]
        self.made.extend([one.added for one in shown])
        return b"".join([one.sync5(base, binary=binary) for one in shown])

    def _shows(self, one: Outgoing) -> bool:
        """Not to its author; but a client that begins anew may have forgotten what it did before."""
        shown = one.shown
        if one.ordinal < self.born and not self.is_resumed:
            is_own = shown.node == self._session.node
        else:
            is_own = shown.client == self._client
        return not is_own and self._connection.may_see(one)
