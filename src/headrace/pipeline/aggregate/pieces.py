"""Reads pieces of topics from lake and log, and sends them to the partitions that fold them.

A piece is a sequence of adjacent records. It contains those that the reducer needs, as the log's own bytes.
It travels as a letter to the partition of its topic's bucket, where keys sort letters by topic, epoch and
offset.
"""

import itertools
import logging
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.files.reading import ranges_of, records_of
from headrace.lake.format import LakeError, RecordRange
from headrace.lake.states import Buckets
from headrace.lake.storage.storage import LakeFile, Storage
from headrace.model import CHANNEL_PREFIX, RECORD_HEADER_BYTES
from headrace.pipeline.aggregate.fold import FoldPiece, Needs, needs_of, reads
from headrace.pipeline.job import Points
from headrace.pipeline.tasks import Letter
from headrace.reader.decode import DecodedRecords, read_records
from headrace.reader.planning import TopicSelection
from headrace.reader.view import DataLossError, LogLocation, LogRange, open_log

logger = logging.getLogger(__name__)

_PIECE_BYTES_MAX = 1 << 20
_PIECE_RECORDS_MAX = 8192
"""Limits of the records in one letter. They are Python objects at the same time when they are folded."""

_JOINED_BYTES_MAX = 64 << 20
"""Maximum size of the pieces that are kept in memory to join them with the next ones."""


class PiecesWork(NamedTuple):
    reducer: str
    buckets: Buckets
    topics: TopicSelection
    lake: Storage | None
    files: Sequence[str]
    place: LogLocation
    ranges: Sequence[LogRange]
    """Ranges of the log; a work has either ranges or files of the lake."""
    points: Points


class TopicPiece(NamedTuple):
    """Adjacent records of a topic."""

    topic: str
    epoch: int
    offset: int
    end: int
    ordinal: int
    end_ordinal: int
    records: bytes | memoryview
    """Records that the reducer needs: all, the last one that is a message, or none."""


def send_pieces(work: PiecesWork) -> Iterator[Letter]:
    """Yield the pieces of a work as letters, and before them the topics of the log that it reads."""
    place = cache(work.buckets.place)
    for part in work.ranges:
        yield Letter(place(part.topic), b"", part.topic.encode())
    for piece in joined(_pieces(work), needs_of(work.reducer)):
        yield letter_of(place(piece.topic), piece)
    work.points.here("reading")


def _pieces(work: PiecesWork) -> Iterator[TopicPiece]:
    needs = needs_of(work.reducer)
    is_wanted = cache(work.topics.matches)
    for path in work.files:
        assert work.lake is not None
        yield from _of_file(work.lake.file(path), is_wanted, needs)
    if work.ranges:
        yield from _of_log(work.place, work.ranges, needs)


def joined(pieces: Iterator[TopicPiece], needs: Needs) -> Iterator[TopicPiece]:
    """Join adjacent pieces of a topic, unless the reducer needs all records."""
    if needs is Needs.ALL:
        yield from pieces
        return
    kept: dict[str, tuple[TopicPiece, TopicPiece]] = {}
    """First and last of adjacent pieces, by topic."""
    size = 0
    for piece in pieces:
        topic = piece.topic
        size += len(piece.records)
        first, last = kept.get(topic, (piece, None))
        if last is None:
            kept[topic] = piece, piece
        elif last.end_ordinal != piece.ordinal:
            yield _joined(first, last)
            kept[topic] = piece, piece
        elif piece.records or not last.records:
            kept[topic] = first, piece
        else:
            kept[topic] = first, piece._replace(records=last.records)
        if size >= _JOINED_BYTES_MAX:
            yield from itertools.starmap(_joined, kept.values())
            kept, size = {}, 0
    yield from itertools.starmap(_joined, kept.values())


def _joined(first: TopicPiece, last: TopicPiece) -> TopicPiece:
    return last._replace(offset=first.offset, ordinal=first.ordinal)


# Letters

_PLACE = struct.Struct(">QQ")
_NUMBERS = struct.Struct(">QQQ")


def letter_of(to: int, piece: TopicPiece) -> Letter:
    topic = piece.topic.encode()
    # With its length in front, no topic is a prefix of another: letters of a topic stay together.
    key = len(topic).to_bytes(2) + topic + _PLACE.pack(piece.epoch, piece.offset)
    numbers = _NUMBERS.pack(piece.end, piece.ordinal, piece.end_ordinal)
    return Letter(to, key, b"".join((numbers, piece.records)))


