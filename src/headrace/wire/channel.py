"""Messages of channels in both directions: JSON in text frames, MessagePack in binary frames.

A decoded message has the right type in every field, and unknown fields are ignored. The session decides what
the message means. A server keeps a JSON payload as text, because it is stored and delivered unchanged. A
client uses MessagePack only, and decodes JSON content to values at once, for the application.
"""

import base64
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from headrace.errors import HeadraceError, PayloadTooLargeError
from headrace.payload.channel import (
    NUMBER_MAX,
    BadMessageError,
    Content,
    MessageTooLargeError,
    StoredMessage,
    check_json,
    decode_message,
    encode_message,
)
from headrace.payload.json_limits import why_not
from headrace.wire import websocket
from headrace.wire.logux import messages as logux

PATH = "/v1/channels"

VERSION = 1

MESSAGE_BYTES_MAX = 2 << 20
"""Size limit of a client's message: an upload of the largest state, in base64."""

ANSWER_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
"""Size limit of a server's message: a state, or many messages, may be longer in MessagePack than in JSON."""

_ROOM_BYTES = 1024
"""Room in an upload for everything besides its state."""

OFFSET_MAX = (1 << 63) - 1

INSTANCE_LENGTH_MAX = 255

LEASE_S_MIN, LEASE_S_MAX = 1.0, 31_536_000.0
"""Shortest and longest lease that a processor may choose."""

_Number = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
_Offset = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
_Count = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]


class BadChannelMessageError(HeadraceError):
    """The peer sent an invalid message; the text says what is wrong."""


def _tag(name: str) -> str:
    return name.removesuffix("Request").removesuffix("Answer").lower()


# Messages of clients


class _Message(msgspec.Struct, tag_field="type", tag=_tag, gc=False):
    """Base of a client's messages. Unknown fields are ignored."""


class Hello(_Message):
    processor: str
    token: Any = None
    instance: Annotated[str, Meta(max_length=INSTANCE_LENGTH_MAX)] = ""
    """Name of the client while it runs, the same on all its connections. `attempt` counts the connections."""
    attempt: _Count = 0


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
    messages_max: Annotated[int, Meta(ge=1, le=1 << 31)] | None = msgspec.field(
        name="max", default=None
    )


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


# Encoding of a server's messages

to_json = msgspec.json.Encoder().encode

encode = logux.encode
"""Encode a server's message in a WebSocket frame. `content` makes the fields of a content in it."""


def content(content: Content, *, binary: bool) -> dict[str, Any]:
    """Return the message fields that carry a content."""
    if not content.is_json:
        return {"bytes": content.data}
    return {"payload": msgspec.json.decode(content.data) if binary else Raw(content.data)}


def encode_messages(
    channel: str, payloads: Sequence[tuple[int, int, bytes]], more: bool, lost: int, *, binary: bool
) -> bytes:
    """Encode messages from the log, each with its offset and time, in a server's WebSocket frame."""
    if not binary:
        return websocket.frame(messages_json(channel, payloads, more, lost), websocket.TEXT)
    messages = []
    for offset, ms, payload in payloads:
        processor, number, told = decode_message(payload)
        one = {"offset": offset, "processor": processor, "number": number, "ms": ms}
        messages.append(one | content(told, binary=True))
    value: dict[str, Any] = {"type": "messages", "channel": channel, "count": len(messages)}
    value |= {"messages": messages, "more": more} | ({"lost": lost} if lost else {})
    return encode(value, binary=True)


def messages_json(
    channel: str, payloads: Sequence[tuple[int, int, bytes]], more: bool, lost: int
) -> bytes:
    parts = []
    for offset, ms, payload in payloads:
        processor, number, (data, is_json) = decode_message(payload)
        held = b'"payload":%b' % data if is_json else b'"bytes":"%b"' % base64.b64encode(data)
        parts.append(
            b'{"offset":%d,"processor":%b,"number":%d,"ms":%d,%b}'
            % (offset, _quoted(processor), number, ms, held)
        )
    return b'{"type":"messages","channel":%b,"count":%d,"messages":[%b],"more":%b%b}' % (
        _quoted(channel),
        len(parts),
        b",".join(parts),
        b"true" if more else b"false",
        b',"lost":%d' % lost if lost else b"",
    )


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


# A client's side: answers of servers, and the content of its own messages


class _Answer(msgspec.Struct, tag_field="type", tag=_tag):
    """Base of a server's messages. Unknown fields are ignored."""


class Welcome(_Answer):
    processor: str
    version: int
    ping_s: Annotated[float, Meta(gt=0)]


class MissedMessages(msgspec.Struct, frozen=True):
    """Messages that a processor has not acknowledged and will never receive."""

    messages: int | None
    """Number of these messages in the log, including the processor's own; None if it is unknown."""
    reason: str
    """`trimmed`: the processor was away for longer than its lease. `destroyed`: all processors were away.
    `lost`: the log was damaged."""


