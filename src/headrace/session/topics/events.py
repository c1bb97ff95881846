"""Events of Figg and Wombat client sessions, and places in topics, as both protocols name them."""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.errors import LocalProtocolError, PayloadTooLargeError
from headrace.model import JUMP, PAYLOAD_BYTES_MAX, Position
from headrace.session.client import Broken, ConnectionRefused, Finished

_OFFSET_MAX = 2**64 - 1

Place = int | str
"""A place in a topic, as its protocol names it: an offset (Figg) or a serial (Wombat).

A serial is an opaque text: it is stored, compared and sent back. Only a serial in the form of a Headrace
server contains an offset (`offset_of`), and nothing depends on that.
"""


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


class ReaderWaiting(NamedTuple):
    """Other clients read under this name, or come before this client."""

    topic: str
    ahead: int


class ReaderActive(NamedTuple):
    """This client reads now. The records that follow begin at `position`."""

    topic: str
    position: Position


class ReadMessages(NamedTuple):
    """Consecutive messages with the same time: the offset just past each, and its payload."""

    topic: str
    epoch: int
    ordinal: int
    """Number of records of the topic that precede the first message."""
    ms: int
    """Time when the messages were stored, in Unix milliseconds."""
    messages: list[tuple[int, bytes]]


class ReaderStored(NamedTuple):
    """The acknowledgement of everything up to `offset` is durable."""

    topic: str
    offset: int


class ReaderSure(NamedTuple):
    """The server has answered the ping for which `make_sure` was waiting."""

    topic: str


class ReaderLost(NamedTuple):
    """Another client may have received the messages that this client has and has not acknowledged."""

    topic: str
    reason: str


class ReaderFailed(NamedTuple):
    """The topic is not read: the server refuses the reader, or does not know readers."""

    topic: str
    reason: str


ReaderEvent = (
    ReaderWaiting
    | ReaderActive
    | ReadMessages
    | ReaderStored
    | ReaderSure
    | ReaderLost
    | ReaderFailed
)

Event = (
    PublishesAcknowledged
    | PublishRefused
    | TopicAttached
    | TopicDetached
    | Missed
    | TopicMessages
    | ReaderEvent
    | ConnectionRefused
    | Finished
    | Broken
)


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


def check_offset(offset: object) -> int:
    """Return the offset, or raise LocalProtocolError unless it is one."""
    if not (isinstance(offset, int) and 0 <= offset <= _OFFSET_MAX):
        raise LocalProtocolError(f"an offset is a number from 0 to {_OFFSET_MAX}, not {offset}")
    return offset


def check_payload(payload: bytes) -> None:
    """Raise PayloadTooLargeError if every server would refuse the payload: it would be resent forever."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise PayloadTooLargeError(
            f"a payload may have {PAYLOAD_BYTES_MAX} bytes, this one has {len(payload)}"
        )
