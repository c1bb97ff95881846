"""What a Logux connection gets of its log: all of it, or in protocol 5 the channels that it asks for."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from headrace.broker.subscription import State, Subscription
from headrace.logux_envelope import BadEnvelopeError, created_of_id
from headrace.model import Position
from headrace.session.logux5_server import (
    DENIED,
    Action,
    Logux5ServerSession,
    Mark,
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

_UNANSWERED_MAX = 100
"""How often a channel may be asked for while its history is being sent."""


class Feed(Protocol):
    def do(self, command: object) -> None:
        """A command of the protocol's own."""

    def refuse(self, unit: Unit, events: Sequence[Incoming]) -> None:
        """The application does not take these."""

    def passed(self, ordinal: int) -> None:
        """The peer has got what it is to see up to here, of one subscription."""

    def live(self, subscription: Subscription) -> None:
        """It has everything up to now."""


class WholeLog:
    """Everything that the peer may see and has not sent itself."""

    def __init__(self, connection: "LoguxConnection", session: LoguxServerSession) -> None:
        self._connection = connection
        self._session = session
        self._born = 0
        """How many records there were when the peer came: later ones of its own it has."""

    def do(self, command: object) -> None:
        assert isinstance(command, Follow)
        connection = self._connection
        self._born = connection.logux.shared.broker.store.topic(connection.topic).end_ordinal
        connection.follow(connection.topic, command.ordinal, self._encode)

    def refuse(self, unit: Unit, events: Sequence[Incoming]) -> None:
        """Peers are not told."""

    def passed(self, ordinal: int) -> None:
        self._session.sent = ordinal

    def live(self, subscription: Subscription) -> None:
        """Peers are not told."""

    def _encode(self, topic: str, at: Position, records: Sequence[bytes]) -> bytes:
        binary = self._session.binary
        events = self._connection.logux.events(topic, at, records)
        return b"".join([one.sync(binary=binary) for one in events if self._shows(one)])

    def _shows(self, one: Outgoing) -> bool:
        if one.origin == self._session.peer and one.ordinal >= self._born:
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
            if self._channels.pop(command.channel, None) is not None:
                self._connection.unfollow(command.channel)
            self._session.processed(command.action)

    def refuse(self, unit: Unit, events: Sequence[Incoming]) -> None:
        if events:
            self._session.denied(unit, events)

    def passed(self, ordinal: int) -> None:
        self._session.sent = max(self._session.sent, ordinal)

    def live(self, subscription: Subscription) -> None:
        channel = subscription.encode
        assert isinstance(channel, _Channel)
        actions, channel.actions = channel.actions, []
        for action in actions:
            self._session.processed(action, Mark(subscription.topic.epoch, subscription.ordinal))

    def _subscribe(self, command: Subscribe) -> None:
        name, since, action = command
        connection = self._connection
        meta = {"created": action.meta.created, "origin": self._session.node}
        known = self._channels.get(name)
        if not connection.may("send", action.event, meta):
            self._session.undo(action, DENIED)
        elif known is not None and len(known.actions) >= _UNANSWERED_MAX:
            self._session.undo(action, _TOO_MANY)
        elif known is not None:
            # It has, or is getting, all of it: once is enough.
            known.actions.append(action)
            if known.subscription is not None and known.subscription.state is State.LIVE:
                self.live(known.subscription)
        elif len(self._channels) >= connection.channels_max:
            self._session.undo(action, _TOO_MANY)
        else:
            channel = self._channels[name] = _Channel(connection, self._session, name, action)
            self._locate(channel, since)

    def _locate(self, channel: "_Channel", since: str | Mark | None) -> None:
        """Find where to begin."""
        connection = self._connection
        topic = connection.logux.shared.broker.store.topic(connection.topic)
        channel.is_resumed = since is not None
        channel.born = topic.end_ordinal
        if since is None:
            self._begin(channel, 0)
        elif isinstance(since, Mark):
            is_here = since.epoch == topic.epoch and since.ordinal <= topic.end_ordinal
            self._begin(channel, since.ordinal if is_here else 0)
        else:
            try:
                created = created_of_id(since)
            except BadEnvelopeError:
                self._begin(channel, 0)
                return

            def found(ordinal: int | None) -> None:
                is_wanted = self._channels.get(channel.name) is channel
                if is_wanted and not connection.is_gone:
                    self._begin(channel, ordinal + 1 if ordinal is not None else 0)
                    connection.answer_soon()

            connection.logux.log(connection.topic).locate(created, found)

    def _begin(self, channel: "_Channel", ordinal: int) -> None:
        channel.subscription = self._connection.follow(channel.name, ordinal, channel)


class _Channel:
    """A channel of one peer; as a function, the broker's encoding for it."""

    def __init__(
        self, connection: "LoguxConnection", session: Logux5ServerSession, name: str, action: Action
    ) -> None:
        self._connection = connection
        self._session = session
        self._client = client_of(session.node)
        self.name = name
        self.actions = [action]
        """That asked for it and are not answered yet."""
        self.subscription: Subscription | None = None
        self.is_resumed = False
        """Whether the peer has had a part of it."""
        self.born = 0
        """How many records there were when it was asked for."""

    def __call__(self, topic: str, at: Position, records: Sequence[bytes]) -> bytes:
        events: Iterable[Outgoing]
        if self.subscription is not None and self.subscription.state is State.LIVE:
            events = self._connection.logux.events_of(self.name, topic, at, records)
        else:
            events = outgoing_of(self.name, at, records)
        base, binary = self._session.base, self._session.binary
        return b"".join([one.sync5(base, binary=binary) for one in events if self._shows(one)])

    def _shows(self, one: Outgoing) -> bool:
        """Not to its author; but a client that begins anew may have forgotten what it did before."""
        shown = one.shown
        if one.ordinal < self.born and not self.is_resumed:
            is_own = shown.node == self._session.node
        else:
            is_own = shown.client == self._client
        return not is_own and self._connection.may_see(one)
