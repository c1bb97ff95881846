"""WebSocket frames as a client sends them: binary messages under a mask, RFC 6455 section 5.3.

Meant for many small messages at once: one operation on one large integer masks them all, and they are
written together, which is cheaper than a system call for each. Large ones are better left to C.
"""

from collections.abc import Sequence
from functools import lru_cache

from headrace.wire import websocket

KEY_BYTES = 4

_MASKED = 0x80
_HEADS_CACHED_MAX = 1024


def masked_frames(messages: Sequence[bytes], keys: bytes) -> bytes:
    """One frame for each message. `keys` are random bytes, four for each."""
    plain: list[bytes] = []
    mask: list[bytes] = []
    at = 0
    for message in messages:
        size = len(message)
        head, nothing = _head(size)
        plain += (head, message)
        key = keys[at : at + KEY_BYTES]
        # The head leaves room for the key, which the mask puts there.
        mask += (nothing, (key * (size // KEY_BYTES + 2))[: size + KEY_BYTES])
        at += KEY_BYTES
    assert at == len(keys)
    joined = b"".join(plain)
    masked = int.from_bytes(joined, "little") ^ int.from_bytes(b"".join(mask), "little")
    return masked.to_bytes(len(joined), "little")


@lru_cache(maxsize=_HEADS_CACHED_MAX)
def _head(size: int) -> tuple[bytes, bytes]:
    """What goes before a message of `size` bytes, with zeros for the key; and its mask up to there."""
    head = bytearray(websocket.head(size))
    head[1] |= _MASKED
    return bytes(head) + bytes(KEY_BYTES), bytes(len(head))
