"""Messages of Logux, both directions: JSON in text frames, MessagePack in binary ones. Knows no dialect.

A message is an array that begins with its type. What is decoded here has the right types in every position;
what it means, and how it is refused, is the session's.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.errors import HeadraceError
from headrace.json_limits import has_huge_integers
from headrace.logux_envelope import NUMBER_MAX, Created, Event, Number
from headrace.wire import websocket

PATH = "/v1/logux"

MESSAGE_BYTES_MAX = 8 << 20
"""The largest message: a client that was offline for long sends all its events in one."""

HOST_BYTES_MAX = 255
"""The longest host: it is kept with every event."""

DEPTH_MAX = 100
"""How deep arrays and objects may lie in each other, in a message with its own array."""


class BadMessageError(HeadraceError):
    """The peer has sent what is no message: the text says what is wrong."""


class Connect(NamedTuple):
    version: tuple[Number, Number]
    """Major and minor; the minor is 0 where a single number was sent."""
    host: str | Number
    synced: Number
    options: Any = None
    """Credentials, or an object with them: dialects differ."""


class Connected(NamedTuple):
    version: tuple[Number, Number]
    host: str | Number
    times: tuple[Number, Number]
    options: Any = None


class Ping(NamedTuple):
    synced: Number


class Pong(NamedTuple):
    synced: Number


class Sync(NamedTuple):
    added: Number
    events: list[tuple[Event, Any]]
    """Each with its `created`, or with its meta in protocol 5."""


class Synced(NamedTuple):
    synced: Number


class Error(NamedTuple):
    fields: list[Any]
    """What followed the type: dialects differ."""


class Headers(NamedTuple):
    headers: dict[str, Any]


class Unknown(NamedTuple):
    """A type that is none of these."""

    type: str


Message = Connect | Connected | Ping | Pong | Sync | Synced | Error | Headers | Unknown


# Bytes ↔ values

_pack_json = msgspec.json.Encoder().encode
_pack_msgpack = msgspec.msgpack.Encoder().encode


def encode(message: Sequence[Any], *, binary: bool) -> bytes:
    """A message in a WebSocket frame of a server."""
    if binary:
        return websocket.frame(pack(message, binary=True))
    return websocket.frame(pack(message, binary=False), websocket.TEXT)


def pack(message: Sequence[Any], *, binary: bool) -> bytes:
    """A message without a frame."""
    if not binary:
        return _pack_json(message)
    try:
        return _pack_msgpack(message)
    except OverflowError:
        return _pack_msgpack(_without_large_integers(message))


plain_synced = re.compile(r'\["synced",(?:0|[1-9][0-9]{0,15})\]').fullmatch

"""For text that is surely a `synced`: the message that servers get most often, found without decoding."""


def decode(data: bytes, *, binary: bool) -> Message:
    """Raises `BadMessageError`."""
    return parse(unpack(data, binary=binary))


def unpack(data: bytes, *, binary: bool) -> Any:
    """The value in a frame; nothing but null, booleans, numbers, strings, arrays and objects."""
    try:
        if not binary:
            value = msgspec.json.decode(data)
            if has_huge_integers(data, value):
                raise BadMessageError("a message has an integer that is too large for a float")
            # What opens so few brackets cannot lie deep, and most messages need not be walked through.
            if data.count(b"[") + data.count(b"{") > DEPTH_MAX:
                _check(value)
        else:
            value = msgspec.msgpack.decode(data)
            _check(value)
    except RecursionError:
        raise BadMessageError(_TOO_DEEP) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        kind = "MessagePack" if binary else "JSON"
        raise BadMessageError(f"a message is not {kind}: {error}") from None
    return value


_TOO_DEEP = f"arrays and objects lie more than {DEPTH_MAX} deep in each other"


def _check(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if not all(type(key) is str for key in one):
                    raise BadMessageError("the keys of an object must be strings")
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif not _is_plain(one):
                raise BadMessageError(
                    "a message has only null, booleans, numbers, strings, arrays and objects"
                )
        if not inner:
            return
        level = inner
    raise BadMessageError(_TOO_DEEP)


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool | int)


def _without_large_integers(value: Any) -> Any:
    """MessagePack has integers of 64 bits: larger ones become what they are in JavaScript."""
    if isinstance(value, dict):
        return {key: _without_large_integers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_large_integers(one) for one in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        try:
            return float(value)
        except OverflowError:
            # Of a record that is there already.
            return sys.float_info.max if value > 0 else -sys.float_info.max
    return value


# Values → messages


def parse(value: Any) -> Message:
    """Raises `BadMessageError` saying what is wrong where."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise BadMessageError("a message is an array that begins with its type")
    parser = _PARSERS.get(value[0])
    return parser(value) if parser is not None else Unknown(value[0])


