"""Connections with topics, Figg over TCP and Wombat over WebSocket: publish, attach, named readers.

Elsewhere: the wire formats, and how much is written when (`peers/output.py`).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import cast

from headrace.access.operations import Operation
from headrace.access.principals import OPEN, Kind, Principal
from headrace.broker.broker import BrokerSubscription, Encode, Slice
from headrace.broker.readers import Claim
from headrace.errors import BadCursorError, BadReaderNameError, StoreFailedError
from headrace.model import Position, Refusal, RefusedPublish, closed_reason
from headrace.printing import quoted
from headrace.server.access import asked_for
from headrace.server.listeners import recognise
from headrace.server.peers.connection import COMMAND_OVERHEAD_BYTES, Connection
from headrace.server.peers.connections import Connections
from headrace.server.peers.pause import Pause
from headrace.server.peers.throttle import Cost
from headrace.server.websocket import HeardConnection, HeardConnections
from headrace.session.figg import FiggServerSession
from headrace.session.server import (
    AttachCommand,
    Authenticate,
    Close,
    DetachCommand,
    Publish,
    TopicSession,
)
from headrace.session.wombat import WombatServerSession
from headrace.wire import readers, tokens, websocket
from headrace.wire.figg import messages as figg
from headrace.wire.wombat import messages as wombat

logger = logging.getLogger(__name__)

_LARGE_READ_BYTES = 1 << 17
"""Size from which a read means that more data waits. uvloop reads at most 250 KiB at once."""


_RECORD_OVERHEAD_BYTES = 112
"""Memory for a pending record, and for its number, besides its bytes."""
_NAME_MEMORY_BYTES = 1536
"""Memory for a pending batch of one topic, with the topic's name, besides its records."""


def _bytes_of(batches: Iterable[list[bytes]]) -> int:
    return sum(map(len, chain.from_iterable(batches)))


def _records_encoding(encode: Callable[[readers.Records], bytes]) -> Encode:
    """Return the encoding of records for named readers: the log's bytes, with their time."""

    def encode_records(topic: str, at: Position, records: Sequence[bytes], ms: int) -> bytes:
        return b"".join(
            encode(readers.Records(topic, at.epoch, *portion[:2], ms, portion.data))
            for portion in readers.portions(at.offset, at.ordinal, records)
        )

    return encode_records


