"""The words every layer shares: limits, durabilities and positions. No behaviour beyond checking them."""

from enum import StrEnum
from typing import NamedTuple

from headrace.errors import BadReaderNameError, BadTopicNameError

PAYLOAD_BYTES_MAX = 262_144
"""The largest payload of one record (the Figg seed's 256 KB), inclusive."""

RECORD_HEADER_BYTES = 4
"""A record on disk and on the Figg wire is a big-endian uint32 size and the payload."""

TOPIC_BYTES_MAX = 255
"""The longest topic name, in bytes of UTF-8."""

READER_BYTES_MAX = 255
"""The longest name of a reader that has cursors, in bytes of UTF-8."""

JUMP = 1 << 32
"""How far offsets and ordinals of a topic skip ahead when records that clients may have seen are lost."""

LOGUX_PREFIX = "logux/"
"""Topics that are logs of Logux: their records are events in envelopes."""

CHANNEL_PREFIX = "channel/"
"""Topics that are logs of channels: their records are messages in envelopes."""

RESERVED_PREFIXES = (LOGUX_PREFIX, CHANNEL_PREFIX)
"""Name spaces whose records have an envelope: only their own protocols publish there."""


LAKE_READER = "lake"
"""The reader whose cursors say how far topics are in the lake."""

LAKE_START_READER = "lake:start"
"""The reader whose cursors say from where on they are."""


class Durability(StrEnum):
    """What an acknowledgement promises."""

    SYNCED = "synced"
    """On disk: survives a crash of the machine."""
    WRITTEN = "written"
    """Handed to the operating system: survives a killed process, synced every second or so."""
    MEMORY = "memory"
    """Never on disk: for tests and throw-away topics."""


class Position(NamedTuple):
    """A place between two records of one life of a topic."""

    epoch: int
    """The identity of the topic's life: a topic made anew has a greater one."""
    offset: int
    """The byte position in the topic's log. It never goes backwards, whatever the epoch."""
    ordinal: int
    """How many records precede it."""


class Span(NamedTuple):
    """What lies between two positions of one topic."""

    records: int
    bytes: int

    @classmethod
    def between(cls, first: Position, last: Position) -> "Span":
        """Count without the jumps between them, in which nothing is stored.

        A jump adds `JUMP` to offsets and ordinals alike. So both counts are exact as long as fewer than
        `JUMP` records lie between the positions; a store knows its segments and needs no such bound.
        """
        records, size = max(0, last.ordinal - first.ordinal), max(0, last.offset - first.offset)
        jumps = min(records, size) // JUMP
        return cls(records - jumps * JUMP, size - jumps * JUMP)


def check_topic_name(name: str) -> bytes:
    """Return the name's bytes, or raise BadTopicNameError saying what is wrong with it."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise BadTopicNameError("a topic name must be valid UTF-8") from None
    if not encoded:
        raise BadTopicNameError("a topic name must not be empty")
    if len(encoded) > TOPIC_BYTES_MAX:
        raise BadTopicNameError(
            f"a topic name may have {TOPIC_BYTES_MAX} bytes of UTF-8, this one has {len(encoded)}"
        )
    return encoded


def check_reader_name(name: str) -> bytes:
    """Return the name's bytes, or raise BadReaderNameError saying what is wrong with it."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise BadReaderNameError("a reader's name must be valid UTF-8") from None
    if not encoded:
        raise BadReaderNameError("a reader's name must not be empty")
    if len(encoded) > READER_BYTES_MAX:
        raise BadReaderNameError(
            f"a reader's name may have {READER_BYTES_MAX} bytes of UTF-8, this one has {len(encoded)}"
        )
    return encoded


def check_publish_topic(name: str) -> bytes:
    """The same for a topic that is to be published to as it is, without an envelope."""
    encoded = check_topic_name(name)
    if name.startswith(RESERVED_PREFIXES):
        raise BadTopicNameError(f"topic {name!r} is published to by its own protocol only")
    return encoded
