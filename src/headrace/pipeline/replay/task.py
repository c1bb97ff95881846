"""What tasks of a replay do: look for a topic in files, and upload what they have of it between offsets."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.format import LakeError, Range
from headrace.lake.reading import Piece, pieces_of, read_piece
from headrace.model import RECORD_HEADER_BYTES
from headrace.spark.encode import EncodedBlock, encode_batch
from headrace.spark.options import Place
from headrace.spark.uploading import upload


class Look(NamedTuple):
    lake: str
    files: tuple[str, ...]
    topic: str
    since_ms: int | None
    until_ms: int | None


class Seen(NamedTuple):
    """What files have of a topic."""

    ranges: dict[str, list[Range]]
    since: int | None
    """The least offset of a record at or behind the time; None where there is none, or none was asked for."""
    until: int | None


def look(work: Look) -> Seen:
    ranges: dict[str, list[Range]] = {}
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
    return Seen(ranges, min(since, default=None), min(until, default=None))


def _from_time(pieces: list[Piece], ms: int) -> Iterator[int]:
    """The first offset of records that are as late as that: one, or none. Times never decrease."""
    moment = pa.scalar(ms * 1000, pa.timestamp("us", tz="UTC"))
    for piece in pieces:
        for rows in read_piece(piece, column="timestamp"):
            late = rows["offset"].filter(pc.greater_equal(rows["timestamp"], moment))
            if len(late):
                yield late[0].as_py()
                return


class ReplayWork(NamedTuple):
    place: Place
    lake: str
    files: tuple[str, ...]
    topic: str
    target: str
    offset: int
    end: int


class Uploaded(NamedTuple):
    ids: list[str]
    records: int
    bytes: int


def upload_part(work: ReplayWork) -> Uploaded:
    """The records that begin between two offsets as staged files, which nobody sees yet."""
    counting = _Counting()
    ids = upload(work.place, counting.blocks(work))
    return Uploaded(ids, counting.records, counting.bytes)


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


def _payloads(piece: Piece, offset: int, end: int) -> Iterator[pa.BinaryArray]:
    """Raises LakeError unless they are all that the piece says it has."""
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


def _misplaced(piece: Piece) -> LakeError:
    return LakeError(
        f"{piece.path}, topic {piece.range.topic!r}, offsets {piece.range.offset} to {piece.range.end}: rows "
        "are not in their places; run `headrace pipeline audit` for the whole picture"
    )
