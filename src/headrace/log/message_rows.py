"""How a message for a channel lies in a block of an upload: as in its topic, or with 0 as its number.

The number of such a message is given when its batch is appended (`broker/batch_messages.py`).
"""

from headrace.channel_envelope import (
    Message,
    MessageTooLargeError,
    check_json,
    decode_message,
    encode_message,
    prefix_of,
)
from headrace.model import PAYLOAD_BYTES_MAX

UNNUMBERED = 0

_ROOM_BYTES = 8
"""What the largest number takes more than the smallest."""

_ZERO, _ONE = b"\x00", b"\x01"
_LONG_NAME = 0xD9


def encode_row(message: Message) -> bytes:
    """Raises BadMessageError."""
    if message.number != UNNUMBERED:
        return encode_message(message)
    payload = encode_message(message._replace(number=1))
    _check_room(payload)
    at = len(prefix_of(message.processor.encode()))
    return payload[:at] + _ZERO + payload[at + 1 :]


def decode_row(payload: bytes) -> Message:
    """Raises BadMessageError. JSON is only known to be UTF-8."""
    at = _number_at(payload)
    if payload[at : at + 1] != _ZERO:
        return decode_message(payload)
    _check_room(payload)
    return decode_message(payload[:at] + _ONE + payload[at + 1 :])._replace(number=UNNUMBERED)


def check_row(payload: bytes) -> None:
    """Raise BadMessageError for what no processor could send."""
    content = decode_row(payload).content
    if content.is_json:
        check_json(content.data)


def _number_at(payload: bytes) -> int:
    """Where the number is, if this is a message."""
    if len(payload) < 3:
        return len(payload)
    return 3 + payload[2] if payload[1] == _LONG_NAME else 2 + (payload[1] & 0x1F)


def _check_room(payload: bytes) -> None:
    if len(payload) + _ROOM_BYTES > PAYLOAD_BYTES_MAX:
        raise MessageTooLargeError(
            f"a message with its processor and number may have {PAYLOAD_BYTES_MAX} bytes, this one has "
            f"{len(payload) + _ROOM_BYTES}"
        )
