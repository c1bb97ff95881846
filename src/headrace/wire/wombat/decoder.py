"""Wombat decoders: the MessagePack messages of one read become as few decoded messages as possible.

The MessagePack library skips unused fields without building them. Publishes and payloads are the hot path:
those of one read become one `Publishes` on the server, one `Payloads` per run of one topic on the client.

An error of the peer ends the stream: the last message is then a `Bad` with close code and reason, and the
messages before it still count.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headrace.errors import BadTopicNameError
from headrace.model import (
    PAYLOAD_BYTES_MAX,
    TOKEN_BYTES_MAX,
    RefusedPublish,
    check_publish_topic,
    check_topic_name,
    refusal_of,
)
from headrace.wire import readers, tokens, websocket
from headrace.wire.wombat import messages as wombat
from headrace.wire.wombat.messages import Attach, Bad, Detach, Number, Ping, ToClient, ToServer

_U32 = struct.Struct(">I")

T = TypeVar("T")


class _Publish(Struct, gc=False):
    topic: str
    message: bytes
    sequence_number: Number


class _PlainPublish(Struct, gc=False):
    """A publish as most encoders write it. Other forms take a slower path."""

    type: Literal[3]
    publish: _Publish


class _AnyPublish(Struct):
    """A publish with its payload in any form that an encoder may choose."""

    topic: str
    message: Raw
    sequence_number: Number


class _RawPublish(Struct):
    """A publish whose topic need not be text."""

    topic: Raw
    message: Raw
    sequence_number: Number


class _RefusedPublish(Struct):
    type: Literal[3]
    publish: _RawPublish


class _Timestamp(Struct):
    timestamp: Raw


class _Read(Struct):
    topic: str
    reader: str
    instance: readers.Natural
    window: readers.Natural
    start: Literal["oldest", "newest"] = "oldest"


class _ToServer(Struct):
    type: int
    attach: Attach | UnsetType = UNSET
    publish: _AnyPublish | UnsetType = UNSET
    ping: _Timestamp | UnsetType = UNSET
    detach: Detach | UnsetType = UNSET
    read: _Read | UnsetType = UNSET
    handled: readers.Handled | UnsetType = UNSET
    auth: tokens.Auth | UnsetType = UNSET


class _BadMessageError(Exception):
    """A message cannot be decoded. The error becomes a `Bad` before it leaves this module."""

    def __init__(self, reason: str, code: int = websocket.PROTOCOL_ERROR) -> None:
        super().__init__(reason)
        self.code = code


class ServerDecoder:
    """Decoder for the messages of clients.

    All publishes of one read are one message, after all others except a `Bad`. Their order relative to an
    ATTACH does not matter: the answer to ATTACH is the end of the topic on disk, where these publishes are
    not stored yet.
    """

    __slots__ = ("closed",)

    def __init__(self) -> None:
        self.closed = False

    def receive(self, messages: Sequence[bytes]) -> list[ToServer]:
        """Return the decoded messages. After a `Bad`, all input is ignored."""
        out: list[ToServer] = []
        if self.closed:
            return out
        records: dict[str, list[bytes]] = {}
        numbers: dict[str, list[int]] = {}
        in_order, expected = True, -1
        bad: Bad | None = None
        message = b""
        try:
            for index, message in enumerate(messages):
                found = _to_server(message)
                if not isinstance(found, _Publish):
                    out.append(found)
                    continue
                topic, payload, number = found.topic, found.message, found.sequence_number
                if len(payload) > PAYLOAD_BYTES_MAX:
                    raise _BadMessageError(
                        f"a payload of {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX} are allowed",
                        websocket.TOO_BIG,
                    )
                if topic not in records:
                    check_publish_topic(topic)
                    records[topic], numbers[topic] = [], []
                if not index and (alike := _cut(messages, payload)) is not None:
                    records[topic], numbers[topic] = alike
                    in_order = numbers[topic] == list(range(number, number + len(messages)))
                    break
                records[topic].append(_U32.pack(len(payload)) + payload)
                numbers[topic].append(number)
                if number != expected and expected >= 0:
                    in_order = False
                expected = (number + 1) % wombat.SEQUENCE_NUMBERS
        except (_BadMessageError, BadTopicNameError) as error:
            self.closed = True
            code = getattr(error, "code", websocket.POLICY_VIOLATION)
            bad = Bad(code, str(error), _refused_publish(message))
        if records:
            out.append(wombat.Publishes(records, numbers, in_order))
        if bad is not None:
            out.append(bad)
        return out


def _to_server(
    message: bytes,
) -> Attach | Detach | Ping | readers.ToServer | tokens.Auth | _Publish:
    try:
        return _publish_decoder.decode(message).publish
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # not a plain publish: the code below finds its type or its error
    found = _fields(_decode(_to_server_decoder, message), "a client")
    if isinstance(found, _AnyPublish):
        return _Publish(found.topic, _payload(found.message), found.sequence_number)
    if isinstance(found, _Timestamp):
        _decode(_number_decoder, found.timestamp)
        return Ping(bytes(found.timestamp))
    if isinstance(found, tokens.Auth) and len(found.token.encode()) > TOKEN_BYTES_MAX:
        raise _BadMessageError(f"a token may have {TOKEN_BYTES_MAX} bytes")
    if isinstance(found, readers.Handled | tokens.Auth):
        return found
    check_topic_name(found.topic)
    if isinstance(found, _Read):
        newest = found.start == "newest"
        return readers.Read(found.topic, found.reader, newest, found.instance, found.window)
    return found if isinstance(found, Detach) or found.serial else Attach(found.topic)


_ALIKE = 64
"""Number of messages that one `unpack` cuts. Fewer messages are decoded one by one."""

_BEGINNING = b"\x82\xa4type\x03\xa7publish\x83"
"""`{type: 3, publish: {` with three fields. If the last two end the message, it has no other fields."""

_NUMBER_KEYS = tuple(
    (msgspec.msgpack.encode("sequence_number") + kind, code)
    for kind, code in ((b"\xce", "I"), (b"\xcd", "H"))
)
"""The last field's name with the type byte of its number, and the struct code of the number.

