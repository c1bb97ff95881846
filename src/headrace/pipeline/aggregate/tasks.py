"""Tasks of an aggregation: read pieces of topics from lake and log, and fold them onto states by bucket.

    send_pieces ─ pieces, by bucket of their topic ─▶ fold_bucket ─▶ the bucket's new file of states

A piece is a sequence of adjacent records. It travels as a letter to the partition of its topic's bucket,
where keys sort letters by topic, epoch and offset. Spark may run any task again: each run writes a file of
its own, and only the file whose name reaches the driver counts.
"""

import pickle
import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.files.reading import StoredRange, ranges_of, read_piece, records_of
from headrace.lake.format import LakeError
from headrace.lake.states import (
    SCHEMA,
    Buckets,
    StatesFile,
    StatesWriter,
    Totals,
    name_of,
    read_states,
)
from headrace.lake.storage.storage import LakeFile, Storage
from headrace.model import CHANNEL_PREFIX, RECORD_HEADER_BYTES
from headrace.pipeline.aggregate.fold import (
    FoldedState,
    Needs,
    Piece,
    fold,
    load_reducer,
    message_of,
    needs_of,
)
from headrace.pipeline.job import Points
from headrace.pipeline.tasks import Letter, Letters, NotSharedError, Progress, Step, TaskRunner
from headrace.reader.decode import DecodedRecords, read_records
from headrace.reader.planning import SourceOptions, TopicSelection
from headrace.reader.view import LogRange, open_log

_PIECE_BYTES_MAX = 1 << 20
_PIECE_RECORDS_MAX = 8192
"""Limits of the records in one letter. They are Python objects at the same time when they are folded."""

_JOINED_BYTES_MAX = 64 << 20
"""Maximum size of the pieces that are kept in memory to join them with the next ones."""


class FoldRun(NamedTuple):
    """A run, as its tasks know it."""

    lake: Storage | None
    source: SourceOptions | None
    """The log, unless only the lake is read."""
    topics: TopicSelection
    reducer: str
    directory: str
    """Directory with the application's own reducer functions."""
    into: Storage
    number: int
    """Number of the run, which is in the names of its files."""
    buckets: Buckets
    old: Mapping[int, Sequence[str]]
    """Files with the states before, by bucket; a run over lake and log begins without any."""
    points: Points


class FoldInput(NamedTuple):
    """Input of one task."""

    files: Sequence[str] = ()
    """Files of the lake."""
    ranges: Sequence[LogRange] = ()
    memory: Collection[str] = ()
    """Topics that begin anew with their server: for these, a state of an earlier epoch does not count."""


class FoldedBucket(NamedTuple):
    """The new file of a bucket, and statistics of the states in it that have changed."""

    bucket: int
    file: StatesFile
    changed: Totals
    """The changed states are the first rows of the file."""


def fold_buckets(
    runner: TaskRunner, run: FoldRun, inputs: Sequence[FoldInput], progress: Progress | None = None
) -> list[FoldedBucket]:
    """Read pieces and fold them in one job; return the new files of the buckets that have changed."""
    if not run.buckets.changed:
        return []
    step = Step(len(run.buckets.changed), partial(fold_bucket, run))
    letters = runner.exchange(inputs, partial(send_pieces, run), [step], progress)
    folded: list[FoldedBucket] = [pickle.loads(letter.data) for letter in letters]
    for one in folded:
        _check_is_here(run.into.file(one.file.path), one.file.bytes)
    return sorted(folded)


def _check_is_here(file: LakeFile, size: int) -> None:
    try:
        if file.size() == size:
            return
    except FileNotFoundError:
        pass
    raise NotSharedError(
        f"{file.storage.address} is another directory for Spark's executors: name one that all machines "
        "share"
    )


# Lake and log → pieces by bucket


def send_pieces(run: FoldRun, given: FoldInput) -> Letters:
    """Yield pieces as letters, and before them the topics of the log that are read.

    With the topic goes the epoch that its state must have at least.
    """
    place = cache(run.buckets.place)
    for part in given.ranges:
        epoch = part.end.epoch if part.topic in given.memory else 0
        yield Letter(place(part.topic), b"", epoch.to_bytes(8) + part.topic.encode())
    for piece in joined(_pieces(run, given), needs_of(run.reducer)):
        yield letter_of(place(piece.topic), piece)
    run.points.here("reading")


def _pieces(run: FoldRun, given: FoldInput) -> Iterator[Piece]:
    needs = needs_of(run.reducer)
    is_wanted = cache(run.topics.matches)
    for path in given.files:
        assert run.lake is not None
        yield from _of_file(run.lake.file(path), is_wanted, needs)
    if given.ranges:
        assert run.source is not None
        with closing(open_log(run.source.place)) as log:
            # Like the server, skip records that are damaged or deleted meanwhile: ordinals show the gap.
            for found in read_records(log, given.ranges, run.source.leave_out, verify=False):
                for stretch in found.stretches():
                    yield from _of_stretch(stretch, needs)