class TopicConnection(Connection):
    """Implements the broker's `ReaderSink`."""

    __slots__ = ()
    _session: TopicSession
    encode: Encode
    """Encoding of records in this protocol."""
    encode_records: Encode
    """Encoding of records for named readers in this protocol."""

    def lost(self) -> None:
        claims, self._claims = self._claims, None
        for claim in (claims or {}).values():
            self._shared.readers.release(claim)
        super().lost()

    def _do(self, command: object, size: int) -> None:
        if isinstance(command, Publish):
            self._publish(command, size)
        elif isinstance(command, readers.Handled):
            self._handled(command)
        elif isinstance(command, AttachCommand):
            self._attach(command)
        elif isinstance(command, readers.Read):
            self._read(command)
        elif isinstance(command, DetachCommand):
            self._ends(command.topic)
            self._session.detached(command.topic)
        elif isinstance(command, Authenticate):
            self._authenticate(command)

    # Access

    def _authenticate(self, command: Authenticate) -> None:
        self._knows_tokens = True
        access, loop = self._shared.access, self._shared.loop
        found = access.identify(command.token, self.address, loop.time(), self.protocol)
        if isinstance(found, Principal):
            before = self.rights.principal
            self.identified(found)
            if found.grants == before.grants or self._keeps_subscriptions():
                self._session.authenticated(access.valid_ms(found))
            return
        self._denial = found.reason, tokens.CREDENTIALS
        self._refuse(self._session.refuse(found.reason))
        if found.delay_s:
            self._hold_timer = loop.call_later(found.delay_s, self.end_hold)
        else:
            self._tell_denial()

    def _keeps_subscriptions(self) -> bool:
        """Refuse a peer, and return False, if it has subscriptions that its new credentials do not allow.

        They would go on after the end of the credentials that allowed them.
        """
        wanted = [
            (Operation.SUBSCRIBE, name)
            for name in (*(self._subscriptions or ()), *(self._claims or ()))
        ]
        wanted += [(Operation.CURSORS, claim.reader) for claim in (self._claims or {}).values()]
        for operation, name in wanted:
            if not self.rights.is_granted(operation, name):
                reason = self._why_denied(operation, name)
                self._deny(self._session.refuse(reason)._replace(refused=Refusal.FORBIDDEN))
                return False
        return True

    def _why_denied(self, operation: Operation, name: str) -> str:
        wanted = asked_for(operation, name)
        if self.rights.principal.kind is Kind.ANONYMOUS:
            return f"a token is needed for {wanted}"
        return f"the credentials have no grant for {wanted}"

    def _deny(self, close: Close) -> None:
        """Refuse the peer, which would connect and ask for the same again.

        A peer that knows of tokens is told at once. Another one would take the message for a fault of the
        server, and connect again: it is told when it is held no longer.
        """
        is_anonymous = self.rights.principal.kind is Kind.ANONYMOUS
        self._denial = close.reason, tokens.CREDENTIALS if is_anonymous else tokens.FORBIDDEN
        self._refuse(close)
        if self._knows_tokens or self._hold_timer is None:
            self._tell_denial()

    def _tell_denial(self) -> None:
        if self._denial is not None:
            self._session.refuse_credentials(*self._denial)
            self._denial = None

    def end_hold(self) -> None:
        self._tell_denial()
        super().end_hold()

    def _turned_away(self, reason: str) -> Close:
        return self._session.refuse_credentials(reason)

    # Publishes and subscriptions

    def _cost(self, command: object, size: int) -> Cost | None:
        if not isinstance(command, Publish):
            return None
        batches = command.records.values()
        return Cost(sum(map(len, batches)), _bytes_of(batches), command.records)

    def _weight(self, command: object, size: int) -> int:
        if not isinstance(command, Publish):
            return super()._weight(command, min(size, _NAME_MEMORY_BYTES))
        batches = command.records.values()
        return (
            _bytes_of(batches)
            + _RECORD_OVERHEAD_BYTES * sum(map(len, batches))
            + _NAME_MEMORY_BYTES * len(batches)
            + COMMAND_OVERHEAD_BYTES
        )

    def _publish(self, command: Publish, size: int) -> None:
        records, unit = command
        rights = self.rights
        if rights.principal is not OPEN:
            publishable = rights.publishable
            for topic in records:
                if publishable.get(topic) is not True and not rights.may_publish(topic):
                    self._forbid_publish(command, topic)
                    return
        if closed := self._shared.broker.store.closed(records):
            self._refuse_publish(closed_reason(closed), Refusal.CLOSED_TOPIC, command)
            return
        if why := self._shared.why_not_created(records):
            self._refuse_publish(why, Refusal.TOPICS_MAX, command)
            return
        self._shared.metrics.count("records_published_total", sum(map(len, records.values())))
        try:
            self._shared.broker.publish(records, lambda: self._stored(unit, size))
        except StoreFailedError:
            # The store has failed. Without an acknowledgement, the peer sends the records again elsewhere.
            self._transport.abort()
            return
        self._under_way(size)

    def _refuse_publish(self, reason: str, why: Refusal, command: Publish) -> None:
        """Refuse a unit as a whole. It would be refused again."""
        refused = RefusedPublish(why, command.unit.lowest)
        self._refuse(self._session.refuse_publish(reason, websocket.POLICY_VIOLATION, refused))

    def _forbid_publish(self, command: Publish, topic: str) -> None:
        """Refuse a unit as a whole: one of its topics is not for this peer. Nothing of it is stored."""
        may_publish = topic in self.rights.publishable  # only the right to create it is missing
        reason = self._why_denied(Operation.CREATE if may_publish else Operation.PUBLISH, topic)
        refused = RefusedPublish(Refusal.FORBIDDEN, command.unit.lowest)
        self._deny(self._session.refuse_publish(reason, websocket.POLICY_VIOLATION, refused))

    def _attach(self, command: AttachCommand) -> None:
        if not self.rights.is_granted(Operation.SUBSCRIBE, command.topic):
            reason = self._why_denied(Operation.SUBSCRIBE, command.topic)
            self._deny(self._session.refuse(reason)._replace(refused=Refusal.FORBIDDEN))
            return
        if not self._has_room(command.topic):
            return
        if self._subscriptions is None:
            self._subscriptions = {}
        self._shared.metrics.count("subscriptions_total")
        self._session.attaching(command)
        # The broker answers through `attached`. By then the session knows which command is answered.
        self._subscriptions[command.topic] = self._shared.broker.subscribe(
            self, command.topic, command.offset, type(self).encode, command.epoch
        )
        self._count_subscriptions()

    def _has_room(self, topic: str) -> bool:
        """End the topic's subscription or claim, or check that one more is allowed. False after a refusal."""
        if self._ends(topic):
            return True
        why = self._why_not_subscribed()
        if self._subscription_count >= self._shared.limits.topics_attached_max:
            self._shared.metrics.count_limit("topics_attached_max")
            why = "topics_attached_max is reached"
        if why:
            self._refuse(self._session.refuse(why))
        return not why

    def _ends(self, topic: str) -> bool:
        """End the subscription or the claim of a topic. Return False if there is none."""
        if self._subscriptions and topic in self._subscriptions:
            self._drop(topic)
            return True
        if self._claims and topic in self._claims:
            self._shared.readers.release(self._claims.pop(topic))
            self._count_subscriptions()
            return True
        return False

    def attached(self, subscription: BrokerSubscription, offset: int, exact: bool) -> None:
        topic = subscription.topic
        claim = self._claims.get(topic.name) if self._claims else None
        if claim is not None:
            self._shared.readers.attached(claim, subscription, exact)
            return
        self._session.attached(topic.name, topic.epoch, offset, exact)
        self._answer()

    # Named readers

    def _read(self, command: readers.Read) -> None:
        for operation, name in (
            (Operation.SUBSCRIBE, command.topic),
            (Operation.CURSORS, command.reader),
        ):
            if not self.rights.is_granted(operation, name):
                reason = self._why_denied(operation, name)
                self._session.tell_reader(readers.Lost(command.topic, readers.REFUSED, reason))
                return
        if not self._has_room(command.topic):
            return
        self._shared.metrics.count("subscriptions_total")
        claim = Claim(
            self,
            command.topic,
            command.reader,
            newest=command.newest,
            instance=command.instance,
            window=command.window,
            encode=type(self).encode_records,
        )
        if self._claims is None:
            self._claims = {}
        self._claims[command.topic] = claim
        self._count_subscriptions()
        try:
            self._shared.readers.enter(claim)
        except BadReaderNameError as error:
            self.reader_lost(claim, str(error), True)

    def _handled(self, command: readers.Handled) -> None:
        claim = self._claims.get(command.topic) if self._claims else None
        if claim is None:
            return  # LOST was sent before
        try:
            self._shared.readers.handled(claim, command.grant, command.offset, command.ordinal)
        except BadCursorError as error:
            self._refuse(self._session.refuse(str(error)))

    def reader_waits(self, claim: Claim, ahead: int) -> None:
        self._session.tell_reader(readers.Waiting(claim.topic, ahead))
        self._answer()

    def reader_begins(self, claim: Claim, exact: bool) -> None:
        self._session.tell_reader(
            readers.Reading(claim.topic, claim.grant, claim.asked.offset, exact, *claim.handled)
        )
        self._answer()

    def reader_stored(self, claim: Claim, offset: int) -> None:
        self._session.tell_reader(readers.Stored(claim.topic, claim.grant, offset))
        self._answer_soon()

    def reader_ends(self, claim: Claim, subscription: BrokerSubscription) -> None:
        self._output.forget(subscription)

    def reader_lost(self, claim: Claim, reason: str, refused: bool) -> None:
        if self._claims and self._claims.get(claim.topic) is claim:
            del self._claims[claim.topic]
            self._count_subscriptions()
        code = readers.REFUSED if refused else readers.SUPERSEDED
        self._session.tell_reader(readers.Lost(claim.topic, code, reason))
        self._answer_soon()

    def is_silent(self, now: float) -> bool:
        if self._is_unread:
            self._heard_s = now
        return now >= self._heard_s + self._shared.limits.silence_s

    def deliver(self, subscription: BrokerSubscription, slices: Sequence[Slice]) -> bool:
        if self._claims and self._is_full(subscription):
            return False
        return self._output.deliver(subscription, slices)

    def ready(self, subscription: BrokerSubscription) -> None:
        if not (self._claims and self._is_full(subscription)):
            super().ready(subscription)

    def wants_more(self, subscription: BrokerSubscription) -> bool:
        return not (self._claims and self._is_full(subscription))

    def _is_full(self, subscription: BrokerSubscription) -> bool:
        """True if the reader's window is full. The reader continues when the client has handled records."""
        claim = self._claims.get(subscription.topic.name) if self._claims else None
        if claim is None or not claim.is_full:
            return False
        claim.parked = True
        return True


