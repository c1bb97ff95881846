"""WebSocket frames as a server sends them, RFC 6455 section 5. Receiving is picows' work.

A delivery is framed once and written to every subscriber as it is: frames of a server carry no mask.
"""

import struct

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

REASON_BYTES_MAX = 123
"""What a close frame has room for, RFC 6455 section 5.5.1."""

_ABNORMAL_CLOSURE = 1006
_CODES = range(1000, 5000)

_FINAL = 0x80


def head(size: int, opcode: int = BINARY) -> bytes:
    """What goes before a whole message of `size` bytes."""
    first = _FINAL | opcode
    if size < 126:
        return bytes((first, size))
    if size < 1 << 16:
        return struct.pack(">BBH", first, 126, size)
    return struct.pack(">BBQ", first, 127, size)


def frame(message: bytes, opcode: int = BINARY) -> bytes:
    return head(len(message), opcode) + message


def may_be_sent(code: int) -> bool:
    """Whether a close frame may carry this code, RFC 6455 section 7.4; most others picows refuses."""
    return code in _CODES and code != _ABNORMAL_CLOSURE


def close_reason(text: str) -> bytes:
    """The text as a close frame can carry it: cut at its limit, between two characters."""
    return text.encode()[:REASON_BYTES_MAX].decode(errors="ignore").encode()
