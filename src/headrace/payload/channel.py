"""Format of a channel message in its topic: a MessagePack array of processor, number and content.

The content is either bytes or a string with the JSON text, unchanged. Each message has exactly one valid
encoding, with the shortest header for each part. So all messages of a processor begin with the same bytes,
and no message of another processor begins with them.

In an upload a message may have the number 0: the broker numbers it when its batch is appended
(`broker/channel/batch_messages.py`). `encode_row` and `decode_row` also take such messages.
"""

import re
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from headrace.errors import HeadraceError
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload.json_limits import BadJSONError, decode_json

PROCESSOR_BYTES_MAX = 255
"""Maximum length of a processor's name, in bytes of UTF-8."""

NUMBER_MAX = (1 << 53) - 1
"""Largest message number; numbers start at 1. JavaScript represents all integers up to this one exactly."""


class BadMessageError(HeadraceError, ValueError):
    """A payload is not a valid channel message, or a message cannot be encoded: the text says why."""


class MessageTooLargeError(BadMessageError):
    """The payload of the caller's message is over the limit: split the message."""


class Content(NamedTuple):
    """JSON text or bytes: the content of a message, or a state."""

    data: bytes
    is_json: bool
    """True if `data` is JSON text. Then `check_json` has accepted it, and nothing here checks it again."""


class StoredMessage(NamedTuple):
    processor: str
    """Name of the sender."""
    number: int
    """Number of the message among those of its processor."""
    content: Content


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, int, Any]).decode

# Constructors of named tuples run in Python, which takes longer than all the rest of decoding.
_new = tuple.__new__


def encode_message(message: StoredMessage) -> bytes:
    """Return the payload of a message. Raises `BadMessageError`."""
    processor, number, (data, is_json) = message
    check_processor(processor)
    if not 1 <= number <= NUMBER_MAX:
        raise BadMessageError(f"the number of a message is 1 to {NUMBER_MAX}, this one is {number}")
    try:
        payload = _encode((processor, number, data.decode() if is_json else data))
    except UnicodeDecodeError as error:
        raise BadMessageError(f"its content is not JSON: {error}") from None
    _check_size(len(payload))
    return payload


def decode_message(payload: bytes) -> StoredMessage:
    """Return the message in a payload. Raises `BadMessageError`.

    JSON is checked to be UTF-8, but not parsed.
    """
    try:
        fields = _decode(payload)
        processor, number, content = fields
        check_processor(processor)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, BadMessageError) as error:
        raise BadMessageError(f"this is not a channel message: {error}") from None
    is_json = type(content) is str
    if not is_json and type(content) is not bytes:
        raise BadMessageError(
            "this is not a channel message: its content is neither a string nor bytes"
        )
    if not 1 <= number <= NUMBER_MAX:
        raise BadMessageError(f"this is not a channel message: its number is {number}")
    if _encode(fields) != payload:
        raise BadMessageError("this is not a channel message: its headers are not the shortest")
    return _new(
        StoredMessage,
        (processor, number, _new(Content, (content.encode() if is_json else content, is_json))),
    )


def prefix_of(processor: bytes) -> bytes:
    """Return the bytes that all messages of this processor, and no other messages, begin with."""
    return _HEADERS[len(processor)] + processor


_HEADERS = [
    bytes([0x93, 0xA0 | size]) if size < 32 else bytes([0x93, 0xD9, size])
    for size in range(PROCESSOR_BYTES_MAX + 1)
]
"""Headers by the length of the processor's name: of the array of three, and of the name string."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


# Every message has a name to check, and there are only a few different names.
@lru_cache(maxsize=4096)
def check_processor(name: str) -> None:
    """Raise BadMessageError unless `name` is a valid processor name. The error says what is wrong."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise BadMessageError("a processor's name must be valid UTF-8") from None
    if not size:
        raise BadMessageError("a processor's name must not be empty")
    if size > PROCESSOR_BYTES_MAX:
        raise BadMessageError(
            f"a processor's name may have {PROCESSOR_BYTES_MAX} bytes of UTF-8, this one has {size}"
        )
    if _CONTROL.search(name):
        raise BadMessageError(f"a processor's name has no control characters: {name!r}")


def check_json(data: bytes) -> None:
    """Raise BadMessageError unless `data` is JSON in UTF-8 within the limits."""
    try:
        decode_json(data)
    except BadJSONError as error:
        raise BadMessageError(f"its content {error}") from None


UNNUMBERED = 0

_ROOM_BYTES = 8
"""Number of bytes that the largest message number takes more than the smallest."""

_ZERO, _ONE = b"\x00", b"\x01"
_LONG_NAME = 0xD9


def encode_row(message: StoredMessage) -> bytes:
    """Return the payload of a message, which may be unnumbered. Raises BadMessageError."""
    if message.number != UNNUMBERED:
        return encode_message(message)
    payload = encode_message(message._replace(number=1))
    _check_size(len(payload) + _ROOM_BYTES)
    at = len(prefix_of(message.processor.encode()))
    return payload[:at] + _ZERO + payload[at + 1 :]


def decode_row(payload: bytes) -> StoredMessage:
    """Return the message in a payload; it may be unnumbered. Raises BadMessageError.

    JSON is checked to be UTF-8, but not parsed.
    """
    at = _number_at(payload)
    if payload[at : at + 1] != _ZERO:
        return decode_message(payload)
    _check_size(len(payload) + _ROOM_BYTES)
    return decode_message(payload[:at] + _ONE + payload[at + 1 :])._replace(number=UNNUMBERED)


def check_row(payload: bytes) -> None:
    """Raise BadMessageError for a payload that no processor could have sent."""
    content = decode_row(payload).content
    if content.is_json:
        check_json(content.data)


def _number_at(payload: bytes) -> int:
    """Return the index of the number's first byte, if the payload is a message."""
    if len(payload) < 3:
        return len(payload)
    return 3 + payload[2] if payload[1] == _LONG_NAME else 2 + (payload[1] & 0x1F)


def _check_size(size: int) -> None:
    if size > PAYLOAD_BYTES_MAX:
        raise MessageTooLargeError(
            f"a message with its processor and number may have {PAYLOAD_BYTES_MAX} bytes, "
            f"this one has {size}"
        )
