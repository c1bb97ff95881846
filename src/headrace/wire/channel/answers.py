"""Messages of channels on the client side: encode requests in MessagePack, decode a server's answers.

A decoded answer has the right type in every field, and unknown fields are ignored. JSON content is decoded
to values at once, because a client hands the values to the application.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from headrace.errors import PayloadTooLargeError
from headrace.payload.channel import (
    NUMBER_MAX,
    BadMessageError,
    Content,
    StoredMessage,
    encode_message,
)
from headrace.wire.channel.messages import MESSAGE_BYTES_MAX, BadChannelMessageError
from headrace.wire.channel.messages import Message as Request
from headrace.wire.logux import messages as logux

ANSWER_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
"""Size limit of a server's message: a state, or many messages, may be longer in MessagePack than in JSON."""

_ROOM_BYTES = 1024
"""Room in an upload for everything besides its state."""

_Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]


def _tag(name: str) -> str:
    return name.removesuffix("Answer").lower()


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

_decode = msgspec.msgpack.Decoder(Answer).decode
_encode = msgspec.msgpack.Encoder().encode


def decode_answer(data: bytes) -> Answer:
    """Decode a server's message. Raises `BadChannelMessageError`."""
    try:
        answer: Answer = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadChannelMessageError(f"this is no message of a channel's server: {error}") from None
    for held in _held(answer):
        if (held.payload is UNSET) is (held.data is UNSET):
            raise BadChannelMessageError("a content is a `payload` or `bytes`, and not both")
    return answer


def encode_request(message: Request) -> bytes:
    """Encode a client's message, without a WebSocket frame."""
    return _encode(message)


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
    except BadMessageError as error:
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
