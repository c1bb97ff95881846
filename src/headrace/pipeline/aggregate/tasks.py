"""Tasks of an aggregation: stage pieces of lake and log by topic, and fold staged pieces into states.

Each task stages one file in Arrow's IPC format. Every batch in the file belongs to one bucket of topics, and
every row is a piece. Only the run that staged a file uses it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.format import LakeError, RecordRange, ranges_in
from headrace.lake.states import StatesFile, StatesWriter, name_of
from headrace.model import CHANNEL_PREFIX, RECORD_HEADER_BYTES
from headrace.pipeline.aggregate.fold import (
    FoldedState,
    FoldPiece,
    Needs,
    bucket_of,
    fold,
    load_reducer,
    needs_of,
    reads,
)
from headrace.pipeline.job import Points
from headrace.pipeline.tasks import Batches, Places, WorkFile, read_staged
from headrace.reader.decode import DecodedRecords, decode
from headrace.reader.planning import TopicSelection
from headrace.reader.view import DataLossError, LogLocation, LogView, open_log
from headrace.reader.view import LogRange as LogRange

logger = logging.getLogger(__name__)

_STAGED_BYTES = 64 << 20
"""Number of bytes that are collected in memory before they are written."""

_FOLDED_AT_ONCE = 8192
"""Number of messages that are Python objects at the same time."""

_NUMBERS = ("epoch", "offset", "end", "ordinal", "end_ordinal")
PIECES = pa.schema(
    [
        pa.field("topic", pa.string(), False),
        *(pa.field(name, pa.int64(), False) for name in _NUMBERS),
        pa.field("payloads", pa.list_(pa.binary()), False),
    ]
)
NO_PAYLOADS = pa.array([], pa.binary())


# From lake and log to staged pieces


class AggregateStageWork(NamedTuple):
    staging: str
    task: int
    reducer: str
    buckets: int
    topics: TopicSelection
    lake: str
    files: list[str]
    place: LogLocation
    ranges: list[LogRange]
    """Ranges of the log; a work has either ranges or files of the lake."""
    points: Points


class AggregateStaged(NamedTuple):
    path: str
    batches: Batches
    """Batches of the file, by bucket."""


class _Found(NamedTuple):
    """Piece whose payloads are not yet Python objects."""

    topic: str
    epoch: int
    offset: int
    end: int
    ordinal: int
    end_ordinal: int
    payloads: pa.BinaryArray


def stage(work: AggregateStageWork) -> AggregateStaged:
    needs = needs_of(work.reducer)
    with WorkFile(work.staging, f"{work.task:06}", PIECES) as file:
        staged = _Stage(file, work.buckets, needs)
        for name in work.files:
            for found in _of_file(Path(work.lake, name), work.topics, needs):
                staged.add(found)
        if work.ranges:
            with closing(open_log(work.place)) as log:
                log.expect(work.ranges)
                for part in work.ranges:
                    for found in _of_log(log, part, needs):
                        staged.add(found)
        staged.finish()
        work.points.here("staging")
    return AggregateStaged(file.path, file.batches)


class _Stage:
    def __init__(self, file: WorkFile, buckets: int, needs: Needs) -> None:
        self._file, self._buckets, self._needs = file, buckets, needs
        self._open: dict[str, _Found] = {}
        """Pieces that may grow if not all payloads are needed: a topic's short ranges become one piece."""
        self._gathered: dict[int, list[_Found]] = {}
        self._bytes = 0

    def add(self, found: _Found) -> None:
        if self._needs is Needs.ALL:
            self._bytes += found.end - found.offset
            self._gather(found)
        else:
            self._bytes += found.payloads.nbytes
            before = self._open.get(found.topic)
            if before is not None and before.end_ordinal == found.ordinal:
                payloads = found.payloads if len(found.payloads) else before.payloads
                found = found._replace(
                    offset=before.offset, ordinal=before.ordinal, payloads=payloads
                )
            elif before is not None:
                self._gather(before)
            self._open[found.topic] = found
        if self._bytes >= _STAGED_BYTES:
            self.finish()

    def _gather(self, found: _Found) -> None:
        self._gathered.setdefault(bucket_of(found.topic, self._buckets), []).append(found)

    def finish(self) -> None:
        """Write everything that was added."""
        for found in self._open.values():
            self._gather(found)
        self._open.clear()
        for bucket, pieces in self._gathered.items():
            counts = np.fromiter((len(one.payloads) for one in pieces), np.int32, len(pieces))
            places = np.zeros(len(pieces) + 1, np.int32)
            np.cumsum(counts, out=places[1:])
            lists = pa.ListArray.from_arrays(
                pa.array(places, pa.int32()), pa.concat_arrays([one.payloads for one in pieces])
            )
            columns = list(zip(*(one[:-1] for one in pieces), strict=True))
            arrays = [
                pa.array(values, field.type) for values, field in zip(columns, PIECES, strict=False)
            ]
            self._file.add(bucket, pa.RecordBatch.from_arrays([*arrays, lists], schema=PIECES))
        self._gathered, self._bytes = {}, 0


