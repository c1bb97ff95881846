"""What tasks of an aggregation do: pieces of lake and log → staged by topic; what is staged → states.

Staged files are of Arrow's IPC format, one per task: every batch in it is of one bucket of topics, every row
a piece. They count for nobody but the run that they are of.
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

from headrace.lake.format import LakeError, Range, ranges_in
from headrace.lake.states import StatesFile, StatesWriter, name_of
from headrace.model import CHANNEL_PREFIX, RECORD_HEADER_BYTES
from headrace.pipeline.fold import (
    Needs,
    Piece,
    State,
    bucket_of,
    fold,
    load_reducer,
    needs_of,
    reads,
)
from headrace.pipeline.points import Points
from headrace.pipeline.staging import Batches, Places, StagedFile, read_staged
from headrace.spark.decode import Records, decode
from headrace.spark.log_view import DataLossError, LogView
from headrace.spark.log_view import Range as LogRange
from headrace.spark.open_log import open_log
from headrace.spark.options import Place, Topics

logger = logging.getLogger(__name__)

_STAGED_BYTES = 64 << 20
"""So much is gathered in memory before it is written."""

_FOLDED_AT_ONCE = 8192
"""Messages that are objects of Python at the same time."""

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


class StageWork(NamedTuple):
    staging: str
    task: int
    reducer: str
    buckets: int
    topics: Topics
    lake: str
    files: list[str]
    place: Place
    ranges: list[LogRange]
    """Of the log; a work has these or files of the lake."""
    points: Points


class Staged(NamedTuple):
    path: str
    batches: Batches
    """By bucket."""


class _Found(NamedTuple):
    """A piece, before its payloads are objects of Python."""

    topic: str
    epoch: int
    offset: int
    end: int
    ordinal: int
    end_ordinal: int
    payloads: pa.BinaryArray


def stage(work: StageWork) -> Staged:
    needs = needs_of(work.reducer)
    with StagedFile(work.staging, f"{work.task:06}", PIECES) as file:
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
    return Staged(file.path, file.batches)


class _Stage:
    def __init__(self, file: StagedFile, buckets: int, needs: Needs) -> None:
        self._file, self._buckets, self._needs = file, buckets, needs
        self._open: dict[str, _Found] = {}
        """What may go on, where not all payloads are needed: a topic of many short ranges is one piece."""
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
        """Have all written that was added."""
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


# Of the lake


def _of_file(path: Path, topics: Topics, needs: Needs) -> Iterator[_Found]:
    """Footers say which rows are of which topic: rows that nobody needs are not read."""
    with _readable(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        chosen: list[tuple[Range, int]] = []
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
        raise LakeError(f"{path} is missing, which the table names: restore it") from None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise LakeError(
            f"{path} cannot be read: {error}; run `headrace pipeline audit` for the whole picture"
        ) from None


def _whole(one: Range, payloads: pa.BinaryArray) -> _Found:
    return _Found(one.topic, one.epoch, one.offset, one.end, one.ordinal, one.end_ordinal, payloads)


def _groups(file: pq.ParquetFile) -> Iterator[tuple[int, int, int]]:
    """Number, first row and the row behind the last of each row group."""
    begin = 0
    for number in range(file.metadata.num_row_groups):
        end = begin + file.metadata.row_group(number).num_rows
        yield number, begin, end
        begin = end


def _payloads(file: pq.ParquetFile, group: int) -> pa.BinaryArray:
    column = file.read_row_group(group, columns=["payload"], use_threads=False)["payload"]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _lasts(file: pq.ParquetFile, chosen: Sequence[tuple[Range, int]]) -> Iterator[_Found]:
    wanted = np.array([row + one.rows - 1 for one, row in chosen], np.int64)
    for number, begin, end in _groups(file):
        first, last = np.searchsorted(wanted, (begin, end))
        if first == last:
            continue  # no topic ends in it
        payloads = _payloads(file, number)
        found = payloads.take(pa.array(wanted[first:last] - begin))
        for place, (one, row) in enumerate(chosen[first:last]):
            payload = found.slice(place, 1)
            if not is_message(one.topic, payload):
                payload = _last_before(file, one, row)
            yield _whole(one, payload)


def _last_before(file: pq.ParquetFile, one: Range, row: int) -> pa.BinaryArray:
    """What the last message is where the last record is none, which no server writes."""
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


def _all(file: pq.ParquetFile, chosen: Sequence[tuple[Range, int]]) -> Iterator[_Found]:
    rows = np.array([row for _, row in chosen], np.int64)
    ends = rows + np.array([one.rows for one, _ in chosen], np.int64)
    at: dict[int, int] = {}
    """Where ranges go on that do not end in a row group."""
    for number, begin, end in _groups(file):
        first = int(np.searchsorted(ends, begin, "right"))
        last = int(np.searchsorted(rows, end))
        if first >= last:
            continue
        lefts = np.maximum(rows[first:last], begin) - begin
        counts = np.minimum(ends[first:last], end) - begin - lefts
        # Without the others, or all of them would stay in memory for a few.
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
                *(one.topic, one.epoch, offset, at[index], ordinal, ordinal + count),
                payloads.slice(row, count),
            )
            row += count


# Of the log


def _of_log(log: LogView, part: LogRange, needs: Needs) -> Iterator[_Found]:
    """As the server folds it: what is damaged or gone meanwhile is left out, and seen by its ordinals."""
    rest: LogRange | None = part
    while rest is not None:
        try:
            for records in decode(rest, log.read(rest), verify=False):
                yield _Found(
                    *(records.topic, records.epoch),
                    *(int(records.boundaries[0]), int(records.boundaries[-1])),
                    *(records.ordinal, records.ordinal + records.record_count),
                    _needed(records, needs),
                )
            return
        except DataLossError as loss:
            logger.warning("%s; these records are left out", loss)
            rest = loss.rest


def _needed(records: Records, needs: Needs) -> pa.BinaryArray:
    if needs is Needs.NONE:
        return NO_PAYLOADS
    if needs is Needs.ALL:
        return records.payloads()
    return last_message(records.topic, records.record_count, partial(_one, records))


def _one(records: Records, index: int) -> pa.BinaryArray:
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
    """Where functions of the application are looked for."""
    staged: Places
    points: Points


class Folded(NamedTuple):
    file: StatesFile | None
    topics: int = 0
    messages: int = 0
    incomplete: int = 0
    failed: int = 0
    first_failure: str = ""


def fold_bucket(work: FoldWork) -> Folded:
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
        return Folded(writer.finish(), topics, messages, incomplete, failed, first)


def row_of(state: State, reducer: str) -> dict[str, Any]:
    """As a table of states has it."""
    row = state._asdict()
    content = row.pop("content")
    return row | {"reducer": reducer, "state": content.data, "is_json": content.is_json}


class _Batch(NamedTuple):
    """Pieces that were staged together; their payloads stay where they are."""

    topics: list[str]
    places: list[tuple[int, ...]]
    firsts: list[int]
    """The first payload of each among all of them, and the one behind the last."""
    payloads: pa.BinaryArray


def _batch(staged: pa.RecordBatch) -> _Batch:
    places = zip(*(staged[name].to_pylist() for name in _NUMBERS), strict=True)
    lists = staged["payloads"]
    return _Batch(
        *(staged["topic"].to_pylist(), list(places)),
        *(lists.offsets.to_pylist(), lists.values),
    )


def _in_order(batches: Sequence[_Batch]) -> list[tuple[str, int, int, int]]:
    """Topic, offset, batch and row of every piece."""
    return sorted(
        (topic, place[1], number, row)
        for number, batch in enumerate(batches)
        for row, (topic, place) in enumerate(zip(batch.topics, batch.places, strict=True))
    )


def _pieces(batch: _Batch, row: int) -> Iterator[Piece]:
    epoch, offset, end, ordinal, end_ordinal = batch.places[row]
    first, last = batch.firsts[row : row + 2]
    if last - first < end_ordinal - ordinal or last - first <= _FOLDED_AT_ONCE:
        payloads: list[Any] = batch.payloads.slice(first, last - first).to_pylist()
        yield Piece(epoch, offset, end, ordinal, end_ordinal, payloads)
        return
    while first < last:
        payloads = batch.payloads.slice(first, min(_FOLDED_AT_ONCE, last - first)).to_pylist()
        end = offset + sum(map(len, payloads)) + len(payloads) * RECORD_HEADER_BYTES
        yield Piece(epoch, offset, end, ordinal, ordinal + len(payloads), payloads)
        first, offset, ordinal = first + len(payloads), end, ordinal + len(payloads)
