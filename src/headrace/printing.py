"""Formatting for messages: outside text without control characters and secrets, counts and sizes."""

import json
import re
import socket

MASK = "***"

_QUOTED_MAX = 300
"""Maximum characters of a text in a message. Names have at most 255 bytes, so a longer text is not a name."""

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^/@\s:?#]*):(?P<secret>[^\s]*)@")
_PARAMETER = re.compile(
    r"(?P<name>\b(?:password|passwd|passfile|sslpassword|token|secret)\s*=\s*)"
    r"(?P<value>'[^']*'|\"[^\"]*\"|[^\s&'\"]+)",
    re.IGNORECASE,
)


def quoted(text: str) -> str:
    """Return the text in double quotes, as in JSON. Characters that could control a terminal are escaped."""
    if len(text) > _QUOTED_MAX:
        return quoted(text[:_QUOTED_MAX]) + "…"
    return '"' + "".join(map(_escape, text)) + '"'


def printable(name: str) -> str:
    """Return a name for a table: unchanged if it is printable, otherwise quoted."""
    return name if name.isprintable() else quoted(name)


def one_line(text: str) -> str:
    """Return the text with all characters escaped that could begin a line or move a terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def printable_json(value: object, indent: int | None = None) -> str:
    """Return a value as JSON, in one line without `indent`. What could control a terminal is escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text
    )


def described(error: BaseException) -> str:
    """Return one line about an unexpected exception: its type, and its message if it has one."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return masked(f"{kind}: {text}" if text else kind)


def unreachable(error: BaseException, place: str) -> str:
    """Return the reason why a connection to `place` (HOST:PORT) failed, in words, without error numbers."""
    if isinstance(error, ConnectionRefusedError):
        return f"no server at {place}; is it running?"
    if isinstance(error, socket.gaierror):
        return f"the host of {place} has no known address"
    if isinstance(error, TimeoutError):
        return f"no answer from {place}"
    if isinstance(error, ConnectionError):
        return f"{place} closed the connection"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, such as `1,234 records`."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def size(count: float) -> str:
    """Return a number of bytes in the largest unit that is not too large for it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def masked_secret(value: str) -> str:
    """Return a secret for printing: a URL without its password, and `***` for other values unless empty."""
    return masked(value) if "://" in value or not value else MASK


def masked(text: str) -> str:
    """Return the text with the passwords of URLs and connection strings replaced by `***`."""
    text = _USER_INFO.sub(rf"\g<scheme>\g<user>:{MASK}@", text)
    return _PARAMETER.sub(rf"\g<name>{MASK}", text)


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
