"""The topics that a client wants and how far each was received, over all its connections.

Each topic is in one of these states. A cell has the next state and the message that is sent; `-` cannot
happen or is ignored. No ATTACH follows a DETACH before its DETACHED has come. So every ATTACHED and every
message that is not ignored belongs to the newest ATTACH, and answers need no counting.

    state         attach()      detach()     ATTACHED   messages  DETACHED       reconnected
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

"asked" is the place given to `attach`, or none; "last" is the place of the last message received, or of
ATTACHED before the first message. Without a connection nothing is sent and only the state changes. A
detaching topic that is attached again then becomes attaching directly, because no answer is awaited.

An ATTACHED with another place than the one asked for means that messages were missed (`Missed`). In addition,
offsets show every gap, because they are byte positions and a record takes 4 bytes and its payload: a message
that begins past the last offset follows a gap, and a message that ends at or before the last offset is a
duplicate and dropped. Serials are opaque and show no gaps: a server with serials must report gaps with
ATTACHED.

The protocol defines the bytes of ATTACH and DETACH: see `client.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from headrace.model import RECORD_HEADER_BYTES
from headrace.session.client import Broken
from headrace.session.topics.events import (
    Event,
    Missed,
    Place,
    TopicAttached,
    TopicDetached,
    TopicMessages,
    missed,
)


class AttachState(Enum):
    ATTACHING = auto()
    ATTACHED = auto()
    DETACHING = auto()
    REATTACHING = auto()


@dataclass(slots=True)
class ClientTopic:
    asked: Place | None
    state: AttachState = AttachState.ATTACHING
    last: Place = 0

    @property
    def place(self) -> Place | None:
        """Place from which to continue, in any state."""
        return self.last if self.state is AttachState.ATTACHED else self.asked


class ClientTopics:
    """The table of topics. It sends through `send_attach` and `send_detach`."""

    def __init__(
        self,
        send_attach: Callable[[str, Place | None], None],
        send_detach: Callable[[str], None],
    ) -> None:
        self._send_attach = send_attach
        self._send_detach = send_detach
        self._connected = False
        self._topics: dict[str, ClientTopic] = {}
        self._paused: dict[str, Place | None] = {}

    def attach(self, name: str, place: Place | None) -> None:
        topic = self._topics.get(name)
        if topic is None:
            self._topics[name] = ClientTopic(place)
            if self._connected:
                self._send_attach(name, place)
            return
        assert topic.state is AttachState.DETACHING, f"{name} is already wanted"
        topic.asked = place
        topic.state = AttachState.REATTACHING if self._connected else AttachState.ATTACHING

    def detach(self, name: str) -> bool:
        """Detach a topic. Returns True if the server will answer DETACHED."""
        self._paused.pop(name, None)
        topic = self._topics.get(name)
        if topic is None:
            return False
        if self._connected and topic.state in (AttachState.ATTACHING, AttachState.ATTACHED):
            self._send_detach(name)
        topic.state = AttachState.DETACHING
        return self._connected

    def leave(self, name: str) -> bool:
        """Send DETACH for a topic that was read under a name, and wait for the answer as for other topics."""
        if self._connected and name not in self._topics:
            self._topics[name] = ClientTopic(None, AttachState.DETACHING)
            self._send_detach(name)
        return self._connected

    def is_leaving(self, name: str) -> bool:
        """True while a DETACHED is awaited."""
        return self._connected and name in self._topics

    def pause(self, name: str) -> None:
        place = self._topics[name].place
        self.detach(name)
        self._paused[name] = place

    def resume(self, name: str) -> None:
        self.attach(name, self._paused.pop(name))

    def connected(self) -> None:
        """Send ATTACH or DETACH for every topic on a new connection."""
        self._connected = True
        for name, topic in self._topics.items():
            if topic.state is AttachState.DETACHING:
                self._send_detach(name)
            else:
                topic.asked = topic.place
                topic.state = AttachState.ATTACHING
                self._send_attach(name, topic.asked)

    def disconnected(self) -> None:
        self._connected = False
        for topic in self._topics.values():
            if topic.state is AttachState.REATTACHING:
                topic.state = AttachState.ATTACHING

    def following(self, name: str) -> ClientTopic | None:
        """Return the topic if its messages are wanted and belong to the newest ATTACH."""
        topic = self._topics.get(name)
        return topic if topic is not None and topic.state is AttachState.ATTACHED else None

    def attached(self, name: str, place: Place, events: list[Event]) -> None:
        """Handle an ATTACHED."""
        topic = self._topics.get(name)
        if topic is None or topic.state is not AttachState.ATTACHING:
            return
        topic.state = AttachState.ATTACHED
        topic.last = place
        events.append(TopicAttached(name, place))
        if topic.asked is not None and topic.asked != place:
            events.append(missed(name, topic.asked, place))

    def detached(self, name: str, events: list[Event]) -> None:
        """Handle a DETACHED."""
        topic = self._topics.get(name)
        if topic is None:
            return
        if topic.state is AttachState.DETACHING:
            del self._topics[name]
            events.append(TopicDetached(name))
        elif topic.state is AttachState.REATTACHING:
            topic.state = AttachState.ATTACHING
            self._send_attach(name, topic.asked)
        else:
            events.append(Broken(f"the server detached {name!r} unasked"))

    def deliver_serials(
        self, name: str, messages: list[tuple[str, bytes]], events: list[Event]
    ) -> None:
        """Deliver messages: the serial of each, and its payload."""
        topic = self.following(name)
        if topic is not None:
            topic.last = messages[-1][0]
            events.append(TopicMessages(name, messages))

    def deliver(self, name: str, messages: list[tuple[int, bytes]], events: list[Event]) -> None:
        """Deliver messages: the offset just past each, and its payload."""
        topic = self.following(name)
        if topic is None:
            return
        assert isinstance(topic.last, int), "offsets and serials are of different protocols"
        last = topic.last
        for offset, payload in messages:
            if offset - len(payload) - RECORD_HEADER_BYTES != last:
                last = _deliver_broken_run(name, messages, topic.last, events)
                break
            last = offset
        else:
            events.append(TopicMessages(name, messages))
        topic.last = last


def _deliver_broken_run(
    name: str, messages: list[tuple[int, bytes]], last: int, events: list[Event]
) -> int:
    """Deliver messages that do not follow each other: report gaps and drop duplicates."""
    run: list[tuple[int, bytes]] = []
    for offset, payload in messages:
        if offset <= last:
            continue
        begin = offset - len(payload) - RECORD_HEADER_BYTES
        if begin > last:
            if run:
                events.append(TopicMessages(name, run))
                run = []
            events.append(Missed(name, last, begin))
        run.append((offset, payload))
        last = offset
    if run:
        events.append(TopicMessages(name, run))
    return last
