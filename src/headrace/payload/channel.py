"""How a message of a channel lies in its topic: a MessagePack array of processor, number and content.

Content is a string with JSON text, kept as it came, or bytes. There is one way to write a message, with the
shortest header of each part: so all messages of a processor begin alike, and those of no other do.
"""

import re
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from headrace.errors import HeadraceError
from headrace.json_limits import BadJSONError, decode_json
from headrace.model import PAYLOAD_BYTES_MAX

PROCESSOR_BYTES_MAX = 255
"""The longest name of a processor, in bytes of UTF-8."""

NUMBER_MAX = (1 << 53) - 1
"""The largest number of a message, from 1: every number in JavaScript is exact up to it."""


class BadMessageError(HeadraceError, ValueError):
    """A payload is no message of a channel, or a message makes none: the text says what is wrong."""


class MessageTooLargeError(BadMessageError):
    """The caller's message makes a payload over the limit: split it."""


class Content(NamedTuple):
    """JSON text or bytes: a payload, or a state."""

    data: bytes
    is_json: bool
    """Then `check_json` has let it in: nothing here looks at it again."""


class Message(NamedTuple):
    processor: str
    """Who has sent it."""
    number: int
    """Which of the messages of its processor it is."""
    content: Content


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, int, Any]).decode

# Classes of named tuples are called in Python, which takes longer than all the rest of decoding.
_new = tuple.__new__


def encode_message(message: Message) -> bytes:
    """Raises `BadMessageError`."""
    processor, number, (data, is_json) = message
    check_processor(processor)
    if not 1 <= number <= NUMBER_MAX:
        raise BadMessageError(f"the number of a message is 1 to {NUMBER_MAX}, this one is {number}")
    try:
        payload = _encode((processor, number, data.decode() if is_json else data))
    except UnicodeDecodeError as error:
        raise BadMessageError(f"its content is not JSON: {error}") from None
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise MessageTooLargeError(
            f"a message with its processor and number may have {PAYLOAD_BYTES_MAX} bytes, "
            f"this one has {len(payload)}"
        )
    return payload


def decode_message(payload: bytes) -> Message:
    """Raises `BadMessageError`. JSON is only known to be UTF-8."""
    try:
        told = _decode(payload)
        processor, number, content = told
        check_processor(processor)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, BadMessageError) as error:
        raise BadMessageError(f"this is no message of a channel: {error}") from None
    is_json = type(content) is str
    if not is_json and type(content) is not bytes:
        raise BadMessageError("this is no message of a channel: its content is no string or bytes")
    if not 1 <= number <= NUMBER_MAX:
        raise BadMessageError(f"this is no message of a channel: its number is {number}")
    if _encode(told) != payload:
        raise BadMessageError("this is no message of a channel: a shorter header would do")
    return _new(
        Message,
        (processor, number, _new(Content, (content.encode() if is_json else content, is_json))),
    )


def is_from(payload: bytes, processor: bytes) -> bool:
    """Whether this processor, in UTF-8, has sent the message; without decoding it."""
    return payload.startswith(prefix_of(processor))


def prefix_of(processor: bytes) -> bytes:
    """What all messages of this processor begin with: for those who look at many."""
    return _HEADERS[len(processor)] + processor


_HEADERS = [
    bytes([0x93, 0xA0 | size]) if size < 32 else bytes([0x93, 0xD9, size])
    for size in range(PROCESSOR_BYTES_MAX + 1)
]
"""The array of three, and the string of each size that begins it."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


# The same few names come with every message.
@lru_cache(maxsize=4096)
def check_processor(name: str) -> None:
    """Raise BadMessageError, saying what is wrong with the name of a processor."""
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
    """Raise BadMessageError unless this is JSON in UTF-8 within the limits."""
    try:
        decode_json(data)
    except BadJSONError as error:
        raise BadMessageError(f"its content {error}") from None
