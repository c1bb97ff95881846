"""The messages of one connection as lines, in both directions. Each protocol has a class.

They decode the bytes once more, with the same decoders as clients and servers: nothing here touches a
session. Elsewhere: who is followed, and how lines reach a reader (`tracing.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from headrace.model import CHANNEL_PREFIX, RECORD_HEADER_BYTES
from headrace.server.trace.lines import Line, scalars
from headrace.wire import readers, websocket
from headrace.wire.figg import decoder as figg_decoder
from headrace.wire.figg import messages as figg
from headrace.wire.logux import messages as logux
from headrace.wire.wombat import decoder as wombat_decoder
from headrace.wire.wombat import messages as wombat

Received = bytes | Sequence[bytes | str]
"""What one read brought: a piece of a stream, or whole WebSocket messages."""


class Outline(Protocol):
    def received(self, data: Any) -> list[Line]:
        """Return lines for what a read brought."""

    def sent(self, data: bytes) -> list[Line]:
        """Return lines for what was written: whole messages."""


def outline(protocol: str, unfinished: bytes, topic: str | None) -> Outline:
    """Return the outline of a connection that has received the `unfinished` beginning of a message.

    `topic` is the topic of all its messages, if its protocol has one.
    """
    if protocol == "figg":
        return FiggOutline(unfinished)
    if protocol == "wombat":
        return WombatOutline()
    return ArrayOutline(topic) if protocol == "logux" else ObjectOutline()


class FiggOutline:
    def __init__(self, unfinished: bytes) -> None:
        self._in = figg_decoder.ServerDecoder()
        self._out = figg_decoder.ClientDecoder()
        self._in.receive(unfinished)

    def received(self, data: bytes) -> list[Line]:
        found = self._in.receive(data)
        while self._in.unread:
            found += self._in.receive(b"")
        return [line for message in found for line in _figg_lines(message)]

    def sent(self, data: bytes) -> list[Line]:
        return [line for message in self._out.receive(data) for line in _figg_lines(message)]


def _figg_lines(message: figg.ToServer | figg.ToClient) -> Iterator[Line]:
    if isinstance(message, figg.Publishes):
        # The numbers are those of all topics of this read.
        numbers = _span("number", message.lowest, message.highest)
        for topic, records in message.records.items():
            yield _batch("publish", topic, numbers, _payloads_of(records))
    elif isinstance(message, figg.Data):
        offsets = _span("next_offset", message.messages[0][0], message.messages[-1][0])
        payloads = [payload for _, payload in message.messages]
        yield _batch("data", message.topic, offsets, payloads)
    else:
        yield _plain(message)


class WombatOutline:
    def __init__(self) -> None:
        self._in = wombat_decoder.ServerDecoder()
        self._out = wombat_decoder.ClientDecoder()

    def received(self, data: Sequence[bytes]) -> list[Line]:
        return [line for one in self._in.receive(data) for line in _wombat_lines(one)]

    def sent(self, data: bytes) -> list[Line]:
        lines, messages = _unframed(data)
        return [line for one in self._out.receive(messages) for line in _wombat_lines(one)] + lines


def _wombat_lines(message: wombat.ToServer | wombat.ToClient) -> Iterator[Line]:
    if isinstance(message, wombat.Publishes):
        for topic, records in message.records.items():
            numbers = message.numbers[topic]
            span = _span("number", numbers[0], numbers[-1])
            yield _batch("publish", topic, span, _payloads_of(records))
    elif isinstance(message, wombat.Payloads):
        serials = _span("serial", message.messages[0][0], message.messages[-1][0])
        yield _batch("payload", message.topic, serials, [one for _, one in message.messages])
    else:
        yield _plain(message)


class _ValueOutline:
    """Messages that are one JSON or MessagePack value each."""

    def received(self, data: Sequence[bytes | str]) -> list[Line]:
        return [
            self._line(one.encode(), is_binary=False)
            if isinstance(one, str)
            else self._line(one, is_binary=True)
            for one in data
        ]

    def sent(self, data: bytes) -> list[Line]:
        lines, messages = _unframed(data, lambda one, binary: self._line(one, is_binary=binary))
        assert not messages
        return lines

    def _line(self, data: bytes, *, is_binary: bool) -> Line:
        try:
            value = logux.unpack(data, binary=is_binary)
            return self._line_of(value, data)
        except logux.BadLoguxMessageError as error:
            return Line("bad", fields={"reason": str(error)}, size=len(data))

    def _line_of(self, value: Any, data: bytes) -> Line:
        raise NotImplementedError


class ArrayOutline(_ValueOutline):
    """Logux: a message is an array that begins with its type."""

    def __init__(self, topic: str | None) -> None:
        self._topic = topic

    def _line_of(self, value: Any, data: bytes) -> Line:
        message = logux.parse(value)
        line = Line(logux.type_of(message), self._topic, scalars(message._asdict()))
        if isinstance(message, logux.Sync):
            line.messages, line.size = len(message.events), len(data)
            line.payloads = [msgspec.json.encode(event) for event, _ in message.events]
        return line


class ObjectOutline(_ValueOutline):
    """Channels: a message is an object with its type."""

    def _line_of(self, value: Any, data: bytes) -> Line:
        if not isinstance(value, dict):
            return Line("bad", fields={"reason": "a message is an object"}, size=len(data))
        kind, channel = value.get("type"), value.get("channel")
        line = Line(kind if isinstance(kind, str) else "bad", fields=scalars(value))
        line.fields.pop("channel", None)
        if isinstance(channel, str):
            line.topic = CHANNEL_PREFIX + channel
        held = value.get("messages")
        if isinstance(held, list) and held and all(isinstance(one, dict) for one in held):
            line.fields.pop("count", None)
            line.messages = len(held)
            line.fields |= _span("offset", held[0].get("offset"), held[-1].get("offset"))
        else:
            held = [value]
        line.payloads = [_content(one) for one in held if "payload" in one or "bytes" in one]
        if line.payloads:
            line.size = sum(map(len, line.payloads))
        return line


def _content(message: dict[str, Any]) -> bytes:
    found = message.get("bytes", message.get("payload"))
    return found if isinstance(found, bytes) else msgspec.json.encode(found)


def _plain(message: Any) -> Line:
    """Return the line of a message that is not about several records of one topic."""
    is_struct = isinstance(message, msgspec.Struct)
    values = msgspec.structs.asdict(message) if is_struct else message._asdict()
    if isinstance(message, figg.Ack):
        values = {"number": message.seq_num}
    fields = scalars(values)
    line = Line(type(message).__name__.lower(), fields.pop("topic", None), fields)
    if isinstance(message, readers.Records):
        line.size, line.payloads = len(message.data), [message.data]
    return line


def _batch(kind: str, topic: str, span: dict[str, Any], payloads: list[bytes]) -> Line:
    return Line(kind, topic, span, len(payloads), sum(map(len, payloads)), payloads)


def _span(name: str, first: Any, last: Any) -> dict[str, Any]:
    return scalars({name: first}) | ({f"to_{name}": last} if first != last else {})


def _payloads_of(records: list[bytes]) -> list[bytes]:
    return [record[RECORD_HEADER_BYTES:] for record in records]


def _unframed(
    data: bytes, line_of: Callable[[bytes, bool], Line] | None = None
) -> tuple[list[Line], list[bytes]]:
    """Split what the server has written into frames, none of which is a fragment or masked.

    Return lines, and the messages for which there is no `line_of`.
    """
    lines: list[Line] = []
    messages: list[bytes] = []
    for opcode, payload in websocket.frames(data):
        if opcode in (websocket.PING, websocket.PONG):
            lines.append(Line("ping" if opcode == websocket.PING else "pong"))
        elif opcode not in (websocket.TEXT, websocket.BINARY):
            lines.append(Line("close frame"))
        elif line_of is None:
            messages.append(payload)
        else:
            lines.append(line_of(payload, opcode == websocket.BINARY))
    return lines, messages
