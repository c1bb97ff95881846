"""Wombat messages and encoders, for both sides. Elsewhere: decoding (`decoder.py`).

A message is one MessagePack map, `{"type": number, "name": {fields}}`, in one binary WebSocket message. A
server's messages are encoded with their WebSocket frames; a client's transport frames and masks its messages.
The `message` of a PAYLOAD is sent as MessagePack's `bin 32`: behind its first byte it equals the log's
record, a big-endian `uint32` size and the payload, so records are sent as they are stored on disk.

A *serial* is `EPOCH@OFFSET` in decimal. The offset is the one just past the message, as in Figg. A token of
Durable Streams, which has `_` instead of `@`, is understood too.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from headrace.model import PAYLOAD_BYTES_MAX, RefusedPublish
from headrace.wire import readers, tokens, websocket

ATTACH, ATTACHED, PUBLISH, ACK, PAYLOAD, PING, PONG, DETACH, DETACHED = range(1, 10)
"""DETACH, DETACHED, named readers and tokens are extensions of Headrace."""
_OWN = ("attach", "attached", "publish", "ack", "payload", "ping", "pong", "detach", "detached")
NAMES = dict(enumerate(_OWN, ATTACH)) | readers.NAMES | tokens.NAMES

MESSAGE_BYTES_MAX = 2 * PAYLOAD_BYTES_MAX + 4096
"""Size limit of a message: some encoders write a byte array as integers, with up to two bytes for each."""

SEQUENCE_NUMBERS = 1 << 32
"""Number of sequence numbers: they are `uint32`, and 0 follows the last."""

PATH = "/v1/ws"

_SERIAL = re.compile(r"([0-9]{1,20})?[@_]([0-9]{1,20})", re.ASCII)
_OFFSET_MAX = (1 << 64) - 1
_BIN_32 = b"\xc6"

_pack = msgspec.msgpack.encode

Number = Annotated[int, Meta(ge=0, lt=SEQUENCE_NUMBERS)]
"""Sequence number on the wire."""


class Serial(NamedTuple):
    epoch: int | None
    """None: the topic's present epoch."""
    offset: int


class Attach(Struct, frozen=True):
    topic: str
    serial: str | None = None
    """None: from the end of the topic."""


class Attached(Struct, frozen=True):
    topic: str
    serial: str


class Detach(Struct, frozen=True):
    topic: str


class Detached(Struct, frozen=True):
    topic: str


class Publishes(NamedTuple):
    """All publishes of one read, by topic."""

    records: dict[str, list[bytes]]
    numbers: dict[str, list[int]]
    """Parallel to `records`: the sequence number of each record."""
    in_order: bool
    """True if each number follows the number before it, regardless of the topic."""


class Ack(Struct, frozen=True):
    topic: str
    number: Number = msgspec.field(name="sequence_number")


class Payloads(NamedTuple):
    """Consecutive PAYLOAD messages of one topic: the serial of each, and its payload."""

    topic: str
    messages: list[tuple[str, bytes]]


class Ping(NamedTuple):
    timestamp: bytes
    """MessagePack bytes of a number of any type: PONG returns them unchanged."""


class Pong(Struct, frozen=True):
    timestamp: int


class Bad(NamedTuple):
    """The peer broke the protocol at this point; the messages behind it are not read."""

    code: int
    """Close code for the WebSocket."""
    reason: str
    refused: RefusedPublish | None = None
    """Set if this is a publish that the server would refuse every time."""


ToServer = Attach | Detach | Publishes | Ping | readers.ToServer | tokens.Auth | Bad
ToClient = Attached | Detached | Ack | Payloads | Pong | readers.ToClient | tokens.ToClient | Bad


def make_serial(epoch: int, offset: int) -> str:
    return f"{epoch}@{offset}"


def parse_serial(text: str) -> Serial | None:
    """Parse a serial; None if it does not have the form of Headrace's serials."""
    found = _SERIAL.fullmatch(text)
    if found is None or int(found[2]) > _OFFSET_MAX:
        return None
    return Serial(None if found[1] is None else int(found[1]), int(found[2]))


# Messages from server to client, with their WebSocket frames.


def encode_attached(topic: str, serial: str) -> bytes:
    return _framed(ATTACHED, Attached(topic, serial))


def encode_detached(topic: str) -> bytes:
    return _framed(DETACHED, Detached(topic))


