"""The named readers of a client, over all its connections: what was received, handled and stored.

    state       READ answered        LOST          reconnected   meaning
    idle        -                    -             claiming      there is no connection
    claiming    waiting, active      claiming      claiming      READ was sent
    waiting     active               claiming      claiming      another connection reads
    active      active (moved)       claiming      claiming      records come, and may be acknowledged

Records are handled in any order, and the server is told of the *prefix*: the position up to which all are.
After a lost connection the server starts again at the cursor. When that is a place inside of what was
handled here, nobody else has gone on meanwhile: what the application has is still its own, and only records
that it does not have are delivered. Otherwise the reading starts anew, and what the application still
has may be in other hands.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from math import inf

from headrace.model import RECORD_HEADER_BYTES, Position
from headrace.session.client import Broken, Event, Missed
from headrace.session.reader_events import (
    ReaderActive,
    ReaderFailed,
    ReaderLost,
    ReaderStored,
    ReaderWaiting,
    ReadMessages,
)
from headrace.wire import readers

ANSWER_S = 5.0
"""A server that knows readers answers READ at once: the others do not answer, or hang up."""
HANG_UPS_MAX = 3
"""Connections in a row that end with READ unanswered, until the server is taken not to know readers."""

_UNKNOWN = "the server does not know named readers: subscribe without `reader`, or use Headrace"


class State(Enum):
    IDLE = auto()
    CLAIMING = auto()
    WAITING = auto()
    ACTIVE = auto()


class Reader:
    """One topic that is read under a name."""

    __slots__ = (
        *("answer_at", "grant", "handled", "hang_ups", "newest", "order", "outstanding"),
        *("reader", "received", "seen", "sent", "state", "stored", "was_active", "window"),
    )

    def __init__(self, reader: str, newest: bool, window: int) -> None:
        self.reader = reader
        self.newest = newest
        self.window = window
        self.state = State.IDLE
        self.answer_at = inf
        self.hang_ups = 0
        self.grant = 0
        self.was_active = False
        """True when the application may have records that nobody else was given since."""
        nowhere = Position(0, 0, 0)
        self.received = nowhere
        """Behind the last record that the application was given."""
        self.seen = nowhere
        """Behind the last record of the present grant. Before `received` while records come again."""
        self.handled = nowhere
        """The end of the prefix."""
        self.order: deque[tuple[int, int]] = deque()
        """Offset and ordinal just past each record behind the prefix."""
        self.outstanding: set[int] = set()
        """Offsets of those that are not handled."""
        self.sent = 0
        """The last offset that the server was told of, in the present grant."""
        self.stored = 0

    def start(self, at: Position) -> None:
        self.received = self.handled = at
        self.order.clear()
        self.outstanding.clear()

    def handle(self, offset: int) -> bool:
        """True if the record was outstanding."""
        if offset not in self.outstanding:
            return False
        self.outstanding.remove(offset)
        order, epoch = self.order, self.received.epoch
        while order and order[0][0] not in self.outstanding:
            self.handled = Position(epoch, *order.popleft())
        return True

    @property
    def tellable(self) -> Position:
        """How far the server may be told that records are handled: it must have sent them itself."""
        return min(self.handled, self.seen, key=lambda at: at.offset)


class Readers:
    """The readers of a client. They send through `send` and `send_detach`."""

    def __init__(
        self, send: Callable[[readers.ToServer], None], send_detach: Callable[[str], None]
    ) -> None:
        self._send = send
        self._send_detach = send_detach
        self._connected = False
        self._instance = 0
        self._readers: dict[str, Reader] = {}
        self._dirty: set[str] = set()
        """Topics whose prefix has grown."""
        self._unsent: set[str] = set()
        """Topics for which READ is to be sent."""
        self._held: set[str] = set()
        """Topics that wait for DETACHED before READ is sent."""

    def __contains__(self, topic: str) -> bool:
        return topic in self._readers

    @property
    def tick_at(self) -> float:
        if not self._readers:
            return inf
        return min(one.answer_at for one in self._readers.values())

    def read(self, topic: str, reader: str, *, newest: bool, window: int, instance: int) -> None:
        """Ask for a topic under a name."""
        assert topic not in self._readers, f"{topic} is already read"
        self._instance = instance
        self._readers[topic] = Reader(reader, newest, window)

    def claim(self, topic: str, *, held: bool = False) -> None:
        """Let READ be sent, if there is a connection; `held`: when DETACHED has come."""
        if held:
            self._held.add(topic)
        elif self._connected:
            one = self._readers[topic]
            one.state = State.CLAIMING
            one.grant = 0
            self._unsent.add(topic)

    def detached(self, topic: str) -> None:
        """The server has forgotten what was before."""
        if topic in self._held:
            self._held.discard(topic)
            self.claim(topic)

    def stop(self, topic: str) -> None:
        """Read a topic no more; what was handled is told before."""
        self._tell_handled()
        del self._readers[topic]
        self._unsent.discard(topic)
        self._held.discard(topic)

    def handled(self, topic: str, offset: int) -> bool:
        """The application has handled the record that ends at `offset`.

        False if it is not, or no longer, this client's to handle.
        """
        one = self._readers.get(topic)
        if one is None or not one.handle(offset):
            return False
        self._dirty.add(topic)
        return True

    def prefix(self, topic: str) -> int:
        """The offset up to which all was handled."""
        one = self._readers.get(topic)
        return one.handled.offset if one is not None else 0

    def connected(self, now: float) -> None:
        self._connected = True
        self._held.clear()  # a new connection knows nothing of what was before
        for topic, one in self._readers.items():
            if one.hang_ups < HANG_UPS_MAX:
                self.claim(topic)
            else:
                one.answer_at = now

    def disconnected(self) -> None:
        was_connected, self._connected = self._connected, False
        self._unsent.clear()
        for one in self._readers.values():
            if was_connected and one.state is State.CLAIMING:
                one.hang_ups += 1
            one.state = State.IDLE
            one.grant = 0
            one.answer_at = inf

    def tick(self, now: float, reading: bool) -> list[Event]:
        """Give up readers that the server does not answer for."""
        events: list[Event] = []
        for topic, one in list(self._readers.items()):
            if now < one.answer_at:
                continue
            if not reading and one.hang_ups < HANG_UPS_MAX:
                one.answer_at = now + ANSWER_S
                continue
            if one.state is State.CLAIMING:
                self._send_detach(topic)  # should it know them and be slow
            self.stop(topic)
            events.append(ReaderFailed(topic, _UNKNOWN))
        return events

    def flush(self, now: float) -> None:
        """Send what there is to say."""
        for topic in self._unsent:
            one = self._readers[topic]
            one.answer_at = now + ANSWER_S
            self._send(readers.Read(topic, one.reader, one.newest, self._instance, one.window))
        self._unsent.clear()
        self._tell_handled()

    def _tell_handled(self) -> None:
        for topic in self._dirty:
            one = self._readers[topic]
            at = one.tellable
            if one.state is State.ACTIVE and at.offset > one.sent:
                one.sent = at.offset
                self._send(readers.Handled(topic, one.grant, at.offset, at.ordinal))
        self._dirty.clear()

    def take(self, message: readers.ToClient, events: list[Event]) -> None:
        one = self._readers.get(message.topic)
        if one is None or message.topic in self._held:
            return  # of a reading that has ended
        one.hang_ups = 0
        one.answer_at = inf
        if isinstance(message, readers.Records):
            if one.state is State.ACTIVE:
                self._records(one, message, events)
        elif isinstance(message, readers.Stored):
            if message.grant == one.grant:
                one.stored = max(one.stored, message.offset)
                events.append(ReaderStored(message.topic, one.stored))
        elif isinstance(message, readers.Reading):
            self._reading(one, message, events)
        elif isinstance(message, readers.Waiting):
            self._waiting(one, message, events)
        else:
            self._lost(one, message, events)

    def _waiting(self, one: Reader, message: readers.Waiting, events: list[Event]) -> None:
        one.state = State.WAITING
        if message.ahead:
            self._no_longer_active(one, message.topic, "another client reads now", events)
            events.append(ReaderWaiting(message.topic, message.ahead))

    def _lost(self, one: Reader, message: readers.Lost, events: list[Event]) -> None:
        if message.code == readers.REFUSED:
            self.stop(message.topic)
            events.append(ReaderFailed(message.topic, message.reason))
            return
        self._no_longer_active(one, message.topic, message.reason, events)
        self.claim(message.topic)

    def _no_longer_active(self, one: Reader, topic: str, reason: str, events: list[Event]) -> None:
        if one.was_active:
            one.was_active = False
            events.append(ReaderLost(topic, reason))
        one.start(Position(0, 0, 0))

    def _reading(self, one: Reader, message: readers.Reading, events: list[Event]) -> None:
        topic, grant, asked, exact, *rest = message
        at = Position(*rest)
        is_ours = (
            one.was_active
            and one.stored <= at.offset <= one.handled.offset
            and (at.epoch == one.received.epoch or at.offset == one.received.offset)
        )
        if not is_ours:
            if one.was_active:
                events.append(ReaderLost(topic, "the reader was moved, or another client read"))
            one.start(at)
        one.state = State.ACTIVE
        one.was_active = True
        one.grant = grant
        one.seen = at
        one.stored = one.sent = at.offset
        events.append(ReaderActive(topic, at))
        if not exact:
            events.append(Missed(topic, asked, at.offset))
        if is_ours:
            events.append(ReaderStored(topic, at.offset))

    def _records(self, one: Reader, message: readers.Records, events: list[Event]) -> None:
        topic, epoch, offset, ordinal, ms, data = message
        if offset < one.seen.offset:
            events.append(Broken(f"the server sent records of {topic!r} twice"))
            return
        missed_from = max(one.seen.offset, one.received.offset)
        if offset > missed_from:
            events.append(Missed(topic, missed_from, offset))
        messages: list[tuple[int, bytes]] = []
        received = one.received.offset
        place, end = 0, len(data)
        while place < end:
            begin = place + RECORD_HEADER_BYTES
            place = begin + int.from_bytes(data[place:begin], "big")
            if place > end:
                events.append(Broken(f"the server sent a record of {topic!r} that is cut off"))
                return
            ordinal += 1
            if offset + place > received:
                messages.append((offset + place, data[begin:place]))
        one.seen = Position(epoch, offset + end, ordinal)
        if messages:
            first = ordinal - len(messages)
            ends = [at for at, _ in messages]
            one.order.extend(zip(ends, range(first + 1, ordinal + 1), strict=True))
            one.outstanding.update(ends)
            one.received = one.seen
            events.append(ReadMessages(topic, epoch, first, ms, messages))
        if one.sent < one.tellable.offset:
            self._dirty.add(topic)  # handled on an earlier connection