MessagePack writes the smallest numbers in other ways: those messages are decoded one by one.
"""


def _cut(messages: Sequence[bytes], payload: bytes) -> tuple[list[bytes], list[int]] | None:
    """Cut publishes that differ only in payload and number into records and numbers; None for other messages.

    Publishers often send many messages of one size, with the fields in the protocol's order and no other
    fields. `payload` is that of the first. To check the form of all, the messages are built again from the
    parts and compared.
    """
    if len(messages) < _ALIKE or len(set(map(len, messages))) > 1:
        return None
    first = messages[0]
    layout = _layout(first, payload)
    if layout is None:
        return None
    start, key, code = layout
    number_bytes = struct.calcsize(code)
    form = first[:start].replace(b"%", b"%%") + b"%b" + key + b"%b"
    records: list[bytes] = []
    numbers: list[bytes] = []
    record_head = _U32.pack(len(payload))
    for at in range(0, len(messages), _ALIKE):
        some = messages[at : at + _ALIKE]
        data = b"".join(some)
        fields = _alike_struct(start, len(payload), len(key), number_bytes, len(some)).unpack(data)
        if form * len(some) % fields != data:
            return None
        records += map(record_head.__add__, fields[::2])
        numbers += fields[1::2]
    return records, list(struct.unpack(f">{len(numbers)}{code}", b"".join(numbers)))


@lru_cache(maxsize=4 * _ALIKE)
def _alike_struct(
    head_bytes: int, payload_bytes: int, key_bytes: int, number_bytes: int, count: int
) -> struct.Struct:
    """Return the struct that reads payload and number of `count` messages and skips the rest."""
    one = f"{head_bytes}x{payload_bytes}s{key_bytes}x{number_bytes}s"
    return struct.Struct(one * count)


def _layout(message: bytes, payload: bytes) -> tuple[int, bytes, str] | None:
    """Return the start of the payload, the bytes behind it, and the struct code of the number at the end."""
    if not message.startswith(_BEGINNING):
        return None
    for key, code in _NUMBER_KEYS:
        stop = len(message) - struct.calcsize(code) - len(key)
        start = stop - len(payload)
        if message.startswith(key, stop) and message.endswith(_payload_heads(payload), 0, start):
            return start, key, code
    return None


def _payload_heads(payload: bytes) -> tuple[bytes, ...]:
    """Return the bytes that may precede a payload: its key with each MessagePack form of its size."""
    size = _U32.pack(len(payload))
    ways = [b"\xc6" + size]
    if len(payload) < 1 << 16:
        ways.append(b"\xc5" + size[2:])
    if len(payload) < 1 << 8:
        ways.append(b"\xc4" + size[3:])
    return tuple(msgspec.msgpack.encode("message") + way for way in ways)


# Messages of servers


class _Payload(Struct, gc=False):
    topic: str
    serial: str
    message: bytes


class _PlainPayload(Struct, gc=False):
    """A payload as most encoders write it. Other forms take a slower path."""

    type: Literal[5]
    payload: _Payload


class _AnyPayload(Struct):
    topic: str
    serial: str
    message: Raw


class _ToClient(Struct):
    type: int
    payload: _AnyPayload | UnsetType = UNSET
    ack: wombat.Ack | UnsetType = UNSET
    attached: wombat.Attached | UnsetType = UNSET
    pong: wombat.Pong | UnsetType = UNSET
    detached: wombat.Detached | UnsetType = UNSET
    waiting: readers.Waiting | UnsetType = UNSET
    reading: readers.Reading | UnsetType = UNSET
    records: readers.Records | UnsetType = UNSET
    stored: readers.Stored | UnsetType = UNSET
    lost: readers.Lost | UnsetType = UNSET
    auth_ok: tokens.AuthOk | UnsetType = UNSET
    auth_refused: tokens.AuthRefused | UnsetType = UNSET


class ClientDecoder:
    """Decoder for the messages of servers."""

    __slots__ = ("closed",)

    def __init__(self) -> None:
        self.closed = False

    def receive(self, messages: Sequence[bytes]) -> list[ToClient]:
        """Return the decoded messages. After a `Bad`, all input is ignored."""
        out: list[ToClient] = []
        if self.closed:
            return out
        topic: str | None = None
        payloads: list[tuple[str, bytes]] = []
        try:
            for message in messages:
                found = _to_client(message)
                if found is None:
                    continue
                if not isinstance(found, _Payload):
                    out.append(found)
                    topic = None
                    continue
                if found.topic != topic:
                    topic, payloads = found.topic, []
                    out.append(wombat.Payloads(topic, payloads))
                payloads.append((found.serial, found.message))
        except _BadMessageError as error:
            self.closed = True
            out.append(Bad(error.code, str(error)))
        return out


def _to_client(message: bytes) -> ToClient | _Payload | None:
    """Decode a message; None for an unknown type, which a client can ignore."""
    try:
        return _payload_decoder.decode(message).payload
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # not a plain payload: the code below finds its type or its error
    found = _decode(_to_client_decoder, message)
    if found.type not in wombat.NAMES:
        return None
    fields = _fields(found, "a server")
    if isinstance(fields, _AnyPayload):
        return _Payload(fields.topic, fields.serial, _payload(fields.message))
    return fields  # type: ignore[no-any-return]


# Both sides


def _refused_publish(message: bytes) -> RefusedPublish | None:
    """Return the number of a bad PUBLISH and why it stays refused; None for other messages and errors."""
    try:
        publish = _refused_decoder.decode(message).publish
        payload_bytes = len(_payload(publish.message))
    except (msgspec.MsgspecError, _BadMessageError, UnicodeDecodeError, RecursionError):
        return None
    topic = _text_bytes(bytes(publish.topic))
    if topic is None:
        return None
    why = refusal_of(topic, payload_bytes)
    return None if why is None else RefusedPublish(why, publish.sequence_number)


def _text_bytes(raw: bytes) -> bytes | None:
    """Return the bytes of a MessagePack string, valid UTF-8 or not; None for a value of another type."""
    first = raw[0]
    if 0xA0 <= first <= 0xBF:
        return raw[1:]
    size_bytes = {0xD9: 1, 0xDA: 2, 0xDB: 4}.get(first)
    return None if size_bytes is None else raw[1 + size_bytes :]


_publish_decoder = msgspec.msgpack.Decoder(_PlainPublish)
_refused_decoder = msgspec.msgpack.Decoder(_RefusedPublish)
_to_server_decoder = msgspec.msgpack.Decoder(_ToServer)
_payload_decoder = msgspec.msgpack.Decoder(_PlainPayload)
_to_client_decoder = msgspec.msgpack.Decoder(_ToClient)
_numbers_decoder = msgspec.msgpack.Decoder(list[Annotated[int, Meta(ge=0, le=255)]])
_text_decoder = msgspec.msgpack.Decoder(str)
_bytes_decoder = msgspec.msgpack.Decoder(bytes)
_number_decoder = msgspec.msgpack.Decoder(int | float)


def _fields(message: _ToServer | _ToClient, sender: str) -> Any:
    """Return the fields of a message, which are under the name of its type."""
    name = wombat.NAMES.get(message.type)
    if name is None:
        raise _BadMessageError(f"unknown message type {message.type}")
    fields = getattr(message, name, None)
    if fields is None:
        raise _BadMessageError(f"{name.upper()} is not for {sender} to send")
    if fields is UNSET:
        raise _BadMessageError(f"a message of type {message.type} without `{name}`")
    return fields


def _decode(decoder: msgspec.msgpack.Decoder[T], message: bytes | Raw) -> T:
    try:
        return decoder.decode(message)
    except msgspec.MsgspecError as error:
        raise _BadMessageError(f"not a message of this protocol: {error}") from None
    except UnicodeDecodeError:
        raise _BadMessageError("a string is not UTF-8") from None
    except RecursionError:
        raise _BadMessageError("a message nested too deeply") from None


def _payload(raw: Raw) -> bytes:
    """Return the bytes of a `message`: MessagePack's bin, a string, or an array of small integers."""
    first = memoryview(raw)[0]
    if 0xC4 <= first <= 0xC6:
        return _decode(_bytes_decoder, raw)
    if 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB:
        return _decode(_text_decoder, raw).encode()
    return bytes(_decode(_numbers_decoder, raw))
