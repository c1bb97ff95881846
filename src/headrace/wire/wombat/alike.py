"""Fast path for publishes of the same form: they are cut apart together instead of decoded one by one.

Publishers often send many messages of one size, with the fields in the protocol's order and no other fields.
Such messages differ only in payload and number.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

_U32 = struct.Struct(">I")


class Alike(NamedTuple):
    """Publishes that differ only in payload and number."""

    records: list[bytes]
    numbers: tuple[int, ...]


_ALIKE = 64
"""Number of messages that one `unpack` cuts. Fewer messages are decoded one by one."""

_BEGINNING = b"\x82\xa4type\x03\xa7publish\x83"
"""`{type: 3, publish: {` with three fields. If the last two end the message, it has no other fields."""

_NUMBER_KEYS = tuple(
    (msgspec.msgpack.encode("sequence_number") + kind, code)
    for kind, code in ((b"\xce", "I"), (b"\xcd", "H"))
)
"""The last field's name with the type byte of its number, and the struct code of the number.

MessagePack writes the smallest numbers in other ways: those messages are decoded one by one.
"""


def cut(messages: Sequence[bytes], payload: bytes) -> Alike | None:
    """Cut messages of the same form as the first, whose payload is known; None if another form is among them.

    To check this, the messages are built again from the parts and compared.
    """
    if len(messages) < _ALIKE or len(set(map(len, messages))) > 1:
        return None
    first = messages[0]
    layout = _layout(first, payload)
    if layout is None:
        return None
    start, key, code = layout
    number_bytes = struct.calcsize(code)
    form = first[:start].replace(b"%", b"%%") + b"%b" + key + b"%b"
    records: list[bytes] = []
    numbers: list[bytes] = []
    record_head = _U32.pack(len(payload))
    for at in range(0, len(messages), _ALIKE):
        some = messages[at : at + _ALIKE]
        data = b"".join(some)
        fields = _struct(start, len(payload), len(key), number_bytes, len(some)).unpack(data)
        if form * len(some) % fields != data:
            return None
        records += map(record_head.__add__, fields[::2])
        numbers += fields[1::2]
    return Alike(records, struct.unpack(f">{len(numbers)}{code}", b"".join(numbers)))


@lru_cache(maxsize=4 * _ALIKE)
def _struct(
    head_bytes: int, payload_bytes: int, key_bytes: int, number_bytes: int, count: int
) -> struct.Struct:
    """Return the struct that reads payload and number of `count` messages and skips the rest."""
    one = f"{head_bytes}x{payload_bytes}s{key_bytes}x{number_bytes}s"
    return struct.Struct(one * count)


def _layout(message: bytes, payload: bytes) -> tuple[int, bytes, str] | None:
    """Return the start of the payload, the bytes behind it, and the struct code of the number at the end."""
    if not message.startswith(_BEGINNING):
        return None
    for key, code in _NUMBER_KEYS:
        stop = len(message) - struct.calcsize(code) - len(key)
        start = stop - len(payload)
        if message.startswith(key, stop) and message.endswith(_payload_heads(payload), 0, start):
            return start, key, code
    return None


def _payload_heads(payload: bytes) -> tuple[bytes, ...]:
    """Return the bytes that may precede a payload: its key with each MessagePack form of its size."""
    size = _U32.pack(len(payload))
    ways = [b"\xc6" + size]
    if len(payload) < 1 << 16:
        ways.append(b"\xc5" + size[2:])
    if len(payload) < 1 << 8:
        ways.append(b"\xc4" + size[3:])
    return tuple(msgspec.msgpack.encode("message") + way for way in ways)
