"""The named readers of a client, over all its connections: records received, handled and stored.

    state       READ answered        LOST          reconnected   meaning
    idle        -                    -             claiming      not connected
    claiming    waiting, active      claiming      claiming      READ was sent
    waiting     active               claiming      claiming      another connection reads
    active      active (moved)       claiming      claiming      records come, and may be acknowledged

Records are handled in any order. The server is told the *prefix*: the position up to which all are handled.
After a lost connection, the server starts again at the cursor. If the cursor is within the records that were
handled here, no other client has read in the meantime: the records of the application are still its own, and
only records that it does not have are delivered. Otherwise the reading starts over, and another client may
have received the records that the application still has.

Messages that wait for the application may be given out only while the reader `is_sure`: active, with a
recently answered ping. A process that was stopped, or that has blocked its event loop, asks the server first.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from headrace.model import RECORD_HEADER_BYTES, Position
from headrace.session.client import Broken
from headrace.session.topics.events import (
    Event,
    Missed,
    ReaderActive,
    ReaderFailed,
    ReaderLost,
    ReaderStored,
    ReaderSure,
    ReaderWaiting,
    ReadMessages,
)
from headrace.wire import readers

ANSWER_S = 5.0
"""Time limit for the answer to READ. A server with readers answers at once; others do not, or hang up."""
HANG_UPS_MAX = 3
"""Connections in a row with an unanswered READ before the client decides that the server has no readers."""

_NOWHERE = Position(0, 0, 0)
_UNKNOWN = "the server does not know named readers: subscribe without `reader`, or use Headrace"


class ReaderState(Enum):
    IDLE = auto()
    CLAIMING = auto()
    WAITING = auto()
    ACTIVE = auto()


@dataclass(slots=True)
class ReadTopic:
    """One topic that is read under a name."""

    reader: str
    newest: bool
    window: int
    state: ReaderState = ReaderState.IDLE
    answer_at: float = inf
    hang_ups: int = 0
    answered: bool = False
    """True once a server has answered: it supports named readers, however often a connection is cut."""
    grant: int = 0
    was_active: bool = False
    """True if the application may have records that no other client has received since."""
    received: Position = _NOWHERE
    """Position behind the last record that the application has received."""
    seen: Position = _NOWHERE
    """Position behind the last record of the present grant. Below `received` while records come again."""
    handled: Position = _NOWHERE
    """End of the prefix."""
    order: deque[tuple[int, int]] = field(default_factory=deque)
    """Offset and ordinal just past each record behind the prefix."""
    outstanding: set[int] = field(default_factory=set)
    """End offsets of the records that are not handled."""
    sent: int = 0
    """Last offset that the server was told in the present grant."""
    stored: int = 0

    def start(self, at: Position) -> None:
        self.received = self.handled = at
        self.order.clear()
        self.outstanding.clear()

    def handle(self, offset: int) -> bool:
        """Note that a record is handled. Returns True if it was outstanding."""
        if offset not in self.outstanding:
            return False
        self.outstanding.remove(offset)
        order, epoch = self.order, self.received.epoch
        while order and order[0][0] not in self.outstanding:
            self.handled = Position(epoch, *order.popleft())
        return True

    @property
    def tellable(self) -> Position:
        """Position up to which HANDLED may be sent: the server must have sent the records in this grant."""
        return min(self.handled, self.seen, key=lambda at: at.offset)


class ClientReaders:
    """The readers of a client. They send through `send` and `send_detach`."""

    def __init__(
        self, send: Callable[[readers.ToServer], None], send_detach: Callable[[str], None]
    ) -> None:
        self._send = send
        self._send_detach = send_detach
        self._connected = False
        self._instance = 0
        self._readers: dict[str, ReadTopic] = {}
        self._dirty: set[str] = set()
        """Topics whose prefix has grown."""
        self._unsent: set[str] = set()
        """Topics for which READ is to be sent."""
        self._held: set[str] = set()
        """Topics that wait for DETACHED before READ is sent."""
        self._unsure: set[str] = set()
        """Topics that wait for the answer to a ping."""

    def __contains__(self, topic: str) -> bool:
        return topic in self._readers

    @property
    def tick_at(self) -> float:
        if not self._readers:
            return inf
        return min(one.answer_at for one in self._readers.values())

    def read(self, topic: str, reader: str, *, newest: bool, window: int, instance: int) -> None:
        """Register a topic that is read under a name. `claim` asks for it."""
        assert topic not in self._readers, f"{topic} is already read"
        self._instance = instance
        self._readers[topic] = ReadTopic(reader, newest, window)

    def claim(self, topic: str, *, held: bool = False) -> None:
        """Let READ be sent, if there is a connection. `held`: wait until DETACHED has come."""
        if held:
            self._held.add(topic)
        elif self._connected:
            one = self._readers[topic]
            one.state = ReaderState.CLAIMING
            one.grant = 0
            self._unsent.add(topic)

    def detached(self, topic: str) -> None:
        """Claim a topic that was held: the server has ended the earlier reading or subscription."""
        if topic in self._held:
            self._held.discard(topic)
            self.claim(topic)

    def stop(self, topic: str) -> None:
        """Stop reading a topic, after telling the server which records were handled."""
        self._tell_handled()
        del self._readers[topic]
        self._unsent.discard(topic)
        self._held.discard(topic)
        self._unsure.discard(topic)

    def handled(self, topic: str, offset: int) -> bool:
        one = self._readers.get(topic)
        if one is None or not one.handle(offset):
            return False
        self._dirty.add(topic)
        return True

    def prefix(self, topic: str) -> int:
        one = self._readers.get(topic)
        return one.handled.offset if one is not None else 0

    def is_active(self, topic: str) -> bool:
        one = self._readers.get(topic)
        return one is not None and one.state is ReaderState.ACTIVE

    def wait_for_answer(self, topic: str) -> None:
        """Let `answered` report this topic."""
        self._unsure.add(topic)

    def answered(self, events: list[Event]) -> None:
        """Report the topics that wait for the answer to a ping: the server has answered one."""
        if self._unsure:
            events.extend(ReaderSure(topic) for topic in self._unsure)
            self._unsure.clear()

    def connected(self, now: float) -> None:
        self._connected = True
        self._held.clear()  # a new connection has nothing to detach
        for topic, one in self._readers.items():
            if one.hang_ups < HANG_UPS_MAX:
                self.claim(topic)
            else:
                one.answer_at = now

    def disconnected(self) -> None:
        was_connected, self._connected = self._connected, False
        self._unsent.clear()
        for one in self._readers.values():
            if was_connected and one.state is ReaderState.CLAIMING and not one.answered:
                one.hang_ups += 1
            one.state = ReaderState.IDLE
            one.grant = 0
            one.answer_at = inf

    def tick(self, now: float, reading: bool) -> list[Event]:
        """Give up readers whose READ the server does not answer."""
        events: list[Event] = []
        for topic, one in list(self._readers.items()):
            if now < one.answer_at:
                continue
            if not reading and one.hang_ups < HANG_UPS_MAX:
                one.answer_at = now + ANSWER_S
                continue
            if one.state is ReaderState.CLAIMING:
                self._send_detach(topic)  # in case the server knows readers and is slow
            self.stop(topic)
            events.append(ReaderFailed(topic, _UNKNOWN))
        return events

    def flush(self, now: float) -> None:
        """Send each pending READ and HANDLED."""
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
            if one.state is ReaderState.ACTIVE and at.offset > one.sent:
                one.sent = at.offset
                self._send(readers.Handled(topic, one.grant, at.offset, at.ordinal))
        self._dirty.clear()

    def take(self, message: readers.ToClient, events: list[Event]) -> None:
        one = self._readers.get(message.topic)
        if one is None or message.topic in self._held:
            return  # the message belongs to a reading that has ended
        one.hang_ups = 0
        one.answered = True
        one.answer_at = inf
        if isinstance(message, readers.Records):
            if one.state is ReaderState.ACTIVE:
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

    def _waiting(self, one: ReadTopic, message: readers.Waiting, events: list[Event]) -> None:
        one.state = ReaderState.WAITING
        if message.ahead:
            self._no_longer_active(one, message.topic, "another client reads now", events)
            events.append(ReaderWaiting(message.topic, message.ahead))

    def _lost(self, one: ReadTopic, message: readers.Lost, events: list[Event]) -> None:
        if message.code == readers.REFUSED:
            self.stop(message.topic)
            events.append(ReaderFailed(message.topic, message.reason))
            return
        self._no_longer_active(one, message.topic, message.reason, events)
        self.claim(message.topic)

    def _no_longer_active(
        self, one: ReadTopic, topic: str, reason: str, events: list[Event]
    ) -> None:
        if one.was_active:
            one.was_active = False
            events.append(ReaderLost(topic, reason))
        one.start(_NOWHERE)

    def _reading(self, one: ReadTopic, message: readers.Reading, events: list[Event]) -> None:
        topic = message.topic
        at = Position(message.epoch, message.offset, message.ordinal)
        is_ours = (
            one.was_active
            and one.stored <= at.offset <= one.handled.offset
            and (at.epoch == one.received.epoch or at.offset == one.received.offset)
        )
        if not is_ours:
            if one.was_active:
                events.append(ReaderLost(topic, "the reader was moved, or another client read"))
            one.start(at)
        one.state = ReaderState.ACTIVE
        one.was_active = True
        one.grant = message.grant
        one.seen = at
        one.stored = one.sent = at.offset
        events.append(ReaderActive(topic, at))
        if not message.exact:
            events.append(Missed(topic, message.asked, at.offset))
        if is_ours:
            events.append(ReaderStored(topic, at.offset))

    def _records(self, one: ReadTopic, message: readers.Records, events: list[Event]) -> None:
        topic, offset, ordinal, data = message.topic, message.offset, message.ordinal, message.data
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
        one.seen = Position(message.epoch, offset + end, ordinal)
        if messages:
            first = ordinal - len(messages)
            ends = [at for at, _ in messages]
            one.order.extend(zip(ends, range(first + 1, ordinal + 1), strict=True))
            one.outstanding.update(ends)
            one.received = one.seen
            events.append(ReadMessages(topic, message.epoch, first, message.ms, messages))
        if one.sent < one.tellable.offset:
            self._dirty.add(topic)  # records were handled on an earlier connection
