"""Streaming reads: where a query begins, how far the next micro-batch goes, and what it would miss.

The checkpoint holds a position per topic with its epoch. Topics that come later join at their beginning. A
topic made anew goes on where the old one ended, so what lay between is counted by ordinals: no record is
missed without the query hearing of it, unless the user chose so.
"""

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from headrace.spark.log_view import DataLossError, LogView, TopicState
from headrace.spark.offsets import Offset, decode_offset, encode_offset
from headrace.spark.open_log import open_log
from headrace.spark.options import LATEST, SourceOptions, Where
from headrace.spark.planning import (
    Positions,
    check_kept,
    earlier,
    find_topics,
    gone_error,
    limit_bytes,
    limit_rows,
    locate,
    parts_of,
    ranges_between,
)
from headrace.spark.reader import Part, PartReader

IDLE_WAIT_S = 0.5
"""How long Spark's question for news is held when there is none: it asks again at once."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("headrace")`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._parts = PartReader(options, schema)
        self._log: LogView | None = None
        self._initial: Offset | None = None
        self._states: dict[str, TopicState] = {}
        self._idle: tuple[Offset, dict[str, TopicState]] | None = None
        """The last start that had nothing after it, and the topics then: Spark asks it again and again."""
        self._until: dict[str, TopicState] | None = None

    # What Spark asks in the driver

    def initialOffset(self) -> Offset:
        # Asked twice for the first batch: both answers must be the same.
        if self._initial is None:
            where = self._options.starting or Where(LATEST)
            states = find_topics(self._open(), self._options.topics)
            found = {
                name: locate(self._open(), state, where, self._options, LATEST)
                for name, state in states.items()
            }
            self._states = states
            self._initial = self._offset(found)
        return self._initial

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        if self._idle is not None and self._idle[0] == start:
            self._open().wait(IDLE_WAIT_S)
        states = find_topics(self._open(), self._options.topics)
        if self._idle == (start, states):
            return start
        begun = decode_offset(start)
        ends = self._ends(begun, states, limit)
        if ends != begun:
            return self._offset(ends)
        if self._until is None:
            self._idle = start, states
        return start

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset | None:
        if not self._states:
            return None
        return self._offset({name: state.end for name, state in self._states.items()})

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = find_topics(self._open(), self._options.topics)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        log, options = self._open(), self._options
        ends = decode_offset(end)
        states = find_topics(log, options.topics)
        begun = self._begin(decode_offset(start), states)
        # A topic that is not there now, but was when the batch was planned.
        begun |= {name: ends[name] for name in ends if name not in begun}
        self._check(begun, states, ends)
        begun = _kept(begun, states)
        return [Part(task) for task in parts_of(log, ranges_between(begun, ends), options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._parts.read(partition)

    def commit(self, end: Offset) -> None:
        """Nothing: the checkpoint holds the progress, and `track` tells the server of it."""

    def stop(self) -> None:
        if self._log is not None:
            self._log.close()

    # How far

    def _ends(self, start: Positions, states: dict[str, TopicState], limit: ReadLimit) -> Positions:
        self._check_vanished(start, states)
        self._states = states
        if self._until is not None:
            states = _until(states, self._until)
        begun = self._begin(start, states)
        self._check(begun, states, None)
        begun = _kept(begun, states)
        ends = begun | {name: state.end for name, state in states.items()}
        if isinstance(limit, ReadMinRows):
            backlog = sum(ends[name].ordinal - begun[name].ordinal for name in ends)
            return start if backlog < limit.min_rows and self._until is None else ends
        rows_max, bytes_max = self._options.rows_max, self._options.bytes_max
        if isinstance(limit, ReadAllAvailable):
            rows_max = bytes_max = None
        if rows_max is not None:
            ends |= limit_rows(self._open(), begun, states, rows_max)
        if bytes_max is not None:
            by_bytes = limit_bytes(self._open(), begun, states, bytes_max)
            ends = {name: earlier(ends[name], by_bytes.get(name, ends[name])) for name in ends}
        if all(ends[name].ordinal == begun[name].ordinal for name in ends) and set(begun) == set(
            start
        ):
            return start
        return ends

    def _begin(self, start: Positions, states: Mapping[str, TopicState]) -> Positions:
        """The start, with topics that have come since at their beginning."""
        return start | {name: state.start for name, state in states.items() if name not in start}

    def _check(
        self, start: Positions, states: Mapping[str, TopicState], ends: Positions | None
    ) -> None:
        if not self._options.fail_on_data_loss:
            return
        wanted = start if ends is None else {n: p for n, p in start.items() if p != ends.get(n)}
        gone = check_kept(wanted, states)
        if gone:
            raise DataLossError(gone_error(gone))
        for name, position in wanted.items():
            state = states.get(name)
            if state is not None and position.ordinal > state.end.ordinal:
                raise DataLossError(
                    f"topic {name!r} ends at ordinal {state.end.ordinal}, before the query's "
                    f"{position.ordinal}: this is another log than the checkpoint was made with"
                )

    def _check_vanished(self, start: Positions, states: Mapping[str, TopicState]) -> None:
        """A topic that was destroyed takes with it what the query has not read."""
        gone = {
            name: known.end.ordinal - start[name].ordinal
            for name, known in self._states.items()
            if name not in states and name in start and known.end.ordinal > start[name].ordinal
        }
        if gone and self._options.fail_on_data_loss:
            raise DataLossError(gone_error(gone, "it was destroyed"))

    def _offset(self, positions: Positions) -> Offset:
        return encode_offset(positions, self._options.group)

    def _open(self) -> LogView:
        if self._log is None:
            self._log = open_log(self._options.place)
        return self._log


def _kept(start: Positions, states: Mapping[str, TopicState]) -> Positions:
    """Positions that exist: where what came first is gone, the oldest that is kept."""
    return {
        name: states[name].start
        if name in states and position.ordinal < states[name].start.ordinal
        else position
        for name, position in start.items()
    }


def _until(
    states: Mapping[str, TopicState], until: Mapping[str, TopicState]
) -> dict[str, TopicState]:
    """The topics as far as they reached when the query began."""
    return {
        name: state._replace(end=earlier(state.end, until[name].end))
        for name, state in states.items()
        if name in until
    }
