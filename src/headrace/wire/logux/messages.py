"""Logux messages in both directions: JSON in text frames, MessagePack in binary frames. Elsewhere: dialects.

A message is an array that begins with its type. A decoded message has the right type in every position; the
session decides what the message means and how to refuse it. Events that go to peers are in `events.py`.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from headrace.errors import HeadraceError
from headrace.payload.json_limits import has_huge_integers
from headrace.payload.logux import NUMBER_MAX, Created, Event, Number, is_of_id, plain
from headrace.wire import websocket

PATH = "/v1/logux"

MESSAGE_BYTES_MAX = 8 << 20
"""Size limit of a message: a client that was offline for a long time sends all its events in one message."""

HOST_BYTES_MAX = 255
"""Size limit of a host: the host is stored with every event."""

DEPTH_MAX = 100
"""Limit of nested arrays and objects in a message, including the array that is the message."""

RESERVED = "logux/"
"""Prefix of types that have a meaning to clients. Apart from subscriptions, only the server sends them."""

OWN_META = frozenset({"id", "time", "subprotocol"})
"""Keys that a client may set in the meta of its actions."""

_SHORT_MAX = 1 << 52


class BadLoguxMessageError(HeadraceError):
    """The peer sent an invalid message; the text says what is wrong."""


class Connect(NamedTuple):
    version: tuple[Number, Number]
    """Major and minor version; the minor is 0 if the peer sent a single number."""
    host: str | Number
    synced: Number
    options: Any = None
    """Credentials, or an object that contains them, depending on the dialect."""


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
    """Each event with its `created`, or in protocol 5 with its meta."""


class Synced(NamedTuple):
    synced: Number


class Error(NamedTuple):
    fields: list[Any]
    """Elements behind the type; they depend on the dialect."""


class Headers(NamedTuple):
    headers: dict[str, Any]


class Unknown(NamedTuple):
    """A message of another type."""

    type: str


Message = Connect | Connected | Ping | Pong | Sync | Synced | Error | Headers | Unknown


# Bytes ↔ values

_pack_json = msgspec.json.Encoder().encode
_pack_msgpack = msgspec.msgpack.Encoder().encode


def encode(message: Sequence[Any] | Mapping[str, Any], *, binary: bool) -> bytes:
    """Encode a message in a server's WebSocket frame."""
    opcode = websocket.BINARY if binary else websocket.TEXT
    return websocket.frame(pack(message, binary=binary), opcode)


def pack(message: Sequence[Any] | Mapping[str, Any], *, binary: bool) -> bytes:
    """Encode a message without a frame."""
    if not binary:
        return _pack_json(message)
    try:
        return _pack_msgpack(message)
    except OverflowError:
        return _pack_msgpack(_without_large_integers(message))


plain_synced = re.compile(r'\["synced",(?:0|[1-9][0-9]{0,15})\]').fullmatch
"""Match text that is certainly a `synced`, the most frequent message to a server, without decoding it."""


def decode(data: bytes, *, binary: bool) -> Message:
    """Decode a message. Raises `BadLoguxMessageError`."""
    return parse(unpack(data, binary=binary))


def unpack(data: bytes, *, binary: bool) -> Any:
    """Return the value in a frame: only null, booleans, numbers, strings, arrays and objects."""
    try:
        if not binary:
            value = msgspec.json.decode(data)
            if has_huge_integers(data, value):
                raise BadLoguxMessageError("a message has an integer that is too large for a float")
            # A message with few brackets cannot be nested too deeply, so most messages need no walk.
            if data.count(b"[") + data.count(b"{") > DEPTH_MAX:
                _check(value)
        else:
            value = msgspec.msgpack.decode(data)
            _check(value)
    except RecursionError:
        raise BadLoguxMessageError(_TOO_DEEP) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        kind = "MessagePack" if binary else "JSON"
        raise BadLoguxMessageError(f"a message is not {kind}: {error}") from None
    return value


