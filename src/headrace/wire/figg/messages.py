"""Figg messages and encoders, for both sides. Elsewhere: decoding (`decoder.py`).

A frame is a header (`uint16` type, `uint16` version, `uint32` payload size) and its payload, big-endian. The
`data` field of PUBLISH and DATA, with its length, is a record of the log: it is sliced once, never rebuilt.
"""

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, chain, repeat
from typing import NamedTuple

from msgspec.structs import astuple

from headrace.model import RefusedPublish
from headrace.wire import readers, tokens

VERSION = 1

ATTACH, ATTACHED, DETACH, DETACHED, PUBLISH, ACK, DATA, PING, PONG = range(1, 10)

FLAG_FROM_OFFSET = 0x8000
"""Flag that our client sets in ATTACH: "bit 1" counted from the left, as in the existing SDK."""
FLAGS_FROM_OFFSET = 0x8001
"""Flags that the server accepts in ATTACH: "bit 1" counted from either end."""

FLAG_NEWEST = 0x0001
"""In READ: a reader without a cursor starts at the end of the topic."""
FLAG_EXACT = 0x0001
"""In READING: delivery starts at the cursor."""

HEADER = struct.Struct(">HHI")
U16 = struct.Struct(">H")
U32 = struct.Struct(">I")
U64 = struct.Struct(">Q")
_RECORDS_TAIL = struct.Struct(">QQQQ")
TAILS = {
    readers.READ: struct.Struct(">QQ"),
    readers.WAITING: U32,
    readers.READING: struct.Struct(">QHQQQQ"),
    readers.RECORDS: _RECORDS_TAIL,
    readers.HANDLED: struct.Struct(">QQQ"),
    readers.STORED: struct.Struct(">QQ"),
    readers.LOST: U16,
}
"""Messages of named readers: the fixed fields behind the names."""

_FIELDS_CACHED_MAX = 1024
"""Limit of cached topic fields: a publisher or a delivery has few topics at a time."""


class Attach(NamedTuple):
    topic: str
    offset: int | None
    """None: from the end of the topic."""


class Attached(NamedTuple):
    topic: str
    offset: int


class Detach(NamedTuple):
    topic: str


class Detached(NamedTuple):
    topic: str


class Publishes(NamedTuple):
    """All publishes of one read, by topic, in the order of arrival."""

    records: dict[str, list[bytes]]
    lowest: int
    highest: int
    """`lowest` and `highest` sequence number: concurrent callers of the SDK may send out of order."""


class Ack(NamedTuple):
    seq_num: int


class Data(NamedTuple):
    """Consecutive DATA frames of one topic: the offset just past each record, and its payload."""

    topic: str
    messages: list[tuple[int, bytes]]


class Ping(NamedTuple):
    timestamp: int


class Pong(NamedTuple):
    timestamp: int


class Bad(NamedTuple):
    """The peer broke the protocol at this point; the bytes behind it are not read."""

    reason: str
    refused: RefusedPublish | None = None
    """Set if this is a publish that the server would refuse every time."""


ToServer = Attach | Detach | Publishes | Ping | readers.ToServer | tokens.Auth | Bad
ToClient = Attached | Detached | Ack | Data | Pong | readers.ToClient | tokens.ToClient | Bad


def encode_attach(topic: str, offset: int | None) -> bytes:
    flags = 0 if offset is None else FLAG_FROM_OFFSET
    return _frame(ATTACH, U16.pack(flags) + _topic_field(topic) + U64.pack(offset or 0))


def encode_attached(topic: str, offset: int) -> bytes:
    return _frame(ATTACHED, _topic_field(topic) + U64.pack(offset))


def encode_detach(topic: str) -> bytes:
    return _frame(DETACH, _topic_field(topic))


def encode_detached(topic: str) -> bytes:
    return _frame(DETACHED, _topic_field(topic))


def encode_publish(topic: str, seq_num: int, payload: bytes) -> bytes:
    field = _topic_field(topic)
    length = len(payload)
    head = publish_struct(len(field)).pack(
        PUBLISH, VERSION, len(field) + 12 + length, field, seq_num, length
    )
    return head + payload


def encode_ack(seq_num: int) -> bytes:
    return _frame(ACK, U64.pack(seq_num))


def encode_ping(timestamp: int) -> bytes:
    return _frame(PING, U64.pack(timestamp))


def encode_pong(timestamp: int) -> bytes:
    return _frame(PONG, U64.pack(timestamp))


def encode_auth(token: str) -> bytes:
    return _frame(tokens.AUTH, token.encode())


def encode_auth_answer(message: tokens.ToClient) -> bytes:
    if isinstance(message, tokens.AuthOk):
        return _frame(tokens.AUTH_OK, U64.pack(message.valid_ms))
    reason = message.reason.encode()[: tokens.REASON_BYTES_MAX]
    return _frame(tokens.AUTH_REFUSED, U16.pack(message.code) + reason)


def encode_data(topic: str, offset: int, records: Sequence[bytes]) -> bytes:
    """Encode consecutive records as DATA frames. The first record begins at `offset`."""
    heads = _DataHeads(topic)
    sizes = list(map(len, records))
    ends = accumulate(sizes, initial=offset)
    next(ends)
    # All work per record happens in C loops. Records of equal size share one head.
    uniform = len(set(sizes)) == 1
    head = repeat(heads[sizes[0]]) if uniform else map(heads.__getitem__, sizes)
    return b"".join(chain.from_iterable(zip(head, map(U64.pack, ends), records, strict=False)))


def encode_records(message: readers.Records) -> bytes:
    tail = _RECORDS_TAIL.pack(message.epoch, message.offset, message.ordinal, message.ms)
    return _frame(readers.RECORDS, _topic_field(message.topic) + tail + message.data)


def encode_of_reader(message: readers.ToServer | readers.ToClient) -> bytes:
    """Encode any message of a named reader."""
    if isinstance(message, readers.Records):
        return encode_records(message)
    kind, (topic, *fields) = readers.TYPES[type(message)], astuple(message)
    before, after = _topic_field(topic), b""
    if isinstance(message, readers.Read):
        flags = FLAG_NEWEST if message.newest else 0
        before = U16.pack(flags) + before + _topic_field(message.reader)
        fields = [message.instance, message.window]
    elif isinstance(message, readers.Reading):
        grant, asked, exact, *position = fields
        fields = [grant, FLAG_EXACT if exact else 0, asked, *position]
    elif isinstance(message, readers.Lost):
        after = fields.pop().encode()[: readers.REASON_BYTES_MAX]
    return _frame(kind, before + TAILS[kind].pack(*fields) + after)


class _DataHeads(dict[int, bytes]):
    """Cache of the bytes before the offset in a DATA frame, by record size."""

    def __init__(self, topic: str) -> None:
        self._field = _topic_field(topic)

    def __missing__(self, record_bytes: int) -> bytes:
        size = len(self._field) + 8 + record_bytes
        head = self[record_bytes] = HEADER.pack(DATA, VERSION, size) + self._field
        return head


def _frame(kind: int, body: bytes) -> bytes:
    return HEADER.pack(kind, VERSION, len(body)) + body


@lru_cache(maxsize=_FIELDS_CACHED_MAX)
def _topic_field(topic: str) -> bytes:
    encoded = topic.encode()
    return U32.pack(len(encoded)) + encoded


@cache
def publish_struct(field_bytes: int) -> struct.Struct:
    """Return the struct of a PUBLISH or DATA before its payload, for a topic field of `field_bytes`.

    It has the header, the topic field, the number and the payload size.
    """
    return struct.Struct(f">HHI{field_bytes}sQI")