# Pieces of the lake


def _of_file(path: Path, topics: TopicSelection, needs: Needs) -> Iterator[_Found]:
    """Yield pieces of the chosen topics. The footer names the rows of each topic: others are not read."""
    with _readable(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        chosen: list[tuple[RecordRange, int]] = []
        row = 0
        for one in ranges_in(file.metadata):
            if topics.matches(one.topic):
                chosen.append((one, row))
            row += one.rows
        if needs is Needs.NONE:
            for one, _ in chosen:
                yield _whole(one, NO_PAYLOADS)
        elif needs is Needs.LAST:
            yield from _lasts(file, chosen)
        else:
            yield from _all(file, chosen)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise LakeError(f"{path} is missing, but the table names it: restore it") from None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise LakeError(
            f"{path} cannot be read: {error}; run `headrace pipeline audit` to find all damage"
        ) from None


def _whole(one: RecordRange, payloads: pa.BinaryArray) -> _Found:
    return _Found(
        topic=one.topic,
        epoch=one.epoch,
        offset=one.offset,
        end=one.end,
        ordinal=one.ordinal,
        end_ordinal=one.end_ordinal,
        payloads=payloads,
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


def _lasts(file: pq.ParquetFile, chosen: Sequence[tuple[RecordRange, int]]) -> Iterator[_Found]:
    wanted = np.array([row + one.rows - 1 for one, row in chosen], np.int64)
    for number, begin, end in _groups(file):
        first, last = np.searchsorted(wanted, (begin, end))
        if first == last:
            continue  # no topic ends in this row group
        payloads = _payloads(file, number)
        found = payloads.take(pa.array(wanted[first:last] - begin))
        for place, (one, row) in enumerate(chosen[first:last]):
            payload = found.slice(place, 1)
            if not is_message(one.topic, payload):
                payload = _last_before(file, one, row)
            yield _whole(one, payload)


def _last_before(file: pq.ParquetFile, one: RecordRange, row: int) -> pa.BinaryArray:
    """Return the last message of a range whose last record is not a message, which no server writes."""
    for number, begin, end in reversed(list(_groups(file))):
        if begin < row + one.rows and row < end:
            payloads = _payloads(file, number)
            some = payloads.slice(max(row - begin, 0), min(row + one.rows, end) - max(row, begin))
            found = last_message(one.topic, len(some), partial(_slice, some))
            if len(found):
                return found
    return NO_PAYLOADS


def _slice(payloads: pa.BinaryArray, index: int) -> pa.BinaryArray:
    return payloads.slice(index, 1)


def _all(file: pq.ParquetFile, chosen: Sequence[tuple[RecordRange, int]]) -> Iterator[_Found]:
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
        # Copy only the chosen payloads, otherwise a few of them would keep the whole row group in memory.
        places = np.repeat(lefts - (np.cumsum(counts) - counts), counts)
        payloads = _payloads(file, number).take(pa.array(places + np.arange(len(places))))
        sizes = pc.binary_length(payloads).to_numpy(zero_copy_only=False).astype(np.int64)
        sums = np.concatenate(([0], np.cumsum(sizes + RECORD_HEADER_BYTES))).tolist()
        row = 0
        for index, left, count in zip(
            range(first, last), lefts.tolist(), counts.tolist(), strict=True
        ):
            one, begins = chosen[index]
            offset = at.get(index, one.offset)
            at[index] = offset + sums[row + count] - sums[row]
            ordinal = one.ordinal + begin + left - begins
            yield _Found(
                topic=one.topic,
                epoch=one.epoch,
                offset=offset,
                end=at[index],
                ordinal=ordinal,
                end_ordinal=ordinal + count,
                payloads=payloads.slice(row, count),
            )
            row += count


# Pieces of the log


def _of_log(log: LogView, part: LogRange, needs: Needs) -> Iterator[_Found]:
    """Yield pieces of the log.

    Like the server, this skips records that are damaged or deleted meanwhile, and the ordinals show the gap.
    """
    rest: LogRange | None = part
    while rest is not None:
        try:
            for records in decode(rest, log.read(rest), verify=False):
                yield _Found(
                    topic=records.topic,
                    epoch=records.epoch,
                    offset=int(records.boundaries[0]),
                    end=int(records.boundaries[-1]),
                    ordinal=records.ordinal,
                    end_ordinal=records.ordinal + records.record_count,
                    payloads=_needed(records, needs),
                )
            return
        except DataLossError as loss:
            logger.warning("%s; the job continues without these records", loss)
            rest = loss.rest


def _needed(records: DecodedRecords, needs: Needs) -> pa.BinaryArray:
    if needs is Needs.NONE:
        return NO_PAYLOADS
    if needs is Needs.ALL:
        return records.payloads()
    return last_message(records.topic, records.record_count, partial(_one, records))


def _one(records: DecodedRecords, index: int) -> pa.BinaryArray:
    return records._replace(boundaries=records.boundaries[index : index + 2]).payloads()


def last_message(
    topic: str, count: int, payload: Callable[[int], pa.BinaryArray]
) -> pa.BinaryArray:
    for index in reversed(range(count)):
        one = payload(index)
        if is_message(topic, one):
            return one
    return NO_PAYLOADS


def is_message(topic: str, payload: pa.BinaryArray) -> bool:
    if not topic.startswith(CHANNEL_PREFIX):
        return True
    return reads(topic)(payload[0].as_py(), 0) is not None


# From staged pieces to states


class FoldWork(NamedTuple):
    into: str
    number: int
    bucket: int
    buckets: int
    reducer: str
    directory: str
    """Directory with the application's own reducer functions."""
    staged: Places
    points: Points


class FoldedTopics(NamedTuple):
    file: StatesFile | None
    topics: int = 0
    messages: int = 0
    incomplete: int = 0
    failed: int = 0
    first_failure: str = ""


def fold_bucket(work: FoldWork) -> FoldedTopics:
    wanted = load_reducer(work.reducer, work.directory)
    name = name_of(work.number, work.bucket, work.buckets)
    with ExitStack() as stack:
        batches = [_batch(one) for one in read_staged(stack, work.staged)]
        writer = StatesWriter(Path(work.into), name)
        topics = messages = incomplete = failed = 0
        first = ""
        for topic, rows in groupby(_in_order(batches), key=itemgetter(0)):
            pieces = (piece for _, _, batch, row in rows for piece in _pieces(batches[batch], row))
            state = fold(topic, pieces, wanted)
            writer.add(row_of(state, wanted.name))
            topics += 1
            messages += state.messages
            incomplete += not state.complete
            if state.error is not None:
                failed += 1
                first = first or f"topic {topic!r}: {state.error}"
        work.points.here("folding")
        return FoldedTopics(
            file=writer.finish(),
            topics=topics,
            messages=messages,
            incomplete=incomplete,
            failed=failed,
            first_failure=first,
        )


def row_of(state: FoldedState, reducer: str) -> dict[str, Any]:
    """Return the state as a row of a table of states."""
    row = state._asdict()
    content = row.pop("content")
    return row | {"reducer": reducer, "state": content.data, "is_json": content.is_json}


class _Batch(NamedTuple):
    """Pieces that were staged together; their payloads stay in mapped memory."""

    topics: list[str]
    places: list[tuple[int, ...]]
    firsts: list[int]
    """Index of each piece's first payload in `payloads`, and the index after the last payload."""
    payloads: pa.BinaryArray


def _batch(staged: pa.RecordBatch) -> _Batch:
    places = zip(*(staged[name].to_pylist() for name in _NUMBERS), strict=True)
    lists = staged["payloads"]
    return _Batch(
        staged["topic"].to_pylist(),
        list(places),
        lists.offsets.to_pylist(),
        lists.values,
    )


def _in_order(batches: Sequence[_Batch]) -> list[tuple[str, int, int, int]]:
    """Return topic, offset, batch and row of every piece, sorted."""
    return sorted(
        (topic, place[1], number, row)
        for number, batch in enumerate(batches)
        for row, (topic, place) in enumerate(zip(batch.topics, batch.places, strict=True))
    )


def _pieces(batch: _Batch, row: int) -> Iterator[FoldPiece]:
    epoch, offset, end, ordinal, end_ordinal = batch.places[row]
    first, last = batch.firsts[row : row + 2]
    if last - first < end_ordinal - ordinal or last - first <= _FOLDED_AT_ONCE:
        payloads: list[Any] = batch.payloads.slice(first, last - first).to_pylist()
        yield FoldPiece(
            epoch=epoch,
            offset=offset,
            end=end,
            ordinal=ordinal,
            end_ordinal=end_ordinal,
            payloads=payloads,
        )
        return
    while first < last:
        payloads = batch.payloads.slice(first, min(_FOLDED_AT_ONCE, last - first)).to_pylist()
        end = offset + sum(map(len, payloads)) + len(payloads) * RECORD_HEADER_BYTES
        yield FoldPiece(
            epoch=epoch,
            offset=offset,
            end=end,
            ordinal=ordinal,
            end_ordinal=ordinal + len(payloads),
            payloads=payloads,
        )
        first, offset, ordinal = first + len(payloads), end, ordinal + len(payloads)
