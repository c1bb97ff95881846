"""Figg decoders: bytes in pieces of any size to the messages they complete. They keep only unfinished bytes.

Publishes and data are the hot path, so those of one read become few messages: one `Publishes` on the server,
one `Data` per run of frames of one topic on the client.

An error of the peer ends the stream: the last message is then a `Bad` with the reason, and the messages
before it still count. Sizes are checked in the header, before the body has arrived.
"""

import struct
from functools import lru_cache
from typing import Any

from headrace.errors import BadTopicNameError
from headrace.model import (
    PAYLOAD_BYTES_MAX,
    READER_BYTES_MAX,
    RECORD_HEADER_BYTES,
    RESERVED_TOPIC_BYTES_MAX,
    TOKEN_BYTES_MAX,
    TOPIC_BYTES_MAX,
    Refusal,
    RefusedPublish,
    is_reserved,
    refusal_of,
    reserved_reason,
    topic_bytes_max,
)
from headrace.wire import readers, tokens
from headrace.wire.figg import messages as figg
from headrace.wire.figg.messages import DATA, HEADER, PUBLISH, TAILS, U16, U32, U64, VERSION

_HEADER_BYTES = HEADER.size
_TOPIC_FIELD_MAX = 4 + RESERVED_TOPIC_BYTES_MAX
_PAYLOAD_FIELD_MAX = RECORD_HEADER_BYTES + PAYLOAD_BYTES_MAX

_TO_SERVER_BYTES_MAX = {
    figg.ATTACH: 2 + _TOPIC_FIELD_MAX + 8,
    figg.DETACH: _TOPIC_FIELD_MAX,
    PUBLISH: 4 + TOPIC_BYTES_MAX + 8 + _PAYLOAD_FIELD_MAX,
    figg.PING: 8,
    readers.READ: 2 + _TOPIC_FIELD_MAX + 4 + READER_BYTES_MAX + TAILS[readers.READ].size,
    readers.HANDLED: _TOPIC_FIELD_MAX + TAILS[readers.HANDLED].size,
    tokens.AUTH: TOKEN_BYTES_MAX,
}
_TO_CLIENT_BYTES_MAX = {
    figg.ATTACHED: _TOPIC_FIELD_MAX + 8,
    figg.DETACHED: _TOPIC_FIELD_MAX,
    figg.ACK: 8,
    DATA: _TOPIC_FIELD_MAX + 8 + _PAYLOAD_FIELD_MAX,
    figg.PONG: 8,
    readers.WAITING: _TOPIC_FIELD_MAX + TAILS[readers.WAITING].size,
    readers.READING: _TOPIC_FIELD_MAX + TAILS[readers.READING].size,
    readers.RECORDS: _TOPIC_FIELD_MAX + TAILS[readers.RECORDS].size + readers.RECORDS_BYTES_MAX,
    readers.STORED: _TOPIC_FIELD_MAX + TAILS[readers.STORED].size,
    readers.LOST: _TOPIC_FIELD_MAX + TAILS[readers.LOST].size + readers.REASON_BYTES_MAX,
    tokens.AUTH_OK: 8,
    tokens.AUTH_REFUSED: U16.size + tokens.REASON_BYTES_MAX,
}
_OWN = ("ATTACH", "ATTACHED", "DETACH", "DETACHED", "PUBLISH", "ACK", "DATA", "PING", "PONG")
_NAMES = dict(enumerate(_OWN, figg.ATTACH)) | {
    kind: name.upper() for kind, name in (readers.NAMES | tokens.NAMES).items()
}

_NOTHING_KNOWN = struct.Struct(">QI")
"""Placeholder for the struct of a frame until the first topic is known."""


class _Decoder:
    """Buffer of unfinished bytes. It joins them only when the frame that they begin may be complete."""

    __slots__ = ("_chunks", "_have", "_need", "closed")

    def __init__(self) -> None:
        self.closed = False
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = _HEADER_BYTES

    @property
    def unfinished(self) -> bytes:
        """All bytes that were received and not decoded yet."""
        return b"".join(self._chunks)

    def _take(self, data: bytes) -> bytes:
        """Return all unread bytes, or nothing while the first frame cannot be complete."""
        if not self._chunks:
            return data
        self._chunks.append(data)
        self._have += len(data)
        if self._have < self._need:
            return b""
        whole = b"".join(self._chunks)
        self._chunks = []
        return whole

    def _keep(self, rest: bytes, need: int) -> None:
        """Put back the bytes that were not decoded; `need` is the size of their frame, or of a header."""
        self._chunks.append(rest)
        self._have = len(rest)
        self._need = need


