"""Topics on Figg and Wombat connections: publish, attach, named readers. Elsewhere: the wire formats."""

from collections.abc import Callable, Sequence

from headrace.broker.broker import BrokerSubscription, Encode, Slice
from headrace.broker.readers import Claim
from headrace.errors import BadCursorError, BadReaderNameError, StoreFailedError
from headrace.model import Position
from headrace.server.connection import Connection, Pause
from headrace.session.server import AttachCommand, DetachCommand, Publish, TopicSession
from headrace.wire import readers


class RecordsEncoding:
    """Encoding of records for named readers: the log's bytes, with their time."""

    def __init__(self, encode: Callable[[readers.Records], bytes]) -> None:
        self._encode = encode

    def __call__(self, topic: str, at: Position, records: Sequence[bytes], ms: int) -> bytes:
        return b"".join(
            self._encode(readers.Records(topic, at.epoch, *portion[:2], ms, portion.data))
            for portion in readers.portions(at.offset, at.ordinal, records)
        )


class TopicConnection(Connection):
    """Implements the broker's `ReaderSink`."""

    __slots__ = ()
    _session: TopicSession
    encode: Encode
    """Encoding of records in this protocol."""
    encode_records: RecordsEncoding
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
            self._detach(command.topic)

    def _publish(self, command: Publish, size: int) -> None:
        records, unit = command
        self._shared.metrics.count("records_published_total", sum(map(len, records.values())))
        try:
            self._shared.broker.publish(records, lambda: self._stored(unit, size))
        except StoreFailedError:
            # The store has failed. Without an acknowledgement, the peer sends the records again elsewhere.
            self._transport.abort()
            return
        self._under_way(size)

    def _attach(self, command: AttachCommand) -> None:
        if not self._has_room(command.topic):
            return
        if self._subscriptions is None:
            self._subscriptions = {}
        broker = self._shared.broker
        self._shared.metrics.count("subscriptions_total")
        self._session.attaching(command)
        # The broker answers through `attached`. By then the session knows which command is answered.
        self._subscriptions[command.topic] = broker.subscribe(
            self, command.topic, command.offset, type(self).encode, command.epoch
        )

    def _has_room(self, topic: str) -> bool:
        """End the topic's subscription or claim, or check that one more is allowed. False after a refusal."""
        if self._ends(topic):
            return True
        if len(self._subscriptions or ()) + len(self._claims or ()) < (
            self._shared.limits.topics_attached_max
        ):
            return True
        self._refuse(self._session.refuse("topics_attached_max is reached"))
        return False

    def _ends(self, topic: str) -> bool:
        """End the subscription or the claim of a topic. Return False if there is none."""
        if self._subscriptions and topic in self._subscriptions:
            self._drop(topic)
            return True
        if self._claims and topic in self._claims:
            self._shared.readers.release(self._claims.pop(topic))
            return True
        return False

    def _detach(self, topic: str) -> None:
        self._ends(topic)
        self._session.detached(topic)

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
        if self._pulling:
            self._pulling.pop(subscription, None)

    def reader_lost(self, claim: Claim, reason: str, refused: bool) -> None:
        if self._claims and self._claims.get(claim.topic) is claim:
            del self._claims[claim.topic]
        code = readers.REFUSED if refused else readers.SUPERSEDED
        self._session.tell_reader(readers.Lost(claim.topic, code, reason))
        self._answer_soon()

    def is_silent(self, now: float) -> bool:
        if self._paused & ~Pause.ANSWERS:
            self._heard_s = now  # the server does not read, so it cannot hear the peer
        return now >= self._heard_s + self._shared.limits.silence_s

    def deliver(self, subscription: BrokerSubscription, slices: Sequence[Slice]) -> bool:
        if self._claims and self._is_full(subscription):
            return False
        return super().deliver(subscription, slices)

    def ready(self, subscription: BrokerSubscription) -> None:
        if not (self._claims and self._is_full(subscription)):
            super().ready(subscription)

    def _wants_more(self, subscription: BrokerSubscription) -> bool:
        return not (self._claims and self._is_full(subscription))

    def _is_full(self, subscription: BrokerSubscription) -> bool:
        """True if the reader's window is full. The reader continues when the client has handled records."""
        claim = self._claims.get(subscription.topic.name) if self._claims else None
        if claim is None or not claim.is_full:
            return False
        claim.parked = True
        return True