def joined(pieces: Iterator[Piece], needs: Needs) -> Iterator[Piece]:
    """Join adjacent pieces of a topic, unless the reducer needs all records."""
    if needs is Needs.ALL:
        yield from pieces
        return
    kept: dict[str, Piece] = {}
    size = 0
    for piece in pieces:
        size += len(piece.records)
        last = kept.get(piece.topic)
        if last is None:
            kept[piece.topic] = piece
        elif (last.epoch, last.end_ordinal) == (piece.epoch, piece.ordinal):
            kept[piece.topic] = piece._replace(
                offset=last.offset, ordinal=last.ordinal, records=piece.records or last.records
            )
        else:
            yield last
            kept[piece.topic] = piece
        if size >= _JOINED_BYTES_MAX:
            yield from kept.values()
            kept, size = {}, 0
    yield from kept.values()


# Letters

_PLACE = struct.Struct(">QQ")
_NUMBERS = struct.Struct(">QQQ")


def letter_of(to: int, piece: Piece) -> Letter:
    topic = piece.topic.encode()
    # With its length in front, no topic is a prefix of another: letters of a topic stay together.
    key = len(topic).to_bytes(2) + topic + _PLACE.pack(piece.epoch, piece.offset)
    numbers = _NUMBERS.pack(piece.end, piece.ordinal, piece.end_ordinal)
    return Letter(to, key, numbers + piece.records)


def topic_of(letter: Letter) -> str:
    """Return the topic of a piece; empty for a letter that announces a topic and comes before all pieces."""
    return letter.key[2 : -_PLACE.size].decode()


def piece_of(letter: Letter) -> Piece:
    epoch, offset = _PLACE.unpack_from(letter.key, len(letter.key) - _PLACE.size)
    end, ordinal, end_ordinal = _NUMBERS.unpack_from(letter.data)
    records = letter.data[_NUMBERS.size :]
    return Piece(topic_of(letter), epoch, offset, end, ordinal, end_ordinal, records)


# Pieces of the lake


def _of_file(file: LakeFile, is_wanted: Callable[[str], bool], needs: Needs) -> Iterator[Piece]:
    """Yield pieces of the chosen topics. The footer names the rows of each topic: others are not read."""
    with (
        _readable(file),
        file.open() as source,
        pq.ParquetFile(source, page_checksum_verification=True) as parquet,
    ):
        chosen: list[StoredRange] = []
        row = 0
        for one in ranges_of(file, parquet.metadata):
            if is_wanted(one.topic):
                chosen.append(StoredRange(one, file, row))
            row += one.rows
        if needs is Needs.ALL:
            yield from _all(parquet, chosen)
        elif needs is Needs.LAST:
            yield from _lasts(parquet, chosen)
        else:
            yield from (_whole(one, b"") for one in chosen)


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


def _whole(one: StoredRange, records: bytes) -> Piece:
    topic, epoch, offset, end, ordinal, end_ordinal, *_ = one.range
    return Piece(topic, epoch, offset, end, ordinal, end_ordinal, records)


def _end(one: StoredRange) -> int:
    """Return the number of the row after the last one."""
    return one.row + one.range.rows


def _groups(
    file: pq.ParquetFile, chosen: Sequence[StoredRange], *, lasts: bool = False
) -> Iterator[tuple[int, list[StoredRange], pa.BinaryArray]]:
    """Yield the first row, the chosen ranges and the payloads of each row group with rows of such ranges.

    With `lasts`, a range is only in the row group of its last row.
    """
    begin = 0
    for number in range(file.metadata.num_row_groups):
        end = begin + file.metadata.row_group(number).num_rows
        some = [
            one
            for one in chosen
            if begin < _end(one) and (_end(one) <= end if lasts else one.row < end)
        ]
        if some:
            table = file.read_row_group(number, columns=["payload"], use_threads=False)
            yield begin, some, table["payload"].combine_chunks()
        begin = end


def _lasts(file: pq.ParquetFile, chosen: Sequence[StoredRange]) -> Iterator[Piece]:
    for begin, some, payloads in _groups(file, chosen, lasts=True):
        rows = pa.array([_end(one) - 1 - begin for one in some])
        for one, payload in zip(some, payloads.take(rows).to_pylist(), strict=True):
            is_last = is_message(one.range.topic, payload)
            yield _whole(one, _record(payload) if is_last else _last_before(one))


def _record(payload: bytes) -> bytes:
    return len(payload).to_bytes(RECORD_HEADER_BYTES) + payload