def _topic(field: bytes) -> str:
    """Return the topic name in a field that begins with the name's length."""
    encoded = field[4:]
    if not encoded:
        raise BadTopicNameError("the topic name is empty")
    if len(encoded) > topic_bytes_max(encoded):
        raise BadTopicNameError(f"the topic name has {len(encoded)} bytes")
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise BadTopicNameError("the topic name is not UTF-8") from None


def _publish_topic(field: bytes) -> str:
    topic = _topic(field)
    if is_reserved(topic):
        raise BadTopicNameError(reserved_reason(topic))
    return topic


class _BadFrameError(Exception):
    """A frame cannot be decoded. The error becomes a `Bad` before it leaves this module."""


CONTROLS_AT_ONCE_MAX = 100
"""Limit of messages other than publishes that one call of `receive` decodes: each is work for a server."""


class ServerDecoder(_Decoder):
    """Decoder for the messages of clients.

    All publishes of one read are one message, after all others except a `Bad`. Their order relative to an
    ATTACH does not matter: the answer to ATTACH is the end of the topic on disk, where these publishes are
    not stored yet.
    """

    __slots__ = ("unread",)

    def __init__(self) -> None:
        super().__init__()
        self.unread = b""
        """Bytes that were left when `receive` reached its limit of messages; its next call begins there."""

    @property
    def unfinished(self) -> bytes:
        return self.unread or super().unfinished

    def forget(self) -> None:
        """Drop all bytes that were not decoded yet. Called when nothing more is decoded."""
        self.unread = b""
        self._chunks = []

    def receive(self, data: bytes) -> list[figg.ToServer]:
        """Return the messages that `data` completes, up to a limit. After a `Bad`, all input is ignored."""
        if self.unread:
            data, self.unread = self.unread + data, b""
        data = b"" if self.closed else self._take(data)
        if not data:
            return []
        out: list[figg.ToServer] = []
        records: dict[str, list[bytes]] = {}
        lowest, highest = 1 << 64, -1
        position, end, need = 0, len(data), _HEADER_BYTES
        # The publish loop expects a frame like the previous one: if the next topic name has the same
        # length, one unpack reads everything to be checked. `field` is the topic with its length.
        field = b""
        batch: list[bytes] = []
        batches: dict[bytes, list[bytes]] = {}
        append, extend = batch.append, batch.extend
        previous = look_at = 0
        fast = _NOTHING_KNOWN
        fast_bytes, payload_at, overhead = 1 << 62, 0, 0
        try:
            while True:
                if end - position >= fast_bytes:
                    kind, version, size, again, seq_num, length = fast.unpack_from(data, position)
                    if (
                        kind == PUBLISH
                        and version == VERSION
                        and size == length + overhead
                        and length <= PAYLOAD_BYTES_MAX
                        and (again == field or again[:4] == field[:4])
                    ):
                        stop = position + _HEADER_BYTES + size
                        if stop > end:
                            need = _HEADER_BYTES + size
                            break
                        if again != field:
                            known = batches.get(again)
                            if known is None:
                                known = records.setdefault(_publish_topic(again), [])
                                batches[again] = known
                            append, extend, field = known.append, known.extend, again
                            previous = 0
                        if size == previous and position >= look_at:
                            same = _same_frames(data, position, end, size, payload_at)
                            if same:
                                position, alike, least, most = same
                                extend(alike)
                                highest = max(highest, most)
                                lowest = min(lowest, least)
                                continue
                            look_at = position + _SAME_FRAMES * (_HEADER_BYTES + size)
                        previous = size
                        append(data[position + payload_at : stop])
                        position = stop
                        if seq_num > highest:
                            highest = seq_num
                        elif seq_num < lowest:
                            lowest = seq_num
                        continue
                if end - position < _HEADER_BYTES:
                    break
                kind, version, size = HEADER.unpack_from(data, position)
                _check_header(kind, version, size, _TO_SERVER_BYTES_MAX, "a client")
                stop = position + _HEADER_BYTES + size
                if stop > end:
                    need = _HEADER_BYTES + size
                    break
                body = position + _HEADER_BYTES
                if kind == PUBLISH:
                    after = _topic_end(data, body, stop)
                    topic = _publish_topic(data[body:after])
                    _check_payload_field(data, after, stop)
                    seq_num = U64.unpack_from(data, after)[0]
                    batch = records.setdefault(topic, [])
                    append, extend = batch.append, batch.extend
                    append(data[after + 8 : stop])
                    if seq_num > highest:
                        highest = seq_num
                    if seq_num < lowest:
                        lowest = seq_num
                    if after - body != len(field):
                        fast = figg.publish_struct(after - body)
                        fast_bytes = fast.size
                        overhead = after - body + 12
                        payload_at = _HEADER_BYTES + after - body + 8
                    field = data[body:after]
                else:
                    out.append(self._control(kind, data, body, stop))
                    if len(out) == CONTROLS_AT_ONCE_MAX:
                        self.unread = data[stop:]
                        end = stop
                position = stop
        except (_BadFrameError, BadTopicNameError) as error:
            self.closed = True
            self.unread = b""
            bad: figg.Bad | None = figg.Bad(str(error), _refused_publish(data[position:]))
        else:
            bad = None
            if position < end:
                self._keep(data[position:], need)
        if highest >= 0:
            out.append(figg.Publishes(records, lowest, highest))
        if bad is not None:
            out.append(bad)
        return out

    def _control(self, kind: int, data: bytes, body: int, stop: int) -> figg.ToServer:
        if kind == figg.PING:
            return figg.Ping(_only_u64(data, body, stop))
        if kind == figg.DETACH:
            after = _topic_end(data, body, stop)
            if after != stop:
                raise _BadFrameError(f"{stop - after} bytes too many behind the topic")
            return figg.Detach(_topic(data[body:after]))
        if kind == readers.READ:
            return _read(data, body, stop)
        if kind == readers.HANDLED:
            topic, fields, _ = _topic_and_tail(kind, data, body, stop)
            return readers.Handled(topic, *fields)
        if kind == tokens.AUTH:
            return _auth(data[body:stop])
        flags, topic, after = _flags_and_topic(kind, data, body, stop)
        from_offset = bool(flags & figg.FLAGS_FROM_OFFSET)
        # Without the flag the offset is unused, and some clients leave it out.
        if stop - after != 8 and (from_offset or stop != after):
            raise _BadFrameError(f"ATTACH has {stop - after} bytes where its offset has 8")
        return figg.Attach(topic, U64.unpack_from(data, after)[0] if from_offset else None)