def topic_of(letter: Letter) -> str:
    """Return the topic of a piece; empty for a letter that announces a topic and comes before all pieces."""
    return letter.key[2 : -_PLACE.size].decode()


def piece_of(letter: Letter) -> FoldPiece:
    data = letter.data
    epoch, offset = _PLACE.unpack_from(letter.key, len(letter.key) - _PLACE.size)
    end, ordinal, end_ordinal = _NUMBERS.unpack_from(data)
    payloads = []
    at = _NUMBERS.size
    while at < len(data):
        begin = at + RECORD_HEADER_BYTES
        at = begin + int.from_bytes(data[at:begin])
        payloads.append(data[begin:at])
    return FoldPiece(
        epoch=epoch,
        offset=offset,
        end=end,
        ordinal=ordinal,
        end_ordinal=end_ordinal,
        payloads=payloads,
    )


# Pieces of the lake


def _of_file(
    file: LakeFile, is_wanted: Callable[[str], bool], needs: Needs
) -> Iterator[TopicPiece]:
    """Yield pieces of the chosen topics. The footer names the rows of each topic: others are not read."""
    with (
        _readable(file),
        file.open() as source,
        pq.ParquetFile(source, page_checksum_verification=True) as parquet,
    ):
        chosen: list[tuple[RecordRange, int]] = []
        row = 0
        for one in ranges_of(file, parquet.metadata):
            if is_wanted(one.topic):
                chosen.append((one, row))
            row += one.rows
        if needs is Needs.NONE:
            for one, _ in chosen:
                yield _whole(one, b"")
        elif needs is Needs.LAST:
            yield from _lasts(parquet, chosen)
        else:
            yield from _all(parquet, chosen)


@contextmanager
def _readable(file: LakeFile) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise LakeError(f"{file} is missing, but the table names it: restore it") from None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise LakeError(
            f"{file} cannot be read: {error}; run `headrace pipeline audit` to find all damage"
        ) from None


def _whole(one: RecordRange, records: bytes) -> TopicPiece:
    return TopicPiece(
        topic=one.topic,
        epoch=one.epoch,
        offset=one.offset,
        end=one.end,
        ordinal=one.ordinal,
        end_ordinal=one.end_ordinal,
        records=records,
    )


