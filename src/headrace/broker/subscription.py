"""A subscription: a reader that sometimes waits. Its states and its sink; the broker moves it.

    locating ──position known──▶ resuming ⇄ live        any ──▶ closed

*Resuming*: behind the end, reads from the log as fast as its sink takes. *Live*: at the end, is handed each
commit as it becomes visible. From one to the other in one step of the loop, so nothing falls between. A
live one whose sink is full falls back to resuming: late, bounded in memory, and without loss.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from headrace.log.store import Reader, Topic
from headrace.model import Position

Encode = Callable[[str, Position, Sequence[bytes], int], bytes]
"""A protocol's frames for records: topic, where the first begins, the records, and when they were stored, in
milliseconds.

An encoding may have a method `takes`, with the first three arguments: the broker asks it first whether a
commit has anything for it. Protocols with many subscriptions, most of which have no part in most commits,
need that.
"""


class State(Enum):
    LOCATING = "locating"
    RESUMING = "resuming"
    LIVE = "live"
    CLOSED = "closed"


class Slice(NamedTuple):
    """Encoded records, shared by every live subscription of a protocol."""

    end: int
    """The offset just past them."""
    end_ordinal: int
    data: bytes


class Sink(Protocol):
    """Where a subscription's records go: a connection."""

    peer: str
    protocol: str

    def attached(self, subscription: "Subscription", offset: int, exact: bool) -> None:
        """It starts here. `exact`: nothing lies between this and what was asked for."""

    def live(self, subscription: "Subscription") -> None:
        """It has everything up to now."""

    def deliver(self, subscription: "Subscription", slices: Sequence[Slice]) -> bool:
        """Take live records; False when full, and the subscription falls back from where it is."""

    def overtaken(self, subscription: "Subscription") -> None:
        """What it was about to read is gone; it goes on behind that, unless the sink ends it now."""

    def broken(self, subscription: "Subscription") -> None:
        """It cannot be served any more, by a fault of our own."""

    def ready(self, subscription: "Subscription") -> None:
        """There is something to pull."""


class Subscription:
    __slots__ = ("encode", "offset", "ordinal", "reader", "sink", "state", "topic")

    def __init__(self, topic: Topic, sink: Sink, encode: Encode) -> None:
        self.topic = topic
        self.sink = sink
        self.encode = encode
        self.offset = 0
        """Where the next record for the sink begins."""
        self.ordinal = 0
        """How many records precede it."""
        self.state = State.LOCATING
        self.reader: Reader | None = None

    @property
    def position(self) -> Position:
        return Position(self.topic.epoch, self.offset, self.ordinal)