class ClientDecoder(_Decoder):
    """Decoder for the messages of servers."""

    __slots__ = ()

    def receive(self, data: bytes) -> list[figg.ToClient]:
        """Return every message that `data` completes. After a `Bad`, all input is ignored."""
        data = b"" if self.closed else self._take(data)
        if not data:
            return []
        out: list[figg.ToClient] = []
        position, end, need = 0, len(data), _HEADER_BYTES
        field, fast, fast_bytes, payload_at, overhead = b"", _NOTHING_KNOWN, 1 << 62, 0, 0
        messages: list[tuple[int, bytes]] = []
        try:
            while True:
                if end - position >= fast_bytes:
                    kind, version, size, again, offset, length = fast.unpack_from(data, position)
                    if (
                        again == field
                        and kind == DATA
                        and version == VERSION
                        and size == length + overhead
                        and length <= PAYLOAD_BYTES_MAX
                    ):
                        stop = position + _HEADER_BYTES + size
                        if stop > end:
                            need = _HEADER_BYTES + size
                            break
                        messages.append((offset, data[position + payload_at : stop]))
                        position = stop
                        continue
                if end - position < _HEADER_BYTES:
                    break
                kind, version, size = HEADER.unpack_from(data, position)
                _check_header(kind, version, size, _TO_CLIENT_BYTES_MAX, "a server")
                stop = position + _HEADER_BYTES + size
                if stop > end:
                    need = _HEADER_BYTES + size
                    break
                body = position + _HEADER_BYTES
                if kind == DATA:
                    after = _topic_end(data, body, stop)
                    _check_payload_field(data, after, stop)
                    messages = [(U64.unpack_from(data, after)[0], data[after + 12 : stop])]
                    out.append(figg.Data(_topic(data[body:after]), messages))
                    if after - body != len(field):
                        fast = figg.publish_struct(after - body)
                        fast_bytes = fast.size
                        overhead = after - body + 12
                        payload_at = _HEADER_BYTES + after - body + 12
                    field = data[body:after]
                else:
                    out.append(self._control(kind, data, body, stop))
                    field, fast_bytes = b"", 1 << 62
                position = stop
        except (_BadFrameError, BadTopicNameError) as error:
            self.closed = True
            out.append(figg.Bad(str(error)))
        else:
            if position < end:
                self._keep(data[position:], need)
        return out

    def _control(self, kind: int, data: bytes, body: int, stop: int) -> figg.ToClient:
        if kind == figg.ACK:
            return figg.Ack(_only_u64(data, body, stop))
        if kind == figg.PONG:
            return figg.Pong(_only_u64(data, body, stop))
        if kind in readers.NAMES:
            return _of_reader(kind, data, body, stop)
        if kind in tokens.NAMES:
            return _auth_answer(kind, data[body:stop])
        after = _topic_end(data, body, stop)
        topic = _topic(data[body:after])
        tail = 8 if kind == figg.ATTACHED else 0
        if stop - after != tail:
            raise _BadFrameError(f"{_NAMES[kind]} has {stop - after} bytes behind its topic")
        if kind == figg.DETACHED:
            return figg.Detached(topic)
        return figg.Attached(topic, U64.unpack_from(data, after)[0])