def _last_before(one: StoredRange) -> bytes:
    """Return the last message of a range whose last record is not a message, which no server writes."""
    found = b""
    for batch in read_piece(one):
        for payload in batch["payload"].to_pylist():
            found = _record(payload) if is_message(one.range.topic, payload) else found
    return found


def _all(file: pq.ParquetFile, chosen: Sequence[StoredRange]) -> Iterator[Piece]:
    offset = 0
    for begin, some, payloads in _groups(file, chosen):
        sizes = pc.binary_length(payloads).to_numpy(zero_copy_only=False).astype(np.int64)
        boundaries = [0, *np.cumsum(sizes + RECORD_HEADER_BYTES).tolist()]
        records = records_of(payloads)
        for one in some:
            first, last = max(one.row, begin), min(_end(one), begin + len(payloads))
            if first == one.row:
                offset = one.range.offset  # else the range continues where the last row group ended
            places = boundaries[first - begin : last - begin + 1]
            ordinal = one.range.ordinal + first - one.row
            yield from _cut(one.range.topic, one.range.epoch, offset, ordinal, records, places)
            offset += places[-1] - places[0]


def _cut(
    topic: str,
    epoch: int,
    offset: int,
    ordinal: int,
    records: memoryview,
    boundaries: Sequence[int],
) -> Iterator[Piece]:
    """Cut adjacent records, which have these boundaries in `records`, into pieces for one letter each."""
    first, count = 0, len(boundaries) - 1
    moved = offset - boundaries[0]
    while first < count:
        most = min(count, first + _PIECE_RECORDS_MAX)
        size_max = boundaries[first] + _PIECE_BYTES_MAX
        last = max(bisect_right(boundaries, size_max, first + 1, most + 1) - 1, first + 1)
        yield Piece(
            topic=topic,
            epoch=epoch,
            offset=moved + boundaries[first],
            end=moved + boundaries[last],
            ordinal=ordinal + first,
            end_ordinal=ordinal + last,
            records=bytes(records[boundaries[first] : boundaries[last]]),
        )
        first = last


# Pieces of the log


def _of_stretch(found: DecodedRecords, needs: Needs) -> Iterator[Piece]:
    part, data = found.parts[found.which[0]], found.bytes
    topic, epoch = part.topic, part.end.epoch
    offset, ordinal = int(found.offsets[0]), int(found.ordinals[0])
    if needs is Needs.ALL:
        places = (found.boundaries - found.boundaries[0]).tolist()
        yield from _cut(topic, epoch, offset, ordinal, data, places)
    else:
        records = _last_in(topic, found) if needs is Needs.LAST else b""
        end_ordinal = ordinal + found.record_count
        yield Piece(topic, epoch, offset, offset + len(data), ordinal, end_ordinal, records)


def _last_in(topic: str, found: DecodedRecords) -> bytes:
    """Return a copy of the last record that is a message, or nothing."""
    boundaries = found.boundaries
    for row in reversed(range(found.record_count)):
        record = bytes(found.data[boundaries[row] : boundaries[row + 1]])
        if is_message(topic, record[RECORD_HEADER_BYTES:]):
            return record
    return b""


def is_message(topic: str, payload: bytes) -> bool:
    return not topic.startswith(CHANNEL_PREFIX) or message_of(topic, payload, 0) is not None


# Pieces → states by bucket


def fold_bucket(run: FoldRun, place: int, letters: Letters) -> Letters:
    """Fold the pieces in `letters`; yield a `FoldedBucket` as a letter if a state has changed."""
    bucket = run.buckets.changed[place]
    wanted = load_reducer(run.reducer, run.directory)
    old = [run.into.file(path) for path in run.old.get(bucket, ())]
    before: dict[str, FoldedState] = {}
    changed: list[str] = []
    messages = incomplete = failed = 0
    first = ""
    with StatesWriter(run.into, name_of(run.number, bucket, run.buckets.total)) as writer:
        for topic, some in groupby(letters, topic_of):
            if not topic:  # the announced topics come first
                epochs = {one.data[8:].decode(): int.from_bytes(one.data[:8]) for one in some}
                rows = (row for file in old for row in read_states(file, SCHEMA.names, epochs))
                states = (FoldedState(**row) for row in rows)
                before = {one.topic: one for one in states if one.epoch >= epochs[one.topic]}
                continue
            state = fold(topic, map(piece_of, some), wanted, before.get(topic))
            if state == before.get(topic):
                continue
            writer.add(state._asdict())
            changed.append(topic)
            messages += state.messages
            incomplete += not state.complete
            if state.error is not None:
                failed += 1
                first = first or f"topic {topic!r}: {state.error}"
        if not changed:
            return
        for file in old:
            writer.copy(file, without=changed)
        run.points.here("folding")
        totals = Totals(len(changed), messages, incomplete, failed, first)
        folded = FoldedBucket(bucket, writer.finish(), totals)
    yield Letter(0, b"", pickle.dumps(folded))