class FiggConnection(TopicConnection, asyncio.Protocol):
    """Figg over TCP."""

    __slots__ = ("_is_new",)
    protocol = "figg"
    encode_records = staticmethod(_records_encoding(figg.encode_records))
    _session: FiggServerSession

    def __init__(self, shared: Connections) -> None:
        self._is_new = True
        super().__init__(shared, FiggServerSession())

    @staticmethod
    def encode(topic: str, at: Position, records: Sequence[bytes], _ms: int) -> bytes:
        return figg.encode_data(topic, at.offset, records)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.opened(cast(asyncio.Transport, transport))

    @property
    def unfinished(self) -> bytes:
        return self._session.unfinished

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._shared.loop.time()
        if self._shared.trace is not None:
            self._shared.trace.received(self, data)
        if self._is_new:
            self._is_new = False
            if stranger := recognise(data, self._shared.listeners):
                self.write(stranger.answer)
                self.handle([self._session.refuse(stranger.reason)], len(data))
                return
        self.handle(self._session.receive_data(data), len(data) - self._session.unread_bytes)
        self._shared.strangers.heard(self, len(data))
        if len(data) >= _LARGE_READ_BYTES:
            self.more_to_read()

    @property
    def _has_undecoded(self) -> bool:
        return self._session.unread_bytes > 0

    def _decode_more(self) -> list[tuple[object, int]]:
        before = self._session.unread_bytes
        if not before:
            return []
        commands = self._session.receive_data(b"")
        size = before - self._session.unread_bytes
        return [(command, size) for command in commands]

    def eof_received(self) -> bool:
        """Close after the last acknowledgements: a peer that has stopped sending may still read."""
        self.handle([self._session.refuse("")._replace(is_peers_fault=False)], 0)
        # True keeps the transport open while acknowledgements are pending.
        return not self._closed

    def connection_lost(self, error: Exception | None) -> None:
        self.lost()