def _read(data: bytes, body: int, stop: int) -> readers.Read:
    flags, topic, after_topic = _flags_and_topic(readers.READ, data, body, stop)
    after = _topic_end(data, after_topic, stop)
    try:
        reader = data[after_topic + 4 : after].decode()
    except UnicodeDecodeError:
        raise _BadFrameError("the reader's name is not UTF-8") from None
    if stop - after != TAILS[readers.READ].size:
        raise _BadFrameError(f"READ has {stop - after} bytes behind its names")
    tail = TAILS[readers.READ].unpack_from(data, after)
    return readers.Read(topic, reader, bool(flags & figg.FLAG_NEWEST), *tail)


def _auth(body: bytes) -> tokens.Auth:
    if not body:
        raise _BadFrameError("AUTH has no token")
    try:
        return tokens.Auth(body.decode())
    except UnicodeDecodeError:
        raise _BadFrameError("the token is not UTF-8") from None


def _auth_answer(kind: int, body: bytes) -> tokens.ToClient:
    if kind == tokens.AUTH_OK:
        return tokens.AuthOk(_only_u64(body, 0, len(body)))
    if len(body) < U16.size:
        raise _BadFrameError("AUTH_REFUSED ends inside its code")
    code = U16.unpack_from(body)[0]
    return tokens.AuthRefused(code, body[U16.size :].decode(errors="replace"))


def _flags_and_topic(kind: int, data: bytes, body: int, stop: int) -> tuple[int, str, int]:
    """Return the flags and the topic with which a frame begins, and the position behind them."""
    if stop - body < 2:
        raise _BadFrameError(f"{_NAMES[kind]} ends inside its flags")
    after = _topic_end(data, body + 2, stop)
    return U16.unpack_from(data, body)[0], _topic(data[body + 2 : after]), after


def _of_reader(kind: int, data: bytes, body: int, stop: int) -> readers.ToClient:
    """Decode a server's message about a named reader."""
    topic, fields, rest = _topic_and_tail(kind, data, body, stop)
    if kind == readers.RECORDS:
        epoch, offset, ordinal, ms = fields
        return readers.Records(topic, epoch, offset, ordinal, ms, rest)
    if kind == readers.STORED:
        return readers.Stored(topic, *fields)
    if kind == readers.READING:
        grant, flags, asked, *start = fields
        return readers.Reading(topic, grant, asked, bool(flags & figg.FLAG_EXACT), *start)
    if kind == readers.LOST:
        return readers.Lost(topic, fields[0], rest.decode(errors="replace"))
    return readers.Waiting(topic, *fields)


def _topic_and_tail(
    kind: int, data: bytes, body: int, stop: int
) -> tuple[str, tuple[Any, ...], bytes]:
    """Return the topic with which a frame begins, the fixed fields behind it, and the bytes behind them."""
    after, tail = _topic_end(data, body, stop), TAILS[kind]
    rest = after + tail.size
    if rest > stop or (rest < stop and kind not in (readers.RECORDS, readers.LOST)):
        raise _BadFrameError(f"{stop - after} bytes behind the topic where {tail.size} belong")
    return _topic(data[body:after]), tail.unpack_from(data, after), data[rest:stop]


_SAME_FRAMES = 64
"""Number of frames that one `unpack` takes apart. Shorter runs are decoded frame by frame."""