class _Held(msgspec.Struct):
    """Base of messages with a content: JSON or bytes."""

    payload: Any = UNSET
    data: bytes | UnsetType = msgspec.field(name="bytes", default=UNSET)

    @property
    def is_json(self) -> bool:
        return self.data is UNSET

    @property
    def content(self) -> Any:
        return self.payload if self.data is UNSET else self.data


class SnapshotBody(_Held, kw_only=True):
    """A snapshot, as a server sends it."""

    offset: _Offset
    epoch: _Count


class Delivered(_Held, kw_only=True):
    """A message of the channel, with the processor that sent it."""

    offset: _Offset
    processor: str
    number: _Count
    ms: int


class JoinedAnswer(_Answer):
    channel: str
    start: _Offset
    end: _Offset
    cursor: _Offset
    number: _Count
    missed: MissedMessages | None = None
    snapshot: SnapshotBody | None = None


class SentAnswer(_Answer):
    channel: str
    number: _Count
    offset: _Offset | None = None


class MessagesAnswer(_Answer):
    channel: str
    messages: list[Delivered]
    more: bool = False
    lost: _Count = 0


class Signal(_Answer):
    channel: str


class Acked(_Answer):
    channel: str
    offset: _Offset


class UploadedAnswer(_Answer):
    channel: str
    offset: _Offset


class SnapshotAnswer(_Answer):
    channel: str
    snapshot: SnapshotBody | None = None


class LeftAnswer(_Answer):
    channel: str
    reason: str = ""


class Pong(_Answer):
    pass


class ErrorAnswer(_Answer):
    code: str
    retry: bool
    text: str
    of: str = ""
    channel: str = ""
    number: _Count | None = None


Answer = (
    Welcome
    | JoinedAnswer
    | SentAnswer
    | MessagesAnswer
    | Signal
    | Acked
    | UploadedAnswer
    | SnapshotAnswer
    | LeftAnswer
    | Pong
    | ErrorAnswer
)

_from_server = msgspec.msgpack.Decoder(Answer).decode

encode_request = msgspec.msgpack.Encoder().encode
"""Encode a client's message, without a WebSocket frame."""


def decode_answer(data: bytes) -> Answer:
    """Decode a server's message. Raises `BadChannelMessageError`."""
    try:
        answer: Answer = _from_server(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadChannelMessageError(f"this is no message of a channel's server: {error}") from None
    for held in _held(answer):
        if (held.payload is UNSET) is (held.data is UNSET):
            raise BadChannelMessageError("a content is a `payload` or `bytes`, and not both")
    return answer


class Fields(msgspec.Struct, frozen=True):
    """A content that is checked and encoded for a server."""

    payload: Raw | UnsetType = UNSET
    data: bytes | UnsetType = UNSET

    def __len__(self) -> int:
        return len(self.payload if isinstance(self.payload, Raw) else self.data or b"")


def message_fields(content: Any, processor: str) -> Fields:
    """Encode a message's content. Raises BadMessageError or PayloadTooLargeError if no server accepts it."""
    fields, stored = _fields(content)
    try:
        encode_message(StoredMessage(processor, 1, stored))
    except MessageTooLargeError as error:
        raise PayloadTooLargeError(str(error)) from None
    return fields


def state_fields(content: Any) -> Fields:
    """Encode an upload's state, with the same errors. Only the server knows how large a state may be."""
    fields, _ = _fields(content)
    if len(fields) > MESSAGE_BYTES_MAX - _ROOM_BYTES:
        raise PayloadTooLargeError(
            f"a state of {len(fields)} bytes in MessagePack is more than a server reads"
        )
    return fields


def _fields(content: Any) -> tuple[Fields, Content]:
    if isinstance(content, bytes | bytearray | memoryview):
        data = bytes(content)
        return Fields(data=data), Content(data, False)
    try:
        # A server unpacks the content and stores it as JSON in the same way.
        packed = logux.pack(content, binary=True)
        same = logux.unpack(packed, binary=True)
        text = msgspec.json.encode(same)
    except (logux.BadLoguxMessageError, TypeError, ValueError, RecursionError) as error:
        raise BadMessageError(f"a message is bytes, or only what JSON has: {error}") from None
    if same != content:
        raise BadMessageError(
            "a message is bytes, or only what JSON has: None, bool, int from -2^63 to 2^64-1, float, str, "
            "list, dict"
        )
    return Fields(payload=Raw(packed)), Content(text, True)


def _held(answer: Answer) -> list[Any]:
    if type(answer) is MessagesAnswer:
        return answer.messages
    if isinstance(answer, JoinedAnswer | SnapshotAnswer) and answer.snapshot is not None:
        return [answer.snapshot]
    return []
