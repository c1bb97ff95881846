"""The words every layer shares: limits, durabilities and positions. No behaviour beyond checking them."""

from enum import StrEnum
from typing import NamedTuple

from headrace.errors import BadReaderNameError, BadTopicNameError

PAYLOAD_BYTES_MAX = 262_144
"""The largest payload of one record (the Figg seed's 256 KB), inclusive."""

RECORD_HEADER_BYTES = 4
"""A record on disk and on the Figg wire is a big-endian uint32 size and the payload."""

TOPIC_BYTES_MAX = 255
"""The longest ordinary topic name, in bytes of UTF-8."""

RESERVED_TOPIC_BYTES_MAX = 256
"""The longest reserved topic name: channels and logs of Logux could have such names when their prefixes
were one byte shorter."""

READER_BYTES_MAX = 255
"""The longest name of a reader that has cursors, in bytes of UTF-8."""

JUMP = 1 << 32
"""How far offsets and ordinals of a topic skip ahead when records that clients may have seen are lost."""

LOGUX_PREFIX = "$logux/"
"""Topics that are logs of Logux: their records are events in envelopes."""

CHANNEL_PREFIX = "$channel/"
"""Topics that are logs of channels: their records are messages in envelopes."""

ENVELOPE_PREFIXES = (LOGUX_PREFIX, CHANNEL_PREFIX)
"""Name spaces whose records have an envelope: only their own protocols publish there."""

RESERVED_MARK = "$"
"""Every name that begins with it is reserved: clients read such topics and do not publish to them."""

OLD_PREFIXES = {name.removeprefix("$"): name for name in ENVELOPE_PREFIXES}
"""Earlier prefixes of the reserved name spaces, with the present ones."""

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
    if len(encoded) > topic_bytes_max(encoded):
        raise BadTopicNameError(
            f"a topic name may have {topic_bytes_max(encoded)} bytes of UTF-8, this one has {len(encoded)}"
        )
    return encoded


def topic_bytes_max(name: bytes) -> int:
    """Return how long a name that begins like this one may be."""
    return RESERVED_TOPIC_BYTES_MAX if name.startswith(b"$") else TOPIC_BYTES_MAX


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
    if is_reserved(name):
        raise BadTopicNameError(reserved_reason(name))
    return encoded


def is_reserved(name: str) -> bool:
    """Return True for a topic that no client of Figg or Wombat publishes to."""
    return name.startswith(RESERVED_MARK)


def reserved_reason(name: str) -> str:
    """Return why a client cannot publish to a reserved topic."""
    if name.startswith(ENVELOPE_PREFIXES):
        return f"topic {name!r} is published to by its own protocol only"
    return f"topic {name!r} is reserved, as every name that begins with '$': choose another name"


def present_name(name: bytes) -> bytes:
    """Return the present name of a topic that an earlier version has named."""
    return b"$" + name if name.startswith(_OLD_PREFIXES) else name


def legacy_name(name: str) -> str:
    """Return what a reserved topic was called by earlier versions, and never that for another topic.

    For hashes of names that must stay what they were.
    """
    if name.startswith(ENVELOPE_PREFIXES):
        return name.removeprefix("$")
    return f"${name}" if name.startswith(tuple(OLD_PREFIXES)) else name


_OLD_PREFIXES = tuple(prefix.encode() for prefix in OLD_PREFIXES)


class Refusal(StrEnum):
    """Why a publish is refused however often it comes."""

    RESERVED_TOPIC = "reserved_topic"
    EMPTY_TOPIC = "empty_topic"
    LONG_TOPIC = "long_topic"
    BAD_TOPIC = "topic_not_utf8"
    LARGE_PAYLOAD = "large_payload"


class RefusedPublish(NamedTuple):
    """A publish that is refused however often it comes."""

    why: Refusal
    number: int | None
    """Its number on the wire; None when it was refused before the number had come."""


def refusal_of(topic: bytes, payload_bytes: int) -> Refusal | None:
    """Return why a publish with this name and size of payload is refused; None if it is not."""
    if not topic:
        return Refusal.EMPTY_TOPIC
    if len(topic) > topic_bytes_max(topic):
        return Refusal.LONG_TOPIC
    try:
        name = topic.decode()
    except UnicodeDecodeError:
        return Refusal.BAD_TOPIC
    if is_reserved(name):
        return Refusal.RESERVED_TOPIC
    return Refusal.LARGE_PAYLOAD if payload_bytes > PAYLOAD_BYTES_MAX else None