_TOO_DEEP = f"arrays and objects lie more than {DEPTH_MAX} deep in each other"


def _check(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if not all(type(key) is str for key in one):
                    raise BadLoguxMessageError("the keys of an object must be strings")
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif not _is_plain(one):
                raise BadLoguxMessageError(
                    "a message has only null, booleans, numbers, strings, arrays and objects"
                )
        if not inner:
            return
        level = inner
    raise BadLoguxMessageError(_TOO_DEEP)


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool | int)


def _without_large_integers(value: Any) -> Any:
    """Replace integers of more than MessagePack's 64 bits by floats, as JavaScript would have them."""
    if isinstance(value, dict):
        return {key: _without_large_integers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_large_integers(one) for one in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        try:
            return float(value)
        except OverflowError:
            # New messages with such an integer are refused, but a stored record may have one.
            return sys.float_info.max if value > 0 else -sys.float_info.max
    return value


# Values → messages


def parse(value: Any) -> Message:
    """Turn a value into a message. Raises `BadLoguxMessageError`, which names the element and its fault."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise BadLoguxMessageError("a message is an array that begins with its type")
    parser = _PARSERS.get(value[0])
    return parser(value) if parser is not None else Unknown(value[0])


def type_of(message: Message) -> str:
    """Return the type with which a message begins."""
    return message.type if isinstance(message, Unknown) else type(message).__name__.lower()


def _connect(value: list[Any]) -> Connect:
    _check_length(value, 3, 5)
    version, host = _version(value), _host(value)
    if len(value) == 3 or not _is_number(value[3]):
        # The seed's first example has credentials and no position.
        return Connect(version, host, 0, *value[3:4])
    return Connect(version, host, _position(value, 3), *value[4:])


def _connected(value: list[Any]) -> Connected:
    _check_length(value, 4, 5)
    times = value[3]
    if not isinstance(times, list) or len(times) != 2 or not all(map(_is_number, times)):
        raise BadLoguxMessageError("connected: the fourth element is two times")
    return Connected(_version(value), _host(value), (times[0], times[1]), *value[4:])


def _numbered(make: Callable[[Number], Message], value: list[Any]) -> Message:
    """Parse a `ping`, `pong` or `synced`: a number follows the type."""
    _check_length(value, 2, 2)
    return make(_position(value, 1))


def _sync(value: list[Any]) -> Sync:
    if len(value) < 4 or len(value) % 2:
        raise BadLoguxMessageError(
            "sync: after the number there are pairs of an event and its time"
        )
    added = _position(value, 1)
    events = list(zip(value[2::2], value[3::2], strict=True))
    for event, _ in events:
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise BadLoguxMessageError("sync: an event is an object with a string `type`")
    return Sync(added, events)


def _error(value: list[Any]) -> Error:
    _check_length(value, 2, 3)
    if not isinstance(value[1], str):
        raise BadLoguxMessageError("error: the second element is a string")
    return Error(value[1:])


def _headers(value: list[Any]) -> Headers:
    _check_length(value, 2, 2)
    if not isinstance(value[1], dict):
        raise BadLoguxMessageError("headers: the second element is an object")
    return Headers(value[1])


_PARSERS: dict[str, Callable[[list[Any]], Message]] = {
    "connect": _connect,
    "connected": _connected,
    "ping": partial(_numbered, Ping),
    "pong": partial(_numbered, Pong),
    "sync": _sync,
    "synced": partial(_numbered, Synced),
    "error": _error,
    "headers": _headers,
}


def check_created(created: Any) -> Created:
    """Return the time of an event of the 0.x protocols. Raises `BadLoguxMessageError` if it is invalid."""
    if not isinstance(created, list) or not created:
        raise BadLoguxMessageError("sync: the time of an event is an array of numbers and strings")
    if not all(isinstance(one, str) or _is_number(one) for one in created):
        raise BadLoguxMessageError("sync: the time of an event has numbers and strings only")
    if not all(isinstance(one, str) or abs(one) < NUMBER_MAX for one in created):
        raise BadLoguxMessageError(
            "sync: the numbers in the time of an event are less than 2 to the 63rd"
        )
    return created


def _check_length(value: list[Any], least: int, most: int) -> None:
    if not least <= len(value) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise BadLoguxMessageError(f"{value[0]}: {len(value)} elements instead of {wanted}")


def _version(value: list[Any]) -> tuple[Number, Number]:
    version = value[1]
    if _is_number(version):
        return version, 0
    if isinstance(version, list) and len(version) == 2 and all(map(_is_number, version)):
        return version[0], version[1]
    raise BadLoguxMessageError(f"{value[0]}: the version is two numbers, or one")


def _host(value: list[Any]) -> str | Number:
    host: str | Number = value[2]
    if not (isinstance(host, str) and host) and not _is_number(host):
        raise BadLoguxMessageError(f"{value[0]}: the host is a string or a number")
    if isinstance(host, str) and len(host.encode("utf-8", "surrogatepass")) > HOST_BYTES_MAX:
        raise BadLoguxMessageError(f"{value[0]}: the host has more than {HOST_BYTES_MAX} bytes")
    return host


def _position(value: list[Any], index: int) -> Number:
    position: Number = value[index]
    if not _is_number(position) or position < 0:
        raise BadLoguxMessageError(
            f"{value[0]}: element {index + 1} is a number that is not negative"
        )
    return position


def _is_number(value: Any) -> bool:
    # `isinstance` would accept true and false, which are integers in Python.
    return type(value) is int or type(value) is float


# Metas of protocol 5
#
# Times on the wire are relative to `base`, the time when the server sent `connected`, in milliseconds. An id
# is `"ms node counter"`. On the wire it is `[shift, node, counter]`. The sender may leave out its own node
# (`[shift, counter]`), and then also a counter of 0 (`shift`).


class Meta(NamedTuple):
    """The meta that a client sends with an action."""

    created: Created
    """The action's id as the other protocols write it: milliseconds, node, counter."""
    time: Number
    others: dict[str, Any]

    @property
    def id(self) -> str:
        return " ".join(map(str, self.created))

    @property
    def node(self) -> str:
        node: str = self.created[1]
        return node


def parse_meta(meta: Any, base: int, peer: str) -> Meta:
    """Parse the meta of an action. Raises `BadLoguxMessageError`."""
    if not isinstance(meta, dict):
        raise BadLoguxMessageError("sync: the meta of an action is an object")
    time: Any = meta.get("time")
    if not _is_short(time):
        raise BadLoguxMessageError("sync: the `time` of a meta is a number")
    others = {key: value for key, value in meta.items() if key not in ("id", "time")}
    return Meta(_parse_id(meta.get("id"), base, peer), base + time, others)


def _parse_id(value: Any, base: int, peer: str) -> Created:
    parts = value if isinstance(value, list) else [value, 0]
    if len(parts) in (2, 3):
        shift, *node, counter = parts
        if _is_short(shift) and _is_short(counter) and all(map(_is_node, node)):
            ms = plain(base + shift)
            if is_of_id(ms) and is_of_id(counter):
                return [ms, *(node or [peer]), plain(counter)]
    raise BadLoguxMessageError(
        "sync: the `id` of a meta is SHIFT, [SHIFT, COUNTER] or [SHIFT, NODE, COUNTER]"
    )


def _is_node(value: Any) -> bool:
    if not isinstance(value, str) or " " in value:
        return False
    return 0 < len(value.encode("utf-8", "surrogatepass")) <= HOST_BYTES_MAX


def _is_short(value: Any) -> bool:
    """True for a number that JavaScript writes without an exponent."""
    return _is_number(value) and abs(value) < _SHORT_MAX


def client_of(node: str) -> str:
    """Return the `user:client` of a node id, which is `user:client:tab`."""
    return ":".join(node.split(":")[:2])
