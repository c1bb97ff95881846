"""Named readers: the connection that reads a topic under a name, the connections that wait, and the cursor.

    (none) ──enter──▶ waiting ──first in line──▶ active ──release, silence──▶ (none)

Each (topic, reader) has a line of claims, one per connection. The first claim is active: it has a *grant*,
a number that its acknowledgements must carry, and a subscription that started at the cursor. The position
that the active claim has handled becomes the cursor, one commit at a time. The next claim becomes active only
when every accepted acknowledgement of the last one is durable, so it never gets an acknowledged record.

Lines are in memory and cursors are in the store: after a restart, clients claim again and continue at the
cursor. Elsewhere: bytes and clocks.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

from headrace.broker.broker import Broker, BrokerSubscription, Encode, Sink, SubscriptionState
from headrace.errors import BadCursorError, BadReaderNameError, HeadraceError, StoreFailedError
from headrace.model import LAKE_READER, LAKE_START_READER, Position, check_reader_name
from headrace.printing import quoted

logger = logging.getLogger(__name__)

RECORD_OVERHEAD_BYTES = 128
"""Bytes that each record takes in a window in addition to its own bytes."""

_NOWHERE = Position(0, 0, 0)


class ReaderSink(Sink, Protocol):
    """A connection that reads under a name."""

    def reader_waits(self, claim: "Claim", ahead: int) -> None:
        """Called while the claim waits behind `ahead` other connections; 0: it becomes active in a moment."""

    def reader_begins(self, claim: "Claim", exact: bool) -> None:
        """Called when the claim is active. Deliveries start at `claim.handled`."""

    def reader_stored(self, claim: "Claim", offset: int) -> None:
        """Called when the cursor is durable at `offset`."""

    def reader_ends(self, claim: "Claim", subscription: BrokerSubscription) -> None:
        """Called when no more records of this subscription may be sent."""

    def reader_lost(self, claim: "Claim", reason: str, refused: bool) -> None:
        """Called when the claim has ended. `refused`: another claim would end in the same way."""

    def is_silent(self, now: float) -> bool:
        """Return True if the peer has been silent for too long."""


@dataclass(slots=True, eq=False, repr=False)
class Claim:
    """Request of one connection to read a topic under a name."""

    sink: ReaderSink
    topic: str
    reader: str
    _: KW_ONLY
    newest: bool
    instance: int
    window: int
    encode: Encode
    grant: int = 0
    """Number that acknowledgements must carry; 0 while the claim is not active."""
    has_begun: bool = False
    """True once the client has been told that the claim is active."""
    subscription: BrokerSubscription | None = None
    asked: Position = _NOWHERE
    """The cursor at the moment when the claim became active."""
    handled: Position = _NOWHERE
    """Position just past the last record that the client has handled, or the start of delivery."""
    parked: bool = False
    """True while the subscription waits for room in the window."""

    @property
    def key(self) -> "_Key":
        return _Key(self.topic, self.reader)

    @property
    def is_full(self) -> bool:
        """True if the client has as many unhandled bytes as its window allows."""
        subscription = self.subscription
        if subscription is None:
            return True
        records = subscription.ordinal - self.handled.ordinal
        unhandled = subscription.offset - self.handled.offset + RECORD_OVERHEAD_BYTES * records
        return unhandled >= max(1, self.window)


class _Key(NamedTuple):
    topic: str
    reader: str


@dataclass(slots=True, eq=False, repr=False)
class _Line:
    """The claims of one reader in one topic."""

    key: _Key
    claims: list[Claim] = field(default_factory=list)
    storing: bool = False
    """True while a cursor is being made durable."""
    wanted: tuple[Position, int] | None = None
    """The next cursor to store, and the grant it comes from."""

    @property
    def active(self) -> Claim | None:
        return self.claims[0] if self.claims and self.claims[0].grant else None


class Readers:
    def __init__(self, broker: Broker) -> None:
        self.moved: Callable[[Collection[str]], None] = lambda topics: None
        """Called with the topics in which cursors have moved."""
        self._broker = broker
        self._store = broker.store
        self._lines: dict[_Key, _Line] = {}
        self._held: Counter[_Key] = Counter()
        """Number of moves by hand that are in progress, for each cursor."""
        self._grants = count(1)

    def enter(self, claim: Claim) -> None:
        """Add a claim to its line. Raises BadReaderNameError."""
        reader = claim.reader
        check_reader_name(reader)
        if reader in (LAKE_READER, LAKE_START_READER):
            text = f"the reader {reader!r} is the export's own: choose another name"
            raise BadReaderNameError(text)
        line = self._lines.setdefault(claim.key, _Line(claim.key))
        again = next((one for one in line.claims if one.instance == claim.instance), None)
        if again is None:
            line.claims.append(claim)
        else:
            # The old connection may seem alive for a while, but its client has left it.
            line.claims[line.claims.index(again)] = claim
            self._end(again)
            again.sink.reader_lost(again, "the client has connected again", False)
        self._begin(line)
        if not claim.has_begun and claim in line.claims:
            claim.sink.reader_waits(claim, line.claims.index(claim))

    def attached(self, claim: Claim, subscription: BrokerSubscription, exact: bool) -> None:
        """Start deliveries to an active claim, after the broker has located its position."""
        claim.subscription = subscription
        claim.has_begun = True
        claim.handled = subscription.position
        claim.sink.reader_begins(claim, exact)

    def handled(self, claim: Claim, grant: int, offset: int, ordinal: int) -> None:
        """Store that the client has handled everything before a position. Raises BadCursorError.

        Acknowledgements with an old grant are ignored: the client has been told that it lost that grant.
        """
        subscription = claim.subscription
        if grant != claim.grant or subscription is None:
            return
        if offset > subscription.offset or ordinal > subscription.ordinal:
            raise BadCursorError(
                f"offset {offset} and ordinal {ordinal} of topic {claim.topic!r} "
                "have not been delivered to this reader"
            )
        if offset <= claim.handled.offset or ordinal <= claim.handled.ordinal:
            return
        claim.handled = Position(subscription.topic.epoch, offset, ordinal)
        self._keep(self._lines[claim.key], claim.handled, grant)
        if claim.parked and not claim.is_full:
            claim.parked = False
            if subscription.state is SubscriptionState.RESUMING:
                claim.sink.ready(subscription)

    def release(self, claim: Claim) -> None:
        """End a claim whose connection stops reading. The next claim in the line becomes active."""
        line = self._lines.get(claim.key)
        self._end(claim)
        if line is not None and claim in line.claims:
            line.claims.remove(claim)
            self._begin(line)

    def tick(self, now: float) -> None:
        """Take grants from connections that are silent while other connections wait."""
        for line in [one for one in self._lines.values() if len(one.claims) > 1]:
            active = line.active
            if active is not None and active.sink.is_silent(now):
                reason = "nothing was heard of this connection, and another one was waiting"
                text = "%s: silent, so another connection reads topic %s as %s now"
                logger.warning(text, active.sink.peer, quoted(active.topic), quoted(active.reader))
                self.release(active)
                active.sink.reader_lost(active, reason, False)

    @contextmanager
    def held(self, reader: str, topics: Collection[str]) -> Iterator[None]:
        """Suspend a reader while its cursors are moved by hand; afterwards it starts at the new cursors.

        From the beginning, acknowledgements of old deliveries are ignored: they must not undo the move.
        """
        keys = [_Key(topic, reader) for topic in topics]
        self._held.update(keys)
        for key in keys:
            if (line := self._lines.get(key)) is not None:
                line.wanted = None
                for claim in line.claims[:1]:
                    self._end(claim)
        try:
            yield
        finally:
            self._held.subtract(keys)
            for key in keys:
                if not self._held[key]:
                    del self._held[key]
                if (line := self._lines.get(key)) is not None:
                    self._begin(line)

    def _begin(self, line: _Line) -> None:
        """Make the first claim active, or do the step that must come first, such as storing the cursor."""
        key = line.key
        if line.storing or self._held.get(key):
            return
        if line.wanted is not None:
            self._keep_next(line)
            return
        if not line.claims:
            self._lines.pop(key, None)
            return
        claim = line.claims[0]
        if claim.grant:
            return
        cursors = self._store.cursors(key.topic, key.reader, limit=1)
        if not cursors:
            # The cursor is durable before the first delivery: a restart must not move the reader's start.
            topic = self._store.look(key.topic)
            self._keep(line, topic.end if claim.newest else topic.start, 0)
            return
        claim.asked = cursors[0].position
        claim.grant = next(self._grants)
        # The broker answers by a call of the sink, perhaps at once. The sink calls `attached`.
        claim.subscription = self._broker.subscribe(
            claim.sink, claim.topic, claim.asked.offset, claim.encode, claim.asked.epoch
        )

    def _end(self, claim: Claim) -> None:
        """Take the grant away, and stop deliveries."""
        subscription, claim.subscription = claim.subscription, None
        claim.grant = 0
        claim.parked = claim.has_begun = False
        if subscription is not None:
            self._broker.unsubscribe(subscription)
            claim.sink.reader_ends(claim, subscription)

    def _keep(self, line: _Line, position: Position, grant: int) -> None:
        """Store the cursor. Of the positions that come while one is being stored, only the last is kept."""
        line.wanted = (position, grant)
        if not line.storing:
            self._keep_next(line)

    def _keep_next(self, line: _Line) -> None:
        assert line.wanted is not None
        position, grant = line.wanted
        line.wanted = None
        line.storing = True
        topic, reader = line.key
        try:
            kept = partial(self._kept, line, position, grant)
            self._store.set_cursors(reader, {topic: position}, kept)
        except StoreFailedError:
            pass  # the server is stopping, which closes all connections
        except HeadraceError as error:
            line.storing = False
            for claim in line.claims[:1]:
                self.release(claim)
                claim.sink.reader_lost(claim, str(error), True)

    def _kept(self, line: _Line, position: Position, grant: int) -> None:
        line.storing = False
        active = line.active
        if active is not None and active.grant == grant:
            active.sink.reader_stored(active, position.offset)
        self.moved([line.key.topic])
        self._begin(line)
