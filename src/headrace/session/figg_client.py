"""The Figg protocol of one client over all its connections, without I/O, futures or clocks.

Theory of operation
===================

A client outlives its connections. What the server must know is kept here as state, never as bytes
in flight: the topics wanted and how far each was received, and the publishes not yet acknowledged.
Losing a connection throws the unsent bytes away; the next connection is told the state again
(`opened`), and what the old one had lost is thereby sent anew.

    connection     connecting()     opened()     a valid message     disconnected()
    disconnected   connecting       -            -                   disconnected
    connecting     -                connecting   connected           disconnected
    connected      -                -            connected           disconnected

An open connection is used at once, but is `connected` only when the peer has proved that it speaks
Figg, at the latest with the PONG for the PING that is sent first: any port takes connections.

Each topic is in one of these states. A cell is the next state and what is sent; `-` cannot happen
or is ignored. No ATTACH follows a DETACH before its DETACHED has come: so every ATTACHED and DATA
that is looked at belongs to the newest ATTACH, and answers need no counting.

    state         attach()      detach()     ATTACHED   DATA      DETACHED       reconnected
    (none)        attaching     -            -          -         -              -
                  ATTACH
    attaching     -             detaching    attached   -         broken peer    attaching
                                DETACH                                           ATTACH asked
    attached      -             detaching    -          deliver   broken peer    attaching
                                DETACH                                           ATTACH last
    detaching     reattaching   -            -          -         (none)         detaching
                                                                                 DETACH
    reattaching   -             detaching    -          -         attaching      attaching
                                                                  ATTACH asked   ATTACH asked

"asked" is the offset given to `attach`, or none; "last" is the offset of the last message received,
or the one of ATTACHED before any. Without a connection nothing is sent and only the state changes;
a detaching topic that is attached again then goes straight to attaching: no answer is awaited.

Offsets are byte positions and a record takes 4 bytes and its payload, so the stream proves itself:
a message that begins past the last offset is a gap (`Missed`), one that ends at or before it is a
double and dropped.

Publishes are numbered from 0 without gaps, so the unacknowledged ones are a queue and its first
number. Control frames overtake unsent publishes: a PING must not wait behind megabytes.
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from itertools import islice

from headrace.errors import LocalProtocolError, WindowFullError
from headrace.model import (
    PAYLOAD_BYTES_MAX,
    RECORD_HEADER_BYTES,
    check_publish_topic,
    check_topic_name,
)
from headrace.session.client import (
    Acknowledged,
    Attached,
    Broken,
    ConnectionState,
    Detached,
    Event,
    Messages,
    Missed,
    check_payload,
    check_topic_type,
)
from headrace.wire import figg

WINDOW_MAX = 4096
WINDOW_BYTES_MAX = 16 * 1024 * 1024
PING_INTERVAL_S = 2.0
PINGS_UNANSWERED_MAX = 2
_NAMES_CHECKED_MAX = 4096
_OFFSET_MAX = 2**64 - 1


class FiggClientSession:
    """Implements `ClientSession` for Figg."""

    def __init__(
        self,
        *,
        window_max: int = WINDOW_MAX,
        window_bytes_max: int = WINDOW_BYTES_MAX,
        ping_interval_s: float = PING_INTERVAL_S,
        pings_unanswered_max: int = PINGS_UNANSWERED_MAX,
    ) -> None:
        self.state = ConnectionState.DISCONNECTED
        self._open = False
        self.latency_s: float | None = None
        self.ping_at = float("inf")
        self._window_max = window_max
        self._window_bytes_max = window_bytes_max
        self._ping_interval_s = ping_interval_s
        self._pings_unanswered_max = pings_unanswered_max
        self._decoder = figg.ClientDecoder()
        self._pings: deque[tuple[int, float]] = deque()
        self._topics: dict[str, _Topic] = {}
        self._control: list[bytes] = []
        # PUBLISH frames: all unacknowledged ones, and those of them not yet on this connection.
        self._window: deque[bytes] = deque()
        self._window_bytes = 0
        self._unsent: deque[bytes] = deque()
        self._next_seq_num = 0
        self._names_checked: set[str] = set()

    @property
    def unacknowledged(self) -> int:
        return len(self._window)

    @property
    def has_room(self) -> bool:
        return len(self._window) < self._window_max and self._window_bytes < self._window_bytes_max

    def connecting(self) -> None:
        assert self.state is ConnectionState.DISCONNECTED, self.state
        self.state = ConnectionState.CONNECTING

    def opened(self, now: float) -> None:
        assert self.state is ConnectionState.CONNECTING and not self._open, self.state
        self._open = True
        self._decoder = figg.ClientDecoder()
        self._ping(now)
        for name, topic in self._topics.items():
            if topic.state is _State.DETACHING:
                self._control.append(figg.encode_detach(name))
            else:
                if topic.state is _State.ATTACHED:
                    topic.asked = topic.last
                topic.state = _State.ATTACHING
                self._control.append(figg.encode_attach(name, topic.asked))
        self._unsent.extend(self._window)

    def disconnected(self) -> None:
        assert self.state is not ConnectionState.CLOSED
        self.state = ConnectionState.DISCONNECTED
        self._forget_connection()

    def close(self) -> None:
        self.state = ConnectionState.CLOSED
        self._forget_connection()

    def publish(self, topic: str, payload: bytes) -> int:
        if not self.has_room:
            raise WindowFullError(
                f"{len(self._window)} publishes ({self._window_bytes} bytes) are unacknowledged, "
                f"the window holds {self._window_max} ({self._window_bytes_max} bytes)"
            )
        if topic not in self._names_checked:
            self._check_name(topic)
        if len(payload) > PAYLOAD_BYTES_MAX:
            check_payload(payload)
        seq_num = self._next_seq_num
        frame = figg.encode_publish(topic, seq_num, payload)
        self._next_seq_num = seq_num + 1
        self._window.append(frame)
        self._window_bytes += len(frame)
        if self._open:
            self._unsent.append(frame)
        return seq_num

    def attach(self, topic: str, offset: int | None) -> None:
        check_topic_type(topic)
        check_topic_name(topic)
        if offset is not None and not (isinstance(offset, int) and 0 <= offset <= _OFFSET_MAX):
            raise LocalProtocolError(f"an offset is a number from 0 to {_OFFSET_MAX}, not {offset}")
        known = self._topics.get(topic)
        if known is None:
            self._topics[topic] = _Topic(_State.ATTACHING, offset)
            self._send(figg.encode_attach(topic, offset))
            return
        assert known.state is _State.DETACHING, f"{topic} is already wanted"
        known.asked = offset
        if self._open:
            known.state = _State.REATTACHING
        else:
            known.state = _State.ATTACHING

    def detach(self, topic: str) -> bool:
        known = self._topics.get(topic)
        if known is None:
            return False
        if known.state in (_State.ATTACHING, _State.ATTACHED):
            self._send(figg.encode_detach(topic))
        known.state = _State.DETACHING
        return self._open

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        events: list[Event] = []
        messages = self._decoder.receive(data)
        if self.state is not ConnectionState.CONNECTED and messages:
            self._first_messages(messages[0])
        for message in messages:
            if isinstance(message, figg.Data):
                self._data(message, events)
            else:
                self._control_message(message, now, events)
                if events and type(events[-1]) is Broken:
                    break
        return events

    def tick(self, now: float, reading: bool = True) -> list[Event]:
        """Ping, or give up. While we do not read (`reading`) a missing answer proves nothing."""
        if not self._open or now < self.ping_at:
            return []
        if not reading:
            self.ping_at = now + self._ping_interval_s
            return []
        if len(self._pings) >= self._pings_unanswered_max:
            return [Broken(f"{len(self._pings)} pings are unanswered")]
        self._ping(now)
        return []

    def data_to_send(self, bytes_max: int) -> bytes:
        frames = self._control
        self._control = []
        unsent = self._unsent
        if unsent:
            if self._window_bytes <= bytes_max:
                frames.extend(unsent)
                unsent.clear()
            else:
                frames.extend(_take(unsent, bytes_max))
        return b"".join(frames)

    def _first_messages(self, first: figg.ToClient) -> None:
        if self._open and not isinstance(first, figg.Bad):
            self.state = ConnectionState.CONNECTED

    def _send(self, frame: bytes) -> None:
        if self._open:
            self._control.append(frame)

    def _ping(self, now: float) -> None:
        timestamp = int(now * 1e6)
        self._pings.append((timestamp, now))
        self.ping_at = now + self._ping_interval_s
        self._send(figg.encode_ping(timestamp))

    def _forget_connection(self) -> None:
        self._open = False
        self.ping_at = float("inf")
        self._pings.clear()
        self._control.clear()
        self._unsent.clear()
        for topic in self._topics.values():
            if topic.state is _State.REATTACHING:
                topic.state = _State.ATTACHING

    def _check_name(self, topic: str) -> None:
        check_topic_type(topic)
        check_publish_topic(topic)
        if len(self._names_checked) >= _NAMES_CHECKED_MAX:
            self._names_checked.clear()
        self._names_checked.add(topic)

    def _control_message(self, message: figg.ToClient, now: float, events: list[Event]) -> None:
        if isinstance(message, figg.Ack):
            self._ack(message.seq_num, events)
        elif isinstance(message, figg.Pong):
            self._pong(message.timestamp, now)
        elif isinstance(message, figg.Attached):
            self._attached(message, events)
        elif isinstance(message, figg.Detached):
            self._detached(message.topic, events)
        elif isinstance(message, figg.Bad):
            events.append(Broken(f"the server broke the protocol: {message.reason}"))

    def _ack(self, seq_num: int, events: list[Event]) -> None:
        if seq_num >= self._next_seq_num:
            events.append(
                Broken(f"the server acknowledged publish {seq_num}, which was never sent")
            )
            return
        count = seq_num - (self._next_seq_num - len(self._window)) + 1
        if count <= 0:
            return
        window = self._window
        self._window_bytes -= sum(map(len, islice(window, count)))
        if count == len(window):
            window.clear()
        else:
            for _ in range(count):
                window.popleft()
        events.append(Acknowledged(count))

    def _pong(self, timestamp: int, now: float) -> None:
        if any(timestamp == sent for sent, _ in self._pings):
            while True:
                sent, at = self._pings.popleft()
                if sent == timestamp:
                    self.latency_s = now - at
                    return

    def _attached(self, message: figg.Attached, events: list[Event]) -> None:
        topic = self._topics.get(message.topic)
        if topic is None or topic.state is not _State.ATTACHING:
            return
        topic.state = _State.ATTACHED
        topic.last = message.offset
        events.append(Attached(message.topic, message.offset))
        if topic.asked is not None and topic.asked != message.offset:
            events.append(Missed(message.topic, topic.asked, message.offset))

    def _detached(self, name: str, events: list[Event]) -> None:
        topic = self._topics.get(name)
        if topic is None:
            return
        if topic.state is _State.DETACHING:
            del self._topics[name]
            events.append(Detached(name))
        elif topic.state is _State.REATTACHING:
            topic.state = _State.ATTACHING
            self._send(figg.encode_attach(name, topic.asked))
        else:
            events.append(Broken(f"the server detached {name!r} unasked"))

    def _data(self, data: figg.Data, events: list[Event]) -> None:
        topic = self._topics.get(data.topic)
        if topic is None or topic.state is not _State.ATTACHED:
            return
        last = topic.last
        for offset, payload in data.messages:
            if offset - len(payload) - RECORD_HEADER_BYTES != last:
                topic.last = _deliver_broken_run(data, topic.last, events)
                return
            last = offset
        topic.last = last
        events.append(Messages(data.topic, data.messages))


class _State(Enum):
    ATTACHING = auto()
    ATTACHED = auto()
    DETACHING = auto()
    REATTACHING = auto()


class _Topic:
    __slots__ = ("asked", "last", "state")

    def __init__(self, state: _State, asked: int | None) -> None:
        self.state = state
        self.asked = asked
        self.last = 0


def _deliver_broken_run(data: figg.Data, last: int, events: list[Event]) -> int:
    """Deliver messages that do not follow each other, naming gaps and dropping doubles."""
    run: list[tuple[int, bytes]] = []
    for offset, payload in data.messages:
        if offset <= last:
            continue
        begin = offset - len(payload) - RECORD_HEADER_BYTES
        if begin > last:
            if run:
                events.append(Messages(data.topic, run))
                run = []
            events.append(Missed(data.topic, last, begin))
        run.append((offset, payload))
        last = offset
    if run:
        events.append(Messages(data.topic, run))
    return last


def _take(frames: deque[bytes], bytes_max: int) -> Iterable[bytes]:
    """Frames from the front, stopping at `bytes_max` but giving at least one."""
    size = 0
    while frames and size < bytes_max:
        frame = frames.popleft()
        size += len(frame)
        yield frame
