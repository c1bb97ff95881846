"""Messages of channels at a client: what it says in MessagePack, and what a server says to it.

What is decoded here has the right types in every field, and fields that are not named are passed over. JSON
is decoded to values at once: a client hands them on.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from headrace.channel_envelope import NUMBER_MAX, BadMessageError, Content, Message, encode_message
from headrace.errors import PayloadTooLargeError
from headrace.wire import logux
from headrace.wire.channel import MESSAGE_BYTES_MAX, BadChannelMessageError
from headrace.wire.channel import Message as Request

ANSWER_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
"""The largest message of a server: a state, or some messages, may be longer in MessagePack than in JSON."""

_ROOM_BYTES = 1024
"""What an upload may have beside its state."""

_Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]


class _Answer(msgspec.Struct, tag_field="type", tag=str.lower):
    """Fields that are not named are passed over."""


class Welcome(_Answer):
    processor: str
    version: int
    ping_s: Annotated[float, Meta(gt=0)]


class Missed(msgspec.Struct, frozen=True):
    """Messages that a processor has not acknowledged, and will never see."""

    messages: int | None
    """How many there were in the log, also of its own; None when nobody can say."""
    reason: str
    """`trimmed`: it was away for longer than its lease; `destroyed`: everyone was away; `lost`: the log
    was damaged."""


class _Held(msgspec.Struct):
    """Something with a content: JSON or bytes."""

    payload: Any = UNSET
    data: bytes | UnsetType = msgspec.field(name="bytes", default=UNSET)

    @property
    def is_json(self) -> bool:
        return self.data is UNSET

    @property
    def content(self) -> Any:
        return self.payload if self.data is UNSET else self.data


class State(_Held, kw_only=True):
    """A snapshot."""

    offset: _Offset
    epoch: _Count


class Delivered(_Held, kw_only=True):
    """A message of another processor."""

    offset: _Offset
    processor: str
    number: _Count
    ms: int


class Joined(_Answer):
    channel: str
    start: _Offset
    end: _Offset
    cursor: _Offset
    number: _Count
    missed: Missed | None = None
    snapshot: State | None = None


class Sent(_Answer):
    channel: str
    number: _Count
    offset: _Offset | None = None


class Messages(_Answer):
    channel: str
    messages: list[Delivered]
    more: bool = False
    lost: _Count = 0


class Signal(_Answer):
    channel: str


class Acked(_Answer):
    channel: str
    offset: _Offset


class Uploaded(_Answer):
    channel: str
    offset: _Offset


class Snapshot(_Answer):
    channel: str
    snapshot: State | None = None


class Left(_Answer):
    channel: str
    reason: str = ""


class Pong(_Answer):
    pass


class Error(_Answer):
    code: str
    retry: bool
    text: str
    of: str = ""
    channel: str = ""
    number: _Count | None = None


Answer = (
    Welcome | Joined | Sent | Messages | Signal | Acked | Uploaded | Snapshot | Left | Pong | Error
)

_decode = msgspec.msgpack.Decoder(Answer).decode
_encode = msgspec.msgpack.Encoder().encode


def decode_answer(data: bytes) -> Answer:
    """A message of a server. Raises `BadChannelMessageError`."""
    try:
        answer: Answer = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadChannelMessageError(f"this is no message of a channel's server: {error}") from None
    for held in _held(answer):
        if (held.payload is UNSET) is (held.data is UNSET):
            raise BadChannelMessageError("a content is a `payload` or `bytes`, and not both")
    return answer


def encode_request(message: Request) -> bytes:
    """A message of a client, without a frame."""
    return _encode(message)


class Fields(msgspec.Struct, frozen=True):
    """A content on its way to a server, checked and encoded."""

    payload: Raw | UnsetType = UNSET
    data: bytes | UnsetType = UNSET

    def __len__(self) -> int:
        return len(self.payload if isinstance(self.payload, Raw) else self.data or b"")


def message_fields(content: Any, processor: str) -> Fields:
    """What a message has in it; raises BadMessageError or PayloadTooLargeError for what no server takes."""
    fields, stored = _fields(content)
    try:
        encode_message(Message(processor, 1, stored))
    except BadMessageError as error:
        raise PayloadTooLargeError(str(error)) from None
    return fields


def state_fields(content: Any) -> Fields:
    """The same of an upload: how large a state may be, the server says."""
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
        # As a server will do.
        packed = logux.pack(content, binary=True)
        same = logux.unpack(packed, binary=True)
        text = msgspec.json.encode(same)
    except (logux.BadMessageError, TypeError, ValueError, RecursionError) as error:
        raise BadMessageError(f"a message is bytes, or only what JSON has: {error}") from None
    if same != content:
        raise BadMessageError(
            "a message is bytes, or only what JSON has: None, bool, int from -2^63 to 2^64-1, float, str, "
            "list, dict"
        )
    return Fields(payload=Raw(packed)), Content(text, True)


def _held(answer: Answer) -> list[Any]:
    if type(answer) is Messages:
        return answer.messages
    if isinstance(answer, Joined | Snapshot) and answer.snapshot is not None:
        return [answer.snapshot]
    return []
