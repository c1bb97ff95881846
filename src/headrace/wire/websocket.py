"""WebSocket frames of servers and clients, RFC 6455 section 5. Elsewhere: receiving, which picows does.

A server frames a delivery once, and every subscriber gets the same bytes: its frames have no mask.

A client masks its binary messages (section 5.3). Masking here is for many small messages at once: one
operation on one large integer masks them all, and they are written together, which is cheaper than a system
call for each. For large messages, C code is faster.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache

TEXT = 0x1
BINARY = 0x2
PING = 0x9
PONG = 0xA

OK = 1000
GOING_AWAY = 1001
PROTOCOL_ERROR = 1002
UNSUPPORTED_DATA = 1003
INVALID_DATA = 1007
POLICY_VIOLATION = 1008
TOO_BIG = 1009
INTERNAL_ERROR = 1011
TRY_AGAIN_LATER = 1013

REASON_BYTES_MAX = 123
"""Size limit of the reason in a close frame, RFC 6455 section 5.5.1."""

_FINAL = 0x80


def head(size: int, opcode: int = BINARY) -> bytes:
    """Return the head of a frame that holds a whole message of `size` bytes."""
    first = _FINAL | opcode
    if size < 126:
        return bytes((first, size))
    if size < 1 << 16:
        return struct.pack(">BBH", first, 126, size)
    return struct.pack(">BBQ", first, 127, size)


def frame(message: bytes, opcode: int = BINARY) -> bytes:
    return head(len(message), opcode) + message


def frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield opcode and payload of a server's frames. All are whole, without a mask and no fragments."""
    at = 0
    while at < len(data):
        opcode, size, at = data[at] & 0xF, data[at + 1], at + 2
        if size >= 126:
            size_bytes = 2 if size == 126 else 8
            size = int.from_bytes(data[at : at + size_bytes])
            at += size_bytes
        yield opcode, data[at : at + size]
        at += size


def may_be_sent(code: int) -> bool:
    """True if a close frame may carry this code, RFC 6455 section 7.4. picows refuses most other codes."""
    return 1000 <= code < 5000 and code != 1006


def close_reason(text: str) -> bytes:
    """Encode the reason for a close frame, cut between two characters to the frame's limit."""
    return text.encode()[:REASON_BYTES_MAX].decode(errors="ignore").encode()


KEY_BYTES = 4

_MASKED = 0x80
_HEADS_CACHED_MAX = 1024


def masked_frames(messages: Sequence[bytes], keys: bytes) -> bytes:
    """Return one frame for each message, joined. `keys` has four random bytes for each message."""
    plain: list[bytes] = []
    mask: list[bytes] = []
    at = 0
    for message in messages:
        size = len(message)
        head, nothing = _head(size)
        plain += (head, message)
        key = keys[at : at + KEY_BYTES]
        # The head has zeros in place of the key, and the mask puts the key there.
        mask += (nothing, (key * (size // KEY_BYTES + 2))[: size + KEY_BYTES])
        at += KEY_BYTES
    assert at == len(keys)
    joined = b"".join(plain)
    masked = int.from_bytes(joined, "little") ^ int.from_bytes(b"".join(mask), "little")
    return masked.to_bytes(len(joined), "little")


@lru_cache(maxsize=_HEADS_CACHED_MAX)
def _head(size: int) -> tuple[bytes, bytes]:
    """Return the head of a frame for `size` bytes, with zeros for the key, and the mask up to the key."""
    begun = bytearray(head(size))
    begun[1] |= _MASKED
    return bytes(begun) + bytes(KEY_BYTES), bytes(len(begun))