def _connect(value: list[Any]) -> Connect:
    _check_length(value, 3, 5)
    version, host = _version(value), _host(value)
    if len(value) == 3:
        return Connect(version, host, 0)
    if not _is_number(value[3]):
        # The seed's first example: credentials without a position.
        return Connect(version, host, 0, value[3])
    return Connect(version, host, _position(value, 3), *value[4:])


def _connected(value: list[Any]) -> Connected:
    _check_length(value, 4, 5)
    times = value[3]
    if not isinstance(times, list) or len(times) != 2 or not all(map(_is_number, times)):
        raise BadMessageError("connected: the fourth element is two times")
    return Connected(_version(value), _host(value), (times[0], times[1]), *value[4:])


def _ping(value: list[Any]) -> Ping:
    _check_length(value, 2, 2)
    return Ping(_position(value, 1))


def _pong(value: list[Any]) -> Pong:
    _check_length(value, 2, 2)
    return Pong(_position(value, 1))


def _sync(value: list[Any]) -> Sync:
    if len(value) < 4 or len(value) % 2:
        raise BadMessageError("sync: after the number there are pairs of an event and its time")
    added = _position(value, 1)
    events = list(zip(value[2::2], value[3::2], strict=True))
    for event, _ in events:
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise BadMessageError("sync: an event is an object with a string `type`")
    return Sync(added, events)


def _synced(value: list[Any]) -> Synced:
    _check_length(value, 2, 2)
    return Synced(_position(value, 1))


def _error(value: list[Any]) -> Error:
    _check_length(value, 2, 3)
    if not isinstance(value[1], str):
        raise BadMessageError("error: the second element is a string")
    return Error(value[1:])


def _headers(value: list[Any]) -> Headers:
    _check_length(value, 2, 2)
    if not isinstance(value[1], dict):
        raise BadMessageError("headers: the second element is an object")
    return Headers(value[1])


_PARSERS: dict[str, Callable[[list[Any]], Message]] = {
    "connect": _connect,
    "connected": _connected,
    "ping": _ping,
    "pong": _pong,
    "sync": _sync,
    "synced": _synced,
    "error": _error,
    "headers": _headers,
}


def check_created(created: Any) -> Created:
    """The time of an event in the 0.x protocols; raises `BadMessageError`."""
    if not isinstance(created, list) or not created:
        raise BadMessageError("sync: the time of an event is an array of numbers and strings")
    if not all(isinstance(one, str) or _is_number(one) for one in created):
        raise BadMessageError("sync: the time of an event has numbers and strings only")
    if not all(isinstance(one, str) or abs(one) < NUMBER_MAX for one in created):
        raise BadMessageError(
            "sync: the numbers in the time of an event are less than 2 to the 63rd"
        )
    return created


def _check_length(value: list[Any], least: int, most: int) -> None:
    if not least <= len(value) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise BadMessageError(f"{value[0]}: {len(value)} elements instead of {wanted}")


def _version(value: list[Any]) -> tuple[Number, Number]:
    version = value[1]
    if _is_number(version):
        return version, 0
    if isinstance(version, list) and len(version) == 2 and all(map(_is_number, version)):
        return version[0], version[1]
    raise BadMessageError(f"{value[0]}: the version is two numbers, or one")


def _host(value: list[Any]) -> str | Number:
    host: str | Number = value[2]
    if not (isinstance(host, str) and host) and not _is_number(host):
        raise BadMessageError(f"{value[0]}: the host is a string or a number")
    if isinstance(host, str) and len(host.encode("utf-8", "surrogatepass")) > HOST_BYTES_MAX:
        raise BadMessageError(f"{value[0]}: the host has more than {HOST_BYTES_MAX} bytes")
    return host


def _position(value: list[Any], index: int) -> Number:
    position: Number = value[index]
    if not _is_number(position) or position < 0:
        raise BadMessageError(f"{value[0]}: element {index + 1} is a number that is not negative")
    return position


def _is_number(value: Any) -> bool:
    # JSON's true and false are numbers to Python.
    return type(value) is int or type(value) is float
