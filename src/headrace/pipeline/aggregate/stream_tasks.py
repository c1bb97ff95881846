"""Tasks of a streaming aggregation: records → pieces, pieces → states, states → files.

    source ─▶ pieces ─▶ by topic ─▶ Folding ─▶ by bucket ─▶ merging

The query's state store holds the state of each topic. The table's states are loaded into it first.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from headrace.lake.states import merge_states, name_of, read_batches
from headrace.payload.channel import Content
from headrace.pipeline.aggregate.fold import (
    FoldedState,
    FoldPiece,
    Needs,
    bucket_of,
    fold,
    load_reducer,
)
from headrace.pipeline.aggregate.tasks import NO_PAYLOADS, PIECES, last_message, row_of

Batches = Iterator[pa.RecordBatch]

RECORD_COLUMNS = "topic string, epoch long, offset long, next_offset long, ordinal long"
PIECE_COLUMNS = (
    "topic string, epoch long, offset long, end long, ordinal long, end_ordinal long, "
    "payloads array<binary>"
)
STATE_COLUMNS = (
    "topic string, epoch long, offset long, ordinal long, messages long, reducer string, state binary, "
    "is_json boolean, complete boolean, error string"
)
MERGED_COLUMNS = "bucket int, path string, bytes long, rows long, changed long"

_KEPT_COLUMNS = STATE_COLUMNS.removeprefix("topic string, ").replace("reducer string, ", "")


# Records → pieces


def pieces(needs: Needs) -> Callable[[Batches], Batches]:
    """Return a function that joins records into pieces.

    A processor gets its rows one by one, so each topic should have few.
    """

    def make(batches: Batches) -> Batches:
        return (_pieces_of(batch, needs) for batch in batches if batch.num_rows)

    return make


def _pieces_of(batch: pa.RecordBatch, needs: Needs) -> pa.RecordBatch:
    topics = batch["topic"]
    epochs, ordinals = batch["epoch"].to_numpy(), batch["ordinal"].to_numpy()
    is_first = np.ones(batch.num_rows, bool)
    is_first[1:] = (np.diff(ordinals) != 1) | (np.diff(epochs) != 0)
    is_first[1:] |= pc.not_equal(topics[1:], topics[:-1]).to_numpy(zero_copy_only=False)
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], batch.num_rows) - 1
    columns = [
        topics.take(pa.array(firsts)),
        *(pa.array(epochs[firsts]), batch["offset"].take(pa.array(firsts))),
        batch["next_offset"].take(pa.array(lasts)),
        *(pa.array(ordinals[firsts]), pa.array(ordinals[lasts] + 1)),
    ]
    payloads = _payloads(batch, columns[0].to_pylist(), firsts.tolist(), lasts.tolist(), needs)
    return pa.RecordBatch.from_arrays([*columns, payloads], schema=PIECES)


def _payloads(
    batch: pa.RecordBatch, topics: list[str], firsts: list[int], lasts: list[int], needs: Needs
) -> pa.ListArray:
    if needs is Needs.ALL:
        ends = pa.array([*firsts, batch.num_rows], pa.int32())
        return pa.ListArray.from_arrays(ends, batch["payload"])
    found = [
        last_message(topic, last + 1 - first, partial(_one, batch["payload"], first))
        if needs is Needs.LAST
        else NO_PAYLOADS
        for topic, first, last in zip(topics, firsts, lasts, strict=True)
    ]
    ends = np.cumsum([0, *map(len, found)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.concat_arrays(found))


def _one(payloads: pa.BinaryArray, first: int, index: int) -> pa.BinaryArray:
    return payloads.slice(first + index, 1)


# Pieces → states


def states_of(into: str, files: list[str]) -> Callable[[Batches], Batches]:
    """Return a function that reads the states of a table; its input are numbers of files."""

    def read(numbers: Batches) -> Batches:
        for some in numbers:
            for number in some["id"].to_pylist():
                yield from read_batches(Path(into, files[number]))

    return read


class Folding(StatefulProcessor):
    """Folds the pieces of one topic at a time onto its state. The pieces arrive in any order."""

    def __init__(self, reducer: str, directory: str, buckets: int) -> None:
        self._name, self._directory, self._buckets = reducer, directory, buckets

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._reducer = load_reducer(self._name, self._directory)
        self._kept = handle.getValueState("state", _KEPT_COLUMNS)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._keep(initialState.asDict())

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        [topic] = key
        found = [FoldPiece(*row[1:]) for row in rows]
        found.sort(key=lambda piece: (piece.epoch, piece.offset))
        before = self._before(topic)
        state = fold(topic, found, self._reducer, before)
        if state != before:
            row = row_of(state, self._reducer.name)
            self._keep(row)
            yield Row(bucket=bucket_of(topic, self._buckets), **row)

    def close(self) -> None: ...

    def _before(self, topic: str) -> FoldedState | None:
        kept = self._kept.get()
        if kept is None:
            return None
        epoch, offset, ordinal, messages, data, is_json, complete, error = kept
        content = Content(bytes(data), is_json)
        return FoldedState(topic, epoch, offset, ordinal, messages, content, complete, error)

    def _keep(self, row: dict[str, Any]) -> None:
        # The order must be that of `_KEPT_COLUMNS`.
        names = ("epoch", "offset", "ordinal", "messages", "state", "is_json", "complete", "error")
        self._kept.update(tuple(row[name] for name in names))


# States → files


def merging(
    into: str, number: int, buckets: int, files: dict[int, list[str]]
) -> Callable[[tuple[pa.Scalar, ...], Batches], Batches]:
    """Return a function that writes the new file of a changed bucket; its input are the changed states."""

    # These annotations tell Spark to pass batches and not a whole table.
    def merge(
        key: tuple[pa.Scalar, ...], changed: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        bucket = key[0].as_py()
        name = name_of(number, bucket, buckets)
        made, count = merge_states(Path(into), name, files.get(bucket, ()), changed)
        found = {"bucket": bucket, **made._asdict(), "changed": count}
        yield pa.RecordBatch.from_pylist([found], _MERGED)

    return merge


_MERGED = pa.schema(
    [
        pa.field("bucket", pa.int32()),
        pa.field("path", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("bytes", "rows", "changed")),
    ]
)
