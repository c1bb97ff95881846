"""The topics a client wants and how far each was received, over all its connections.

Each topic is in one of these states. A cell is the next state and what is sent; `-` cannot happen
or is ignored. No ATTACH follows a DETACH before its DETACHED has come: so every ATTACHED and message
that is looked at belongs to the newest ATTACH, and answers need no counting.

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

"asked" is the place given to `attach`, or none; "last" is the place of the last message received,
or the one of ATTACHED before any. Without a connection nothing is sent and only the state changes;
a detaching topic that is attached again then goes straight to attaching: no answer is awaited.

An ATTACHED with another place than the one asked for means that messages were missed (`Missed`). Besides,
offsets are byte positions and a record takes 4 bytes and its payload, so a stream with offsets proves itself:
a message that begins past the last offset is a gap, one that ends at or before it is a double and dropped.
Serials are opaque and prove nothing of the kind: a server with serials must let ATTACHED tell.

What ATTACH and DETACH look like is the protocol's: see `resuming_client.py`.
"""

from collections.abc import Callable
from enum import Enum, auto

from headrace.model import RECORD_HEADER_BYTES
from headrace.session.client import (
    Attached,
    Broken,
    Detached,
    Event,
    Messages,
    Missed,
    Place,
    missed,
)


class State(Enum):
    ATTACHING = auto()
    ATTACHED = auto()
    DETACHING = auto()
    REATTACHING = auto()


class Topic:
    __slots__ = ("asked", "last", "state")

    def __init__(self, asked: Place | None) -> None:
        self.state = State.ATTACHING
        self.asked = asked
        self.last: Place = 0

    @property
    def place(self) -> Place | None:
        """Where to go on, whatever has come so far."""
        return self.last if self.state is State.ATTACHED else self.asked


class Topics:
    """The table of topics. It sends through `send_attach` and `send_detach`."""

    def __init__(
        self,
        send_attach: Callable[[str, Place | None], None],
        send_detach: Callable[[str], None],
    ) -> None:
        self._send_attach = send_attach
        self._send_detach = send_detach
        self._connected = False
        self._topics: dict[str, Topic] = {}
        self._paused: dict[str, Place | None] = {}

    def attach(self, name: str, place: Place | None) -> None:
        topic = self._topics.get(name)
        if topic is None:
            self._topics[name] = Topic(place)
            if self._connected:
                self._send_attach(name, place)
            return
        assert topic.state is State.DETACHING, f"{name} is already wanted"
        topic.asked = place
        topic.state = State.REATTACHING if self._connected else State.ATTACHING

    def detach(self, name: str) -> bool:
        """Returns whether DETACHED will be answered."""
        self._paused.pop(name, None)
        topic = self._topics.get(name)
        if topic is None:
            return False
        if self._connected and topic.state in (State.ATTACHING, State.ATTACHED):
            self._send_detach(name)
        topic.state = State.DETACHING
        return self._connected

    def leave(self, name: str) -> bool:
        """Send DETACH for a topic that was read under a name, and await the answer as for others."""
        if self._connected and name not in self._topics:
            topic = self._topics[name] = Topic(None)
            topic.state = State.DETACHING
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
        """Tell a new connection what the old ones knew."""
        self._connected = True
        for name, topic in self._topics.items():
            if topic.state is State.DETACHING:
                self._send_detach(name)
            else:
                topic.asked = topic.place
                topic.state = State.ATTACHING
                self._send_attach(name, topic.asked)

    def disconnected(self) -> None:
        self._connected = False
        for topic in self._topics.values():
            if topic.state is State.REATTACHING:
                topic.state = State.ATTACHING

    def following(self, name: str) -> Topic | None:
        """The topic, if its messages are wanted and are those of the newest ATTACH."""
        topic = self._topics.get(name)
        return topic if topic is not None and topic.state is State.ATTACHED else None

    def attached(self, name: str, place: Place, events: list[Event]) -> None:
        """ATTACHED has come."""
        topic = self._topics.get(name)
        if topic is None or topic.state is not State.ATTACHING:
            return
        topic.state = State.ATTACHED
        topic.last = place
        events.append(Attached(name, place))
        if topic.asked is not None and topic.asked != place:
            events.append(missed(name, topic.asked, place))

    def detached(self, name: str, events: list[Event]) -> None:
        """DETACHED has come."""
        topic = self._topics.get(name)
        if topic is None:
            return
        if topic.state is State.DETACHING:
            del self._topics[name]
            events.append(Detached(name))
        elif topic.state is State.REATTACHING:
            topic.state = State.ATTACHING
            self._send_attach(name, topic.asked)
        else:
            events.append(Broken(f"the server detached {name!r} unasked"))

    def deliver_serials(
        self, name: str, messages: list[tuple[str, bytes]], events: list[Event]
    ) -> None:
        """Messages have come: the serial of each, and its payload."""
        topic = self.following(name)
        if topic is not None:
            topic.last = messages[-1][0]
            events.append(Messages(name, messages))

    def deliver(self, name: str, messages: list[tuple[int, bytes]], events: list[Event]) -> None:
        """Messages have come: the offset just past each, and its payload."""
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
            events.append(Messages(name, messages))
        topic.last = last


def _deliver_broken_run(
    name: str, messages: list[tuple[int, bytes]], last: int, events: list[Event]
) -> int:
    """Deliver messages that do not follow each other, naming gaps and dropping doubles."""
    run: list[tuple[int, bytes]] = []
    for offset, payload in messages:
        if offset <= last:
            continue
        begin = offset - len(payload) - RECORD_HEADER_BYTES
        if begin > last:
            if run:
                events.append(Messages(name, run))
                run = []
            events.append(Missed(name, last, begin))
        run.append((offset, payload))
        last = offset
    if run:
        events.append(Messages(name, run))
    return last
