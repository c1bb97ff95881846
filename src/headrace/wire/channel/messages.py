"""Messages of channels in both directions: JSON in text frames, MessagePack in binary frames.

A decoded message has the right type in every field; the session decides what the message means. A JSON
payload stays text: it is stored and delivered unchanged.
"""

import base64
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from headrace.errors import HeadraceError
from headrace.payload.channel import (
    NUMBER_MAX,
    BadMessageError,
    Content,
    check_json,
    decode_message,
)
from headrace.payload.json_limits import why_not
from headrace.wire import websocket
from headrace.wire.logux import messages as logux

PATH = "/v1/channels"

VERSION = 1

MESSAGE_BYTES_MAX = 2 << 20
"""Size limit of a message: an upload of the largest state, in base64."""

OFFSET_MAX = (1 << 63) - 1

INSTANCE_LENGTH_MAX = 255

LEASE_S_MIN, LEASE_S_MAX = 1.0, 31_536_000.0
"""Shortest and longest lease that a processor may choose."""

_Number = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
_Offset = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
_Count = Annotated[int, Meta(ge=1, le=1 << 31)]


class BadChannelMessageError(HeadraceError):
    """The peer sent an invalid message; the text says what is wrong."""


def _tag(name: str) -> str:
    return name.removesuffix("Request").lower()


class _Message(msgspec.Struct, tag_field="type", tag=_tag, gc=False):
    """Base of a client's messages. Unknown fields are ignored."""


class Hello(_Message):
    processor: str
    token: Any = None
    instance: Annotated[str, Meta(max_length=INSTANCE_LENGTH_MAX)] = ""
    """Name of the client while it runs, the same on all its connections. `attempt` counts the connections."""
    attempt: Annotated[int, Meta(ge=0, le=NUMBER_MAX)] = 0


class Join(_Message):
    channel: str
    receive: Literal["push", "signal", "poll"] = "push"
    origin: Literal["state"] | _Offset | UnsetType | None = msgspec.field(
        name="from", default=UNSET
    )
    """Start of delivery on this connection, if it is not the processor's cursor."""
    lease_s: Annotated[float, Meta(ge=LEASE_S_MIN, le=LEASE_S_MAX)] | UnsetType | None = UNSET


class Leave(_Message):
    channel: str
    forget: bool | UnsetType = UNSET
    """True if the server may forget the number of the processor's last message."""


class Send(_Message):
    channel: str
    number: _Number
    payload: Raw | UnsetType = UNSET
    data: bytes | UnsetType = msgspec.field(name="bytes", default=UNSET)


class Fetch(_Message):
    channel: str
    ack: _Offset | None = None
    messages_max: _Count | None = msgspec.field(name="max", default=None)


class Ack(_Message):
    channel: str
    offset: _Offset


class UploadRequest(_Message):
    channel: str
    offset: _Offset
    payload: Raw | UnsetType = UNSET
    data: bytes | UnsetType = msgspec.field(name="bytes", default=UNSET)


class SnapshotRequest(_Message):
    channel: str


class Ping(_Message):
    pass


Message = Hello | Join | Leave | Send | Fetch | Ack | UploadRequest | SnapshotRequest | Ping

_from_json = msgspec.json.Decoder(Message).decode
_from_msgpack = msgspec.msgpack.Decoder(Message).decode


def decode(data: bytes | str) -> Message:
    """Decode a client's message, text or binary. Raises `BadChannelMessageError`."""
    try:
        message: Message = _from_json(data) if isinstance(data, str) else _from_msgpack(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = why_not(data.encode(), error) if isinstance(data, str) else error
        raise BadChannelMessageError(f"this is no message of a channel's client: {why}") from None
    return message


def content_of(message: Send | UploadRequest, *, binary: bool) -> Content:
    """Return the content to store. Raises `BadMessageError`."""
    raw, data = message.payload, message.data
    if raw is UNSET and data is UNSET:
        raise BadMessageError("it has neither a `payload` nor `bytes`")
    if raw is not UNSET and data is not UNSET:
        raise BadMessageError("it has a `payload` and `bytes`: only one of them can be its content")
    if isinstance(data, bytes):
        return Content(data, False)
    assert isinstance(raw, Raw)
    if not binary:
        text = bytes(raw)
        check_json(text)
        return Content(text, True)
    try:
        value = logux.unpack(bytes(raw), binary=True)
    except logux.BadLoguxMessageError as error:
        raise BadMessageError(f"its payload cannot be JSON: {error}") from None
    return Content(msgspec.json.encode(value), True)


# Messages of the server

to_json = msgspec.json.Encoder().encode


def encode(message: Mapping[str, Any], *, binary: bool) -> bytes:
    """Encode a server's message in a WebSocket frame. `content` makes the fields of a content in it."""
    if binary:
        return websocket.frame(logux.pack(message, binary=True))  # type: ignore[arg-type]
    return websocket.frame(to_json(message), websocket.TEXT)


def content(content: Content, *, binary: bool) -> dict[str, Any]:
    """Return the message fields that carry a content."""
    if not content.is_json:
        return {"bytes": content.data}
    return {"payload": msgspec.json.decode(content.data) if binary else Raw(content.data)}


def encode_messages(
    channel: str, payloads: Sequence[tuple[int, int, bytes]], more: bool, lost: int, *, binary: bool
) -> bytes:
    """Encode messages from the log, each with its offset and time, in a server's WebSocket frame."""
    if binary:
        return websocket.frame(
            logux.pack(messages_value(channel, payloads, more, lost, binary=True), binary=True)  # type: ignore[arg-type]
        )
    return websocket.frame(messages_json(channel, payloads, more, lost), websocket.TEXT)


def messages_json(
    channel: str, payloads: Sequence[tuple[int, int, bytes]], more: bool, lost: int
) -> bytes:
    parts = []
    for offset, ms, payload in payloads:
        processor, number, (data, is_json) = decode_message(payload)
        parts.append(
            b'{"offset":%d,"processor":%b,"number":%d,"ms":%d,%b}'
            % (
                offset,
                _quoted(processor),
                number,
                ms,
                b'"payload":%b' % data if is_json else b'"bytes":"%b"' % base64.b64encode(data),
            )
        )
    return b'{"type":"messages","channel":%b,"count":%d,"messages":[%b],"more":%b%b}' % (
        _quoted(channel),
        len(parts),
        b",".join(parts),
        b"true" if more else b"false",
        b',"lost":%d' % lost if lost else b"",
    )


def messages_value(
    channel: str, payloads: Sequence[tuple[int, int, bytes]], more: bool, lost: int, *, binary: bool
) -> dict[str, Any]:
    messages = []
    for offset, ms, payload in payloads:
        processor, number, told = decode_message(payload)
        one = {"offset": offset, "processor": processor, "number": number, "ms": ms}
        messages.append(one | content(told, binary=binary))
    value = {"type": "messages", "channel": channel, "count": len(messages)}
    value |= {"messages": messages, "more": more}
    return value | ({"lost": lost} if lost else {})


def encode_sent(channel: str, number: int, offset: int) -> bytes:
    """Encode `sent`, the most frequent answer, in JSON."""
    text = b'{"type":"sent","channel":%b,"number":%d,"offset":%d}'
    return websocket.frame(text % (_quoted(channel), number, offset), websocket.TEXT)


def encode_acked(channel: str, offset: int) -> bytes:
    text = b'{"type":"acked","channel":%b,"offset":%d}'
    return websocket.frame(text % (_quoted(channel), offset), websocket.TEXT)


@lru_cache(maxsize=8192)
def _quoted(text: str) -> bytes:
    return to_json(text)
