"""Forks: streams that begin with the records of another one, which are copied.

A fork is an ordinary topic afterwards. Its inherited records have the same offsets as in their source, so the
source's offsets are valid in the fork too. A source counts its forks in its note. Elsewhere: carrying out the
changes (`streams.py`).
"""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import msgspec

from headrace.log.records import pack_record
from headrace.log.store import Note, Store, Topic
from headrace.model import RECORD_HEADER_BYTES
from headrace.server.http.streams import offsets, reading
from headrace.server.http.streams.content import JSON, media_type
from headrace.server.http.streams.messages import Create, ForkRequest
from headrace.server.http.streams.refusals import RefusedError
from headrace.server.http.streams.stream import Stream, decode_stream, stream_key, stream_note

FORK_BYTES_MAX = 16 << 20
"""Largest size of the records that a fork inherits. They are copied in one commit."""

INHERITED_MAX = 100
"""Number of ancestors whose offsets a fork understands."""


class Inherited(NamedTuple):
    """Beginning of a fork: the records that it takes over from its source."""

    start: int
    """Offset of its first record, in the source and in the fork."""
    end: int
    """Offset up to which source and fork are the same."""
    records: list[bytes]


async def inherited(store: Store, topic: Topic, stream: Stream, request: ForkRequest) -> Inherited:
    """Read the records of the source up to the place of the fork. Raises RefusedError."""
    given = [request.offset] if request.offset is not None else [offsets.From.NOW.value]
    start, end = topic.start_offset, reading.located(topic, stream, offsets.parse(given))
    last = topic.end_offset if request.more else end
    if end - start > FORK_BYTES_MAX:
        raise _too_long()
    payloads: list[bytes] = []
    at = start
    while at < last:
        chunk = await reading.read(store, topic, at)
        if chunk.lost_bytes or chunk.start.offset != at:
            raise _incomplete()
        payloads += chunk.payloads
        at = chunk.end.offset
        if at >= end and _more(payloads, start, end, stream) >= request.more:
            break
        if at - start > 2 * FORK_BYTES_MAX:
            raise _too_long()
    sizes = (RECORD_HEADER_BYTES + len(payload) for payload in payloads)
    bounds = list(accumulate(sizes, initial=start))
    if bounds[-1] < end:
        raise _incomplete()
    if end not in bounds:
        raise RefusedError(400, "no record ends at this Stream-Fork-Offset")
    count = bounds.index(end)
    kept = payloads[:count] + _first(payloads[count:], stream, request.more)
    return Inherited(start, end, [pack_record(payload) for payload in kept])


def _more(payloads: list[bytes], start: int, end: int, stream: Stream) -> int:
    """Return how many messages, or bytes, the payloads have behind `end`."""
    found, at = 0, start
    for payload in payloads:
        if at >= end:
            found += 1 if media_type(stream.content_type) == JSON else len(payload)
        at += RECORD_HEADER_BYTES + len(payload)
    return found


def _first(payloads: list[bytes], stream: Stream, count: int) -> list[bytes]:
    """Return the first messages, or bytes, of the payloads."""
    if media_type(stream.content_type) == JSON:
        found = payloads[:count]
        left = count - len(found)
    else:
        found, left = [], count
        for payload in payloads:
            if not left:
                break
            found.append(payload[:left])
            left -= len(found[-1])
    if left:
        raise RefusedError(400, "Stream-Fork-Sub-Offset is past the end of the stream")
    return found


def forked(source: Stream, epoch: int, end: int, wanted: Create, made: Stream) -> Stream:
    """Return the state of a new fork; `made` is that of the same stream without a source."""
    has_times = (wanted.ttl_s, wanted.expires_ms) != (None, None)
    ancestors = [(one, min(last, end)) for one, last in source.inherited]
    return msgspec.structs.replace(
        made,
        content_type=wanted.content_type or source.content_type,
        ttl_s=wanted.ttl_s if has_times else source.ttl_s,
        expires_ms=wanted.expires_ms if has_times else source.expires_ms,
        fork=wanted.fork,
        source_life=source.life,
        inherited=(*ancestors, (epoch, end))[-INHERITED_MAX:],
    )


def counted(name: str, source: Stream, due_ms: int) -> Note:
    """Return the note of a source that has one more fork."""
    return stream_note(name, msgspec.structs.replace(source, forks=source.forks + 1), due_ms)


def released(name: str, stream: Stream, note: Callable[[bytes], Note | None]) -> list[Note]:
    """Return the notes of a change that deletes a stream: its own, and those of streams that it is a fork of.

    A stream with forks stays known until the last of them is deleted.
    """
    if stream.forks:
        gone = msgspec.structs.replace(stream, is_gone=True, ttl_s=None, expires_ms=None)
        return [stream_note(name, gone, 0)]
    notes = [Note(stream_key(name), None)]
    while stream.fork is not None:
        name = stream.fork.source
        found = note(stream_key(name))
        source = decode_stream(found)
        if found is None or source.life != stream.source_life:
            break
        left = msgspec.structs.replace(source, forks=source.forks - 1)
        if left.forks or not left.is_gone:
            notes.append(stream_note(name, left, found.due_ms))
            break
        notes.append(Note(stream_key(name), None))
        stream = source
    return notes


def _too_long() -> RefusedError:
    return RefusedError(413, f"a fork can inherit {FORK_BYTES_MAX} bytes")


def _incomplete() -> RefusedError:
    return RefusedError(
        409, "records of the source are lost, so no stream can have the same offsets"
    )
