"""What a client session says about topics that are read under a name."""

from typing import NamedTuple

from headrace.model import Position


class ReaderWaiting(NamedTuple):
    """Other clients read under this name, or come first."""

    topic: str
    ahead: int


class ReaderActive(NamedTuple):
    """This client reads; records follow that begin at `position`."""

    topic: str
    position: Position


class ReadMessages(NamedTuple):
    """Consecutive messages with one time: the offset just past each, and its payload."""

    topic: str
    epoch: int
    ordinal: int
    """How many records of the topic precede the first of them."""
    ms: int
    """When they were stored, in Unix milliseconds."""
    messages: list[tuple[int, bytes]]


class ReaderStored(NamedTuple):
    """Everything up to `offset` is acknowledged, durably."""

    topic: str
    offset: int


class ReaderLost(NamedTuple):
    """Messages that this client was given and has not acknowledged may be in other hands."""

    topic: str
    reason: str


class ReaderFailed(NamedTuple):
    """The topic is not read: the reader is refused, or the server does not know readers."""

    topic: str
    reason: str


ReaderEvent = ReaderWaiting | ReaderActive | ReadMessages | ReaderStored | ReaderLost | ReaderFailed
