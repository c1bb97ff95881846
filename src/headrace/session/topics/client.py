"""Interface and events of every client session, regardless of its protocol.

The client (`headrace.client`) drives any session through this interface, so a new protocol needs only a new
session and a way to dial, and the application uses the same API.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from headrace.errors import PayloadTooLargeError
from headrace.model import JUMP, PAYLOAD_BYTES_MAX
from headrace.session.topics.reader_events import ReaderEvent

Place = int | str
"""A place in a topic, as its protocol names it: an offset (Figg) or a serial (Wombat).

A serial is an opaque text: it is stored, compared and sent back. Only a serial in the form of a Headrace
server contains an offset (`offset_of`), and nothing depends on that.
"""


class ConnectionState(StrEnum):
    """State of a client's connection to its server."""

    DISCONNECTED = "disconnected"
    """No connection; the client waits for the next attempt."""
    CONNECTING = "connecting"
    CONNECTED = "connected"
    REFUSED = "refused"
    """Server and client do not accept each other: there will be no further attempt. Logux and
    channels only."""
    CLOSED = "closed"
    """The application closed the client for good."""


class PublishesAcknowledged(NamedTuple):
    """The oldest unacknowledged publishes, `publishes` in number, are safe with the server."""

    publishes: int


class PublishRefused(NamedTuple):
    """The server refuses the oldest unacknowledged publish, and the client has given it up."""

    reason: str
    """Last reason that the server gave, or a text that it hung up."""
    times: int
    """Number of connections that ended because of this publish."""


class TopicAttached(NamedTuple):
    """The server delivers a topic, beginning at `place`."""

    topic: str
    place: Place


class TopicDetached(NamedTuple):
    """The server has stopped delivering a topic."""

    topic: str


class Missed(NamedTuple):
    """Messages of a topic will never reach this client: they are expired, or lost by the log."""

    topic: str
    asked: int | None
    """Offset that should have come next. None if the server's serials do not contain offsets."""
    got: int | None
    """Offset at which delivery continues. Below `asked` if the log is shorter than before; equal to `asked`
    if the topic was created again and begins there. None as with `asked`."""
    asked_serial: str | None = None
    """Serial that the client asked for. Wombat only."""
    got_serial: str | None = None
    """Serial that the server answered instead. Wombat only."""

    @property
    def is_jump(self) -> bool:
        """True if offsets skipped ahead because the log was restored or repaired.

        No record is known to be missing, but some that were written shortly before may be lost.
        """
        if self.asked is None or self.got is None or self.got <= self.asked:
            return False
        return (self.got - self.asked) % JUMP == 0


class TopicMessages(NamedTuple):
    """Consecutive messages of one topic: the place just past each, and its payload."""

    topic: str
    messages: Sequence[tuple[Place, bytes]]


class Broken(NamedTuple):
    """The connection is broken: close it and connect again."""

    reason: str


class Finished(NamedTuple):
    """The exchange is complete: send the remaining data, and close the connection."""

    reason: str


Event = (
    PublishesAcknowledged
    | PublishRefused
    | TopicAttached
    | TopicDetached
    | Missed
    | TopicMessages
    | ReaderEvent
    | Broken
)

E = TypeVar("E")
"""Type of a session's events."""


class LinkedSession(Protocol[E]):
    """Interface for the link that keeps a session connected (`headrace.client.link`).

    A session serves one client over many connections. Times are seconds of one monotonic clock.
    """

    state: ConnectionState

    @property
    def tick_at(self) -> float:
        """Time when `tick` is due. Everything that is sent may make it earlier."""

    def connecting(self) -> None:
        """Note that an attempt to connect begins."""

    def opened(self, now: float) -> None:
        """Note a new open connection: everything that the server must be told again becomes data to send.

        `state` stays CONNECTING until the server has proved that it speaks the protocol.
        """

    def hung_up(self, reason: str, now: float) -> list[E]:
        """Note that the server itself has ended the connection; `disconnected` follows."""

    def disconnected(self) -> None:
        """Note that the attempt failed or the connection ended."""

    def receive_data(self, chunks: Sequence[bytes], now: float) -> list[E]:
        """Handle the data of one read, and return the resulting events.

        Chunks are pieces of the stream, or whole messages if the transport has messages. No event
        follows a `Broken` or `Finished`.
        """

    def tick(self, now: float, reading: bool = True) -> list[E]:
        """Send a ping or repeat a publish if it is due, or give up on a peer that does not answer.

        While the client does not read (`reading` is False), a missing answer proves nothing.
        """

    def data_to_send(self, bytes_max: int, now: float) -> list[bytes]:
        """Return the next frames for the connection, about `bytes_max` at most; empty if there are none.

        Control messages come first and are never held back because of their size. Returned frames count
        as sent: they are returned again only if they must be sent again.
        """