def encode_ack(topic: str, number: int) -> bytes:
    return _framed(ACK, Ack(topic, number))


def encode_pong(timestamp: bytes) -> bytes:
    return _framed(PONG, {"timestamp": msgspec.Raw(timestamp)})


def encode_payloads(topic: str, epoch: int, offset: int, records: Sequence[bytes]) -> bytes:
    """Encode consecutive records as PAYLOAD messages. The first record begins at `offset`."""
    sizes = list(map(len, records))
    ends = list(accumulate(sizes, initial=offset))[1:]
    digits = len(str(ends[0]))
    if ends[-1] >= 10**digits:
        # The offsets from here on have one more digit, which changes the sizes of message and frame.
        more = bisect_left(ends, 10**digits)
        return encode_payloads(topic, epoch, offset, records[:more]) + encode_payloads(
            topic, epoch, ends[more - 1], records[more:]
        )
    # One formatting operation serves all records: the work per record happens in C.
    formats = _PayloadFormats(topic, epoch, digits)
    if len(set(sizes)) == 1:
        form = formats[sizes[0]] * len(sizes)
    else:
        form = b"".join(map(formats.__getitem__, sizes))
    return form % tuple(chain.from_iterable(zip(ends, records, strict=True)))


def encode_reader_answer(message: readers.ToClient) -> bytes:
    return _framed(readers.TYPES[type(message)], message)


def encode_auth_answer(message: tokens.ToClient) -> bytes:
    return _framed(tokens.TYPES[type(message)], message)


# Messages from client to server, without frames.


def encode_auth(token: str) -> bytes:
    return _message(tokens.AUTH, tokens.Auth(token))


def encode_of_reader(message: readers.ToServer) -> bytes:
    if isinstance(message, readers.Handled):
        return _message(readers.HANDLED, message)
    start = "newest" if message.newest else "oldest"
    names = {"topic": message.topic, "reader": message.reader, "start": start}
    return _message(readers.READ, names | {"instance": message.instance, "window": message.window})


def encode_attach(topic: str, serial: str | None) -> bytes:
    fields = {"topic": topic} if serial is None else {"topic": topic, "serial": serial}
    return _message(ATTACH, fields)


def encode_detach(topic: str) -> bytes:
    return _message(DETACH, Detach(topic))


def encode_publish(topic: str, number: int, payload: bytes) -> bytes:
    number %= SEQUENCE_NUMBERS
    return _message(PUBLISH, {"topic": topic, "message": payload, "sequence_number": number})


def encode_ping(timestamp: int) -> bytes:
    return _message(PING, {"timestamp": timestamp})


def _message(kind: int, fields: Mapping[str, object] | Struct) -> bytes:
    return _pack({"type": kind, NAMES[kind]: fields})


def _framed(kind: int, fields: Mapping[str, object] | Struct) -> bytes:
    return websocket.frame(_message(kind, fields))


_BEFORE_RECORD = _pack("message") + _BIN_32


class _PayloadFormats(dict[int, bytes]):
    """Cache of formats, by record size: a framed PAYLOAD in which offset and record are filled in."""

    def __init__(self, topic: str, epoch: int, digits: int) -> None:
        serial_bytes = len(str(epoch)) + 1 + digits
        # MessagePack's header for a string of that length.
        serial_head = _pack("-" * serial_bytes)[:-serial_bytes]
        self._before = _before_serial(topic) + serial_head + b"%d@" % epoch
        self._digits = digits

    def __missing__(self, record_bytes: int) -> bytes:
        size = len(self._before) + self._digits + len(_BEFORE_RECORD) + record_bytes
        before = (websocket.head(size) + self._before).replace(b"%", b"%%")
        made = self[record_bytes] = before + b"%d" + _BEFORE_RECORD + b"%b"
        return made


_TOPICS_CACHED_MAX = 1024
"""Limit of cached topic encodings: a delivery has few topics at a time."""


@lru_cache(maxsize=_TOPICS_CACHED_MAX)
def _before_serial(topic: str) -> bytes:
    """Encode a PAYLOAD message up to the value of its serial, the second of three fields."""
    whole = _message(PAYLOAD, {"topic": topic, "serial": None, "message": None})
    return whole[: -len(_pack(None) + _pack("message") + _pack(None))]
