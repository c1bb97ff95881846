"""Tasks of a replay: they find a topic in files, and upload its records between two offsets."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.files.reading import StoredRange, pieces_of, read_piece
from headrace.lake.format import LakeError, RecordRange
from headrace.model import RECORD_HEADER_BYTES
from headrace.reader.upload import EncodedBlock, encode_batch, upload
from headrace.reader.view import LogLocation


class Look(NamedTuple):
    lake: str
    files: tuple[str, ...]
    topic: str
    since_ms: int | None
    until_ms: int | None


class TopicFiles(NamedTuple):
    """Ranges of a topic in files."""

    ranges: dict[str, list[RecordRange]]
    since: int | None
    """Smallest offset of a record at or after the time; None without such a record or without a time."""
    until: int | None


def look(work: Look) -> TopicFiles:
    ranges: dict[str, list[RecordRange]] = {}
    since: list[int] = []
    until: list[int] = []
    for name in work.files:
        pieces = pieces_of([Path(work.lake, name)], work.topic)
        if pieces:
            ranges[name] = [piece.range for piece in pieces]
        if work.since_ms is not None:
            since += _from_time(pieces, work.since_ms)
        if work.until_ms is not None:
            until += _from_time(pieces, work.until_ms)
    return TopicFiles(ranges, min(since, default=None), min(until, default=None))


def _from_time(pieces: list[StoredRange], ms: int) -> Iterator[int]:
    """Yield the first offset at or after a time, if there is one. Times never decrease."""
    moment = pa.scalar(ms * 1000, pa.timestamp("us", tz="UTC"))
    for piece in pieces:
        for rows in read_piece(piece, column="timestamp"):
            late = rows["offset"].filter(pc.greater_equal(rows["timestamp"], moment))
            if len(late):
                yield late[0].as_py()
                return


class ReplayWork(NamedTuple):
    place: LogLocation
    lake: str
    files: tuple[str, ...]
    topic: str
    target: str
    offset: int
    end: int


class UploadedCut(NamedTuple):
    ids: list[str]
    records: int
    bytes: int


def upload_part(work: ReplayWork) -> UploadedCut:
    """Upload the records that begin between two offsets, as staged files that no reader sees yet."""
    counting = _Counting()
    ids = upload(work.place, counting.blocks(work))
    return UploadedCut(ids, counting.records, counting.bytes)


class _Counting:
    records = bytes = 0

    def blocks(self, work: ReplayWork) -> Iterator[EncodedBlock]:
        paths = [Path(work.lake, name) for name in work.files]
        for piece in pieces_of(paths, work.topic, work.offset, work.end):
            for payloads in _payloads(piece, work.offset, work.end):
                for block in encode_batch(work.target, payloads):
                    self.bytes += len(block.records)
                    yield block
                self.records += len(payloads)


def _payloads(piece: StoredRange, offset: int, end: int) -> Iterator[pa.BinaryArray]:
    """Yield the payloads; raise LakeError unless they are all that the piece should contain."""
    at: int | None = piece.range.offset if piece.range.offset >= offset else None
    for rows in read_piece(piece, offset, end):
        payloads, offsets = rows["payload"], rows["offset"].to_numpy()
        lengths = pc.binary_length(payloads).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = offsets + lengths + RECORD_HEADER_BYTES
        if (at is not None and offsets[0] != at) or not np.array_equal(offsets[1:], ends[:-1]):
            raise _misplaced(piece)
        at = int(ends[-1])
        yield payloads
    if at is not None and at < min(end, piece.range.end):
        raise _misplaced(piece)


def _misplaced(piece: StoredRange) -> LakeError:
    return LakeError(
        f"{piece.path}, topic {piece.range.topic!r}, offsets {piece.range.offset} to {piece.range.end}: rows "
        "are not in their places; run `headrace pipeline audit` for the whole picture"
    )
