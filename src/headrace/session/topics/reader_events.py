"""Events of a client session about topics that are read under a name."""

from typing import NamedTuple

from headrace.model import Position


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