class ClientSession(LinkedSession[Event], Protocol):
    """Session that publishes to topics and subscribes to topics."""

    latency_s: float | None
    """Round trip of the last answered ping, None before the first."""

    @property
    def unacknowledged(self) -> int:
        """Number of publishes that wait for their acknowledgement."""

    @property
    def has_room(self) -> bool:
        """True if `publish` would accept a message now."""

    def close(self) -> None:
        """Close the session for good."""

    def publish(self, topic: str, payload: bytes) -> int:
        """Queue a publish, also without a connection. Returns its number, counted from 0.

        Raises BadTopicNameError, PayloadTooLargeError or WindowFullError; in that case nothing is sent.
        """

    def attach(self, topic: str, place: Place | None) -> Place | None:
        """Ask for a topic, beginning at an offset or a serial, or at its end.

        Returns the place as the protocol names it. Raises LocalProtocolError for a place that the
        protocol does not have.
        """

    def detach(self, topic: str) -> bool:
        """Stop asking for a topic. None of its messages is delivered after this call.

        Returns True if a `TopicDetached` will come, unless the connection is lost before.
        """

    def read(self, topic: str, reader: str, *, newest: bool, window: int, instance: int) -> None:
        """Ask for a topic under a reader's name; `detach` ends this too.

        `window`: limit in bytes of records delivered and not `handled`; `instance`: a random number of this
        client. Raises BadReaderNameError, and LocalProtocolError if pings are turned off.
        """

    def handled(self, topic: str, offset: int) -> bool:
        """Note that the application has handled the message of a reader that ends at `offset`.

        Returns False if the message is not, or no longer, this client's to handle.
        """

    def handled_up_to(self, topic: str) -> int:
        """Return the offset up to which every message of a reader was handled; 0 if the topic is not read."""

    def is_sure(self, topic: str, now: float) -> bool:
        """True while no other client can have received this reader's messages.

        This holds while the reader is active and the server has answered a ping recently.
        """

    def make_sure(self, topic: str, now: float) -> None:
        """Ask the server, unless a ping is pending; `ReaderSure` or another event of the reader answers."""

    def pause(self, topic: str) -> None:
        """Detach a topic for now, and remember the place where it stopped."""

    def resume(self, topic: str) -> None:
        """Attach a paused topic at the place where it stopped."""


def offset_of(place: Place) -> int | None:
    """Return the offset in a place; None for a serial that is not in Headrace's form."""
    if isinstance(place, int):
        return place
    # The regular expression of `wire/wombat/messages.py` is too slow here: this runs for every message.
    epoch, at, offset = place.partition("@")
    is_ours = at and offset.isdecimal() and len(offset) <= 20 and (not epoch or epoch.isdecimal())
    return int(offset) if is_ours else None


def epoch_of(place: Place) -> int | None:
    """Return the epoch in a Headrace serial; None for an offset, and for a serial without an epoch."""
    if isinstance(place, int) or offset_of(place) is None:
        return None
    epoch = place.partition("@")[0]
    return int(epoch) if 0 < len(epoch) <= 20 else None


def serial_of(place: Place) -> str | None:
    """Return the place if it is a serial; None for an offset."""
    return place if isinstance(place, str) else None


def missed(topic: str, asked: Place, got: Place) -> Missed:
    return Missed(topic, offset_of(asked), offset_of(got), serial_of(asked), serial_of(got))


def check_topic_type(topic: object) -> None:
    """Raise TypeError unless `topic` is a `str`. The error uses the words of the API, not of internals."""
    if not isinstance(topic, str):
        raise TypeError(f"a topic is str, not {type(topic).__name__}")


def check_payload(payload: bytes) -> None:
    """Raise PayloadTooLargeError if every server would refuse the payload: it would be resent forever."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise PayloadTooLargeError(
            f"a payload may have {PAYLOAD_BYTES_MAX} bytes, this one has {len(payload)}"
        )