class WombatConnection(TopicConnection, HeardConnection):
    """Wombat over WebSocket. A silent client is closed."""

    __slots__ = ()
    protocol = "wombat"
    encode_records = staticmethod(_records_encoding(wombat.encode_reader_answer))
    message_bytes_max = wombat.MESSAGE_BYTES_MAX
    large_refusal = Refusal.LARGE_PAYLOAD
    _session: WombatServerSession

    def __init__(self, hub: HeardConnections) -> None:
        shared = hub.shared
        super().__init__(hub, WombatServerSession(shared.loop.time(), shared.limits.silence_s))

    @staticmethod
    def encode(topic: str, at: Position, records: Sequence[bytes], _ms: int) -> bytes:
        return wombat.encode_payloads(topic, at.epoch, at.offset, records)

    def messages_received(self, messages: Sequence[bytes]) -> None:
        session = self._session
        silent_at = session.silent_at
        now = self._heard_s = self._shared.loop.time()
        commands = session.receive_messages(messages, now)
        if session.silent_at != silent_at:
            self._move_to_end()
        if session.repeats:
            self._shared.metrics.count("duplicates_refused_total", session.repeats)
            session.repeats = 0
        self.handle(commands, sum(map(len, messages)))

    def tick(self, now: float) -> bool:
        """Close the connection if no PING came, unless the server could not have received a PING."""
        if now < self._session.silent_at:
            return False
        if self._is_unread:
            self._session.heard(now)
            self._move_to_end()
        else:
            self.hub.open.pop(self, None)
            reason = f"no PING for {self._shared.limits.silence_s:g} s"
            self.count_refusal(reason)
            self.close(reason, websocket.POLICY_VIOLATION)
        return True

    def overtaken(self, subscription: BrokerSubscription) -> None:
        name = subscription.topic.name
        if self._claims and name in self._claims:
            return  # RECORDS carry their offset
        # A client need not interpret serials: the next ATTACHED tells the client what it missed.
        reason = f"messages of {quoted(name)} are gone: attach again"
        logger.warning("%s: closing: %s", self.peer, reason)
        self._drop(name)
        self.handle([self._session.refuse(reason)._replace(is_peers_fault=False)], 0)

    def _reads_again(self, why: int) -> None:
        # The peer's PING may be behind all the data that was not read.
        if why & (Pause.PUBLISHES | Pause.COMMANDS | Pause.HELD):
            self._session.heard(self._shared.loop.time())
            self._move_to_end()
