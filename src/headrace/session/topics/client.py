"""What every client session offers, whatever its protocol: one interface and its events.

The client (`headrace.client`) drives any session through this interface, so that a further protocol
is a further session and a way to dial, and the application sees the same API.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from headrace.errors import PayloadTooLargeError
from headrace.model import JUMP, PAYLOAD_BYTES_MAX
from headrace.session.reader_events import ReaderEvent

Place = int | str
"""A place in a topic, as its protocol names it: an offset (Figg) or a serial (Wombat).

A serial is an opaque text: it is stored, compared and given back. Only a serial that has the form of
a Headrace server's tells an offset besides (`offset_of`), and nothing depends on that.
"""


class ConnectionState(StrEnum):
    """Where a client stands with its server."""

    DISCONNECTED = "disconnected"
    """No connection; the next attempt is waited for."""
    CONNECTING = "connecting"
    CONNECTED = "connected"
    REFUSED = "refused"
    """Server and client do not take each other: there will be no further attempt. Logux and
    channels only."""
    CLOSED = "closed"
    """For good: the application closed the client."""


class Acknowledged(NamedTuple):
    """That many of the oldest unacknowledged publishes are safe with the server."""

    publishes: int


class Refused(NamedTuple):
    """The server does not take the oldest unacknowledged publish: it is given up."""

    reason: str
    """What the server said last, or that it hung up."""
    times: int
    """How many connections it has cost."""


class Attached(NamedTuple):
    """The server delivers a topic from `place` on."""

    topic: str
    place: Place


class Detached(NamedTuple):
    """The server has stopped delivering a topic."""

    topic: str


class Missed(NamedTuple):
    """Messages of a topic did not and will not reach this client: expired, or lost by the log."""

    topic: str
    asked: int | None
    """The offset that should have come next. None: the server's serials do not tell offsets."""
    got: int | None
    """The offset that delivery goes on from. Below `asked` when the log is shorter than it was; equal
    when the topic was made anew and begins there. None as with `asked`."""
    asked_serial: str | None = None
    """The serial that was asked for. Wombat only."""
    got_serial: str | None = None
    """The serial that the server answered instead. Wombat only."""

    @property
    def is_jump(self) -> bool:
        """True where offsets skipped ahead because the log was restored or repaired.

        No record is known to be missing, but some that were written shortly before may be lost.
        """
        if self.asked is None or self.got is None or self.got <= self.asked:
            return False
        return (self.got - self.asked) % JUMP == 0


class Messages(NamedTuple):
    """Consecutive messages of one topic: the place just past each, and its payload."""

    topic: str
    messages: Sequence[tuple[Place, bytes]]


class Broken(NamedTuple):
    """The connection is of no more use: close it and connect again."""

    reason: str


class Finished(NamedTuple):
    """Everything is said: send what is left, and close the connection."""

    reason: str


Event = Acknowledged | Refused | Attached | Detached | Missed | Messages | ReaderEvent | Broken

E = TypeVar("E")
"""The events of a session."""


class LinkedSession(Protocol[E]):
    """What keeps a session connected (`headrace.client.link`) asks of it.

    One client over many connections. Times are seconds of one monotonic clock.
    """

    state: ConnectionState

    @property
    def tick_at(self) -> float:
        """When `tick` is next due; may come nearer with everything that is sent."""

    def connecting(self) -> None:
        """An attempt to connect begins."""

    def opened(self, now: float) -> None:
        """A fresh connection stands: everything the server must hear again becomes data to send.

        `state` stays CONNECTING until the server has proved that it speaks the protocol.
        """

    def hung_up(self, reason: str, now: float) -> list[E]:
        """The server has ended the connection of its own will; `disconnected` follows."""

    def disconnected(self) -> None:
        """The attempt failed or the connection ended."""

    def receive_data(self, chunks: Sequence[bytes], now: float) -> list[E]:
        """Take what one read of the connection brought and say what it means.

        Chunks are pieces of the stream, or whole messages where the transport has messages. Behind a
        `Broken` or `Finished` nothing follows.
        """

    def tick(self, now: float, reading: bool = True) -> list[E]:
        """Send what is due: a ping, or a publish again. Or give up on a peer that does not answer.

        While we do not read (`reading`), a missing answer proves nothing.
        """

    def data_to_send(self, bytes_max: int, now: float) -> list[bytes]:
        """The next frames for the connection, about `bytes_max` at most; empty when there are none.

        Control messages come first and are never held back for size. What is returned counts as
        sent: it is not given out again unless it must be sent again.
        """


class ClientSession(LinkedSession[Event], Protocol):
    """Publishes to and subscribes to topics."""

    latency_s: float | None
    """Round trip of the last answered ping, None before the first."""

    @property
    def unacknowledged(self) -> int:
        """How many publishes wait for their acknowledgement."""

    @property
    def has_room(self) -> bool:
        """Whether `publish` would be taken now."""

    def close(self) -> None:
        """The application is done; nothing follows."""

    def publish(self, topic: str, payload: bytes) -> int:
        """Take a publish, also without a connection. Returns its number, counted from 0.

        Raises BadTopicNameError, PayloadTooLargeError or WindowFullError; nothing is sent then.
        """

    def attach(self, topic: str, place: Place | None) -> Place | None:
        """Ask for a topic from an offset or a serial, or from its end.

        Returns the place as the protocol names it. Raises LocalProtocolError for a place that the
        protocol does not have.
        """

    def detach(self, topic: str) -> bool:
        """Ask for a topic no more. Nothing of it is delivered after this.

        Returns whether a `Detached` will come for it, unless the connection is lost before.
        """

    def read(self, topic: str, reader: str, *, newest: bool, window: int, instance: int) -> None:
        """Ask for a topic under a reader's name; `detach` ends that too.

        `window`: how much may be delivered ahead of `handled`; `instance`: a random number of this client.
        Raises BadReaderNameError, and LocalProtocolError without pings.
        """

    def handled(self, topic: str, offset: int) -> bool:
        """The application has handled the message of a reader that ends at `offset`.

        False if the message is not, or no longer, this client's to handle.
        """

    def handled_up_to(self, topic: str) -> int:
        """The offset up to which every message of a reader was handled; 0 where nothing is read."""

    def pause(self, topic: str) -> None:
        """Detach a topic that is wanted, and remember where it stopped."""

    def resume(self, topic: str) -> None:
        """Attach a paused topic where it stopped."""


def offset_of(place: Place) -> int | None:
    """Return the offset that a place tells; None for the serial of another server than Headrace."""
    if isinstance(place, int):
        return place
    # Not the expression of `wire/wombat.py`: this is done for every message received.
    epoch, at, offset = place.partition("@")
    is_ours = at and offset.isdecimal() and len(offset) <= 20 and (not epoch or epoch.isdecimal())
    return int(offset) if is_ours else None


def serial_of(place: Place) -> str | None:
    """Return the serial that a place is; None for an offset."""
    return place if isinstance(place, str) else None


def missed(topic: str, asked: Place, got: Place) -> Missed:
    return Missed(topic, offset_of(asked), offset_of(got), serial_of(asked), serial_of(got))


def check_topic_type(topic: object) -> None:
    """Raise TypeError for what is no text, in words of the API and not of its inside."""
    if not isinstance(topic, str):
        raise TypeError(f"a topic is str, not {type(topic).__name__}")


def check_payload(payload: bytes) -> None:
    """Raise PayloadTooLargeError for what every server refuses: it would be resent for ever."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise PayloadTooLargeError(
            f"a payload may have {PAYLOAD_BYTES_MAX} bytes, this one has {len(payload)}"
        )
