"""Definitions that all layers share: limits, durabilities and positions. Has no behaviour except checks."""

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from headrace.errors import BadReaderNameError, BadTopicNameError
from headrace.printing import quoted

PAYLOAD_BYTES_MAX = 262_144
"""Maximum payload of one record (256 KB, the limit of Figg), inclusive."""

RECORD_HEADER_BYTES = 4
"""Bytes of a record's header, a big-endian uint32 size. The payload follows, on disk and on the Figg wire."""

TOPIC_BYTES_MAX = 255
"""Maximum length of an ordinary topic name, in bytes of UTF-8."""

RESERVED_TOPIC_BYTES_MAX = 256
"""Maximum length of a reserved topic name, in bytes of UTF-8.

When the prefixes of channels and Logux logs were one byte shorter, their names could be so long that the
present prefixes make 256 bytes.
"""

READER_BYTES_MAX = 255
"""Maximum length of the name of a reader with cursors, in bytes of UTF-8."""

TOKEN_BYTES_MAX = 8192
"""Maximum length of an access token. A JWT with a few dozen grants has about 2 KiB."""

JUMP = 1 << 32
"""Jump of a topic's offsets and ordinals after a loss of records that clients may have seen."""

LOGUX_PREFIX = "$logux/"
"""Prefix of topics that are Logux logs. Their records are events in envelopes."""

CHANNEL_PREFIX = "$channel/"
"""Prefix of topics that are logs of channels. Their records are messages in envelopes."""

AUDIT_TOPIC = "$audit"
"""Topic of the audit trail. Only the server publishes there."""

ENVELOPE_PREFIXES = (LOGUX_PREFIX, CHANNEL_PREFIX)
"""Prefixes of topics whose records have an envelope. Only their own protocols publish there."""

OLD_PREFIXES = tuple(prefix.removeprefix("$") for prefix in ENVELOPE_PREFIXES)
"""The same prefixes in earlier versions."""
_OLD_PREFIXES = tuple(prefix.encode() for prefix in OLD_PREFIXES)

LAKE_READER = "lake"
"""The reader whose cursors are the positions up to which topics are in the lake."""

LAKE_START_READER = "lake:start"
"""The reader whose cursors are the positions from which on topics are in the lake."""


class Durability(StrEnum):
    """Durability that an acknowledgement promises."""

    SYNCED = "synced"
    """The record is on disk: it survives a crash of the machine."""
    WRITTEN = "written"
    """The operating system has the record: it survives a killed process. Fsync follows about every second."""
    MEMORY = "memory"
    """The record is never on disk. For tests and temporary topics."""


class Position(NamedTuple):
    """A place between two records of one life of a topic."""

    epoch: int
    """Identity of the topic's life. A topic that is created again has a greater epoch."""
    offset: int
    """Byte position in the topic's log. It never goes backwards, not even in a new epoch."""
    ordinal: int
    """Number of records before the position."""


class Span(NamedTuple):
    """Number of records and bytes between two positions of one topic."""

    records: int
    bytes: int

    @classmethod
    def between(cls, first: Position, last: Position) -> "Span":
        """Count records and bytes, without the jumps between the positions, in which nothing is stored.

        A jump adds `JUMP` to both offsets and ordinals. So both counts are exact as long as fewer than
        `JUMP` records lie between the positions. A store knows its segments and needs no such bound.
        """
        records, size = max(0, last.ordinal - first.ordinal), max(0, last.offset - first.offset)
        jumps = min(records, size) // JUMP
        return cls(records - jumps * JUMP, size - jumps * JUMP)


def check_topic_name(name: str) -> bytes:
    """Return the name's bytes, or raise BadTopicNameError with the reason."""
    bytes_max = RESERVED_TOPIC_BYTES_MAX if name.startswith("$") else TOPIC_BYTES_MAX
    return _checked(name, "a topic name", bytes_max, BadTopicNameError)


def topic_bytes_max(name: bytes) -> int:
    """Return the maximum length of a topic name with the same prefix, in bytes."""
    return RESERVED_TOPIC_BYTES_MAX if name.startswith(b"$") else TOPIC_BYTES_MAX


def check_reader_name(name: str) -> bytes:
    """Return the name's bytes, or raise BadReaderNameError with the reason."""
    return _checked(name, "a reader's name", READER_BYTES_MAX, BadReaderNameError)


def _checked(name: str, what: str, bytes_max: int, error: type[Exception]) -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise error(f"{what} must be valid UTF-8") from None
    if not encoded:
        raise error(f"{what} must not be empty")
    if len(encoded) > bytes_max:
        raise error(f"{what} may have {bytes_max} bytes of UTF-8, this one has {len(encoded)}")
    return encoded


def check_upload_topic(topic: str, prefixes: Collection[str]) -> None:
    """Raise BadTopicNameError unless the topic is ordinary or begins with one of the prefixes."""
    prefix = next((prefix for prefix in prefixes if topic.startswith(prefix)), None)
    if prefix is None:
        check_publish_topic(topic)
    elif topic == prefix:
        raise BadTopicNameError(f"topic {topic!r} is only a prefix: a name is missing behind it")
    else:
        check_topic_name(topic)


def check_publish_topic(name: str) -> bytes:
    """Return the bytes of a name to which payloads without an envelope may be published.

    Raises BadTopicNameError for a reserved or invalid name.
    """
    encoded = check_topic_name(name)
    if is_reserved(name):
        raise BadTopicNameError(reserved_reason(name))
    return encoded


def is_reserved(name: str) -> bool:
    """Return True for a topic that clients of Figg and Wombat can read, but cannot publish to."""
    return name.startswith("$")


def reserved_reason(name: str) -> str:
    """Return the reason why a client cannot publish to a reserved topic."""
    topic = quoted(name)
    if name.startswith(ENVELOPE_PREFIXES):
        return f"topic {topic} is published to by its own protocol only"
    return f'topic {topic} is reserved, as every name that begins with "$": choose another name'


def closed_reason(name: str) -> str:
    """Return the reason why nothing can be published to a closed topic."""
    return f"topic {quoted(name)} is closed: it takes no more records"


def present_name(name: bytes) -> bytes:
    """Return the present name of a topic, given its name in an earlier version."""
    return b"$" + name if name.startswith(_OLD_PREFIXES) else name


def legacy_name(name: str) -> str:
    """Return the name of a reserved topic in earlier versions. No other topic gets the same result.

    Used for hashes of names, which must not change between versions.
    """
    if name.startswith(ENVELOPE_PREFIXES):
        return name.removeprefix("$")
    return f"${name}" if name.startswith(OLD_PREFIXES) else name


class Refusal(StrEnum):
    """Reason why a publish is always refused, however often it is sent."""

    RESERVED_TOPIC = "reserved_topic"
    EMPTY_TOPIC = "empty_topic"
    LONG_TOPIC = "long_topic"
    BAD_TOPIC = "topic_not_utf8"
    LARGE_PAYLOAD = "large_payload"
    TOPICS_MAX = "topics_max"
    CLOSED_TOPIC = "closed_topic"
    """A stream of HTTP that its writer has closed."""
    FORBIDDEN = "forbidden"
    """The peer has no grant for this topic. With other credentials the same publish may be accepted."""


class RefusedPublish(NamedTuple):
    """A publish that is always refused, however often it is sent."""

    why: Refusal
    number: int | None
    """Number of the publish on the wire; None if it was refused before the number had arrived."""


def refusal_of(topic: bytes, payload_bytes: int) -> Refusal | None:
    """Return the reason to refuse a publish with this topic name and payload size; None to accept it."""
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