def _same_frames(
    data: bytes, position: int, end: int, size: int, record_at: int
) -> tuple[int, list[bytes], int, int] | None:
    """Decode PUBLISH frames that differ from the one at `position` only in number and payload.

    Returns their end, their records, and the lowest and the highest number; None without such a run.

    Publishers often send many messages of one size. To find a run of them, the bytes of their headers are
    compared column by column; then the run is unpacked without a loop over its frames. The search doubles
    the run with each step, so a failed step behind the first compares no more frames than were found before.
    """
    frame = _HEADER_BYTES + size
    room = (end - position) // frame
    columns = (*range(record_at - 8), *range(record_at, record_at + 4))
    heads = [data[position + column] for column in columns]
    count = 0
    step = _SAME_FRAMES
    while count + step <= room:
        first, stop = position + count * frame, position + (count + step) * frame
        if any(
            data[first + column : stop : frame].count(head) != step
            for column, head in zip(columns, heads, strict=True)
        ):
            break
        count += step
        step = count
    if not count:
        return None
    chunk = _same_struct(record_at - 8, frame - record_at)
    records: list[bytes] = []
    lowest, highest = 1 << 64, -1
    for at in range(position, position + count * frame, chunk.size):
        fields = chunk.unpack_from(data, at)
        numbers = fields[::2]
        records += fields[1::2]
        lowest = min(lowest, *numbers)
        highest = max(highest, *numbers)
    return position + count * frame, records, lowest, highest


@lru_cache(maxsize=64)
def _same_struct(number_at: int, record_bytes: int) -> struct.Struct:
    return struct.Struct(">" + f"{number_at}xQ{record_bytes}s" * _SAME_FRAMES)


def _check_header(kind: int, version: int, size: int, limits: dict[int, int], sender: str) -> None:
    if kind not in _NAMES:
        raise _BadFrameError(f"unknown message type {kind}")
    if version != VERSION:
        raise _BadFrameError(f"protocol version {version}, only {VERSION} is spoken here")
    limit = limits.get(kind)
    if limit is None:
        raise _BadFrameError(f"{_NAMES[kind]} is not for {sender} to send")
    if size > limit:
        raise _BadFrameError(f"{_NAMES[kind]} announces {size} bytes, at most {limit} are allowed")


def _refused_publish(frame: bytes) -> RefusedPublish | None:
    """Return the number of a bad PUBLISH and why it stays refused; None for other frames and other errors."""
    kind, version, size = HEADER.unpack_from(frame)
    if kind != PUBLISH or version != VERSION:
        return None
    # A frame that was refused because of its header may be incomplete.
    body = frame[_HEADER_BYTES : _HEADER_BYTES + size]
    topic_bytes = U32.unpack_from(body)[0] if len(body) >= 4 else 0
    number_at = 4 + topic_bytes
    number = U64.unpack_from(body, number_at)[0] if len(body) >= number_at + 8 else None
    if size > _TO_SERVER_BYTES_MAX[PUBLISH]:
        is_long = topic_bytes > TOPIC_BYTES_MAX
        return RefusedPublish(Refusal.LONG_TOPIC if is_long else Refusal.LARGE_PAYLOAD, number)
    if size < number_at + 12:
        return None
    payload_bytes = U32.unpack_from(body, number_at + 8)[0]
    why = refusal_of(body[4:number_at], payload_bytes)
    return None if why is None else RefusedPublish(why, number)


def _topic_end(data: bytes, at: int, stop: int) -> int:
    if stop - at < 4:
        raise _BadFrameError("the frame ends inside its topic's length")
    after: int = at + 4 + U32.unpack_from(data, at)[0]
    if after > stop:
        raise _BadFrameError("the topic's length goes past the end of its frame")
    return after


def _check_payload_field(data: bytes, after: int, stop: int) -> None:
    """Check the fields behind the topic of a PUBLISH or DATA: a number, a length, and that many bytes."""
    if stop - after < 12:
        raise _BadFrameError("the frame ends before its payload")
    length = U32.unpack_from(data, after + 8)[0]
    if length > PAYLOAD_BYTES_MAX:
        raise _BadFrameError(
            f"a payload of {length} bytes, at most {PAYLOAD_BYTES_MAX} are allowed"
        )
    if after + 12 + length != stop:
        raise _BadFrameError("the payload's length does not fit its frame")


def _only_u64(data: bytes, body: int, stop: int) -> int:
    if stop - body != 8:
        raise _BadFrameError(f"a body of {stop - body} bytes where 8 belong")
    number: int = U64.unpack_from(data, body)[0]
    return number
