"""Reads of streams: where a token points to, and the next chunk from there.

Elsewhere: live reads (`following.py`).
"""

import asyncio
from functools import partial
from typing import NamedTuple

from headrace.broker.broker import SLICE_BYTES_MAX, is_of
from headrace.log.records import split_records
from headrace.log.store import Store, Topic
from headrace.model import JUMP, RECORD_HEADER_BYTES, Position
from headrace.server.http.requests import warmed
from headrace.server.http.streams.offsets import From, Place
from headrace.server.http.streams.refusals import LOST_BYTES, RefusedError
from headrace.server.http.streams.stream import Stream

CHUNK_BYTES_MAX = 4 << 20
"""Size at which a chunk ends, with the record that reaches it."""
CHUNK_RECORDS_MAX = 100_000
"""Number of records at which a chunk ends, with the run that reaches it."""


class Chunk(NamedTuple):
    start: Position
    end: Position
    payloads: list[bytes]
    is_last: bool
    """True if no more records followed when the chunk was read."""
    lost_bytes: int
    """Size of the records before the first payload that cannot be read any more, because of damage."""


def located(topic: Topic, stream: Stream, start: From | Place) -> int:
    """Return the offset in the topic's present life that a token stands for. Raises RefusedError."""
    if isinstance(start, From):
        return topic.start_offset if start is From.START else topic.end_offset
    epoch, offset = start
    if offset > topic.end_offset:
        raise RefusedError(400, "this offset was never given: it is past the end of the stream")
    is_here = epoch is None or is_of(topic, epoch, offset) or stream.has_inherited(epoch, offset)
    if not is_here:
        raise RefusedError(
            410, "the stream was deleted or lost records since this offset was given"
        )
    if offset < topic.start_offset:
        lost = (topic.start_offset - offset) % JUMP  # nothing is stored in a jump
        raise RefusedError(
            410,
            f"the stream is kept from a later offset on: {lost} bytes in between are gone",
            {LOST_BYTES: str(lost)},
        )
    return offset


async def read(store: Store, topic: Topic, start: int, bytes_max: int = CHUNK_BYTES_MAX) -> Chunk:
    """Return the next records from an offset on, whole records only. Gaps end a chunk that has records."""
    epoch = topic.epoch
    at = (await warmed(partial(store.locate_offset, topic, start))).offset
    reader = store.reader(topic)
    payloads: list[bytes] = []
    size = lost = 0
    while at < topic.end_offset and size < bytes_max and topic.epoch == epoch:
        if len(payloads) >= CHUNK_RECORDS_MAX:
            break
        found = await warmed(partial(reader.read, at, SLICE_BYTES_MAX))
        has_gap = False
        for run in found.runs:
            has_gap = run.offset > at and bool(payloads)
            if has_gap:
                break
            if not payloads:
                lost = run.offset - start
            records = split_records(run.data, run.record_count)
            payloads += [record[RECORD_HEADER_BYTES:] for record in records]
            size += len(run.data)
            at = run.end
        if has_gap:
            break
        if found.next_offset > at:
            if payloads:
                break
            at = found.next_offset
            lost = at - start
        await asyncio.sleep(0)  # others get their turn
    if topic.epoch != epoch or not topic.exists:
        raise RefusedError(404, "the stream was deleted")
    first, end = Position(epoch, start, 0), Position(epoch, at, 0)
    # Nothing is stored in a jump.
    return Chunk(first, end, payloads, at >= topic.end_offset, lost % JUMP)
