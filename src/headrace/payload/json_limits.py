"""Limits on the depth and the integers of JSON from outside. Elsewhere: the meaning of the JSON."""

import re
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from headrace.errors import HeadraceError

DEPTH_MAX = 100
"""Maximum nesting depth of arrays and objects that are not empty."""

_TOO_DEEP = f"has arrays and objects that lie more than {DEPTH_MAX} deep in each other"

_FLOAT_MAX = int(sys.float_info.max)

_MANY_DIGITS = re.compile(rb"[0-9]{300}")

_SOUND_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])|\\[^u]"
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

_decode = msgspec.json.Decoder().decode


class BadJSONError(HeadraceError, ValueError):
    """JSON is refused. The text says why and begins with a verb ("has …"): callers add the subject."""


def decode_json(data: bytes | msgspec.Raw, *, around: int = 0) -> Any:
    """Return the decoded value. Raises `BadJSONError`.

    `around` is the number of arrays and objects that will enclose the value; it counts towards `DEPTH_MAX`.
    """
    try:
        value = _decode(data)
    except RecursionError:
        raise BadJSONError(_TOO_DEEP) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadJSONError(f"is not JSON: {why_not(bytes(data), error)}") from None
    data = bytes(data)
    if has_huge_integers(data, value):
        raise BadJSONError("has an integer that is too large for a float")
    # A value cannot be deeper than the number of its brackets. So most values need not be walked through.
    depth_max = DEPTH_MAX - around
    if data.count(b"[") + data.count(b"{") > depth_max and _is_deeper(value, depth_max):
        raise BadJSONError(_TOO_DEEP)
    return value


def why_not(data: bytes, error: Exception) -> str:
    """Return the reason why `data` could not be decoded."""
    # The decoder expects the other half next, and its error is about whatever it finds there.
    if found := _SURROGATE.search(_SOUND_ESCAPE.sub(b"", data)):
        return f"{found[0].decode()} is one half of a surrogate pair, and no character"
    return str(error)


def has_huge_integers(data: bytes, value: Any) -> bool:
    """Return True if this JSON has an integer that no other encoding can hold, not even as a float."""
    if len(data) < 300 or _MANY_DIGITS.search(data) is None:
        return False
    return any(
        type(one) is int and abs(one) > _FLOAT_MAX for level in _levels(value) for one in level
    )


def _is_deeper(value: Any, depth: int) -> bool:
    return next(islice(_levels(value), depth + 1, None), None) is not None


def _levels(value: Any) -> Iterator[list[Any]]:
    """Iterate over the depths of a value; each has a list of what lies there."""
    level = [value]
    while level:
        yield level
        inner = (
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        )
        level = [one for values in inner for one in values]