def _groups(file: pq.ParquetFile) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the first row and the row after the last of each row group."""
    begin = 0
    for number in range(file.metadata.num_row_groups):
        end = begin + file.metadata.row_group(number).num_rows
        yield number, begin, end
        begin = end


def _payloads(file: pq.ParquetFile, group: int) -> pa.BinaryArray:
    column = file.read_row_group(group, columns=["payload"], use_threads=False)["payload"]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _lasts(file: pq.ParquetFile, chosen: Sequence[tuple[RecordRange, int]]) -> Iterator[TopicPiece]:
    wanted = np.array([row + one.rows - 1 for one, row in chosen], np.int64)
    for number, begin, end in _groups(file):
        first, last = np.searchsorted(wanted, (begin, end))
        if first == last:
            continue  # no topic ends in this row group
        found = _payloads(file, number).take(pa.array(wanted[first:last] - begin)).to_pylist()
        for (one, row), payload in zip(chosen[first:last], found, strict=True):
            is_last = is_message(one.topic, payload)
            yield _whole(one, _record(payload) if is_last else _last_before(file, one, row))


def _record(payload: bytes) -> bytes:
    return len(payload).to_bytes(RECORD_HEADER_BYTES) + payload


def _last_before(file: pq.ParquetFile, one: RecordRange, row: int) -> bytes:
    """Return the last message of a range whose last record is not a message, which no server writes."""
    for number, begin, end in reversed(list(_groups(file))):
        if begin < row + one.rows and row < end:
            payloads = _payloads(file, number)
            first, last = max(row - begin, 0), min(row + one.rows, end) - begin
            for index in reversed(range(first, last)):
                payload = payloads[index].as_py()
                if is_message(one.topic, payload):
                    return _record(payload)
    return b""


def _all(file: pq.ParquetFile, chosen: Sequence[tuple[RecordRange, int]]) -> Iterator[TopicPiece]:
    rows = np.array([row for _, row in chosen], np.int64)
    ends = rows + np.array([one.rows for one, _ in chosen], np.int64)
    at: dict[int, int] = {}
    """Offset where a range continues in the next row group, by index in `chosen`."""
    for number, begin, end in _groups(file):
        first = int(np.searchsorted(ends, begin, "right"))
        last = int(np.searchsorted(rows, end))
        if first >= last:
            continue
        lefts = np.maximum(rows[first:last], begin) - begin
        counts = np.minimum(ends[first:last], end) - begin - lefts
        places = np.repeat(lefts - (np.cumsum(counts) - counts), counts)
        payloads = _payloads(file, number).take(pa.array(places + np.arange(len(places))))
        records = records_of(payloads)
        sizes = pc.binary_length(payloads).to_numpy(zero_copy_only=False).astype(np.int64)
        ends_of = np.cumsum(sizes + RECORD_HEADER_BYTES)
        boundaries = [0, *ends_of.tolist()]
        row = 0
        for index, left, count in zip(
            range(first, last), lefts.tolist(), counts.tolist(), strict=True
        ):
            one, begins = chosen[index]
            whole = TopicPiece(
                topic=one.topic,
                epoch=one.epoch,
                offset=at.get(index, one.offset),
                end=at.get(index, one.offset) + boundaries[row + count] - boundaries[row],
                ordinal=one.ordinal + begin + left - begins,
                end_ordinal=one.ordinal + begin + left - begins + count,
                records=records,
            )
            at[index] = whole.end
            yield from _cut(whole, boundaries, row)
            row += count


def _cut(whole: TopicPiece, boundaries: Sequence[int], row: int) -> Iterator[TopicPiece]:
    """Cut adjacent records into pieces for one letter each.

    The records of `whole` and others are in its `records`, at these boundaries; `row` is its first one.
    """
    left, moved = whole.ordinal - row, whole.offset - boundaries[row]
    stop = whole.end_ordinal - left
    while row < stop:
        most = min(stop, row + _PIECE_RECORDS_MAX)
        size_max = boundaries[row] + _PIECE_BYTES_MAX
        last = max(bisect_right(boundaries, size_max, row + 1, most + 1) - 1, row + 1)
        yield TopicPiece(
            topic=whole.topic,
            epoch=whole.epoch,
            offset=moved + boundaries[row],
            end=moved + boundaries[last],
            ordinal=left + row,
            end_ordinal=left + last,
            records=whole.records[boundaries[row] : boundaries[last]],
        )
        row = last


# Pieces of the log


def _of_log(place: LogLocation, parts: Sequence[LogRange], needs: Needs) -> Iterator[TopicPiece]:
    """Yield pieces of the log.

    Like the server, this skips records that are damaged or deleted meanwhile, and the ordinals show the gap.
    """

    def warn(loss: DataLossError) -> None:
        logger.warning("%s; the job continues without these records", loss)

    with closing(open_log(place)) as log:
        for records in read_records(log, parts, warn, verify=False):
            for found in records.stretches():
                yield from _of_records(found, needs)


def _of_records(found: DecodedRecords, needs: Needs) -> Iterator[TopicPiece]:
    part, data = found.parts[found.which[0]], found.bytes
    whole = TopicPiece(
        topic=part.topic,
        epoch=part.end.epoch,
        offset=int(found.offsets[0]),
        end=int(found.offsets[0]) + len(data),
        ordinal=int(found.ordinals[0]),
        end_ordinal=int(found.ordinals[-1]) + 1,
        records=data,
    )
    if needs is Needs.ALL:
        yield from _cut(whole, (found.boundaries - found.boundaries[0]).tolist(), 0)
    else:
        yield whole._replace(records=_last_in(found) if needs is Needs.LAST else b"")


def _last_in(found: DecodedRecords) -> bytes:
    """Return a copy of the last record that is a message, or nothing."""
    topic, boundaries = found.parts[found.which[0]].topic, found.boundaries
    for row in reversed(range(found.record_count)):
        record = bytes(found.data[boundaries[row] : boundaries[row + 1]])
        if is_message(topic, record[RECORD_HEADER_BYTES:]):
            return record
    return b""


def is_message(topic: str, payload: bytes) -> bool:
    return not topic.startswith(CHANNEL_PREFIX) or reads(topic)(payload, 0) is not None
